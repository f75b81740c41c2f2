"""`Steps`: how far a calibration is, for whoever shows it. Knows a count and a callback, nothing else."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Steps:
    """A count of done steps that tells a callback (done, total)."""

    total: int
    tell: Callable[[int, int], None] | None = None
    """None where nobody watches."""
    done: int = 0

    def advance(self) -> None:
        """One more step is done."""
        self.done += 1
        if self.tell is not None:
            self.tell(self.done, self.total)
