"""The public face of the half that needs torch: balance the experts of a model while it trains.

    from equipoise.torch import Balancer, transformers as adapter

    balancer = Balancer(cluster=cluster, model=adapter.inspect(model).shape, group=ep_group)
    handle = adapter.install(model, balancer)

`equipoise.torch.torchtitan` needs torchtitan, which no extra of this package installs.

`import equipoise` has the half without torch: routes, loads, plans, simulation and reports.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from equipoise.balancer import Balancer, find_layers
from equipoise.core.options import BalancerOptions
from equipoise.core.plan import Visit
from equipoise.launch import run_ranks
from equipoise.layer.checkpoint import load_experts, save_experts
from equipoise.layer.experts import BalancedExperts, LayerOptions
from equipoise.planning.report import WindowReport
from equipoise.transfer.node import ExpertWeights

if TYPE_CHECKING:
    from equipoise.adapters import megatron, transformers, transformers_sharded

__all__ = [
    "Balancer",
    "BalancerOptions",
    "WindowReport",
    "find_layers",
    "BalancedExperts",
    "LayerOptions",
    "ExpertWeights",
    "Visit",
    "save_experts",
    "load_experts",
    "run_ranks",
    "transformers",
    "transformers_sharded",
    "megatron",
]


def __getattr__(name: str) -> Any:
    # Adapters import their framework, so each is imported only when it is asked for.
    if name in ("transformers", "transformers_sharded", "megatron", "torchtitan"):
        return import_module(f"equipoise.adapters.{name}")
    raise AttributeError(f"module 'equipoise.torch' has no attribute {name!r}")
