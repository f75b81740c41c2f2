"""The node benchmark at tiny sizes on a CPU; rivals' plans are made executable without changing who computes what."""

import numpy as np
import pytest

import equipoise as eq
from benchmarks import node, node_cases, node_links, node_parts, node_report, node_train
from equipoise.cost import CostModel
from equipoise.rl.config import build_cluster, read_config
from tests.layer.cases import cluster_of, model_of, random_routing
from tests.pool import preloaded_context


@pytest.mark.parametrize("policy", ["eplb-oracle", "lplb"])
@pytest.mark.parametrize("seed", range(3))
def test_an_executable_plan_gives_every_rank_the_rows_of_the_rivals_plan(policy, seed):
    routing = random_routing(seed, ranks=4, experts=16, tokens=60)
    made = eq.plan(routing.loads(), cluster=cluster_of(4), model=model_of(routing), slots=1, policy=policy)
    plan = node_cases.executable(made)
    assert not plan.persistent and plan.itinerary is not None
    assert np.array_equal(plan.rank_load_MLR, made.rank_load_MLR)
    assert np.array_equal(np.sort(plan.home_LE, axis=1)[0], np.repeat(np.arange(4), 4)), "homes are a permutation"


def test_forced_uniform_routes_load_every_expert_alike():
    case = node.smoke_works()[0].case
    loads = case.loads(case.uniform()).total_MLE()
    assert len(np.unique(loads)) == 1
    assert all(len(set(row)) == len(row) for row in case.uniform().reshape(-1, case.model.top_k).tolist())

    drawn, routes = case.forced(), case.forced().reshape(-1, case.model.top_k)
    assert drawn.shape == case.routes_MLRTK.shape and len(np.unique(case.loads(drawn).total_MLE())) > 1
    assert all(len(set(row)) == len(row) for row in routes.tolist()) and set(routes.ravel()) == set(range(8))


def test_the_plan_of_reactive_is_executed_in_the_open():
    routing = random_routing(0, ranks=4, experts=16, tokens=60)
    made = eq.plan(
        routing.loads(), cluster=cluster_of(4), model=model_of(routing), slots=1, policy="reactive", objective="skew"
    )
    plan = node_cases.in_the_open(made)
    assert len(plan.replica_table) and np.array_equal(plan.rank_load_MLR, made.rank_load_MLR)
    forward_V = np.flatnonzero(plan.itinerary.phase_V == 0)
    assert np.array_equal(plan.itinerary.ready_from_V[forward_V], forward_V), "a forward visit pulls nothing ahead"


def test_predicted_parts_add_up_to_the_clocks_seconds():
    work = node.smoke_works()[1]
    for policy in (one for one in work.policies if one.predicted and one.plan.policy == "equipoise"):
        cost = CostModel.of(work.cluster, work.case.model)
        rows = policy.plan.loads.load_MLRE.sum(axis=3)
        sending_s = cost.sending_ns(rows).mean(axis=2).sum() / 1e9
        parts = sum(seconds for part, seconds in policy.predicted.items() if part != "accumulate")
        assert parts == pytest.approx(policy.plan.seconds.total + sending_s), policy.name


def test_parts_of_ranks_divide_meetings_into_exchange_and_waiting():
    early, late = {"experts": [1.0], "meet": [3.0, 0.5]}, {"experts": [3.0], "meet": [1.0, 0.5]}
    parts = node_parts.parts_of(6.0, [early, late])
    assert parts == {"experts": 2.0, "exchange": 1.5, "waiting": 1.0, "exposed": 0.0, "rest": 1.5}


@pytest.mark.dist(4)
def test_all_policies_run_and_are_summarised(tmp_path):
    mixed = "equipoise, 1 slot, skew, mapped inside nodes"
    asked = ["static", "reactive", "equipoise, 1 slot", mixed]
    lite = ";".join(asked[:3])
    some = "static;equipoise, 1 slot"
    cases = ["exchange:prepared;mapped", f"lite:{lite}", f"checkpointing:{some}", f"nodes:static;{mixed}"]
    works = node.choose(node.smoke_works(), cases)
    facts = {"commit": "a" * 40, "machine": "a CPU", "clock": "its own"}
    keeper = node.Keeper(node_report.open_document(None, facts), tmp_path / "node.json")
    node.run_all(works, keeper, rounds=1, device="cpu", context=preloaded_context())
    rows, parts, limits = node_report.summarise(keeper.document)
    named = {(row["case"], row["policy"]) for row in rows}
    assert {policy for _, policy in named} >= {*asked, "mapped", "prepared", "attention alone"}
    assert all(row["window_s"] > 0 for row in rows)
    for case in ("smoke", "smoke, checkpointing"):
        ours = {row["part"]: row["measured_s"] for row in parts if row["policy"] == asked[2] and row["case"] == case}
        assert min(ours.values()) >= 0 < ours["experts"]
    found = {limit.name: limit for limit in limits}
    assert "smoke, experts alone: mapped over prepared" in found and "smoke: exposed transfers" in found
    for case in ("smoke", "smoke, checkpointing", "smoke, two nodes"):
        assert found[f"{case}: gradients differ from static's by a share of"].value < 1e-6
    assert keeper.document["cases"]["smoke"]["runs"]["reactive"][0]["planning_s"] > 0
    # A second call adds to what the file holds, and another commit's results are refused.
    again = node.Keeper(node_report.open_document(tmp_path / "node.json", facts), None)
    again.expect(works)
    again.show("more", 1, {"static": keeper.document["cases"]["smoke"]["runs"]["static"]})
    assert len(again.document["cases"]["smoke"]["runs"]["static"]) == 4, "two windows, twice"
    both = node_report.join([keeper.document, again.document, {**again.document, "cases": {}, "commit": "b" * 40}])
    assert len(both["cases"]["smoke"]["runs"]["static"]) == 6
    with pytest.raises(SystemExit, match=r"windows of commits aaaa\w+ and bbbb\w+ are not put together"):
        node_report.join([keeper.document, keeper.document | {"commit": "b" * 40}])
    with pytest.raises(SystemExit, match=r"holds results of commit aaaa.*, these are of bbbb"):
        node_report.open_document(tmp_path / "node.json", facts | {"commit": "b" * 40})


@pytest.mark.dist(2)
def test_an_exchange_beside_pulls_is_compared_with_the_rule(pool):
    exchange, both = pool.run(node_links.compare_links, 2, "cpu")[0]
    # How near to the rule depends on what else the machine does.
    assert exchange["over_rule"] > 0 and both["over_rule"] > 0


def test_stages_of_training_steps_have_rates_without_the_warm_up():
    slow = {"seconds": 9.0, "tokens_per_s": 1.0, "skew_after": 2.0, "displaced": 0, "replicas": 0}
    stage_s = {"rollout": 1.0, "sync": 0.5, "recompute": 0.5, "update": 2.0}
    steps = [slow | {"stage_s": dict.fromkeys(stage_s, 9.0)}] * 2
    steps += [{**slow, "seconds": 4.0, "tokens_per_s": 100.0, "skew_after": 1.0, "stage_s": stage_s}] * 3
    rows = {row["stage"]: row for row in node_train.stage_rows("static", steps)}
    assert rows["update"]["tokens_per_s"] == 200 and rows["rollout"]["tokens_per_s"] == 400
    assert rows["step"]["tokens_per_s"] == 100 and rows["step"]["skew_after"] == 1.0


@pytest.mark.parametrize("stage", ["recompute", "update"])
def test_the_gate_opens_by_itself_for_the_preset_that_trains_on_the_node(stage):
    config = read_config("node-gpu")
    sizes = {name: getattr(config.model, name) for name in ("experts", "layers", "top_k", "hidden", "expert_width")}
    model = eq.ModelShape.preset("qwen3-30b-a3b", **sizes)
    rng, tokens = np.random.default_rng(0), 30 * config.update.micro_batch
    # The busiest rank has a seventh more than the mean, less than any recorded trace has.
    share_LE = np.exp(0.35 * rng.normal(size=(model.layers, model.experts)))
    load_MLRE = [
        [rng.multinomial(tokens * model.top_k, share_E / share_E.sum(), size=config.ranks) for share_E in share_LE]
        for _ in range(2)
    ]
    loads = eq.LoadMatrix(np.array(load_MLRE), stage=stage)
    assert config.balance.objective == "seconds"
    plan = eq.plan(loads, cluster=build_cluster(config, model), model=model, slots=config.balance.slots)
    assert plan.seconds.total < 0.95 * plan.static_seconds
    assert len(plan.replica_table) or plan.displaced_LE.any()
