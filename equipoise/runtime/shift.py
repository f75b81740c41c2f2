"""`PathShift`: later pulls of a window leave a path that falls behind, if the other one does not.

The plan chose each pull's path by the rates of its cluster (`nvlink_bytes_per_s`, `host_bytes_per_s`). What pulls
really reach, waits for their weights included, is measured visit by visit. A path is *behind* where the last `RECENT`
visits together reached less than half of the plan's rate; one that was not measured is not. A pull planned by a path
that is behind goes by the other one, if that is not behind and has the weights now: the store has those of experts that
some pull of the plan takes from there.

Both paths bring the same bits, so this changes seconds alone. Off under a forced path. Every window begins anew.

Knows paths, rates and marks in a lane's work. Does not know buffers or threads: the puller calls.

Invariants (asserted by the tests):
1. Replicas have the same bits wherever they come from.
2. No pull is shifted to a path that is behind, that does not have its weights, or that does not reach its home.
3. Nothing is shifted before its path was measured, nor under a forced path.
"""

from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from equipoise.core.cluster import Cluster
from equipoise.core.itinerary import Path as PathName
from equipoise.runtime.paths import Need, Path
from equipoise.runtime.streams import Standstill

RECENT = 4
"""Visits by which a path is judged."""
BEHIND = 0.5
"""Share of the plan's rate below which a path is behind."""

_OTHER: dict[PathName, PathName] = {"peer": "host", "host": "peer"}


class _Visit(NamedTuple):
    """What one path brought for one visit."""

    num_bytes: int
    waited_s: float
    """By the caller's clock: for the weights, and for the copy where there is no device."""
    copying: Standstill
    """The copy in the lane of a device."""


class PathShift:
    """Where the pulls of one rank go."""

    def __init__(self, paths: Mapping[str, Path], *, near: Collection[int], is_on: bool) -> None:
        """
        Args:
            paths: by the plan's name for them; more may come
            near: ranks whose homes this rank has mapped
        """
        self._paths, self._near, self._is_on = paths, frozenset(near), is_on
        self._planned: dict[PathName, int] = {}
        self._recent: dict[PathName, deque[_Visit]] = {}

    def open_window(self, cluster: Cluster) -> None:
        """Forget what was measured, and take the rates that the plan counted on."""
        self._planned = {"peer": cluster.nvlink_bytes_per_s, "host": cluster.host_bytes_per_s}
        self._recent = {name: deque(maxlen=RECENT) for name in self._planned}

    def note(self, name: PathName, num_bytes: int, *, waited_s: float, copying: Standstill) -> None:
        """Take note of what a path brought for a visit."""
        if self._is_on:
            self._recent[name].append(_Visit(num_bytes, waited_s, copying))

    def choose(self, need: Need, *, version: int) -> Need:
        """Return the need as planned, or by the other path."""
        name = _OTHER[need.path]
        if not self._is_on or need.source not in self._near or name not in self._paths:
            return need
        other = need._replace(path=name)
        is_better = self.is_behind(need.path) and not self.is_behind(name)
        return other if is_better and self._paths[name].is_ready(other, version) else need

    def is_behind(self, name: PathName) -> bool:
        """Whether what the path brought lately took more than twice as long as planned; False where not measured."""
        over = [visit for visit in self._recent.get(name, ()) if visit.copying.is_over()]
        seconds = sum(visit.waited_s + visit.copying.seconds() for visit in over)
        return sum(visit.num_bytes for visit in over) < BEHIND * self._planned.get(name, 0) * seconds
