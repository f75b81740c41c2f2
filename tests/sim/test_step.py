"""A whole step: the planner's own seconds, windows and groups that add up, and what users get wrong."""

import json
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

import equipoise as eq
from equipoise.core import Cluster, EquipoiseError, InfeasiblePlanError, LoadMatrix, LoadsError
from equipoise.cost.links import tokens_between
from equipoise.cost.profile import OVERHEADS
from equipoise.planner import PlanOptions, plan
from equipoise.planner.baselines import POLICIES
from equipoise.sim import StepSetting, simulate
from equipoise.sim.result import Shown
from equipoise.sim.summary import summary
from equipoise.sim.windows import PolicyPlans, StepCase, stage_layers
from tests.cost.reference import by_relay
from tests.sim.steps import MODEL, cluster_of, skewed_loads

EVERY = ("equipoise", *POLICIES)


@pytest.fixture(scope="module")
def loads():
    return skewed_loads()


@pytest.fixture(scope="module")
def simulated(loads):
    return simulate(loads, EVERY, cluster=cluster_of(), model=MODEL, setting=StepSetting(rollout_s=3.0, other_s=0.5))


@pytest.mark.parametrize("stage", ["update", "recompute"])
@pytest.mark.parametrize("policy", EVERY)
def test_parts_are_the_planners_own_seconds(policy, stage):
    loads = skewed_loads(3, stage=stage)
    given = {"cluster": cluster_of(), "model": MODEL}
    made = plan(loads, policy=policy, history=loads.micro_steps(0, 2), slots=1, **given)
    parts = simulate(loads, made, **given).policies[0].seconds
    for name in ("compute", "pull", "return_", "publish", "collect", "planning"):
        assert getattr(parts, name) == getattr(made.seconds, name), name
    exchanged = parts.all_to_all_inside + parts.all_to_all_across
    assert round(exchanged * 1e9) == round(made.seconds.all_to_all * 1e9)
    assert round(parts.experts * 1e9) == round(made.seconds.total * 1e9)
    assert parts.bubble == 0


def test_waves_are_told_with_what_they_save_and_change_nothing_else():
    even = LoadMatrix(np.random.default_rng(1).integers(9000, 9900, size=(2, MODEL.layers, 8, MODEL.experts)))
    given = {"cluster": cluster_of(), "model": MODEL, "setting": StepSetting(sends="rows")}
    one, two = (simulate(even, ["static", "balanced"], options=PlanOptions(waves=n), **given) for n in (1, 2))
    for before, after in zip(one.policies, two.policies, strict=True):
        (whole,), (cut,) = before.windows, after.windows
        assert (whole.waves, whole.waves_saved_s, cut.waves) == (1, 0.0, 2)
        assert cut.waves_saved_s == pytest.approx(whole.seconds.total - cut.seconds.total) and cut.waves_saved_s > 0
        assert cut.seconds.attention == whole.seconds.attention and np.array_equal(cut.byte_RR, whole.byte_RR)
        assert cut.rank_s_CGX.sum(axis=0) == pytest.approx(cut.seconds.total)
    text = summary(two, title="even")
    assert "Waves, and what they save of the step: static 2 (" in text and "never run on a GPU" in text
    assert "Waves" not in summary(one, title="even")


def test_pairs_make_the_exchange_cheaper_just_as_the_planner_has_it(loads):
    pair_LEE = np.full((MODEL.layers, MODEL.experts, MODEL.experts), 50)
    pair_LEE[:, np.arange(MODEL.experts), np.arange(MODEL.experts)] = 1000
    given = {"cluster": cluster_of(), "model": MODEL}
    made = plan(loads, slots=1, pair_LEE=pair_LEE, options=PlanOptions(sends="rows"), **given)
    setting = StepSetting(sends="rows")
    with_pairs, without = (
        simulate(loads, made, pair_LEE=pairs, setting=setting, **given).policies[0].seconds
        for pairs in (pair_LEE, None)
    )
    assert with_pairs.all_to_all_inside + with_pairs.all_to_all_across == pytest.approx(made.seconds.all_to_all)
    assert with_pairs.all_to_all_across < without.all_to_all_across


def test_the_order_of_policies_is_what_each_can_know(simulated):
    seconds = {result.policy: result.seconds.experts for result in simulated.policies}
    assert seconds["balanced"] < seconds["equipoise"] < seconds["eplb-oracle"] < seconds["static"]
    assert seconds["equipoise"] < seconds["reactive"]
    assert seconds["reactive-free"] < seconds["reactive"]
    compute = {result.policy: result.seconds.compute for result in simulated.policies}
    assert min(compute.values()) == compute["balanced"]


def sparse_loads(seed: int, *, ranks: int, low: int = 0) -> LoadMatrix:
    """Some sources have no rows, and with `low` 0 some experts none either."""
    rng = np.random.default_rng(seed)
    shape = (2, MODEL.layers, ranks, MODEL.experts)
    load = rng.integers(0, rng.choice([3, 50, 2000]), shape) * (rng.random((*shape[:3], 1)) < 0.7)
    return LoadMatrix(low + load * (low + (rng.random((*shape[:2], 1, shape[3])) < 0.4)))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_no_policys_busiest_rank_has_fewer_rows_than_balanceds_which_is_the_mean(seed, ranks):
    found = simulate(sparse_loads(seed, ranks=ranks), EVERY, cluster=cluster_of(ranks), model=MODEL)
    ceiling = found.policy("balanced").windows[0]
    assert (ceiling.after.busiest_M - ceiling.after.mean_M < MODEL.layers).all()
    for result in found.policies:
        (window,) = result.windows
        assert (window.after.busiest_M >= ceiling.after.busiest_M).all()
        # A single rank computes as `balanced` does, whichever experts have rows.
        assert ranks > 1 or window.seconds.compute == ceiling.seconds.compute


@pytest.mark.parametrize("seed", range(3))
def test_balanced_is_not_slower_in_compute_where_ranks_have_rows_in_equally_many_experts(seed):
    loads = sparse_loads(seed, ranks=8, low=1)
    found = simulate(loads, ["static", "balanced"], cluster=cluster_of(), model=MODEL)
    assert found.policy("balanced").seconds.compute <= found.policy("static").seconds.compute


def test_most_of_the_edges_is_hidden_where_layers_are_long_and_all_is_accounted_for():
    loads = skewed_loads(5, tokens=65_536)
    found = simulate(loads, ["equipoise", "eplb-oracle"], cluster=cluster_of(), model=MODEL).policies
    for result in found:
        (window,) = result.windows
        (edges,) = [use for use in window.paths if use.path == "edges"]
        assert edges.exposed_s == pytest.approx(window.seconds.publish + window.seconds.collect)
        assert 0 < edges.exposed_s < 0.7 * edges.moved_s
        assert edges.bytes > 0


def test_the_first_micro_step_shows_what_is_published_and_the_last_what_is_collected():
    loads = skewed_loads(5, tokens=65_536)
    given = {"cluster": cluster_of(), "model": MODEL}
    for micro_step, word in ((0, "publish"), (1, None), (3, "collect")):
        setting = StepSetting(shown=Shown(micro_step=micro_step), timeline_layers=4)
        (result,) = simulate(loads, "eplb-oracle", setting=setting, **given).policies
        names = {event.name.split()[0] for event in result.timeline if event.lane == "edges"}
        assert names == ({word} if word else set())


def test_a_step_is_its_windows_and_what_was_given(simulated):
    for result in simulated.policies:
        seconds = result.seconds
        assert (seconds.rollout, seconds.other) == (3.0, 0.5)
        assert seconds.total == pytest.approx(3.5 + sum(w.seconds.total for w in result.windows))
        assert seconds.training == pytest.approx(seconds.total - 3.0)


def test_ranks_add_up_to_their_group_and_nothing_is_negative(simulated):
    for result in simulated.policies:
        for window in result.windows:
            total_GX = window.rank_s_CGX.sum(axis=0)
            assert np.allclose(total_GX, window.group_s_G[:, None])
            assert (window.rank_s_CGX >= -1e-12).all()
            assert window.group_s_G[window.slowest] == pytest.approx(window.seconds.total)
            assert all(0 <= use.exposed_s <= use.moved_s for use in window.paths)


def test_before_and_after_are_the_skew_of_owners_and_of_the_plan(loads, simulated):
    before = simulated.windows[0].before
    ours, static = (simulated.policy(name).windows[0].after for name in ("equipoise", "static"))
    assert before == static
    assert ours.skew_M.mean() < 1.1 < before.skew_M.mean()
    assert np.array_equal(before.rank_load_MR.sum(axis=1), loads.load_MLRE.sum(axis=(1, 2, 3)))
    assert np.array_equal(ours.rank_load_MR.sum(), before.rank_load_LR.sum())
    assert np.array_equal(simulated.windows[0].load_LE, loads.total_MLE().sum(axis=0))
    assert simulated.windows[0].tokens_per_rank == pytest.approx(4096)


def test_a_window_takes_its_slowest_group(loads):
    calm = LoadMatrix(np.full_like(loads.load_MLRE, int(loads.load_MLRE.mean())))
    both = LoadMatrix(np.concatenate([calm.load_MLRE, loads.load_MLRE], axis=2))
    given = {"cluster": cluster_of(), "model": MODEL}
    together = simulate(both, "static", **given).policies[0].windows[0]
    alone = [simulate(one, "static", **given).policies[0].windows[0] for one in (calm, loads)]
    assert together.slowest == 1
    assert together.group_s_G.tolist() == [w.seconds.total for w in alone]
    assert together.seconds == alone[1].seconds
    as_groups = simulate([[calm, loads]], "static", **given).policies[0].windows[0]
    assert as_groups.group_s_G.tolist() == together.group_s_G.tolist()


def test_pipeline_stages_share_the_layers_and_add_a_bubble(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    one = simulate(loads, "static", **given).policies[0]
    two = simulate(loads, "static", setting=StepSetting(pipeline_stages=2), **given).policies[0]
    assert two.seconds.bubble > 0
    # Each stage does about half; four micro-steps over two stages wait one more pass of each kind.
    assert 0.5 * one.seconds.total < two.seconds.total < one.seconds.total
    assert two.windows[0].rank_s_CGX.shape == (6, 1, 16)
    assert two.memory.experts_bytes * 2 == one.memory.experts_bytes
    assert two.seconds.compute < 0.7 * one.seconds.compute


def test_repeating_the_forward_pass_costs_its_compute_and_exchanges(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    kept, repeated = (
        simulate(loads, "static", setting=StepSetting(activations=how), **given).policies[0].seconds
        for how in ("kept", "recomputed")
    )
    assert repeated.all_to_all_across == pytest.approx(1.5 * kept.all_to_all_across)
    assert repeated.compute > 1.2 * kept.compute


def test_a_stage_without_windows_replays_the_other_ones_micro_steps(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    halves = [loads.micro_steps(0, 2), loads.micro_steps(2, 4)]
    both = simulate(halves, "static", stages=("recompute", "update"), **given)
    assert [w.stage for w in both.windows] == ["recompute", "update", "update"]
    assert [w.micro_steps for w in both.windows] == [4, 2, 2]
    forward, *updates = both.policies[0].windows
    assert forward.seconds.compute < sum(w.seconds.compute for w in updates)
    assert [w.stage for w in simulate(halves, "static", stages=("update",), **given).windows] == ["update"] * 2


@pytest.mark.parametrize(
    ("planning", "rollout_s", "exposed"), [("hidden", 5.0, 0.0), ("hidden", 0.5, 1.5), ("exposed", 5.0, 2.0)]
)
def test_planning_hides_behind_rollout_or_not(loads, planning, rollout_s, exposed):
    setting = StepSetting(planning=planning, planning_s=2.0, rollout_s=rollout_s)
    result = simulate(loads, ["equipoise", "static"], cluster=cluster_of(), model=MODEL, setting=setting)
    assert result.policy("equipoise").seconds.planning == pytest.approx(exposed)
    assert result.policy("static").seconds.planning == 0
    assert any("Planning takes 2 s" in note for note in result.notes)


def test_counts_and_dispatches_are_a_part_of_planning_where_a_profile_knows_them(loads, tmp_path):
    data = json.loads((resources.files("equipoise.cost") / "profiles" / "h200.json").read_text())
    data["ranks"] = {"count": 8, "nodes": 1, "source": "made up for a test"}
    data["overheads"] = dict.fromkeys(OVERHEADS, 10**15) | {
        "counts_fixed_ns": 3 * 10**9,
        "source": "made up for a test",
    }
    path = tmp_path / "shared.json"
    path.write_text(json.dumps(data))
    setting = StepSetting(planning="exposed", planning_s=2.0)
    given = {"cluster": replace(cluster_of(), profile=str(path)), "model": MODEL, "setting": setting}
    result = simulate(loads, ["equipoise", "static"], **given)
    assert result.policy("equipoise").seconds.planning == pytest.approx(2.0 + 3.0, abs=1e-3)
    assert result.policy("static").seconds.planning == 0


@pytest.mark.parametrize("planning_s", [0.001, 1.0])
def test_a_later_window_is_planned_while_the_one_before_runs_and_not_while_that_waits(loads, planning_s):
    setting = StepSetting(planning_s=planning_s, rollout_s=0.0)
    given = {"cluster": cluster_of(), "model": MODEL, "setting": setting}
    found = simulate([loads, skewed_loads(1), loads], "equipoise", **given).policies[0]
    running_s = 0.0
    for window in found.windows:
        seconds = window.seconds
        assert seconds.planning == pytest.approx(max(0.0, planning_s - running_s))
        running_s = seconds.total - seconds.planning
    # There is one planner: the step takes no less than its three plans, one after another.
    assert found.seconds.total >= 3 * planning_s


@pytest.mark.parametrize(("layers", "stages"), [(4, 3), (30, 22), (60, 22), (122, 14)])
def test_plans_and_pairs_are_cut_alike_into_pipeline_stages(layers, stages):
    given = {"cluster": cluster_of(2), "model": MODEL.replace(experts=2, top_k=1, layers=layers)}
    loads = LoadMatrix(np.arange(layers * 4).reshape(1, layers, 2, 2))
    source = PolicyPlans(policy="static", slots=0, case=StepCase(setting=StepSetting(pipeline_stages=stages), **given))
    plans, cuts = source.plans(loads, window=0, group=0), stage_layers(layers, stages)
    for made, cut in zip(plans, cuts, strict=True):
        assert np.array_equal(made.loads.load_MLRE, loads.load_MLRE[:, cut])
    pair_LEE, setting = np.ones((layers, 2, 2), dtype=np.int64), StepSetting(pipeline_stages=stages)
    assert simulate(loads, "static", pair_LEE=pair_LEE, setting=setting, **given).policies[0].seconds.total > 0


def test_bytes_between_ranks_are_those_of_the_plan(loads):
    given, rows = {"cluster": cluster_of(), "model": MODEL}, PlanOptions(sends="rows")
    made = plan(loads, slots=1, options=rows, **given)
    setting = StepSetting(sends="rows")
    one = simulate(loads.micro_steps(0, 1), "static", setting=setting, **given).policies[0].windows[0]
    static = plan(loads.micro_steps(0, 1), policy="static", options=rows, **given)
    assert one.byte_RR.sum() == static.bytes.all_to_all_inside + static.bytes.all_to_all_across
    assert not one.byte_RR.diagonal().any()
    found = simulate(loads, made, setting=StepSetting(sends="rows", shown=Shown(micro_step=2)), **given)
    split = sum(made.split_RER(2, layer).sum(axis=1) for layer in range(MODEL.layers))
    both = (split + split.T) * 2 * MODEL.row_bytes
    np.fill_diagonal(both, 0)
    assert np.array_equal(found.policies[0].windows[0].byte_RR, both)


def test_bytes_between_ranks_are_of_tokens_where_these_cross_once_and_of_every_pass(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    found = {
        (sends, kept): simulate(loads, "equipoise", setting=StepSetting(sends=sends, activations=kept), **given)
        .policies[0]
        .windows[0]
        .byte_RR
        for sends in ("rows", "tokens")
        for kept in ("kept", "recomputed")
    }
    assert found["rows", "recomputed"].sum() == 1.5 * found["rows", "kept"].sum()
    node_R = cluster_of().node_array_R
    is_far_RR, is_place_RR = node_R[:, None] != node_R, np.arange(8)[:, None] % 4 == np.arange(8) % 4
    tokens_RR, rows_RR = found["tokens", "kept"], found["rows", "kept"]
    assert not tokens_RR[is_far_RR & ~is_place_RR].any(), "tokens cross to the rank with their source's place"
    assert tokens_RR[is_far_RR].sum() < 0.9 * rows_RR[is_far_RR].sum()
    assert tokens_RR[~is_far_RR].sum() > rows_RR[~is_far_RR].sum(), "and are handed on inside"


def test_tokens_between_ranks_are_those_that_prices_count(loads):
    rows_RR = np.random.default_rng(0).integers(0, 900, size=(8, 8))
    node_R, row_R = cluster_of().node_array_R, rows_RR.sum(axis=1)
    moved_RR = tokens_between(rows_RR, node_R, 2)
    across_RR = rows_RR * (node_R[:, None] != node_R)
    tokens_RR, _ = by_relay(across_RR, row_R, node_R, np.array([1000, 1000]), 2)
    assert np.array_equal(moved_RR * (node_R[:, None] != node_R), tokens_RR)


def test_of_several_groups_the_fullest_is_shown_unless_another_is_asked_for():
    level, hot = (LoadMatrix(np.full((2, MODEL.layers, 8, 16), 50)), skewed_loads(micro_steps=2))
    given = {"cluster": cluster_of(), "model": MODEL}
    found = simulate([[level, hot]], ["static", "equipoise"], **given)
    assert found.shown.group == found.policies[0].windows[0].slowest == 1
    assert found.windows[0].before.skew_M.min() > 1.2
    asked = simulate([[level, hot]], "static", setting=StepSetting(shown=Shown(group=0)), **given)
    assert asked.shown.group == 0
    assert asked.windows[0].before.skew_M.max() == 1
    assert found.to_dict()["setting"]["shown"] == found.to_dict()["shown"]


def test_whole_steps_are_compared_with_their_rollout(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    found = simulate(loads, EVERY, setting=StepSetting(rollout_s=3.0), **given).to_dict()["policies"]
    seconds = {entry["policy"]: entry["step_s"] for entry in found}
    for entry in found:
        assert entry["step_speedup"] == pytest.approx(seconds["static"] / entry["step_s"])
        assert entry["step_of_balanced"] == pytest.approx(seconds["balanced"] / entry["step_s"])
    assert min(seconds.values()) > 3


def test_the_document_has_the_rates_of_the_links_and_so_have_the_notes(loads):
    cluster = Cluster.preset("h200", ranks_per_node=4, ep=8, network_bytes_per_s=6_250_000_000)
    document = simulate(loads, "static", cluster=cluster, model=MODEL).to_dict()
    assert document["cluster"]["network_bytes_per_s"] == 6_250_000_000
    assert document["cluster"]["nvlink_bytes_per_s"] == cluster.nvlink_bytes_per_s
    assert any("of 50 Gb/s across nodes" in note for note in document["notes"])


def test_a_pipelines_first_stage_keeps_the_activations_of_all_micro_steps_in_flight():
    loads = LoadMatrix(np.full((6, MODEL.layers, 8, 16), 500))
    given = {"cluster": cluster_of(), "model": MODEL}
    one, four = (
        simulate(loads, "static", setting=StepSetting(pipeline_stages=stages), **given).policies[0].memory
        for stages in (1, 4)
    )
    first, *_, last = four.received_bytes_X.reshape(4, 8).max(axis=1)
    # The first stage has one layer of each of four micro-steps, where one stage has four layers of one.
    assert first == one.received_bytes_X.max()
    assert last < first


@pytest.mark.parametrize(
    "wrong",
    [{"cluster": "h200"}, {"model": "qwen3-30b-a3b"}, {"loads": np.ones((1, 4, 8, 16))}, {"how": None}, {"how": 3}],
    ids=str,
)
def test_arguments_of_another_kind_are_named(loads, wrong):
    given = {"loads": loads, "how": "static", "cluster": cluster_of(), "model": MODEL, **wrong}
    first, how = given.pop("loads"), given.pop("how")
    with pytest.raises(EquipoiseError, match=r"give|must be a"):
        simulate(first, how, **given)


def test_a_result_introduces_itself_in_one_line(simulated):
    assert len(repr(simulated)) < 400
    assert "equipoise" in repr(simulated)


def test_the_timeline_shows_the_chosen_micro_step(loads):
    setting = StepSetting(shown=Shown(micro_step=1), timeline_layers=2)
    result = simulate(loads, "equipoise", cluster=cluster_of(), model=MODEL, setting=setting).policies[0]
    lanes = {event.lane for event in result.timeline}
    assert lanes == {"compute", "all-to-all", "pull", "return"}
    assert {event.rank for event in result.timeline} == set(range(8))
    own = [event for event in result.timeline if event.lane in ("compute", "all-to-all")]
    assert min(event.start_s for event in own) == 0
    names = {event.name for event in own}
    assert {"attention 0", "experts 1", "experts backward 1", "dispatch 0", "combine backward 1"} <= names
    assert "experts 2" not in names
    none = StepSetting(timeline_layers=0)
    assert simulate(loads, "static", cluster=cluster_of(), model=MODEL, setting=none).policies[0].timeline == ()


def test_memory_counts_replica_slots_and_received_rows(simulated):
    by_name = {result.policy: result.memory for result in simulated.policies}
    assert by_name["static"].replicas_bytes == by_name["balanced"].replicas_bytes == 0
    each = 2 * MODEL.expert_bytes
    assert by_name["equipoise"].replicas_bytes == 2 * each + 4 * MODEL.expert_bytes
    assert by_name["eplb-oracle"].replicas_bytes == MODEL.layers * each
    assert by_name["equipoise"].received_bytes_X.max() < by_name["static"].received_bytes_X.max()


def test_the_document_is_plain_json(simulated):
    document = simulated.to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["format"] == "equipoise-simulation-1"
    ours = next(entry for entry in document["policies"] if entry["policy"] == "equipoise")
    assert ours["speedup"] > 1 > ours["of_balanced"] > 0.8
    assert 0 < ours["expert_share"] < 1
    assert ours["step_speedup"] < ours["speedup"]
    assert sum(v for k, v in ours["seconds"].items() if k != "total") == pytest.approx(ours["seconds"]["total"])


def test_ratios_are_null_where_what_they_compare_with_was_not_simulated(loads):
    document = simulate(loads, "equipoise", cluster=cluster_of(), model=MODEL).to_dict()
    assert document["policies"][0]["of_balanced"] is None
    assert document["policies"][0]["speedup"] is None


def test_same_input_same_result(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    one, other = (simulate(loads, "equipoise", **given).to_dict() for _ in range(2))
    threaded = simulate(loads, "equipoise", options=PlanOptions(workers=2), **given).to_dict()
    assert one == other == threaded


def test_progress_ends_at_its_total(loads):
    seen = []
    simulate(
        [loads, loads],
        ["static", "balanced"],
        cluster=cluster_of(),
        model=MODEL,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_simulate_is_a_verb_of_the_package(loads):
    assert eq.simulate(loads, cluster=cluster_of(), model=MODEL).policies[0].policy == "equipoise"


def test_history_is_an_earlier_step_or_the_first_half(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    own = simulate(loads, "eplb-history", **given)
    half = simulate(loads, "eplb-history", history=loads.micro_steps(0, 2), **given)
    other = simulate(loads, "eplb-history", history=skewed_loads(9), **given)
    assert own.policies[0].seconds == half.policies[0].seconds
    assert other.policies[0].seconds.experts > own.policies[0].seconds.experts
    assert any("first half" in note for note in own.notes)
    assert any("earlier step" in note for note in other.notes)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"how": "magic"}, InfeasiblePlanError, "no policy 'magic'"),
        ({"how": []}, InfeasiblePlanError, "nothing to simulate"),
        ({"loads": []}, LoadsError, "no windows"),
        ({"loads": [[]]}, LoadsError, "without EP groups"),
        ({"slots": -1}, InfeasiblePlanError, "slots is -1"),
        ({"stages": ("rollout",)}, LoadsError, "stages names 'rollout'"),
        ({"cluster": cluster_of(16)}, LoadsError, "8 source ranks, which do not fill EP groups of 16"),
        ({"model": MODEL.replace(layers=3)}, LoadsError, "4 layers of 16 experts"),
        ({"setting": StepSetting(pipeline_stages=5)}, InfeasiblePlanError, "5 pipeline stages"),
        ({"setting": StepSetting(shown=Shown(group=1))}, LoadsError, r"shown.group is 1; it must be from 0 to 0"),
        ({"setting": StepSetting(shown=Shown(micro_step=4))}, LoadsError, "shown.micro_step is 4"),
    ],
)
def test_what_users_get_wrong_is_named(loads, change, error, words):
    given = {"loads": loads, "how": "static", "cluster": cluster_of(), "model": MODEL, **change}
    with pytest.raises(error, match=words):
        simulate(given.pop("loads"), given.pop("how"), **given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"how": ["static", "magic"]}, "no policy 'magic'; known: equipoise, static"),
        ({"how": ["static", "static"]}, "named twice"),
        (
            {"how": ["static", "eplb-history"], "history": LoadMatrix(np.ones((1, 3, 8, 16), dtype=np.int64))},
            "history has 3 layers of 16 experts, the step 4 of 16",
        ),
    ],
)
def test_what_stops_a_later_policy_is_named_before_the_first_is_replayed(loads, change, words):
    seen = []
    given = {"cluster": cluster_of(), "model": MODEL, "progress": lambda *counts: seen.append(counts), **change}
    with pytest.raises(EquipoiseError, match=words):
        simulate(loads, given.pop("how"), **given)
    assert seen == []


def test_plans_are_replayed_only_with_their_own_loads(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    made = plan(loads, **given)
    with pytest.raises(InfeasiblePlanError, match="made for other loads"):
        simulate(skewed_loads(1), made, **given)
    with pytest.raises(InfeasiblePlanError, match="1 plans were given for 2 windows"):
        simulate([loads, loads], made, **given)
    with pytest.raises(InfeasiblePlanError, match="cannot be cut into 2 pipeline stages"):
        simulate(loads, made, setting=StepSetting(pipeline_stages=2), **given)
    with pytest.raises(InfeasiblePlanError, match="given together"):
        simulate([loads, loads], [made, "static"], **given)
    with pytest.raises(InfeasiblePlanError, match="must be alike"):
        simulate([loads, loads], [made, plan(loads, policy="static", **given)], **given)


@pytest.mark.parametrize(
    "change", [{"rollout_s": -1.0}, {"planning_s": float("nan")}, {"pipeline_stages": 0}, {"activations": "some"}]
)
def test_settings_that_make_no_sense_are_refused(change):
    with pytest.raises(InfeasiblePlanError, match=f"StepSetting.{next(iter(change))}"):
        replace(StepSetting(), **change)


def test_a_short_first_micro_step_is_worth_a_word():
    loads = skewed_loads()
    assert loads.num_micro_steps == 4
    short = LoadMatrix(loads.load_MLRE * np.array([1, 4, 2, 2]).reshape(-1, 1, 1, 1), stage=loads.stage)
    for given, stages, told in ((loads, 1, False), (short, 1, True), (short, 2, False)):
        setting = StepSetting(pipeline_stages=stages)
        notes = simulate(given, "static", cluster=cluster_of(), model=MODEL, setting=setting).notes
        assert any("--longest-first" in note for note in notes) == told


def test_the_longest_micro_step_first_hides_publish_better():
    loads = skewed_loads(tokens=64)
    longest_first, shortest_first = (
        LoadMatrix(loads.load_MLRE[order] * np.array(times).reshape(-1, 1, 1, 1))
        for order, times in (([0, 1, 2, 3], [256, 1, 32, 64]), ([1, 2, 3, 0], [1, 32, 64, 256]))
    )
    exposed = [
        simulate(window, "equipoise", cluster=cluster_of(), model=MODEL).policies[0].seconds.publish
        for window in (longest_first, shortest_first)
    ]
    assert 0 < 4 * exposed[0] < exposed[1]


def test_tokens_sent_once_per_node_cost_less_across_and_rows_are_handed_on_inside(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    rows, tokens = (
        simulate(loads, ["static", "equipoise", "balanced"], setting=StepSetting(sends=sends), **given)
        for sends in ("rows", "tokens")
    )
    for one, other in zip(rows.policies, tokens.policies, strict=True):
        exchanged = [p.seconds.all_to_all_inside + p.seconds.all_to_all_across for p in (one, other)]
        assert exchanged[1] < exchanged[0]
        assert one.policy == "equipoise" or one.seconds.compute == other.seconds.compute
    assert any("DeepEP" in note for note in tokens.notes)
    # Plans are made for the way the engine sends.
    ours = plan(loads, slots=1, options=PlanOptions(sends="tokens"), **given)
    replayed = simulate(loads, [ours], setting=StepSetting(sends="tokens"), **given)
    assert tokens.policy("equipoise").seconds == replayed.policies[0].seconds


def test_a_later_window_starts_from_the_plan_before_as_a_run_would(loads):
    given = {"cluster": cluster_of(), "model": MODEL}
    found = simulate([loads, skewed_loads(1)], "equipoise", **given).policies[0]
    first = plan(loads, slots=1, **given)
    second = plan(skewed_loads(1), slots=1, warm=first, **given)
    for window, made in zip(found.windows, (first, second), strict=True):
        assert np.array_equal(window.after.rank_load_MR, made.rank_load_MLR.sum(axis=1))


@pytest.mark.parametrize(
    ("stage", "ranks_per_node", "cross_node", "policy", "told"),
    [
        ("recompute", 4, False, "equipoise", True),
        ("recompute", 4, True, "equipoise", False),
        ("recompute", 8, False, "equipoise", False),
        ("update", 4, False, "equipoise", True),
        ("recompute", 4, False, "static", False),
    ],
)
def test_a_step_says_where_replicas_could_cross_nodes(loads, stage, ranks_per_node, cross_node, policy, told):
    window = LoadMatrix(loads.load_MLRE, stage=stage)
    cluster, options = cluster_of(ranks_per_node=ranks_per_node), PlanOptions(cross_node=cross_node)
    notes = simulate([window], policy, cluster=cluster, model=MODEL, options=options).notes
    assert any("With --cross-node" in note for note in notes) == told
