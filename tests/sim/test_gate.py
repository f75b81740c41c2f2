"""The gate and the clock agree: what the planner adopts is not slower than doing nothing when it is replayed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.planner import plan
from equipoise.sim import simulate

MODEL = ModelShape.preset("qwen3-30b-a3b", experts=32, layers=1)


def few_tokens(seed: int, micro_steps: int, layers: int, tokens: int, stage: str) -> LoadMatrix:
    """Hot experts of their own in every layer, so few rows that a pull is as long as a visit."""
    rng = np.random.default_rng(seed)
    load_MLRE = np.zeros((micro_steps, layers, 4, MODEL.experts), dtype=np.int64)
    for layer in range(layers):
        base_E = rng.dirichlet(np.full(MODEL.experts, 0.5))
        for m in range(micro_steps):
            share_E = base_E * rng.gamma(6, 1 / 6, MODEL.experts)
            load_MLRE[m, layer] = rng.multinomial(tokens * 8, share_E / share_E.sum(), size=4)
    return LoadMatrix(load_MLRE, stage=stage)


@pytest.mark.parametrize("stage", ["recompute", "update"])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 4), st.integers(1, 4), st.sampled_from([16, 64, 256, 1024]))
def test_a_small_window_is_not_slower_for_its_plan(stage, seed, micro_steps, layers, tokens):
    loads, model = few_tokens(seed, micro_steps, layers, tokens, stage), MODEL.replace(layers=layers)
    given = {"cluster": Cluster.preset("h100", ep=4, ranks_per_node=4), "model": model}
    ours, static = simulate(loads, ["equipoise", "static"], slots=1, **given).policies
    assert round(ours.seconds.experts * 1e9) <= round(static.seconds.experts * 1e9)


def test_a_window_of_one_visit_pulls_only_what_its_attention_hides():
    loads = few_tokens(3, 1, 1, 256, "recompute")
    given = {"cluster": Cluster.preset("h100", ep=4, ranks_per_node=4), "model": MODEL}
    made = plan(loads, slots=1, **given)
    assert made.seconds.total <= made.static_seconds
    clock = simulate(loads, made, **given).policies[0].seconds
    assert clock.pull == made.seconds.pull
