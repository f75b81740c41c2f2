"""`complete`: unknown rows are estimated from the known ones of the window, and the share is said."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import LoadMatrix
from equipoise.planner.plan import complete


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
