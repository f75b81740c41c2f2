"""Measurements of one device: the layer's own expert block, attention, rows moved inside the device, and transfers.

Before an expert table is timed, the block is compared with float64: outputs and every gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.calibrate.bench import SLEEP_CYCLES, ZIPF, AttentionShape, Bench, Grid, Steps, Timing, cut_rows, measure
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Groups
from equipoise.layer.expert_block import BlockOptions, Products, expert_block
from equipoise.layer.ops import combine_rows, reorder_rows, spread_rows
from equipoise.transfer.engine import NoTransfers
from equipoise.transfer.node import ExpertWeights

ADDED_EXPERTS = 8
"""Whose gradients are added at once where adds are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The projections of one layer."""

    shape: AttentionShape
    qkv_w: Tensor
    out_w: Tensor

    @classmethod
    def random(cls, shape: AttentionShape, bench: Bench) -> "Attention":
        """Draw the projections."""
        query = shape.heads * shape.width
        both = query + 2 * shape.kv_heads * shape.width
        qkv_w = bench.random(both, shape.hidden, scale=shape.hidden**-0.5).requires_grad_()
        return cls(
            shape=shape, qkv_w=qkv_w, out_w=bench.random(shape.hidden, query, scale=query**-0.5).requires_grad_()
        )

    def forward(self, x_TD: Tensor, *, sequence: int) -> Tensor:
        """Attend inside sequences of `sequence` tokens, which must divide the tokens."""
        heads, kv_heads, width = self.shape.heads, self.shape.kv_heads, self.shape.width
        parts = F.linear(x_TD, self.qkv_w).split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        q, k, v = (part.view(-1, sequence, part.shape[1] // width, width).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).reshape(len(x_TD), heads * width), self.out_w)

    def flops(self, tokens: int, *, sequence: int) -> int:
        """Count the forward operations."""
        pairs = tokens * (sequence + 1) // 2
        return 2 * tokens * (self.qkv_w.numel() + self.out_w.numel()) + 4 * pairs * self.shape.heads * self.shape.width


def measure_attention(grid: Grid, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Time all shapes and sequence lengths; the rate is the operations of all over the time of all.

    Scores are causal, so that a pair of tokens is counted once; backward is counted as twice the forward operations.
    """
    flops, forward_ns, backward_ns = 0, 0.0, 0.0
    for shape in grid.attention:
        attention = Attention.random(shape, bench)
        for tokens in grid.tokens:
            flops += attention.flops(tokens, sequence=tokens)
            forward, backward = time_attention(attention, tokens, bench)
            forward_ns, backward_ns = forward_ns + forward, backward_ns + backward
            steps.advance()
    heads = " and ".join(
        f"{one.heads} heads and {one.kv_heads} key-value heads of {one.width}" for one in grid.attention
    )
    return {
        "forward_flops_per_s": round(flops / forward_ns * 1e9),
        "backward_flops_per_s": round(2 * flops / backward_ns * 1e9),
        "source": f"measured: projections and causal scaled_dot_product_attention, sequences of "
        f"{' and '.join(map(str, grid.tokens))} tokens, {heads}; norms and rotary embedding left out",
    }


def time_attention(attention: Attention, tokens: int, bench: Bench) -> tuple[float, float]:
    """Return nanoseconds of one sequence, forward and backward."""
    x_TD = bench.random(tokens, attention.shape.hidden).requires_grad_()
    grad_TD = bench.random(tokens, attention.shape.hidden)
    leaves = (x_TD, attention.qkv_w, attention.out_w)

    forward = partial(attention.forward, x_TD, sequence=tokens)
    out_TD = forward()
    backward = measure(lambda: torch.autograd.grad(out_TD, leaves, grad_TD, retain_graph=True), bench)
    return measure(torch.no_grad()(forward), bench).median_ns, backward.median_ns


def measure_moves(grid: Grid, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Time received rows ordered by slot and back, and tokens spread to rows and combined.

    Rates are bytes of rows per second, each row's bytes counted once, so that N rows take N x row bytes / rate.
    """
    num_bytes, times = 0, [0.0] * 4
    for hidden in grid.moved_widths:
        for rows in grid.moved_rows:
            num_bytes += rows * hidden * bench.dtype.itemsize
            cases = [*time_received(rows, hidden, bench), *time_sent(rows // grid.top_k, hidden, grid.top_k, bench)]
            times = [total + ns for total, ns in zip(times, cases, strict=True)]
            steps.advance()
    keys = ("received_forward", "received_update", "sent_forward", "sent_update")
    return {
        **{f"{key}_bytes_per_s": round(num_bytes / ns * 1e9) for key, ns in zip(keys, times, strict=True)},
        "source": f"measured over {' and '.join(map(str, grid.moved_rows))} rows: received rows gathered slot by slot "
        f"before the products and back after them; tokens spread to rows and rows combined, top-{grid.top_k}; update "
        "counts forward and backward; a row's bytes are counted once",
    }


def time_received(rows: int, hidden: int, bench: Bench) -> tuple[float, float]:
    """Return nanoseconds of ordering received rows by slot and back, forward and update."""
    there_P = torch.randperm(rows, device=bench.device)
    back_N = torch.argsort(there_P)
    rows_ND = bench.random(rows, hidden).requires_grad_()

    def move() -> Tensor:
        placed_ND = reorder_rows(rows_ND, there_P=there_P, back_N=back_N)
        return reorder_rows(placed_ND, there_P=back_N, back_N=there_P)

    return time_move(move, (rows_ND,), bench)


def time_sent(tokens: int, hidden: int, top_k: int, bench: Bench) -> tuple[float, float]:
    """Return nanoseconds of spreading tokens to rows and combining rows to tokens, forward and update."""
    index_TK = torch.randperm(tokens * top_k, device=bench.device).view(tokens, top_k)
    token_N = torch.argsort(index_TK.reshape(-1)) // top_k
    hidden_TD = bench.random(tokens, hidden).requires_grad_()
    gates_TK = torch.rand((tokens, top_k), device=bench.device).to(bench.dtype).requires_grad_()

    def move() -> Tensor:
        rows_ND = spread_rows(hidden_TD, token_N=token_N, index_TK=index_TK)
        return combine_rows(rows_ND, gates_TK, index_TK=index_TK)

    return time_move(move, (hidden_TD, gates_TK), bench)


def time_move(move: Callable[[], Tensor], leaves: tuple[Tensor, ...], bench: Bench) -> tuple[float, float]:
    """Return nanoseconds of a move of rows, forward and update."""
    grad = torch.randn_like(move())

    def update() -> tuple[Tensor, ...]:
        return torch.autograd.grad(move(), leaves, grad)

    return measure(torch.no_grad()(move), bench).median_ns, measure(update, bench).median_ns


ERROR_LIMIT = 2e-2
"""Largest relative error to float64; bf16 operands give 1e-3 to 1e-2."""
EVEN_ROWS = 65536
"""At this many rows even groups are measured too."""
VISIT = Visit(0, "forward", 0)
KEYS = ("forward_ns", "update_ns", "even_forward_ns", "even_update_ns")
"""The tables of a shape."""


class EmptyBank(NoTransfers):
    """The transfers of a rank that holds no replica, outside any window."""

    def __init__(self, like: ExpertWeights) -> None:
        super().__init__([like])

    def wait_for(self, visit: Visit) -> None:
        """Wait for nothing: home weights are there."""


def random_experts(slots: int, shape: tuple[int, int], bench: Bench) -> ExpertWeights:
    """Draw `slots` experts of (hidden, width) that can have gradients."""
    hidden, width = shape
    gate_up_SFD = bench.random(slots, 2 * width, hidden, scale=hidden**-0.5).requires_grad_()
    return ExpertWeights(gate_up_SFD, bench.random(slots, hidden, width, scale=width**-0.5).requires_grad_())


def groups_of(ends_S: Tensor, rows: int) -> Groups:
    """Return the groups of a rank without replicas."""
    return Groups(home_end_S=ends_S, replica_end_S=ends_S[:0], num_home_rows=rows, num_replica_rows=0, num_replicas=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The work of one cell of a table: rows in groups, through the experts of their slots."""

    rows_ND: Tensor
    grad_ND: Tensor
    groups: Groups
    experts: ExpertWeights

    @classmethod
    def random(cls, rows: int, experts: ExpertWeights, *, zipf: float, bench: Bench) -> "Cell":
        """Draw the rows of a cell."""
        slots, hidden = experts.num_slots, experts.gate_up_SFD.shape[2]
        ends_S = torch.from_numpy(cut_rows(rows, slots, zipf=zipf)).to(bench.device)
        return cls(
            rows_ND=bench.random(rows, hidden).requires_grad_(),
            grad_ND=bench.random(rows, hidden),
            groups=groups_of(ends_S, rows),
            experts=experts,
        )

    def forward(self, *, products: Products = "grouped") -> Tensor:
        """Run the layer's expert block."""
        options, transfers = BlockOptions(products=products), EmptyBank(self.experts)
        return expert_block(
            self.rows_ND, self.experts, groups=self.groups, transfers=transfers, visit=VISIT, options=options
        )

    def update(self, *, products: Products = "grouped") -> tuple[Tensor, ...]:
        """Run forward and backward; gradients are made, not accumulated."""
        leaves = (self.rows_ND, *self.experts.tensors())
        return torch.autograd.grad(self.forward(products=products), leaves, self.grad_ND)

    def to_float64(self) -> "Cell":
        """Return the same numbers in float64."""
        exact = ExpertWeights(*(t.detach().double().requires_grad_() for t in self.experts.tensors()))
        rows_ND = self.rows_ND.detach().double().requires_grad_()
        return Cell(rows_ND=rows_ND, grad_ND=self.grad_ND.double(), groups=self.groups, experts=exact)

    def time(self, bench: Bench) -> tuple[Timing, Timing]:
        """Time forward, and forward + backward."""
        return measure(torch.no_grad()(self.forward), bench, warm=2), measure(self.update, bench, warm=2)


def check_block(experts: ExpertWeights, bench: Bench) -> None:
    """Raise unless the timed block computes the right numbers on uneven groups."""
    slots = experts.num_slots
    cell = Cell.random(8 * slots + 3, experts, zipf=ZIPF, bench=bench)
    exact = cell.to_float64()
    with torch.no_grad():
        pairs = [(cell.forward(), exact.forward(products="loop"))]
    pairs += list(zip(cell.update(), exact.update(products="loop"), strict=True))
    errors = [float((got.double() - wanted).norm() / wanted.norm()) for got, wanted in pairs]
    # NaN fails the comparison.
    if not max(errors) < ERROR_LIMIT:
        raise RuntimeError(f"expert block of {slots} slots: relative errors {errors} to float64, limit {ERROR_LIMIT}")


def measure_table(shape: tuple[int, int], grid: Grid, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Fill the tables of one expert shape."""
    tables: dict[str, list[list[int | None]]] = {key: [] for key in KEYS}
    spread = 0.0
    for slots in grid.slots:
        experts = random_experts(slots, shape, bench)
        check_block(experts, bench)
        for key in KEYS:
            tables[key].append([])
        for rows in grid.rows:
            forward, update = Cell.random(rows, experts, zipf=ZIPF, bench=bench).time(bench)
            even: tuple[float | None, float | None] = (None, None)
            if not bench.is_gpu or (rows == EVEN_ROWS and slots > 1):
                pair = Cell.random(rows, experts, zipf=0.0, bench=bench).time(bench)
                even = (pair[0].median_ns, pair[1].median_ns)
            for key, ns in zip(KEYS, (forward.median_ns, update.median_ns, *even), strict=True):
                tables[key][-1].append(None if ns is None else round(ns))
            spread = max(spread, forward.spread, update.spread)
            steps.advance()
    return {
        "hidden": shape[0],
        "expert_width": shape[1],
        "slots": list(grid.slots),
        "rows": list(grid.rows),
        **tables,
        "spread": round(spread, 4),
        "source": f"measured, medians of {bench.runs} runs, events, L2 flushed, launches hidden; the runtime's expert "
        f"block, {str(bench.dtype).removeprefix('torch.')}, one grouped call per product; groups uneven by Zipf's law "
        f"with exponent {ZIPF:g}, even ones in the tables named so; update writes weight gradients and does not "
        "accumulate them",
    }


SMALL_COPY_BYTES = 4096
COPY_RUNS = 5
"""Copies over PCIe vary more than kernels: 49 to 56 GB/s were seen with 21 runs on one H200."""
BESIDE_ROWS = 32768
BESIDE_SLOTS = 16
BESIDE_RUNS = 5
"""A slowdown is a small difference of two times, so it takes this many times as many runs."""
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
    """Time the expert block alone and beside copies on a side stream.

    A copy inside the device is several times as fast as a link. So the block runs beside as many of a peer's copies as
    the link would bring while it runs, and beside copies from the host from start to end.
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
    """Return the thousandths by which the second of each pair takes longer: the median over pairs, at least 0."""
    return max(0, round(1000 * median(beside / alone - 1 for alone, beside in pairs_ns)))


def _time_beside(work: Callable[[], object], copy: Callable[[], None], copies: int, bench: Bench) -> list[Pair]:
    """Time `work` without and with `copies` copies on a side stream, alternating so that clock drifts affect both."""
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
    """Time adding the gradients of a few experts to those of earlier micro-steps, in the kernels' dtype, as both are.

    On a rank with a small share of a GPU, arithmetic and not memory bounds an add, so that its dtype matters. The
    gradient of a single expert fits into a GPU's cache, where an add is faster than those of a whole layer.
    """
    numel = ADDED_EXPERTS * grid.expert_params
    home, returned = (bench.random(numel) for _ in range(2))
    timing = measure(lambda: home.add_(returned, alpha=1e-3), bench)
    steps.advance()
    return {
        "bytes_per_s": round(3 * home.nbytes / timing.median_ns * 1e9),
        "source": f"measured: in-place add of {numel} elements in the kernels' dtype, two reads and one write counted, "
        "L2 flushed",
    }


def measure_exchange(grid: Grid, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Time the exchange of a displaced expert: out of its slot to staging, and another into the slot."""
    numel, rates = grid.expert_params, []
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
    """Return fixed nanoseconds, those of a small copy, and bytes per second beyond them of copies of `size` bytes."""
    small = _time_copies(source, target, min(SMALL_COPY_BYTES, size // 2), bench)
    large = _time_copies(source, target, size, bench)
    return small, size / max(large - small, 1.0) * 1e9


def _time_copies(source: Tensor, target: Tensor, size: int, bench: Bench) -> float:
    bench, copy = replace(bench, runs=COPY_RUNS * bench.runs), _copier(source, target, size)
    if not bench.is_gpu:
        return measure(copy, bench).median_ns
    # Host pages are slower when they are read for the first time.
    target.copy_(source, non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        return measure(copy, bench).median_ns


def _copier(source: Tensor, target: Tensor, size: int) -> Callable[[], None]:
    """Return a function that copies `size` bytes, at each call the next ones."""
    starts = iter(range(10**9))

    def copy() -> None:
        start = next(starts) * size % (len(source) - size + 1)
        target[start : start + size].copy_(source[start : start + size], non_blocking=True)

    return copy


def _buffers(grid: Grid, size: int, bench: Bench) -> tuple[Tensor, Tensor, Tensor]:
    """Return host memory (pinned for a GPU), the same bytes on the device, and the target of copies."""
    host = torch.randint(0, 255, (grid.copies * size,), dtype=torch.uint8)
    host = host.pin_memory() if bench.is_gpu else host
    peer = host.to(bench.device, copy=True)
    return host, peer, torch.empty_like(peer)


def _expert_bytes(grid: Grid, bench: Bench) -> int:
    return grid.expert_params * bench.dtype.itemsize
