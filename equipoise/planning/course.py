"""`Course`: whether planning pays on this machine, decided from what windows promised and what they took.

Three ways to run a window: `full` (homes and replicas), `placement` (homes alone), `off` (every expert at its owner).
Cost of a window is its measured seconds over its predicted seconds at the owners, so that windows of any size compare.

After every window (`after`), from numbers that all ranks agree on, so that all ranks go the same way:
1. Correct the price of transfers: measured over predicted exposed seconds, by at most STEP a window, never beyond MOST.
2. A trial that has seen SAMPLES windows ends: its way is taken if it costs MARGIN less than the one in use. If not, the
   next trial waits twice as long.
3. A way other than `off` that costs MARGIN more than `off` did is left for `off` at once.
4. After `pause` windows another way is tried, so that what did not pay once can come back.

What it costs at most, where `off` always costs 1 and the others up to W, with windows planned `lag` ahead: MARGIN of
all windows, and (W - 1) times FIRST + SAMPLES + lag windows once and 3 SAMPLES + 2 lag in each of at most
5 + N / LONGEST trials of N windows.
"""

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, get_args

from equipoise.core.plan import Plan

Way = Literal["full", "placement", "off"]
WAYS: tuple[Way, ...] = get_args(Way)
SAMPLES = 3
"""Windows from which a way is judged."""
MARGIN = 0.03
"""Share by which ways must differ: less is noise."""
FIRST, LONGEST = 8, 128
"""Windows before the first trial, and between two at most."""
STEP, MOST = 1.1, 4.0
"""Factors by which a correction changes in one window, and in all."""
_NOTHING = 0.01
"""Share of a window's seconds added to exposed seconds before they are compared: ratios of nothing are noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one window promised and what it took; the same on all ranks."""

    way: Way
    static_s: float
    """Predicted seconds with every expert at its owner."""
    moved_s: float
    """Predicted seconds of exposed transfers."""
    realised_s: float
    """Measured seconds, slowest rank."""
    exposed_s: float
    """Measured seconds of exposed transfers, slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Where the decisions of one stage stand."""

    way: Way = "full"
    """In use."""
    trial: Way | None = None
    """Tried at the moment."""
    correction: float = 1.0
    """By which the predicted seconds of exposed transfers are multiplied."""
    recent: tuple[float, ...] = ()
    """Costs of the last windows of the way in use."""
    tried: tuple[float, ...] = ()
    """Costs of the trial's windows."""
    off_cost: float | None = None
    """Of `off`, when it was seen last."""
    age: int = 0
    """Windows since the last decision."""
    pause: int = FIRST
    trials: int = 0
    said: str = ""
    """What the last window changed; empty where the way in use stays."""

    @property
    def next_way(self) -> Way:
        """How the next window is planned."""
        return self.trial or self.way

    def after(self, seen: Outcome) -> "Course":
        """Return where the decisions stand after a window that has ended."""
        if seen.static_s <= 0 or seen.realised_s <= 0:
            return replace(self, said="")
        cost = seen.realised_s / seen.static_s
        course = replace(self, said="", age=self.age + 1, correction=_correct(self.correction, seen))
        # Windows are planned ahead: the first ones after a decision still went the way before.
        if seen.way == self.trial:
            course = replace(course, tried=(*course.tried, cost))
        elif seen.way == self.way:
            course = replace(course, recent=(*course.recent, cost)[-SAMPLES:])
        if seen.way == self.way == "off":
            course = replace(course, off_cost=fmean(course.recent))
        if course.trial is not None:
            return course._end_trial(course.trial) if len(course.tried) == SAMPLES else course
        if len(course.recent) < SAMPLES:
            return course
        own = fmean(course.recent)
        if course.way != "off" and course.off_cost is not None and own > course.off_cost * (1 + MARGIN):
            return course._take("off", (), own, course.off_cost, pause=min(2 * course.pause, LONGEST))
        if course.age >= course.pause:
            others = [way for way in reversed(WAYS) if way != course.way]
            if course.way == "off":
                others.reverse()
            return replace(course, trial=others[course.trials % 2], trials=course.trials + 1)
        return course

    def _end_trial(self, way: Way) -> "Course":
        own, other = fmean(self.recent), fmean(self.tried)
        course = replace(self, off_cost=other) if way == "off" else self
        if other < own * (1 - MARGIN):
            return course._take(way, self.tried, own, other, pause=self.pause)
        return replace(course, trial=None, tried=(), age=0, pause=min(2 * self.pause, LONGEST))

    def _take(self, way: Way, recent: tuple[float, ...], own: float, other: float, *, pause: int) -> "Course":
        said = (
            f"windows go {way!r} instead of {self.way!r}: they take {other:.3g} s for each second predicted at the "
            f"owners, not {own:.3g} s; another way is tried again after {pause} windows"
        )
        return replace(self, way=way, trial=None, recent=recent, tried=(), age=0, pause=pause, said=said)


def moved_seconds(plan: Plan) -> float:
    """Return the predicted seconds of a plan's exposed transfers."""
    seconds = plan.seconds
    return seconds.pull + seconds.return_ + seconds.publish + seconds.collect


def _correct(correction: float, seen: Outcome) -> float:
    if seen.way == "off":
        return correction
    nothing = _NOTHING * seen.static_s
    wanted = (seen.exposed_s + nothing) / (seen.moved_s + nothing)
    step = min(max(wanted / correction, 1 / STEP), STEP)
    return min(max(correction * step, 1 / MOST), MOST)
