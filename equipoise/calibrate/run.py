"""`calibrate`: measure one device's profile. The story of the room.

Steps:
1. Find the device; without a GPU say what to use instead.
2. Expert tables, one per shape: what the planner's decisions rest on.
3. Rows on the move, attention, pulls by path, pulls beside compute, gradient adds, window edges.
4. Say who measured it: device, driver, torch, commit, date. Nothing may stay unknown.

Knows the order and the file's form. Does not know how a part is measured.

Invariants (asserted by the tests):
1. What it returns is a profile that `Profile` reads, with a source for every section.
2. Progress is told once per step and ends at the total.
"""

import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from equipoise.calibrate.attention import measure_attention
from equipoise.calibrate.bench import Bench
from equipoise.calibrate.copies import measure_add, measure_beside, measure_exchange, measure_pull
from equipoise.calibrate.experts import measure_table
from equipoise.calibrate.grid import Grid
from equipoise.calibrate.moves import measure_moves
from equipoise.calibrate.progress import Steps
from equipoise.core import TopologyError
from equipoise.cost.profile import FORMAT, profile_names

Tell = Callable[[int, int], None]
RUNS = 9
MEASURING = ("equipoise/calibrate", "equipoise/runtime")
"""Rooms whose state decides what is measured."""
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
    """Measure every part; the content of a profile file.

    Args:
        grid: the sizes to visit
        nvlink_bytes_per_s: published rate of the link to a peer, which caps what a copy inside the device suggests
        runs: timed runs of each case
        device: "cuda", or "cpu" to try the measuring itself
        commit: of the source, where git cannot tell
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
    """Steps that `calibrate` tells of."""
    widths = len({grid.shapes[0][0], grid.shapes[-1][0]})
    moves, attention = widths * len(grid.moved_rows), len(grid.attention) * len(grid.tokens)
    fixed = PULL_STEPS + BESIDE_STEPS + ADD_STEPS + EXCHANGE_STEPS
    return len(grid.shapes) * grid.cells + moves + attention + fixed


def assumed_all_to_all() -> dict[str, Any]:
    """The part that one device cannot measure."""
    return {
        "inside_share": 0.8,
        "across_share": 0.85,
        "fixed_ns": 25000,
        "source": "assumed: shares of the published NVLink and NIC rates that all-to-all kernels reach, and a fixed "
        "cost per exchange; not measurable on one GPU",
    }


def require_gpu() -> None:
    """Raise, naming the way out, where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise TopologyError(
            f"torch {torch.__version__} sees no CUDA device, and a profile is measured on the GPU it is for; run this "
            f"on such a machine, or use a profile that comes with the package ({', '.join(profile_names())})"
        )


def provenance(device: str, commit: str | None = None) -> dict[str, str]:
    """Say which device, software and source made the figures."""
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
    """The commit of a checkout, "-dirty" behind it where measuring or measured code differs; else the version."""
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
