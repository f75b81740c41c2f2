"""Rank replay on a CPU: work read off plans, composition with made-up times, chains, and the committed report."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from benchmarks import rank_replay
from benchmarks.rank_replay import HOST, TWO_CALLS, Measured, compose, limits_of, rank_works, rows_of, smoke_work
from benchmarks.replay_chain import Chain, Layer, Stage, Work
from benchmarks.replay_work import (
    EVEN,
    RUN,
    cut_rows_MLRS,
    even_rows_MLRS,
    load_work,
    policy_work,
    resting_work,
    save_work,
)
from benchmarks.results import ROOT, format_table
from equipoise.calibrate.bench import AttentionShape, Bench
from equipoise.calibrate.measures import Attention
from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.cost import CostModel
from equipoise.planner import plan

BENCH = Bench.on("cpu", runs=1)
REPORTS = ROOT / "benchmarks" / "reports"
MODEL = ModelShape.preset("qwen3-30b-a3b", experts=16, top_k=2, layers=2)
CLUSTER = Cluster.preset("h200", nodes=1, ranks_per_node=4, ep=4)


def loads():
    """Eight micro-steps in which a few experts are hot."""
    rng = np.random.default_rng(3)
    share_E = rng.permutation(np.arange(1, 17) ** -1.2)
    return LoadMatrix(rng.poisson(share_E * 20_000, size=(8, 2, 4, 16)))


def planned(policy):
    return plan(loads(), cluster=CLUSTER, model=MODEL, slots=2, policy=policy)


@pytest.mark.parametrize("policy", ["static", "eplb-oracle", "reactive", "equipoise"])
def test_under_every_policy_the_rows_of_all_ranks_and_slots_are_the_loads(policy):
    made = planned(policy)
    work = policy_work(made, CostModel.of(CLUSTER, MODEL))
    total_ML = made.loads.total_MLE()[list(RUN)].sum(axis=2)
    assert (work.row_MLR.sum(axis=2) == total_ML).all()
    assert (work.row_MLR == made.rank_load_MLR[list(RUN)]).all()
    assert (work.exchange_ns_ML > 0).all()


def test_every_pull_is_a_slot_behind_the_homes_and_every_return_is_added_once():
    made = planned("equipoise")
    work = policy_work(made, CostModel.of(CLUSTER, MODEL))
    held_MLR = (work.rows_MLRS >= 0).sum(axis=3)
    assert work.sent_MLR.sum() > 0
    assert (held_MLR - work.homes_MLR == work.sent_MLR).all()
    for pulls_MLR in (work.host_MLR2[..., 0] + work.peer_MLR2[..., 0], work.host_MLR2[..., 1] + work.peer_MLR2[..., 1]):
        assert (pulls_MLR == work.sent_MLR).all()
    assert (work.added_MLR.sum(axis=2) == work.sent_MLR.sum(axis=2)).all()


def test_replicas_that_stay_are_not_pulled():
    work = policy_work(planned("eplb-oracle"), CostModel.of(CLUSTER, MODEL))
    assert work.host_MLR2.sum() == work.peer_MLR2.sum() == work.sent_MLR.sum() == 0
    assert (work.homes_MLR == (work.rows_MLRS >= 0).sum(axis=3)).all()


def test_both_ceilings_give_every_rank_the_mean():
    made = planned("balanced")
    total_ML1 = made.loads.total_MLE()[list(RUN)].sum(axis=2)[..., None]
    for rows_MLRS in (cut_rows_MLRS(made), even_rows_MLRS(made)):
        work = resting_work(made, CostModel.of(CLUSTER, MODEL), rows_MLRS)
        assert (work.row_MLR.sum(axis=2, keepdims=True) == total_ML1).all()
        assert np.abs(work.row_MLR - total_ML1 / 4).max() < 4
    even_MLRS = even_rows_MLRS(made)
    assert even_MLRS.shape[3] == 4 and np.ptp(even_MLRS, axis=(2, 3)).max() <= 1
    # The other is as uneven as the experts are: in each group one expert, none of them twice as a whole.
    assert np.ptp(cut_rows_MLRS(made), axis=(2, 3)).min() > 1000


def test_a_ceiling_exchanges_the_rows_of_the_micro_steps_that_are_run():
    size_M111 = np.arange(1, 9).reshape(8, 1, 1, 1)
    uneven = LoadMatrix(np.full((8, 2, 4, 16), 1000) * size_M111)
    made, cost = plan(uneven, cluster=CLUSTER, model=MODEL, policy="balanced"), CostModel.of(CLUSTER, MODEL)
    found_ML = resting_work(made, cost, even_rows_MLRS(made)).exchange_ns_ML
    assert len(np.unique(found_ML)) == len(RUN), "micro-steps of unequal size are not their mean"
    # Every source sends each of the other three ranks a quarter of its rows.
    wanted = [cost.exchange_ns(inside_rows=3 * 16_000 * (m + 1) // 4, across_rows=0) for m in RUN]
    assert found_ML.tolist() == [[ns, ns] for ns in wanted]


def test_only_reactive_is_charged_for_planning_and_pushing():
    charges = {
        name: policy_work(planned(name), CostModel.of(CLUSTER, MODEL)).charge_ns for name in ("static", "reactive")
    }
    assert charges["static"].tolist() == [0, 0, 0]
    assert charges["reactive"][1] == 80_000 and 0 < charges["reactive"][2] <= 255_000


def test_saved_work_comes_back(tmp_path):
    work = smoke_work()
    save_work([work, work], tmp_path / "work.npz")
    back = list(load_work(tmp_path / "work.npz"))
    assert [one.case for one in back] == [work.case] * 2 and back[1].tokens == work.tokens
    for policy, one in work.policies.items():
        for field in fields(one):
            assert np.array_equal(getattr(back[1].policies[policy], field.name), getattr(one, field.name))


def made_up(forward, backward, add):
    """Times that nothing measured, one for each rank of two, in two layers."""
    grids = [np.broadcast_to(np.array(ns, dtype=float), (1, 2, 2)) for ns in (forward, backward, add)]
    return Measured(forward_ns_MLR=grids[0], backward_ns_MLR=grids[1], add_ns_MLR=grids[2], spread=0.01)


def test_a_layer_takes_its_slowest_rank_in_all_parts_together():
    work = replace(smoke_work().policies["static"], charge_ns=np.array([7, 5, 1]))
    # Rank 0 is slower forward, rank 1 in sum.
    measured = made_up([300, 200], [100, 400], [0, 50])
    forward = compose(measured, work, stage="forward", sent_ns=10)
    assert forward == {"measured": 310, "with all-to-all": 310 + 500, "charged": 310 + 500 + 13}
    update = compose(measured, work, stage="update", sent_ns=20)
    assert update == {"measured": 670, "with all-to-all": 670 + 1000, "charged": 670 + 1000 + 13}


def test_shares_are_throughput_over_balanced_and_ours_is_held_to_the_limit():
    work = smoke_work()
    names = [*work.policies, HOST, TWO_CALLS]
    measured = {name: made_up([100, 100], [200, 200], [0, 0]) for name in names}
    measured["equipoise"] = made_up([100, 125], [200, 175], [0, 0])
    rows = rows_of(work, measured, (0.0, 0.0))
    shares = {(row["policy"], row["stage"]): row["pct measured"] for row in rows}
    assert shares["balanced", "forward"] == shares["static", "update"] == 100
    assert shares["equipoise", "forward"] == 80 and shares["equipoise", "update"] == 100
    limits = limits_of(rows)
    assert len(limits) == 4 and [limit.holds for limit in limits] == [False, False, True, True]


def test_what_is_pushed_in_the_open_is_not_pulled_beside():
    ours = smoke_work().policies["equipoise"]
    assert rank_works(ours, 0, 1, is_pulling=True)[0] == Work(rows=(8, 8), homes=1, peer=(1, 1), sent=1)
    assert rank_works(ours, 0, 1, is_pulling=False)[0].peer == (0, 0)
    assert rank_works(ours, 0, 0, is_pulling=True)[1] == Work(rows=(16,), homes=1, added=1)


@pytest.fixture
def stage():
    """Two layers of three tiny experts."""
    torch.manual_seed(1)
    attention = Attention.random(AttentionShape(hidden=32, heads=2, kv_heads=1, width=16), BENCH)
    return Stage((32, 16), width=3, most_rows=40, layers=2, attention=attention, bench=BENCH)


def test_one_call_and_two_calls_compute_the_same_from_pulled_weights(stage):
    work = Work(rows=(9, 0, 7), homes=2, peer=(1, 1), sent=1, added=1)
    outs, gradients, returned = [], [], []
    for two_calls in (False, True):
        torch.manual_seed(2)
        layer = Layer(stage, 0, work, two_calls=two_calls)
        layer.weights.gate_up_SFD.data[2:].fill_(torch.nan)
        layer.pull(0)
        layer.forward()
        outs.append(layer.out_ND.detach().clone())
        layer.backward()
        gradients.append([t[:2] if t.dim() == 3 else t for t in layer.gradients])
        layer.send()
        returned.append([t[0].clone() for t in stage.staging])
    assert outs[0].isfinite().all()
    for one, two in zip([outs[0], *gradients[0], *returned[0]], [outs[1], *gradients[1], *returned[1]], strict=True):
        torch.testing.assert_close(one, two)
    assert returned[0][0].abs().sum() > 0


def test_a_chain_visits_all_layers_forward_and_back_and_pulls_for_both(stage, monkeypatch):
    pulled = []
    monkeypatch.setattr(Layer, "pull", lambda layer, phase: pulled.append((chain.layers.index(layer), phase)))
    chain = Chain(stage, [Work(rows=(4, 4), homes=1, host=(1, 1), sent=1, added=2)] * 2, tokens=8, sequence=4)
    times = [read() for read in chain.run()]
    assert pulled == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert len(times) == 2
    assert all(min(one.forward, one.backward, one.add) > 0 for one in times)


def test_the_script_runs_small(tmp_path, capsys, monkeypatch):
    path = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["rank_replay", "--cpu-smoke", "--runs", "1", "-o", str(path), "--commit", "c"])
    rank_replay.main()
    document = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == document["rows"]
    assert document["commit"] == "c"
    assert set(document["cases"][0]["variants"]) == {*smoke_work().policies, HOST, TWO_CALLS}


def committed(name):
    return json.loads((REPORTS / f"{name}.json").read_text())


def test_the_committed_report_shows_the_committed_figures():
    document, text = committed("rank_replay_h200_202611"), (REPORTS / "rank_replay_h200_202611.md").read_text()
    assert format_table(document["rows"]) in text
    assert document["commit"] in text and document["driver"] in text
    assert len(document["cases"]) == 5 and len(document["commit"]) == 40


def test_the_committed_shares_follow_from_the_committed_nanoseconds():
    document = committed("rank_replay_h200_202611")
    for case in document["cases"]:
        for number, stage_name in enumerate(("forward", "update")):
            layer = {
                name: np.array(one[f"{stage_name}_ns_MLR"]).max(axis=2).mean() + case["sent_ns"][number]
                for name, one in case["variants"].items()
            }
            rows = [row for row in document["rows"] if (row["case"], row["stage"]) == (case["name"], stage_name)]
            for row in rows:
                wanted = 100 * layer["balanced"] / layer[row["policy"]]
                assert row["pct measured"] == pytest.approx(wanted, abs=0.3), row["policy"]


def test_the_target_holds_everywhere_and_the_report_says_with_what():
    document, text = committed("rank_replay_h200_202611"), (REPORTS / "rank_replay_h200_202611.md").read_text()
    assert [limit["name"] for limit in document["limits"] if not limit["holds"]] == []
    wide = [r["pct with all-to-all"] for r in document["rows"] if r["policy"] == "equipoise" and "EP16" in r["case"]]
    assert f"EP16 on two nodes {min(wide):.1f} to {max(wide):.1f}" in text
    assert EVEN in text
