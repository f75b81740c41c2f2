"""Loads for the planner's tests: random and awkward, small enough to check by hand or by brute force."""

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape


def skewed_loads(seed, *, micro_steps=3, layers=2, ranks=8, experts=32, rows=4096, stage="update"):
    """Loads with hot neighbours whose heat moves a little from micro-step to micro-step."""
    rng = np.random.default_rng(seed)
    share_LE = rng.dirichlet(np.full(experts, 0.6), size=layers)
    share_MLE = share_LE * np.exp(0.4 * rng.standard_normal((micro_steps, layers, experts)))
    share_MLE /= share_MLE.sum(axis=-1, keepdims=True)
    per_source = rows // ranks
    load = [[rng.multinomial(per_source, share_E, size=ranks) for share_E in share_LE] for share_LE in share_MLE]
    return LoadMatrix(np.array(load), stage=stage)


def cluster_of(ranks, *, per_node=8):
    """H200 nodes for `ranks` ranks."""
    return Cluster.preset("h200", nodes=-(-ranks // per_node), ranks_per_node=per_node, ep=ranks)


def model_of(loads, *, top_k=8):
    """A model shape that fits the loads."""
    return ModelShape.preset("qwen3-30b-a3b", experts=loads.num_experts, layers=loads.num_layers, top_k=top_k)


def awkward_loads(*, ranks=8, experts=32):
    """(name, loads) of windows that break careless code."""
    shape = (2, 1, ranks, experts)
    one = np.zeros(shape, dtype=np.int64)
    one[..., 5] = 100
    lonely = np.zeros(shape, dtype=np.int64)
    lonely[0, 0, 3, 7] = 1
    huge = np.random.default_rng(1).integers(0, 2**31 // ranks, size=shape)
    silent = np.random.default_rng(2).integers(0, 50, size=shape)
    silent[:, :, 2] = 0
    silent[..., :4] = 0
    return [
        ("no row at all", LoadMatrix(np.zeros(shape, dtype=np.int64))),
        ("one expert takes everything", LoadMatrix(one)),
        ("a single row", LoadMatrix(lonely)),
        ("loads near 2^31", LoadMatrix(huge)),
        ("a rank without tokens, a rank without load", LoadMatrix(silent)),
    ]
