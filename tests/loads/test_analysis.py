"""The analysis of a step: stages apart, widths that divide, figures from the one definition of skew."""

import json

import numpy as np
import pytest

from equipoise.core import Cluster, LoadMatrix, LoadsError, ModelShape
from equipoise.loads import generate_counts
from equipoise.loads.analysis import analyze_loads
from equipoise.loads.lost import estimate_lost
from equipoise.loads.matrix import count_step
from equipoise.loads.packing import step_schedules
from equipoise.loads.skew import rank_loads, skew

MODEL = ModelShape.preset("qwen3-30b-a3b", layers=3)
CLUSTER = Cluster.preset("h100", ep=8)


@pytest.fixture(scope="module")
def windows() -> tuple[LoadMatrix, ...]:
    counts = generate_counts(MODEL, samples=32, mean_tokens=200)
    return count_step(counts, step_schedules(counts.tokens_B, ranks=8, mini_batches=2, samples_per_micro_step=1))


def test_stages_stand_apart(windows):
    analysis = analyze_loads(windows, model=MODEL, cluster=CLUSTER)
    assert list(analysis.stages) == ["recompute", "update"]
    assert analysis.stages["recompute"].skew == skew(windows[0])
    assert analysis.stages["update"].skew == skew(windows[1:])


def test_lost_seconds_are_those_of_all_windows(windows):
    analysis = analyze_loads(windows, model=MODEL, cluster=CLUSTER)
    wanted = [
        estimate_lost(rank_loads(w), stage=w.stage, row_flops=MODEL.row_flops, flops=CLUSTER.flops) for w in windows
    ]
    assert analysis.lost.lost_seconds == pytest.approx(sum(x.lost_seconds for x in wanted))
    assert analysis.lost.lost_seconds > 0


def test_widths_that_do_not_divide_the_experts_are_left_out():
    model = MODEL.replace(experts=48)
    loads = LoadMatrix(np.ones((1, 3, 8, 48), dtype=np.int64))
    analysis = analyze_loads([loads], model=model, cluster=CLUSTER)
    assert [ep for ep, _ in analysis.stages["update"].widths] == [8, 16]


def test_a_wider_group_is_never_less_uneven(windows):
    widths = analyze_loads(windows, model=MODEL, cluster=CLUSTER).stages["update"].widths
    means = [distribution.mean for _, distribution in widths]
    assert means == sorted(means)
    assert [ep for ep, _ in widths] == [8, 16, 32, 64]


def test_coverage_and_padding_are_shares_of_what_is_forwarded():
    load = np.full((1, 3, 8, 128), 2, dtype=np.int64)
    loads = LoadMatrix(load, padding_MLRE=load // 2, coverage_MLR=np.full((1, 3, 8), 0.75))
    analysis = analyze_loads([loads], model=MODEL, cluster=CLUSTER)
    assert (analysis.coverage, analysis.padding) == (0.75, 0.5)
    assert analysis.rows == load.sum()


def test_idle_ranks_do_not_raise_coverage():
    load = np.zeros((1, 3, 8, 128), dtype=np.int64)
    load[:, :, 0] = 1
    coverage = np.ones((1, 3, 8))
    coverage[:, :, 0] = 0.5
    analysis = analyze_loads([LoadMatrix(load, coverage_MLR=coverage)], model=MODEL, cluster=CLUSTER)
    assert analysis.coverage == 0.5


def test_the_document_is_json_and_says_what_is_not_measured(windows):
    document = analyze_loads(windows, model=MODEL, cluster=CLUSTER, memory_gib=80).to_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["format"] == "equipoise-analysis-1"
    assert document["lost"]["measured"] is False
    assert document["memory"]["fits"] is True
    assert len(document["stages"]["update"]["skew"]["layers"]) == 3


def test_loads_of_another_model_and_no_loads_are_refused(windows):
    with pytest.raises(LoadsError, match="loads are of 128 experts, model 'mixtral-8x7b' has 8"):
        analyze_loads(windows, model=ModelShape.preset("mixtral-8x7b"), cluster=CLUSTER)
    with pytest.raises(LoadsError, match="no windows"):
        analyze_loads([], model=MODEL, cluster=CLUSTER)
