"""MoE layers without plans, what they are given, and a bank without engine: what the balanced layer is compared with.

Knows torch, and of the runtime the kernels that `fused_moe` shares with the balanced layer. Does not time anything.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.calibrate.bench import Bench
from equipoise.core import ModelShape
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Groups
from equipoise.layer.expert_block import BlockOptions, expert_block
from equipoise.layer.ops import combine_rows, reorder_rows, spread_rows
from equipoise.transfer.node import ExpertWeights

HOMES = 16
VISIT = Visit(0, "forward", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one layer of a rank looks like."""

    name: str
    hidden: int
    width: int
    top_k: int
    homes: int = HOMES

    @classmethod
    def of(cls, name: str) -> "Shape":
        """Take a model's experts, and one rank's share of them."""
        model = ModelShape.preset(name)
        return cls(name=name, hidden=model.hidden, width=model.expert_width, top_k=model.top_k)

    def weights(self, slots: int, bench: Bench) -> ExpertWeights:
        """Random weights of `slots` experts."""
        gate_up_SFD = bench.random(slots, 2 * self.width, self.hidden, scale=self.hidden**-0.5)
        return ExpertWeights(gate_up_SFD, bench.random(slots, self.hidden, self.width, scale=self.width**-0.5))


def smoke_shape() -> Shape:
    """A shape that a CPU runs in milliseconds."""
    return Shape(name="smoke", hidden=32, width=16, top_k=2, homes=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What every variant of a case gets."""

    hidden_TD: Tensor
    ids_TK: Tensor
    gates_TK: Tensor
    grad_TD: Tensor

    @classmethod
    def random(cls, shape: Shape, tokens: int, bench: Bench) -> "Inputs":
        """Distinct experts per token, the most popular about three times as often as the least."""
        share_E = torch.linspace(3, 1, shape.homes, device=bench.device).expand(tokens, -1)
        return cls(
            hidden_TD=bench.random(tokens, shape.hidden).requires_grad_(),
            ids_TK=torch.multinomial(share_E, shape.top_k),
            gates_TK=torch.rand((tokens, shape.top_k), device=bench.device).to(bench.dtype).requires_grad_(),
            grad_TD=bench.random(tokens, shape.hidden),
        )


class HeldBank:
    """A bank whose replicas are there already; gradients handed in go nowhere."""

    def __init__(self, replicas: ExpertWeights) -> None:
        self._replicas = replicas

    def wait_for(self, visit: Visit) -> None:
        """Home weights are there."""

    def joined(self, visit: Visit) -> ExpertWeights | None:
        """Replicas are apart from the homes."""
        return None

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return the replicas."""
        return self._replicas

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Drop the gradients."""

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Add nothing."""


class _Permute(torch.autograd.Function):
    """Rows in another order; both ways are gathers."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return rows_ND.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return grad_ND.index_select(0, inverse_N), None, None


class _Repeat(torch.autograd.Function):
    """Tokens to rows by expert; back as a gather and a sum."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.top_k = order_N.numel() // hidden_TD.shape[0]
        return hidden_TD.index_select(0, order_N // ctx.top_k)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return grad_ND.index_select(0, inverse_N).view(-1, ctx.top_k, grad_ND.shape[1]).sum(1), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Rows sorted by expert."""

    order_N: Tensor
    inverse_N: Tensor
    end_S: Tensor
    """[s] int32, where each expert's rows end."""
    same_N: Tensor
    """[N] 0, 1, 2, ...: the order in which a group of one receives rows; to gather by it costs as much as by any."""

    @classmethod
    def of(cls, ids_TK: Tensor, slots: int) -> "Order":
        """Sort, without waiting for the device."""
        ids_N = ids_TK.reshape(-1)
        order_N = torch.argsort(ids_N, stable=True)
        same_N, inverse_N = torch.arange(order_N.numel(), device=order_N.device), torch.empty_like(order_N)
        inverse_N[order_N] = same_N
        # Unlike bincount, histc does not wait.
        end_S = torch.histc(ids_N.float(), bins=slots, min=0, max=slots - 1).cumsum(0).to(torch.int32)
        return cls(order_N=order_N, inverse_N=inverse_N, end_S=end_S, same_N=same_N)


def plain_moe(given: Inputs, weights: ExpertWeights, *, is_parallel: bool = False) -> Tensor:
    """A MoE layer of torch ops, without plans."""
    order = Order.of(given.ids_TK, weights.num_slots)
    rows_ND = _Repeat.apply(given.hidden_TD, order.order_N, order.inverse_N)
    if is_parallel:
        rows_ND = _Permute.apply(rows_ND, order.same_N, order.same_N)
    gate_NF, up_NF = F.grouped_mm(rows_ND, weights.gate_up_SFD.transpose(1, 2), offs=order.end_S).chunk(2, dim=-1)
    out_ND = F.grouped_mm(F.silu(gate_NF) * up_NF, weights.down_SDF.transpose(1, 2), offs=order.end_S)
    if is_parallel:
        out_ND = _Permute.apply(out_ND, order.same_N, order.same_N)
    out_TKD = _Permute.apply(out_ND, order.inverse_N, order.order_N).view(*given.ids_TK.shape, -1)
    return (out_TKD * given.gates_TK[..., None]).sum(1)


def fused_moe(given: Inputs, weights: ExpertWeights, bank: HeldBank, *, is_parallel: bool = False) -> Tensor:
    """The same with the balanced layer's kernels; `bank` is empty."""
    order = Order.of(given.ids_TK, weights.num_slots)
    index_TK = order.inverse_N.view(given.ids_TK.shape)
    rows_ND = spread_rows(given.hidden_TD, token_N=order.order_N // given.ids_TK.shape[1], index_TK=index_TK)
    groups = Groups(
        home_end_S=order.end_S,
        replica_end_S=order.end_S[:0],
        num_home_rows=rows_ND.shape[0],
        num_replica_rows=0,
        num_replicas=0,
    )
    if is_parallel:
        rows_ND = reorder_rows(rows_ND, there_P=order.same_N, back_N=order.same_N)
    out_ND = expert_block(rows_ND, weights, groups=groups, transfers=bank, visit=VISIT, options=BlockOptions())
    if is_parallel:
        out_ND = reorder_rows(out_ND, there_P=order.same_N, back_N=order.same_N)
    return combine_rows(out_ND, given.gates_TK, index_TK=index_TK)
