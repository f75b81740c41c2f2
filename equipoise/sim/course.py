"""The order of a window: passes over a pipeline stage's layers, visits of each pass, and when pulls may be issued.

A *pass* is one micro-step going once through the layers of one pipeline stage, forward or backward. Passes of a stage
follow one another as its itinerary has them (`planner.itinerary`); passes of different stages wait for each other:
forward for the stage before, backward for the stage after.

Knows order. Does not know seconds.

Invariants (asserted by the tests):
1. Every pass of every stage appears exactly once, after the passes it waits for.
2. A layer's first visit is forward; its last is backward in an update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from equipoise.core.itinerary import Itinerary
from equipoise.core.value import Value
from equipoise.planner.itinerary import FORWARD, build_itinerary
from equipoise.planner.options import PlanOptions
from equipoise.sim.work import Work


class Pass(NamedTuple):
    """One micro-step through one pipeline stage."""

    pipeline_stage: int
    phase: int
    """0 forward, 1 backward."""
    micro_step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course(Value):
    """The visits of one pipeline stage, and what is issued at each."""

    itinerary: Itinerary
    passes: tuple[Pass, ...]
    """In execution order; pass i makes visits i * L to i * L + L - 1."""
    issue_start_V: np.ndarray
    """[V + 1] where the visits begin whose pulls are issued at each visit's start."""
    issue_visit_I: np.ndarray
    first_L: np.ndarray
    """[L] the first visit of each layer: its experts wait for their publish there."""
    last_L: np.ndarray
    """[L] the last visit of each layer: it is collected after it."""


def course_of(work: Work, *, depth: int, pipeline_stage: int = 0, pipeline_stages: int = 1) -> Course:
    """Lay out the visits of one pipeline stage.

    Args:
        work: of the stage
        depth: visits ahead that pulls may start
        pipeline_stage: which of the `pipeline_stages`
    """
    micro_steps, layers, _ = work.shape
    needs_ML = np.diff(work.transfers.start_ML).reshape(micro_steps, layers) > 0
    options = PlanOptions(
        depth=depth,
        order="1f1b" if pipeline_stages > 1 else "plain",
        pipeline_stage=pipeline_stage,
        pipeline_stages=pipeline_stages,
    )
    itinerary = build_itinerary(work.stage, needs_ML & work.transfers.has_pulls, options)
    first_V = np.arange(0, len(itinerary), layers)
    passes = tuple(
        Pass(pipeline_stage, int(phase), int(m))
        for phase, m in zip(itinerary.phase_V[first_V], itinerary.micro_step_V[first_V], strict=True)
    )
    pulling = np.flatnonzero(itinerary.pulls_V & ~itinerary.resident_V)
    order = np.argsort(itinerary.ready_from_V[pulling], kind="stable")
    count_V = np.bincount(itinerary.ready_from_V[pulling], minlength=len(itinerary))
    return Course(
        itinerary=itinerary,
        passes=passes,
        issue_start_V=np.concatenate([[0], np.cumsum(count_V)]),
        issue_visit_I=pulling[order],
        first_L=np.unique(itinerary.layer_V, return_index=True)[1],
        last_L=len(itinerary) - 1 - np.unique(itinerary.layer_V[::-1], return_index=True)[1],
    )


def waits_for(one: Pass, pipeline_stages: int) -> Pass | None:
    """The pass of another stage whose result this one needs; None where it needs none."""
    other = one.pipeline_stage + (-1 if one.phase == FORWARD else 1)
    return one._replace(pipeline_stage=other) if 0 <= other < pipeline_stages else None


def in_order(courses: Sequence[Course]) -> list[tuple[int, Pass]]:
    """(index within its stage, pass) of all stages, each after those it waits for."""
    done: set[Pass] = set()
    ordered: list[tuple[int, Pass]] = []
    next_Q = [0] * len(courses)
    total = sum(len(course.passes) for course in courses)
    while len(ordered) < total:
        for stage, course in enumerate(courses):
            while next_Q[stage] < len(course.passes):
                one = course.passes[next_Q[stage]]
                needed = waits_for(one, len(courses))
                if needed is not None and needed not in done:
                    break
                ordered.append((next_Q[stage], one))
                done.add(one)
                next_Q[stage] += 1
    return ordered
