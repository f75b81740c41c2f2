"""The MoE families of transformers that the adapter knows: module and tensor names, layouts, and how gates are made.

One `Family` per `model_type`. Knows the router and experts classes of each, and nothing of how they are wrapped.

Gates of given ids come from the live router logits exactly as the family makes them from its own choice:

    qwen3_moe, olmoe   softmax over all experts in fp32, divided by the sum of the k where `norm_topk_prob`
    mixtral            softmax over all experts in fp32, divided by the sum of the k, left in fp32
    deepseek_v3        sigmoid, divided by the sum of the k where `norm_topk_prob`, times `routed_scaling_factor`;
                       groups and the correction bias decide which experts are chosen, never the gates
    gpt_oss            softmax over the k chosen logits

Invariants (asserted by the tests):
1. For the ids a router chose itself, these gates have the same bits as its own, and so have their gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.core.errors import AdapterError
from equipoise.runtime.activation import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one `model_type` calls things, and how it makes gates."""

    router: str
    """Name of the router inside a MoE block; its forward returns (logits, gates, ids)."""
    gates: Callable[[Any, Tensor, Tensor], Tensor]
    """(router, logits_TE, ids_TK) -> gates_TK"""
    activation: Activation = "swiglu"
    is_transposed: bool = False
    """Weights are kept [E, in, out]; the runtime wants [E, out, in]."""
    tensors: tuple[str, ...] = ("gate_up_proj", "down_proj")
    """Parameters of the experts module, in the order of `ExpertWeights`."""


def _softmax_gates(router: Any, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    gates_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float).gather(1, ids_TK)
    if router.norm_topk_prob:
        gates_TK = gates_TK / gates_TK.sum(dim=-1, keepdim=True)
    return gates_TK.to(logits_TE.dtype)


def _mixtral_gates(router: Any, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    gates_TK = torch.softmax(logits_TE.float(), dim=-1).gather(1, ids_TK)
    return gates_TK / gates_TK.sum(dim=-1, keepdim=True)


def _deepseek_gates(router: Any, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    gates_TK = logits_TE.sigmoid().gather(1, ids_TK)
    if router.norm_topk_prob:
        gates_TK = gates_TK / (gates_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return gates_TK * router.routed_scaling_factor


def _gpt_oss_gates(router: Any, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    return torch.softmax(logits_TE.gather(1, ids_TK), dim=1, dtype=logits_TE.dtype)


FAMILIES: Mapping[str, Family] = {
    "qwen3_moe": Family(router="gate", gates=_softmax_gates),
    "olmoe": Family(router="gate", gates=_softmax_gates),
    "mixtral": Family(router="gate", gates=_mixtral_gates),
    "deepseek_v3": Family(router="gate", gates=_deepseek_gates),
    "gpt_oss": Family(
        router="router",
        gates=_gpt_oss_gates,
        activation="gpt_oss",
        is_transposed=True,
        tensors=("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
    ),
}


def family_of(model_type: str) -> Family:
    """Return the family, or an error listing the known ones."""
    if model_type not in FAMILIES:
        raise AdapterError(f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


@torch.no_grad()
def check_router(router: Any, family: Family, *, path: str, version: str) -> None:
    """Raise unless the gates made here have the same bits as the router's own, on a few made-up tokens."""
    weight = router.weight
    hidden_TD = torch.arange(4 * weight.shape[1], device=weight.device).sin().view(4, -1).to(weight.dtype)
    outputs = router.forward(hidden_TD)
    is_known = isinstance(outputs, tuple) and len(outputs) == 3
    if not is_known or not torch.equal(family.gates(router, outputs[0], outputs[2]), outputs[1]):
        raise AdapterError(
            f"`{path}` of transformers {version} makes its gates otherwise than this adapter was checked with; "
            "use transformers 5.17, or report the version"
        )
