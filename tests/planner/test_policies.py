"""Baselines: every one is a checked plan of the same loads, charged as its system would be."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.core import InfeasiblePlanError
from equipoise.core.split import split_rows
from equipoise.cost.work import REACTIVE_PLAN_NS, REACTIVE_PUSH_NS
from equipoise.loads import skew
from equipoise.planner import PlanOptions, plan
from equipoise.planner.baselines import POLICIES, cut_evenly
from tests.planner.cases import awkward_loads, cluster_of, model_of, skewed_loads

HEAVY = 2**18
"""Rows of a micro-step that make compute count for more than fixed costs."""


def made_by(policy, loads, *, slots=2, per_node=8, **more):
    history = loads if policy == "eplb-history" else None
    cluster = cluster_of(loads.num_ranks, per_node=per_node)
    return plan(loads, cluster=cluster, model=model_of(loads), slots=slots, policy=policy, history=history, **more)


@pytest.mark.parametrize("slots", [0, 1, 3, 40])
@pytest.mark.parametrize("policy", POLICIES)
def test_quotas_of_every_policy_add_up_to_the_loads(policy, slots):
    loads = skewed_loads(1)
    made = made_by(policy, loads, slots=slots, per_node=4)
    assert made.policy == policy and (made.itinerary is not None) == (policy in ("lpt", "relibra"))
    for m, layer in np.ndindex(3, 2):
        quota_ER = made.quota_ER(m, layer)
        assert (quota_ER >= 0).all()
        assert (quota_ER.sum(axis=1) == loads.load_MLRE[m, layer].sum(axis=0)).all()
        assert (quota_ER.sum(axis=0) == made.rank_load_MLR[m, layer]).all()
        assert (made.split_RER(m, layer).sum(axis=2) == loads.load_MLRE[m, layer]).all()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name, loads", awkward_loads(), ids=[name for name, _ in awkward_loads()])
def test_awkward_loads_keep_every_row(name, loads, policy):
    made = made_by(policy, loads)
    assert (made.rank_load_MLR.sum(axis=-1) == loads.load_MLRE.sum(axis=(2, 3))).all()


def test_static_costs_its_own_static_seconds_and_has_contiguous_skew():
    loads = skewed_loads(2)
    made = made_by("static", loads)
    assert made.seconds.total == pytest.approx(made.static_seconds) and made.bytes.experts == 0
    ours = made.rank_load_MLR.max(axis=-1) / made.rank_load_MLR.mean(axis=-1)
    assert ours.mean() == pytest.approx(skew(loads).mean)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_policies_agree_on_what_contiguous_expert_parallelism_costs(policy):
    loads = skewed_loads(3)
    assert made_by(policy, loads).static_seconds == made_by("static", loads).static_seconds
    assert made_by("equipoise", loads).static_seconds == made_by("static", loads).static_seconds


@pytest.mark.parametrize("policy", [*POLICIES, "equipoise"])
@pytest.mark.parametrize("stage", ["update", "recompute"])
def test_balanced_is_the_ceiling(policy, stage):
    for seed in range(3):
        loads = skewed_loads(seed, ranks=16, rows=HEAVY, stage=stage)
        ceiling, made = made_by("balanced", loads), made_by(policy, loads)
        assert (made.rank_load_MLR.max(axis=-1) >= ceiling.rank_load_MLR.max(axis=-1)).all()
        assert made.seconds.compute >= ceiling.seconds.compute
        assert made.seconds.total >= ceiling.seconds.total


def test_lpt_packs_experts_by_the_windows_loads_and_replicates_none():
    loads = skewed_loads(3, ranks=8, experts=32, rows=HEAVY)
    made = made_by("lpt", loads, per_node=4)
    assert len(made.replica_table) == 0
    for load_E, home_E in zip(loads.load_MLRE.sum(axis=(0, 2)), made.home_LE, strict=True):
        # By hand: the heaviest expert left goes to the lightest rank that has room.
        load_R, homes_R, expected_E = [0] * 8, [0] * 8, {}
        for e in sorted(range(32), key=lambda e: (-load_E[e], e)):
            light = min(load for load, homes in zip(load_R, homes_R, strict=True) if homes < 4)
            choice = [r for r in range(8) if homes_R[r] < 4 and load_R[r] == light]
            rank = min(choice, key=lambda r: (sum(load_R[r // 4 * 4 : r // 4 * 4 + 4]), r))
            expected_E[e] = rank
            load_R[rank] += int(load_E[e])
            homes_R[rank] += 1
        assert [expected_E[e] for e in range(32)] == home_E.tolist()
    static = made_by("static", loads, per_node=4)
    assert made.seconds.compute < static.seconds.compute and made.seconds.publish > 0


def test_balanced_parts_differ_by_at_most_a_row():
    quota_MER = cut_evenly(np.array([[5, 0, 7, 1], [0, 0, 0, 2]]), 3)
    assert quota_MER.sum(axis=1).tolist() == [[4, 4, 5], [0, 1, 1]]
    assert quota_MER[0].tolist() == [[4, 1, 0], [0, 0, 0], [0, 3, 4], [0, 0, 1]]


def test_reactive_plans_and_pushes_in_the_open():
    loads = skewed_loads(4, rows=HEAVY)
    charged, free = made_by("reactive", loads), made_by("reactive-free", loads)
    used = sum(bool(charged.replicas(m, layer)) for m, layer in np.ndindex(3, 2))
    assert used > 0
    assert charged.seconds.planning == pytest.approx(6 * REACTIVE_PLAN_NS * 1e-9)
    assert charged.seconds.pull == pytest.approx(used * REACTIVE_PUSH_NS * 1e-9)
    assert free.seconds.planning == free.seconds.pull == 0
    assert free.seconds.total < charged.seconds.total < charged.static_seconds


def test_reactive_leaves_alone_what_would_not_pay_for_the_push():
    loads = skewed_loads(4, rows=2**10)
    assert len(made_by("reactive", loads).replica_table) == 0
    assert len(made_by("reactive", loads, objective="skew").replica_table) > 0


def test_reactive_keeps_homes_at_owners_and_replicas_inside_nodes():
    loads = skewed_loads(5, ranks=16, rows=HEAVY)
    made = made_by("reactive-free", loads)
    assert not made.displaced_LE.any() and not made.cross_node and len(made.replica_table) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_no_baseline_changes_where_our_replicas_may_cross_nodes(policy):
    loads = replace(skewed_loads(5, ranks=16, rows=HEAVY), stage="recompute")
    inside, across = (
        made_by(policy, loads, options=PlanOptions(cross_node=cross, sends="rows")) for cross in (False, True)
    )
    assert across == inside


@pytest.mark.parametrize("policy", ["eplb-oracle", "lplb"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sends", ["rows", "tokens"])
def test_nearest_first_never_crosses_more_than_blind(policy, seed, sends):
    loads = skewed_loads(seed, ranks=16, rows=HEAVY)
    near, blind = (
        made_by(name, loads, per_node=4, options=PlanOptions(sends=sends)) for name in (policy, f"{policy}-blind")
    )
    node_R, fewer = near.cluster.node_array_R, 0
    is_far_RR = node_R[:, None] != node_R
    for m, layer in np.ndindex(3, 2):
        quota_ER, load_RE = blind.quota_ER(m, layer), loads.load_MLRE[m, layer]
        local_RER, drawn_RER = (split_rows(load_RE, quota_ER, node_R=node_R, in_proportion=p) for p in (False, True))
        assert np.array_equal(blind.split_RER(m, layer), drawn_RER)
        if policy == "eplb-oracle":
            # LPLB may choose other edges where crossing costs less.
            assert np.array_equal(near.quota_ER(m, layer), quota_ER)
            assert np.array_equal(near.split_RER(m, layer), local_RER)
        local_E, drawn_E = ((rows * is_far_RR[:, None]).sum(axis=(0, 2)) for rows in (local_RER, drawn_RER))
        assert (local_E <= drawn_E).all()
        fewer += int((drawn_E - local_E).sum())
    if policy == "eplb-oracle":
        # LPLB's edges may all stay in nodes, where either way crosses alike.
        assert fewer > 0
        assert near.bytes.all_to_all_across < blind.bytes.all_to_all_across
        assert near.seconds.total < blind.seconds.total


@pytest.mark.parametrize("policy", ["eplb-oracle", "lplb", "eplb-oracle-blind", "lplb-blind"])
def test_copies_that_stay_are_published_and_collected_once(policy):
    loads = skewed_loads(6, rows=HEAVY)
    made = made_by(policy, loads)
    longer = made_by(policy, type(loads)(np.concatenate([loads.load_MLRE] * 2)))
    assert made.seconds.publish > 0 and made.seconds.collect > made.seconds.publish
    assert made.seconds.pull == made.seconds.return_ == 0
    # The same copies serve a window twice as long for the same price.
    assert longer.seconds.publish == made.seconds.publish and longer.seconds.collect == made.seconds.collect
    assert longer.bytes.experts == made.bytes.experts > 0


def test_an_unknown_policy_is_refused_with_the_known_ones():
    loads = skewed_loads(0)
    with pytest.raises(InfeasiblePlanError, match=r"no policy 'moon'.*eplb-oracle"):
        made_by("moon", loads)
