"""A stack of attention and balanced MoE layers whose routes and weights are drawn, for benchmarks.

Knows torch and the balanced layer. Does not time anything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layer import build_layer, move_to_replicas, prepare_with_replicas
from benchmarks.plain_layer import Inputs, Shape
from equipoise.calibrate.bench import Bench
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Dispatch
from equipoise.layer.experts import BalancedExperts
from equipoise.transfer.engine import LayerTransfers
from equipoise.transfer.node import ExpertWeights

LAYERS = 4
SEQUENCE = 4096
HEADS = {"qwen3-30b-a3b": (32, 4, 128), "qwen3-235b-a22b": (64, 4, 128), "smoke": (4, 2, 8)}
"""Query heads, key-value heads, head width."""


class StackBank(LayerTransfers, Protocol):
    """A bank that counts the forwards through a stack."""

    def begin(self) -> None:
        """Note that a forward begins; its backward, if any, comes before the next."""
        ...


class HeldByLayer:
    """A bank that holds every layer's replicas on the device."""

    def __init__(self, replicas: list[ExpertWeights]) -> None:
        """
        Args:
            replicas: of each layer
        """
        self._replicas = replicas

    def begin(self) -> None:
        """Every forward is alike."""

    def wait_for(self, visit: Visit) -> None:
        """Home weights are there."""

    def joined(self, visit: Visit) -> None:
        """Replicas are apart from the homes."""

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return the layer's replicas."""
        return self._replicas[visit.layer]

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Drop the gradients."""

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Add nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One layer's projections and causal attention."""

    qkv_w: Tensor
    out_w: Tensor
    heads: tuple[int, int, int]

    @classmethod
    def random(cls, shape: Shape, bench: Bench) -> "Attention":
        """Draw the weights of a model's attention."""
        heads, kv_heads, width = HEADS[shape.name]
        qkv_w = bench.random((heads + 2 * kv_heads) * width, shape.hidden, scale=shape.hidden**-0.5)
        out_w = bench.random(shape.hidden, heads * width, scale=(heads * width) ** -0.5)
        return cls(qkv_w=qkv_w.requires_grad_(), out_w=out_w.requires_grad_(), heads=(heads, kv_heads, width))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Attend inside sequences of 4096 tokens."""
        heads, kv_heads, width = self.heads
        sequences = max(len(x_TD) // SEQUENCE, 1)
        parts = F.linear(x_TD, self.qkv_w).split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        q, k, v = (part.view(sequences, -1, part.shape[1] // width, width).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).reshape(len(x_TD), heads * width), self.out_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Decoder layers whose routes are given."""

    given: Inputs
    prepared: Dispatch
    attention: list[Attention] = field(default_factory=list)
    experts: list[BalancedExperts] = field(default_factory=list)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Everything that gets a gradient."""
        of_attention = (t for one in self.attention for t in (one.qkv_w, one.out_w))
        of_experts = (t for one in self.experts for t in one.home.tensors())
        return self.given.hidden_TD, self.given.gates_TK, *of_attention, *of_experts

    def forward_with(self, bank: StackBank) -> Callable[[], Tensor]:
        """The stack's forward with replicas from `bank`."""

        def forward() -> Tensor:
            bank.begin()
            x_TD = self.given.hidden_TD
            for number, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
                assert experts.window is not None, "layers follow a plan"
                experts.window.transfers = bank
                visit = Visit(0, "forward", number)
                home = experts.enter(visit)
                x_TD = x_TD + attention.forward(F.rms_norm(x_TD, x_TD.shape[1:]))
                rows = (F.rms_norm(x_TD, x_TD.shape[1:]), self.prepared.ids_TK, self.given.gates_TK)
                x_TD = x_TD + experts(*rows, visit, home=home, prepared=self.prepared)
            return x_TD

        return forward


def build_stack(shape: Shape, tokens: int, *, replicas: int, group: dist.ProcessGroup, bench: Bench) -> Stack:
    """A random stack; every layer has the same routes and its own weights."""
    given = Inputs.random(shape, tokens, bench)
    ids_TK = move_to_replicas(given.ids_TK, homes=shape.homes, replicas=replicas)
    stack = Stack(given=given, prepared=prepare_with_replicas(ids_TK, homes=shape.homes, replicas=replicas))
    bank = HeldByLayer([])
    for number in range(LAYERS):
        home = shape.weights(shape.homes, bench)
        stack.attention.append(Attention.random(shape, bench))
        stack.experts.append(build_layer(shape, given, home, group=group, transfers=bank, layer=number))
    return stack
