"""`calibrate_ranks`: measure the profile of ranks that work side by side, as they do in training.

1. All ranks take every measurement of one device at the same time: they share links, memory and power.
2. They measure what needs other ranks: rows by mapped memory and the steps that order them (`between`), experts that
   move, and what planning costs (`moving`).
3. Every figure of the profile is the median over ranks; how far ranks differ is a section of its own.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

import torch.distributed as dist

from equipoise.calibrate.bench import Bench, Grid, Steps
from equipoise.calibrate.between import measure_across, measure_mapped
from equipoise.calibrate.moving import MOVING_STEPS, measure_moving
from equipoise.calibrate.run import RUNS, Tell, assumed_all_to_all, calibrate, count_steps
from equipoise.core import TopologyError
from equipoise.launch import RankOptions, run_ranks


def calibrate_ranks(
    grid: Grid,
    *,
    ranks: int,
    nodes: int = 1,
    nvlink_bytes_per_s: int,
    network_bytes_per_s: int | None = None,
    runs: int = RUNS,
    device: Literal["cpu", "cuda"] = "cuda",
    commit: str | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Start ranks, or join those of torchrun, measure every part on all of them, and return a profile file's content.

    Args:
        grid: the sizes to visit
        ranks: all ranks; those of a node share its devices
        nodes: nodes that the ranks form, with as many ranks each, one after another
        nvlink_bytes_per_s: published rate of the link to a peer, which caps what mapped memory of one device suggests
        network_bytes_per_s: published rate of a rank's network, needed for several nodes
        runs: timed runs of each case
        device: "cuda", or "cpu" to try the measuring itself
        commit: of the source, where git does not know it
        tell: called with (done, total) after each step
    """
    if ranks < 2 or nodes < 1 or ranks % nodes:
        raise TopologyError(
            f"{ranks} ranks on {nodes} nodes cannot be measured together; give at least 2 ranks, a multiple of the "
            "nodes, or leave --ranks out to measure one device"
        )
    on_rank = partial(
        measure_rank,
        grid=grid,
        nodes=nodes,
        nvlink_bytes_per_s=nvlink_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s or nvlink_bytes_per_s,
        runs=runs,
        device=device,
        commit=commit,
    )
    # Ranks of one node exchange nothing on devices but by mapped memory.
    options = RankOptions(device=device, backend="nccl" if device == "cuda" and nodes > 1 else "gloo")
    content: dict[str, Any] = run_ranks(on_rank, ranks, options=options, show=tell or (lambda done, total: None))[0]
    return content


def measure_rank(
    group: Any,
    *,
    grid: Grid,
    nodes: int,
    nvlink_bytes_per_s: int,
    network_bytes_per_s: int,
    runs: int,
    device: Literal["cpu", "cuda"],
    commit: str | None,
    show: Tell,
) -> dict[str, Any]:
    """Measure every part as one of the ranks. Every rank of `group` must call this; all return the same."""
    node_R = [rank * nodes // group.size() for rank in range(group.size())]
    alone = count_steps(grid)
    total = alone + 2 * len(grid.moved_widths) * len(grid.moved_rows) + MOVING_STEPS + (nodes > 1)

    def tell(done: int, _: int) -> None:
        # Ranks begin every case together, although some repeat one that scatters.
        dist.barrier(group)
        show(done, total)

    content = calibrate(grid, nvlink_bytes_per_s=nvlink_bytes_per_s, runs=runs, device=device, commit=commit, tell=tell)
    bench, steps = Bench.on(device, runs=runs), Steps(total, tell, done=alone)
    given: dict[str, Any] = {"group": group, "node_R": node_R, "bench": bench, "steps": steps}
    found = measure_mapped(grid, nvlink_bytes_per_s, **given)
    moving = measure_moving(grid, nvlink_bytes_per_s, **given)
    exchange, assumed = found["all_to_all"], assumed_all_to_all()
    across = {"across_share": assumed["across_share"], "fixed_ns": 0, "source": "across: assumed, as without ranks"}
    if nodes > 1:
        across = measure_across(grid, network_bytes_per_s, **given)
    exchange["fixed_ns"] = max(exchange["fixed_ns"], across["fixed_ns"])
    exchange |= {"across_share": across["across_share"], "source": f"{exchange['source']}; {across['source']}"}
    host, peer = content["pull"], moving.pop("pull")
    peer["source"] = f"{host['source'].split('; peer:')[0]}; {peer['source']}"
    content |= {"rows": found["rows"], "all_to_all": exchange, "pull": host | peer, **moving}
    every: list[dict[str, Any]] = [{} for _ in node_R]
    dist.all_gather_object(every, content, group=group)
    return {**medians_of(every), "ranks": spread_of(every, nodes=nodes)}


def medians_of(contents: Sequence[Any]) -> Any:
    """Return the median of every number in contents of the same form, and everything else as the first one has it."""
    first = contents[0]
    if isinstance(first, dict):
        return {key: medians_of([one[key] for one in contents]) for key in first}
    if isinstance(first, list):
        return [medians_of(column) for column in zip(*contents, strict=True)]
    if isinstance(first, int | float):
        middle = median(contents)
        return round(middle) if isinstance(first, int) else round(middle, 4)
    return first


def spread_of(contents: Sequence[dict[str, Any]], *, nodes: int) -> dict[str, Any]:
    """Return how far ranks differ, as a section of the profile."""
    spreads = [(max(cells) - min(cells)) / median(cells) for cells in zip(*map(_cells, contents), strict=True)]
    return {
        "count": len(contents),
        "nodes": nodes,
        "spread": round(max(spreads), 4),
        "median_spread": round(median(spreads), 4),
        "source": "measured on all ranks at the same time; figures are medians over ranks, spreads are (largest - "
        "smallest) / median over ranks of a cell of the expert tables: the largest of all cells, and their median",
    }


def _cells(content: dict[str, Any]) -> Iterator[float]:
    for table in content["compute"]:
        for key in ("forward_ns", "update_ns"):
            for line in table[key]:
                yield from line
