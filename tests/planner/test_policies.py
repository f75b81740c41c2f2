"""Baselines: every one is a checked plan of the same loads, charged as its system would be."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.core import InfeasiblePlanError
from equipoise.cost.clock import REACTIVE_PLAN_NS, REACTIVE_PUSH_NS
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
    assert made.policy == policy and made.itinerary is None
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
    inside, across = (made_by(policy, loads, options=PlanOptions(cross_node=cross)) for cross in (False, True))
    assert across == inside


@pytest.mark.parametrize("policy", ["eplb-oracle", "lplb"])
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
