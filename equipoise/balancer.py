"""`Balancer`: the story of the package. Every EP rank does equal work in every micro-step, because the load is known.

What happens in one window, in this order, the same on every rank of an EP group:
1. Take routes: `routes[m][l]`, the [T, K] ids that micro-step m and layer l will replay, -1 if unknown (`submit`).
2. Count the load they make, and
3. plan in the background (`planning`): rows exchanged, layers shared out, plans compared, dispatches made ahead.
4. Start publishing experts to their homes and pulling replicas (`begin`, by `runtime.engine`).
5. Run the layers: each finds its entry of the plan by its visit, never by call order (`runtime.experts`).
6. Collect gradients and weights to their owners, each layer behind its last turn, and report (`end`).

    balancer = Balancer(find_layers(net), cluster=cluster, model=shape, group=ep_group)
    with balancer.window(routes):
        ...             # micro-steps, forward and backward
    optimizer.step()    # sees complete gradients at their owners

Knows the order of things, not how they are done. Does not know frameworks, optimizers or routers.

Invariants (asserted by the tests):
1. Losses and weights after training are those of static expert parallelism, within the bounds of `docs/runtime.md`.
2. Between windows, and inside `canonical`, every owner holds its own experts in the same parameter objects.
3. Disabled, the model is byte-identical to one that never saw a balancer: no memory, process or thread is added.
4. What fails on one rank while planning raises on every rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from equipoise.core import Cluster, InfeasiblePlanError, ModelShape, Stage
from equipoise.core.options import BalancerOptions
from equipoise.core.plan import Visit
from equipoise.layer.experts import BalancedExperts, Window
from equipoise.planning.background import idle_parts, working_parts
from equipoise.planning.report import Tally, WindowReport
from equipoise.planning.rows import (
    WindowRoutes,
    check_matched,
    check_unattached,
    count_rows,
    find_layers,
    in_plan_order,
)
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.edges import GradientOf
from equipoise.transfer.engine import suspended
from equipoise.transfer.host_store import HostStore

__all__ = ["Balancer", "BalancerOptions", "find_layers"]


class Balancer(AbstractContextManager["Balancer"]):
    """Balances the experts of one EP group, seen from one rank. Every rank of the group makes the same calls."""

    def __init__(
        self,
        layers: Mapping[str, BalancedExperts] | None = None,
        *,
        cluster: Cluster,
        model: ModelShape,
        group: Any,
        options: BalancerOptions | None = None,
        enabled: bool = True,
        worker: PlanWorker | None = None,
        gradient_of: GradientOf | None = None,
    ) -> None:
        """Say who balances what; memory and processes come with the layers. Every rank must call this.

        Args:
            layers: by module path, each with its index in `model.layer_numbers`; left out, an adapter attaches them
            group: the EP group, able to move CPU tensors
            enabled: False computes every expert at its owner and touches nothing
            worker: a planning process to use, instead of an own one
            gradient_of: where a parameter's gradient lies, if not in its `grad`; see `BalancerOptions.grad_dtype`
        """
        self.cluster, self.model, self.group, self.enabled = cluster, model, group, enabled
        self.options = options or BalancerOptions()
        self._working_parts = partial(working_parts, group=group, options=self.options, gradient_of=gradient_of)
        self.layers: dict[str, BalancedExperts] = {}
        self.report: WindowReport | None = None
        self._parts = idle_parts([], cluster=cluster, model=model)
        self._open: Tally | None = None
        if layers is not None:
            self.attach(layers, worker=worker)

    def attach(self, layers: Mapping[str, BalancedExperts], *, worker: PlanWorker | None = None) -> None:
        """Connect the ranks, share memory inside nodes, start planning processes; once. Every rank must call this."""
        check_unattached(self.layers)
        found = in_plan_order(layers, self.model)
        make_parts = partial(self._working_parts, worker=worker) if self.enabled else idle_parts
        self._parts, self.layers = make_parts(list(found.values()), cluster=self.cluster, model=self.model), found

    @property
    def is_open(self) -> bool:
        """Whether a window is open: between `begin` and `end`."""
        return self._open is not None

    def submit(self, routes: WindowRoutes, *, stage: Stage = "update") -> None:
        """Take the routes of the next window (`WindowRoutes`), count them, and have it planned; returns at once."""
        self._parts.planner.submit(count_rows(routes, experts=self.model.experts, stage=stage), routes)

    def begin(self, *, with_weights: bool = True) -> None:
        """Wait for the plan, and start publishing experts to their homes and pulling replicas, layer by layer.

        Args:
            with_weights: False only where the optimizer keeps masters of its own and overwrites every owned parameter
                before anyone reads one: then unchanged weights need not travel back when the window ends
        """
        if self.is_open:
            raise InfeasiblePlanError("a window is open; end it before the next begins")
        planned, mover = self._parts.planner.take(), self._parts.mover
        window = Window(planned.plan, rank=self.group.rank(), bank=mover, ways=planned.ways)
        tally = Tally(mover.counters, planned, window)
        mover.open_window(planned.plan, with_weights=with_weights)
        for experts in self.layers.values():
            experts.begin(window)
        self._open = tally

    def visit(self, path: str, micro_step: int) -> Visit:
        """The key by which a layer finds its entry of the plan; capture it outside any checkpointed function."""
        return Visit(micro_step, "forward", self.layers[path].layer)

    def end(self) -> WindowReport:
        """Collect gradients and weights to their owners and say what the window moved; before the optimizer runs."""
        if self._open is None:
            raise InfeasiblePlanError("no window is open; begin one before it ends")
        self._parts.mover.close_window()
        tally, self._open = self._open, None
        if self.enabled:
            check_matched(self.layers.values(), self.group)
        self.report = tally.report()
        return self.report

    @contextmanager
    def window(self, routes: WindowRoutes | None = None, *, stage: Stage = "update") -> Iterator[None]:
        """Begin and end a window around a `with` block; submits `routes` first where given."""
        if routes is not None:
            self.submit(routes, stage=stage)
        self.begin()
        yield
        self.end()

    def canonical(self) -> AbstractContextManager[None]:
        """Hold every expert at its owner, for whatever reads or writes weights inside a window. Every rank enters."""
        return self._parts.mover.canonical() if self.is_open else nullcontext()

    def suspended(self) -> AbstractContextManager[None]:
        """Stop all transfers, for whatever frees or moves parameters, as an off-load does. Every rank enters."""
        return suspended(self._parts.mover)

    def complete_store(self) -> HostStore:
        """Bring all experts to each node's host memory, between windows: for weight sync, export. Every rank calls."""
        return self._parts.mover.complete_store()

    def close(self) -> None:
        """Free everything; parameters get memory of their own. Closing twice is allowed."""
        self._parts.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
