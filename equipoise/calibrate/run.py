"""`calibrate`: measure one device's profile; and compare a profile with the device again.

1. Find the device; without a GPU, name the profiles that come with the package.
2. Measure expert tables, one per shape: the planner's decisions depend on them most.
3. Measure rows moved inside the device, attention, pulls by path, pulls beside compute, gradient adds, window edges.
4. Record device, driver, torch, commit and date. None of them may be unknown.
"""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from equipoise.calibrate.bench import Bench, Grid, Steps
from equipoise.calibrate.measures import (
    measure_add,
    measure_attention,
    measure_beside,
    measure_exchange,
    measure_moves,
    measure_pull,
    measure_table,
)
from equipoise.core import TopologyError
from equipoise.cost.profile import FORMAT, SECTIONS, profile_names

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
