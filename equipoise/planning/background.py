"""`BackgroundPlanner`: plans one window after another while training goes on, the same plan on every rank.

Steps of a window, in a thread of each rank, in the order in which windows were submitted:
1. Exchange: every rank's rows to every rank, once, over an own gloo group.
2. Share: each rank's worker plans every R-th layer.
3. Gather the shares and assemble the whole plan from them, in each worker.
4. Compare the plan's digest on all ranks. A plan that is not the same everywhere is used nowhere.

Knows order and agreement. Does not know how a layer is planned (`desk`), nor what a plan is used for.

Invariants (asserted by the tests):
1. `submit` returns at once; `take` gives plans in the order of submission and says how long it waited.
2. What fails on one rank raises on every rank, naming that rank.
3. The training process never imports numba.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from equipoise.core import Cluster, LoadMatrix, ModelShape, Plan
from equipoise.core.errors import EquipoiseError, InfeasiblePlanError, TransferError
from equipoise.core.plan import Bytes, ReplicaTable, Seconds
from equipoise.planning.exchange import OwnGroup
from equipoise.planning.options import BalancerOptions
from equipoise.planning.rows import RankRows, join_rows
from equipoise.planning.worker import PlanWorker


class Planned(NamedTuple):
    """A plan that all ranks agreed on."""

    plan: Plan
    planning_s: float
    """Seconds from the exchange of rows to agreement, in the background."""
    waited_s: float
    """Seconds that training waited for it."""


class WindowPlanner(Protocol):
    """Gives a plan for every window that was submitted."""

    def submit(self, rows: RankRows) -> None:
        """Take this rank's rows of the next window."""
        ...

    def take(self) -> Planned:
        """Return the plan of the oldest window that has not been taken."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class BackgroundPlanner:
    """Plans the windows of one EP group, seen from one rank."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        model: ModelShape,
        options: BalancerOptions,
        group: Any,
        worker: PlanWorker | None = None,
    ) -> None:
        """Connect the ranks and start this rank's worker. Every rank of `group` must call this.

        Args:
            worker: a process to plan in, left running on close; an own one by default
        """
        self._task, self._options, self._model = (cluster, model, options), options, model
        self._own_worker = PlanWorker() if worker is None else None
        self._worker = worker or self._own_worker
        self._group = OwnGroup(group, timeout_s=options.planning_timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="equipoise-planning")
        self._is_open = False
        self._windows: deque[Future[tuple[Plan, float]]] = deque()

    def submit(self, rows: RankRows) -> None:
        """Take this rank's rows of the next window and plan it in the background. Every rank must call this."""
        self._windows.append(self._thread.submit(self._plan, rows))

    def take(self) -> Planned:
        """Wait for the oldest window that has not been taken. Every rank must call this."""
        if not self._windows:
            raise InfeasiblePlanError("no window was submitted; submit its routes before it begins")
        begin, limit_s = time.monotonic(), 5 * self._options.planning_timeout_s
        try:
            with torch.profiler.record_function("equipoise.wait_for_plan"):
                plan, planning_s = self._windows.popleft().result(limit_s)
        except FutureTimeoutError as error:
            raise TransferError(f"rank {self._group.rank}: no plan within {limit_s:g} s; the planner hangs") from error
        return Planned(plan, planning_s, time.monotonic() - begin)

    def close(self) -> None:
        """End the thread, the worker and the connections. Closing twice is allowed."""
        # The thread goes last: what it may wait for, other ranks or the worker, has ended then.
        self._group.close()
        if self._own_worker is not None:
            self._own_worker.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _plan(self, rows: RankRows) -> tuple[Plan, float]:
        begin = time.monotonic()
        # Step 1: what every rank will send.
        loads = join_rows(self._group.gather(rows), layer_numbers=self._model.layer_numbers)
        # Step 2: this rank's share of the layers.
        mine = range(self._group.rank, loads.num_layers, self._group.size)
        shares = self._all_good(lambda: self._share(loads, mine))
        # Step 3: the whole, from all shares.
        plan, digests = self._whole(loads, shares)
        # Step 4: the same on every rank, or nowhere.
        self._check_equal(digests)
        return plan, time.monotonic() - begin

    def _share(self, loads: LoadMatrix, layers: range) -> Any:
        if not self._is_open:
            self._call("open", *self._task)
        self._is_open = True
        return self._call("share", loads, layers)

    def _whole(self, loads: LoadMatrix, shares: list[Any]) -> tuple[Plan, list[str]]:
        made: list[Plan] = []

        def assemble() -> str:
            made.append(self._call("whole", loads, shares))
            return made[0].digest()

        digests = self._all_good(assemble)
        return made[0], digests

    def _call(self, method: str, *args: Any) -> Any:
        assert self._worker is not None, "a worker is given or started above"
        return self._worker.call(method, *args)

    def _all_good(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on every rank and return all results, or raise on every rank what went wrong on one."""
        try:
            mine = (True, work())
        except EquipoiseError as error:
            mine = (False, str(error))
        answers = self._group.gather(mine)
        for rank, (is_good, value) in enumerate(answers):
            if not is_good:
                # Some desks may have planned this window and some not: all begin anew, so that plans stay equal.
                self._is_open = False
                raise InfeasiblePlanError(f"rank {rank} could not plan: {value}")
        return [value for _, value in answers]

    def _check_equal(self, digests: list[str]) -> None:
        strangers = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if strangers:
            self._is_open = False
            raise InfeasiblePlanError(
                f"ranks {strangers} planned otherwise than rank 0 (digest {digests[strangers[0]][:12]}, not "
                f"{digests[0][:12]}); run the same version of equipoise, numpy and numba on all ranks"
            )


class OwnersOnly:
    """Plans nothing: every expert computes at its owner. No process, no thread, no communication."""

    def __init__(self, *, cluster: Cluster, model: ModelShape) -> None:
        self._cluster, self._model = cluster, model
        self._windows: deque[RankRows] = deque()

    def submit(self, rows: RankRows) -> None:
        """Take this rank's rows of the next window; only its number of micro-steps matters."""
        self._windows.append(rows)

    def take(self) -> Planned:
        """Return contiguous homes without replicas."""
        if not self._windows:
            raise InfeasiblePlanError("no window was submitted; submit its routes before it begins")
        rows = self._windows.popleft()
        plan = owners_plan(len(rows.load_MLE), cluster=self._cluster, model=self._model)
        return Planned(plan, planning_s=0.0, waited_s=0.0)

    def close(self) -> None:
        """Do nothing: nothing was opened."""


def owners_plan(micro_steps: int, *, cluster: Cluster, model: ModelShape) -> Plan:
    """A plan that knows no load: every expert's home is its owner, and every row goes home."""
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
