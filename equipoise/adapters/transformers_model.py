"""`inspect`: the MoE layers of a transformers model, and what about it is unsupported. Changes nothing.

Knows module paths, configurations and the ways in which a model can be unfit. Does not know balancers or ranks.

Invariants (asserted by the tests):
1. Layers are found by what they hold, named by module path and numbered globally; dense layers are not among them.
2. Every reason names the module or setting, and what to change.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from equipoise.adapters.transformers_families import FAMILIES, Family, family_of
from equipoise.core import ModelShape
from equipoise.core.errors import AdapterError


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

    @property
    def experts(self) -> int:
        """Routed experts per layer."""
        return self.shape.experts

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.shape.top_k

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.shape.hidden

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.shape.expert_width


def inspect(model: nn.Module) -> Found:
    """Find the MoE layers of a transformers model, and say what is unsupported.

    Args:
        model: a model with or without a head; a family that is not known is an error, anything else a reason
    """
    if not hasattr(model, "config") or not hasattr(model, "base_model"):
        raise AdapterError(
            f"a {type(model).__name__} is no transformers model; give the PreTrainedModel itself, not a wrapper of it"
        )
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
        weight_bytes=getattr(experts[0], family.tensors[0]).element_size(),
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
    if getattr(model, "_hf_peft_config_loaded", False) or any("lora_" in name for name, _ in model.named_modules()):
        yield "the model has LoRA adapters; merge them into the weights first"
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
        yield from _experts_reasons(experts, layer.experts_path, family)
        kinds |= {(t.dtype, tuple(t.shape)) for t in experts.parameters() if t.ndim == 3}
        for path in (layer.experts_path, layer.router_path, layer.experts_path.rpartition(".")[0]):
            if "forward" in vars(model.get_submodule(path)):
                yield f"the forward of `{path}` was replaced, by kernels or by a patch; load without use_kernels"
    if len(kinds) > 2:
        yield f"experts differ in dtype or shape between layers, {sorted(map(str, kinds))}; all layers must be alike"


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
        yield f"`{path}` is a {type(tensor.data).__name__}, sharded or wrapped already; install before FSDP or DTensor"
    elif not tensor.is_floating_point() or tensor.element_size() < 2:
        yield f"`{path}` is {tensor.dtype}; experts must be in 16 or 32 bit floating point"
    elif tensor.grad is not None:
        yield f"`{path}` has a gradient; call zero_grad(set_to_none=True) before install"
    elif tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        yield f"`{path}` has gradient hooks; register them on the parameters that install leaves in its place"


SUPPORTED = tuple(FAMILIES)
"""The `model_type`s that can be balanced."""
