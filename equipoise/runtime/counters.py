"""`Counters`: what the transfers of one rank moved, how often, and how long training stood still for them.

Knows numbers only. Bytes are counted where they arrive; seconds are exposed ones, spent waiting with nothing to hide
behind: the caller's on the CPU, the stream's on a device, where they are known once the stream has passed.
"""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from equipoise.runtime.streams import Standstill


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals of one rank since the engine was opened."""

    bytes: Counter[str] = field(default_factory=Counter)
    """By path: `peer`, `host`, `shm`, `p2p`. Example: {"shm": 4096, "p2p": 512}."""
    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By path: what layers waited for, and the window's end."""
    pulls: int = 0
    """Replicas brought to this rank."""
    returns: int = 0
    """Replica gradients this rank added to its homes."""
    publishes: int = 0
    """Experts whose weights reached this rank as their home."""
    collects: int = 0
    """Experts whose gradients reached this rank as their owner."""
    refreshes: int = 0
    """Experts this rank wrote to the host store."""
    shifted: int = 0
    """Replicas brought by another path than planned, because that one fell behind."""
    on_demand: int = 0
    """Visits that found no replica waiting for them and had it brought at once."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Pulls are counted by a thread of their own."""

    _stops: list[tuple[str, Standstill]] = field(default_factory=list, repr=False, compare=False)

    def arrive(self, path: str, num_bytes: int) -> None:
        """Count bytes that reached this rank."""
        with self._lock:
            self.bytes[path] += num_bytes

    def wait(self, path: str, seconds: float) -> None:
        """Count seconds in which training stood still."""
        with self._lock:
            self.exposed_s[path] += seconds

    def refresh(self, num_bytes: int) -> None:
        """Count an expert written to the host store; its bytes left this rank and are counted as `store`."""
        with self._lock:
            self.refreshes += 1
            self.bytes["store"] += num_bytes

    def stop(self, path: str, standstill: Standstill) -> None:
        """Note that a device's stream may stand still; counted by `settle`."""
        with self._lock:
            self._stops.append((path, standstill))

    def settle(self) -> None:
        """Count what streams stood still, once they have passed the points noted."""
        with self._lock:
            stops, self._stops = self._stops, []
        for path, standstill in stops:
            self.wait(path, standstill.seconds())
