"""`BackgroundPlanner` plans one window after another while training goes on, the same plan on every rank.

Steps of a window, in one background thread per rank, in the order in which windows were submitted:
1. Exchange every rank's rows once, over a gloo group of its own. Choose experts for tokens that reach no loss.
2. Plan every R-th layer in this rank's planning process.
3. Gather the planned layers of all ranks and assemble the whole plan from them.
4. Compare the plan's digest on all ranks. A plan that differs anywhere is used nowhere.
5. Make the window's dispatches ahead where all ranks know all their routes.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from equipoise.core import (
    Cluster,
    EquipoiseError,
    InfeasiblePlanError,
    LoadMatrix,
    ModelShape,
    Plan,
    Stage,
    TransferError,
)
from equipoise.core.options import BalancerOptions
from equipoise.core.plan import Bytes, ReplicaTable, Seconds
from equipoise.layer.dispatch import FilledRows, WindowDispatches, prepared_bytes
from equipoise.layer.experts import BalancedExperts
from equipoise.planning.course import Course, Outcome, Way, moved_seconds
from equipoise.planning.rows import (
    FreeTokens,
    RankRows,
    WindowRoutes,
    fill_rows,
    join_forecasts,
    join_rows,
    learn_unknown,
)
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.waits import OwnGroup, all_or_none

_LOG = logging.getLogger(__name__)


class Measured(NamedTuple):
    """What a window took on one rank."""

    realised_s: float
    exposed_s: float


class Planned(NamedTuple):
    """A window ready to begin."""

    plan: Plan
    way: Way = "full"
    """How much was planned."""
    planning_s: float = 0.0
    """Seconds from the exchange of rows to agreement, in the background."""
    waited_s: float = 0.0
    """Seconds that training waited for the plan."""
    dispatches: WindowDispatches | None = None
    """The window's dispatches, where they are made ahead."""
    dispatch: str = "exchanged: nothing is planned"
    """`prepared`, or why layers exchange counts."""
    filled: Mapping[tuple[int, int], FilledRows] = {}
    """By (micro-step, layer index), this rank's tokens whose experts the window chose."""


class BackgroundPlanner:
    """Plans the windows of one EP group, seen from one rank."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        model: ModelShape,
        options: BalancerOptions,
        group: Any,
        layers: Sequence[BalancedExperts] = (),
        worker: PlanWorker | None = None,
    ) -> None:
        """Connect the ranks and start this rank's planning process. Every rank of `group` must call this.

        Args:
            layers: by layer index, for which dispatches are made
            worker: a process to plan in, left running on close; an own one by default
        """
        most = int(cluster.ranks_N.max())
        if options.rows == "mapped" and most == 1 < cluster.ep:
            raise TransferError(
                f"rows='mapped' needs ranks that map each other's memory, but the {cluster.ep} ranks of this EP group "
                "are on as many nodes; use rows='auto'"
            )
        # On GPUs of several nodes the mixed exchange has never run, so there it is for those who ask for it.
        is_tried = cluster.num_ep_nodes == 1 or not any(experts.gate_up.is_cuda for experts in layers)
        self._is_mapped = most > 1 and (options.rows == "mapped" or (options.rows == "auto" and is_tried))
        if options.waves != 1 and (why := why_whole(layers, is_mapped=self._is_mapped)):
            if options.waves != "auto":
                raise TransferError(f"waves={options.waves}: {why}, or waves=1")
            options = replace(options, waves=1)
        self._task, self._options, self._model, self._layers = (cluster, model, options), options, model, layers
        self._group = OwnGroup(group, timeout_s=options.planning_timeout_s)
        # Start the process after the ranks are connected: a failure to connect then leaves no process behind.
        self._owns_worker = worker is None
        self._worker = PlanWorker() if worker is None else worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="equipoise-planning")
        self._is_open = False
        self._windows: deque[tuple[Future[Planned], WindowDispatches, RankRows]] = deque()
        self._taken: WindowDispatches | None = None
        # What this rank knew of the window that was taken, and [L, E] the rows per micro-step that it did not know.
        self._known: RankRows | None = None
        self._before_LE: np.ndarray | None = None
        # What is decided from measured windows, by stage; each planned window until its outcome is known, oldest first.
        self._courses: dict[Stage, Course] = {}
        self._unseen: deque[Planned] = deque()
        self._measured: list[Measured] = []

    def submit(self, rows: RankRows, routes: WindowRoutes, free: FreeTokens | None = None) -> None:
        """Plan the next window in the background, then make its dispatches. Every rank must call this.

        Args:
            routes: what `rows` were counted from; not to be changed until the window has ended
            free: likewise
        """
        dispatches = WindowDispatches(
            [] if isinstance(routes, RankRows) else routes,
            timeout_s=self._options.planning_timeout_s,
            is_mapped=self._is_mapped,
        )
        # Every rank has ended the same windows by now, because all make the same calls.
        measured, self._measured = self._measured, []
        # Submit both jobs at once: the thread then runs them in the same order on every rank.
        fill = partial(fill_rows, routes=routes, free=free)
        planned = self._thread.submit(self._plan, rows, dispatches, measured, self._before_LE, fill)
        self._thread.submit(self._prepare, planned)
        self._windows.append((planned, dispatches, rows))

    def tell(self, measured: Measured) -> None:
        """Take what the window that has ended took on this rank; every rank is told of every window."""
        self._measured.append(measured)

    def learn(self, counted_LE: np.ndarray) -> None:
        """Expect of unknown routes what they were in the window that has ended, of which these rows were counted."""
        assert self._known is not None, "a window has ended"
        self._before_LE = learn_unknown(self._before_LE, counted_LE, known=self._known)

    def take(self) -> Planned:
        """Wait for the oldest window that has not been taken. Every rank must call this."""
        if not self._windows:
            raise InfeasiblePlanError("no window was submitted; submit its routes before it begins")
        begin, limit_s = time.monotonic(), 5 * self._options.planning_timeout_s
        future, _, self._known = self._windows.popleft()
        try:
            with torch.profiler.record_function("equipoise.wait_for_plan"):
                planned = future.result(limit_s)
        except FutureTimeoutError as error:
            raise TransferError(f"rank {self._group.rank}: no plan within {limit_s:g} s; the planner hangs") from error
        self._taken = planned.dispatches
        return planned._replace(waited_s=time.monotonic() - begin)

    def close(self) -> None:
        """End the thread, the planning process and the connections. Closing twice is allowed."""
        # The thread goes last: whatever it waits for, other ranks or the process, has ended by then.
        self._group.close()
        for dispatches in (self._taken, *(dispatches for _, dispatches, _ in self._windows)):
            if dispatches is not None:
                dispatches.close()
        if self._owns_worker:
            self._worker.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker.take_back(self)

    def _plan(
        self,
        rows: RankRows,
        dispatches: WindowDispatches,
        measured: list[Measured],
        before_LE: np.ndarray | None,
        fill: Callable[..., Any],
    ) -> Planned:
        # Step 1: exchange what every rank sends, and what windows took; choose experts for free tokens. The clock
        # starts behind the exchange: a rank may submit long before the others.
        rows_R, measured_R, before_RLE = zip(*self._group.gather((rows, measured, before_LE)), strict=True)
        begin = time.monotonic()
        way: Way = "full"
        correction = 1.0
        if self._options.adapts:
            course = self._decide(rows.stage, measured_R)
            way, correction = course.next_way, course.correction
        loads = join_rows(rows_R, layer_numbers=self._model.layer_numbers, top_k=self._model.top_k)
        if rows.free_ML is not None:
            dispatches.filled = fill(rows_R, rank=self._group.rank, top_k=self._model.top_k)
        forecast = None if loads.coverage_MLR is None else join_forecasts(before_RLE)

        plans: list[Plan] = []

        def assemble() -> str:
            plans.append(self._call("whole", loads, shares, way, correction, forecast))
            return plans[0].digest()

        try:
            # Step 2: plan this rank's share of the layers.
            layers = range(self._group.rank, loads.num_layers, self._group.size)
            shares = all_or_none(partial(self._call, "share", loads, layers, way, forecast), self._group.gather)
            # Step 3: assemble the whole plan from all shares.
            digests = all_or_none(assemble, self._group.gather)
            # Step 4: compare digests.
            strangers = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if strangers:
                raise InfeasiblePlanError(
                    f"ranks {strangers} made another plan than rank 0 (digest {digests[strangers[0]][:12]}, not "
                    f"{digests[0][:12]}); run the same version of equipoise, numpy and numba on all ranks"
                )
        except InfeasiblePlanError:
            # Some servers may have planned this window and some not. All start afresh, so that plans stay equal.
            self._is_open = False
            raise
        why = why_exchanged(rows_R, plans[0], self._options, is_mapped=self._is_mapped)
        made = Planned(
            plans[0],
            way=way,
            planning_s=time.monotonic() - begin,
            dispatches=None if why else dispatches,
            dispatch=f"exchanged: {why}" if why else "prepared",
            filled=dispatches.filled,
        )
        if self._options.adapts:
            self._unseen.append(made)
        return made

    def _decide(self, stage: Stage, measured_R: Sequence[Sequence[Measured]]) -> Course:
        """Learn from windows that have ended, each as long as on its slowest rank; return the stage's course."""
        for one_R in zip(*measured_R, strict=True):
            planned = self._unseen.popleft()
            plan = planned.plan
            seen = Outcome(
                way=planned.way,
                static_s=plan.static_seconds,
                moved_s=moved_seconds(plan),
                realised_s=max(one.realised_s for one in one_R),
                exposed_s=max(one.exposed_s for one in one_R),
            )
            course = self._courses.get(plan.loads.stage, Course()).after(seen)
            self._courses[plan.loads.stage] = course
            if course.said and self._group.rank == 0:
                _LOG.warning(
                    "%s: %s; transfers are priced %.2f times as filed", plan.loads.stage, course.said, course.correction
                )
        return self._courses.get(stage, Course())

    def _prepare(self, planned: Future[Planned]) -> None:
        # Step 5: make all dispatches, on every rank or on none.
        if planned.exception() is None and (dispatches := planned.result().dispatches) is not None:
            dispatches.make(planned.result().plan, self._layers, swap=self._group.swap)

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of this rank's planning server, which is opened first where needed."""
        try:
            if not self._is_open:
                self._worker.lend(self)
                self._worker.call("open", *self._task)
            self._is_open = True
            return self._worker.call(method, *args)
        except EquipoiseError as error:
            raise InfeasiblePlanError(f"could not plan: {error}") from error


def why_whole(layers: Sequence[BalancedExperts], *, is_mapped: bool) -> str:
    """Return why rows do not travel in waves, and what to use instead; empty where they can."""
    if is_mapped:
        return "ranks of a node read each other's rows in place, all at once; use rows='collective'"
    if any(experts.options.dispatch == "two_level" for experts in layers):
        return "a two-level dispatch sends all rows at once; use dispatch='direct'"
    if any(experts.options.gates == "caller" for experts in layers):
        return "this adapter multiplies outputs by gates before rows travel back; use another adapter"
    return ""


def why_exchanged(rows_R: Sequence[RankRows], plan: Plan, options: BalancerOptions, *, is_mapped: bool) -> str:
    """Return why layers must exchange counts in this window; empty where dispatches are made ahead.

    All ranks decide alike, from what they know of each other: a layer that exchanges counts needs every rank.
    """
    if not options.is_prepared:
        return "not asked for"
    for rank, rows in enumerate(rows_R):
        if not rows.has_ids:
            return f"rank {rank} gave counted rows, not routes"
        if rows.coverage_ML is not None:
            return f"rank {rank} knows {float(rows.coverage_ML.mean()):.1%} of its routes"
        if rows.has_gaps and is_mapped:
            return f"rank {rank} has tokens with fewer than K experts, whose rows are not mapped"
    needed = prepared_bytes(plan, is_mapped=is_mapped)
    if needed > options.prepared_bytes:
        return f"{needed:,} bytes of tables are over prepared_bytes={options.prepared_bytes:,}"
    return ""


def owners_plan(micro_steps: int, *, cluster: Cluster, model: ModelShape) -> Plan:
    """Return a plan that knows no load: every expert computes at its owner. A disabled balancer uses it."""
    shape_ML = (micro_steps, model.layers)
    place_LE = np.tile(np.arange(model.experts), (model.layers, 1))
    home_slots = cluster.home_slots(model)
    return Plan(
        loads=LoadMatrix(np.zeros((*shape_ML, cluster.ep, model.experts), dtype=np.int64)),
        cluster=cluster,
        model=model,
        policy="static",
        objective="seconds",
        slots=0,
        home_LE=place_LE // home_slots,
        home_slot_LE=place_LE % home_slots,
        replica_table=ReplicaTable.empty(micro_steps * model.layers),
        ns_ML=np.zeros(shape_ML, dtype=np.int64),
        closed_ns_ML=np.zeros(shape_ML, dtype=np.int64),
        seconds=Seconds(),
        bytes=Bytes(),
        static_seconds=0.0,
    )
