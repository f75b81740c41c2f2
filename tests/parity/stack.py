"""`SmallStack`: layers of an attention stand-in and balanced experts, and the same stack densely in float64.

Knows torch and the balanced layer. Does not know plans: whoever calls has begun a window.

Invariants (asserted by the tests):
1. Both forms compute the same function of the same weights and inputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core.plan import Visit
from equipoise.layer.experts import BalancedExperts, LayerOptions
from equipoise.transfer.node import ExpertWeights
from tests.layer.reference import dense_experts
from tests.parity.case import ParityCase


class Inputs(NamedTuple):
    """One micro-step of one rank."""

    hidden_TD: Tensor
    gates: list[Tensor]
    """By layer, [T, K]."""
    target_TD: Tensor
    ids: list[Tensor]
    """By layer, [T, K]."""

    def to(self, device: str) -> "Inputs":
        """The same on a device."""
        gates, ids = ([tensor.to(device) for tensor in tensors] for tensors in (self.gates, self.ids))
        return Inputs(self.hidden_TD.to(device), gates, self.target_TD.to(device), ids)


DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def all_weights(case: ParityCase, layer: int) -> tuple[Tensor, ExpertWeights]:
    """The attention stand-in [D, D] and all experts of a layer, logical order; on the CPU."""
    make = torch.Generator().manual_seed(1000 * case.seed + layer)

    def numbers(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=make) * scale).to(DTYPES[case.device])

    attention_DD = numbers(case.hidden, case.hidden, scale=0.1)
    gate_up = numbers(case.experts, 2 * case.width, case.hidden, scale=0.15)
    return attention_DD, ExpertWeights(gate_up, numbers(case.experts, case.hidden, case.width, scale=0.15))


def window_inputs(case: ParityCase, window: int, rank: int) -> list[Inputs]:
    """What a rank forwards in one window, by micro-step; on the CPU."""
    return [_inputs(case, (window, micro_step, rank), ids) for micro_step, ids in enumerate(case.routes(window, rank))]


def _inputs(case: ParityCase, place: tuple[int, int, int], ids: list[np.ndarray]) -> Inputs:
    rng = np.random.default_rng([case.seed, *place, 1])

    def numbers(width: int) -> Tensor:
        drawn = rng.standard_normal((len(ids[0]), width), dtype=np.float32)
        return torch.from_numpy(drawn).to(DTYPES[case.device])

    return Inputs(
        hidden_TD=numbers(case.hidden),
        gates=[numbers(case.top_k).sigmoid() for _ in ids],
        target_TD=numbers(case.hidden),
        ids=[torch.from_numpy(ids_TK) for ids_TK in ids],
    )


class Block(nn.Module):
    """One layer."""

    def __init__(self, case: ParityCase, layer: int, group: Any) -> None:
        super().__init__()
        attention_DD, weights = all_weights(case, layer)
        cut = slice(group.rank() * case.home_slots, (group.rank() + 1) * case.home_slots)
        owned = ExpertWeights(*(tensor[cut].clone().to(case.device) for tensor in weights.tensors()))
        self.attention = nn.Parameter(attention_DD.to(case.device))
        options = LayerOptions(is_deterministic=True, dispatch=case.dispatch, gates=case.gates)
        self.experts = BalancedExperts(owned, layer=layer, group=group, options=options)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, visit: Visit) -> Tensor:
        home = self.experts.enter(visit)
        x_TD = x_TD + torch.tanh(x_TD @ self.attention)
        out_TD: Tensor = x_TD + self.experts(x_TD, ids_TK, gates_TK, visit, home=home)
        return out_TD


class SmallStack(nn.Module):
    """All layers of a case, with this rank's experts."""

    def __init__(self, case: ParityCase, group: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(case, layer, group) for layer in range(case.layers))

    def forward(self, inputs: Inputs, micro_step: int) -> Tensor:
        x_TD = inputs.hidden_TD
        for layer, block in enumerate(self.blocks):
            x_TD = block(x_TD, inputs.ids[layer], inputs.gates[layer], Visit(micro_step, "forward", layer))
        return x_TD


def loss_of(out_TD: Tensor, target_TD: Tensor) -> Tensor:
    """The squared distance to the target, summed over tokens."""
    loss: Tensor = (out_TD - target_TD).square().sum() / out_TD.shape[1]
    return loss


def dense_gradients(case: ParityCase, window: int) -> list[Tensor]:
    """The experts' gradients of one window, in float64 and in one process: [E, ...] tensors, layer by layer."""
    layers = [all_weights(case, layer) for layer in range(case.layers)]
    attention = [attention_DD.double() for attention_DD, _ in layers]
    experts = [ExpertWeights(*(t.double().requires_grad_() for t in weights.tensors())) for _, weights in layers]
    for rank in range(case.ranks):
        for inputs in window_inputs(case, window, rank):
            out_TD = _dense_forward(inputs, attention, experts)
            loss_of(out_TD, inputs.target_TD.double()).backward()
    return [_gradient(tensor) for weights in experts for tensor in weights.tensors()]


def _dense_forward(inputs: Inputs, attention: Sequence[Tensor], experts: Sequence[ExpertWeights]) -> Tensor:
    x_TD = inputs.hidden_TD.double()
    for layer, weights in enumerate(experts):
        x_TD = x_TD + torch.tanh(x_TD @ attention[layer])
        gates_TK = inputs.gates[layer].double()
        x_TD = x_TD + dense_experts(x_TD, inputs.ids[layer], gates_TK, weights, activation="swiglu")
    return x_TD


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
