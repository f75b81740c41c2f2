"""Experts on the move: pulls by path, what they cost the compute beside them, gradient adds, and window edges.

Knows one device and its host memory. A peer is stood in for by the device itself, and each source says so.

Invariants (asserted by the tests):
1. A rate is bytes over the time beyond the fixed part; the fixed part is a small copy's.
2. A peer's rate is never above the published link's, whatever the device does inside itself, and compute is slowed by
   no more bytes than that.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from equipoise.calibrate.bench import SLEEP_CYCLES, Bench, measure
from equipoise.calibrate.experts import Cell, random_experts
from equipoise.calibrate.grid import ZIPF, Grid
from equipoise.calibrate.progress import Steps

SMALL_COPY_BYTES = 4096
COPY_RUNS = 5
"""Copies over PCIe vary more than kernels: 49 to 56 GB/s were seen with 21 runs on one H200."""
BESIDE_ROWS = 32768
BESIDE_SLOTS = 16
BESIDE_RUNS = 5
"""A slowdown is a small difference of two times; so many times as many runs as elsewhere steady it."""
Pair = tuple[float, float]
"""Nanoseconds without copies, and with them."""


def measure_pull(grid: Grid, nvlink_bytes_per_s: int, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Time copies of one expert on a side stream, from pinned host memory and from the device itself."""
    size = _expert_bytes(grid, bench)
    host, peer, target = _buffers(grid, size, bench)
    host_fixed, host_rate = copy_figures(host, target, size, bench)
    steps.advance()
    peer_fixed, peer_rate = copy_figures(peer, target, size, bench)
    steps.advance()
    return {
        "host_bytes_per_s": round(host_rate),
        "peer_bytes_per_s": min(round(peer_rate), nvlink_bytes_per_s),
        "host_fixed_ns": round(host_fixed),
        "peer_fixed_ns": round(peer_fixed),
        "source": f"host: measured, pinned copies of one expert ({size} bytes) on a side stream, fixed part by a copy "
        f"of {SMALL_COPY_BYTES} bytes; peer: a copy inside one device ran at {round(peer_rate)} bytes/s, capped by the "
        f"published link rate of {nvlink_bytes_per_s} bytes/s, as one device has no peer to measure",
    }


def measure_beside(grid: Grid, peer_bytes_per_s: int, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Time the expert block alone and beside copies on a side stream: as many as the path can bring meanwhile.

    A copy inside the device is several times as fast as a link. So a peer's copies are counted, not kept up: the block
    runs beside the bytes that the link would bring while it runs.
    """
    size = _expert_bytes(grid, bench)
    rows, slots = (BESIDE_ROWS, BESIDE_SLOTS) if bench.is_gpu else (grid.rows[-1], grid.slots[-1])
    cell = Cell.random(rows, random_experts(slots, grid.expert_shape, bench), zipf=ZIPF, bench=bench)
    host, peer, target = _buffers(grid, size, bench)
    lasts_ns = measure(cell.update, bench).median_ns
    slowdowns = []
    for source in (host, peer):
        copy = _copier(source, target, size)
        if source is peer:
            copies = max(1, round(lasts_ns * peer_bytes_per_s / 1e9 / size))
        else:
            copies = 1 + int(2 * lasts_ns / measure(copy, bench).median_ns)
        slowdowns.append(slowdown_permille(_time_beside(cell.update, copy, copies, bench)))
        steps.advance()
    return {
        "host_slowdown_permille": slowdowns[0],
        "peer_slowdown_permille": slowdowns[1],
        "source": f"measured: forward and backward of the expert block, {rows} rows in {slots} slots, beside copies of "
        f"{size} bytes on a side stream, over the same without them, median of {BESIDE_RUNS * bench.runs} pairs; "
        f"host: copies from start to end; peer: inside the device, {copies} copies, as many as {peer_bytes_per_s} "
        "bytes/s bring meanwhile; they read and write its own memory, so an upper bound for pulls over a link",
    }


def slowdown_permille(pairs_ns: list[Pair]) -> int:
    """Thousandths by which the second of each pair takes longer than the first: the median over pairs, at least 0."""
    return max(0, round(1000 * median(beside / alone - 1 for alone, beside in pairs_ns)))


def _time_beside(work: Callable[[], object], copy: Callable[[], None], copies: int, bench: Bench) -> list[Pair]:
    """Time `work` without and with `copies` copies on a side stream, in turn: what drifts, drifts for both."""
    runs = range(BESIDE_RUNS * bench.runs)
    if not bench.is_gpu:
        copy()
        return [(measure(work, bench).median_ns, measure(work, bench).median_ns)]
    side = torch.cuda.Stream()

    def timed(copies: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Both streams wait for the sleep, so that everything is enqueued when they start together.
        torch.cuda._sleep(4 * SLEEP_CYCLES)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(copies):
                copy()
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) * 1e6

    return [(timed(0), timed(copies)) for _ in runs]


def measure_add(grid: Grid, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Time adding one expert's returned gradient to its home's.

    Taken in fp32. Memory bounds an add, so bytes per second hold for gradients in the weights' dtype, too, which have
    fewer bytes.
    """
    numel = _expert_params(grid)
    home, returned = (torch.randn(numel, device=bench.device) for _ in range(2))
    timing = measure(lambda: home.add_(returned, alpha=1e-3), bench)
    steps.advance()
    return {
        "bytes_per_s": round(3 * home.nbytes / timing.median_ns * 1e9),
        "source": f"measured: in-place fp32 add of {numel} elements, two reads and one write counted, L2 flushed",
    }


def measure_exchange(grid: Grid, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Time one expert's way through the staging buffer of an edge: out of its slot and into it."""
    numel, rates = _expert_params(grid), []
    for dtype in (bench.dtype, torch.float32):
        slot, staging, incoming = (torch.randn(numel, device=bench.device).to(dtype) for _ in range(3))

        def swap(slot: Tensor = slot, staging: Tensor = staging, incoming: Tensor = incoming) -> None:
            staging.copy_(slot)
            slot.copy_(incoming)

        rates.append(slot.nbytes / measure(swap, bench).median_ns * 1e9)
        steps.advance()
    return {
        "weight_bytes_per_s": round(rates[0]),
        "gradient_bytes_per_s": round(rates[1]),
        "source": f"measured: one expert of {numel} elements copied from its slot to staging and another into the "
        "slot, its bytes counted once; weights in the kernels' dtype, gradients in fp32; the link between devices is "
        "not part of it",
    }


def copy_figures(source: Tensor, target: Tensor, size: int, bench: Bench) -> tuple[float, float]:
    """Fixed nanoseconds and bytes per second of copies of `size` bytes."""
    small = _time_copies(source, target, min(SMALL_COPY_BYTES, size // 2), bench)
    large = _time_copies(source, target, size, bench)
    return small, size / max(large - small, 1.0) * 1e9


def _time_copies(source: Tensor, target: Tensor, size: int, bench: Bench) -> float:
    bench, copy = replace(bench, runs=COPY_RUNS * bench.runs), _copier(source, target, size)
    if not bench.is_gpu:
        return measure(copy, bench).median_ns
    # A host's pages are slower when they are read for the first time.
    target.copy_(source, non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        return measure(copy, bench).median_ns


def _copier(source: Tensor, target: Tensor, size: int) -> Callable[[], None]:
    """Copy `size` bytes, at each call the next ones."""
    starts = iter(range(10**9))

    def copy() -> None:
        start = next(starts) * size % (len(source) - size + 1)
        target[start : start + size].copy_(source[start : start + size], non_blocking=True)

    return copy


def _buffers(grid: Grid, size: int, bench: Bench) -> tuple[Tensor, Tensor, Tensor]:
    """Host memory, pinned where there is a device; the same bytes on the device; and where copies go."""
    host = torch.randint(0, 255, (grid.copies * size,), dtype=torch.uint8)
    host = host.pin_memory() if bench.is_gpu else host
    peer = host.to(bench.device, copy=True)
    return host, peer, torch.empty_like(peer)


def _expert_params(grid: Grid) -> int:
    hidden, width = grid.expert_shape
    return 3 * hidden * width


def _expert_bytes(grid: Grid, bench: Bench) -> int:
    return _expert_params(grid) * bench.dtype.itemsize
