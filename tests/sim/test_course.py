"""Every pass once, after what it waits for."""

import numpy as np
import pytest

from equipoise.sim.replay import Pass, course_of, in_order, waits_for
from tests.sim.works import random_work


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("stage", ["update", "recompute"])
@pytest.mark.parametrize("micro_steps", [1, 3, 6])
def test_every_pass_appears_once_after_those_it_waits_for(stages, stage, micro_steps):
    work = random_work(np.random.default_rng(1), micro_steps=micro_steps, stage=stage)
    courses = [course_of(work, depth=1, pipeline_stage=p, pipeline_stages=stages) for p in range(stages)]
    done: list[Pass] = []
    for index, one in in_order(courses):
        assert courses[one.pipeline_stage].passes[index] == one
        needed = waits_for(one, stages)
        assert needed is None or needed in done
        if one.phase == 1:
            assert one._replace(phase=0) in done
        done.append(one)
    phases = 2 if stage == "update" else 1
    assert len(done) == len(set(done)) == stages * micro_steps * phases


def test_pulls_are_issued_where_the_itinerary_says_and_residents_never():
    work = random_work(np.random.default_rng(4), micro_steps=3, layers=3, replicas=4)
    course = course_of(work, depth=2)
    itinerary = course.itinerary
    issued = {}
    for v in range(len(itinerary)):
        for later in course.issue_visit_I[course.issue_start_V[v] : course.issue_start_V[v + 1]].tolist():
            issued[later] = v
    assert sorted(issued) == np.flatnonzero(itinerary.pulls_V & ~itinerary.resident_V).tolist()
    assert all(itinerary.ready_from_V[later] == v for later, v in issued.items())


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("stage", ["update", "recompute"])
def test_a_layers_first_visit_is_forward_and_its_last_backward_in_an_update(stages, stage):
    work = random_work(np.random.default_rng(1), micro_steps=4, layers=3, stage=stage)
    for p in range(stages):
        course = course_of(work, depth=1, pipeline_stage=p, pipeline_stages=stages)
        itinerary = course.itinerary
        for layer in range(3):
            (own,) = np.nonzero(itinerary.layer_V == layer)
            assert (course.first_L[layer], course.last_L[layer]) == (own[0], own[-1])
            assert itinerary.phase_V[own[0]] == 0
            assert itinerary.phase_V[own[-1]] == (stage == "update")
        assert np.array_equal(np.argsort(course.last_L), [2, 1, 0] if stage == "update" else [0, 1, 2])
