"""Seconds lost: the formula by hand, additive, zero exactly when level."""

import numpy as np
import pytest

from equipoise.core import LoadsError
from equipoise.loads.lost import LostTime, estimate_lost

FIGURES = dict(row_flops=10, flops=1000, efficiency=0.5)


def test_seconds_are_those_of_the_busiest_rank_and_the_ceiling_those_of_the_mean():
    load = np.array([[[30, 10], [20, 20]], [[0, 40], [0, 0]]])
    lost = estimate_lost(load, stage="recompute", **FIGURES)
    # A row takes 10 / (1000 x 0.5) = 0.02 s; busiest 30 + 20 + 40 rows, means 20 + 20 + 20.
    assert lost.seconds == pytest.approx(90 * 0.02)
    assert lost.ceiling_seconds == pytest.approx(60 * 0.02)
    assert lost.lost_seconds == pytest.approx(30 * 0.02)
    assert lost.lost_share == pytest.approx(1 / 3)


def test_the_update_takes_three_times_the_forward_pass():
    load = np.array([[[3, 1]]])
    forward, update = (estimate_lost(load, stage=stage, **FIGURES) for stage in ("recompute", "update"))
    assert update.seconds == pytest.approx(3 * forward.seconds)


def test_level_loads_lose_nothing_and_idle_ones_are_no_division_by_zero():
    assert estimate_lost(np.full((2, 3, 4), 7), stage="update", **FIGURES).lost_seconds == 0
    idle = estimate_lost(np.zeros((1, 1, 2), dtype=np.int64), stage="update", **FIGURES)
    assert (idle.seconds, idle.lost_share) == (0, 0)


def test_seconds_add_up_over_micro_steps():
    load = np.random.default_rng(0).integers(0, 100, (6, 3, 4))
    parts = [estimate_lost(load[m : m + 1], stage="update", **FIGURES) for m in range(6)]
    total = sum(parts, LostTime(seconds=0.0, ceiling_seconds=0.0))
    whole = estimate_lost(load, stage="update", **FIGURES)
    assert total.to_dict() == pytest.approx(whole.to_dict())
    assert whole.lost_seconds > 0


@pytest.mark.parametrize("efficiency", [0, -1, 1.5, float("nan")])
def test_an_impossible_efficiency_is_refused(efficiency):
    with pytest.raises(LoadsError, match="efficiency is"):
        estimate_lost(np.ones((1, 1, 1)), stage="update", row_flops=1, flops=1, efficiency=efficiency)
