"""`Walk`: where a rank stands in its plan's itinerary, what each replica buffer holds, and what to fill next.

Knows visits and buffers. Does not know weights, threads or paths: the engine holds its lock around every call, and
fills what `next_fill` says, one at a time.

A visit that the layer announces becomes the position, whether it is the next one or not. Ahead of it, at most `depth`
visits, `next_fill` follows the itinerary's buffers. A visit whose replicas are nowhere is filled first of all.

Invariants (asserted by the tests):
1. `holds` is true only for a buffer that was filled completely for that very micro-step and layer.
2. The buffer of the latest announced visit is never filled for another one.
3. Nothing is filled earlier than its `ready_from`, nor more than `depth` visits ahead, nor while its layer is closed.
4. Visits in the itinerary's order, backward and repeated ones included, are never on demand.
"""

from typing import NamedTuple

from equipoise.core.cluster import Cluster
from equipoise.core.errors import TransferError
from equipoise.core.itinerary import Itinerary, Visit
from equipoise.core.plan import Plan
from equipoise.runtime.paths import Need, needs_of


class Fill(NamedTuple):
    """A buffer to fill with the replicas of one micro-step of one layer."""

    micro_step: int
    layer: int
    buffer: int
    needs: tuple[Need, ...]

    @property
    def key(self) -> tuple[int, int]:
        """What the buffer then holds."""
        return self.micro_step, self.layer


class Walk:
    """One rank's way through one window."""

    def __init__(self, plan: Plan, *, rank: int) -> None:
        if plan.itinerary is None:
            raise TransferError(f"a plan of policy {plan.policy!r} has no itinerary and cannot be executed")
        self._plan, self._rank = plan, rank
        self._itinerary: Itinerary = plan.itinerary
        self._index = {self._itinerary.visit(i): i for i in range(len(self._itinerary))}
        self._needs: dict[Visit, tuple[Need, ...]] = {}
        self._position = -1
        self._holds: list[tuple[int, int] | None] = [None] * (self._itinerary.depth + 1)
        self._leased: int | None = None
        self._urgent: Fill | None = None
        self._open: set[int] = set()
        self.filling: Fill | None = None

    @property
    def cluster(self) -> Cluster:
        """What the plan was made for."""
        return self._plan.cluster

    def announce(self, visit: Visit) -> tuple[Fill, bool]:
        """Make `visit` the position.

        Returns: the buffer with its replicas, once `holds` is true for it; and whether it was not to be expected
        """
        at, before = self._index.get(visit), self._position
        needs = self._needs_at(visit)
        if at is not None:
            self._position = at
        fill = Fill(visit.micro_step, visit.layer, self._buffer_of(visit, at), needs)
        self._leased = fill.buffer if needs else None
        self._urgent = None
        if not needs or self.holds(fill):
            return fill, False
        if self.filling is None or self.filling[:3] != fill[:3]:
            self._urgent = fill
        is_due = at is not None and before < at <= before + self._itinerary.depth
        return fill, not is_due

    def holds(self, fill: Fill) -> bool:
        """Whether the buffer holds what `fill` says, completely."""
        return self._holds[fill.buffer] == fill.key

    def next_fill(self) -> Fill | None:
        """What to fill now, if anything may be."""
        if self._urgent is not None and self.is_open(self._urgent.layer):
            return self._urgent
        plan = self._itinerary
        for at in range(self._position + 1, min(self._position + 1 + plan.depth, len(plan))):
            if not plan.pulls_V[at] or plan.ready_from_V[at] > max(self._position, 0):
                continue
            if not self.is_open(int(plan.layer_V[at])):
                continue
            fill = self._fill_at(at)
            if fill.needs and fill.buffer != self._leased and not self.holds(fill):
                return fill
        return None

    def begin(self, fill: Fill) -> None:
        """Note that `fill` is being filled: until `end` its buffer holds nothing."""
        self._holds[fill.buffer] = None
        self.filling = fill
        if self._urgent == fill:
            self._urgent = None

    def end(self, *, is_filled: bool = True) -> None:
        """Note that what was begun is complete, or that it was given up and the buffer holds nothing."""
        assert self.filling is not None, "end of a fill that was not begun"
        self._holds[self.filling.buffer] = self.filling.key if is_filled else None
        self.filling = None

    def open(self, layer: int) -> None:
        """Say that the home weights of a layer are there; closed at first."""
        self._open.add(layer)

    def close(self, layer: int) -> None:
        """Say that the home weights of a layer are about to go: no buffer holds any of them from now on."""
        self._open.discard(layer)
        self._holds = [None if held is not None and held[1] == layer else held for held in self._holds]

    def is_open(self, layer: int) -> bool:
        """Whether the home weights of a layer are there."""
        return layer in self._open

    def forget(self) -> None:
        """Let all buffers hold nothing, because weights may have changed."""
        self._holds = [None] * len(self._holds)
        self._leased = self._urgent = None

    def _fill_at(self, at: int) -> Fill:
        visit = self._itinerary.visit(at)
        return Fill(visit.micro_step, visit.layer, int(self._itinerary.buffer_V[at]), self._needs_at(visit))

    def _needs_at(self, visit: Visit) -> tuple[Need, ...]:
        if visit not in self._needs:
            micro_step, phase, layer = visit
            self._needs[visit] = needs_of(self._plan, micro_step, layer, rank=self._rank, phase=phase)
        return self._needs[visit]

    def _buffer_of(self, visit: Visit, at: int | None) -> int:
        """The buffer that holds the visit's replicas already, else the itinerary's, else the first."""
        key = (visit.micro_step, visit.layer)
        if key in self._holds:
            return self._holds.index(key)
        return 0 if at is None else int(self._itinerary.buffer_V[at])
