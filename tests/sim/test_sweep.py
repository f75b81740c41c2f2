"""Sweeps and break-even: the step's own point, sizes and skews that change one thing at a time, and what is refused."""

import numpy as np
import pytest

from equipoise.core import InfeasiblePlanError, LoadMatrix, LoadsError
from equipoise.sim import StepSetting, simulate
from equipoise.sim.result import BreakEvenCurve, Shown, Sweep, SweepPoint
from equipoise.sim.sweep import (
    MIXES,
    TOKENS,
    at_tokens,
    break_even_curves,
    mean_skew,
    mean_tokens,
    mixed_with_even,
    sampled,
    sweep_points,
)
from equipoise.sim.windows import StepCase
from tests.sim.steps import MODEL, cluster_of, skewed_loads


@pytest.fixture(scope="module")
def loads():
    return skewed_loads(8)


def windows_at(ep: int, micro: int | None) -> list[LoadMatrix]:
    return [skewed_loads(8, ranks=ep, tokens=1000 * (micro or 4))]


def test_a_point_with_the_steps_own_figures_has_the_seconds_of_simulate(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    (point,) = sweep_points(lambda ep, micro: [loads], StepCase(**given), axes={})
    found = simulate(loads, ["static", "balanced", "equipoise"], **given)
    assert point.seconds == {result.policy: result.seconds.experts for result in found.policies}
    assert (point.ep, point.slots, point.micro, point.tokens) == (8, 1, None, 4096)
    assert point.skew == pytest.approx(found.windows[0].before.skew_M.mean())


def test_every_combination_is_a_point_in_order():
    seen = []
    points = sweep_points(
        windows_at,
        StepCase(cluster=cluster_of(), model=MODEL, setting=StepSetting(sends="rows")),
        axes={"ep": (4, 8), "slots": (0, 1), "micro": (1, 2), "tokens": (500,)},
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [(p.ep, p.micro, p.slots) for p in points] == [
        (ep, micro, slots) for ep in (4, 8) for micro in (1, 2) for slots in (0, 1)
    ]
    assert seen[-1] == (8, 8)
    assert all(abs(p.tokens - 500) <= 1 for p in points)
    assert points[0].seconds["static"] == points[1].seconds["static"]
    # The clock is not what the planner minimises: a slot may cost a fraction of a permille there.
    assert points[0].seconds["equipoise"] * 1.001 >= points[1].seconds["equipoise"]


def test_what_the_step_shows_need_not_be_in_a_points_windows(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    setting = StepSetting(shown=Shown(window=1, micro_step=3))
    for make in (lambda ep, micro: [loads], lambda ep, micro: [loads.micro_steps(0, 2)] * 2):
        shown, plain = (
            sweep_points(make, StepCase(setting=each, **given), axes={}) for each in (setting, StepSetting())
        )
        assert shown == plain
    curves = break_even_curves(loads.micro_steps(0, 1), StepCase(setting=setting, **given))
    assert curves == break_even_curves(loads.micro_steps(0, 1), StepCase(**given))


def test_slots_that_are_not_swept_are_the_steps_own(loads):
    given = {"cluster": cluster_of(), "model": MODEL, "slots": 2}
    (kept,) = sweep_points(lambda ep, micro: [loads], StepCase(**given), axes={"ep": (8,)})
    assert kept.slots == 2
    assert kept.seconds["equipoise"] == simulate(loads, "equipoise", **given).policies[0].seconds.experts
    swept = sweep_points(lambda ep, micro: [loads], StepCase(**given), axes={"slots": (0, 1)})
    assert [point.slots for point in swept] == [0, 1]


def test_more_tokens_keep_the_skew_and_mixing_keeps_the_tokens(loads):
    more = at_tokens(loads, 16384, MODEL)
    assert mean_tokens([more], MODEL) == pytest.approx(16384, rel=1e-3)
    assert mean_skew([more], 8) == pytest.approx(mean_skew([loads], 8), rel=1e-3)
    skews = []
    for share in (0.0, 0.5, 1.0):
        mixed = mixed_with_even(loads, share)
        skews.append(mean_skew([mixed], 8))
        rows_MLR = mixed.load_MLRE.sum(axis=3)
        assert np.abs(rows_MLR - loads.load_MLRE.sum(axis=3)).max() <= MODEL.experts
    assert skews[0] == pytest.approx(1.0, abs=0.01)
    assert skews[0] < skews[1] < skews[2] == pytest.approx(mean_skew([loads], 8))


def test_the_sample_of_a_curve_is_spread_over_the_window():
    loads = skewed_loads(1, micro_steps=9)
    few, shape, layers = sampled(loads, MODEL)
    assert np.array_equal(few.total_MLE()[0], loads.total_MLE()[0][layers])
    assert (few.num_micro_steps, few.num_layers, shape.layers) == (4, 4, 4)
    assert np.array_equal(few.load_MLRE[0], loads.load_MLRE[0])
    assert np.array_equal(few.load_MLRE[-1], loads.load_MLRE[8])


def test_a_plan_pays_more_with_more_tokens_and_more_skew(loads):
    curves = break_even_curves(loads, StepCase(cluster=cluster_of(), model=MODEL))
    assert len(curves) == len(MIXES)
    assert [tokens for tokens, _ in curves[0].points] == list(TOKENS)
    assert [curve.skew for curve in curves] == sorted(curve.skew for curve in curves)
    at_most = [curve.points[-1][1] for curve in curves]
    assert at_most == sorted(at_most)
    assert curves[-1].points[-1][1] > curves[-1].points[0][1]
    assert curves[-1].tokens is not None


@pytest.mark.parametrize("rows", [0, 1, 100], ids=["no rows", "few rows", "even rows"])
def test_no_two_curves_are_of_the_same_loads_and_loads_without_rows_have_none(loads, rows):
    level = np.zeros_like(loads.load_MLRE) if rows == 1 else np.full_like(loads.load_MLRE, rows)
    if rows == 1:
        # Of a single row, a quarter and a half of its way from the even deal round to nothing.
        level[..., -1] = 1
    seen = []
    case = StepCase(cluster=cluster_of(), model=MODEL)
    curves = break_even_curves(LoadMatrix(level), case, progress=lambda done, total: seen.append((done, total)))
    assert len(curves) == {0: 0, 1: 2, 100: 1}[rows]
    assert len({curve.skew for curve in curves}) == len(curves)
    assert seen[-1:] == [(len(curves) * len(TOKENS),) * 2][: len(curves)]


def test_a_break_even_whose_sample_has_no_row_is_none():
    few = np.zeros((9, MODEL.layers, 8, MODEL.experts), dtype=np.int64)
    few[1] = 5
    assert break_even_curves(LoadMatrix(few), StepCase(cluster=cluster_of(), model=MODEL)) == ()


def test_loads_without_rows_have_nothing_that_more_tokens_multiply(loads):
    windows = [loads, LoadMatrix(np.zeros_like(loads.load_MLRE))]
    given = {"cluster": cluster_of(), "model": MODEL}
    with pytest.raises(LoadsError, match=r"window 1 \(update\) has no row, and tokens= multiplies rows"):
        sweep_points(lambda ep, micro: windows, StepCase(**given), axes={"tokens": (1024,)})
    assert sweep_points(lambda ep, micro: windows[1:], StepCase(**given), axes={"ep": (8,)})[0].saved_share == 0


@pytest.mark.parametrize(
    ("saved", "tokens"),
    [
        ((0.0, 0.02, 0.03), 2),
        ((0.02, 0.0, 0.03), 4),
        ((0.02, 0.02, 0.02), 1),
        ((0.02, 0.02, 0.0), None),
        ((0.0, 0.0, 0.01), 4),
    ],
)
def test_the_break_even_is_the_least_number_from_which_on_every_larger_one_pays(saved, tokens):
    curve = BreakEvenCurve(skew=1.5, points=tuple(zip((1, 2, 4), saved, strict=True)), worth=0.01)
    assert curve.tokens == tokens
    assert curve.to_dict()["tokens"] == tokens


def test_points_and_curves_become_one_document():
    point = SweepPoint(
        ep=8,
        slots=1,
        micro=None,
        tokens=100,
        skew=1.5,
        seconds={"static": 2.0, "equipoise": 1.5, "balanced": 1.2},
    )
    document = Sweep(axes={"ep": (8,)}, points=(point,)).to_dict()
    assert document["points"][0]["saved_share"] == pytest.approx(0.25)
    assert document["points"][0]["of_balanced"] == pytest.approx(0.8)
    assert document["axes"] == {"ep": [8]}
    assert document["break_even"] is None


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"width": (8,)}, "no axis 'width'"),
        ({"slots": ()}, "has no values"),
        ({"slots": (-1,)}, "sweep slots is -1"),
        ({"tokens": (0,)}, "sweep tokens is 0"),
    ],
)
def test_axes_that_make_no_sense_are_refused(loads, axes, words):
    with pytest.raises(InfeasiblePlanError, match=words):
        sweep_points(lambda ep, micro: [loads], StepCase(cluster=cluster_of(), model=MODEL), axes=axes)
