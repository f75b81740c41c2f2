"""`complete`: unknown rows are estimated from the known ones of the window, and the share is said."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import LoadMatrix, LoadsError
from equipoise.planner import plan
from equipoise.planner.plan import complete
from tests.sim.steps import MODEL, cluster_of, skewed_loads


def complete_by_hand(load, coverage, before=None):
    """[M, L, R, E] estimated rows as fractions: sizes one by one, and each size in the layer's proportions."""
    wanted = np.array(load, dtype=np.float64)
    micro_steps, layers, ranks, _ = load.shape
    for layer in range(layers):
        weight_E = load[:, layer].sum(axis=(0, 1))
        if before is not None and before[:, layer].any():
            weight_E = before[:, layer].sum(axis=(0, 1))

        def size(m, r, layer=layer):
            return load[m, layer, r].sum() * 10**6 // round(coverage[m, layer, r] * 10**6)

        seen = {r: [m for m in range(micro_steps) if coverage[m, layer, r] > 0] for r in range(ranks)}
        means = {r: sum(size(m, r) for m in ms) // len(ms) for r, ms in seen.items() if ms}
        for m, r in np.ndindex(micro_steps, ranks):
            if coverage[m, layer, r] > 0:
                rows = size(m, r)
            elif r in means:
                rows = means[r]
            elif means:
                rows = sum(means.values()) // len(means)
            else:
                rows = 0 if before is None else before[:, layer, r].sum() // len(before)
            if weight_E.any():
                wanted[m, layer, r] += max(0, rows - load[m, layer, r].sum()) * weight_E / weight_E.sum()
    return wanted


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_known_rows_never_shrink_and_the_share_is_what_was_added(seed):
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 1000, size=(3, 2, 4, 6))
    coverage = rng.choice([0.0, 0.1, 0.5, 0.999, 1.0], size=(3, 2, 4))
    done, share = complete(LoadMatrix(load, coverage_MLR=coverage))
    assert (done.load_MLRE >= load).all()
    added, total = int((done.load_MLRE - load).sum()), int(done.load_MLRE.sum())
    assert share == (added / total if total else 0)
    assert done.coverage_MLR is None
    assert np.array_equal(done.load_MLRE[coverage == 1.0], load[coverage == 1.0])


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_estimates_are_the_obvious_ones_to_a_row_and_those_of_an_expert_to_a_row_in_all(seed):
    rng = np.random.default_rng(seed)
    shape = (rng.integers(1, 4), 2, rng.integers(1, 5), 6)
    load = rng.integers(0, 1000, size=shape)
    coverage = rng.choice([0.0, 0.1, 0.5, 0.999, 1.0], size=shape[:3])
    load[coverage == 0] = 0
    before = (
        None if seed % 3 == 0 else rng.integers(0, 500, size=(2, *shape[1:])) * rng.integers(0, 2, size=(1, 2, 1, 1))
    )
    forecast = None if before is None else LoadMatrix(before)
    done, _ = complete(LoadMatrix(load, coverage_MLR=coverage), forecast=forecast)
    wanted = complete_by_hand(load, coverage, before)
    assert np.abs(done.load_MLRE - wanted).max() <= 1
    assert np.abs(done.load_MLRE.sum(axis=(0, 2)) - wanted.sum(axis=(0, 2))).max() < 1


def test_what_nobody_knows_is_expected_as_before_and_what_is_known_stays():
    before = LoadMatrix(np.array([[[[30, 10], [0, 0]]], [[[50, 10], [0, 0]]]]))
    nothing = LoadMatrix(np.zeros((3, 1, 2, 2), dtype=np.int64), coverage_MLR=np.zeros((3, 1, 2)))
    done, share = complete(nothing, forecast=before)
    assert done.load_MLRE[:, 0, 0].tolist() == [[40, 10]] * 3 and not done.load_MLRE[:, 0, 1].any()
    assert share == 1.0
    half = LoadMatrix(np.array([[[[0, 50], [50, 50]]]]), coverage_MLR=np.array([[[0.5, 1.0]]]))
    assert complete(half, forecast=before)[0].load_MLRE.tolist() == [[[[40, 60], [50, 50]]]]


def test_many_rows_of_which_little_is_known_do_not_overflow():
    load = np.full((2, 1, 2, 3), 2**36)
    done, _ = complete(LoadMatrix(load, coverage_MLR=np.full((2, 1, 2), 0.25)))
    assert (done.load_MLRE == 4 * load).all()
    with pytest.raises(LoadsError, match=r"estimated ones included"):
        plan(
            LoadMatrix(np.full((1, 4, 8, 16), 2**32), coverage_MLR=np.full((1, 4, 8), 1e-6)),
            cluster=cluster_of(),
            model=MODEL,
        )


def test_a_plan_that_knows_every_route_asks_no_forecast_and_one_that_knows_none_is_made_for_it():
    loads, earlier = skewed_loads(1), skewed_loads(2)
    given = {"cluster": cluster_of(), "model": MODEL}
    assert plan(loads, **given, forecast=earlier).digest() == plan(loads, **given).digest()
    nothing = LoadMatrix(np.zeros_like(loads.load_MLRE), coverage_MLR=np.zeros(loads.load_MLRE.shape[:3]))
    blind = plan(nothing, **given)
    assert not blind.displaced_LE.any() and not len(blind.replica_table)
    expected = plan(nothing, **given, forecast=earlier)
    assert expected.estimated_share == 1.0 and expected.saved_seconds > 0
    with pytest.raises(LoadsError, match=r"the forecast has 4 layers, 4 ranks and 16 experts, the window 4, 8 and 16"):
        plan(loads, **given, forecast=skewed_loads(2, ranks=4))


def test_full_coverage_changes_nothing():
    loads = LoadMatrix(np.arange(16).reshape(2, 1, 2, 4))
    assert complete(loads) == (loads, 0.0)
    full = LoadMatrix(loads.load_MLRE, coverage_MLR=np.ones((2, 1, 2)))
    assert complete(full) == (full, 0.0)


def test_a_known_share_is_scaled_up():
    load = np.full((1, 1, 1, 3), 10)
    done, share = complete(LoadMatrix(load, coverage_MLR=np.full((1, 1, 1), 0.25)))
    assert done.load_MLRE.ravel().tolist() == [40, 40, 40]
    assert share == 0.75


def test_what_is_not_known_at_all_takes_the_mean_of_its_source():
    load = np.array([[[[10, 2]]], [[[20, 4]]], [[[0, 0]]]])
    done, _ = complete(LoadMatrix(load, coverage_MLR=np.array([1.0, 1.0, 0.0]).reshape(3, 1, 1)))
    assert done.load_MLRE[2, 0, 0].tolist() == [15, 3]


def test_a_source_that_is_never_known_takes_the_mean_of_its_layer():
    load = np.array([[[[10, 2], [30, 6], [0, 0]]]])
    done, _ = complete(LoadMatrix(load, coverage_MLR=np.array([[[1.0, 1.0, 0.0]]])))
    assert done.load_MLRE[0, 0, 2].tolist() == [20, 4]


def test_nothing_known_anywhere_stays_nothing():
    done, share = complete(LoadMatrix(np.zeros((1, 1, 2, 2), dtype=np.int64), coverage_MLR=np.zeros((1, 1, 2))))
    assert (int(done.load_MLRE.sum()), share) == (0, 0.0)


def test_padding_stage_and_layer_numbers_are_kept():
    load = np.full((1, 2, 1, 2), 8)
    loads = LoadMatrix(
        load,
        stage="recompute",
        padding_MLRE=load // 2,
        coverage_MLR=np.full((1, 2, 1), 0.5),
        layer_numbers_L=np.array([4, 9]),
    )
    done, _ = complete(loads)
    assert (done.stage, done.layer_numbers_L.tolist()) == ("recompute", [4, 9])
    assert np.array_equal(done.padding_MLRE, load // 2)
