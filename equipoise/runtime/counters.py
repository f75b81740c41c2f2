"""`Counters`: what the transfers of one rank moved, how often, and how long training stood still for them.

Knows numbers only. Bytes are counted where they arrive; seconds are exposed ones, spent waiting with nothing to hide
behind.
"""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals of one rank since the engine was opened."""

    bytes: Counter[str] = field(default_factory=Counter)
    """By path. Example: {"shm": 4096, "p2p": 512}."""
    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By path, of pulls and returns; publish and collect count whole, since they lie between windows."""
    pulls: int = 0
    """Replicas brought to this rank."""
    returns: int = 0
    """Replica gradients this rank added to its homes."""
    publishes: int = 0
    """Experts whose weights reached this rank as their home."""
    collects: int = 0
    """Experts whose gradients reached this rank as their owner."""
    on_demand: int = 0
    """Visits that found no replica waiting for them and had it brought at once."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Pulls are counted by a thread of their own."""

    def arrive(self, path: str, num_bytes: int) -> None:
        """Count bytes that reached this rank."""
        with self._lock:
            self.bytes[path] += num_bytes

    def wait(self, path: str, seconds: float) -> None:
        """Count seconds in which training stood still."""
        with self._lock:
            self.exposed_s[path] += seconds
