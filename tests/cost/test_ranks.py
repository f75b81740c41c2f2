"""What every rank does agrees with the price of the busiest, and rows between ranks with the split."""

import numpy as np
from hypothesis import given, settings

from equipoise.core.split import split_in_proportion, split_rows
from equipoise.cost import kernels
from equipoise.cost.between import rows_between
from equipoise.cost.kernels import COLUMNS, COMPUTE, EXCHANGE
from equipoise.cost.links import kept_by_chance
from equipoise.cost.ranks import compute_ns_of, level_rows, rank_rows
from tests.cost.test_kernels import priced

few = settings(max_examples=60, deadline=None)


@given(priced())
@few
def test_the_busiest_rank_and_link_are_those_of_the_price_line(arguments):
    load_RE, home_E, node_R, expert_RS, rows_RS, keep_N, tables, persistent = arguments
    line = np.zeros(COLUMNS, dtype=np.int64)
    kernels.price(*arguments, line)
    forwards = tables.forwards == 1
    found = rank_rows(load_RE[None], home_E, node_R, expert_RS[None], rows_RS[None], keep_N, persistent, forwards)
    assert compute_ns_of(tables, found.rows_MR, found.busy_MR).max() == line[COMPUTE]
    busiest_ps = max(found.inside_M[0] * tables.inside_ps, found.across_M[0] * tables.across_ps)
    assert tables.exchanges * (tables.exchange_fixed_ns + busiest_ps // 1000) == line[EXCHANGE]
    assert found.rows_MR.sum() == load_RE.sum()


@given(priced())
@few
def test_rows_between_ranks_are_the_split_added_up_over_experts(arguments):
    load_RE, home_E, node_R, expert_RS, rows_RS, _, _, persistent = arguments
    quota_ER = np.zeros((len(home_E), len(node_R)), dtype=np.int64)
    quota_ER[np.arange(len(home_E)), home_E] = load_RE.sum(axis=0)
    for rank, slot in np.argwhere(rows_RS > 0):
        quota_ER[expert_RS[rank, slot], rank] += rows_RS[rank, slot]
        quota_ER[expert_RS[rank, slot], home_E[expert_RS[rank, slot]]] -= rows_RS[rank, slot]
    split = split_in_proportion(load_RE, quota_ER) if persistent else split_rows(load_RE, quota_ER, node_R=node_R)
    assert np.array_equal(rows_between(load_RE, quota_ER, node_R, persistent), split.sum(axis=1))


def test_level_ranks_compute_the_mean_and_send_everyone_the_same():
    load_MRE = np.zeros((2, 4, 8), dtype=np.int64)
    load_MRE[0, 1, 3], load_MRE[1] = 10, 1
    level = level_rows(load_MRE, np.array([0, 0, 1, 1]), np.array([1000, 1000]))
    assert level.rows_MR.tolist() == [[3] * 4, [8] * 4]
    # One expert of eight has rows, then all: what has none is not read.
    assert level.busy_MR.tolist() == [[1] * 4, [2] * 4]
    assert level.inside_M.tolist() == [2, 2]
    assert level.across_M.tolist() == [5, 4]
    assert level_rows(load_MRE, np.array([0, 0, 1, 1]), np.array([500, 500])).across_M.tolist() == [2, 2]


def test_tokens_that_are_sent_once_per_node_cross_less_often_than_rows():
    """Two experts of a node chosen by half of the tokens each: three quarters of them come, for one row on average."""
    assert kept_by_chance(np.array([10, 10, 20]), np.array([0, 0, 1]), 2, 2).tolist() == [750, 1000]
    assert kept_by_chance(np.array([0, 5, 15]), np.array([0, 1, 2]), 3, 1).tolist() == [1000, 1000, 1000]
    rng = np.random.default_rng(0)
    ids_TK = np.array([rng.permutation(64)[:8] for _ in range(4000)])
    node_E = np.arange(64) // 16
    came_N = [np.isin(node_E[ids_TK], node).any(axis=1).mean() for node in range(4)]
    rows_N = [(node_E[ids_TK] == node).sum() / 4000 for node in range(4)]
    kept_N = kept_by_chance(np.bincount(ids_TK.ravel(), minlength=64), node_E, 4, 8)
    assert np.allclose(kept_N / 1000, np.array(came_N) / rows_N, atol=0.03)


@given(priced())
@few
def test_rows_that_are_handed_on_inside_count_there(arguments):
    load_RE, home_E, node_R, expert_RS, rows_RS, keep_N, _, persistent = arguments
    given_rows = (load_RE[None], home_E, node_R, expert_RS[None], rows_RS[None], keep_N, persistent)
    plain, forwarded = (rank_rows(*given_rows, forwards) for forwards in (False, True))
    assert forwarded.inside_M[0] >= plain.inside_M[0]
    assert forwarded.across_M[0] == plain.across_M[0]
