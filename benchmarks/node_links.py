"""The clock's rule for links that an exchange and pulls share, against the node.

The rule (`equipoise/cost/clock.py`): an all-to-all has the links to itself, and transfers pause meanwhile. So an
exchange takes as long beside pulls as alone, and both together take as long as one after the other. Here every rank
fetches rows from its peers' pages in one stream and pulls experts from them in another, as many as take equally long;
both are timed alone and together, with all ranks at once.
"""

from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from equipoise.calibrate.bench import SLEEP_CYCLES, Bench, Grid
from equipoise.calibrate.between import MappedWork, StillRows, median_over, open_node
from equipoise.core.options import RowLimits
from equipoise.layer.mapped import fetch_rows
from equipoise.transfer.node import allocate_experts
from equipoise.transfer.pulls import MappedPath, Need

RUNS = 9
FETCHES = 4
"""Exchanges in a row."""


def compare_links(group: Any, device: str) -> list[dict[str, Any]]:
    """Time exchange and pulls alone and together; every rank must call this. Returns rows of a table."""
    bench, grid = Bench.on(device, runs=RUNS), Grid.full() if device == "cuda" else Grid.smoke()
    (hidden, width), rows = grid.expert_shape, min(grid.moved_rows)
    node_R = [0] * group.size()
    node = open_node((hidden, width), slots=2, group=group, node_R=node_R, bench=bench)
    mapped = StillRows(node, top_k=grid.top_k)
    mapped.reserve(RowLimits(tokens=-(-rows // grid.top_k), sent=rows, computed=rows))
    work = MappedWork.random(mapped, rows, hidden, bench)
    peers = [rank for rank in node.peers if rank != node.rank]
    received, _ = work.tables(peers)
    buffer = allocate_experts(node.layout, 1, node.layout.dtype, device=node.device)
    path, needs = MappedPath(node), [{0: Need(0, 2 * peer, peer, 0, "peer")} for peer in peers]

    def fetch() -> None:
        with torch.no_grad():
            for _ in range(FETCHES):
                fetch_rows(work.hidden_TD[:0], received, mapped, layer=0)

    def pull(times: int) -> None:
        for at in range(times):
            path.pull(needs[at % len(needs)], buffer)

    # As many pulls as take about as long as the fetches.
    alone_ms, one_ms = _time(fetch, None, group, bench)[0], _time(None, lambda: pull(4), group, bench)[1] / 4
    (share,) = median_over(group, [alone_ms / max(one_ms, 1e-6)])
    times = max(1, min(round(share), 256))
    exchange_ms = _time(fetch, None, group, bench)[0]
    pulls_ms = _time(None, lambda: pull(times), group, bench)[1]
    beside_ms, both_ms = _time(fetch, lambda: pull(times), group, bench)
    exchange_ms, pulls_ms, beside_ms, both_ms = median_over(group, [exchange_ms, pulls_ms, beside_ms, both_ms])
    mapped.close()
    node.close()
    given = {"exchange_ms": round(exchange_ms, 4), "pulls_ms": round(pulls_ms, 4), "pulls": times}
    whole_ms = max(beside_ms, both_ms)
    return [
        {"what": "exchange beside pulls", "ms": beside_ms, **given, "over_rule": beside_ms / exchange_ms},
        {"what": "both together", "ms": whole_ms, **given, "over_rule": whole_ms / (exchange_ms + pulls_ms)},
    ]


def _time(work: Any, beside: Any, group: Any, bench: Bench) -> tuple[float, float]:
    """Median milliseconds until `work` is done in the current stream, and `beside` in another; 0 where not given."""
    found: list[tuple[float, float]] = []
    side = torch.cuda.Stream() if bench.is_gpu else None
    for _ in range(bench.runs + 1):
        dist.barrier(group)
        if side is None:
            found.append(_time_on_host(work, beside))
            continue
        start, done, other = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        # Both streams wait for the sleep, so that everything is enqueued when they start together.
        torch.cuda._sleep(8 * SLEEP_CYCLES)
        side.wait_stream(torch.cuda.current_stream())
        start.record()
        if beside is not None:
            with torch.cuda.stream(side):
                beside()
                other.record()
        if work is not None:
            work()
        done.record()
        torch.cuda.synchronize()
        found.append((start.elapsed_time(done), start.elapsed_time(other) if beside is not None else 0.0))
    first, second = zip(*found[1:], strict=True)
    return float(median(first)), float(median(second))


def _time_on_host(work: Any, beside: Any) -> tuple[float, float]:
    """One after the other, as a CPU's thread runs them: what the rule says."""
    import time

    begin, ends = time.perf_counter(), [0.0, 0.0]
    for at, one in enumerate((work, beside)):
        if one is not None:
            one()
            ends[at] = (time.perf_counter() - begin) * 1e3
    return ends[0], ends[1]
