"""`Finding`, `Check`: what the doctor says, and the face every one of its checks shows.

Knows counting and words. Does not know routes: what is counted, and when it is wrong, is each check's own.

Invariants (asserted by the tests):
1. `share` is `count / total`, and 0 where nothing was looked at.
2. A check that looked at nothing is `skipped`, never `good`, and says what it needs.
3. Advice is given exactly with the verdict `finding`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from equipoise.core import ModelShape
from equipoise.routes.doctor.reading import Reading

Verdict = Literal["good", "finding", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one named check."""

    check: str
    verdict: Verdict
    count: int = 0
    """How many of `total` are wrong (or, for padding, are padding)."""
    total: int = 0
    """How many were looked at."""
    unit: str = "routes"
    """What is counted: "routes" (one token in one layer), "rows" (one token), "layers", "samples", "recordings"."""
    first_place: str = ""
    """Where the first wrong one stands: sample, token, layer."""
    detail: str = ""
    """Figures worth knowing, in words; also where nothing is wrong."""
    advice: str = ""
    """What to do; empty unless the verdict is `finding`."""
    rate_L: tuple[float, ...] = ()
    """Agreement by layer, for the check that compares two recordings."""

    @property
    def share(self) -> float:
        """Wrong part of what was looked at, 0 to 1."""
        return self.count / self.total if self.total else 0.0


@dataclass(slots=True)
class Tally:
    """A running count of wrong things, which remembers where the first one stood."""

    count: int = 0
    total: int = 0
    first_place: str = ""

    def add(self, count: int, total: int, place: Callable[[], str]) -> None:
        """Add `count` wrong ones of `total`; `place` is only called for the first wrong one."""
        if count and not self.count:
            self.first_place = place()
        self.count += count
        self.total += total


class Check:
    """One named check: looks at one reading after another, then gives its findings. Keeps only running counts."""

    name: ClassVar[str]
    unit: ClassVar[str] = "routes"
    advice: ClassVar[str]
    needs: ClassVar[str] = "rows"
    """What a dump must hold for this check, told where it is skipped."""

    def __init__(self, model: ModelShape) -> None:
        self.model = model
        self.tally = Tally()

    def look(self, reading: Reading) -> None:
        """Take in the next recording."""
        raise NotImplementedError

    def findings(self) -> tuple[Finding, ...]:
        """Judge what was seen."""
        return (
            judge(self.name, self.tally, unit=self.unit, advice=self.advice, detail=self.detail(), needs=self.needs),
        )

    def detail(self) -> str:
        """Figures worth knowing, in words."""
        return ""


def judge(check: str, tally: Tally, *, unit: str, advice: str, detail: str = "", needs: str = "rows") -> Finding:
    """Make a finding of a tally: any wrong one is a finding, nothing looked at is skipped."""
    verdict: Verdict = "finding" if tally.count else ("good" if tally.total else "skipped")
    return Finding(
        check=check,
        verdict=verdict,
        count=tally.count,
        total=tally.total,
        unit=unit,
        first_place=tally.first_place,
        detail=f"needs {needs}" if verdict == "skipped" else detail,
        advice=advice if verdict == "finding" else "",
    )
