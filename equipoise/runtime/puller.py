"""`Puller`: a thread that fills replica buffers ahead of the visits that use them.

Knows the walk, the buffers and the paths. Does not know windows' edges or gradients.

One thread per rank, one fill at a time, one lock around the walk's state. Replicas of a visit that are there go in one
submission. Weights are one-sided within a version: a pull waits until its path says that the weights of that version
are there, and nobody overwrites weights before all have paused. On a device the copies run in a lane beside the layers:
they begin once the layer that used the buffer last is finished there, and the layer that uses it next waits for them on
the device, not in the thread that feeds it.

Invariants (asserted by the tests):
1. Replicas are bit-equal to their home's weights of the current version, whatever the delays on either side.
2. After `pause` no pull runs, and none starts before `resume`; after `close_layer` none of that layer, before
   `open_layer`.
3. A pull that fails or hangs raises in the rank that waits for it, by name, within the bound.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from equipoise.core.errors import TransferError
from equipoise.core.itinerary import Visit
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.itinerary_walk import Fill, Walk
from equipoise.runtime.node import NodeMemory
from equipoise.runtime.paths import Need, Path
from equipoise.runtime.shift import PathShift
from equipoise.runtime.streams import REACHED, Lane, Mark, Standstill
from equipoise.runtime.watchdog import Transfer

_JOIN_S = 1.0
"""How long closing waits for a pull that hangs before it leaves the (daemon) thread behind."""


class Puller:
    """The thread that fills the replica buffers, and what each holds."""

    def __init__(self, node: NodeMemory, paths: Mapping[str, Path]) -> None:
        """Start the thread, paused.

        Args:
            paths: by the plan's name for them; may be changed while paused
        """
        self._node, self._paths = node, paths
        self._buffers, count = node.buffers, node.layout.depth + 1
        self._lane = Lane(node.device)
        self._shift = PathShift(paths, near=node.peers, is_on=node.options.path == "plan")
        self._filled, self._free = [REACHED] * count, [REACHED] * count
        self._lent: int | None = None
        self._changed = threading.Condition()
        self._walk: Walk | None = None
        self._version = 0
        self._is_paused, self._is_closed = True, False
        self._failure: TransferError | None = None
        self._thread = threading.Thread(target=self._run, name="equipoise-puller", daemon=True)
        self._thread.start()

    def resume(self, walk: Walk, *, version: int) -> None:
        """Fill along `walk` from now on, with weights of `version`."""
        with self._changed:
            self._shift.open_window(walk.cluster)
            self._walk, self._version, self._is_paused = walk, version, False
            self._changed.notify_all()

    def pause(self) -> None:
        """Stop filling, and wait until a fill that has begun is over, on the device too."""
        with self._changed:
            self._is_paused = True
            filling = None if self._walk is None else self._walk.filling
            transfer = Transfer("pull") if filling is None else self._transfer(filling.needs[0])
            self._wait(lambda: self._walk is None or self._walk.filling is None, transfer)
            self._wait(lambda: all(mark.is_reached() for mark in self._filled), transfer)

    def open_layer(self, layer: int) -> None:
        """Pull from the homes of a layer from now on: their weights are there, on all ranks of the node."""
        with self._changed:
            if self._walk is not None:
                self._walk.open(layer)
            self._changed.notify_all()

    def close_layer(self, layer: int) -> None:
        """Pull from the homes of a layer no more, and wait until a fill that has begun is over, on the device too."""
        with self._changed:
            walk = self._walk
            if walk is None:
                return
            walk.close(layer)
            transfer = Transfer("pull", layer=layer, path=self._node.direct_path)
            self._wait(lambda: walk.filling is None or walk.filling.layer != layer, transfer)
            # A fill that has ended meanwhile may have been marked as held.
            walk.close(layer)
            self._wait(lambda: all(mark.is_reached() for mark in self._filled), transfer)

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return this rank's replica weights at `visit`; what the current stream is given next waits for them."""
        fill = self._lend(visit)
        return ExpertWeights(*(None if t is None else t[: len(fill.needs)] for t in self._buffers.slots(fill.buffer)))

    def joined(self, visit: Visit) -> ExpertWeights | None:
        """Return home slots and then this rank's replicas at `visit`, in one tensor each; None where they are apart."""
        if not self._buffers.is_joined:
            return None
        fill = self._lend(visit)
        held, home = len(fill.needs), self._node.home(self._node.rank, visit.layer)
        matrices = self._buffers.joined(visit.layer, fill.buffer)
        pairs = zip(home[2:], self._buffers.slots(fill.buffer)[2:], strict=False)
        biases = (None if a is None or b is None else torch.cat([a, b[:held]]) for a, b in pairs)
        return ExpertWeights(*(matrix[: home.num_slots + held] for matrix in matrices), *biases)

    def close(self) -> None:
        """End the thread and let go of the buffers. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        # Whoever frees the buffers next must not do so under a copy.
        self._lane.mark().block()
        # An error refers to the calls it went through, and they to this object and to shared memory.
        self._walk, self._paths, self._failure = None, {}, None

    def _lend(self, visit: Visit) -> Fill:
        """Let the current stream have the buffer with the replicas of `visit`, and take back the one it had."""
        standstill = Standstill(self._node.device)
        with self._changed:
            if self._walk is None or self._is_paused:
                raise TransferError(f"{visit} asks for replicas, but no window is open or the engine is suspended")
            walk = self._walk
            if self._lent is not None:
                # All that used it has been given to the stream by now.
                self._free[self._lent] = Mark.now(self._node.device)
            fill, is_on_demand = walk.announce(visit)
            self._lent = fill.buffer if fill.needs else None
            self._changed.notify_all()
            if fill.needs:
                waited = self._wait(lambda: walk.holds(fill), self._transfer(fill.needs[0]))
                self._filled[fill.buffer].hold_up(self._node.device)
                standstill.end()
                self._count(fill, waited, standstill)
                self._node.counters.on_demand += is_on_demand
        return fill

    def _count(self, fill: Fill, waited: float, standstill: Standstill) -> None:
        path = self._paths[fill.needs[0].path].name
        if self._node.device.type == "cpu":
            self._node.counters.wait(path, waited)
        else:
            self._node.counters.stop(path, standstill)

    def _wait(self, is_ready: Callable[[], bool], transfer: Transfer) -> float:
        """Wait with the lock given up in between, until ready or failed."""
        waited = self._node.watchdog.wait(
            lambda: self._failure is not None or is_ready(),
            transfer,
            pause=self._changed.wait,
        )
        if self._failure is not None:
            raise self._failure
        return waited

    def _run(self) -> None:
        try:
            while (fill := self._take()) is not None:
                with self._lane.work(after=self._free[fill.buffer]):
                    is_filled = self._pull(fill)
                with self._changed:
                    self._filled[fill.buffer] = self._lane.mark()
                    if self._walk is not None:
                        self._walk.end(is_filled=is_filled)
                    self._changed.notify_all()
        except RuntimeError as error:
            self._fail(error)

    def _take(self) -> Fill | None:
        """Wait for the next fill and begin it; None once closed."""
        with self._changed:
            while not self._is_closed:
                fill = None if self._walk is None or self._is_paused else self._walk.next_fill()
                if fill is not None and self._walk is not None:
                    self._walk.begin(fill)
                    return fill
                self._changed.wait()
        return None

    def _pull(self, fill: Fill) -> bool:
        """Bring a visit's replicas; False where a pause, or the layer's end, came before their weights."""
        needs, slot = self._chosen(fill), 0
        while slot < len(needs):
            waited_s = self._node.watchdog.wait(partial(self._is_over, needs[slot]), self._transfer(needs[slot]))
            together = self._ready_from(needs, slot)
            if not together:
                return False
            self._copy(fill.buffer, together, waited_s=waited_s)
            slot += len(together)
        return True

    def _chosen(self, fill: Fill) -> list[Need]:
        """The needs by the paths they really take."""
        chosen = [self._shift.choose(need, version=self._version) for need in fill.needs]
        self._node.counters.shifted += sum(a is not b for a, b in zip(chosen, fill.needs, strict=True))
        return chosen

    def _is_over(self, need: Need) -> bool:
        return self._is_closed or self._is_paused or not self._is_open(need) or self._is_ready(need)

    def _is_open(self, need: Need) -> bool:
        return self._walk is not None and self._walk.is_open(need.layer)

    def _is_ready(self, need: Need) -> bool:
        return self._is_open(need) and self._paths[need.path].is_ready(need, self._version)

    def _ready_from(self, needs: Sequence[Need], first: int) -> dict[int, Need]:
        """Replicas by slot, from one on, that can be copied together now: by one path, without a gap."""
        together: dict[int, Need] = {}
        for slot, need in enumerate(needs[first:], first):
            if self._paths[need.path] is not self._paths[needs[first].path] or not self._is_ready(need):
                break
            together[slot] = need
        return together

    def _copy(self, buffer: int, needs: Mapping[int, Need], *, waited_s: float) -> None:
        first = next(iter(needs.values()))
        path, begin, copying = self._paths[first.path], time.monotonic(), Standstill(self._node.device)
        with torch.profiler.record_function("equipoise.pull"):
            try:
                copied = path.pull(needs, self._buffers.slots(buffer))
            except TransferError as error:
                # Of several, the path's own words say which.
                one = self._transfer(first)
                whole = one if len(needs) == 1 else one._replace(expert=None, peer=None)
                raise self._node.watchdog.abort(f"{whole} failed: {error}") from error
        copying.end()
        if self._node.device.type == "cpu":
            waited_s += time.monotonic() - begin
        self._shift.note(first.path, copied, waited_s=waited_s, copying=copying)
        self._node.counters.arrive(path.name, copied)
        self._node.counters.pulls += len(needs)

    def _transfer(self, need: Need) -> Transfer:
        return Transfer("pull", need.layer, need.expert, self._paths[need.path].name, need.source)

    def _fail(self, error: RuntimeError) -> None:
        failure = error if isinstance(error, TransferError) else self._node.watchdog.abort(f"pull failed: {error}")
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
