"""The balancer as a whole, on ranks of their own: what is learnt, what stays as it was, what is said when it fails."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equipoise.balancer import in_plan_order
from equipoise.core import ModelShape, TopologyError
from tests.balancer import work
from tests.parity.case import ParityCase
from tests.parity.profile import write_slow_profile
from tests.parity.verdict import judge

SMALL = ParityCase(ranks=2, layers=2, tokens=12, home_slots=2)


COUNTED = ("displaced", "displaced_far", "replicas", "replicas_far", "trades")
# Every layout, and every number of slots on one node and on two.
MATRIX = [(1, 1, 1), (2, 1, 0), (2, 1, 1), (2, 1, 2), (4, 1, 1), (4, 2, 0), (4, 2, 1), (4, 2, 2), (8, 1, 1), (8, 2, 2)]
IDS = [f"EP{ranks} on {nodes} nodes, {slots} slots" for ranks, nodes, slots in MATRIX]


@pytest.mark.dist(8)
@pytest.mark.parametrize(("ranks", "nodes", "slots"), MATRIX, ids=IDS)
def test_balanced_training_learns_what_static_training_learns(pool, ranks, nodes, slots):
    case = ParityCase(ranks=ranks, nodes=nodes, slots=slots, steps=3, layers=2, tokens=128 // ranks)
    static, balanced, has_numba = zip(*pool.run(work.train_twice, ranks, case), strict=True)
    verdict = judge(case, static, balanced)
    assert verdict.has_moved
    assert [measure for measure in verdict.measures if not measure.is_good] == []
    assert not any(has_numba), "training processes must not import numba"
    if case.slots == 0:
        assert verdict.measures[-1].difference == 0.0, "placement alone changes no bit of any weight"
    digests = [[report.digest for report in training.reports] for training in balanced]
    assert all(one == digests[0] for one in digests)
    assert ranks == 1 or len(set(digests[0])) == 3, "windows of different loads have different plans"
    for report in (report for training in balanced for report in training.reports):
        assert report.static_s > 0 and report.predicted_s > 0
        assert report.dispatch == "prepared" and report.is_as_planned


@pytest.mark.dist(8)
@pytest.mark.parametrize(("ranks", "nodes", "slots"), MATRIX, ids=IDS)
def test_by_seconds_everything_that_pays_is_executed_and_learns_the_same(pool, tmp_path, ranks, nodes, slots):
    profile = write_slow_profile(tmp_path)
    sizes = {"ranks": ranks, "nodes": nodes, "slots": slots, "layers": 2, "tokens": 128 // ranks, "width": 8}
    case = ParityCase(**sizes, steps=3, profile=profile)
    static, balanced, _ = zip(*pool.run(work.train_twice, ranks, case), strict=True)
    assert [measure for measure in judge(case, static, balanced).measures if not measure.is_good] == []
    assert all(training.moves == balanced[0].moves for training in balanced)
    recompute, update = (
        {name: sum(getattr(moves, name) for moves in balanced[0].moves if moves.stage == stage) for name in COUNTED}
        for stage in ("recompute", "update")
    )
    total = {name: recompute[name] + update[name] for name in COUNTED}
    # What must occur, and no plan is told to make it occur: the gate opens where a plan pays.
    assert (update["displaced"] > 0) == (ranks > 1)
    assert (update["replicas"] > 0) == (recompute["replicas"] > 0) == (ranks > 1 and slots > 0)
    assert (update["displaced_far"] > 0) == (nodes > 1), "homes near their sources"
    assert total["trades"] > 0 or nodes == 1 or slots == 0
    assert (recompute["replicas_far"] > 0) == (update["replicas_far"] > 0) == (nodes > 1 and slots > 0)
    for report in (report for training in balanced for report in training.reports):
        assert report.predicted_s < report.static_s or ranks == 1
        assert report.dispatch == "prepared" and report.is_as_planned
    pulls = sum(report.counts["pulls"] for training in balanced for report in training.reports)
    assert pulls >= total["replicas"], "every planned replica was brought"


@pytest.mark.dist(4)
def test_by_seconds_nothing_moves_where_nothing_pays(pool):
    case = ParityCase(ranks=4, nodes=2, slots=2, steps=2, layers=2, tokens=32, profile="h200")
    for static, balanced, _ in pool.run(work.train_twice, 4, case):
        assert {(moves.displaced, moves.replicas) for moves in balanced.moves} == {(0, 0)}
        assert all(map(torch.equal, static.weights, balanced.weights)), "and no bit of any weight changes"


@pytest.mark.dist(2)
@pytest.mark.parametrize("best", ["off", "full"])
def test_what_does_not_pay_is_left_on_all_ranks_and_learns_the_same(pool, tmp_path, best):
    sizes = {"ranks": 2, "slots": 1, "layers": 2, "tokens": 64, "width": 8}
    case = ParityCase(**sizes, steps=14, profile=write_slow_profile(tmp_path))
    costs = {"full": 1.0, "placement": 1.1, "off": 0.8 if best == "off" else 1.2}
    static, adapted = zip(*pool.run(work.train_with_costs, 2, case, costs), strict=True)
    assert [measure for measure in judge(case, static, adapted).measures if not measure.is_good] == []
    ways, others = [[report.way for report in training.reports] for training in adapted]
    assert others == ways
    for stage in ("recompute", "update"):
        gone = [way for moves, way in zip(adapted[0].moves, ways, strict=True) if moves.stage == stage]
        assert gone[:8] == ["full"] * 8 and gone[9] == "off", "the first trial"
        assert gone[-1] == best
    for moves, way in zip(adapted[0].moves, ways, strict=True):
        assert (moves.displaced + moves.replicas > 0) == (way == "full")


@pytest.mark.dist(2)
def test_without_recordings_a_window_is_planned_from_what_the_windows_before_counted(pool):
    found = pool.run(work.without_recordings, 2, ParityCase(ranks=2, layers=2, tokens=48, home_slots=4))
    (*windows, refused), (*others, _) = found
    assert [report.digest for report, *_ in windows] == [report.digest for report, *_ in others]
    (first, *moved, is_same), *later = windows[::2]
    assert (first.estimated_share, moved, is_same) == (0.0, [0, 0], True), "nothing was counted yet"
    for report, displaced, replicas, is_same in later:
        assert report.estimated_share == 1.0 and displaced + replicas > 0 and is_same
        assert report.dispatch == "exchanged: rank 0 gave counted rows, not routes"
    for report, displaced, replicas, is_same in windows[1::2]:
        assert report.estimated_share == 0.0 and displaced + replicas > 0 and is_same
        assert report.dispatch == "prepared" and report.is_as_planned
    arrived = np.array([[report.arrived_ML for report, *_ in rank] for rank in (windows, others)])
    static, forecast = (arrived[:, at].max(axis=0).sum() for at in (0, 4))
    assert forecast < static, "the busiest rank has fewer rows than at the owners"
    assert "both routes and micro_steps" in refused


@pytest.mark.dist(2)
def test_two_runs_have_the_same_bits(pool):
    for first, second in pool.run(work.train_again, 2, SMALL):
        assert all(map(torch.equal, first, second))


@pytest.mark.dist(8)
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 1), (4, 2)], ids=["EP2 x 2", "EP4 x 2", "EP4 on 2 nodes x 2"])
def test_two_ep_groups_with_different_homes_learn_what_static_ones_learn(pool, ranks, nodes):
    case = ParityCase(ranks=ranks, nodes=nodes, layers=2, tokens=16)
    results = [found for found in pool.run(work.train_in_groups, 8, case, 3) if found is not None]
    for (static, _), (balanced, _) in results:
        for x, y in zip(static, balanced, strict=True):
            assert (x - y).abs().max() <= 1e-5 * x.abs().max()
    trained, digests = zip(*(balanced for _, balanced in results), strict=True)
    assert len(set(map(tuple, digests[:ranks]))) == len(set(map(tuple, digests[ranks:]))) == 1
    assert digests[0] != digests[ranks], "groups with the same plans show nothing"
    for owner in range(ranks):
        assert all(map(torch.equal, trained[owner], trained[owner + ranks])), "both groups keep the same weights"


@pytest.mark.dist(8)
def test_two_pipeline_stages_learn_what_static_ones_learn(pool):
    case = ParityCase(ranks=2, layers=4, tokens=16, micro_steps=4)
    results = [found for found in pool.run(work.train_in_stages, 8, case, 3) if found is not None]
    for (static, _, _), (balanced, report, on_demand) in results:
        assert report.replicas > 0
        assert on_demand == 0, "the itinerary foresees the order of each stage"
        for x, y in zip(static, balanced, strict=True):
            assert (x - y).abs().max() <= 1e-5 * x.abs().max()


@pytest.mark.dist(4)
@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
def test_parameters_may_be_offloaded_between_recompute_and_update_and_inside_a_window(pool, nodes):
    case = ParityCase(ranks=4, nodes=nodes, layers=2, tokens=12)
    moved, stayed = (pool.run(work.offload_between_stages, 4, case, is_offloaded) for is_offloaded in (True, False))
    for (outputs, grads, _), (wanted_outputs, wanted_grads, _) in zip(moved, stayed, strict=True):
        assert all(map(torch.equal, outputs, wanted_outputs))
        assert all(map(torch.equal, grads, wanted_grads))
    assert sum(pulls for _, _, pulls in moved) > 0


@pytest.mark.dist(2)
def test_disabled_is_byte_identical_to_never_seen(pool):
    for disabled, plain in pool.run(work.disabled_and_never_seen, 2, SMALL):
        assert disabled == plain
        assert pickle.loads(disabled)[0] == pickle.loads(disabled)[1], "a window must not change a weight"


@pytest.mark.dist(4)
@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
def test_owners_hold_their_experts_outside_windows_and_inside_canonical(pool, nodes):
    case = ParityCase(ranks=4, nodes=nodes, layers=2)
    results = pool.run(work.weights_in_a_window, 4, case)
    for weights, _ in results:
        for when in ("canonical", "after"):
            assert all(map(torch.equal, weights[when], weights["before"])), when
    displaced = [not all(map(torch.equal, weights["inside"], weights["before"])) for weights, _ in results]
    assert any(displaced), "a plan that displaces nothing shows nothing"
    reports = [report for _, report in results]
    assert sum(report.counts["publishes"] for report in reports) == reports[0].displaced
    assert sum(report.counts["collects"] for report in reports) == reports[0].displaced
    assert sum(report.counts["returns"] for report in reports) == reports[0].replicas > 0


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("another plan", "ranks [1] made another plan than rank 0"),
        ("a killed worker", "rank 1: could not plan: the planning process"),
        ("another window", "rank 1 has micro-steps, layers, experts and stage (1, 2, 4, 'update')"),
    ],
    ids=["another plan", "a killed worker", "another window"],
)
def test_trouble_while_planning_is_told_on_every_rank(pool, trouble, words):
    said = pool.run(work.window_errors, 2, SMALL, trouble)
    assert all(one is not None and words in one[1] for one in said), said
    assert said[0] == said[1]


@pytest.mark.dist(2)
def test_submit_returns_before_the_plan_is_made(pool):
    for reports in pool.run(work.plan_later, 2, SMALL):
        assert len({report.digest for report in reports}) == 2
        assert reports[0].waited_s > 0


@pytest.mark.dist(2)
def test_closing_does_not_wait_for_a_window_that_others_never_announce(pool):
    assert max(pool.run(work.close_alone, 2, SMALL)) < 30.0, "the bounds are 60 s, on planning 180 s"


@pytest.mark.dist(2)
def test_a_row_off_its_prepared_way_is_told_on_every_rank(pool):
    other, own = pool.run(work.mismatch, 2, SMALL)
    assert own == ("RoutesError", own[1]) and "layer index 1: 3 rows were routed otherwise than prepared" in own[1]
    assert other == ("RoutesError", other[1]) and "3 rows of other ranks" in other[1]


@pytest.mark.dist(1)
def test_a_balancer_says_whether_a_window_is_open(pool):
    assert pool.run(work.open_and_closed, 1, ParityCase(ranks=1, layers=1, tokens=4)) == [[False, True, False]]


@pytest.mark.dist(4)
@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
def test_a_completed_store_holds_the_owners_weights_and_is_refused_where_they_are_not(pool, nodes):
    results = pool.run(work.store_of_a_window, 4, ParityCase(ranks=4, nodes=nodes, layers=2, tokens=12))
    for layer in range(2):
        wanted = torch.cat([own[layer] for _, own, _ in results])
        assert all(torch.equal(kept[layer], wanted) for kept, _, _ in results)
    for _, _, (disabled, inside, suspended, moved) in results:
        assert "there is no host store" in disabled[1]
        assert "a window is open; close it" in inside[1]
        assert "the engine is suspended" in suspended[1]
        assert "layer index 0 gate_up_SFD: registered at" in moved[1]


@pytest.mark.dist(2)
def test_gradients_may_be_accumulated_elsewhere_and_in_another_dtype(pool):
    case = ParityCase(ranks=2, layers=2, tokens=12)
    plain, elsewhere = (pool.run(work.gradients_elsewhere, 2, case, is_elsewhere) for is_elsewhere in (False, True))
    assert plain[0][1] > 0, "a plan that displaces nothing shows nothing"
    for (wanted, _), (found, _) in zip(plain, elsewhere, strict=True):
        for x, y in zip(wanted, found, strict=True):
            assert (x - y).abs().max() <= 1e-6 * x.abs().max()


@pytest.mark.dist(2)
def test_a_window_that_could_not_end_is_still_open_and_can_be_ended(pool):
    for words, is_open, is_home in pool.run(work.end_in_vain, 2, SMALL):
        assert "layer index 0 gate_up_SFD: registered at" in words
        assert is_open == [True, False]
        assert is_home, "owners have their weights back"


@pytest.mark.dist(2)
def test_a_suspension_that_raises_is_over_all_the_same(pool):
    assert pool.run(work.suspended_in_vain, 2, SMALL) == [("the off-load failed", True)] * 2


@pytest.mark.dist(2)
def test_layers_are_attached_once_and_a_second_attachment_leaves_nothing_behind(pool):
    for (kind, words), is_clean, is_as_planned in pool.run(work.attach_twice, 2, SMALL):
        assert kind == "TopologyError" and "has 2 layers already, the first is `blocks.0.experts`" in words
        assert is_clean and is_as_planned


@pytest.mark.dist(2)
def test_a_worker_plans_for_one_balancer_at_a_time(pool):
    for (kind, words), is_as_planned in pool.run(work.one_worker_for_two, 2, SMALL):
        assert kind == "InfeasiblePlanError" and "plans for another balancer; close that one first" in words
        assert is_as_planned, "once the first has closed"


@pytest.mark.dist(4)
def test_recompute_may_take_replicas_from_other_nodes_with_the_same_bits(pool):
    case = ParityCase(ranks=4, nodes=2, slots=2, layers=2, tokens=40)
    results = pool.run(work.cross_nodes, 4, case)
    skews = []
    for across, inside, static in results:
        for outputs in (across[0], inside[0]):
            assert all(map(torch.equal, outputs, static[0]))
        assert "p2p" not in inside[1], "homes stay, and pulls end at the border"
    assert sum(across[1].get("p2p", 0) for across, *_ in results) > 0
    for which in range(2):
        load_RML = torch.stack([torch.from_numpy(found[which][2]) for found in results]).double()
        skews.append(float((load_RML.amax(0) / load_RML.mean(0)).mean()))
    assert skews[0] < skews[1], "without the node's border ranks are more level"


@pytest.mark.dist(1)
def test_calls_out_of_order_are_told(pool):
    (said,) = pool.run(work.misuse, 1, ParityCase(ranks=1, layers=1, tokens=4))
    nothing_attached, nothing_submitted, not_open, open_already = (words for _, words in said)
    assert "no layers are attached" in nothing_attached
    assert "no window was submitted" in nothing_submitted
    assert "no window is open" in not_open
    assert "a window is open; end it" in open_already


MODEL = ModelShape.preset("deepseek-v2-lite", layers=2)


def layers_at(*indices):
    return {f"blocks.{at}.experts": SimpleNamespace(layer=index) for at, index in enumerate(indices)}


def test_layers_are_ordered_by_what_they_are():
    assert list(in_plan_order(layers_at(1, 0), MODEL)) == ["blocks.1.experts", "blocks.0.experts"]


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ((0, 2), "`blocks.1.experts` is layer index 2"),
        ((1, 1), "`blocks.1.experts` and `blocks.0.experts` are both layer index 1"),
        ((0,), "no balanced experts were given for layer 2"),
    ],
    ids=["too high", "twice", "missing"],
)
def test_layers_that_do_not_fit_are_named_by_path_and_number(indices, words):
    with pytest.raises(TopologyError, match=words):
        in_plan_order(layers_at(*indices), MODEL)


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("zeroed", "rank 0: the gradient of `blocks.1.experts` gate_up was changed or replaced inside the window"),
        ("clipped", "rank 1: the gradient of `blocks.1.experts` down was changed or replaced inside the window"),
        ("assigned", "gate_up was changed or replaced inside the window"),
        ("visited twice", "micro-step 0, layer index 2: gradients handed in twice in one window; run a layer once"),
        ("retained and run twice", "micro-step 0, layer index 2: gradients handed in twice in one window; run a layer"),
    ],
)
def test_gradients_that_others_change_inside_a_window_are_named_on_every_rank(pool, how, words):
    said = [one for one, _, _ in pool.run(work.touch_gradients, 2, ParityCase(ranks=2), how)]
    assert {kind for kind, _ in said} == {"TransferError"}
    assert len({text for _, text in said}) == 1, said
    assert words in said[0][1]


@pytest.mark.dist(2)
def test_a_backward_that_retains_its_graph_gives_the_same_gradients(pool):
    case = ParityCase(ranks=2)
    plain, kept = (pool.run(work.touch_gradients, 2, case, how) for how in ("nothing", "retained"))
    for (said, wanted, displaced), (also_said, gradients, _) in zip(plain, kept, strict=True):
        assert said is None and also_said is None
        assert displaced > 0
        assert all(map(torch.equal, wanted, gradients))
