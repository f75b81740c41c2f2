"""How long simulating takes: a wide model on one EP group, and a job of 4,096 GPUs.

    python -m benchmarks.simulator
    python -m benchmarks.simulator --quick

What bounds it: planning. A simulation plans every group's window anew; replaying it is a small part, shown beside.

1. Qwen3-235B-A22B, 94 layers x 64 micro-steps x EP64, one update window: planned and replayed.
2. The same model on 64 EP groups of 64 ranks, 16 micro-steps each. Every group has loads of its own, dealt from one
   pool of 4,096 generated samples, and every group is planned and replayed: nothing is sampled or extrapolated.
3. The clock against the event-by-event reference, on a small window: the relative difference.

Both cores: planning uses two threads. Generating loads is not counted.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from benchmarks.planner_rows import cluster_of
from benchmarks.results import Limit, publish
from equipoise.core import LoadMatrix, ModelShape, RouteCounts
from equipoise.cost.clock import replay
from equipoise.loads.generator import generate_counts
from equipoise.planner import PlanOptions, plan
from equipoise.sim import StepSetting, simulate
from equipoise.sim.replay import plan_work
from tests.cost.events import play

RANKS, MICRO_STEPS, GROUP_MICRO_STEPS = 64, 64, 16
OPTIONS, SETTING = PlanOptions(workers=2, sends="rows"), StepSetting(sends="rows", timeline_layers=0)


class DealtGroups(Sequence[LoadMatrix]):
    """EP groups whose samples are dealt from one pool, each made when it is asked for."""

    def __init__(self, pool: RouteCounts, *, groups: int, micro_steps: int, ranks: int) -> None:
        self.pool_BLE = pool.count_BLE.astype(np.uint16)
        self.groups, self.shape = groups, (micro_steps, ranks)

    def __len__(self) -> int:
        return self.groups

    @overload
    def __getitem__(self, group: int) -> LoadMatrix: ...
    @overload
    def __getitem__(self, group: slice) -> Sequence[LoadMatrix]: ...
    def __getitem__(self, group: int | slice) -> LoadMatrix | Sequence[LoadMatrix]:
        if isinstance(group, slice):
            return [self[g] for g in range(*group.indices(len(self)))]
        if not 0 <= group < self.groups:
            raise IndexError(group)
        chosen = np.random.default_rng(group).integers(0, len(self.pool_BLE), self.shape)
        return LoadMatrix(self.pool_BLE[chosen].transpose(0, 2, 1, 3).astype(np.int64))


def main() -> int:
    """Time both sizes and compare the clock with its reference."""
    parser = argparse.ArgumentParser(description="How long simulating takes")
    parser.add_argument("--quick", action="store_true", help="a few layers and groups")
    quick = parser.parse_args().quick
    model = ModelShape.preset("qwen3-235b-a22b", **({"layers": 8} if quick else {}))
    pool = generate_counts(model, samples=512 if quick else 4096, mean_tokens=4096)
    groups = DealtGroups(pool, groups=4 if quick else 64, micro_steps=GROUP_MICRO_STEPS, ranks=RANKS)
    wide = DealtGroups(pool, groups=1, micro_steps=MICRO_STEPS, ranks=RANKS)
    warm_up(model)
    rows = [timed("one EP group", wide, model), timed("expert-data-parallel groups", groups, model)]
    limits = [
        Limit(name="94 layers x 64 micro-steps x EP64, seconds", value=rows[0]["seconds"], at_most=10),
        Limit(name="4,096 GPUs, 64 EP groups, seconds", value=rows[1]["seconds"], at_most=120),
        Limit(name="clock over event by event, difference", value=difference(model), at_most=0.001),
    ]
    return publish("simulator", rows, limits=limits, note="loads are generated, and not counted")


def warm_up(model: ModelShape) -> None:
    """Compile every kernel."""
    small = model.replace(layers=1)
    loads = LoadMatrix(generate_counts(small, samples=RANKS, mean_tokens=64).count_BLE[None].transpose(0, 2, 1, 3))
    simulate(loads, "equipoise", cluster=cluster_of(RANKS), model=small, setting=SETTING)


def timed(name: str, groups: Sequence[LoadMatrix], model: ModelShape) -> dict[str, Any]:
    """Simulate one update window of these groups."""
    start = time.perf_counter()
    found = simulate([groups], "equipoise", cluster=cluster_of(RANKS), model=model, setting=SETTING, options=OPTIONS)
    took = time.perf_counter() - start
    made = plan(groups[0], cluster=cluster_of(RANKS), model=model, options=OPTIONS)
    start = time.perf_counter()
    replay([plan_work(made)])
    window = found.policies[0].windows[0]
    return {
        "case": name,
        "layers": model.layers,
        "micro_steps": groups[0].num_micro_steps,
        "EP": RANKS,
        "groups": len(groups),
        "GPUs": RANKS * len(groups),
        "seconds": took,
        "replay_s_per_group": time.perf_counter() - start,
        "simulated_s": window.seconds.total,
        "slowest_over_mean_group": float(window.group_s_G.max() / window.group_s_G.mean()),
    }


def difference(model: ModelShape) -> float:
    """Relative difference of the clock and its reference on a small window."""
    small = model.replace(layers=4)
    counts = generate_counts(small, samples=32, mean_tokens=2048).count_BLE
    loads = LoadMatrix(counts.reshape(4, 8, 4, -1).transpose(0, 2, 1, 3))
    work = plan_work(plan(loads, cluster=cluster_of(8), model=small, options=OPTIONS))
    return abs(replay([work]).total / play([work]).total - 1)


if __name__ == "__main__":
    raise SystemExit(main())
