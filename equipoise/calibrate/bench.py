"""`Bench`: how anything is timed on a device, and what a timing says.

Knows torch. Does not know what is timed.

Method:
1. Inputs are random, never zeros: products of zeros run faster.
2. Each run is preceded by reading a buffer larger than L2: in training other layers lie between two uses of a weight.
3. A device-side sleep lets the host run ahead, so that launch latency is hidden.
4. CUDA events; medians, with (p90 - p10) / median as spread. On a CPU the host's clock.

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
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(bench.runs)]
    for start, stop in events:
        bench.flush.sum()
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(stop) * 1e6 for start, stop in events])


def _host_ns(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return float(time.perf_counter_ns() - start)
