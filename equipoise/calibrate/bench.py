"""How anything is timed on a device, and the sizes that a calibration measures.

1. Inputs are random, never zeros: products of zeros run faster.
2. Each run is preceded by reading a buffer larger than L2: in training other layers run between two uses of a weight.
3. A device-side sleep lets the host run ahead, so that launch latency is hidden. (A device that is heated by dense
   products first has lower clocks, and its tables scatter: on an H200 they were 3 to 17 % slower, and further from
   layers between attention layers than tables of a device that rests between runs.)
4. CUDA events; medians, with (p90 - p10) / median as spread. On a CPU the host's clock.
5. Timings that scatter are measured again, and the one with the least spread is kept: virtual machines have pauses.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class Steps:
    """A count of done steps, reported to a callback as (done, total)."""

    total: int
    tell: Callable[[int, int], None] | None = None
    done: int = 0

    def advance(self) -> None:
        """Count one more step."""
        self.done += 1
        if self.tell is not None:
            self.tell(self.done, self.total)


SLOTS = (1, 2, 4, 8, 16, 32)
ROWS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ZIPF = 1.0
"""Exponent of Zipf's law for uneven groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One layer's attention."""

    hidden: int
    heads: int
    kv_heads: int
    width: int
    """Width of one head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The sizes that a calibration measures."""

    shapes: tuple[tuple[int, int], ...]
    """(hidden, expert width) of the expert tables."""
    slots: tuple[int, ...] = SLOTS
    rows: tuple[int, ...] = ROWS
    attention: tuple[AttentionShape, ...]
    tokens: tuple[int, ...]
    """Sequence lengths of the attention."""
    moved_rows: tuple[int, ...]
    """Rows that are put in order, of the widths `moved_widths`."""
    top_k: int = 8
    copies: int = 16
    """Experts that copies rotate over, so that none finds its source in L2."""

    @classmethod
    def full(cls) -> "Grid":
        """Take experts of Qwen3-30B-A3B, DeepSeek-V2-Lite, gpt-oss, Qwen3-235B-A22B, DeepSeek-V3; attention of two."""
        return cls(
            shapes=((2048, 768), (2048, 1408), (2880, 2880), (4096, 1536), (7168, 2048)),
            attention=(
                AttentionShape(hidden=2048, heads=32, kv_heads=4, width=128),
                AttentionShape(hidden=4096, heads=64, kv_heads=4, width=128),
            ),
            tokens=(4096, 8192),
            moved_rows=(16384, 65536),
        )

    @classmethod
    def smoke(cls) -> "Grid":
        """Return the smallest sizes: everything once, in milliseconds on a CPU."""
        return cls(
            shapes=((32, 16),),
            slots=(1, 2),
            rows=(8, 24),
            attention=(AttentionShape(hidden=32, heads=4, kv_heads=2, width=8),),
            tokens=(16,),
            moved_rows=(16,),
            top_k=2,
            copies=2,
        )

    @property
    def expert_shape(self) -> tuple[int, int]:
        """(hidden, expert width) of the expert that is copied: the first."""
        return self.shapes[0]

    @property
    def moved_widths(self) -> list[int]:
        """Hidden widths of the rows that are moved: the first shape's and the last's."""
        return sorted({self.shapes[0][0], self.shapes[-1][0]})

    @property
    def expert_params(self) -> int:
        """Weights of that expert."""
        hidden, width = self.expert_shape
        return 3 * hidden * width

    @property
    def cells(self) -> int:
        """Cells of one expert table."""
        return len(self.slots) * len(self.rows)


def cut_rows(rows: int, slots: int, *, zipf: float) -> np.ndarray:
    """Return [S] int32 ends of each slot's rows, by Zipf's law with exponent `zipf`; 0 cuts evenly.

    Rows of a rank are never even over its experts, and an even cut flatters: groups of a power of two fill whole tiles
    of the products' kernels. With exponent 1 and 8 slots the largest group is 2.9 times the mean; in the real traces
    that `benchmarks/rank_replay.py` runs it is 2.7 to 3.2 times. Every slot takes one row first, as long as there are
    rows.
    """
    first = min(rows, slots)
    weight_S = np.arange(1, slots + 1, dtype=np.float64) ** -zipf
    # Rounded ends of the remaining rows: they ascend to exactly their number.
    rest_S = np.floor((rows - first) * np.cumsum(weight_S) / weight_S.sum() + 0.5).astype(np.int64)
    ends_S = rest_S + np.minimum(np.arange(1, slots + 1), first)
    count_S = np.sort(np.diff(ends_S, prepend=0))[::-1]
    return np.cumsum(count_S).astype(np.int32)


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
        """Draw normal numbers in the bench's dtype."""
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
        times_ns = []
        for _ in range(bench.runs):
            start = time.perf_counter_ns()
            work()
            times_ns.append(float(time.perf_counter_ns() - start))
        return Timing.of(times_ns)
    attempts: list[Timing] = []
    while len(attempts) < ATTEMPTS and not (attempts and attempts[-1].spread < SCATTER):
        attempts.append(Timing.of(_device_ns(work, bench)))
    return min(attempts, key=lambda one: one.spread)


def _device_ns(work: Callable[[], object], bench: Bench) -> list[float]:
    """Return the nanoseconds of each run, by events."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(bench.runs)]
    for start, stop in pairs:
        bench.flush.sum()
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e6 for start, stop in pairs]
