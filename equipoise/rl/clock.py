"""`StageClock`: what each stage of a step took on this rank, one stage after another.

Knows the clock. Does not know stages.

Invariants (asserted by the tests):
1. The stages' seconds add up to the step's: a stage lasts until the next begins.
"""

import time
from collections.abc import Callable


class StageClock:
    """Runs from one stage to the next."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start, in no stage yet.

        Args:
            now: seconds since whenever
        """
        self._now = now
        self._seconds: dict[str, float] = {}
        self._stage, self._since = "", now()

    def begin(self, stage: str) -> None:
        """End the stage before, and begin this one."""
        now = self._now()
        if self._stage:
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def stop(self) -> dict[str, float]:
        """End the last stage and return the seconds of all."""
        self.begin("")
        return dict(self._seconds)
