"""`Bench`: how anything is timed on a device, and what a timing says.

Knows torch. Does not know what is timed.

Method:
1. Inputs are random, never zeros: products of zeros run faster.
2. Each run is preceded by reading a buffer larger than L2: in training other layers lie between two uses of a weight.
3. A device-side sleep lets the host run ahead, so that launch latency is hidden. (A device that is heated by dense
   products first clocks lower, and its tables scatter: on an H200 they were 3 to 17 % slower, and further from layers
   between attention layers than tables of a device that rests between runs.)
4. CUDA events; medians, with (p90 - p10) / median as spread. On a CPU the host's clock.
5. What scatters is measured again, and the steadiest attempt is kept: a virtual machine hiccups.

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
SCATTER = 0.15
"""A larger spread is measured again."""
ATTEMPTS = 3


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
    if not bench.is_gpu:
        return Timing.of([_host_ns(work) for _ in range(bench.runs)])
    attempts: list[Timing] = []
    while len(attempts) < ATTEMPTS and not (attempts and attempts[-1].spread < SCATTER):
        attempts.append(Timing.of(_device_ns(work, bench)))
    return min(attempts, key=lambda one: one.spread)


def _device_ns(work: Callable[[], object], bench: Bench) -> list[float]:
    """Nanoseconds of each run, by events."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(bench.runs)]
    for start, stop in pairs:
        bench.flush.sum()
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e6 for start, stop in pairs]


def _host_ns(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return float(time.perf_counter_ns() - start)
