"""`split_rows`: sums hold and rows stay as near as they can."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.split import fill_levels, rows_between, split_rows
from equipoise.cost import links
from tests.core import split_reference

ANYWHERE = st.just(False)


@st.composite
def splits(draw, is_inside=ANYWHERE):
    """(load_RE, quota_ER, node_R): each expert's rows dealt to random holders, of any node or of one."""
    node_R = np.array(
        draw(st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (2, 0, 1)]))
    )
    ranks, experts = len(node_R), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load_RE = rng.integers(0, draw(st.sampled_from([2, 20, 2**31])), size=(ranks, experts))
    if draw(st.booleans()):
        load_RE[0] = 0
    share_ER = rng.dirichlet(np.full(ranks, 0.5), size=experts)
    if draw(is_inside):
        share_ER *= node_R[None, :] == rng.choice(node_R, size=experts)[:, None]
        share_ER /= share_ER.sum(axis=1, keepdims=True)
    quota_ER = np.floor(share_ER * load_RE.sum(axis=0)[:, None]).astype(np.int64)
    quota_ER[np.arange(experts), share_ER.argmax(axis=1)] += load_RE.sum(axis=0) - quota_ER.sum(axis=1)
    return load_RE, quota_ER, node_R


@given(splits())
@settings(max_examples=100, deadline=None)
def test_sums_over_holders_give_the_load_and_over_sources_the_quota(case):
    load_RE, quota_ER, node_R = case
    for in_proportion in (False, True):
        split = split_rows(load_RE, quota_ER, node_R=node_R, in_proportion=in_proportion)
        assert split.dtype == np.int64 and split.min() >= 0
        assert np.array_equal(split.sum(axis=2), load_RE)
        assert np.array_equal(split.sum(axis=0), quota_ER)


@given(splits(is_inside=st.booleans()))
@settings(max_examples=200, deadline=None)
def test_the_split_is_the_plain_one_apart_added_up_and_compiled(case):
    load_RE, quota_ER, node_R = case
    local_RER = split_reference.split_rows(load_RE, quota_ER, node_R=node_R)
    for in_proportion, wanted in ((False, local_RER), (True, split_reference.split_in_proportion(load_RE, quota_ER))):
        found = split_rows(load_RE, quota_ER, node_R=node_R, in_proportion=in_proportion)
        assert np.array_equal(found, wanted)
        for add_up in (rows_between, links.rows_between):
            assert np.array_equal(add_up(load_RE, quota_ER, node_R, in_proportion), wanted.sum(axis=1))


@given(splits())
@settings(max_examples=100, deadline=None)
def test_no_row_leaves_its_rank_or_node_while_there_is_room(case):
    load_RE, quota_ER, node_R = case
    split, ranks = split_rows(load_RE, quota_ER, node_R=node_R), np.arange(len(node_R))
    for expert in range(quota_ER.shape[0]):
        held_R = quota_ER[expert] - split[node_R != node_R[quota_ER[expert].argmax()], expert].sum(axis=0)
        # What holders in one node leave of their quota to rows of the node; elsewhere it is the whole quota.
        room_R = held_R if is_in_one_node(quota_ER[expert], node_R) else quota_ER[expert]
        assert np.array_equal(split[ranks, expert, ranks], np.minimum(load_RE[:, expert], room_R))
    for node in set(node_R.tolist()):
        inside = node_R == node
        stays_E = split[inside][:, :, inside].sum(axis=(0, 2))
        assert np.array_equal(stays_E, np.minimum(load_RE[inside].sum(axis=0), quota_ER[:, inside].sum(axis=1)))


def is_in_one_node(quota_R, node_R):
    """Whether an expert has several holders and all are in one node."""
    return (quota_R > 0).sum() > 1 and len(set(node_R[quota_R > 0].tolist())) == 1


def from_other_nodes(split, node_R):
    """[R] rows that each rank receives from other nodes."""
    return (split.sum(axis=1) * (node_R[:, None] != node_R[None, :])).sum(axis=0)


@given(splits(is_inside=st.booleans()))
@settings(max_examples=200, deadline=None)
def test_what_comes_from_other_nodes_is_more_even_and_no_more(case):
    load_RE, quota_ER, node_R = case
    pairs = zip(load_RE.T, quota_ER, strict=True)
    local = np.stack([split_reference.split_local_first(load, quota, node_R=node_R) for load, quota in pairs], axis=1)
    even = split_rows(load_RE, quota_ER, node_R=node_R)
    before_R, after_R = from_other_nodes(local, node_R), from_other_nodes(even, node_R)
    for node in set(node_R.tolist()):
        assert after_R[node_R == node].sum() == before_R[node_R == node].sum()
        assert after_R[node_R == node].max() <= before_R[node_R == node].max()
    for expert in range(quota_ER.shape[0]):
        if not is_in_one_node(quota_ER[expert], node_R):
            assert np.array_equal(even[:, expert], local[:, expert])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=6), st.data())
@settings(max_examples=200, deadline=None)
def test_levels_are_those_of_dealing_rows_one_by_one(holders, data):
    room_X, level_X = (np.array(column) for column in zip(*holders, strict=True))
    rows = data.draw(st.integers(0, int(room_X.sum())))
    share_X = np.zeros_like(room_X)
    for _ in range(rows):
        lowest = min(np.flatnonzero(share_X < room_X), key=lambda x: (level_X[x] + share_X[x], x))
        share_X[lowest] += 1
    assert dealt_shares(rows, room_X, level_X).tolist() == share_X.tolist()


def dealt_shares(rows, room_X, level_X):
    """[X] what `fill_levels` deals."""
    share_X = np.full_like(room_X, 7)
    fill_levels(rows, room_X, level_X.copy(), share_X, len(room_X))
    return share_X


def test_rows_from_other_nodes_go_to_the_holder_that_receives_least():
    # Rank 0 has expert 0 alone: 4 rows from other nodes. Of expert 1's 6 it has room for 2, and gets 1.
    load_RE, quota_ER = np.array([[0, 0], [0, 2], [2, 3], [2, 3]]), np.array([[4, 0, 0, 0], [2, 6, 0, 0]])
    split = split_rows(load_RE, quota_ER, node_R=np.array([0, 0, 1, 1]))
    assert split[:, 1].tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 2, 0, 0], [0, 3, 0, 0]]


@given(st.integers(0, 9999), st.integers(2, 4), st.sampled_from([3, 40, 5000, 2**31]))
@settings(max_examples=100, deadline=None)
def test_every_other_node_deals_its_rows_in_proportion(seed, nodes, high):
    """What a node has for one rank of another may share one link, so no holder gets all of one node's rows."""
    rng, node_R = np.random.default_rng(seed), np.repeat(np.arange(nodes), 3)
    load_RE = rng.integers(0, high, size=(len(node_R), 3))
    quota_ER = np.zeros((3, len(node_R)), dtype=np.int64)
    quota_ER[:, :3] = np.array(
        [dealt_shares(int(rows), np.full(3, rows), np.zeros(3, np.int64)) for rows in load_RE.sum(axis=0)]
    )
    split = split_rows(load_RE, quota_ER, node_R=node_R)
    for expert in range(3):
        far_NX = split[3:, expert, :3].reshape(nodes - 1, 3, 3).sum(axis=1)
        wanted_NX = far_NX.sum(axis=1, keepdims=True) * (far_NX.sum(axis=0) / max(1, far_NX.sum()))
        assert np.abs(far_NX - wanted_NX).max() <= nodes + high * 1e-8, "up to rounding, once a node"


def test_rows_stay_on_their_rank_where_a_sender_is_the_busiest_anyway():
    load_RE, quota_ER = np.array([[0, 0], [0, 2], [4, 6]]), np.array([[4, 0, 0], [2, 6, 0]])
    split = split_rows(load_RE, quota_ER, node_R=np.array([0, 0, 1]))
    assert split[:, 1].tolist() == [[0, 0, 0], [0, 2, 0], [2, 4, 0]]


def test_a_case_worked_out_by_hand():
    # Rank 0 keeps 2 of its 5 rows, gives 1 to rank 1 of its node, and the rest go to rank 2 across nodes.
    split = split_rows(np.array([[5], [1], [0]]), np.array([[2, 2, 2]]), node_R=np.array([0, 0, 1]))
    assert split[:, 0].tolist() == [[2, 1, 2], [0, 1, 0], [0, 0, 0]]


def test_a_quota_that_does_not_sum_to_the_load_is_our_mistake_and_said_so():
    with pytest.raises(AssertionError, match="expert 0: quota does not sum to its load"):
        split_rows(np.array([[5]]), np.array([[4]]), node_R=np.array([0]))


@given(st.lists(st.integers(0, 2**20), min_size=2, max_size=5), st.integers(1, 4), st.integers(0, 11))
@settings(max_examples=100, deadline=None)
def test_in_proportion_every_source_splits_alike(rows, factor, shift):
    """Two holders, one with `factor` times the other's quota: every source gives them rows in that ratio."""
    load_RE = np.array(rows, dtype=np.int64)[:, None] * (factor + 1) << shift
    total = int(load_RE.sum())
    quota_ER = np.zeros((1, len(rows)), dtype=np.int64)
    quota_ER[0, :2] = total // (factor + 1), total * factor // (factor + 1)
    node_R = np.zeros(len(rows), np.int64)
    split = split_rows(load_RE, quota_ER, node_R=node_R, in_proportion=True)[:, 0]
    slack = len(rows) + 1 + (total >> 30)
    assert (abs(split[:, 1] - factor * split[:, 0]) <= slack * factor).all()
