"""`calibrate`: measure one device's profile; and compare a profile with the device again.

1. Find the device; without a GPU, name the profiles that come with the package.
2. Measure expert tables, one per shape: the planner's decisions depend on them most.
3. Measure rows moved inside the device, attention, pulls by path, pulls beside compute, gradient adds, window edges.
4. Record device, driver, torch, commit and date. None of them may be unknown.

`calibrate_ranks`: measure the profile of ranks that work side by side, as they do in training.
1. All ranks take every measurement of one device at the same time: they share links, memory and power.
2. They measure what needs other ranks: rows by mapped memory and the steps that order them (`between`), experts that
   move, and what planning costs (`moving`).
3. Every figure of the profile is the median over ranks; how far ranks differ is a section of its own.
"""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

from equipoise.calibrate.bench import Bench, Grid, Steps
from equipoise.calibrate.between import measure_across, measure_mapped
from equipoise.calibrate.measures import (
    measure_add,
    measure_attention,
    measure_beside,
    measure_exchange,
    measure_moves,
    measure_pull,
    measure_table,
)
from equipoise.calibrate.moving import MOVING_STEPS, measure_moving
from equipoise.core import TopologyError
from equipoise.cost.profile import FORMAT, SECTIONS, profile_names
from equipoise.launch import RankOptions, run_ranks

JUDGED = ("bytes_per_s", "flops_per_s")
"""Ends of the names of figures that are judged, beside the tables: fixed times and slowdowns are small and scatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One figure, as filed and as measured again."""

    name: str
    filed: float
    measured: float
    is_judged: bool

    @property
    def share(self) -> float:
        """Relative difference of the new figure to the filed one; 0.1 is ten percent more."""
        return self.measured / self.filed - 1 if self.filed else 0.0

    def holds(self, limit: float) -> bool:
        """Whether the figure is within the limit, or is not judged."""
        return not self.is_judged or abs(self.share) <= limit


def sample_of(profile: Mapping[str, Any], grid: Grid) -> Grid:
    """Return a small grid whose cells are all in the profile's tables: one number of slots, two numbers of rows."""
    tables = profile["compute"]
    if profile["kind"] == "derived":
        raise TopologyError(
            f"the profile of {profile['device']} is {profile['kind']}; only a measured one can be measured again"
        )
    slots, rows = (_common(tables, key) for key in ("slots", "rows"))
    shapes = tuple((table["hidden"], table["expert_width"]) for table in tables)
    chosen = sorted({rows[len(rows) // 2], rows[-2 if len(rows) > 1 else -1]})
    return replace(grid, shapes=shapes, slots=(slots[len(slots) // 2],), rows=tuple(chosen))


def _common(tables: list[Mapping[str, Any]], key: str) -> list[int]:
    """Return the entries of an axis that all tables have, ascending."""
    shared = set(tables[0][key]).intersection(*(table[key] for table in tables))
    if not shared:
        raise TopologyError(f"the profile's tables have no common {key}; measure it again with equipoise calibrate")
    return sorted(shared)


def compare(filed: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[Deviation]:
    """Compare every figure of `fresh` with the same of `filed`."""
    by_shape = {(table["hidden"], table["expert_width"]): table for table in filed["compute"]}
    made: list[Deviation] = []
    for table in fresh["compute"]:
        made += _compare_tables(by_shape[table["hidden"], table["expert_width"]], table)
    for section in SECTIONS:
        for key, value in fresh[section].items():
            # Assumed figures are not measured again.
            if key != "source" and section != "all_to_all":
                name, is_judged = f"{section}.{key}", key.endswith(JUDGED)
                made.append(Deviation(name=name, filed=filed[section][key], measured=value, is_judged=is_judged))
    return made


def nearer(first: Sequence[Deviation], second: Sequence[Deviation]) -> list[Deviation]:
    """Return the nearer of each figure that was compared twice: single cells scatter as clocks change."""
    return [min(pair, key=lambda one: abs(one.share)) for pair in zip(first, second, strict=True)]


def _compare_tables(filed: Mapping[str, Any], fresh: Mapping[str, Any]) -> Iterator[Deviation]:
    for s, slots in enumerate(fresh["slots"]):
        for x, rows in enumerate(fresh["rows"]):
            at = filed["slots"].index(slots), filed["rows"].index(rows)
            for key in ("forward_ns", "update_ns"):
                name = f"{fresh['hidden']} x {fresh['expert_width']}, {slots} slots, {rows} rows, {key}"
                old, new = filed[key][at[0]][at[1]], fresh[key][s][x]
                yield Deviation(name=name, filed=old, measured=new, is_judged=True)


Tell = Callable[[int, int], None]
RUNS = 9
MEASURING = ("equipoise/calibrate", "equipoise/layer", "equipoise/transfer")
"""Folders of the measuring and the measured code."""
PULL_STEPS, BESIDE_STEPS, EXCHANGE_STEPS, ADD_STEPS = 2, 2, 2, 1


def calibrate(
    grid: Grid,
    *,
    nvlink_bytes_per_s: int,
    runs: int = RUNS,
    device: str = "cuda",
    commit: str | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Measure every part and return the content of a profile file.

    Args:
        grid: the sizes to visit
        nvlink_bytes_per_s: published rate of the link to a peer, which caps what a copy inside the device suggests
        runs: timed runs of each case
        device: "cuda", or "cpu" to try the measuring itself
        commit: of the source, where git does not know it
        tell: called with (done, total) after each step
    """
    if device == "cuda":
        require_gpu()
    torch.manual_seed(0)
    bench = Bench.on(device, runs=runs)
    steps = Steps(count_steps(grid), tell)
    compute = [measure_table(shape, grid, bench=bench, steps=steps) for shape in grid.shapes]
    rows = measure_moves(grid, bench=bench, steps=steps)
    attention = measure_attention(grid, bench=bench, steps=steps)
    pull = measure_pull(grid, nvlink_bytes_per_s, bench=bench, steps=steps)
    return {
        **provenance(device, commit),
        "compute": compute,
        "rows": rows,
        "attention": attention,
        "pull": pull,
        "beside": measure_beside(grid, pull["peer_bytes_per_s"], bench=bench, steps=steps),
        "add": measure_add(grid, bench=bench, steps=steps),
        "exchange": measure_exchange(grid, bench=bench, steps=steps),
        "all_to_all": assumed_all_to_all(),
    }


def count_steps(grid: Grid) -> int:
    """Return the number of steps that `calibrate` reports."""
    moves, attention = len(grid.moved_widths) * len(grid.moved_rows), len(grid.attention) * len(grid.tokens)
    fixed = PULL_STEPS + BESIDE_STEPS + ADD_STEPS + EXCHANGE_STEPS
    return len(grid.shapes) * grid.cells + moves + attention + fixed


def assumed_all_to_all() -> dict[str, Any]:
    """Return the part that one device cannot measure."""
    return {
        "inside_share": 0.8,
        "across_share": 0.85,
        "fixed_ns": 25000,
        "source": "assumed: shares of the published NVLink and NIC rates that all-to-all kernels reach, and a fixed "
        "cost per exchange; not measurable on one GPU",
    }


def require_gpu() -> None:
    """Raise where torch finds no GPU."""
    if not torch.cuda.is_available():
        raise TopologyError(
            f"torch {torch.__version__} sees no CUDA device, and a profile is measured on the GPU it is for; run this "
            f"on such a machine, or use a profile that comes with the package ({', '.join(profile_names())})"
        )


def provenance(device: str, commit: str | None = None) -> dict[str, str]:
    """Return the device, software and source that made the figures."""
    is_gpu = device == "cuda"
    return {
        "format": FORMAT,
        "device": torch.cuda.get_device_name() if is_gpu else "CPU, a trial of the measuring itself",
        "kind": "measured" if is_gpu else "trial",
        "made_by": "equipoise calibrate",
        "commit": commit or read_commit(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if is_gpu else "none",
        "torch": str(torch.__version__),
        "date": datetime.now(UTC).date().isoformat(),
    }


def read_commit() -> str:
    """Return the commit of a checkout, with "-dirty" where measuring or measured code differs; else the version."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return f"equipoise {version('equipoise')}, installed"
    try:
        commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
        is_dirty = _output("git", "-C", str(root), "status", "--porcelain", "--", *MEASURING)
    except (OSError, subprocess.CalledProcessError) as error:
        raise TopologyError(
            f"git cannot tell the commit of {root} ({error}), and a profile names it; give it with --commit (commit=)"
        ) from error
    return f"{commit}-dirty" if is_dirty else commit


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


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

    Args, beside those of `calibrate`:
        ranks: all ranks; those of a node share its devices
        nodes: nodes that the ranks form, with as many ranks each, one after another
        network_bytes_per_s: published rate of a rank's network, needed for several nodes
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
