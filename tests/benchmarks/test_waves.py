"""The benchmark of waves: how level cuts are, and slots in the best order."""

import numpy as np

from benchmarks.waves import in_order, unevenness
from equipoise.cost.waves import WaveRows


def test_unevenness_is_the_largest_waves_rows_over_the_mean_waves():
    rows = np.array([[[[30, 10, 0, 0], [10, 10, 10, 10], [0, 0, 0, 0]]]])
    assert unevenness(WaveRows.of(rows, 2)) == ((1.5 + 1.0) / 2, 1.5), "a rank without rows does not count"


def test_slots_in_the_best_order_hold_the_same_rows_in_waves_that_are_more_level():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 900, (3, 2, 4, 9)) ** 2
    for waves in (2, 3, 4):
        ordered = in_order(rows, waves)
        assert np.array_equal(np.sort(ordered, axis=3), np.sort(rows, axis=3))
        before, after = (unevenness(WaveRows.of(each, waves)) for each in (rows, ordered))
        assert after[0] < before[0] and after[1] <= before[1]
