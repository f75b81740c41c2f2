"""A trainer logs what imbalance costs: from verl's own DataProto, from slime's samples, the figures of the analysis."""

import numpy as np
import pytest
import torch

from equipoise.core import Cluster, ModelShape, RoutesError
from equipoise.imbalance import imbalance_metrics
from equipoise.loads import count_step, generate_routes, step_schedules
from equipoise.sim import analyze_loads
from tests.megatron.names import names_only

MODEL = ModelShape.preset("olmoe", layers=2)
CLUSTER = Cluster.preset("h100", ep=4)
BUDGET = 128


@pytest.fixture(scope="module")
def routes():
    return generate_routes(MODEL, samples=8, mean_tokens=40, seed=3)


def wanted(routes):
    schedules = step_schedules(
        np.array([sample.num_tokens for sample in routes]), ranks=4, token_budget=BUDGET, recompute=False
    )
    return analyze_loads(count_step(routes, schedules), model=MODEL, cluster=CLUSTER, slots=None, sends="tokens")


def test_slimes_samples_give_the_figures_of_the_analysis(routes):
    # Samples as dicts stand in for slime's `Sample`, which has the same fields.
    samples = [
        {"tokens": list(range(s.num_tokens)), "rollout_routed_experts": s.ids_TLK, "index": i}
        for i, s in enumerate(routes)
    ]
    found, analysis = imbalance_metrics(samples, model=MODEL, cluster=CLUSTER, token_budget=BUDGET), wanted(routes)
    assert found["equipoise/lost_s"] == pytest.approx(analysis.seconds.lost_seconds)
    assert found["equipoise/skew_mean"] == pytest.approx(analysis.stages["update"].skew.dispatched.mean)
    assert found["equipoise/lost_pct"] > 0 and found["equipoise/coverage"] == 1.0
    assert all(isinstance(value, float) for value in found.values())


def test_verls_own_batch_gives_the_figures_of_the_analysis(routes):
    with names_only():
        protocol = pytest.importorskip("verl.protocol", reason="verl is not installed", exc_type=ImportError)
    longest = max(s.num_tokens for s in routes)
    ids = np.zeros((len(routes), longest, MODEL.layers, MODEL.top_k), dtype=np.int16)
    mask = np.zeros((len(routes), longest), dtype=np.int64)
    for i, sample in enumerate(routes):
        ids[i, : len(sample.ids_TLK)] = sample.ids_TLK
        mask[i, : sample.num_tokens] = 1
    tensors = {"routed_experts": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    batch = protocol.DataProto.from_dict(tensors=tensors)
    found = imbalance_metrics(batch, model=MODEL, cluster=CLUSTER, token_budget=BUDGET)
    assert found["equipoise/lost_s"] == pytest.approx(wanted(routes).seconds.lost_seconds)


def test_a_batch_without_routes_is_refused_by_name():
    with pytest.raises(RoutesError, match=r"routed_experts|format"):
        imbalance_metrics({"input_ids": np.ones((2, 3))}, model=MODEL, cluster=CLUSTER, token_budget=BUDGET)
