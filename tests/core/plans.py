"""Small plans made by hand, for tests of what a plan promises.

Knows core. Does not know the planner.
"""

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape, Plan
from equipoise.core.plan import Bytes, Itinerary, ReplicaTable, Seconds

RANKS, EXPERTS, MICRO_STEPS, LAYERS = 4, 8, 2, 2
CLUSTER = Cluster.preset("h200", node_R=(0, 0, 1, 1))
MODEL = ModelShape.preset("qwen3-30b-a3b", experts=EXPERTS, layers=LAYERS, top_k=2)


def table_of(*replicas):
    """A replica table from (micro_step, layer, expert, rank, rows)."""
    entries = sorted((m * LAYERS + layer, expert, rank, rows) for m, layer, expert, rank, rows in replicas)
    columns = np.array(entries, dtype=np.int64).reshape(-1, 4)
    counts = np.bincount(columns[:, 0], minlength=MICRO_STEPS * LAYERS)
    return ReplicaTable(
        start_ML=np.concatenate([[0], np.cumsum(counts)]),
        expert_P=columns[:, 1],
        rank_P=columns[:, 2],
        rows_P=columns[:, 3],
        path_P2=np.zeros((len(columns), 2), dtype=np.int64),
    )


def itinerary_of(*visits, depth=1):
    """An itinerary without pulls from (micro_step, phase, layer)."""
    columns = np.array(visits, dtype=np.int64).reshape(-1, 3)
    zeros, never = np.zeros(len(columns), dtype=np.int64), np.zeros(len(columns), dtype=np.bool_)
    return Itinerary(
        depth=depth,
        micro_step_V=columns[:, 0],
        phase_V=columns[:, 1],
        layer_V=columns[:, 2],
        pulls_V=never,
        buffer_V=zeros,
        ready_from_V=zeros,
        resident_V=never,
    )


def parts(**changed):
    """Every argument of a right plan: homes at their owners, one replica of expert 0 on rank 1."""
    owner_E = np.arange(EXPERTS) // 2
    load = np.arange(MICRO_STEPS * LAYERS * RANKS * EXPERTS).reshape(MICRO_STEPS, LAYERS, RANKS, EXPERTS) % 11
    fixed = {
        "loads": LoadMatrix(load),
        "cluster": CLUSTER,
        "model": MODEL,
        "policy": "equipoise",
        "objective": "seconds",
        "slots": 1,
        "home_LE": np.stack([owner_E, owner_E]),
        "home_slot_LE": np.tile(np.arange(EXPERTS) % 2, (LAYERS, 1)),
        "replica_table": table_of((0, 1, 0, 1, 3)),
        "ns_ML": np.full((MICRO_STEPS, LAYERS), 90),
        "closed_ns_ML": np.full((MICRO_STEPS, LAYERS), 100),
        "seconds": Seconds(compute=1e-6, pull=0.25e-6),
        "bytes": Bytes(peer=10, all_to_all_across=5),
        "static_seconds": 2e-6,
    }
    return {**fixed, **changed}


def plan_of(**changed):
    """A plan from `parts`."""
    return Plan(**parts(**changed))
