"""`split_rows`: sums hold and rows stay as near as they can."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.split import split_in_proportion, split_rows


@st.composite
def splits(draw):
    """(load_RE, quota_ER, node_R): each expert's rows dealt to random holders."""
    node_R = np.array(
        draw(st.sampled_from([(0,), (0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (2, 0, 1)]))
    )
    ranks, experts = len(node_R), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load_RE = rng.integers(0, draw(st.sampled_from([2, 20, 2**31])), size=(ranks, experts))
    if draw(st.booleans()):
        load_RE[0] = 0
    share_ER = rng.dirichlet(np.full(ranks, 0.5), size=experts)
    quota_ER = np.floor(share_ER * load_RE.sum(axis=0)[:, None]).astype(np.int64)
    quota_ER[:, -1] += load_RE.sum(axis=0) - quota_ER.sum(axis=1)
    return load_RE, quota_ER, node_R


@given(splits())
@settings(max_examples=100, deadline=None)
def test_sums_over_holders_give_the_load_and_over_sources_the_quota(case):
    load_RE, quota_ER, node_R = case
    for split in (split_rows(load_RE, quota_ER, node_R=node_R), split_in_proportion(load_RE, quota_ER)):
        assert split.dtype == np.int64 and split.min() >= 0
        assert np.array_equal(split.sum(axis=2), load_RE)
        assert np.array_equal(split.sum(axis=0), quota_ER)


@given(splits())
@settings(max_examples=100, deadline=None)
def test_no_row_leaves_its_rank_or_node_while_there_is_room(case):
    load_RE, quota_ER, node_R = case
    split = split_rows(load_RE, quota_ER, node_R=node_R)
    ranks = np.arange(len(node_R))
    assert np.array_equal(split[ranks, :, ranks], np.minimum(load_RE, quota_ER.T))
    for node in set(node_R.tolist()):
        inside = node_R == node
        stays_E = split[inside][:, :, inside].sum(axis=(0, 2))
        assert np.array_equal(stays_E, np.minimum(load_RE[inside].sum(axis=0), quota_ER[:, inside].sum(axis=1)))


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
    split = split_in_proportion(load_RE, quota_ER)[:, 0]
    slack = len(rows) + 1 + (total >> 30)
    assert (abs(split[:, 1] - factor * split[:, 0]) <= slack * factor).all()
