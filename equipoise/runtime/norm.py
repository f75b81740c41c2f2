"""The gradient norm of experts, summed in logical order: the same bits wherever the experts were placed.

Every expert's squared norm depends on its own gradient alone; ranks exchange these numbers and add them in the order of
layers and expert ids. Replica gradients are not part of it: they have been added to their homes before.

Knows gradients with a slot axis and where each expert sits. Does not know plans or clipping rules.

Invariants (asserted by the tests):
1. The norm has the same bits for any placement, before and after collect, on every rank.
2. It is the Euclidean norm over all experts of all layers, computed in float64.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from equipoise.core.errors import TransferError
from equipoise.runtime.bank import ExpertWeights


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
    """Return the norm of all experts' gradients. Every rank of `group` must call this.

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
