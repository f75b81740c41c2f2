"""The balanced layers of a model: found by module path, put in the order of plans, checked before the optimizer runs.

Knows modules and layer numbers. Does not know plans.

Invariants (asserted by the tests):
1. Layers are matched by what they are, never by the order in which they were created or given.
2. A row that did not follow its prepared dispatch raises on every rank, not only on the one that sent it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equipoise.core import ModelShape
from equipoise.core.errors import RoutesError, TopologyError
from equipoise.runtime.experts import BalancedExperts


def find_layers(net: nn.Module) -> dict[str, BalancedExperts]:
    """Return the balanced experts of a model by module path."""
    return {path: module for path, module in net.named_modules() if isinstance(module, BalancedExperts)}


def in_plan_order(layers: Mapping[str, BalancedExperts], model: ModelShape) -> dict[str, BalancedExperts]:
    """Return the layers by path, in the order of plans, or an error naming the path or layer that does not fit."""
    paths: dict[int, str] = {}
    for path, experts in layers.items():
        if not 0 <= experts.layer < model.layers:
            raise TopologyError(
                f"`{path}` is layer index {experts.layer}; {model.name!r} has MoE layers 0..{model.layers - 1}"
            )
        if experts.layer in paths:
            raise TopologyError(f"`{path}` and `{paths[experts.layer]}` are both layer index {experts.layer}")
        paths[experts.layer] = path
    missing = [model.layer_numbers[index] for index in range(model.layers) if index not in paths]
    if missing:
        raise TopologyError(f"no balanced experts were given for layer {missing[0]}; give all {model.layers} of them")
    return {paths[index]: layers[paths[index]] for index in sorted(paths)}


def check_unattached(layers: Mapping[str, BalancedExperts]) -> None:
    """Raise if a balancer has layers: their memory and processes would be left behind by a second attachment."""
    if layers:
        raise TopologyError(
            f"this balancer has {len(layers)} layers already, the first is `{next(iter(layers))}`; give every model a "
            "balancer of its own, and close this one when its model is done"
        )


def check_matched(layers: Iterable[BalancedExperts], group: Any) -> None:
    """Raise on every rank if a row of any rank did not follow its prepared dispatch. Every rank must call this."""
    layers = list(layers)
    # On the CPU, which every EP group must be able to reduce on.
    total_L = torch.stack([experts.mismatches for experts in layers]).cpu()
    dist.all_reduce(total_L, group=group)
    for experts in layers:
        experts.check_matched()
    if total_L.any():
        raise RoutesError(
            f"{int(total_L.sum())} rows of other ranks were routed otherwise than prepared; drop this step's gradients "
            "and replay the recorded routes"
        )
