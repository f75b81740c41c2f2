"""A clock with signals and lanes: what `events.py` plays on.

A programme is a generator that yields the signals it waits for. Transfers queue on lanes in order of issue; one runs
when what it needs has been given and it is at the head of all its lanes, and stands still while its group is paused.
A heap holds what happens next, ties in the order they were planned.

Knows time, names and queues. Does not know experts.

Invariants (asserted by the tests):
1. No lane carries two transfers at once, and nothing moves while its group is paused.
2. A transfer takes its time, pauses left out, whatever happens around it.
"""

import heapq
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from equipoise.sim.result import Event, Lane

NANO = 10**9
Signal = tuple[Any, ...]
"""The name of something that happens once."""
Programme = Generator[tuple[Signal, ...], None, None]
"""What a rank does: it yields the signals it waits for."""
LaneKey = tuple[str, int, int]
"""Kind of lane, pipeline stage, rank."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Weights or gradients on their way: of one expert, or of a layer at a window's edge."""

    name: str
    lane: Lane
    ranks: tuple[int, ...]
    """Whose bars it draws."""
    lanes: tuple[LaneKey, ...]
    left: int
    """Nanoseconds still to go."""
    needs: Signal
    done: Signal
    began: int = -1
    resumed: int = 0


@dataclass(slots=True, eq=False)
class World:
    """The clock, the signals given so far, the lanes, and the bars drawn."""

    now: int = 0
    agenda: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    given: set[Signal] = field(default_factory=set)
    waiting: dict[Signal, list[Callable[[], None]]] = field(default_factory=dict)
    queues: dict[LaneKey, list[Transfer]] = field(default_factory=dict)
    running: dict[int, list[Transfer]] = field(default_factory=dict)
    """Transfers on their way, by pipeline stage."""
    paused: set[int] = field(default_factory=set)
    met: dict[Signal, int] = field(default_factory=dict)
    bars: list[tuple[int, Event]] = field(default_factory=list)
    """(pipeline stage, bar)."""
    order: Any = field(default_factory=count)

    def at(self, when: int, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), action))

    def run(self) -> None:
        while self.agenda:
            self.now, _, action = heapq.heappop(self.agenda)
            action()

    def give(self, signal: Signal) -> None:
        self.given.add(signal)
        for action in self.waiting.pop(signal, []):
            action()

    def when(self, signals: Sequence[Signal], action: Callable[[], None]) -> None:
        """Do `action` once all signals have been given."""
        missing = next((s for s in signals if s not in self.given), None)
        if missing is None:
            action()
        else:
            self.waiting.setdefault(missing, []).append(lambda: self.when(signals, action))

    def start(self, programme: Programme) -> None:
        def step() -> None:
            wanted = next(programme, None)
            if wanted is not None:
                self.when(wanted, step)

        step()

    def busy(self, stage: int, bar: tuple[int, Lane, str], took: int) -> Signal:
        """Draw a bar and give a signal at its end."""
        signal = ("busy", next(self.order))
        rank, lane, name = bar
        if took:
            self.bars.append((stage, Event(rank, lane, name, self.now / NANO, (self.now + took) / NANO)))
        self.at(self.now + took, lambda: self.give(signal))
        return signal

    def meet(self, signal: Signal, ranks: int, then: Callable[[], None]) -> Signal:
        """Count a rank in; the last one does `then`, which gives the signal."""
        self.met[signal] = self.met.get(signal, 0) + 1
        if self.met[signal] == ranks:
            then()
        return signal

    def queue(self, stage: int, transfer: Transfer) -> None:
        for lane in transfer.lanes:
            self.queues.setdefault(lane, []).append(transfer)
        self.when((transfer.needs,), lambda: self.dispatch(stage))

    def dispatch(self, stage: int) -> None:
        """Start every transfer that is ready and at the head of all its lanes."""
        if stage in self.paused:
            return
        for lane, queued in self.queues.items():
            head = queued[0] if queued and lane[1] == stage else None
            if head is None or head in self.running.setdefault(stage, []) or head.needs not in self.given:
                continue
            if all(self.queues[other][0] is head for other in head.lanes):
                head.began = self.now if head.began < 0 else head.began
                self.running[stage].append(head)
                self._continue(stage, head)

    def _continue(self, stage: int, transfer: Transfer) -> None:
        transfer.resumed = self.now
        began = self.now
        self.at(self.now + transfer.left, lambda: self._finish(stage, transfer, began))

    def _finish(self, stage: int, transfer: Transfer, resumed: int) -> None:
        # An end that was announced before a pause no longer holds.
        if stage in self.paused or transfer not in self.running[stage] or transfer.resumed != resumed:
            return
        self.running[stage].remove(transfer)
        for lane in transfer.lanes:
            self.queues[lane].pop(0)
        for rank in transfer.ranks:
            bar = Event(rank, transfer.lane, transfer.name, transfer.began / NANO, self.now / NANO)
            self.bars.append((stage, bar))
        self.give(transfer.done)
        self.dispatch(stage)

    def pause(self, stage: int) -> None:
        # What ends at this very moment has ended.
        for transfer in list(self.running.setdefault(stage, [])):
            transfer.left -= self.now - transfer.resumed
            if transfer.left == 0:
                transfer.left, transfer.resumed = 0, self.now
                self._finish(stage, transfer, self.now)
        self.paused.add(stage)

    def resume(self, stage: int) -> None:
        self.paused.discard(stage)
        for transfer in self.running[stage]:
            self._continue(stage, transfer)
        self.dispatch(stage)
