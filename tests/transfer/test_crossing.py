"""Replicas from other nodes in recompute windows: bits, what travels, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.core import TransferError
from equipoise.core.options import TransferOptions
from equipoise.core.plan import PATHS, Visit
from equipoise.transfer.engine import TransferEngine
from equipoise.transfer.host_store import check_crossings, crossings
from tests.transfer.play import Rank, play_windows, run_window
from tests.transfer.windows import HIDDEN, LAYOUTS, WIDTH, all_experts, owned_parameters, random_plan

EXPERT_BYTES = 4 * 3 * HIDDEN * WIDTH
ACROSS = {"slots": 2, "fewest": 1, "stage": "recompute", "cross_node": True}


def far_replicas(plan):
    """(layer, expert, rank) of replicas outside their home's node, with repetitions."""
    table, node_R = plan.replica_table, plan.cluster.node_R
    for p in range(len(table)):
        layer, expert, rank = int(table.entry_P[p]) % len(plan.home_LE), int(table.expert_P[p]), int(table.rank_P[p])
        if node_R[plan.home_LE[layer, expert]] != node_R[rank]:
            yield layer, expert, rank


@pytest.mark.parametrize("layout", ["2 as two nodes", "4 as two nodes", "4 strided", "8 strided"])
def test_exactly_what_a_node_pulls_from_another_is_brought_to_it_once(layout):
    node_R = LAYOUTS[layout]
    plan = random_plan(node_R, seed=3, micro_steps=4, **ACROSS)
    found = crossings(plan)
    assert len(set(found)) == len(found) < len(list(far_replicas(plan))), "several micro-steps need the same"
    wanted = {(layer, expert, node_R[rank]) for layer, expert, rank in far_replicas(plan)}
    assert {(crossing.layer, crossing.expert, node_R[crossing.target]) for crossing in found} == wanted
    assert len(found) == len(wanted)
    for layer, expert, source, slot, _ in found:
        assert (source, slot) == (plan.home_LE[layer, expert], plan.home_slot_LE[layer, expert])
    assert [crossing.layer for crossing in found] == sorted(crossing.layer for crossing in found)


@pytest.mark.parametrize("layout", [LAYOUTS["4 as two nodes"], LAYOUTS["8 strided"], (0, 0, 0, 0, 0, 1, 1, 1)])
def test_the_ranks_of_a_node_take_turns(layout):
    node_R = np.array(layout)
    plan = random_plan(layout, seed=3, micro_steps=4, **ACROSS)
    found = crossings(plan)
    for layer, node in {(crossing.layer, int(node_R[crossing.target])) for crossing in found}:
        targets = [crossing.target for crossing in found if crossing.layer == layer and node_R[crossing.target] == node]
        counts = np.bincount(targets, minlength=len(node_R))[node_R == node]
        assert len(counts) > 1 and counts.max() - counts.min() <= 1


def test_the_planner_charges_exactly_what_is_brought():
    # Not above: workers import this module, and must not import the planner's compiler.
    from equipoise.planner.layer import crossings as charged

    plan = random_plan(LAYOUTS["8 strided"], seed=3, micro_steps=4, **ACROSS)
    node_R, ranks = plan.cluster.node_array_R, plan.cluster.ep
    found = crossings(plan)
    for layer, home_E in enumerate(plan.home_LE):
        rep_expert_MRS = np.full((plan.loads.num_micro_steps, ranks, plan.slots), -1)
        for m in range(plan.loads.num_micro_steps):
            for expert, rank in plan.replicas(m, layer):
                rep_expert_MRS[m, rank, np.argmax(rep_expert_MRS[m, rank] < 0)] = expert
        needed = [crossing for crossing in found if crossing.layer == layer]
        brought = [
            np.bincount([getattr(crossing, side) for crossing in needed], minlength=ranks)
            for side in ("source", "target")
        ]
        assert np.array_equal(charged(rep_expert_MRS, home_E, node_R), brought)


def test_a_plan_inside_nodes_brings_nothing():
    assert crossings(random_plan((0, 0, 1, 1), seed=3, slots=2, fewest=1)) == []


@pytest.mark.dist(8)
@pytest.mark.parametrize(
    ("layout", "path"),
    [("4 as two nodes", "plan"), ("4 as two nodes", "host"), ("4 strided", "host"), ("8 as two nodes", "plan")],
)
def test_a_recompute_window_pulls_from_the_other_node_bit_for_bit(pool, layout, path):
    node_R = LAYOUTS[layout]
    plans = [random_plan(node_R, seed=1, **ACROSS), random_plan(node_R, seed=2, slots=2, fewest=1)]
    plans.append(random_plan(node_R, seed=3, **ACROSS))
    results = pool.run(play_windows, len(node_R), plans, {"transfer": {"path": path, "is_checked": True}})
    assert sum(moved["pulls"] for moved in results) > 0 and all(moved["on_demand"] == 0 for moved in results)
    assert all(moved["is_clean"] for moved in results)
    brought = sum(len(crossings(plan)) for plan in plans)
    # What changes nodes at a window's edges travels by the same crossing: weights, and gradients in update windows.
    edges = 0
    for plan in plans:
        owner = np.arange(plan.home_LE.shape[1]) // plan.home_slots
        nodes = np.array(node_R)
        moved = int((nodes[plan.home_LE] != nodes[owner]).sum())
        edges += moved * (2 if plan.loads.stage == "recompute" else 3)
    assert sum(moved["bytes"]["p2p"] for moved in results) == EXPERT_BYTES * (brought + edges)


@pytest.mark.dist(8)
@pytest.mark.parametrize("layout", ["2 as two nodes", "4 as two nodes", "4 strided", "8 as two nodes"])
def test_gradients_of_an_update_window_return_from_other_nodes_bit_for_bit(pool, layout):
    node_R = LAYOUTS[layout]
    sizes = {**ACROSS, "stage": "update", "slots": 1 if len(node_R) == 2 else 2}
    plans = [random_plan(node_R, seed=seed, order=order, **sizes) for seed, order in ((1, "plain"), (2, "1f1b"))]
    plans.append(random_plan(node_R, seed=3, slots=sizes["slots"]))
    results = pool.run(play_windows, len(node_R), plans, {})
    assert all(moved["is_clean"] and moved["on_demand"] == 0 for moved in results)
    # `play_windows` compares every gradient with the sum in rank order; this says that some crossed.
    assert sum(moved["returns"] for moved in results) == sum(len(plan.replica_table) for plan in plans)
    assert len(list(far_replicas(plans[0]))) > 0


def written_in_between(group, plan):
    """Weights change inside a recompute window, within `canonical`: what comes across afterwards is the new ones."""
    rank = Rank(group, plan)
    with rank.engine as engine:
        engine.open_window(plan)
        run_window(rank, plan, lambda: None)
        with engine.canonical():
            rank.update()
        engine.close_window()
        engine.open_window(plan)
        with engine.canonical():
            rank.update()
        run_window(rank, plan, lambda: None)
        engine.close_window()


@pytest.mark.dist(4)
def test_weights_that_change_inside_a_window_come_across_again(pool):
    pool.run(written_in_between, 4, random_plan((0, 0, 1, 1), seed=4, micro_steps=1, **ACROSS))


def refused(group, plan, options):
    homes = owned_parameters(all_experts(plan.home_LE.shape[1], len(plan.home_LE), 0), group.rank(), plan.home_slots)
    with TransferEngine(homes, group=group, node_R=plan.cluster.node_R, options=options) as engine:
        try:
            engine.open_window(plan)
        except TransferError as error:
            return str(error), engine._store is None
    return "", True


REFUSED = {
    "forced peer": ({}, {"path": "peer"}, "path 'host' does not reach; only the host store does"),
    "budget": ({}, {"store_bytes": 1000}, "host store: 8 experts in 3 layers need"),
}


@pytest.mark.dist(4)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_by_name_before_anything_is_made(pool, case):
    shape, transfer, wanted = REFUSED[case]
    plan = random_plan((0, 0, 1, 1), seed=4, **{**ACROSS, **shape})
    results = pool.run(refused, 4, plan, TransferOptions(slots=2, **transfer))
    assert any(wanted in words for words, _ in results)
    for words, has_no_store in results:
        assert wanted in words, words
        assert has_no_store


def test_a_far_pull_planned_by_peer_is_refused_by_name():
    plan = random_plan((0, 0, 1, 1), seed=4, **ACROSS)
    table = replace(plan.replica_table, path_P2=np.full_like(plan.replica_table.path_P2, PATHS.index("peer")))
    _, expert, rank = next(far_replicas(plan))
    words = f"the replica of expert {expert} .* path 'peer' does not reach"
    with pytest.raises(TransferError, match=words):
        check_crossings(replace(plan, replica_table=table), rank=rank, host_paths=("host",))


def backward_in_recompute(group, plan):
    rank = Rank(group, plan)
    with rank.engine as engine:
        engine.open_window(plan)
        try:
            rank.return_gradients(plan, Visit(0, "backward", 0))
        except TransferError as error:
            return str(error)
    return ""


@pytest.mark.dist(2)
def test_gradients_of_far_replicas_are_refused_by_name(pool):
    plan = random_plan((0, 1), seed=4, **{**ACROSS, "slots": 1})
    for words in pool.run(backward_in_recompute, 2, plan):
        assert "in another node; run backward in update windows only" in words
