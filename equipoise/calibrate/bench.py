"""`Bench`: how anything is timed on a device, and what a timing says.

Knows torch. Does not know what is timed.

Method:
1. Inputs are random, never zeros: products of zeros run faster.
2. Each run is preceded by reading a buffer larger than L2: in training other layers lie between two uses of a weight.
3. A device-side sleep lets the host run ahead, so that launch latency is hidden. Long work needs it before the first
   run only, and a device that never rests runs at the clock it has in training.
4. CUDA events; medians, with (p90 - p10) / median as spread. On a CPU the host's clock.
5. What scatters is measured once more, and the steadier half is kept: a virtual machine hiccups.

Invariants (asserted by the tests):
1. A timing's median and spread are those of its runs.
2. Work is run `warm` times before and `runs` times while it is timed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SLEEP_CYCLES = 3_000_000
"""About 1.5 ms: longer than the host needs to enqueue a forward and backward."""
LONG_NS = 2e6
"""Work at least this long keeps the host ahead by itself."""
HEAT_SIDE, HEAT_PRODUCTS = 8192, 24
"""Products of this side, about 30 ms together on an H200, before a case that must run at a working clock."""
SCATTER = 0.15
"""A larger spread is measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how often to time."""

    device: torch.device
    dtype: torch.dtype
    runs: int
    flush: Tensor
    """Read before every run; larger than L2 on a GPU."""

    @classmethod
    def on(cls, device: str, *, runs: int) -> "Bench":
        """Build the bench for "cuda" (bf16) or "cpu" (fp32: bf16 products are slow or missing there)."""
        is_gpu = device == "cuda"
        flush = torch.randn((64 if is_gpu else 1) << 20, device=device)
        dtype = torch.bfloat16 if is_gpu else torch.float32
        return cls(device=torch.device(device), dtype=dtype, runs=runs, flush=flush)

    @property
    def is_gpu(self) -> bool:
        """Whether events and streams are there."""
        return self.device.type == "cuda"

    def heat(self) -> None:
        """Keep a GPU busy for a moment, so that what follows runs at the clock of a device at work."""
        if not self.is_gpu:
            return
        square = self.random(HEAT_SIDE, HEAT_SIDE)
        for _ in range(HEAT_PRODUCTS):
            torch.mm(square, square)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers in the bench's dtype."""
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and relative spread of one case."""

    median_ns: float
    spread: float
    """(p90 - p10) / median."""

    @classmethod
    def of(cls, times_ns: list[float]) -> "Timing":
        """Summarise the runs of one case."""
        low, median, high = np.percentile(times_ns, [10, 50, 90])
        return cls(float(median), float((high - low) / median))


def measure(work: Callable[[], object], bench: Bench, *, warm: int = 3) -> Timing:
    """Time `work` on the current stream, `bench.runs` times after `warm` runs."""
    for _ in range(warm):
        work()
    take = _device_ns if bench.is_gpu else _host_runs_ns
    timing = Timing.of(take(work, bench))
    if timing.spread < SCATTER or not bench.is_gpu:
        return timing
    return min(timing, Timing.of(take(work, bench)), key=lambda one: one.spread)


def _device_ns(work: Callable[[], object], bench: Bench) -> list[float]:
    """Nanoseconds of each run, by events; the first run tells whether the host needs its lead again."""
    times: list[float] = []
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(bench.runs)]
    for number, (start, stop) in enumerate(pairs):
        bench.flush.sum()
        if number < 2 or times[0] < LONG_NS:
            torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        work()
        stop.record()
        if number == 0:
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) * 1e6)
    torch.cuda.synchronize()
    return times + [start.elapsed_time(stop) * 1e6 for start, stop in pairs[1:]]


def _host_runs_ns(work: Callable[[], object], bench: Bench) -> list[float]:
    return [_host_ns(work) for _ in range(bench.runs)]


def _host_ns(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return float(time.perf_counter_ns() - start)
