"""Checkpoints and gradient norms of experts that do not depend on the number of ranks or on placement.

Experts are saved under one EP size and loaded under another, bit for bit. There is one entry per expert and tensor,
named by the layer's module path and the expert's logical id:
    blocks.3.experts.17.gate_up            weights of expert 17
    blocks.3.experts.17.gate_up.exp_avg    what the optimizer keeps for them; per-parameter scalars (`step`) too
Every rank has the entries of the experts it owns. `torch.save` them, or use `save_experts` and `load_experts`, which go
through `torch.distributed.checkpoint`. Call these outside windows, or inside `balancer.canonical()`, where every owner
holds its experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from equipoise.core.errors import TrainingError, TransferError
from equipoise.layer.experts import BalancedExperts
from equipoise.transfer.node import ExpertWeights


def expert_squared_norms(gradients: ExpertWeights) -> torch.Tensor:
    """[s] float64 squared norm of each slot's expert, its tensors added in field order."""
    squared_S = torch.zeros(gradients.num_slots, dtype=torch.float64, device=gradients.gate_up_SFD.device)
    for tensor in gradients.tensors():
        for slot in range(gradients.num_slots):
            # One expert at a time: a reduction over a whole tensor may add in an order that depends on its shape.
            squared_S[slot] += tensor[slot].double().square().sum()
    return squared_S


def gradient_norm(
    layers: Sequence[ExpertWeights], *, group: Any, place_LE: np.ndarray | None = None, other_squared: float = 0.0
) -> float:
    """Return the Euclidean norm of all experts' gradients, in float64. Every rank of `group` must call this.

    Every expert's squared norm depends on its own gradient alone. Ranks exchange these numbers and add them in the
    order of layers and expert ids, so the bits do not depend on placement.

    Args:
        layers: per layer, this rank's gradients [home_slots, ...]
        group: the EP group, able to move CPU tensors
        place_LE: [L, E] rank * home_slots + slot of each expert; None: at its owner, as after collect
        other_squared: squared norm of everything that is no expert, already reduced
    """
    if not layers:
        raise TransferError("the gradient norm needs at least one layer of experts")
    mine_LS = torch.stack([expert_squared_norms(gradients) for gradients in layers]).cpu()
    parts = [torch.empty_like(mine_LS) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine_LS, group=group)
    squared_LE = torch.cat(parts, dim=1).numpy()
    if place_LE is not None:
        squared_LE = np.take_along_axis(squared_LE, np.asarray(place_LE), axis=1)
    # A running sum, because numpy's own sum adds in pairs that depend on the length.
    return float(np.sqrt(np.add.accumulate(np.append(other_squared, squared_LE.reshape(-1)))[-1]))


Layers = Mapping[str, BalancedExperts]


def expert_state_dict(layers: Layers, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """Return this rank's experts, and what the optimizer keeps for them. Entries are views: clone what must last.

    Args:
        layers: balanced experts by module path, as `find_layers` gives them
    """
    state: dict[str, Tensor] = {}
    for path, experts, name, parameter in _parameters(layers):
        for slot, expert in enumerate(_owned(experts)):
            state[f"{path}.{expert}.{name}"] = parameter.detach()[slot]
            for kind, value in _kept(optimizer, parameter, f"{path}.{name}").items():
                state[f"{path}.{expert}.{name}.{kind}"] = value[slot] if value.shape == parameter.shape else value
    return state


def load_expert_state_dict(layers: Layers, state: Mapping[str, Tensor], optimizer: Optimizer | None = None) -> None:
    """Take this rank's experts from `state`, which may hold others too.

    Args:
        optimizer: its state for the experts becomes what was saved, also where it has none yet
    """
    found = [(place, _stacked(place, state, has_optimizer=optimizer is not None)) for place in _parameters(layers)]
    for (_, _, _, parameter), (weights, kept) in found:
        with torch.no_grad():
            parameter.copy_(weights)
        if optimizer is not None:
            place = _scalar_place(optimizer, parameter)
            kept = {kind: value.to(place) if value.dim() == 0 else value for kind, value in kept.items()}
            optimizer.state.pop(parameter, None)
            optimizer.state.update({parameter: kept} if kept else {})


def save_experts(
    layers: Layers, folder: str | PathLike[str], *, group: Any, optimizer: Optimizer | None = None
) -> None:
    """Write a `torch.distributed.checkpoint` of all experts. Every rank of `group` must call this.

    Args:
        group: the EP group; with several EP groups any group that holds each owner once
    """
    dcp.save(expert_state_dict(layers, optimizer), checkpoint_id=folder, process_group=group)


def load_experts(
    layers: Layers, folder: str | PathLike[str], *, group: Any, optimizer: Optimizer | None = None
) -> None:
    """Read what `save_experts` wrote, under this or another number of ranks. Every rank of `group` must call this."""
    prefixes = tuple(f"{path}.{expert}." for path, experts in layers.items() for expert in _owned(experts))
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: _empty(key, entry) for key, entry in saved.items() if key.startswith(prefixes)}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    load_expert_state_dict(layers, state, optimizer)


def _parameters(layers: Layers) -> Iterator[tuple[str, BalancedExperts, str, Tensor]]:
    """(module path, layer, parameter's name, parameter) of every tensor of every layer."""
    for path, experts in layers.items():
        for name, parameter in experts.named_parameters(recurse=False):
            yield path, experts, name, parameter


def _owned(experts: BalancedExperts) -> range:
    """Logical ids of the experts that this rank owns."""
    slots = experts.gate_up.shape[0]
    return range(experts.group.rank() * slots, (experts.group.rank() + 1) * slots)


def _kept(optimizer: Optimizer | None, parameter: Tensor, name: str) -> dict[str, Tensor]:
    """What the optimizer keeps for a parameter: tensors of its shape, or scalars."""
    kept: dict[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
    for kind, value in kept.items():
        if not isinstance(value, Tensor) or value.shape not in (parameter.shape, torch.Size()):
            raise TrainingError(
                f"{name}: the optimizer keeps {kind!r}, which is neither a tensor of the parameter's shape "
                f"{tuple(parameter.shape)} nor a scalar tensor; experts cannot be taken out of it"
            )
    return dict(kept)


def _scalar_place(optimizer: Optimizer, parameter: Tensor) -> torch.device:
    """Where torch's optimizers keep a parameter's `step`: on the host, unless they run wholly on the device."""
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    is_on_device = group.get("capturable") or group.get("fused")
    return parameter.device if is_on_device else torch.device("cpu")


def _stacked(
    place: tuple[str, BalancedExperts, str, Tensor], state: Mapping[str, Tensor], *, has_optimizer: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """One parameter's weights and optimizer state out of its experts' entries, checked."""
    path, experts, name, parameter = place
    keys = [f"{path}.{expert}.{name}" for expert in _owned(experts)]
    weights = torch.stack([_entry(state, key, like=parameter[0]) for key in keys])
    kinds = [key[len(keys[0]) + 1 :] for key in state if key.startswith(f"{keys[0]}.")] if has_optimizer else []
    kept = {}
    for kind in kinds:
        is_scalar = state[f"{keys[0]}.{kind}"].dim() == 0
        values = [_entry(state, f"{key}.{kind}", like=None if is_scalar else parameter[0]) for key in keys]
        if is_scalar and any(not torch.equal(value, values[0]) for value in values):
            raise TrainingError(f"{path}.{name}: experts were saved with different {kind!r}; one parameter has one")
        kept[kind] = values[0].clone() if is_scalar else torch.stack(values).to(parameter.device)
    return weights, kept


def _entry(state: Mapping[str, Tensor], key: str, *, like: Tensor | None) -> Tensor:
    if key not in state:
        raise TrainingError(f"the checkpoint has no entry `{key}`; it was saved from another model or without it")
    value = state[key]
    if like is not None and value.shape != like.shape:
        raise TrainingError(f"`{key}` has shape {tuple(value.shape)} in the checkpoint, {tuple(like.shape)} here")
    return value


def _empty(key: str, entry: Any) -> Tensor:
    if not isinstance(entry, TensorStorageMetadata):
        raise TrainingError(f"`{key}` is no tensor in the checkpoint; it was not written by save_experts")
    return torch.empty(entry.size, dtype=entry.properties.dtype)
