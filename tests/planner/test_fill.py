"""`fill` and `rebalance_rows`: rows are kept, slots and nodes hold, and the split is the best for its replicas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from equipoise.planner import replicas
from tests.cost.reference import quotas
from tests.planner import fill_reference, problems
from tests.planner.reference import homes_by_rank

few = settings(max_examples=100, deadline=None)


@st.composite
def entries(draw):
    """(load_E, home_E, node_R, min_rows, slots, slack, crosses) of one (micro-step, layer)."""
    node_R = np.array(problems.LAYOUTS[draw(st.sampled_from(sorted(problems.LAYOUTS)))])
    experts = len(node_R) * draw(st.integers(1, 4))
    load_E = draw(problems.loads(1, 1, experts))[0, 0]
    home_E = draw(problems.homes(experts, len(node_R)))
    slots, slack = draw(st.sampled_from([0, 1, 2, experts + 2])), draw(st.sampled_from([0, 0, 8, 63, 64]))
    return load_E, home_E, node_R, draw(st.sampled_from([1, 1, 40])), slots, slack, draw(st.booleans())


def filled(fill, load_E, home_E, node_R, min_rows=1, slots=1, slack=0, crosses=False):
    """(busiest, rep_expert_RS, rep_rows_RS) after filling."""
    expert_RS, rows_RS = np.full((len(node_R), slots), 77), np.full((len(node_R), slots), 77)
    homes_RH = homes_by_rank(home_E, len(node_R))
    domain_DR = np.stack([node_R, np.zeros_like(node_R)][: 2 if crosses else 1])
    return fill(load_E, home_E, homes_RH, domain_DR, min_rows, slack, expert_RS, rows_RS), expert_RS, rows_RS


@given(entries())
@few
def test_compiled_fill_equals_the_plain_one(entry):
    ours, theirs = filled(replicas.fill, *entry), filled(fill_reference.fill, *entry)
    assert ours[0] == theirs[0]
    assert np.array_equal(ours[1], theirs[1])
    assert np.array_equal(ours[2], theirs[2])


@given(entries())
@few
def test_rows_are_kept_and_no_rank_gets_above_the_busiest_it_was(entry):
    load_E, home_E, node_R = entry[:3]
    busiest, expert_RS, rows_RS = filled(replicas.fill, *entry)
    quota_ER = quotas(load_E, home_E, expert_RS, rows_RS)
    assert quota_ER.min() >= 0
    assert np.array_equal(quota_ER.sum(axis=1), load_E)
    load_R = quota_ER.sum(axis=0)
    closed_R = np.array([load_E[home_E == r].sum() for r in range(len(node_R))])
    assert busiest == load_R.max() <= closed_R.max()
    domain_R = np.zeros_like(node_R) if entry[-1] else node_R
    assert busiest >= replicas.node_bound(closed_R, domain_R) == fill_reference.node_bound(closed_R, domain_R)


@given(entries())
@few
def test_replicas_stay_in_the_node_off_their_home_and_are_never_doubled_or_idle(entry):
    home_E, node_R, crosses = entry[1], entry[2], entry[-1]
    _, expert_RS, rows_RS = filled(replicas.fill, *entry)
    assert np.array_equal(expert_RS >= 0, rows_RS > 0)
    for rank, held in enumerate(expert_RS):
        experts = held[held >= 0]
        assert len(set(experts.tolist())) == len(experts)
        assert (home_E[experts] != rank).all()
        assert crosses or (node_R[home_E[experts]] == node_R[rank]).all()


@given(entries())
@few
def test_the_split_is_the_best_for_its_replicas_to_the_row(entry):
    load_E, home_E, node_R, *limits = entry
    if load_E.sum() > 2**30:
        load_E = load_E >> 20
    busiest, expert_RS, _ = filled(replicas.fill, load_E, home_E, node_R, *limits)
    holders = [(e, int(home_E[e])) for e in range(len(load_E))]
    holders += [(int(expert_RS[r, j]), int(r)) for r, j in np.argwhere(expert_RS >= 0)]
    assert busiest == optimum(load_E, holders, len(node_R))


def optimum(load_E, holders, ranks):
    """The least busiest rank over all splits on these holders: the LP's value, rounded up."""
    count = len(holders)
    above = np.zeros((ranks, count + 1))
    above[:, count] = -1
    equal = np.zeros((len(load_E), count + 1))
    for i, (expert, rank) in enumerate(holders):
        above[rank, i] = 1
        equal[expert, i] = 1
    aim = np.append(np.zeros(count), 1)
    found = linprog(aim, A_ub=above, b_ub=np.zeros(ranks), A_eq=equal, b_eq=load_E, method="highs")
    return int(np.ceil(round(found.fun, 6)))


def test_the_emptiest_rank_is_filled_exactly_from_one_expert_of_the_fullest():
    load_E, home_E, node_R = np.array([70, 30, 10, 10]), np.array([0, 0, 1, 1]), np.array([0, 0])
    busiest, expert_RS, rows_RS = filled(replicas.fill, load_E, home_E, node_R)
    assert (busiest, expert_RS.tolist(), rows_RS.tolist()) == (60, [[-1], [0]], [[0], [40]])


def test_a_replica_below_the_least_rows_is_not_made():
    load_E, home_E, node_R = np.array([52, 50]), np.array([0, 1]), np.array([0, 0])
    assert filled(replicas.fill, load_E, home_E, node_R, 1)[0] == 51
    assert filled(replicas.fill, load_E, home_E, node_R, 2)[0] == 52


def test_slack_leaves_replicas_out_but_uses_those_there_are_fully():
    # Above the bound of 60 stand 40 and 4 rows: with half of 40 allowed, only the first rank gives rows away.
    load_E, home_E, node_R = np.array([100, 64, 46, 30]), np.array([0, 1, 2, 3]), np.array([0, 0, 0, 0])
    assert (filled(replicas.fill, load_E, home_E, node_R)[1] >= 0).sum() > 1
    busiest, expert_RS, rows_RS = filled(replicas.fill, load_E, home_E, node_R, slack=32)
    assert (busiest, expert_RS.tolist(), rows_RS[3, 0]) == (65, [[-1], [-1], [-1], [0]], 35)


def test_the_bound_is_the_mean_of_the_fullest_node():
    assert replicas.node_bound(np.array([10, 11, 2, 2]), np.array([0, 0, 1, 1])) == 11
    assert replicas.node_bound(np.array([10, 2, 11, 2]), np.array([0, 1, 0, 1])) == 11
    assert replicas.node_bound(np.array([4, 9, 9]), np.array([0, 1, 1])) == 9


def test_only_what_a_node_cannot_level_crosses_to_another():
    # Node 0 has 240 rows, node 1 80: of 80 per rank, rank 0 keeps 80, gives 40 inside and 80 to the other node.
    load_E, home_E, node_R = np.array([200, 40, 60, 20]), np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1])
    busiest, expert_RS, rows_RS = filled(replicas.fill, load_E, home_E, node_R, slots=1, crosses=True)
    assert busiest == 80
    assert expert_RS.tolist() == [[-1], [0], [0], [0]]
    assert rows_RS.tolist() == [[0], [40], [20], [60]]
    # Where the nodes are level, none does.
    level_E = np.array([120, 40, 100, 60])
    ours, inside = (filled(replicas.fill, level_E, home_E, node_R, crosses=crosses) for crosses in (True, False))
    assert ours[0] == inside[0] == 80
    assert np.array_equal(ours[1], inside[1])


def test_rebalancing_moves_rows_along_a_chain_of_holders():
    # Rank 0 shares expert 0 with rank 1, rank 1 shares expert 1 with rank 2: rank 2 can only be reached through rank 1.
    load_E, home_E, node_R = np.array([90, 60, 30]), np.array([0, 1, 2]), np.array([0, 0, 0])
    expert_RS, rows_RS = np.array([[-1], [0], [1]]), np.array([[0], [0], [0]])
    load_R, quota_E = load_E.copy(), load_E.copy()
    replicas.rebalance_rows(load_R, quota_E, home_E, node_R, expert_RS, rows_RS, 60)
    assert load_R.tolist() == [60, 60, 60]
    assert rows_RS.tolist() == [[0], [30], [30]]


@pytest.mark.parametrize("slots", [0, 1, 5], ids="{} slots".format)
def test_no_load_needs_no_replica(slots):
    busiest, expert_RS, _ = filled(
        replicas.fill, np.zeros(4, np.int64), np.array([0, 0, 1, 1]), np.array([0, 0]), 1, slots
    )
    assert busiest == 0
    assert (expert_RS == -1).all()
