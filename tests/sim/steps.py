"""Small steps to simulate."""

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape, Stage

MODEL = ModelShape.preset("qwen3-30b-a3b", experts=16, layers=4, top_k=2)


def cluster_of(ranks: int = 8, *, ranks_per_node: int = 4) -> Cluster:
    """H200 nodes of four."""
    return Cluster.preset("h200", ranks_per_node=ranks_per_node, ep=ranks)


def skewed_loads(
    seed: int = 0, *, micro_steps: int = 4, ranks: int = 8, tokens: int = 4096, stage: Stage = "update"
) -> LoadMatrix:
    """Every micro-step and layer has hot experts of its own; all sources forward `tokens` tokens."""
    rng = np.random.default_rng(seed)
    shape = (micro_steps, MODEL.layers, MODEL.experts)
    share_MLE = rng.dirichlet(np.full(MODEL.experts, 0.7), size=shape[:2])
    share_MLE = 0.5 * share_MLE + 0.5 / MODEL.experts
    rows = [rng.multinomial(tokens * MODEL.top_k, share_MLE) for _ in range(ranks)]
    return LoadMatrix(np.stack(rows, axis=2), stage=stage)
