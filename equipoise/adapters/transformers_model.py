"""`inspect` finds the MoE layers of a transformers model and what is unsupported; `Family` knows each model type.

Gates of given ids are computed from the live router logits exactly as the family computes them for its own choice:

    qwen3_moe, olmoe   softmax over all experts in fp32, divided by the sum of the k where `norm_topk_prob`
    mixtral            softmax over all experts in fp32, divided by the sum of the k, left in fp32
    deepseek_v3        sigmoid, divided by the sum of the k where `norm_topk_prob`, times `routed_scaling_factor`;
                       groups and the correction bias decide which experts are chosen, never the gates
    gpt_oss            softmax over the k chosen logits

To add a family, add an entry to `FAMILIES`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.adapters.wrappers import ADAPTED, has_adapters
from equipoise.core import ModelShape
from equipoise.core.errors import AdapterError
from equipoise.layer.expert_block import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one `model_type` calls things, and how it makes gates."""

    router: str
    """Name of the router inside a MoE block; its forward returns (logits, gates, ids)."""
    gates: Callable[[Any, Tensor, Tensor], Tensor]
    """(router, logits_TE, ids_TK) -> gates_TK"""
    activation: Activation = "swiglu"
    is_transposed: bool = False
    """Weights are kept [E, in, out]; `BalancedExperts` wants [E, out, in]."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayer:
    """One MoE layer, by module paths below the inspected model."""

    path: str
    """The decoder layer."""
    number: int
    """Global layer number, dense layers counted."""
    experts_path: str
    router_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the adapter found in a model."""

    family: str
    """The configuration's `model_type`."""
    shape: ModelShape
    base_path: str
    """The module that holds the decoder layers."""
    layers: tuple[FoundLayer, ...]
    """MoE layers in order."""
    unsupported: tuple[str, ...] = ()
    """Why experts cannot be balanced, one reason each; empty: they can."""


def inspect(model: nn.Module) -> Found:
    """Find the MoE layers of a transformers model, and say what is unsupported.

    Args:
        model: a model with or without a head; a family that is not known is an error, anything else a reason
    """
    if not hasattr(model, "config") or not hasattr(model, "base_model"):
        raise AdapterError(
            f"a {type(model).__name__} is no transformers model; give the PreTrainedModel itself, not a wrapper of it"
        )
    if hasattr(model, "get_base_model"):
        raise AdapterError(f"a {type(model).__name__} holds the model with its adapters; give get_base_model() of it")
    config = model.config.get_text_config()
    family, base = family_of(config.model_type), model.base_model
    if not hasattr(base, "layers"):
        raise AdapterError(f"`{type(base).__name__}` has no decoder layers; give the language model itself")
    base_path = next(path for path, module in model.named_modules() if module is base)
    layers = tuple(_find_layers(base, f"{base_path}." if base_path else "", family))
    if not layers:
        raise AdapterError(f"this {config.model_type} has no MoE layer: every decoder layer is dense")
    experts = [model.get_submodule(layer.experts_path) for layer in layers]
    shape = ModelShape.from_config(config.to_dict(), name=config.model_type).replace(
        layer_numbers=tuple(layer.number for layer in layers),
        hidden_layers=max(len(base.layers), layers[-1].number + 1),
        weight_bytes=next(experts[0].parameters()).element_size(),
    )
    return Found(
        family=config.model_type,
        shape=shape,
        base_path=base_path,
        layers=layers,
        unsupported=tuple(_model_reasons(model)) + tuple(_layer_reasons(model, layers, family)),
    )


def _find_layers(base: Any, prefix: str, family: Family) -> Iterator[FoundLayer]:
    for index, layer in enumerate(base.layers):
        for name, block in layer.named_children():
            if hasattr(block, "experts") and hasattr(block, family.router):
                path = f"{prefix}layers.{index}"
                yield FoundLayer(
                    path=path,
                    number=getattr(getattr(layer, "self_attn", None), "layer_idx", index),
                    experts_path=f"{path}.{name}.experts",
                    router_path=f"{path}.{name}.{family.router}",
                )


def _model_reasons(model: Any) -> Iterator[str]:
    if hasattr(model, "_orig_mod"):
        yield "the model is compiled; install on the model itself, without torch.compile"
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        yield "the model is quantized; load it without quantization_config"
    if getattr(model, "_tp_size", None) not in (None, 1) or getattr(model, "_device_mesh", None) is not None:
        yield "the model is tensor parallel or sharded already; load it without tp_plan and device_mesh"
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in devices:
        yield "some weights are on the meta device; load them first"
    elif len(devices) > 1:
        yield f"the model is spread over {', '.join(devices)}; put all of it on this rank's device"


def _layer_reasons(model: Any, layers: tuple[FoundLayer, ...], family: Family) -> Iterator[str]:
    kinds = set()
    for layer in layers:
        experts = model.get_submodule(layer.experts_path)
        adapted = list(adapted_paths(model, layer))
        yield from (f"`{path}` {ADAPTED}" for path in adapted)
        if adapted:
            continue
        yield from _experts_reasons(experts, layer.experts_path, family)
        kinds |= {(t.dtype, tuple(t.shape)) for t in experts.parameters() if t.ndim == 3}
        block = layer.experts_path.rpartition(".")[0]
        for path in (layer.experts_path, layer.router_path, block):
            if "forward" in vars(model.get_submodule(path)):
                yield f"the forward of `{path}` was replaced, by kernels or by a patch; load without use_kernels"
    if len(kinds) > 2:
        yield f"experts differ in dtype or shape between layers, {sorted(map(str, kinds))}; all layers must be alike"


def adapted_paths(model: nn.Module, layer: FoundLayer) -> Iterator[str]:
    """Yield the paths of a layer's experts and router that have adapters."""
    return (path for path in (layer.experts_path, layer.router_path) if has_adapters(model.get_submodule(path)))


def _experts_reasons(experts: Any, path: str, family: Family) -> Iterator[str]:
    if not hasattr(experts, "config") or not hasattr(experts, "is_transposed"):
        yield f"`{path}` does not choose its function by configuration; use transformers 5.10 or newer"
        return
    if experts.is_transposed != family.is_transposed or sorted(experts._parameters) != sorted(family.tensors):
        yield f"`{path}` keeps {sorted(experts._parameters)}; this adapter knows {sorted(family.tensors)}"
        return
    if experts._forward_hooks or experts._forward_pre_hooks or experts._backward_hooks:
        yield f"`{path}` has hooks; remove them, or register them after install"
    for name in family.tensors:
        yield from _tensor_reasons(getattr(experts, name), f"{path}.{name}")
    if family.activation == "swiglu" and experts.config.hidden_act not in ("silu", "swish"):
        yield f"`{path}` activates with {experts.config.hidden_act!r}; only silu is computed by the balanced experts"


def _tensor_reasons(tensor: Any, path: str) -> Iterator[str]:
    if type(tensor) is not nn.Parameter or type(tensor.data).__name__ != "Tensor":
        yield f"`{path}` is a {type(tensor.data).__name__}, sharded or wrapped already; install before wrapping"
    elif not tensor.is_floating_point() or tensor.element_size() < 2:
        yield f"`{path}` is {tensor.dtype}; experts must be in 16 or 32 bit floating point"
    elif tensor.grad is not None:
        yield f"`{path}` has a gradient; call zero_grad(set_to_none=True) before install"
    elif tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        yield f"`{path}` has gradient hooks; register them on the parameters that install leaves in its place"


def checkpoint_tensors(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of a state dict as the family's Hugging Face checkpoints name and shape them.

    transformers keeps the experts of a layer in one tensor; checkpoints have one tensor per expert and projection.
    Weights that are tied to another are left out. Entries are views of what was given where a view suffices.
    """
    # Read in transformers 5.17: `save_pretrained` makes the same conversion, of the whole state dict.
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in state.items():
        if name not in model.all_tied_weights_keys:
            # One at a time: no expert's tensor needs another's.
            yield from revert_weight_conversion(model, {name: tensor}).items()
