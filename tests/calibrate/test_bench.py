"""Timing: medians and spreads of the runs, and as many runs as asked for."""

import pytest

from equipoise.calibrate.bench import Bench, Steps, Timing, measure


def test_a_timing_is_the_median_and_the_spread_of_its_runs():
    timing = Timing.of([100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0, 1100.0])
    assert timing.median_ns == 600.0
    assert timing.spread == pytest.approx((1000 - 200) / 600)


@pytest.mark.parametrize(("runs", "warm"), [(1, 0), (4, 2)])
def test_work_runs_warm_times_before_and_runs_times_while_it_is_timed(runs, warm):
    calls = []
    timing = measure(lambda: calls.append(1), Bench.on("cpu", runs=runs), warm=warm)
    assert len(calls) == runs + warm
    assert timing.median_ns > 0


def test_random_numbers_are_neither_zero_nor_all_alike():
    numbers = Bench.on("cpu", runs=1).random(64, 3, scale=2.0)
    assert numbers.shape == (64, 3)
    assert 1.0 < float(numbers.std()) < 3.0


def test_steps_tell_done_and_total():
    told = []
    steps = Steps(2, lambda done, total: told.append((done, total)))
    steps.advance()
    steps.advance()
    assert told == [(1, 2), (2, 2)]
    Steps(1).advance()
