"""What every rank does agrees with the price of the busiest, and rows between ranks with the split."""

import numpy as np
from hypothesis import assume, given, settings

from equipoise.cost import kernels
from equipoise.cost.kernels import COLUMNS, COMPUTE, EXCHANGE
from equipoise.cost.links import rows_between
from equipoise.cost.window import compute_ns_of, level_work, rank_work
from tests.core.split_reference import split_in_proportion, split_rows
from tests.cost.test_kernels import priced

few = settings(max_examples=60, deadline=None)


@given(priced())
@few
def test_the_busiest_rank_and_link_are_those_of_the_price_line(arguments):
    load_RE, home_E, node_R, expert_RS, rows_RS, keep_N, tables, persistent = arguments
    line = np.zeros(COLUMNS, dtype=np.int64)
    kernels.price(*arguments, line)
    given_rows = (load_RE[None], home_E, node_R, expert_RS[None], rows_RS[None], keep_N, persistent)
    found = rank_work(*given_rows, tables.top_k, tables.forwards == 1)
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
    level = level_work(load_MRE, np.array([0, 0, 1, 1]), top_k=2, forwards=False)
    assert level.rows_MR.tolist() == [[3] * 4, [8] * 4]
    # One expert of eight has rows, then all: what has none is not read.
    assert level.busy_MR.tolist() == [[1] * 4, [2] * 4]
    assert level.inside_M.tolist() == [2, 2]
    assert level.across_M.tolist() == [5, 4]
    # First the one source's relay in the other node hands three of five rows on and computes two. Then sources have 4
    # tokens: 3 have experts in the other node. Two rows arrive at every rank from its neighbour, two from its relays.
    handed_on = level_work(load_MRE, np.array([0, 0, 1, 1]), top_k=2, forwards=True)
    assert handed_on.across_M.tolist() == [4, 3]
    assert handed_on.inside_M.tolist() == [3, 4]


@given(priced())
@few
def test_sources_alike_send_what_balanced_does(arguments):
    """Experts of one load each, as many in every node, chosen alike by all sources: nothing is left to balance."""
    node_R, tables = arguments[2], arguments[6]
    assume(len(set(np.bincount(node_R))) == 1)
    ranks = len(node_R)
    load_RE, none_R0 = np.full((ranks, ranks), 120), np.zeros((1, ranks, 0), dtype=np.int64)
    keep_N = np.full(node_R.max() + 1, 1000)
    way = {"top_k": tables.top_k, "forwards": tables.forwards == 1}
    found = rank_work(load_RE[None], np.arange(ranks), node_R, none_R0, none_R0, keep_N, False, *way.values())
    level = level_work(load_RE[None], node_R, **way)
    assert found.rows_MR.tolist() == level.rows_MR.tolist()
    assert found.across_M[0] == level.across_M[0]


@given(priced())
@few
def test_what_is_handed_on_inside_counts_there(arguments):
    load_RE, home_E, node_R, expert_RS, rows_RS, _, tables, persistent = arguments
    keep_N = np.full(node_R.max() + 1, 1000)
    given_rows = (load_RE[None], home_E, node_R, expert_RS[None], rows_RS[None], keep_N, persistent, tables.top_k)
    plain, forwarded = (rank_work(*given_rows, forwards) for forwards in (False, True))
    # A token with several experts at a rank goes there once.
    assert forwarded.inside_M[0] * tables.top_k >= plain.inside_M[0]
