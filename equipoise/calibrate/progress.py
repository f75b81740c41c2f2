"""`Steps`: how far a calibration is, for whoever shows it. Knows a count and a callback, nothing else."""

from collections.abc import Callable
from dataclasses import dataclass, field


def _ignore(done: int, total: int) -> None:
    """Nobody watches."""


@dataclass(slots=True)
class Steps:
    """A count of done steps that tells a callback (done, total)."""

    total: int
    tell: Callable[[int, int], None] = field(default=_ignore)
    done: int = 0

    def advance(self) -> None:
        """One more step is done."""
        self.done += 1
        self.tell(self.done, self.total)
