"""The two parts of a balancer: what plans its windows and what moves its experts.

Knows how they are made and in which order. Does not know windows.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from equipoise.core import Cluster, ModelShape, TransferError
from equipoise.planning.background import BackgroundPlanner, WindowPlanner
from equipoise.planning.options import BalancerOptions
from equipoise.planning.owners import OwnersOnly
from equipoise.planning.worker import PlanWorker
from equipoise.runtime.edges import GradientOf
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
        try:
            self.planner.close()
        finally:
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
    gradient_of: GradientOf | None = None,
) -> Parts:
    """Share memory inside nodes, connect the ranks, start planning processes. Every rank of `group` must call this.

    Args:
        layers: by layer index
        worker: a process to plan in, left running on close; an own one by default
        gradient_of: where a parameter's accumulated gradient lies, if not in its `grad`
    """
    homes, given = [experts.home for experts in layers], {"group": group, "options": _transfer_options(options)}
    with ExitStack() as opened:
        mover = TransferEngine(homes, node_R=cluster.node_R, gradient_of=gradient_of, **given)
        opened.callback(mover.close)
        planner = BackgroundPlanner(
            cluster=cluster, model=model, options=options, group=group, layers=layers, worker=worker
        )
        # From here on the caller closes.
        opened.pop_all()
    return Parts(planner, mover)


def _transfer_options(options: BalancerOptions) -> TransferOptions:
    grad_dtype = None if options.grad_dtype is None else getattr(torch, options.grad_dtype, options.grad_dtype)
    if not isinstance(grad_dtype, torch.dtype | None):
        raise TransferError(f"grad_dtype is {grad_dtype!r}; name one of torch's, such as 'float32'")
    return TransferOptions(**options.transfer_figures, grad_dtype=grad_dtype)
