"""`inspect` finds the MoE layers of Megatron-Core model chunks and what is unsupported; `REFUSED` is the list of that.

Private names of Megatron-Core that the adapter uses, in one table (`USED`), with the range of versions they were read
in. `install` checks that they are there, so that another version is refused by name and never half installed.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import __version__ as VERSION
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from equipoise.core import ModelShape
from equipoise.core.errors import AdapterError
from equipoise.transfer.node import SlotTensors

READ = ((0, 16), (0, 19))
"""First and last minor version whose sources were read."""
TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Versions that the tests of this adapter run: the first in CI, all by `make megatron-versions`."""

USED: Mapping[str, tuple[str, ...]] = {
    "megatron.core.transformer.moe.token_dispatcher:MoETokenDispatcher": (
        "dispatch_preprocess",
        "token_dispatch",
        "dispatch_postprocess",
        "combine_preprocess",
        "token_combine",
        "combine_postprocess",
        "set_shared_experts",
    ),
    "megatron.core.transformer.moe.moe_layer:MoELayer": ("preprocess", "dispatch", "combine", "postprocess"),
    "megatron.core.distributed:DistributedDataParallel": ("start_param_sync", "finish_grad_sync"),
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup": ("register_grad_ready",),
}
"""What the adapter overrides or calls, by class."""


class Refusal(NamedTuple):
    """One thing that is not supported."""

    name: str
    """As the support table of docs/adapters.md calls it."""
    setting: str
    """What a user has set."""
    fix: str
    found: Callable[[Any], bool] | None = None
    """Whether a configuration has it; None: where the setting has a value."""

    def is_set(self, config: Any) -> bool:
        """Return whether a configuration has it."""
        return (self.found or _has(self.setting))(config)


def _has(name: str, *without: Any) -> Callable[[Any], bool]:
    """Whether a field is there, in this version, and has another value than these; None and False are always these."""
    return lambda config: getattr(config, name, None) not in (None, False, *without)


def _has_any(*names: str) -> Callable[[Any], bool]:
    return lambda config: any(_has(name, "none")(config) for name in names)


REFUSED: tuple[Refusal, ...] = (
    Refusal("capacity factor", "moe_expert_capacity_factor", "drop no tokens"),
    Refusal(
        "padding to the capacity", "moe_pad_expert_input_to_capacity", "turn it off: balanced ranks need no capacity"
    ),
    Refusal(
        "padding for quantization",
        "moe_router_padding_for_quantization",
        "turn it off",
        _has_any("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
    ),
    Refusal("fp8", "fp8", "train in bf16"),
    Refusal("fp4", "fp4", "train in bf16"),
    Refusal(
        "expert tensor parallelism",
        "expert_tensor_parallel_size",
        "use expert_tensor_parallel_size=1, with more expert parallelism",
        _has("expert_tensor_parallel_size", 1),
    ),
    Refusal(
        "flex dispatcher (DeepEP, HybridEP)",
        "moe_token_dispatcher_type",
        "use moe_token_dispatcher_type='alltoall'",
        lambda config: config.moe_token_dispatcher_type == "flex",
    ),
    Refusal("combined 1F1B overlap", "overlap_moe_expert_parallel_comm", "turn it off"),
    Refusal(
        "delayed weight gradients",
        "delay_wgrad_compute",
        "turn it off",
        _has_any("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"),
    ),
    Refusal("shared-expert overlap", "moe_shared_expert_overlap", "turn it off"),
    Refusal(
        "CUDA graphs",
        "cuda_graph_impl",
        "use cuda_graph_impl='none'",
        _has_any("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
    ),
    Refusal("paged stash", "moe_paged_stash", "turn it off"),
    Refusal("interleaved halves of the first product", "moe_mlp_glu_interleave_size", "leave it None"),
    Refusal("grouped experts in one parameter", "moe_single_grouped_weight", "turn it off: a parameter per expert"),
    Refusal("latent experts", "moe_latent_size", "use experts of the hidden size"),
    Refusal("gates on the input", "moe_apply_probs_on_input", "turn it off"),
    Refusal("biases of experts", "add_bias_linear", "use add_bias_linear=False"),
    Refusal(
        "other activations than SwiGLU",
        "activation_func",
        "use gated_linear_unit=True with torch.nn.functional.silu",
        lambda config: (
            config.activation_func is not torch.nn.functional.silu
            or not config.gated_linear_unit
            or _has("activation_func_clamp_value")(config)
            or bool(getattr(config, "glu_linear_offset", 0.0))
            or _has("use_te_activation_func")(config)
        ),
    ),
)
"""Refused by configuration; `REFUSED_MODULES` by what the model is made of."""

REACHES: tuple[Refusal, ...] = (
    Refusal(
        "auxiliary loss",
        "moe_aux_loss_coeff",
        "set moe_aux_loss_coeff=0",
        lambda config: (
            bool(np.any(np.asarray(config.moe_aux_loss_coeff or 0.0) > 0))
            and _has("moe_router_load_balancing_type", "none", "sinkhorn")(config)
        ),
    ),
    Refusal("z-loss", "moe_z_loss_coeff", "set moe_z_loss_coeff=None", _has("moe_z_loss_coeff", 0.0)),
    Refusal(
        "bias of experts",
        "moe_router_bias_update_rate",
        "set moe_router_bias_update_rate=0",
        lambda config: _has("moe_router_enable_expert_bias")(config) and _has("moe_router_bias_update_rate", 0)(config),
    ),
    Refusal("multi-token prediction", "mtp_num_layers", "train without MTP layers", _has("mtp_num_layers", 0)),
)
"""What every row reaches, whatever the loss mask says: the router's losses and bias count all rows."""

REFUSED_MODULES: Mapping[str, str] = {
    "Megatron-FSDP": "wrap the model in DistributedDataParallel",
    "LoRA on experts": "train the experts themselves, or merge the adapters",
    "experts frozen in part": "freeze all parameters of a layer's experts, or none",
    "legacy grouped experts": "use Transformer Engine's, or moe_grouped_gemm=False",
    "experts of other shapes": "give all MoE layers experts of one shape and dtype",
}


KINDS: Mapping[type, Callable[[Any, str], list[nn.Parameter]]] = {
    SequentialMLP: lambda experts, product: [getattr(expert, product).weight for expert in experts.local_experts],
    # As TransformerEngine's GroupedLinear names them, 1.7 to 2.14.
    TEGroupedMLP: lambda experts, product: [
        getattr(getattr(experts, product), f"weight{at}") for at in range(experts.num_local_experts)
    ],
}
"""Modules of experts, and where each keeps the weights of a product: one parameter per expert, [out, in]."""


def expert_parameters(experts: Any) -> tuple[SlotTensors, SlotTensors]:
    """Return the parameters of both products of a layer's experts, expert by expert."""
    find = next(find for kind, find in KINDS.items() if isinstance(experts, kind))
    return SlotTensors(find(experts, "linear_fc1")), SlotTensors(find(experts, "linear_fc2"))


class FoundMoE(NamedTuple):
    """One MoE layer of a decoder."""

    chunk: int
    """Index of its model chunk."""
    path: str
    """Of the transformer layer, below the chunk's GPTModel."""
    number: int
    """Global number from 0, dense layers counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundChunks:
    """What the adapter found in this rank's model chunks."""

    shape: ModelShape
    """Of this rank's MoE layers: those of its pipeline stage; where the stage has none, of all."""
    layers: tuple[FoundMoE, ...]
    """By ascending number, the order of layers in plans and in routes; empty where a pipeline stage has none."""
    unsupported: tuple[str, ...] = ()
    """Why experts cannot be balanced, one reason each; empty: they can."""


def bare(chunk: nn.Module) -> Any:
    """Return the GPTModel inside its wrappers."""
    while not hasattr(chunk, "decoder") and hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def inspect(model_chunks: Sequence[nn.Module]) -> FoundChunks:
    """Find the MoE layers of this rank's decoders, and say what is unsupported. MTP's are left alone.

    Args:
        model_chunks: as Megatron's schedules take them: one, or one per virtual pipeline stage; wrapped or not
    """
    found: list[tuple[FoundMoE, Any]] = []
    for index, chunk in enumerate(model_chunks):
        decoder = getattr(bare(chunk), "decoder", None)
        if decoder is None or not hasattr(decoder, "layers"):
            raise AdapterError(
                f"model chunk {index} is a {type(bare(chunk)).__name__} without a decoder; give a list of GPTModels, "
                "as Megatron's schedules take it"
            )
        for at, layer in enumerate(decoder.layers):
            if isinstance(getattr(layer, "mlp", None), MoELayer):
                found.append((FoundMoE(index, f"decoder.layers.{at}", layer.layer_number - 1), layer.mlp))
    config = bare(model_chunks[0]).config
    if not found and config.num_moe_experts is None:
        raise AdapterError("no decoder layer of these model chunks is a MoELayer; balance a model with experts")
    found.sort(key=lambda one: one[0].number)
    moe_layers = [moe for _, moe in found]
    dtypes = {parameter.dtype for moe in moe_layers for parameter in moe.experts.parameters()}
    shape = ModelShape(
        name="megatron",
        experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        layer_numbers=tuple(layer.number for layer, _ in found) or _moe_numbers(config),
        hidden_layers=config.num_layers,
        hidden=config.hidden_size,
        expert_width=config.moe_ffn_hidden_size,
        weight_bytes=max(dtype.itemsize for dtype in dtypes or {config.params_dtype}),
    )
    reasons = (*_version_reasons(), *_config_reasons(config), *_module_reasons(model_chunks, moe_layers))
    return FoundChunks(shape=shape, layers=tuple(layer for layer, _ in found), unsupported=reasons)


def _moe_numbers(config: Any) -> tuple[int, ...]:
    """Return the MoE layers of the whole model, for a pipeline stage that has none of them."""
    every, layers = config.moe_layer_freq, range(config.num_layers)
    return tuple(n for n in layers if (n % every == 0 if isinstance(every, int) else every[n]))


def check_free_rows(config: Any) -> None:
    """Raise if rows that a loss mask leaves out reach a loss all the same, so that other experts would change it."""
    for one in REACHES:
        if one.is_set(config):
            raise AdapterError(
                f"no row is free: each reaches the {one.name} ({one.setting}={getattr(config, one.setting)!r}); "
                f"{one.fix}, or let the router choose"
            )


def _version_reasons() -> Iterator[str]:
    minor, fix = tuple(int(part) for part in VERSION.split(".")[:2]), f"use one of {', '.join(TESTED)}"
    if not READ[0] <= minor <= READ[1]:
        yield f"megatron-core {VERSION} is not between 0.{READ[0][1]} and 0.{READ[1][1]}; {fix}"
    for place, names in USED.items():
        module, _, name = place.partition(":")
        there = getattr(importlib.import_module(module), name, None)
        missing = [name for name in names if not hasattr(there, name)]
        if missing:
            yield f"megatron-core {VERSION}: {place} has no {missing[0]}; {fix}"


def _config_reasons(config: Any) -> Iterator[str]:
    for refusal in REFUSED:
        if refusal.is_set(config):
            value = getattr(config, refusal.setting, None)
            yield f"{refusal.name} is not supported ({refusal.setting}={value!r}): {refusal.fix}"


def _module_reasons(model_chunks: Sequence[nn.Module], moe_layers: Sequence[Any]) -> Iterator[str]:
    def refuse(name: str, where: str) -> str:
        return f"{name} is not supported ({where}): {REFUSED_MODULES[name]}"

    for chunk in model_chunks:
        if "FullyShardedDataParallel" in {kind.__name__ for kind in type(chunk).__mro__}:
            yield refuse("Megatron-FSDP", type(chunk).__name__)
    for moe in moe_layers:
        where = f"layer {moe.layer_number - 1}: {type(moe.experts).__name__}"
        if any("lora" in name.lower() or "adapter" in name.lower() for name, _ in moe.experts.named_modules()):
            yield refuse("LoRA on experts", where)
        elif len({parameter.requires_grad for parameter in moe.experts.parameters()}) > 1:
            yield refuse("experts frozen in part", where)
        elif not isinstance(moe.experts, tuple(KINDS)):
            yield refuse("legacy grouped experts", where)
    kinds = {(tuple(p.shape), p.dtype, p.device) for moe in moe_layers for p in moe.experts.parameters()}
    if len(kinds) > 2:
        yield refuse("experts of other shapes", ", ".join(sorted(str(shape) for shape, _, _ in kinds)))
