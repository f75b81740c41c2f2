"""The analysis of a step: stages apart, groups apart, widths that divide, seconds of the cost model and the planner."""

import json

import numpy as np
import pytest

from equipoise.core import Cluster, LoadMatrix, LoadsError, ModelShape
from equipoise.loads import generate_counts
from equipoise.loads.matrix import count_step
from equipoise.loads.packing import step_schedules
from equipoise.loads.skew import skew
from equipoise.planner import plan_step
from equipoise.sim.analysis import analyze_loads

MODEL = ModelShape.preset("qwen3-30b-a3b", layers=3)
CLUSTER = Cluster.preset("h100", ep=8)


@pytest.fixture(scope="module")
def windows() -> tuple[LoadMatrix, ...]:
    counts = generate_counts(MODEL, samples=32, mean_tokens=2000)
    return count_step(counts, step_schedules(counts.tokens_B, ranks=8, mini_batches=2, samples_per_micro_step=1))


@pytest.fixture(scope="module")
def analysis(windows):
    return analyze_loads(windows, model=MODEL, cluster=CLUSTER, memory_gib=80)


def test_stages_stand_apart(windows, analysis):
    assert list(analysis.stages) == ["recompute", "update"]
    assert analysis.stages["recompute"].skew == skew(windows[0])
    assert analysis.stages["update"].skew == skew(windows[1:])


def test_seconds_are_those_of_the_planner_over_all_windows(windows, analysis):
    plans = plan_step(windows, cluster=CLUSTER, model=MODEL, slots=1)
    seconds = analysis.seconds
    assert seconds.now.total == pytest.approx(sum(p.static_seconds for p in plans))
    assert seconds.planned.total == pytest.approx(sum(p.seconds.total for p in plans))
    assert seconds.saved_seconds == pytest.approx(sum(p.saved_seconds for p in plans))
    assert seconds.saved_seconds > 0 and 0 < seconds.lost_seconds < seconds.now.total
    update = analysis.stages["update"].seconds
    assert update.now.total == pytest.approx(sum(p.static_seconds for p in plans[1:]))
    assert analysis.worth_it


def test_without_a_plan_nothing_is_planned(windows, analysis):
    bare = analyze_loads(windows, model=MODEL, cluster=CLUSTER, slots=None)
    assert bare.trial is None and bare.seconds.planned is None and not bare.worth_it
    assert bare.seconds.now == analysis.seconds.now
    document = bare.to_dict()
    assert (document["plan"], document["no_plan"]) == (None, "not asked for")
    assert document["seconds"]["planned"] is None


def test_level_loads_are_not_worth_a_plan():
    loads = LoadMatrix(np.full((2, 3, 8, 128), 60, dtype=np.int64))
    analysis = analyze_loads([loads], model=MODEL, cluster=CLUSTER)
    assert analysis.seconds.lost_seconds == 0
    assert analysis.to_dict()["plan"]["worth_it"] is False


def test_widths_that_do_not_divide_the_experts_are_left_out():
    model = MODEL.replace(experts=48)
    loads = LoadMatrix(np.ones((1, 3, 8, 48), dtype=np.int64))
    analysis = analyze_loads([loads], model=model, cluster=CLUSTER)
    assert [ep for ep, _ in analysis.stages["update"].widths] == [8, 16]


def test_a_wider_group_is_never_less_uneven(analysis):
    widths = analysis.stages["update"].widths
    means = [distribution.mean for _, distribution in widths]
    assert means == sorted(means)
    assert [ep for ep, _ in widths] == [8, 16, 32, 64]


def test_groups_are_never_added_up():
    load = np.full((1, 3, 16, 128), 10, dtype=np.int64)
    # Two groups, each with a hot rank the other has not: together they would look less uneven.
    load[:, :, :8, :16] = 100
    load[:, :, 8:, 16:32] = 300
    loads = LoadMatrix(load)
    groups = loads.split_groups(8)
    analysis = analyze_loads([loads], model=MODEL, cluster=CLUSTER, memory_gib=80)
    stage = analysis.stages["update"]
    assert stage.skew == skew(groups)
    assert dict(stage.widths)[8] == skew(groups).dispatched
    assert dict(stage.widths)[16] == skew(loads).dispatched
    assert stage.skew.mean > 1.2 * skew(loads, ep=8).mean
    assert len(analysis.trial.plans[0]) == 2
    place = analysis.to_dict()["memory"]["place"]
    assert (place["window"], place["group"], place["rank"]) == (0, 1, 1)
    assert analysis.memory.peak_rows == 8 * 16 * 300


def test_sources_that_fill_no_group_leave_skew_compute_and_a_reason():
    loads = LoadMatrix(np.random.default_rng(0).integers(0, 90, (2, 3, 4, 128)))
    analysis = analyze_loads([loads], model=MODEL, cluster=CLUSTER)
    assert analysis.trial is None
    assert analysis.no_trial == "the loads have 4 source ranks, which do not fill EP groups of 8"
    assert analysis.stages["update"].skew == skew(loads, ep=8)
    assert analysis.seconds.now.compute > 0
    assert analysis.to_dict()["seconds"]["now"]["all_to_all"] is None


def test_loads_of_some_of_the_layers_are_analysed_as_they_are():
    load = np.random.default_rng(1).integers(0, 90, (2, 2, 8, 128))
    loads = LoadMatrix(load, layer_numbers_L=np.array([7, 30]))
    analysis = analyze_loads([loads], model=ModelShape.preset("qwen3-30b-a3b"), cluster=CLUSTER)
    assert analysis.layer_numbers == (7, 30)
    assert analysis.trial.plans[0][0].home_LE.shape == (2, 128)


def test_coverage_and_padding_are_shares_of_what_is_forwarded():
    load = np.full((1, 3, 8, 128), 2, dtype=np.int64)
    loads = LoadMatrix(load, padding_MLRE=load // 2, coverage_MLR=np.full((1, 3, 8), 0.75))
    analysis = analyze_loads([loads], model=MODEL, cluster=CLUSTER)
    assert (analysis.coverage, analysis.padding) == (0.75, 0.5)
    assert analysis.rows == load.sum()


def test_seconds_count_rows_whose_routes_are_unknown(windows, analysis):
    halved = [
        LoadMatrix(w.load_MLRE // 2, stage=w.stage, coverage_MLR=np.full(w.load_MLRE.shape[:3], 0.5)) for w in windows
    ]
    found = analyze_loads(halved, model=MODEL, cluster=CLUSTER)
    assert found.seconds.now.compute == pytest.approx(analysis.seconds.now.compute, rel=0.02)
    assert found.trial.estimated_share == pytest.approx(0.5, abs=0.01)


def test_idle_ranks_do_not_raise_coverage():
    load = np.zeros((1, 3, 8, 128), dtype=np.int64)
    load[:, :, 0] = 1
    coverage = np.ones((1, 3, 8))
    coverage[:, :, 0] = 0.5
    analysis = analyze_loads([LoadMatrix(load, coverage_MLR=coverage)], model=MODEL, cluster=CLUSTER)
    assert analysis.coverage == 0.5


def test_one_rank_has_nothing_to_balance():
    loads = LoadMatrix(np.random.default_rng(2).integers(0, 90, (2, 3, 1, 128)))
    analysis = analyze_loads([loads], model=MODEL, cluster=Cluster.preset("h100", ep=1))
    assert analysis.seconds.lost_seconds == 0 and analysis.seconds.saved_seconds == 0


def test_the_document_is_json_and_says_whose_figures_it_used(analysis):
    document = analysis.to_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["format"] == "equipoise-analysis-2"
    assert document["profile"] == {"device": "NVIDIA H100 SXM5 80GB", "kind": "derived"}
    assert document["plan"]["buffer_bytes"] == (2 * 2 + 4) * MODEL.expert_bytes
    most = max(int(p.rank_load_MLR.max()) for window in analysis.trial.plans for p in window)
    tokens = (
        max(int(p.loads.load_MLRE.sum(axis=3).max()) for window in analysis.trial.plans for p in window) / MODEL.top_k
    )
    # A page of tokens and of computed rows, an eighth more of both, and a little beside each row.
    held = document["plan"]["row_page_bytes"] / (1.125 * (most + tokens) * MODEL.row_bytes)
    assert 1 < held < 1.1
    assert document["plan"]["skew"]["update"]["after"]["mean"] < document["plan"]["skew"]["update"]["before"]["mean"]
    assert document["memory"]["fits"] is True
    assert len(document["stages"]["update"]["skew"]["layers"]) == 3


def test_loads_of_another_model_and_no_loads_are_refused(windows):
    with pytest.raises(LoadsError, match="loads are of 128 experts, model 'mixtral-8x7b' has 8"):
        analyze_loads(windows, model=ModelShape.preset("mixtral-8x7b"), cluster=CLUSTER)
    with pytest.raises(LoadsError, match="no windows"):
        analyze_loads([], model=MODEL, cluster=CLUSTER)
    other = LoadMatrix(np.ones((1, 2, 8, 128), dtype=np.int64))
    with pytest.raises(LoadsError, match="windows have 2 and 3 layers"):
        analyze_loads([windows[0], other], model=MODEL, cluster=CLUSTER)
