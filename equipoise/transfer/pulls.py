"""`Puller`: a thread that copies the replicas of coming visits into buffers ahead of the layers that use them.

    Copies          how several tensors are copied at once: `PlainCopies`, `KernelCopies`, `ParallelCopies`
    Paths           where weights come from: `MappedPath` (homes of the node's ranks), `HostPath` (the host store)
    PullSchedule    what each buffer holds, and what to fill next along the plan's itinerary
    Puller          the thread: one fill at a time, one lock around the schedule

A pull takes the path that the plan chose for it, unless `TransferOptions.path` forces one. It waits until its path has
the weights of the current version; nobody overwrites weights before all pullers have paused. On a device the copies run
in a lane beside the layers: they begin once the layer that used the buffer last is finished there, and the layer that
uses it next waits for them on the device, not in the thread that feeds it.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch

from equipoise.core.errors import TransferError
from equipoise.core.options import CopyMethod
from equipoise.core.plan import PATHS, PHASES, Itinerary, Plan, Visit
from equipoise.core.plan import Path as PathName
from equipoise.transfer.cuda_pages import call_driver, load_driver
from equipoise.transfer.host_store import HostStore
from equipoise.transfer.node import Arena, ExpertWeights, NodeMemory, copy_expert
from equipoise.transfer.waits import REACHED, VERSION, Lane, Mark, Transfer

TRACKS = 4
"""Two experts of two matrices: what a rank with two slots pulls for a visit."""
_JOIN_S = 1.0
"""How long closing waits for a pull that hangs before it leaves the (daemon) thread behind."""
_LOG = logging.getLogger(__name__)


class Copy(NamedTuple):
    """One tensor to another of the same shape and dtype, both contiguous."""

    into: torch.Tensor
    out_of: torch.Tensor


class PlainCopies:
    """One copy after the other, on the current stream."""

    name = "plain"

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy in order."""
        for into, out_of in copies:
            into.copy_(out_of, non_blocking=True)


class KernelCopies:
    """One kernel for all copies inside a CUDA device.

    A copy inside a device takes about as long to reach full speed as to move a small matrix, so several copies in a row
    take longer than one copy of as many bytes (`benchmarks.transfer` measures all three methods).
    """

    name = "kernel"

    def __init__(self, device: torch.device) -> None:
        """Compile the kernel: the first pull should not have to."""
        from equipoise.transfer import triton_copies

        self._kernel = triton_copies
        with torch.cuda.device(device):
            self.copy([Copy(*torch.zeros(2, triton_copies.SIZE, dtype=torch.int64, device=device))])

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy on the current stream."""
        self._kernel.copy_pieces(copies)


class ParallelCopies:
    """Up to `TRACKS` copies at once by copy engines, on the current stream and on streams beside it."""

    name = "parallel"

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, load_driver()
        self._streams = [torch.cuda.Stream(device) for _ in range(TRACKS - 1)]
        self._begin, self._ends = torch.cuda.Event(), [torch.cuda.Event() for _ in self._streams]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy once the current stream gets here; what it is given next waits for all copies."""
        main, beside = torch.cuda.current_stream(self._device), self._streams[: max(len(copies) - 1, 0)]
        self._begin.record(main)
        for stream in beside:
            stream.wait_event(self._begin)
        tracks = [main.cuda_stream, *(stream.cuda_stream for stream in beside)]
        for number, (into, out_of) in enumerate(copies):
            assert into.is_contiguous() and out_of.is_contiguous(), "a copy of bytes needs contiguous tensors"
            # The driver's call: torch's takes several times as long in the calling thread, and keeps the interpreter.
            given = (into.data_ptr(), out_of.data_ptr(), into.nbytes, tracks[number % len(tracks)])
            call_driver(self._driver, "cuMemcpyAsync", *given)
        for stream, end in zip(beside, self._ends, strict=False):
            end.record(stream)
            main.wait_event(end)


Copier = PlainCopies | KernelCopies | ParallelCopies


def make_copier(device: torch.device, method: CopyMethod = "auto", *, sources: Iterable[torch.Tensor] = ()) -> Copier:
    """Choose how copies inside a node are made, and log it.

    Args:
        method: `auto` is plain on the CPU; on a CUDA device a kernel, or parallel where sources are on others
        sources: a tensor of every process whose memory is copied from
    """
    if device.type != "cuda" and method in ("kernel", "parallel"):
        raise TransferError(f"copies is {method!r}, but experts are on {device}; give 'plain' or 'auto' there")
    if method == "auto" and device.type == "cuda":
        has_kernel = find_spec("triton") is not None and all(_device_of(t) == device.index for t in sources)
        method = "kernel" if has_kernel else "parallel"
    copier: Copier = PlainCopies()
    if method in ("kernel", "parallel"):
        copier = KernelCopies(device) if method == "kernel" else ParallelCopies(device)
    _LOG.info("pulls inside a node are %s copies on %s", copier.name, device)
    return copier


def _device_of(tensor: torch.Tensor) -> int:
    """The device that holds a tensor's memory, also where this process sees it as its own device's."""
    driver = load_driver()
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call_driver(driver, "cuPointerGetAttribute", kind, tensor.data_ptr()))


class Need(NamedTuple):
    """A replica that this rank holds at a visit, and where its weights come from."""

    layer: int
    expert: int
    source: int
    """Home rank."""
    source_slot: int
    path: PathName


def needs_of(plan: Plan, visit: Visit, *, rank: int) -> tuple[Need, ...]:
    """Replicas of `rank` at a visit, in slot order, whether or not they are still resident."""
    micro_step, phase, layer = visit
    table, at = plan.replica_table, micro_step * plan.home_LE.shape[0] + layer
    entries = range(int(table.start_ML[at]), int(table.start_ML[at + 1]))
    return tuple(
        Need(
            layer,
            int(table.expert_P[p]),
            int(plan.home_LE[layer, table.expert_P[p]]),
            int(plan.home_slot_LE[layer, table.expert_P[p]]),
            PATHS[int(table.path_P2[p, PHASES.index(phase)])],
        )
        for p in entries
        if table.rank_P[p] == rank
    )


class PullPath(Protocol):
    """Where weights come from: a path copies and nothing else, the puller waits."""

    @property
    def name(self) -> str:
        """What counters and errors call it."""
        ...

    def is_ready(self, need: Need, version: int) -> bool:
        """Whether the needed weights of this version, or of a later one, can be copied now."""
        ...

    def pull(self, needs: Mapping[int, Need], buffer: ExpertWeights) -> int:
        """Copy needed weights into slots of a buffer, on the current stream, and return the bytes.

        Args:
            needs: by slot; all of them ready
        """
        ...


class MappedPath:
    """Copies from the mapped home weights of a rank of the same node: `peer` on CUDA devices, `shm` on the CPU."""

    name = "shm"

    def __init__(self, node: NodeMemory, copier: Copier | None = None) -> None:
        """
        Args:
            copier: how copies are made, if not as the node's options say
        """
        self._node, self.name = node, node.direct_path
        homes = (node.home[rank][0].gate_up_SFD for rank in node.peers)
        self._copier = copier or make_copier(node.device, node.options.copies, sources=homes)

    def is_ready(self, need: Need, version: int) -> bool:
        """Whether the home has announced the version."""
        return bool(self._node.cells[need.source][VERSION] >= version)

    def pull(self, needs: Mapping[int, Need], buffer: ExpertWeights) -> int:
        """Copy all experts at once."""
        copies = [
            Copy(into[slot], out_of[need.source_slot])
            for slot, need in needs.items()
            for into, out_of in zip(buffer.tensors(), self._node.home[need.source][need.layer].tensors(), strict=True)
        ]
        self._copier.copy(copies)
        return sum(int(copy.into.nbytes) for copy in copies)


class HostPath:
    """Copies from the node's host store, pinned where there is a device."""

    name = "host"

    def __init__(self, store: HostStore) -> None:
        self._store = store

    def is_ready(self, need: Need, version: int) -> bool:
        """Whether the store holds the expert's weights of the version."""
        return self._store.version(need.layer, need.expert) >= version

    def pull(self, needs: Mapping[int, Need], buffer: ExpertWeights) -> int:
        """Copy expert by expert, which fills the link; in checked mode compare each one's checksum before."""
        copied = 0
        for slot, need in needs.items():
            self._store.check(need.layer, need.expert)
            copied += copy_expert(buffer, slot, self._store.experts(need.layer), need.expert)
        return copied


class Fill(NamedTuple):
    """A buffer to fill with the replicas of one micro-step of one layer."""

    entry: tuple[int, int]
    """Micro-step and layer."""
    buffer: int
    needs: tuple[Need, ...]


class PullSchedule:
    """One rank's position in a window's itinerary, what each replica buffer holds, and what to fill next.

    A visit that the layer announces becomes the position, whether it is the next one or not. At most `depth` visits
    ahead of it, `begin_next` follows the itinerary's buffers. A visit whose replicas are nowhere is filled first.

    A buffer in use by the latest announced visit is never filled for another one, and visits in the itinerary's order,
    backward and repeated ones included, are never on demand.
    """

    def __init__(self, plan: Plan, *, rank: int) -> None:
        if plan.itinerary is None:
            raise TransferError(f"a plan of policy {plan.policy!r} has no itinerary and cannot be executed")
        self._needs_at: Callable[[Visit], tuple[Need, ...]] = cache(partial(needs_of, plan, rank=rank))
        self._itinerary: Itinerary = plan.itinerary
        self._visits = self._itinerary.visits()
        self._index = {visit: at for at, visit in enumerate(self._visits)}
        self._position = -1
        self._holds: list[tuple[int, int] | None] = [None] * (self._itinerary.depth + 1)
        self._leased: int | None = None
        self._urgent: Fill | None = None
        self.open_layers: set[int] = set()
        """Layers whose home weights have arrived; only these are pulled."""
        self.filling: Fill | None = None

    def announce(self, visit: Visit) -> tuple[Fill, bool]:
        """Make `visit` the position.

        Returns: the buffer with its replicas, once `holds` is true for it; and whether the visit was unexpected
        """
        at, before = self._index.get(visit), self._position
        entry, needs = (visit.micro_step, visit.layer), self._needs_at(visit)
        if at is not None:
            self._position = at
        # The buffer that holds the visit's replicas already, else the itinerary's, else the first.
        planned = 0 if at is None else int(self._itinerary.buffer_V[at])
        fill = Fill(entry, self._holds.index(entry) if entry in self._holds else planned, needs)
        self._leased = fill.buffer if needs else None
        self._urgent = None
        if not needs or self.holds(fill):
            return fill, False
        if self.filling is None or self.filling[:2] != fill[:2]:
            self._urgent = fill
        is_due = at is not None and before < at <= before + self._itinerary.depth
        return fill, not is_due

    def holds(self, fill: Fill) -> bool:
        """Whether the buffer holds what `fill` says, completely."""
        return self._holds[fill.buffer] == fill.entry

    def begin_next(self) -> Fill | None:
        """Begin what is to be filled now, if anything may be: until `end` its buffer holds nothing."""
        plan, fill = self._itinerary, None
        if self._urgent is not None and self._urgent.entry[1] in self.open_layers:
            fill = self._urgent
        ahead = range(self._position + 1, min(self._position + 1 + plan.depth, len(self._visits)))
        for at in ahead if fill is None else ():
            if not plan.pulls_V[at] or plan.ready_from_V[at] > max(self._position, 0):
                continue
            micro_step, _, layer = self._visits[at]
            if layer not in self.open_layers:
                continue
            planned = Fill((micro_step, layer), int(plan.buffer_V[at]), self._needs_at(self._visits[at]))
            if planned.needs and planned.buffer != self._leased and not self.holds(planned):
                fill = planned
                break
        if fill is not None:
            self._holds[fill.buffer], self.filling = None, fill
            self._urgent = None if self._urgent == fill else self._urgent
        return fill

    def end(self, *, is_filled: bool = True) -> None:
        """Note that what was begun is complete, or that it was given up and the buffer holds nothing."""
        assert self.filling is not None, "end of a fill that was not begun"
        self._holds[self.filling.buffer] = self.filling.entry if is_filled else None
        self.filling = None

    def close(self, layer: int) -> None:
        """Allow no pulls of a layer any more, and forget what buffers hold of it."""
        self.open_layers.discard(layer)
        self._holds = [None if held is not None and held[1] == layer else held for held in self._holds]

    def forget(self) -> None:
        """Let all buffers hold nothing, because weights may have changed."""
        self._holds = [None] * len(self._holds)
        self._leased = self._urgent = None


class Puller:
    """The thread that fills the replica buffers, and what each holds."""

    def __init__(self, node: NodeMemory, paths: Mapping[str, PullPath]) -> None:
        """Start the thread, paused.

        Args:
            paths: by the plan's name for them; may be changed while paused
        """
        self._node, self._paths = node, paths
        self._buffers, count = node.buffers, node.layout.depth + 1
        self._lane = Lane(node.device)
        self._filled, self._free = [REACHED] * count, [REACHED] * count
        self._lent: int | None = None
        self._changed = threading.Condition()
        self._schedule: PullSchedule | None = None
        self._version = 0
        self._is_paused, self._is_closed = True, False
        self._failure: TransferError | None = None
        self._thread = threading.Thread(target=self._run, name="equipoise-puller", daemon=True)
        self._thread.start()

    def resume(self, schedule: PullSchedule, *, version: int) -> None:
        """Fill as `schedule` says from now on, with weights of `version`."""
        with self._changed:
            self._schedule, self._version, self._is_paused = schedule, version, False
            self._changed.notify_all()

    def pause(self) -> None:
        """Stop filling, and wait until a fill that has begun is over, on the device too."""
        with self._changed:
            self._is_paused = True
            filling = None if self._schedule is None else self._schedule.filling
            transfer = Transfer("pull") if filling is None else self._transfer(filling.needs[0])
            self._wait(lambda: self._schedule is None or self._schedule.filling is None, transfer)
            self._wait(lambda: all(mark.is_reached() for mark in self._filled), transfer)

    def open_layer(self, layer: int) -> None:
        """Pull from the homes of a layer from now on: all ranks of the node hold its weights."""
        with self._changed:
            if self._schedule is not None:
                self._schedule.open_layers.add(layer)
            self._changed.notify_all()

    def close_layer(self, layer: int) -> None:
        """Pull from the homes of a layer no more, and wait until a fill that has begun is over, on the device too."""
        with self._changed:
            schedule = self._schedule
            if schedule is None:
                return
            schedule.close(layer)
            transfer = Transfer("pull", layer=layer, path=self._node.direct_path)
            self._wait(lambda: schedule.filling is None or schedule.filling.entry[1] != layer, transfer)
            # A fill that has ended meanwhile may have been marked as held.
            schedule.close(layer)
            self._wait(lambda: all(mark.is_reached() for mark in self._filled), transfer)

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return this rank's replica weights at `visit`; what the current stream is given next waits for them."""
        fill = self._lend(visit)
        return self._buffers.slots[fill.buffer].map(lambda tensor: tensor[: len(fill.needs)])

    def joined(self, visit: Visit) -> ExpertWeights | None:
        """Return home slots and then this rank's replicas at `visit`, in one tensor each; None where they are apart."""
        if not isinstance(self._buffers, Arena):
            return None
        fill = self._lend(visit)
        held, home = len(fill.needs), self._node.home[self._node.rank][visit.layer]
        matrices = self._buffers.joined[visit.layer][fill.buffer]
        pairs = zip(home[2:], self._buffers.slots[fill.buffer][2:], strict=False)
        biases = (None if a is None or b is None else torch.cat([a, b[:held]]) for a, b in pairs)
        return ExpertWeights(*(matrix[: home.num_slots + held] for matrix in matrices), *biases)

    def close(self) -> None:
        """End the thread and let go of the buffers. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        # Whoever frees the buffers next must not do so under a copy.
        with self._lane.work():
            Mark.now(self._node.device).block()
        # An error refers to the calls it went through, and they to this object and to shared memory.
        self._schedule, self._paths, self._failure = None, {}, None

    def _lend(self, visit: Visit) -> Fill:
        """Let the current stream have the buffer with the replicas of `visit`, and take back the one it had."""
        counters, device = self._node.counters, self._node.device
        with self._changed:
            if self._schedule is None or self._is_paused:
                raise TransferError(f"{visit} asks for replicas, but no window is open or the engine is suspended")
            schedule = self._schedule
            if self._lent is not None:
                # The stream has been given everything that uses the buffer by now.
                self._free[self._lent] = Mark.now(device)
            fill, is_on_demand = schedule.announce(visit)
            self._lent = fill.buffer if fill.needs else None
            self._changed.notify_all()
            if not fill.needs:
                return fill
            transfer = self._transfer(fill.needs[0])
            with counters.timed(transfer.path, device):
                self._wait(lambda: schedule.holds(fill), transfer)
                self._filled[fill.buffer].hold_up(device)
            counters.on_demand += is_on_demand
        return fill

    def _wait(self, is_ready: Callable[[], bool], transfer: Transfer) -> None:
        """Wait until ready or failed, releasing the lock in between."""
        self._node.watchdog.wait(lambda: self._failure is not None or is_ready(), transfer, pause=self._changed.wait)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while (fill := self._take()) is not None:
                with self._lane.work(after=self._free[fill.buffer]):
                    is_filled = self._pull(fill)
                    filled = Mark.now(self._node.device)
                with self._changed:
                    self._filled[fill.buffer] = filled
                    if self._schedule is not None:
                        self._schedule.end(is_filled=is_filled)
                    self._changed.notify_all()
        except RuntimeError as error:
            failure = error if isinstance(error, TransferError) else self._node.watchdog.abort(f"pull failed: {error}")
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _take(self) -> Fill | None:
        """Wait for the next fill and begin it; None once closed."""
        with self._changed:
            while not self._is_closed:
                fill = None if self._schedule is None or self._is_paused else self._schedule.begin_next()
                if fill is not None:
                    return fill
                self._changed.wait()
        return None

    def _pull(self, fill: Fill) -> bool:
        """Copy a visit's replicas; False where a pause, or the layer's end, came before their weights were ready."""
        buffer, slot, needs = self._buffers.slots[fill.buffer], 0, fill.needs
        while slot < len(needs):
            first, path = needs[slot], self._paths[needs[slot].path]
            self._node.watchdog.wait(
                lambda: self._is_stopped(first) or path.is_ready(first, self._version),  # noqa: B023  # called here alone
                self._transfer(first),
            )
            # Replicas from this slot on that are ready and take the same path are copied together.
            together: dict[int, Need] = {}
            for at, need in enumerate(needs[slot:], slot):
                if self._paths[need.path] is not path or self._is_stopped(need):
                    break
                if not path.is_ready(need, self._version):
                    break
                together[at] = need
            if not together:
                return False
            try:
                with torch.profiler.record_function("equipoise.pull"):
                    copied = path.pull(together, buffer)
            except TransferError as error:
                # Of several, the path's own message says which.
                one = self._transfer(first)
                whole = one if len(together) == 1 else one._replace(expert=None, peer=None)
                raise self._node.watchdog.abort(f"{whole} failed: {error}") from error
            self._node.counters.arrive(path.name, copied)
            self._node.counters.pulls += len(together)
            slot += len(together)
        return True

    def _is_stopped(self, need: Need) -> bool:
        schedule = self._schedule
        return self._is_closed or self._is_paused or schedule is None or need.layer not in schedule.open_layers

    def _transfer(self, need: Need) -> Transfer:
        return Transfer("pull", need.layer, need.expert, self._paths[need.path].name, need.source)
