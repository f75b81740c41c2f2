"""The two parts of a balancer: what plans its windows and what moves its experts.

Knows how they are made and in which order. Does not know windows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from equipoise.core import Cluster, ModelShape
from equipoise.planning.background import BackgroundPlanner, WindowPlanner
from equipoise.planning.options import BalancerOptions
from equipoise.planning.owners import OwnersOnly
from equipoise.planning.worker import PlanWorker
from equipoise.runtime.engine import TransferEngine
from equipoise.runtime.experts import BalancedExperts
from equipoise.runtime.layout import TransferOptions
from equipoise.runtime.still import Mover, Still


class Parts(NamedTuple):
    """Of one balancer, on one rank."""

    planner: WindowPlanner
    mover: Mover

    def close(self) -> None:
        """Free everything, planning first: it needs nothing that the mover frees. Closing twice is allowed."""
        self.planner.close()
        self.mover.close()


def idle_parts(layers: Sequence[BalancedExperts], *, cluster: Cluster, model: ModelShape) -> Parts:
    """Every expert stays at its owner: no memory, process, thread or communication."""
    return Parts(OwnersOnly(cluster=cluster, model=model), Still([experts.home for experts in layers]))


def working_parts(
    layers: Sequence[BalancedExperts],
    *,
    cluster: Cluster,
    model: ModelShape,
    group: Any,
    options: BalancerOptions,
    worker: PlanWorker | None = None,
) -> Parts:
    """Share memory inside nodes, connect the ranks, start planning processes. Every rank of `group` must call this.

    Args:
        layers: by layer index
        worker: a process to plan in, left running on close; an own one by default
    """
    homes, transfer = [experts.home for experts in layers], TransferOptions(**options.transfer_figures)
    mover = TransferEngine(homes, group=group, node_R=cluster.node_R, options=transfer)
    planner = BackgroundPlanner(
        cluster=cluster, model=model, options=options, group=group, layers=layers, worker=worker
    )
    return Parts(planner, mover)
