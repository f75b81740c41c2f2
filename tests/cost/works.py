"""Random and awkward work for the clock: what `cost.clock.works_of` makes of plans, without a plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from equipoise.core import Cluster, ModelShape, Stage
from equipoise.core.options import Order, PlanOptions
from equipoise.core.plan import Itinerary
from equipoise.cost import CostModel
from equipoise.cost.work import Transfers, Work
from equipoise.planner.assemble import build_itinerary

TINY = ModelShape.preset("qwen3-30b-a3b", experts=8, layers=2, top_k=2)


def random_work(
    rng: np.random.Generator,
    *,
    micro_steps: int = 3,
    layers: int = 2,
    ranks: int = 4,
    stage: Stage = "update",
    most_ns: int = 100_000,
    replicas: int = 3,
    slow_permille: tuple[int, int] = (200, 10),
    depth: int = 1,
    pipeline: tuple[int, int] = (0, 1),
    **changes: Any,
) -> Work:
    """Work of random length, with up to `replicas` pulls and returns per entry.

    `slow_permille` is what a pull from a peer, or from the host, adds to compute; `pipeline` the stage, and how many
    stages there are.
    """
    shape = (micro_steps, layers, ranks)
    update = stage == "update"
    tables = CostModel.of(Cluster.preset("h200", ep=ranks), TINY, stage=stage).tables(1)
    tables = tables._replace(peer_slow_permille=slow_permille[0], host_slow_permille=slow_permille[1])
    values: dict[str, Any] = {
        "stage": stage,
        "forward_MLR": rng.integers(0, most_ns, shape),
        "backward_MLR": rng.integers(0, most_ns, shape) * update,
        "attention_MLR": rng.integers(0, most_ns, shape),
        "attention_backward_MLR": rng.integers(0, most_ns, shape) * update,
        "exchange_ML": rng.integers(0, most_ns // 2, shape[:2]),
        "is_across_ML": rng.random(shape[:2]) < 0.5,
        "planning_ML": np.zeros(shape[:2], dtype=np.int64),
        "push_ML": np.zeros(shape[:2], dtype=np.int64),
        "send_M": rng.integers(0, most_ns // 4, micro_steps),
        "transfers": random_transfers(rng, entries=micro_steps * layers, ranks=ranks, most=replicas),
        "tables": tables,
        "edge_ns_2L": rng.integers(0, most_ns, (2, layers)) * rng.choice([0, 1, 1, 4], (2, layers)),
        "edge_slow_2L": rng.integers(0, most_ns // 3, (2, layers)) * rng.choice([0, 1], (2, layers)),
        "repeats_forward": False,
        "rows_MLR": np.ones(shape, dtype=np.int64),
        "hidden_ML2": np.zeros((*shape[:2], 2), dtype=np.int64),
    }
    values |= changes
    values.setdefault("tail_ML2", np.stack([values["exchange_ML"]] * 2, axis=2))
    needs_ML = np.diff(values["transfers"].start_ML).reshape(shape[:2]) > 0
    return Work(**values, itinerary=itinerary_of(stage, needs_ML, depth, pipeline))


def itinerary_of(stage: Stage, needs_ML: np.ndarray, depth: int, pipeline: tuple[int, int]) -> Itinerary:
    """One forward, one backward where there are several pipeline stages."""
    order: Order = "1f1b" if pipeline[1] > 1 else "plain"
    options = PlanOptions(depth=depth, order=order, pipeline_stage=pipeline[0], pipeline_stages=pipeline[1])
    return build_itinerary(stage, needs_ML, options)


def in_pipeline(works: Sequence[Work], *, depth: int = 1) -> list[Work]:
    """The same works as stages of one pipeline, first to last, with another depth."""
    found = []
    for p, work in enumerate(works):
        needs_ML = np.diff(work.transfers.start_ML).reshape(work.shape[:2]) > 0
        found.append(replace(work, itinerary=itinerary_of(work.stage, needs_ML, depth, (p, len(works)))))
    return found


def random_transfers(rng: np.random.Generator, *, entries: int, ranks: int, most: int) -> Transfers:
    """Up to `most` replicas per entry, each on another rank than its home, sorted by rank as plans have them."""
    rank_P, home_P, start_ML = [], [], [0]
    for _ in range(entries):
        count = int(rng.integers(0, most + 1)) if ranks > 1 else 0
        for rank in sorted(rng.integers(0, ranks, count).tolist()):
            rank_P.append(rank)
            home_P.append((rank + int(rng.integers(1, ranks))) % ranks)
        start_ML.append(len(rank_P))
    return Transfers(
        start_ML=np.array(start_ML),
        rank_P=np.array(rank_P, dtype=np.int64),
        home_P=np.array(home_P, dtype=np.int64),
        path_P2=rng.integers(0, 2, (len(rank_P), 2)),
    )
