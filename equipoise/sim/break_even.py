"""Results of a sweep: its points, and from which tokens per rank on a plan pays.

Knows figures and their names. Does not know how they were simulated: that is `sweep.py`.

Invariants (asserted by the tests):
1. The break-even is the least number of tokens from which on *every* larger number tried pays.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One corner of a sweep."""

    ep: int
    slots: int
    micro: int | None
    tokens: int
    """Per rank and micro-step."""
    skew: float
    """Mean before."""
    seconds: dict[str, float]
    """Seconds of expert layers by policy."""

    @property
    def saved_share(self) -> float:
        """What equipoise saves of static's seconds."""
        return 1 - ratio(self.seconds["equipoise"], self.seconds["static"])

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        balanced = self.seconds.get("balanced")
        of_balanced = None if balanced is None else ratio(balanced, self.seconds["equipoise"])
        return {**asdict(self), "saved_share": self.saved_share, "of_balanced": of_balanced}


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEvenCurve:
    """What a plan saves at one skew, over tokens per rank."""

    skew: float
    points: tuple[tuple[int, float], ...]
    """(tokens per rank and micro-step, saved share), ascending."""
    worth: float

    @property
    def tokens(self) -> int | None:
        """The least tokens per rank from which on every larger number tried pays; None if the largest does not."""
        found = None
        for tokens, saved in reversed(self.points):
            if saved < self.worth:
                break
            found = tokens
        return found

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        points = [{"tokens": tokens, "saved_share": saved} for tokens, saved in self.points]
        return {"skew": self.skew, "tokens": self.tokens, "points": points}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Points of a sweep and the break-even curves."""

    axes: dict[str, tuple[int, ...]]
    points: tuple[SweepPoint, ...]
    curves: tuple[BreakEvenCurve, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        break_even = None
        if self.curves:
            break_even = {"worth": self.curves[0].worth, "curves": [curve.to_dict() for curve in self.curves]}
        return {
            "axes": {name: list(values) for name, values in self.axes.items()},
            "points": [point.to_dict() for point in self.points],
            "break_even": break_even,
        }


def ratio(part: float, whole: float) -> float:
    """`part / whole`, and 1 where both are nothing."""
    return part / whole if whole else 1.0
