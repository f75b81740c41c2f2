"""`BackgroundPlanner`: plans one window after another while training goes on, the same plan on every rank.

Steps of a window, in a thread of each rank, in the order in which windows were submitted:
1. Exchange: every rank's rows to every rank, once, over an own gloo group.
2. Share: each rank's worker plans every R-th layer.
3. Gather the shares and assemble the whole plan from them, in each worker.
4. Compare the plan's digest on all ranks. A plan that is not the same everywhere is used nowhere.
5. Where all ranks know all their routes, make the dispatches of the window ahead (`ways`).

Knows order and agreement. Does not know how a layer is planned (`desk`), nor what a plan is used for.

Invariants (asserted by the tests):
1. `submit` returns at once; `take` gives plans in the order of submission and says how long it waited.
2. What fails on one rank raises on every rank, naming that rank.
3. The training process never imports numba.
"""

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from equipoise.core import Cluster, EquipoiseError, InfeasiblePlanError, LoadMatrix, ModelShape, Plan, TransferError
from equipoise.core.options import BalancerOptions
from equipoise.core.plan import Bytes, ReplicaTable, Seconds
from equipoise.layer.experts import BalancedExperts
from equipoise.planning.rows import RankRows, WindowRoutes, WindowWays, join_rows, why_exchanged
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.edges import GradientOf
from equipoise.transfer.engine import Mover, Still, TransferEngine
from equipoise.transfer.node import TransferOptions
from equipoise.transfer.waits import connect, leave

# `OwnGroup`: a gloo group that nothing but planning uses, so that it can talk from a thread while training computes.
#
# Invariants (asserted by the tests):
# 1. `close` ends an exchange that other ranks do not join, at once.
# 2. `swap` is the all-to-all of the training's own group, zero rows included.


_POLL_S = 0.002


class OwnGroup:
    """The ranks of a group, connected once more."""

    def __init__(self, group: Any, *, timeout_s: float) -> None:
        """Connect. Every rank of `group` must call this.

        Args:
            group: the ranks to connect; able to move CPU tensors
            timeout_s: bound on connecting and on every exchange
        """
        self.rank, self.size, self.timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self._is_closing = threading.Event()
        self._gloo = connect(group, timeout_s=timeout_s)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Every rank of the group must call this."""
        with self._named_errors():
            return self._gather(value)

    def swap(self, rows_NX: torch.Tensor, send_R: list[int], receive_R: list[int]) -> torch.Tensor:
        """Send rows to every rank and return theirs, source by source. Every rank of the group must call this."""
        received_NX = rows_NX.new_empty((sum(receive_R), *rows_NX.shape[1:]))
        with self._named_errors():
            self._finish(self._gloo.alltoall_base(received_NX, rows_NX.contiguous(), receive_R, send_R))
        return received_NX

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except TransferError:
            raise
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank}: planning could not exchange with the other {self.size - 1} ranks within "
                f"{self.timeout_s:g} s; look for a rank that ended or did not announce this window: {error}"
            ) from error

    def _gather(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._finish(self._gloo.allgather(lengths, torch.tensor([mine.numel()])))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._finish(self._gloo.allgather(parts, padded))
        return [pickle.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]

    def _finish(self, work: Any) -> None:
        while not work.is_completed():
            if self._is_closing.wait(_POLL_S):
                # What other ranks never join is left behind.
                leave(self._gloo, [work])
                raise TransferError(f"rank {self.rank}: closed while it waited for other ranks to announce a window")
        work.wait()

    def close(self) -> None:
        """End an exchange that waits for other ranks, and take part in none any more."""
        self._is_closing.set()


class Agreed(NamedTuple):
    """A plan that all ranks agreed on."""

    plan: Plan
    seconds: float
    """From the exchange of rows to agreement, in the background."""
    why_exchanged: str
    """Why layers must exchange counts, the same on all ranks; empty where dispatches are made ahead."""


class Planned(NamedTuple):
    """A window ready to begin."""

    plan: Plan
    planning_s: float
    """Seconds from the exchange of rows to agreement, in the background."""
    waited_s: float
    """Seconds that training waited for it."""
    ways: WindowWays | None = None
    """The window's dispatches, where they are made ahead."""
    dispatch: str = "exchanged: nothing is planned"
    """`prepared`, or why layers exchange counts."""


class WindowPlanner(Protocol):
    """Gives a plan for every window that was submitted."""

    def submit(self, rows: RankRows, routes: WindowRoutes) -> None:
        """Take this rank's rows of the next window, and the routes they were counted from."""
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
        layers: Sequence[BalancedExperts] = (),
        worker: PlanWorker | None = None,
    ) -> None:
        """Connect the ranks and start this rank's worker. Every rank of `group` must call this.

        Args:
            layers: by layer index, for which dispatches are made
            worker: a process to plan in, left running on close; an own one by default
        """
        self._task, self._options, self._model, self._layers = (cluster, model, options), options, model, layers
        self._group = OwnGroup(group, timeout_s=options.planning_timeout_s)
        # Not before the ranks are connected: what fails there leaves no process behind.
        self._own_worker = PlanWorker() if worker is None else None
        self._worker = worker or self._own_worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="equipoise-planning")
        self._is_open = False
        self._windows: deque[tuple[Future[Agreed], WindowWays]] = deque()
        self._taken: WindowWays | None = None

    def submit(self, rows: RankRows, routes: WindowRoutes) -> None:
        """Plan the next window in the background, then make its dispatches. Every rank must call this.

        Args:
            routes: what `rows` were counted from; not to be changed until the window has ended
        """
        # Both at once: the thread then works in the same order on every rank, however windows follow each other.
        agreed = self._thread.submit(self._plan, rows)
        ways = WindowWays([] if isinstance(routes, RankRows) else routes, timeout_s=self._options.planning_timeout_s)
        self._thread.submit(self._prepare, agreed, ways)
        self._windows.append((agreed, ways))

    def take(self) -> Planned:
        """Wait for the oldest window that has not been taken. Every rank must call this."""
        if not self._windows:
            raise InfeasiblePlanError("no window was submitted; submit its routes before it begins")
        begin, limit_s = time.monotonic(), 5 * self._options.planning_timeout_s
        future, ways = self._windows.popleft()
        try:
            with torch.profiler.record_function("equipoise.wait_for_plan"):
                agreed = future.result(limit_s)
        except FutureTimeoutError as error:
            raise TransferError(f"rank {self._group.rank}: no plan within {limit_s:g} s; the planner hangs") from error
        waited_s, why = time.monotonic() - begin, agreed.why_exchanged
        if why:
            return Planned(agreed.plan, agreed.seconds, waited_s, dispatch=f"exchanged: {why}")
        self._taken = ways
        return Planned(agreed.plan, agreed.seconds, waited_s, ways, "prepared")

    def close(self) -> None:
        """End the thread, the worker and the connections. Closing twice is allowed."""
        # The thread goes last: what it may wait for, other ranks or the worker, has ended then.
        self._group.close()
        for ways in (self._taken, *(ways for _, ways in self._windows)):
            if ways is not None:
                ways.close()
        if self._own_worker is not None:
            self._own_worker.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._worker is not None:
            self._worker.take_back(self)

    def _plan(self, rows: RankRows) -> Agreed:
        # Step 1: what every rank will send.
        rows_R = self._group.gather(rows)
        # Not before: a rank may announce a window long before the last one can.
        begin = time.monotonic()
        loads = join_rows(rows_R, layer_numbers=self._model.layer_numbers)
        # Step 2: this rank's share of the layers.
        mine = range(self._group.rank, loads.num_layers, self._group.size)
        shares = self._all_good(lambda: self._share(loads, mine))
        # Step 3: the whole, from all shares.
        plan, digests = self._whole(loads, shares)
        # Step 4: the same on every rank, or nowhere.
        self._check_equal(digests)
        return Agreed(plan, time.monotonic() - begin, why_exchanged(rows_R, plan, self._options))

    def _prepare(self, agreed: Future[Agreed], ways: WindowWays) -> None:
        # Step 5: all dispatches, on every rank or on none.
        if agreed.exception() is None and not agreed.result().why_exchanged:
            ways.make(agreed.result().plan, self._layers, rank=self._group.rank, swap=self._group.swap)

    def _share(self, loads: LoadMatrix, layers: range) -> Any:
        if not self._is_open:
            assert self._worker is not None, "a worker is given or started above"
            self._worker.lend(self)
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


# `OwnersOnly`: the planner of a disabled balancer. Every expert computes at its owner, and every row goes there.


class OwnersOnly:
    """Plans nothing: every expert computes at its owner. No process, no thread, no communication."""

    def __init__(self, *, cluster: Cluster, model: ModelShape) -> None:
        self._cluster, self._model = cluster, model
        self._windows: deque[RankRows] = deque()

    def submit(self, rows: RankRows, routes: WindowRoutes) -> None:
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


# The two parts of a balancer: what plans its windows and what moves its experts.


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
