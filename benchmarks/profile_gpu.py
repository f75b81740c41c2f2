"""Measure the hardware profile of one GPU.

    python -m benchmarks.profile_gpu -o equipoise/cost/profiles/h200.json
    python -m benchmarks.profile_gpu --cpu-smoke -o smoke.json

What bounds the cases: large cells of the expert block by the dense bf16 rate, small ones by reading the experts'
weights from device memory, the smallest by kernel launches; pulls by PCIe or NVLink; gradient adds by device memory.
The table gives each case as a share of the published ceiling in `equipoise/core/presets/clusters`.
Knows torch and numpy; imports no room of the package, so that it runs where only torch is installed. The file it
writes is specified in `benchmarks/derive_profile.py`, which makes other devices' profiles from it.

Method:
1. Inputs are random, never zeros, and the expert block is checked against float64 before it is timed.
2. Each run is preceded by reading a buffer larger than L2: in training other layers lie between two uses of a weight.
3. A device-side sleep lets the host run ahead, so that launch latency is hidden.
4. CUDA events, medians. Tables are raw medians: making them monotone is the reader's work.
5. On a fresh virtual machine run it twice and keep the second: host pulls of the first process ran at 39 and 49 GB/s
   on two such machines, of the second at 55 and 56 (H200, PCIe Gen5); tables agreed to 0.3 % in the median cell, 11 %
   in the worst.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.derive_profile import FORMAT, ROOT, published_figures, write_profile

EXPERT_SHAPES = ((2048, 768), (4096, 1536))  # (D, F) of Qwen3-30B-A3B and Qwen3-235B-A22B
SLOTS = (1, 2, 4, 8, 16, 32)
ROWS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BF16_BYTES = 2
SMALL_COPY_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured; `smoke` is a tiny copy of everything for a machine without a GPU."""

    shapes: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    """Sequence lengths of the attention case."""
    heads: tuple[int, int, int]
    """Query heads, key-value heads, head width."""
    hidden: int
    """Width of the residual stream in the attention case."""

    @classmethod
    def full(cls) -> "Sizes":
        """The shapes of Qwen3-30B-A3B and Qwen3-235B-A22B; attention as in the former."""
        heads = (32, 4, 128)
        return cls(shapes=EXPERT_SHAPES, slots=SLOTS, rows=ROWS, tokens=(4096, 8192), heads=heads, hidden=2048)

    @classmethod
    def smoke(cls) -> "Sizes":
        """Everything once, in milliseconds on a CPU."""
        return cls(shapes=((32, 16),), slots=(1, 2), rows=(8, 24), tokens=(16,), heads=(4, 2, 8), hidden=32)


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
    if bench.device.type == "cpu":
        return Timing.of([_host_ns(work) for _ in range(bench.runs)])
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(bench.runs)]
    for start, stop in events:
        bench.flush.sum()
        # 3 million cycles, about 1.5 ms: longer than the host needs to enqueue a forward and backward.
        torch.cuda._sleep(3_000_000)
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(stop) * 1e6 for start, stop in events])


def _host_ns(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return float(time.perf_counter_ns() - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The weights of several experts of one layer."""

    gate_up_SFD: Tensor
    """[S, 2F, D]"""
    down_SDF: Tensor
    """[S, D, F]"""

    @classmethod
    def random(cls, slots: int, shape: tuple[int, int], bench: Bench) -> "Experts":
        """Draw `slots` experts of (hidden, width)."""
        hidden, width = shape
        gate_up = bench.random(slots, 2 * width, hidden, scale=hidden**-0.5).requires_grad_()
        down = bench.random(slots, hidden, width, scale=width**-0.5).requires_grad_()
        return cls(gate_up_SFD=gate_up, down_SDF=down)

    def forward(self, x_TD: Tensor, stops_S: Tensor) -> Tensor:
        """Two grouped products around SiLU(gate) * up; expert s takes the rows up to `stops_S[s]`."""
        inner = F.grouped_mm(x_TD, self.gate_up_SFD.transpose(-2, -1), offs=stops_S)
        gate, up = inner.chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down_SDF.transpose(-2, -1), offs=stops_S)

    def reference(self, x_TD: Tensor, stops_S: Tensor) -> Tensor:
        """The same, one expert after another in float64."""
        outs, start = [], 0
        for slot, stop in enumerate(stops_S.tolist()):
            gate, up = (x_TD[start:stop].double() @ self.gate_up_SFD[slot].double().T).chunk(2, dim=-1)
            outs.append((F.silu(gate) * up) @ self.down_SDF[slot].double().T)
            start = stop
        return torch.cat(outs)


def even_stops(rows: int, slots: int, device: torch.device) -> Tensor:
    """[S] int32 end of each slot's rows, as even as whole rows allow."""
    stops = [(slot + 1) * (rows // slots) + min(slot + 1, rows % slots) for slot in range(slots)]
    return torch.tensor(stops, dtype=torch.int32, device=device)


def check_block(experts: Experts, shape: tuple[int, int], bench: Bench) -> None:
    """Raise unless the timed block computes the right numbers on uneven groups."""
    slots = experts.gate_up_SFD.shape[0]
    stops_S = even_stops(8 * slots + 3, slots, bench.device)
    x_TD = bench.random(8 * slots + 3, shape[0])
    with torch.no_grad():
        wanted = experts.reference(x_TD, stops_S)
        error = ((experts.forward(x_TD, stops_S) - wanted).norm() / wanted.norm()).item()
    # bf16 operands land between 1e-3 and 1e-2; NaN fails the comparison.
    if not error < 1e-2:
        raise RuntimeError(f"expert block of {slots} slots, shape {shape}: relative error {error:.2e}, limit 1e-2")


def measure_cell(experts: Experts, rows: int, bench: Bench) -> tuple[Timing, Timing]:
    """Time forward, and forward + backward, of `rows` rows spread evenly over the experts."""
    slots, _, hidden = experts.gate_up_SFD.shape
    x_TD = bench.random(rows, hidden).requires_grad_()
    grad_TD = bench.random(rows, hidden)
    stops_S = even_stops(rows, slots, bench.device)
    inputs = (x_TD, experts.gate_up_SFD, experts.down_SDF)

    def forward() -> Tensor:
        with torch.no_grad():
            return experts.forward(x_TD, stops_S)

    def update() -> tuple[Tensor, ...]:
        return torch.autograd.grad(experts.forward(x_TD, stops_S), inputs, grad_TD)

    return measure(forward, bench), measure(update, bench)


def measure_compute(shape: tuple[int, int], sizes: Sizes, bench: Bench) -> dict[str, Any]:
    """Fill the two tables of one expert shape."""
    forward_ns, update_ns, spread = [], [], 0.0
    for slots in sizes.slots:
        experts = Experts.random(slots, shape, bench)
        check_block(experts, shape, bench)
        cells = [measure_cell(experts, rows, bench) for rows in sizes.rows]
        forward_ns.append([round(forward.median_ns) for forward, _ in cells])
        update_ns.append([round(update.median_ns) for _, update in cells])
        spread = max(spread, *(timing.spread for cell in cells for timing in cell))
    return {
        "hidden": shape[0],
        "expert_width": shape[1],
        "slots": list(sizes.slots),
        "rows": list(sizes.rows),
        "forward_ns": forward_ns,
        "update_ns": update_ns,
        "spread": round(spread, 4),
        "source": f"measured, medians of {bench.runs} runs, CUDA events, L2 flushed, launches hidden; bf16 "
        "torch.nn.functional.grouped_mm, SiLU and product unfused, equal groups; update writes bf16 weight "
        "gradients and does not accumulate them",
    }


def measure_attention(sizes: Sizes, bench: Bench) -> dict[str, Any]:
    """Time one layer's projections and causal attention, forward and backward, over all sequence lengths."""
    heads, kv_heads, width = sizes.heads
    query, kv = heads * width, kv_heads * width
    qkv_w = bench.random(query + 2 * kv, sizes.hidden, scale=sizes.hidden**-0.5).requires_grad_()
    out_w = bench.random(sizes.hidden, query, scale=query**-0.5).requires_grad_()

    def forward(x_TD: Tensor) -> Tensor:
        parts = F.linear(x_TD, qkv_w).split([query, kv, kv], dim=-1)
        q, k, v = (part.view(1, len(x_TD), -1, width).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).reshape(len(x_TD), query), out_w)

    flops, forward_ns, backward_ns = 0, 0.0, 0.0
    for tokens in sizes.tokens:
        x_TD = bench.random(tokens, sizes.hidden).requires_grad_()
        grad_TD = bench.random(tokens, sizes.hidden)
        flops += 2 * tokens * (qkv_w.numel() + out_w.numel()) + 2 * tokens * (tokens + 1) // 2 * 2 * query
        with torch.no_grad():
            forward_ns += measure(lambda x=x_TD: forward(x), bench).median_ns
        out = forward(x_TD)
        inputs = (x_TD, qkv_w, out_w)
        backward_ns += measure(
            lambda o=out, i=inputs, g=grad_TD: torch.autograd.grad(o, i, g, retain_graph=True), bench
        ).median_ns
    return {
        "forward_flops_per_s": round(flops / forward_ns * 1e9),
        "backward_flops_per_s": round(2 * flops / backward_ns * 1e9),
        "source": f"measured: bf16 projections and causal scaled_dot_product_attention, sequences of "
        f"{' and '.join(map(str, sizes.tokens))} tokens, {heads} heads and {kv_heads} key-value heads of {width}; "
        "norms and rotary embedding left out",
    }


def measure_pull(expert_bytes: int, nvlink_bytes_per_s: int, bench: Bench) -> dict[str, Any]:
    """Time copies of one expert on a side stream, from pinned host memory and from the device itself."""
    is_gpu = bench.device.type == "cuda"
    # Sixteen experts, so that no copy finds its source in L2.
    target = torch.empty(16 * expert_bytes, dtype=torch.uint8, device=bench.device)
    host = torch.randint(0, 255, target.shape, dtype=torch.uint8, pin_memory=is_gpu)
    peer = host.to(bench.device)
    host_fixed, host_rate = _copy_figures(host, target, expert_bytes, bench)
    peer_fixed, peer_rate = _copy_figures(peer, target, expert_bytes, bench)
    return {
        "host_bytes_per_s": round(host_rate),
        "peer_bytes_per_s": min(round(peer_rate), nvlink_bytes_per_s),
        "host_fixed_ns": round(host_fixed),
        "peer_fixed_ns": round(peer_fixed),
        "source": f"host: measured, pinned copies of one expert ({expert_bytes} bytes) on a side stream, fixed part by "
        f"a copy of {SMALL_COPY_BYTES} bytes; peer: a copy inside one device ran at {round(peer_rate)} bytes/s, capped "
        f"by the published NVLink rate of {nvlink_bytes_per_s} bytes/s, as one GPU has no peer to measure",
    }


def _copy_figures(source: Tensor, target: Tensor, size: int, bench: Bench) -> tuple[float, float]:
    """Fixed nanoseconds and bytes per second of copies of `size` bytes."""
    small = _time_copies(source, target, min(SMALL_COPY_BYTES, size // 2), bench)
    large = _time_copies(source, target, size, bench)
    return small, size / max(large - small, 1.0) * 1e9


def _time_copies(source: Tensor, target: Tensor, size: int, bench: Bench) -> float:
    # Copies over PCIe vary more than kernels: 49 to 56 GB/s were seen with 21 runs on one H200.
    bench = replace(bench, runs=5 * bench.runs)
    starts = iter(range(10**9))

    def copy() -> None:
        start = next(starts) * size % (len(source) - size + 1)
        target[start : start + size].copy_(source[start : start + size], non_blocking=True)

    if bench.device.type == "cpu":
        return measure(copy, bench).median_ns
    with torch.cuda.stream(torch.cuda.Stream()):
        return measure(copy, bench).median_ns


def measure_add(numel: int, bench: Bench) -> dict[str, Any]:
    """Time adding one expert's returned gradient to its home's."""
    home, returned = bench.random(numel), bench.random(numel, scale=1e-3)
    timing = measure(lambda: home.add_(returned), bench)
    rate = 3 * numel * home.element_size() / timing.median_ns * 1e9
    return {
        "bytes_per_s": round(rate),
        "source": f"measured: in-place bf16 add of {numel} elements, two reads and one write counted, L2 flushed",
    }


def assumed_all_to_all() -> dict[str, Any]:
    """The part that one GPU cannot measure."""
    return {
        "inside_share": 0.8,
        "across_share": 0.85,
        "fixed_ns": 25000,
        "source": "assumed: shares of the published NVLink and NIC rates that all-to-all kernels reach, and a fixed "
        "cost per exchange; not measurable on one GPU",
    }


def measure_profile(sizes: Sizes, bench: Bench, nvlink_bytes_per_s: int) -> dict[str, Any]:
    """Measure every part; the parts' order is the file's."""
    hidden, width = sizes.shapes[0]
    expert_params = 3 * hidden * width
    return {
        "compute": [measure_compute(shape, sizes, bench) for shape in sizes.shapes],
        "attention": measure_attention(sizes, bench),
        "pull": measure_pull(expert_params * BF16_BYTES, nvlink_bytes_per_s, bench),
        "add": measure_add(expert_params, bench),
        "all_to_all": assumed_all_to_all(),
    }


def provenance(device: str, commit: str | None) -> dict[str, str]:
    """Say which device, software and source made the figures; nothing may stay unknown."""
    if commit is None:
        commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    is_gpu = device == "cuda"
    return {
        "format": FORMAT,
        "device": torch.cuda.get_device_name() if is_gpu else "CPU, smoke run",
        "kind": "measured",
        "made_by": "python -m benchmarks.profile_gpu" + ("" if is_gpu else " --cpu-smoke"),
        "commit": commit,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if is_gpu else "none",
        "torch": str(torch.__version__),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def print_table(profile: dict[str, Any], figures: dict[str, int]) -> None:
    """Print every part as a share of its published ceiling."""
    for part in profile["compute"]:
        row_flops = 6 * part["hidden"] * part["expert_width"]
        print(f"expert block D={part['hidden']} F={part['expert_width']}: ms forward / update, share of peak forward")
        for slots, forward, update in zip(part["slots"], part["forward_ns"], part["update_ns"], strict=True):
            for rows, f_ns, u_ns in zip(part["rows"], forward, update, strict=True):
                share = rows * row_flops / f_ns * 1e9 / figures["flops"]
                print(f"  slots {slots:3d}  rows {rows:7d}  {f_ns / 1e6:8.3f} / {u_ns / 1e6:8.3f}  {share:6.1%}")
        print(f"  largest spread of a cell: {part['spread']:.1%}")
    attention, pull = profile["attention"], profile["pull"]
    print(f"attention forward  {attention['forward_flops_per_s'] / figures['flops']:6.1%} of peak")
    print(f"attention backward {attention['backward_flops_per_s'] / figures['flops']:6.1%} of peak")
    print(f"host pull {pull['host_bytes_per_s'] / 1e9:6.1f} GB/s after {pull['host_fixed_ns'] / 1e3:.1f} us")
    print(f"peer pull {pull['peer_bytes_per_s'] / 1e9:6.1f} GB/s after {pull['peer_fixed_ns'] / 1e3:.1f} us")
    print(f"gradient add {profile['add']['bytes_per_s'] / figures['memory_bytes_per_s']:6.1%} of memory bandwidth")


def main() -> None:
    """Measure, print the table, write the file, print it as the last line."""
    parser = argparse.ArgumentParser(description="Measure the hardware profile of one GPU.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--cluster", default="h200", help="preset whose published ceilings the table compares with")
    parser.add_argument("--commit", help="commit of the source, where git cannot tell")
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU, to try the script itself")
    given = parser.parse_args()
    device = "cpu" if given.cpu_smoke else "cuda"
    sizes = Sizes.smoke() if given.cpu_smoke else Sizes.full()
    figures = published_figures(given.cluster)
    torch.manual_seed(0)
    bench = Bench.on(device, runs=given.runs)
    parts = measure_profile(sizes, bench, figures["nvlink_bytes_per_s"])
    profile = {**provenance(device, given.commit), **parts}
    print_table(profile, figures)
    write_profile(profile, given.output)
    print(json.dumps(profile))


if __name__ == "__main__":
    main()
