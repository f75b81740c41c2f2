"""Decisions about planning: bounded, without flapping, never much slower than static, and they come back."""

from collections import deque
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planning.course import FIRST, LONGEST, MARGIN, MOST, SAMPLES, STEP, Course, Outcome

WORST = 4.0


def outcome(way, cost, *, static_s=2.0, moved_s=0.1, exposed_s=0.1):
    return Outcome(
        way=way, static_s=static_s, moved_s=moved_s, realised_s=cost * static_s, exposed_s=exposed_s * (way != "off")
    )


def drive(costs, *, lag=0):
    """Run windows, each planned `lag` windows before the outcome of the one before it is known."""
    course, ways, courses = Course(), [], []
    waiting = deque(["full"] * lag)
    for number, cost_of in enumerate(costs):
        waiting.append(course.next_way)
        ways.append(waiting.popleft())
        course = course.after(outcome(ways[-1], cost_of(ways[-1]), static_s=1.0 + number % 3))
        courses.append(course)
    return SimpleNamespace(ways=ways, courses=courses, last=course)


def switches(run):
    return sum(one.way != other.way for one, other in pairwise([Course(), *run.courses]))


costs_of_others = st.lists(st.sampled_from([0.5, 0.9, 0.96, 1.0, 1.02, 1.04, 1.5, WORST]), min_size=50, max_size=900)


@settings(deadline=None, max_examples=150)
@given(costs_of_others, st.integers(0, 2))
def test_it_is_never_slower_than_static_by_more_than_it_says(others, lag):
    run = drive([lambda way, cost=cost: 1.0 if way == "off" else cost for cost in others], lag=lag)
    spent = sum(1.0 if way == "off" else cost for way, cost in zip(run.ways, others, strict=True))
    num, rounds = len(others), 5 + len(others) / LONGEST
    most = MARGIN * num + (WORST - 1) * (FIRST + SAMPLES + lag + rounds * (3 * SAMPLES + 2 * lag))
    assert spent - num <= most


def test_an_adversary_who_shows_a_gain_in_trials_alone_gains_little():
    course, spent, num = Course(), 0.0, 4000
    for _ in range(num):
        # Fast while it is tried, slow once it is in use.
        cost = 1.0 if course.next_way == "off" else 0.5 if course.trial else WORST
        spent += cost
        course = course.after(outcome(course.next_way, cost))
    assert spent <= num * (1 + MARGIN) + (WORST - 1) * (FIRST + SAMPLES + (5 + num / LONGEST) * 3 * SAMPLES)
    assert spent / num < 1.1


@given(st.lists(st.floats(0.99, 1.01), min_size=50, max_size=600), st.integers(0, 2))
@settings(deadline=None, max_examples=50)
def test_noise_below_the_margin_changes_nothing(noise, lag):
    run = drive([lambda way, cost=cost: cost for cost in noise], lag=lag)
    assert switches(run) == 0 and run.last.way == "full" and run.last.said == ""


@given(costs_of_others)
@settings(deadline=None, max_examples=50)
def test_it_does_not_flap(others):
    run = drive([lambda way, cost=cost: 1.0 if way == "off" else cost for cost in others])
    # A way is taken after a trial, and left once: two changes for each trial, whose pauses grow.
    assert switches(run) <= 2 * run.last.trials <= 2 * (5 + len(others) / LONGEST + 5)
    assert all(bool(course.said) == (before.way != course.way) for before, course in pairwise(run.courses))


@pytest.mark.parametrize("lag", [0, 2])
def test_what_does_not_pay_is_left_soon_and_comes_back_when_it_pays(lag):
    bad = [lambda way: {"full": 1.3, "placement": 1.1, "off": 1.0}[way]] * 60
    run = drive(bad, lag=lag)
    assert run.last.way == "off" and switches(run) == 1
    assert run.ways[: FIRST + SAMPLES].count("off") <= SAMPLES
    first_off = run.ways.index("off")
    assert first_off <= FIRST + lag
    good = [lambda way: {"full": 0.7, "placement": 0.9, "off": 1.0}[way]] * (2 * LONGEST + 4 * SAMPLES)
    back = drive(bad + good, lag=lag)
    assert back.last.way == "full"
    (said,) = [course.said for course in back.courses if course.way == "full" and course.said]
    assert "windows go 'full' instead of" in said
    assert back.ways[60:].count("full") > len(good) / 2 - LONGEST / 2


def test_placement_alone_is_kept_where_replicas_do_not_pay():
    run = drive([lambda way: {"full": 1.2, "placement": 0.8, "off": 1.0}[way]] * 300)
    assert run.last.way == "placement"
    assert run.ways[100:].count("placement") > 150


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=60))
@settings(deadline=None, max_examples=100)
def test_a_correction_is_bounded_in_each_window_and_in_all(pairs):
    course = Course()
    for moved_s, exposed_s in pairs:
        before = course.correction
        course = course.after(outcome("full", 1.0, moved_s=moved_s, exposed_s=exposed_s))
        assert 1 / MOST <= course.correction <= MOST
        assert 1 / STEP - 1e-9 <= course.correction / before <= STEP + 1e-9
    for _ in range(40):
        course = course.after(outcome("full", 1.0, moved_s=1.0, exposed_s=2.0))
    assert course.correction == pytest.approx(2.0, rel=0.02)


def test_a_window_without_a_prediction_or_a_clock_says_nothing():
    course = Course().after(outcome("full", 1.0))
    assert course.after(outcome("full", 1.0, static_s=0.0)) == course
