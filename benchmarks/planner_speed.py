"""Speed of the planner on one core: micro plans against HiGHS, whole windows, scaling, warm start.

Loads are generated. Compiling is not counted: every size is planned once before it is timed. Times are the
fastest of a few runs, because other work on the machine only ever adds.

Method:
1. Micro plan: `fill` (replicas and split of one micro-step and layer) over all entries of a window, called from Python,
   against one HiGHS linear programme for the split over the same replicas (`baselines.split_optimum`), same entries.
2. Windows run in a process of their own, which reads its loads from a file, so that its peak memory is that of loads,
   planning and plan together.
3. Scaling: M, L, EP and E one after another. Linear growth is held as time per (micro-step, layer), large over small.
4. Warm start: 20 steps of a drifting workload, each planned cold and from the plan of the step before.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_rows import ROWS, Row, cluster_of, generated_loads, row_of, timed
from benchmarks.results import Limit
from equipoise.core import LoadMatrix, ModelShape
from equipoise.core.plan import Plan
from equipoise.planner import PlanOptions, plan
from equipoise.planner.baselines import split_optimum
from equipoise.planner.replicas import fill, homes_by_rank
from equipoise.sim.windows import joined

MODEL = "qwen3-30b-a3b"
TOKENS = 1024
"""Tokens of each source rank in each micro-step."""
WINDOWS = ((32, 48, 128, 32, 0.5), (64, 94, 128, 64, 3.0))
"""(M, L, E, EP, limit in seconds)."""
MEMORY_LIMIT_MB = 1000
SIZES = ((8, 64), (16, 64), (32, 128), (64, 256), (128, 512), (256, 512))
"""(EP, E) of the scaling table."""


def measure(*, quick: bool) -> tuple[list[Row], list[Limit]]:
    """All speed figures: rows of the table, and limits."""
    rows: list[Row] = []
    limits: list[Limit] = []
    for part in (micro_plans, windows, crossing, scaling, growth, warm_start):
        for made in part(quick):
            if isinstance(made, Limit):
                limits.append(made)
            else:
                rows.append(made)
    return rows, limits


def loads_of(micro_steps: int, layers: int, experts: int, ranks: int, **figures: Any) -> tuple[ModelShape, LoadMatrix]:
    """A generated window and its model."""
    model = ModelShape.preset(MODEL, experts=experts, layers=layers)
    return model, generated_loads(model, micro_steps=micro_steps, ranks=ranks, mean_tokens=TOKENS, **figures)


def fastest(loads: LoadMatrix, *, runs: int = 3, **arguments: Any) -> tuple[Plan, float]:
    """Plan once to compile, then several times; the plan and the least seconds."""
    plan(loads.micro_steps(0, 1), **{"options": ROWS, **arguments})
    made, least = timed(loads, **arguments)
    for _ in range(runs - 1):
        made, seconds = timed(loads, **arguments)
        least = min(least, seconds)
    return made, least


def micro_plans(quick: bool) -> Iterator[Row | Limit]:
    """Time of one micro plan against one linear programme of the same entry."""
    for ranks, experts in ((8, 64), (32, 128)):
        model, loads = loads_of(8, 2, experts, ranks)
        made, plan_s = fastest(loads, cluster=cluster_of(ranks), model=model, slots=2, objective="skew")
        ours, theirs = _time_fill(made), _time_programme(made)
        yield row_of(
            f"micro plan {ours * 1e6:.1f} us, HiGHS {theirs * 1e3:.2f} ms", "generated", made, plan_s, tokens=0
        )
        yield Limit(name=f"micro plan over one HiGHS LP, EP{ranks}", value=ours / theirs, at_most=0.01)


def _entries(made: Plan) -> list[tuple[int, int]]:
    return list(np.ndindex(made.loads.num_micro_steps, made.loads.num_layers))


def _time_fill(made: Plan) -> float:
    """Seconds of one `fill`, mean over all entries."""
    ranks, node_R, total_MLE = made.cluster.ep, made.cluster.node_array_R, made.loads.total_MLE()
    expert_RS = np.full((ranks, made.slots), -1)
    rows_RS = np.zeros_like(expert_RS)
    cases = []
    for m, layer in _entries(made):
        home_E = np.array(made.home_LE[layer])
        cases.append((np.array(total_MLE[m, layer]), home_E, homes_by_rank(home_E, ranks)))
    best = np.inf
    for _ in range(5):
        start = time.perf_counter()
        for load_E, home_E, homes_RH in cases:
            fill(load_E, home_E, homes_RH, node_R[None], 1, 0, expert_RS, rows_RS)
        best = min(best, time.perf_counter() - start)
    return float(best) / len(cases)


def _time_programme(made: Plan) -> float:
    """Seconds of one HiGHS linear programme, mean over all entries."""
    total_MLE = made.loads.total_MLE()
    start = time.perf_counter()
    for m, layer in _entries(made):
        split_optimum(total_MLE[m, layer], made.home_LE[layer], made.replicas(m, layer), ranks=made.cluster.ep)
    return (time.perf_counter() - start) / len(_entries(made))


def windows(quick: bool) -> Iterator[Row | Limit]:
    """Whole windows: seconds and peak memory of a process that does nothing else."""
    for micro_steps, layers, experts, ranks, limit_s in WINDOWS[: 1 if quick else 2]:
        model, loads = loads_of(micro_steps, layers, experts, ranks)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "loads.npz"
            loads.save(path)
            del loads
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(_plan_file, (path, model, ranks))
        yield row
        name = f"window M={micro_steps}, L={layers}, E={experts}, EP{ranks}"
        yield Limit(name=f"{name}: seconds", value=row["plan_ms"] / 1e3, at_most=limit_s)
        yield Limit(name=f"{name}: peak memory in MB", value=row["peak_MB"], at_most=MEMORY_LIMIT_MB)


def crossing(quick: bool) -> Iterator[Row | Limit]:
    """Recompute windows whose replicas may cross nodes: every set of homes is priced twice."""
    for ranks in (16,) if quick else (16, 32):
        model, loads = loads_of(32, 48, 128, ranks)
        options = PlanOptions(cross_node=True, sends="tokens")
        given = {"cluster": cluster_of(ranks), "model": model, "slots": 2, "options": options}
        made, plan_s = fastest(joined([loads], "recompute"), runs=2, **given)
        yield row_of("window, across nodes", "generated", made, plan_s, tokens=TOKENS * ranks)


def _plan_file(path: Path, model: ModelShape, ranks: int) -> Row:
    """Plan the loads of a file, in a process of its own."""
    loads = LoadMatrix.load(path)
    made, plan_s = fastest(loads, cluster=cluster_of(ranks), model=model, slots=2)
    return row_of("window", "generated", made, plan_s, tokens=TOKENS * ranks, peak_mb=_peak_mb())


def _peak_mb() -> int:
    """Peak memory of this process; getrusage would count what its parent had before the start."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


def scaling(quick: bool) -> Iterator[Row | Limit]:
    """Time over EP and experts."""
    for ranks, experts in SIZES[: 3 if quick else len(SIZES)]:
        model, loads = loads_of(8, 2, experts, ranks)
        made, plan_s = fastest(loads, runs=2, cluster=cluster_of(ranks), model=model, slots=2)
        yield row_of("scaling EP and E", "generated", made, plan_s, tokens=TOKENS * ranks)


def growth(quick: bool) -> Iterator[Row | Limit]:
    """Time over M and L, and whether it grows faster than linearly."""
    for name, sizes in (("M", ((16, 2), (128, 2))), ("L", ((16, 2), (16, 16)))):
        per_entry = []
        for micro_steps, layers in sizes:
            model, loads = loads_of(micro_steps, layers, 128, 16)
            made, plan_s = fastest(loads, cluster=cluster_of(16), model=model, slots=2)
            per_entry.append(plan_s / (micro_steps * layers))
            yield row_of(f"scaling {name}", "generated", made, plan_s, tokens=TOKENS * 16)
        limit_name = f"time per entry, {name} eight times larger over smaller"
        # A tenth more for the clock.
        yield Limit(name=limit_name, value=per_entry[1] / per_entry[0], at_most=1.1)


def warm_start(quick: bool) -> Iterator[Row | Limit]:
    """Time and saved seconds of warm plans against cold ones, over drifting steps and after a change of domain."""
    steps = 5 if quick else 20
    cold_s = warm_s = cold_saved = warm_saved = 0.0
    previous: Plan | None = None
    for step in range(steps):
        model, loads = loads_of(16, 4, 128, 32, step=step)
        given = {"cluster": cluster_of(32), "model": model, "slots": 2}
        cold, seconds = fastest(loads, runs=2, **given)
        if previous is not None:
            warm, took = fastest(loads, runs=2, warm=previous, **given)
            cold_s, warm_s = cold_s + seconds, warm_s + took
            cold_saved, warm_saved = cold_saved + cold.saved_seconds, warm_saved + warm.saved_seconds
            yield row_of(f"warm, step {step}", "generated", warm, took, tokens=TOKENS * 32)
        previous = cold if previous is None else warm
    yield Limit(name=f"warm over cold planning time, {steps} steps", value=warm_s / cold_s, at_most=0.5)
    yield Limit(name=f"warm over cold saved seconds, {steps} steps", value=warm_saved / cold_saved, at_least=0.99)
    _, other = loads_of(16, 4, 128, 32, seed=1)
    cold, _ = timed(other, **given)
    moved, took = timed(other, warm=previous, **given)
    yield row_of("warm, other domain", "generated", moved, took, tokens=TOKENS * 32)
    ratio = moved.saved_seconds / cold.saved_seconds
    yield Limit(name="warm over cold saved seconds, abrupt change of domain", value=ratio, at_least=0.99)
