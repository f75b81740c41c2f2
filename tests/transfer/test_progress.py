"""LayerProgress: a layer is over exactly once, after all of its micro-steps, and not before the next visit comes."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.plan import Visit
from equipoise.transfer.engine import LayerProgress
from tests.transfer.windows import random_plan

plans = st.builds(
    random_plan,
    st.just((0, 0)),
    seed=st.integers(0, 99),
    layers=st.integers(1, 4),
    micro_steps=st.integers(1, 3),
    stage=st.sampled_from(["update", "recompute"]),
    order=st.sampled_from(["plain", "1f1b"]),
)


def walk_through(progress, visits):
    """(visit at which it was said, layer) of every layer that was over."""
    over = []
    for visit in visits:
        # As a layer does it: for its home, its replicas, and in backward for both ways of its gradients.
        for _ in range(3 if visit.phase == "backward" else 2):
            over += [(visit, layer) for layer in [progress.begin(visit)] if layer is not None]
        if visit.phase == "backward":
            progress.passed(visit.micro_step, visit.layer)
    return over


def last_visits(plan, visits):
    """By layer, its last visit that counts."""
    phase = "forward" if plan.loads.stage == "recompute" else "backward"
    return {visit.layer: visit for visit in visits if visit.phase == phase}


@settings(max_examples=60, deadline=None)
@given(plan=plans, seed=st.integers(0, 99), is_shuffled=st.booleans())
def test_a_layer_is_over_once_when_the_next_visit_comes(plan, seed, is_shuffled):
    visits = plan.itinerary.visits()
    if is_shuffled:
        np.random.default_rng(seed).shuffle(visits)
        visits = [Visit(int(m), str(phase), int(layer)) for m, phase, layer in visits]
    over = walk_through(LayerProgress(plan), visits)
    last = last_visits(plan, visits)
    wanted = [(after, visit.layer) for visit, after in itertools.pairwise(visits) if last[visit.layer] == visit]
    assert over == wanted, "in the order in which they ended"


@settings(max_examples=30, deadline=None)
@given(plan=plans)
def test_a_layer_that_lacks_a_micro_step_is_not_over(plan):
    visits = plan.itinerary.visits()
    missing = last_visits(plan, visits)[0]
    over = walk_through(LayerProgress(plan), [visit for visit in visits if visit != missing])
    assert 0 not in [layer for _, layer in over]


@settings(max_examples=30, deadline=None)
@given(plan=plans)
def test_visits_beyond_the_plan_end_nothing_a_second_time(plan):
    visits, progress = plan.itinerary.visits(), LayerProgress(plan)
    over = [layer for _ in range(3) for _, layer in walk_through(progress, visits)]
    assert len(set(over)) == len(over) >= plan.loads.num_layers - 1
