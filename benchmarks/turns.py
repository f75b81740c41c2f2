"""Timing several things in turn, run by run, so that what a machine does slowly meanwhile falls on all of them alike.

Knows CUDA events and clocks. Does not know what is timed.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from equipoise.calibrate.bench import Bench, Timing

Works = Mapping[str, Callable[[int], object]]
"""What to time, by name; each is given the number of the run, warm-up included."""
WARM = 3


def measure_in_turn(works: Works, bench: Bench) -> dict[str, Timing]:
    """Median and spread of each."""
    return {name: Timing.of(list(times_ns)) for name, times_ns in run_in_turn(works, bench).items()}


def run_in_turn(works: Works, bench: Bench) -> dict[str, np.ndarray]:
    """Nanoseconds of each, run by run: the n-th of one lies beside the n-th of every other."""
    for run in range(WARM):
        for work in works.values():
            work(run)
    runs = range(WARM, WARM + bench.runs)
    if bench.device.type == "cpu":
        return {name: np.array([_host_ns(work, run) for run in runs]) for name, work in works.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
    for run in runs:
        # Who comes second may find clocks and caches otherwise, so the order changes with every run.
        for name in list(works)[:: 1 if run % 2 else -1]:
            events[name].append(_enqueue(works[name], run, bench))
    torch.cuda.synchronize()
    return {name: np.array([a.elapsed_time(b) * 1e6 for a, b in pairs]) for name, pairs in events.items()}


def added_pct(times_ns: np.ndarray, base_ns: np.ndarray) -> tuple[float, float, float]:
    """What runs took more than those beside them, in percent: median, and the 25th and 75th percentile."""
    low, median, high = np.percentile(100 * (times_ns / base_ns - 1), [25, 50, 75])
    return float(median), float(low), float(high)


def _enqueue(work: Callable[[int], object], run: int, bench: Bench) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    bench.flush.sum()
    # As in `calibrate.bench.measure`: longer than the host needs to enqueue the work.
    torch.cuda._sleep(3_000_000)
    start.record()
    work(run)
    stop.record()
    return start, stop


def _host_ns(work: Callable[[int], object], run: int) -> float:
    start = time.perf_counter_ns()
    work(run)
    return float(time.perf_counter_ns() - start)
