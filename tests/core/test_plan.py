"""`Plan`: what it promises, and that nothing which breaks a promise can be constructed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix
from equipoise.core.plan import Bytes, Replica, ReplicaTable, Seconds
from tests.core.plans import EXPERTS, LAYERS, MICRO_STEPS, MODEL, RANKS, itinerary_of, parts, plan_of, table_of

OWNER_E = np.arange(EXPERTS) // 2
DIGEST = "411bf09c00e15be899c135745199dbb05127360e164f33fa77560cbbcfcb3865"
"""Of `plan_of()`, as it was before plans had waves."""


def homes(**moved):
    """[L, E] homes at their owners but for experts `e<id>` of layer 0."""
    home_LE = np.stack([OWNER_E, OWNER_E])
    for name, rank in moved.items():
        home_LE[0, int(name[1:])] = rank
    return home_LE


def test_a_right_plan_answers():
    plan = plan_of()
    load_E = plan.loads.total_MLE()[0, 1]
    assert plan.replicas(0, 1) == (Replica(expert=0, rank=1),)
    assert plan.replicas(0, 0) == plan.replicas(1, 1) == ()
    quota = plan.quota_ER(0, 1)
    assert quota.dtype == np.int64 and quota.shape == (EXPERTS, RANKS)
    assert quota[0].tolist() == [load_E[0] - 3, 3, 0, 0]
    assert plan.owner_E.tolist() == OWNER_E.tolist()
    assert not plan.displaced_LE.any()
    assert plan.saved_seconds == pytest.approx(0.75e-6)


def test_rank_loads_are_the_sums_of_the_quotas():
    plan = plan_of()
    for m in range(MICRO_STEPS):
        for layer in range(LAYERS):
            assert plan.rank_load_MLR[m, layer].tolist() == plan.quota_ER(m, layer).sum(axis=0).tolist()


def test_known_rows_are_divided_as_the_planned_ones_and_quotas_add_up_to_either():
    plan = plan_of()
    planned_E = plan.loads.total_MLE()[0, 1]
    rng = np.random.default_rng(0)
    for known_E in (planned_E, np.zeros_like(planned_E), *(rng.integers(0, planned_E + 1) for _ in range(20))):
        quota_ER = plan.quota_ER(0, 1, known_E=known_E)
        assert quota_ER.sum(axis=1).tolist() == known_E.tolist()
        assert (quota_ER <= plan.quota_ER(0, 1)).all()
        exact_ER = plan.quota_ER(0, 1) * known_E[:, None] / np.maximum(planned_E, 1)[:, None]
        assert np.abs(quota_ER - exact_ER).max() < 2, "in proportion, to the rounded row"
    assert np.array_equal(plan.quota_ER(0, 1, known_E=planned_E), plan.quota_ER(0, 1))
    with pytest.raises(InfeasiblePlanError, match="each of the 8 experts at most its planned rows"):
        plan.quota_ER(0, 1, known_E=planned_E + 1)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_quotas_and_splits_sum_to_the_loads_whatever_the_replicas(data):
    load = data.draw(st.integers(0, 2**32 - 1).map(lambda s: np.random.default_rng(s).integers(0, 9, (2, 2, 4, 8))))
    node_R = data.draw(st.sampled_from([(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0), (0, 0, 0, 1)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    replicas = []
    for m in range(2):
        for layer in range(2):
            left_E = load[m, layer].sum(axis=0)
            for rank in range(4):
                expert = int(rng.integers(8))
                near = node_R[OWNER_E[expert]] == node_R[rank] and OWNER_E[expert] != rank
                if near and left_E[expert] > 0:
                    rows = int(rng.integers(1, left_E[expert] + 1))
                    left_E[expert] -= rows
                    replicas.append((m, layer, expert, rank, rows))
    cluster = Cluster.preset("h200", node_R=node_R)
    plan = plan_of(loads=LoadMatrix(load), cluster=cluster, replica_table=table_of(*replicas))
    for m in range(2):
        for layer in range(2):
            quota, split = plan.quota_ER(m, layer), plan.split_RER(m, layer)
            assert quota.min() >= 0 and split.min() >= 0
            assert np.array_equal(quota.sum(axis=1), load[m, layer].sum(axis=0))
            assert np.array_equal(split.sum(axis=2), load[m, layer])
            assert np.array_equal(split.sum(axis=0), quota)


CLASH = homes(e0=1)
SWAPPED_SLOT = np.tile(np.arange(EXPERTS) % 2, (LAYERS, 1))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"home_LE": CLASH}, "layer index 0: two experts have their home in slot 0 of rank 1"),
        ({"home_LE": homes(e0=4)}, "must name ranks 0..3"),
        ({"home_LE": homes(e0=-1)}, "must name ranks 0..3"),
        ({"home_slot_LE": SWAPPED_SLOT + 1}, "must name slots 0..1"),
        ({"home_LE": homes()[:1]}, r"home_LE has shape \(1, 8\), expected \(2, 8\)"),
        ({"home_LE": homes().astype(float)}, "home_LE must hold integers"),
        ({"ns_ML": np.zeros((1, 1), dtype=np.int64)}, "ns_ML has shape"),
        ({"slots": 0}, "rank 1 holds 1 replicas; slots=0 allows fewer"),
        ({"slots": -1}, "slots is -1"),
        ({"waves": 0}, "waves is 0; it must be from 1 to 8"),
        ({"waves": 1.5}, "waves must be a whole number"),
        ({"replica_table": table_of((0, 1, 0, 1, 3), (0, 1, 1, 1, 1))}, "rank 1 holds 2 replicas"),
        ({"replica_table": table_of((0, 1, 0, 0, 3))}, "expert 0 on rank 0 is on the rank of its own home"),
        ({"replica_table": table_of((1, 0, 0, 2, 3))}, "micro-step 1, layer index 0: .* leaves its home's node"),
        ({"replica_table": table_of((0, 0, 0, 1, 0))}, "takes no row"),
        ({"replica_table": table_of((0, 0, 0, 1, -4))}, "takes no row"),
        ({"replica_table": table_of((0, 0, 0, 1, 10**6))}, "replicas of expert 0 take more rows than it has"),
        ({"replica_table": table_of((0, 0, 0, 1, 1), (0, 0, 0, 1, 1)), "slots": 2}, "listed twice"),
        ({"replica_table": table_of((0, 0, 8, 1, 1))}, "must name experts 0..7"),
        ({"replica_table": table_of((0, 0, -1, 1, 1))}, "must name experts 0..7"),
        ({"replica_table": table_of((0, 0, 0, 4, 1))}, "names rank 4; ranks are 0..3"),
        ({"replica_table": table_of((0, 0, 0, -1, 1))}, "names rank -1; ranks are 0..3"),
        ({"replica_table": ReplicaTable.empty(3)}, "does not cover every micro-step and layer"),
        ({"cluster": Cluster.preset("h200", ep=8)}, "loads have 4 ranks, the EP group 8"),
        ({"model": MODEL.replace(experts=16)}, "loads have 2 layers of 8 experts, 'qwen3-30b-a3b' has 2 of 16"),
        ({"model": MODEL.replace(layers=3)}, "loads have 2 layers of 8 experts, 'qwen3-30b-a3b' has 3 of 8"),
        ({"itinerary": itinerary_of((0, 0, 0), (0, 0, 1), (1, 0, 0))}, "visited exactly once per phase"),
        ({"itinerary": itinerary_of((0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1))}, "visited exactly once per phase"),
        ({"itinerary": itinerary_of((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 7))}, "visited exactly once per phase"),
        ({"itinerary": itinerary_of((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1))}, "visited exactly once per phase"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_that_breaks_a_promise_cannot_be_constructed(changed, words):
    with pytest.raises(InfeasiblePlanError, match=words):
        plan_of(**changed)


def test_cross_node_replicas_must_be_allowed():
    table = table_of((0, 0, 0, 2, 1))
    assert plan_of(replica_table=table, cross_node=True).replicas(0, 0) == (Replica(0, 2),)


def test_persistent_plans_may_mix_homes_and_replicas_up_to_all_slots():
    mixed = {"home_LE": homes(e0=1), "home_slot_LE": SWAPPED_SLOT.copy(), "persistent": True}
    mixed["home_slot_LE"][0, 0] = 2
    full_rank = table_of((0, 0, 0, 0, 1), (0, 0, 2, 0, 1))
    assert len(plan_of(replica_table=full_rank, **mixed).replicas(0, 0)) == 2
    with pytest.raises(InfeasiblePlanError, match="rank 1 holds 1 replicas"):
        plan_of(replica_table=table_of((0, 0, 1, 1, 1)), **mixed)


@pytest.mark.parametrize("place", [(2, 0), (0, 2), (-1, 0), (0, -1), (0.5, 0), (0, "1")], ids=str)
def test_an_entry_that_is_not_there_is_refused_by_name(place):
    plan = plan_of()
    for ask in (plan.replicas, plan.quota_ER, plan.split_RER, plan.explain):
        with pytest.raises(InfeasiblePlanError, match=r"micro-steps 0..1 and layer indices 0..1"):
            ask(*place)


@pytest.mark.parametrize(
    "changed",
    [
        {"start_ML": np.array([0, 1, 1, 1])},
        {"start_ML": np.array([1, 1, 1, 1, 1])},
        {"start_ML": np.array([0, 1, 0, 1, 1])},
        {"path_P2": np.array([[0, 2]])},
        {"path_P2": np.array([[-1, 0]])},
        {"path_P2": np.array([[0]])},
        {"rows_P": np.array([1, 2])},
    ],
    ids=["too short", "not from 0", "falling", "unknown path", "negative path", "one path", "one row too many"],
)
def test_a_replica_table_that_contradicts_itself_is_refused(changed):
    one = np.array([0])
    right = {"start_ML": np.array([0, 1, 1, 1, 1]), "expert_P": one, "rank_P": one, "rows_P": one}
    with pytest.raises(InfeasiblePlanError):
        plan_of(replica_table=ReplicaTable(**{**right, "path_P2": np.zeros((1, 2), dtype=np.int64), **changed}))


@pytest.mark.parametrize("name", ["edge_ns_2L", "edge_slow_2L"])
def test_edges_have_a_publish_and_a_collect_per_layer_and_take_no_less_than_nothing(name):
    assert getattr(plan_of(), name).tolist() == [[0, 0], [0, 0]]
    assert getattr(plan_of(**{name: [[1, 2], [3, 4]]}), name).tolist() == [[1, 2], [3, 4]]
    for wrong, words in (
        (np.zeros((2, 3), dtype=np.int64), r"shape \(2, 3\), expected \(2, 2\)"),
        (np.zeros(2, dtype=np.int64), "2 axes"),
        (np.array([[0, 0], [0, -1]]), "holds -1"),
        (np.zeros((2, 2)), "must hold integers"),
    ):
        with pytest.raises(InfeasiblePlanError, match=f"{name}.*{words}"):
            plan_of(**{name: wrong})


def test_totals_are_the_sums_of_their_parts():
    seconds = Seconds(compute=1, all_to_all=2, pull=4, return_=8, publish=16, collect=32, planning=64)
    assert seconds.total == 127
    moved = Bytes(peer=1, host=2, edge_inside=4, edge_across=8, all_to_all_inside=16, all_to_all_across=32)
    assert (moved.experts, moved.total) == (15, 63)


def test_plans_are_equal_by_content_and_their_digest_follows_every_decision():
    assert plan_of() == plan_of()
    assert plan_of().digest() == plan_of().digest()
    others = [
        plan_of(replica_table=table_of((0, 1, 0, 1, 2))),
        plan_of(home_slot_LE=1 - parts()["home_slot_LE"]),
        plan_of(ns_ML=np.full((2, 2), 91)),
        plan_of(edge_ns_2L=np.array([[0, 1], [0, 0]])),
        plan_of(edge_slow_2L=np.array([[0, 1], [0, 0]])),
        plan_of(waves=2),
        plan_of(itinerary=itinerary_of(*np.ndindex(2, 2, 2))),
    ]
    assert all(other != plan_of() for other in others)
    assert len({plan_of().digest(), *(other.digest() for other in others[:6])}) == 7


def test_one_wave_leaves_the_digest_as_it_was_before_there_were_waves():
    assert plan_of(waves=1).digest() == DIGEST


def test_arrays_of_a_plan_cannot_be_written():
    plan = plan_of()
    for array in (plan.home_LE, plan.rank_load_MLR, plan.replica_table.rows_P):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_pulls_need_an_itinerary():
    with pytest.raises(InfeasiblePlanError, match="is not executed and has no itinerary"):
        plan_of().pulls(0, 0)
