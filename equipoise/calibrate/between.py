"""Measurements between ranks, which all of them take at the same time: rows by mapped memory, and across nodes.

Ranks of a node read each other's rows where they are (`layer.mapped`). Every row has two prices, which are measured
one at a time, with tables of one side only:
    received    a place filled from its token, and its output copied to where the token's rank reads it
    sent        a token copied to where others read it, and the outputs of its rows combined
With all rows in the rank's own page that is the cost of the work itself. What the same rows take longer when they are
in the pages of peers is the cost of the link.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.calibrate.bench import SLEEP_CYCLES, Bench, Grid, Steps
from equipoise.calibrate.measures import random_experts, time_move
from equipoise.core.options import RowLimits, TransferOptions
from equipoise.layer.mapped import MappedTables, combine_mapped, fetch_rows
from equipoise.layer.ops import all_to_all
from equipoise.transfer.mapped_rows import MappedRows, Part, RowViews, typed
from equipoise.transfer.node import NodeMemory
from equipoise.transfer.waits import Mark

EMPTY_STEPS = 8
EXCHANGES = 4
"""Exchanges of an update: two forward, two backward."""


class StillRows(MappedRows):
    """Mapped rows whose ranks do not wait for each other, so that only the work itself is timed."""

    def begin(self, part: Part, *, layer: int) -> RowViews:
        """Return this rank's page."""
        return self.own

    def end(self, *, layer: int) -> None:
        """Return at once."""

    def empty_steps(self) -> None:
        """Pass steps without rows, in which ranks do wait for each other. Every rank must call this."""
        for _ in range(EMPTY_STEPS):
            super().end(layer=0)


def open_node(shape: tuple[int, int], *, slots: int, group: Any, node_R: list[int], bench: Bench) -> NodeMemory:
    """Share memory for `slots` experts of (hidden, width) per rank. Every rank of `group` must call this."""
    experts = random_experts(slots, shape, bench)
    options = TransferOptions(slots=0, grad_dtype="float32")
    return NodeMemory([experts], group=group, node_R=node_R, options=options)


class RowTimes(NamedTuple):
    """Nanoseconds of some rows."""

    received_forward: float
    received_update: float
    sent_forward: float
    sent_update: float


def measure_mapped(
    grid: Grid, nvlink_bytes_per_s: int, *, group: Any, node_R: list[int], bench: Bench, steps: Steps
) -> dict[str, dict[str, Any]]:
    """Time mapped rows and empty steps, and return the sections `rows` and `all_to_all`. Every rank must call this.

    Rates are bytes of rows per second, each row's bytes counted once. They are of sums over all sizes, of the median
    rank.
    """
    num_bytes, fixed = 0, list[float]()
    totals = {"own": [0.0] * len(RowTimes._fields), "peers": [0.0] * len(RowTimes._fields)}
    for hidden in grid.moved_widths:
        node = open_node((hidden, 16), slots=1, group=group, node_R=node_R, bench=bench)
        mapped, most = StillRows(node, top_k=grid.top_k), max(grid.moved_rows)
        mapped.reserve(RowLimits(tokens=-(-most // grid.top_k), sent=most, computed=most))
        fixed.append(time_empty_step(mapped, bench))
        peers = [rank for rank in node.peers if rank != node.rank]
        for rows in grid.moved_rows:
            num_bytes += rows * hidden * bench.dtype.itemsize
            work = MappedWork.random(mapped, rows, hidden, bench)
            for where, ranks in (("own", [node.rank]), ("peers", peers or [node.rank])):
                # All pages are filled, and all ranks busy with the same.
                Mark.now(bench.device).block()
                dist.barrier(group)
                times = work.time(ranks, bench)
                totals[where] = [total + ns for total, ns in zip(totals[where], times, strict=True)]
                steps.advance()
        mapped.close()
        node.close()
    own, remote = (RowTimes(*median_over(group, totals[where])) for where in ("own", "peers"))
    sizes = f"{' and '.join(map(str, grid.moved_rows))} rows, top-{grid.top_k}, on {group.size()} ranks at once"
    moved = {
        **{f"{key}_bytes_per_s": round(num_bytes / ns * 1e9) for key, ns in own._asdict().items()},
        "source": f"measured over {sizes}, by mapped memory: received rows fetched from tokens and outputs copied to "
        "the page that others read; tokens copied to it and outputs combined; all rows in the rank's own page; update "
        "counts forward and backward; a row's bytes are counted once",
    }
    extra_ns = remote.received_update + remote.sent_update - own.received_update - own.sent_update
    (fixed_ns,) = median_over(group, [median(fixed)])
    inside = inside_of(EXCHANGES * num_bytes, extra_ns, nvlink_bytes_per_s)
    exchange = {**inside, "fixed_ns": round(fixed_ns)}
    exchange["source"] = f"{inside['source']}, over {sizes}; fixed: a step of mapped memory without rows, measured"
    return {"rows": moved, "all_to_all": exchange}


def inside_of(num_bytes: int, extra_ns: float, nvlink_bytes_per_s: int) -> dict[str, Any]:
    """Return the share of the published link at which rows are read from peers, and its source.

    `extra_ns` is how much longer that took than reading them from the own page.
    """
    rate = num_bytes / extra_ns * 1e9 if extra_ns > 0 else float("inf")
    words = f"{extra_ns / 1e3:.1f} us longer for {num_bytes} bytes of rows in pages of peers than in the own page"
    if rate >= nvlink_bytes_per_s:
        return {
            "inside_share": 1.0,
            "source": f"inside: measured {words}, which is faster than the published link of {nvlink_bytes_per_s} "
            "bytes/s, so that the published rate is assumed",
        }
    return {"inside_share": max(round(rate / nvlink_bytes_per_s, 4), 1e-3), "source": f"inside: measured {words}"}


def measure_across(
    grid: Grid, network_bytes_per_s: int, *, group: Any, node_R: list[int], bench: Bench, steps: Steps
) -> dict[str, Any]:
    """Time the group's all-to-all of rows that all leave their node. Every rank of `group` must call this.

    Returns: share of the published network rate, nanoseconds without rows, and source
    """
    hidden, rank, most = grid.moved_widths[0], group.rank(), max(grid.moved_rows)
    away_R = [int(node != node_R[rank]) for node in node_R]

    def exchange(rows: int) -> Callable[[], None]:
        rows_R = [there * (rows // sum(away_R)) for there in away_R]
        rows_ND = bench.random(sum(rows_R), hidden)

        def send() -> None:
            all_to_all(rows_ND, rows_R, rows_R, group)

        return send

    empty = exchange(0)
    whole_ns, empty_ns = median_over(
        group, [median(time_together(work, empty, bench)) for work in (exchange(most), empty)]
    )
    steps.advance()
    num_bytes = most // sum(away_R) * sum(away_R) * hidden * bench.dtype.itemsize
    rate = num_bytes / max(whole_ns - empty_ns, 1.0) * 1e9
    return {
        "across_share": max(round(min(rate / network_bytes_per_s, 1.0), 4), 1e-3),
        "fixed_ns": round(empty_ns),
        "source": f"across: measured, an all-to-all of {most} rows of every rank to other nodes ran at {round(rate)} "
        f"bytes/s; the published rate is {network_bytes_per_s}",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedWork:
    """Some rows of each rank, in its page, and the tensors that are moved there."""

    mapped: MappedRows
    order_N: Tensor
    hidden_TD: Tensor
    gates_TK: Tensor
    rows: int

    @classmethod
    def random(cls, mapped: MappedRows, rows: int, hidden: int, bench: Bench) -> "MappedWork":
        """Draw rows, and fill this rank's page with them."""
        shape = rows // mapped.top_k, mapped.top_k
        work = cls(
            mapped=mapped,
            order_N=torch.randperm(shape[0] * shape[1], device=bench.device),
            hidden_TD=bench.random(shape[0], hidden).requires_grad_(),
            gates_TK=torch.rand(shape, device=bench.device).to(bench.dtype).requires_grad_(),
            rows=shape[0] * shape[1],
        )
        own = mapped.own
        own.order_N[: work.rows] = work.order_N
        own.tokens_TD.normal_()
        own.rows_PD.normal_()
        typed(own.gates_X, work.rows, bench.dtype)[:] = work.gates_TK.detach().reshape(-1)
        typed(own.dots_X, len(own.rows_PD), bench.dtype).zero_()
        return work

    def time(self, ranks: list[int], bench: Bench) -> RowTimes:
        """Time the received and the sent side of rows that are in the pages of `ranks`, in equal parts."""
        received, sent = self.tables(ranks)
        return RowTimes(*self._time_side(received, 0, bench), *self._time_side(sent, len(self.hidden_TD), bench))

    def tables(self, ranks: list[int]) -> tuple[MappedTables, MappedTables]:
        """Return tables of received rows alone, and of sent rows alone."""
        limits, number_N = self.mapped.limits, torch.arange(self.rows, device=self.order_N.device)
        rank_N = torch.tensor(ranks, device=number_N.device)[number_N % len(ranks)]
        place_TK = (rank_N * limits.computed + self.order_N).view(self.gates_TK.shape)
        # Sources in ascending order, as in a prepared dispatch.
        sent_P = (rank_N * limits.sent + number_N).sort().values
        strides = (limits.sent, limits.computed)
        received = MappedTables(self.order_N[:0], sent_P, place_TK[:0], *strides)
        return received, MappedTables(self.order_N, sent_P[:0], place_TK, *strides)

    def _time_side(self, tables: MappedTables, tokens: int, bench: Bench) -> tuple[float, float]:
        """Return nanoseconds forward and of an update."""
        hidden_TD, gates_TK = (t.detach()[:tokens].requires_grad_() for t in (self.hidden_TD, self.gates_TK))

        def move() -> Tensor:
            placed_PD = fetch_rows(hidden_TD, tables, self.mapped, layer=0)
            return combine_mapped(placed_PD, gates_TK, tables, self.mapped, layer=0)

        return time_move(move, (hidden_TD, gates_TK), bench)


def time_empty_step(mapped: StillRows, bench: Bench) -> float:
    """Return the nanoseconds of a step without rows. Every rank must call this, with as many runs."""
    return median(time_together(mapped.empty_steps, mapped.empty_steps, bench)) / EMPTY_STEPS


def time_together(work: Callable[[], None], align: Callable[[], None], bench: Bench) -> list[float]:
    """Time work in which ranks wait for each other, `bench.runs` times after one more, in nanoseconds.

    `align` also waits for all ranks; it is called before each run, so that all of them start together.
    """
    times_ns = []
    for _ in range(bench.runs + 1):
        if not bench.is_gpu:
            align()
            begin = time.perf_counter_ns()
            work()
            times_ns.append(float(time.perf_counter_ns() - begin))
            continue
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The host runs ahead of all devices meanwhile.
        torch.cuda._sleep(4 * SLEEP_CYCLES)
        align()
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times_ns.append(start.elapsed_time(stop) * 1e6)
    return times_ns[1:]


def median_over(group: Any, values: Sequence[float]) -> list[float]:
    """Return the median over all ranks of each value. Every rank of `group` must call this."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, list(values), group=group)
    return [median(column) for column in zip(*every, strict=True)]
