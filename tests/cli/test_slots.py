"""How many replica slots a rank can hold."""

import numpy as np
import pytest

from equipoise.cli.options import check_slots, most_slots
from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, ModelShape
from equipoise.core.options import replica_bytes

QWEN = ModelShape.preset("qwen3-30b-a3b")
DEEPSEEK = ModelShape.preset("deepseek-v3")
CASES = [(QWEN, "h100", 8, 128 - 16), (QWEN, "h200", 128, 127), (DEEPSEEK, "a100", 16, 227), (QWEN, "h100", 1, 0)]


@pytest.mark.parametrize(("model", "name", "ep", "most"), CASES)
def test_the_most_passes_and_one_more_is_refused_with_what_binds(model, name, ep, most):
    cluster = Cluster.preset(name, ep=ep)
    check_slots([0, most], cluster=cluster, model=model)
    fix = "One slot is the usual choice" if most else "Give --slots 0"
    with pytest.raises(
        InfeasiblePlanError, match=rf"--slots is {most + 1}; a rank can hold at most {most}: .*\. {fix}"
    ):
        check_slots([0, most + 1], cluster=cluster, model=model)


def test_memory_binds_where_buffers_of_replicas_fill_the_device():
    cluster = Cluster.preset("a100", ep=16)
    most, words = most_slots(cluster, DEEPSEEK)
    # Two buffers, so that a pull can run one visit ahead.
    each = 2 * replica_bytes(DEEPSEEK, "update")
    assert most * each <= cluster.memory_bytes < (most + 1) * each
    assert words == "a100 has 80 GB, and a slot takes 0.35 GB"


def test_fewer_than_none_are_refused():
    with pytest.raises(InfeasiblePlanError, match="--slots is -1; it must be 0"):
        check_slots(-1, cluster=Cluster.preset("h100", ep=8), model=QWEN)


@pytest.mark.parametrize("verb", ["plan", "analyze", "simulate"])
def test_every_verb_refuses_what_a_rank_cannot_hold(equipoise, tmp_path, verb):
    model = ModelShape.preset("olmoe")
    LoadMatrix(np.ones((1, model.layers, 8, 64), dtype=np.int64)).save(tmp_path / "loads.npz")
    ep = [] if verb == "plan" else ["--ep", "8"]
    refused = equipoise(verb, tmp_path / "loads.npz", "--model", "olmoe", *ep, "--slots", "500")
    assert (refused.code, refused.out) == (2, "")
    assert (
        "--slots is 500; a rank can hold at most 56: the model has 64 experts, of which it owns 8 at EP 8"
        in refused.err
    )


def test_a_sweep_is_refused_before_anything_is_simulated(equipoise):
    refused = equipoise("simulate", "--demo", "--sweep", "ep=8,128", "slots=1,120")
    assert (refused.code, refused.out) == (2, "")
    assert "--slots is 120; a rank can hold at most 112" in refused.err
