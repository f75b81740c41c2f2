"""The itinerary: visits in execution order, buffers assigned ahead, nothing overwritten before it is used."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import InfeasiblePlanError
from equipoise.core.plan import Visit
from equipoise.planner import PlanOptions
from equipoise.planner.assemble import BACKWARD, FORWARD, build_itinerary, visits_of
from tests.planner.test_plan import planned, window

few = settings(max_examples=100, deadline=None)


@st.composite
def itineraries(draw):
    """(stage, needs_ML, options)."""
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    needs_ML = np.random.default_rng(draw(st.integers(0, 999))).random(shape) < draw(st.sampled_from([0, 0.3, 1]))
    stages, order = draw(st.integers(1, 4)), draw(st.sampled_from(["plain", "recompute", "1f1b"]))
    first = draw(st.integers(0, shape[1]))
    options = PlanOptions(
        depth=draw(st.integers(1, 4)),
        order=order,
        chunk_layers=(first, shape[1] - first) if order == "1f1b" and draw(st.booleans()) else (),
        chunk_group=draw(st.sampled_from([None, 1, 3])),
        pipeline_stages=stages,
        pipeline_stage=draw(st.integers(0, stages - 1)),
    )
    return draw(st.sampled_from(["recompute", "update"])), needs_ML, options


@given(itineraries())
@few
def test_every_entry_is_visited_once_per_phase_and_backward_never_before_forward(case):
    stage, needs_ML, options = case
    visits = [tuple(v) for v in visits_of(stage, *needs_ML.shape, options).tolist()]
    phases = (FORWARD,) if stage == "recompute" else (FORWARD, BACKWARD)
    wanted = {(m, p, layer) for m in range(needs_ML.shape[0]) for p in phases for layer in range(needs_ML.shape[1])}
    assert set(visits) == wanted and len(visits) == len(wanted)
    for m, phase, layer in visits:
        if phase == BACKWARD:
            assert visits.index((m, FORWARD, layer)) < visits.index((m, BACKWARD, layer))


@given(itineraries())
@few
def test_between_a_pull_and_its_visit_no_other_visit_uses_the_buffer(case):
    itinerary = build_itinerary(*case)
    assert np.array_equal(itinerary.pulls_V, case[1][itinerary.micro_step_V, itinerary.layer_V])
    for v in np.flatnonzero(itinerary.pulls_V & ~itinerary.resident_V):
        start = int(itinerary.ready_from_V[v])
        between = [
            u for u in range(start, v) if itinerary.pulls_V[u] and itinerary.buffer_V[u] == itinerary.buffer_V[v]
        ]
        assert not between
        assert max(0, v - itinerary.depth) <= start <= v


@given(itineraries())
@few
def test_a_pull_starts_only_after_the_visit_that_last_used_its_buffer(case):
    itinerary = build_itinerary(*case)
    last_use = {}
    for v in np.flatnonzero(itinerary.pulls_V):
        buffer = int(itinerary.buffer_V[v])
        assert 0 <= buffer <= itinerary.depth
        if not itinerary.resident_V[v]:
            assert itinerary.ready_from_V[v] > last_use.get(buffer, -1)
        last_use[buffer] = v


@given(itineraries())
@few
def test_a_resident_visit_finds_what_its_forward_visit_pulled_untouched(case):
    itinerary = build_itinerary(*case)
    for v in np.flatnonzero(itinerary.resident_V):
        visit = itinerary.visits()[v]
        assert visit.phase == "backward"
        order = itinerary.visits()[:v]
        forward = order.index(Visit(visit.micro_step, "forward", visit.layer))
        assert itinerary.buffer_V[forward] == itinerary.buffer_V[v]
        used = [u for u in range(forward + 1, v) if itinerary.pulls_V[u]]
        assert all(itinerary.buffer_V[u] != itinerary.buffer_V[v] for u in used)


def test_one_forward_one_backward_of_the_first_of_three_stages():
    options = PlanOptions(order="1f1b", pipeline_stage=0, pipeline_stages=3)
    visits = visits_of("update", 4, 1, options)[:, :2].tolist()
    forward, backward = ([[m, phase] for m in range(4)] for phase in (FORWARD, BACKWARD))
    wanted = [*forward[:3], backward[0], forward[3], *backward[1:]]
    assert visits == wanted


def test_the_last_layer_needs_no_second_pull_in_its_backward():
    itinerary = build_itinerary("update", np.ones((1, 3), dtype=np.bool_), PlanOptions(depth=1))
    resident = [itinerary.visits()[v] for v in np.flatnonzero(itinerary.resident_V)]
    assert resident == [Visit(0, "backward", 2), Visit(0, "backward", 1)]


@pytest.mark.parametrize("order", ["plain", "recompute", "1f1b"])
def test_pulls_of_a_plan_are_its_replicas_once_per_phase(order):
    plan = planned(window(20), options=PlanOptions(order=order, depth=2), objective="skew", slots=2)
    pulled = {phase: set() for phase in ("forward", "backward")}
    for v in range(len(plan.itinerary)):
        visit = plan.itinerary.visits()[v]
        for rank in range(8):
            for expert, source, path in plan.pulls(v, rank):
                assert source == plan.home_LE[visit.layer, expert] != rank
                assert path in ("peer", "host")
                pulled[visit.phase].add((visit.micro_step, visit.layer, expert, rank))
    wanted = {(m, layer, *replica) for m in range(3) for layer in range(2) for replica in plan.replicas(m, layer)}
    assert pulled["forward"] == wanted
    # What is still in its buffer from the forward visit is not pulled again.
    assert pulled["backward"] < wanted


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"depth": 0}, "depth is 0"),
        ({"buffer_V": np.array([2, 0])}, "buffer 2 of 2 buffers"),
        ({"buffer_V": np.array([-1, 0])}, "count from 0"),
        ({"layer_V": np.array([0])}, "different length"),
        ({"pulls_V": np.array([1, 0])}, "pulls_V must be bool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_itinerary_that_contradicts_itself_is_refused(changed, words):
    right = build_itinerary("recompute", np.ones((2, 1), dtype=np.bool_), PlanOptions())
    values = {name: getattr(right, name) for name in right.__slots__}
    with pytest.raises(InfeasiblePlanError, match=words):
        type(right)(**{**values, **changed})


def test_an_interleaved_pipeline_is_visited_in_megatrons_order():
    """The first of two stages with two chunks each, four micro-steps: read off Megatron's schedule table."""
    options = PlanOptions(order="1f1b", pipeline_stages=2, pipeline_stage=0, chunk_layers=(1, 2))
    wanted = "F00 F10 F01 F11 F20 B01 F30 B11 F21 B00 F31 B10 B21 B31 B20 B30"
    visits = [(int(m), "FB".index(phase), int(chunk)) for phase, m, chunk in wanted.split(" ")]
    by_layer = {0: (0,), 1: (1, 2)}
    expected = [(m, p, layer) for m, p, c in visits for layer in (by_layer[c] if p == 0 else by_layer[c][::-1])]
    assert [tuple(v) for v in visits_of("update", 4, 3, options).tolist()] == expected
    forward = [(m, 0, layer) for m, p, c in visits if p == 0 for layer in by_layer[c]]
    assert [tuple(v) for v in visits_of("recompute", 4, 3, options).tolist()] == forward


def test_chunks_must_hold_all_layers_and_be_interleaved():
    with pytest.raises(InfeasiblePlanError, match="add up to 2 layers; the window has 3"):
        visits_of("update", 2, 3, PlanOptions(order="1f1b", chunk_layers=(1, 1)))
    with pytest.raises(InfeasiblePlanError, match="only order='1f1b' interleaves them, not 'plain'"):
        PlanOptions(chunk_layers=(1, 1))
