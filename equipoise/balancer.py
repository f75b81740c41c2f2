"""`Balancer` gives all ranks of an EP group equal work in every micro-step. Read this module first.

A window is one optimizer step or one log-prob pass. Every rank does the following in each window:
1. Take the routes: `routes[m][l]` are the [T, K] expert ids of micro-step m and layer l, -1 if unknown (`submit`).
2. Count the rows of every expert.
3. Plan in the background: exchange counts, plan some of the layers, compare plans, prepare dispatches (`planning`).
4. Start publishing experts to their homes and pulling replicas (`begin`, by `transfer.engine`).
5. Run the layers. A layer finds its part of the plan by its visit, not by the order of calls (`layer.experts`).
6. Collect gradients and weights to their owners, each layer after its last visit, and report (`end`).

    balancer = Balancer(find_layers(net), cluster=cluster, model=shape, group=ep_group)
    with balancer.window(routes):
        ...             # micro-steps, forward and backward
    optimizer.step()    # sees complete gradients at their owners
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from equipoise.core import Cluster, InfeasiblePlanError, ModelShape, RoutesError, Stage, TopologyError
from equipoise.core.options import BalancerOptions
from equipoise.core.plan import Plan, Visit
from equipoise.layer.dispatch import FilledRows
from equipoise.layer.experts import BalancedExperts, Window
from equipoise.planning.background import BackgroundPlanner, Measured, Planned, owners_plan
from equipoise.planning.report import WindowMeter, WindowReport
from equipoise.planning.rows import FreeTokens, RankRows, WindowRoutes, count_rows
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.engine import NoTransfers, TransferEngine
from equipoise.transfer.host_store import HostStore
from equipoise.transfer.node import GradientOf

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
        """Describe what is balanced; `attach` allocates memory and starts processes. Every rank must call this.

        Args:
            layers: by module path, each with its index in `model.layer_numbers`; without them, an adapter attaches some
            group: the EP group, able to move CPU tensors
            enabled: False computes every expert at its owner, and adds no memory, process, thread or communication
            worker: a planning process to use instead of an own one
            gradient_of: returns a parameter's gradient, if it is not in `grad`; see `BalancerOptions.grad_dtype`
        """
        self.cluster, self.model, self.group, self.enabled = cluster, model, group, enabled
        self.options = options or BalancerOptions()
        self.layers: dict[str, BalancedExperts] = {}
        self.report: WindowReport | None = None
        self._gradient_of = gradient_of
        self._planner: BackgroundPlanner | None = None
        self._engine: TransferEngine | NoTransfers = NoTransfers([])
        self._unplanned: deque[RankRows] = deque()  # submitted windows of a disabled balancer
        self._meter: WindowMeter | None = None
        if layers is not None:
            self.attach(layers, worker=worker)

    def attach(self, layers: Mapping[str, BalancedExperts], *, worker: PlanWorker | None = None) -> None:
        """Connect the ranks, share memory inside nodes, start planning processes; once. Every rank must call this."""
        if self.layers:
            raise TopologyError(
                f"this balancer has {len(self.layers)} layers already, the first is `{next(iter(self.layers))}`; give "
                "every model a balancer of its own, and close this one when its model is done"
            )
        found = in_plan_order(layers, self.model)
        homes = [experts.home for experts in found.values()]
        if not self.enabled:
            self._engine = NoTransfers(homes)
        else:
            with ExitStack() as opened:
                engine = TransferEngine(
                    homes,
                    node_R=self.cluster.node_R,
                    group=self.group,
                    options=self.options,
                    gradient_of=self._gradient_of,
                    names=list(found),
                )
                opened.callback(engine.close)
                self._planner = BackgroundPlanner(
                    cluster=self.cluster,
                    model=self.model,
                    # Experts and rows are priced as they travel: of a two-level dispatch's exchanges, most go by row.
                    options=replace(self.options, transport=engine.transport, sends="rows"),
                    group=self.group,
                    layers=list(found.values()),
                    worker=worker,
                )
                opened.pop_all()  # from here on `close` frees the engine
            self._engine = engine
        self.layers = found

    @property
    def is_open(self) -> bool:
        """Whether a window is open, that is between `begin` and `end`."""
        return self._meter is not None

    @property
    def plan(self) -> Plan | None:
        """The plan of the open window; None between windows."""
        return None if self._meter is None else self._meter.plan

    @property
    def filled(self) -> Mapping[tuple[int, int], FilledRows]:
        """By (micro-step, layer index), the tokens of this rank to which the open window gave experts."""
        return {} if self._meter is None else self._meter.filled

    @property
    def has_own_gradients(self) -> bool:
        """Whether gradients accumulate elsewhere than in `grad`."""
        return self._gradient_of is not None

    @property
    def extra_bytes(self) -> int:
        """Bytes of this rank for replica buffers, mailboxes, outbox and landing."""
        return self._engine.extra_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of this rank for rows that its node reads in place, instead of buffers of an all-to-all."""
        return self._engine.row_bytes

    def submit(
        self,
        routes: WindowRoutes | None = None,
        *,
        micro_steps: int | None = None,
        stage: Stage = "update",
        free: FreeTokens | None = None,
    ) -> None:
        """Take the routes of the next window, count them, and plan the window in the background; returns at once.

        Args:
            routes: `routes[m][l]` are the [T, K] ids that micro-step m and layer l replay, -1 if unknown
            micro_steps: of a window of which nothing is recorded; unknown routes are expected to be like those that the
                router chose in the windows before, of which the first computes every expert at its owner
            stage: recompute or update
            free: free[m] is a [T] mask of tokens that reach no loss, such as padding: where their route is unknown the
                window gives them the least loaded experts, whatever the router chooses. A disabled balancer does not
        """
        if (routes is None) == (micro_steps is None):
            raise RoutesError(
                f"submit got {'neither routes nor' if routes is None else 'both routes and'} micro_steps; give the "
                "window's routes, or its number of micro-steps where none are recorded"
            )
        if routes is None:
            sizes = {"layers": self.model.layers, "experts": self.model.experts}
            routes = RankRows.unknown(micro_steps or 0, stage=stage, **sizes)
        allow_gaps = any(experts.options.has_gaps for experts in self.layers.values())
        rows = count_rows(routes, experts=self.model.experts, stage=stage, allow_gaps=allow_gaps, free=free)
        if self._planner is None:
            self._unplanned.append(rows)
        else:
            self._planner.submit(rows, routes, free)

    def begin(self, *, with_weights: bool = True) -> None:
        """Wait for the plan, then start publishing experts to their homes and pulling replicas, layer by layer.

        Args:
            with_weights: False only where the optimizer keeps masters of its own and overwrites every owned parameter
                before anyone reads one: unchanged weights then need not travel back when the window ends
        """
        if self._meter is not None:
            raise InfeasiblePlanError("a window is open; end it before the next begins")
        if self._planner is not None:
            planned = self._planner.take()
        elif self._unplanned:
            micro_steps = len(self._unplanned.popleft().load_MLE)
            planned = Planned(owners_plan(micro_steps, cluster=self.cluster, model=self.model))
        else:
            raise InfeasiblePlanError("no window was submitted; submit its routes before it begins")
        dispatches, mapped = planned.dispatches, None
        if dispatches is not None and dispatches.is_mapped and isinstance(self._engine, TransferEngine):
            pad = max(experts.pad for experts in self.layers.values())
            is_relayed = any(experts.options.dispatch == "two_level" for experts in self.layers.values())
            mapped = self._engine.map_rows(planned.plan, pad=pad, is_relayed=is_relayed)
        window = Window(
            planned.plan,
            rank=self.group.rank(),
            transfers=self._engine,
            dispatches=dispatches,
            mapped=mapped,
            filled=planned.filled,
        )
        meter = WindowMeter(self._engine.counters, planned, window)
        self._engine.open_window(planned.plan, with_weights=with_weights, rows=mapped)
        for experts in self.layers.values():
            experts.begin(window)
        self._meter = meter

    def visit(self, path: str, micro_step: int) -> Visit:
        """Return the key by which a layer finds its entry of the plan; call it outside any checkpointed function."""
        return Visit(micro_step, "forward", self.layers[path].layer)

    def end(self) -> WindowReport:
        """Collect gradients and weights to their owners and report the window; call it before the optimizer runs."""
        if self._meter is None:
            raise InfeasiblePlanError("no window is open; begin one before it ends")
        self._engine.close_window()
        meter, self._meter = self._meter, None
        report = meter.report()
        if self._planner is not None and self.options.adapts:
            self._planner.tell(Measured(report.realised_s, sum(report.exposed_s.values())))
        if self._planner is not None and report.counted_LE is not None:
            self._planner.learn(report.counted_LE)
        if self.enabled:
            # A row of any rank that did not follow its prepared dispatch is an error on every rank. Counts are reduced
            # on the CPU, which every EP group is able to do.
            total_L = torch.stack([experts.mismatches for experts in self.layers.values()]).cpu()
            dist.all_reduce(total_L, group=self.group)
            for experts in self.layers.values():
                experts.check_matched()
            if total_L.any():
                raise RoutesError(
                    f"{int(total_L.sum())} rows of other ranks did not follow their prepared dispatch; drop this "
                    "step's gradients and replay the recorded routes"
                )
        self.report = report
        return report

    def layers_home(self) -> list[int]:
        """Return the indices of layers whose gradients have come home since the last call; does not wait."""
        return self._engine.layers_home()

    def abort(self, reason: str) -> None:
        """Make the other ranks of the node leave the open window too, naming this rank; then close the balancer."""
        self._engine.abort(reason)

    @contextmanager
    def window(
        self,
        routes: WindowRoutes | None = None,
        *,
        micro_steps: int | None = None,
        stage: Stage = "update",
        free: FreeTokens | None = None,
    ) -> Iterator[None]:
        """Begin and end a window around a `with` block; submits it first where routes or micro-steps are given."""
        if routes is not None or micro_steps is not None:
            self.submit(routes, micro_steps=micro_steps, stage=stage, free=free)
        self.begin()
        yield
        self.end()

    def canonical(self) -> AbstractContextManager[None]:
        """Hold every expert at its owner, to read or write weights inside a window. Every rank must enter."""
        return self._engine.canonical() if self.is_open else nullcontext()

    def suspended(self) -> AbstractContextManager[None]:
        """Stop all transfers while parameters are freed or moved, as an off-load does. Every rank must enter."""
        return self._engine.suspended()

    def complete_store(self) -> HostStore:
        """Copy all experts to each node's host memory between windows, for weight sync. Every rank must call this."""
        return self._engine.complete_store()

    def close(self) -> None:
        """Free everything; parameters get memory of their own. Closing twice is allowed."""
        try:
            if self._planner is not None:
                self._planner.close()
        finally:
            self._engine.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def find_layers(net: nn.Module) -> dict[str, BalancedExperts]:
    """Return the balanced experts of a model by module path."""
    return {path: module for path, module in net.named_modules() if isinstance(module, BalancedExperts)}


def in_plan_order(layers: Mapping[str, BalancedExperts], model: ModelShape) -> dict[str, BalancedExperts]:
    """Sort layers by their index in plans; raise an error that names the path or layer that does not fit."""
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
