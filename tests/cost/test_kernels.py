"""The compiled prices equal the plain ones to the nanosecond, on any holders."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, ModelShape
from equipoise.cost import CostModel, kernels, links
from equipoise.cost.kernels import ACROSS, COLUMNS, EXCHANGE, HOST_PULLS, INSIDE, PEER_PULLS, PULL, RETURN
from equipoise.cost.links import tokens_between
from tests.core.split_reference import split_in_proportion, split_rows
from tests.cost import reference
from tests.planner import problems

few = settings(max_examples=80, deadline=None)


@st.composite
def priced(draw):
    """Arguments of `price` without the line: any homes, replicas on any rank, any shares of their rows."""
    node_R = np.array(problems.LAYOUTS[draw(st.sampled_from(sorted(problems.LAYOUTS)))])
    ranks = len(node_R)
    experts = ranks * draw(st.integers(1, 3))
    load_RE = draw(problems.loads(1, ranks, experts))[0]
    home_E = draw(problems.homes(experts, ranks))
    slots = draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    expert_RS, rows_RS = np.full((ranks, slots), -1), np.zeros((ranks, slots), dtype=np.int64)
    left_E = load_RE.sum(axis=0)
    for r in range(ranks):
        strangers = rng.permutation(np.flatnonzero(home_E != r))[:slots]
        for j, e in enumerate(strangers[: rng.integers(0, slots + 1)]):
            expert_RS[r, j], rows_RS[r, j] = e, rng.integers(0, left_E[e] + 1)
            left_E[e] -= rows_RS[r, j]
    expert_RS[rows_RS == 0] = -1
    keep_N = rng.integers(1, 1001, size=node_R.max() + 1)
    stage, sends = draw(st.sampled_from(["update", "recompute"])), draw(st.sampled_from(["rows", "tokens"]))
    tables = problems.tables_of(ranks, experts, stage, min(2, experts), sends)
    tables = tables._replace(depth=draw(st.integers(0, 2)), host_ns=draw(st.sampled_from([1000, tables.host_ns])))
    return load_RE, home_E, node_R, expert_RS, rows_RS, keep_N, tables, draw(st.booleans())


@given(priced())
@settings(max_examples=150, deadline=None)
def test_a_price_line_equals_the_plain_one(arguments):
    ours, theirs = np.full(COLUMNS, -5), np.full(COLUMNS, -7)
    total = kernels.price(*arguments, ours)
    assert total == reference.price(*arguments, theirs)
    assert ours.tolist() == theirs.tolist()
    assert total == ours[:4].sum()


@given(priced())
@few
def test_without_replicas_nothing_is_charged_for_pulls_or_returns(arguments):
    load_RE, home_E, node_R, expert_RS, rows_RS, *rest = arguments
    line = np.zeros(COLUMNS, dtype=np.int64)
    kernels.price(load_RE, home_E, node_R, np.full_like(expert_RS, -1), np.zeros_like(rows_RS), *rest, line)
    assert line[[PULL, RETURN, HOST_PULLS, PEER_PULLS]].tolist() == [0, 0, 0, 0]


@given(priced())
@few
def test_exchanged_rows_equal_those_of_the_split(arguments):
    load_RE, home_E, node_R, expert_RS, rows_RS, keep_N, tables, persistent = arguments
    line = np.zeros(COLUMNS, dtype=np.int64)
    kernels.price(load_RE, home_E, node_R, expert_RS, rows_RS, np.full_like(keep_N, 1000), tables, persistent, line)
    quota_ER = reference.quotas(load_RE.sum(axis=0), home_E, expert_RS, rows_RS)
    local_RER = split_rows(load_RE, quota_ER, node_R=node_R)
    moved_RR = (split_in_proportion(load_RE, quota_ER) if persistent else local_RER).sum(axis=1)
    same_RR = node_R[:, None] == node_R[None, :]
    inside, across = moved_RR[same_RR].sum() - np.trace(moved_RR), moved_RR[~same_RR].sum()
    if tables.forwards:
        # What crosses is handed on, but for what its relay computes; a token goes once to each rank.
        assert -(-inside // tables.top_k) <= line[INSIDE] <= inside + across
        assert -(-across // tables.top_k) <= line[ACROSS] <= across
    else:
        assert line[[INSIDE, ACROSS]].tolist() == [inside, across]


@given(priced())
@few
def test_rows_for_each_node_equal_those_of_the_split(arguments):
    load_RE, home_E, node_R, expert_RS, rows_RS, _, _, persistent = arguments
    base = links.link_rows(load_RE, home_E, node_R, links.home_nodes(home_E, node_R), True)
    holders = links.Holders(home_E, links.nodes_of(node_R), expert_RS, rows_RS)
    quota_ER = reference.quotas(load_RE.sum(axis=0), home_E, expert_RS, rows_RS)
    local_RER = split_rows(load_RE, quota_ER, node_R=node_R)
    moved_RR = (split_in_proportion(load_RE, quota_ER) if persistent else local_RER).sum(axis=1)
    to_RN = np.stack([moved_RR[:, node_R == node].sum(axis=1) for node in range(node_R.max() + 1)], axis=1)
    assert np.array_equal(kernels.count_links(load_RE, base, holders, persistent).to_RN, to_RN)


@given(st.integers(0, 2**40), st.integers(0, 20))
@few
def test_compute_equals_the_cost_model(rows, slots):
    model = ModelShape.preset("qwen3-30b-a3b")
    cost = CostModel.of(Cluster.preset("h200"), model)
    assert kernels.compute_ns(cost.tables(20), rows, slots) == cost.compute_ns(rows, slots)


@pytest.mark.parametrize("rows", [2**31 * 256, 2**44 - 1], ids=["256 experts near 2^31", "more than ever"])
def test_compute_far_beyond_the_table_stays_in_its_integers(rows):
    cost = CostModel.of(Cluster.preset("h200"), ModelShape.preset("deepseek-v3"))
    assert kernels.compute_ns(cost.tables(16), rows, 16) == cost.compute_ns(rows, 16) > cost.compute_ns(rows // 2, 16)


@given(priced())
@few
def test_pulls_take_the_host_path_from_other_nodes_alone(arguments):
    load_RE, home_E, node_R, expert_RS, rows_RS, keep_N, tables, _ = arguments
    line = np.zeros(COLUMNS, dtype=np.int64)
    kernels.price(load_RE, home_E, node_R, expert_RS, rows_RS, keep_N, tables, False, line)
    rank_P, slot_P = np.nonzero(rows_RS)
    is_far_P = node_R[home_E[expert_RS[rank_P, slot_P]]] != node_R[rank_P]
    assert line[HOST_PULLS] == tables.phases * is_far_P.sum()
    assert line[PEER_PULLS] == tables.phases * (~is_far_P).sum()


def test_a_pull_in_time_costs_what_it_slows_the_slowest_rank():
    """Rank 1 takes half of expert 0's rows and so ends with rank 0; its pull makes it end later."""
    tables = problems.tables_of(4, 4)
    load_RE = np.zeros((4, 4), dtype=np.int64)
    load_RE[:, 0], load_RE[:, 1] = 40_000, 4
    expert_RS, rows_RS = np.full((4, 1), -1), np.zeros((4, 1), dtype=np.int64)
    line = np.zeros(COLUMNS, dtype=np.int64)
    for rows, slows in ((80_000, True), (8_000, False)):
        expert_RS[1, 0], rows_RS[1, 0] = 0, rows
        kernels.price(
            load_RE, np.arange(4), np.zeros(4, np.int64), expert_RS, rows_RS, np.array([1000]), tables, False, line
        )
        slowed = (tables.peer_ns + tables.peer_fixed_ns) * tables.peer_slow_permille // 1000
        assert line[PULL] == (2 * slowed if slows else 0), "forward and backward, if no other rank ends later anyway"


def test_the_first_visit_of_a_window_hides_its_pulls_behind_its_own_attention_alone():
    row_R = np.array([4000, 8000])
    for stage, phases in (("recompute", 1), ("update", 2)):
        tables = problems.tables_of(2, 4, stage)
        attention = 8000 // tables.top_k * tables.window_ps // 1000
        first, later = (kernels.windows_ns(row_R, 4, tables._replace(depth=depth)) for depth in (0, 1))
        assert first[0] == attention < later[0]
        assert first[1:] == later[1:], "backward comes after forward"
        assert tables.phases == phases


def test_the_busiest_link_sets_the_exchange():
    tables = problems.tables_of(4, 4)
    load_RE = np.zeros((4, 4), dtype=np.int64)
    load_RE[0, 1], load_RE[2, 1] = 30, 50
    arguments = np.arange(4), np.array([0, 0, 1, 1]), np.zeros((4, 0), np.int64), np.zeros((4, 0), np.int64)
    line = np.zeros(COLUMNS, dtype=np.int64)
    kernels.price(load_RE, *arguments, np.array([1000, 1000]), tables, False, line)
    assert line[[INSIDE, ACROSS]].tolist() == [30, 50]
    busiest_ps = max(30 * tables.inside_ps, 50 * tables.across_ps)
    assert line[EXCHANGE] == 4 * (tables.exchange_fixed_ns + busiest_ps // 1000)


def tokens_into(node, ids_TK, node_E):
    """Tokens that chose an expert of the node: what really crosses into it."""
    return int((node_E[ids_TK] == node).any(axis=1).sum())


@pytest.mark.parametrize("seed", range(5))
def test_kept_rows_are_exact_for_top_2_tokens(seed):
    rng = np.random.default_rng(seed)
    ids_TK = np.stack([rng.permutation(8)[:2] for _ in range(500)])
    node_E = rng.permutation(np.arange(8) % 2)
    pair_EE = np.zeros((8, 8), dtype=np.int64)
    for a, b in ids_TK:
        for e, f in ((a, a), (b, b), (a, b), (b, a)):
            pair_EE[e, f] += 1
    kept_N = links.kept_permille(node_E, 2, pair_EE, 2)
    assert kept_N.tolist() == reference.kept_permille(node_E, 2, pair_EE, 2).tolist()
    for node in range(2):
        rows = int((node_E[ids_TK] == node).sum())
        assert abs(rows * kept_N[node] / 1000 - tokens_into(node, ids_TK, node_E)) <= rows / 1000


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 16))
@few
def test_chances_are_the_plain_ones_and_between_the_fewest_tokens_and_every_row(rows, others, top_k):
    sent = rows + others
    tokens = links.tokens_to(rows, sent, top_k)
    assert tokens == reference.tokens_to(rows, sent, top_k)
    assert min(rows, 1) <= tokens <= min(rows, -(-sent // top_k))
    assert tokens <= links.tokens_to(rows + min(1, others), sent, top_k), "more rows, no fewer tokens"


def test_two_independent_choices_of_half_the_experts_reach_them_three_times_in_four():
    assert links.tokens_to(1000, 2000, 2) == 750
    assert links.tokens_to(2000, 2000, 2) == 1000
    assert links.tokens_to(700, 2000, 1) == 700


@pytest.mark.parametrize("skew", [0, 1])
def test_chances_are_near_the_tokens_that_really_cross(skew):
    rng = np.random.default_rng(0)
    weight_E = 1 / np.arange(1, 65) ** skew
    ids_TK = np.argsort(rng.exponential(size=(4000, 64)) / weight_E, axis=1)[:, :8]
    node_E = np.argsort(rng.random(64)) // 16
    for node in range(4):
        rows = int((node_E[ids_TK] == node).sum())
        assert links.tokens_to(rows, ids_TK.size, 8) == pytest.approx(tokens_into(node, ids_TK, node_E), rel=0.06)


def test_a_token_crosses_to_the_rank_with_its_sources_place():
    """Ranks 0 to 2 and 3 to 4 are a node each: the third rank of three has the first of two as its relay."""
    load_RE = np.zeros((5, 5), dtype=np.int64)
    load_RE[2] = [0, 0, 0, 500, 1500]
    tables = problems.tables_of(5, 5, sends="tokens")._replace(inside_ps=10**9, across_ps=10**9, top_k=2)
    arguments = np.arange(5), np.array([0, 0, 0, 1, 1]), np.zeros((5, 0), np.int64), np.zeros((5, 0), np.int64)
    line = np.zeros(COLUMNS, dtype=np.int64)
    kernels.price(load_RE, *arguments, np.array([1000, 1000]), tables, False, line)
    # Of 1,000 tokens a quarter of the choices is for rank 3, the relay, and the rest for rank 4.
    assert line[[INSIDE, ACROSS]].tolist() == [938, 1000]
    tokens_RR, handed_RR = reference.by_relay(
        np.where(np.arange(5)[:, None] == 2, load_RE, 0), load_RE.sum(axis=1), arguments[1], np.array([1000, 1000]), 2
    )
    assert tokens_RR[2].tolist() == [0, 0, 0, 1000, 0]
    assert handed_RR[3].tolist() == [0, 0, 0, 500, 1500]
    assert line[EXCHANGE] == tables.exchanges * (tables.exchange_fixed_ns + 1000 * 10**6)


@pytest.mark.parametrize(("top_k", "nodes"), [(8, 4), (6, 2), (1, 4)])
def test_one_more_row_for_a_node_costs_what_it_adds_to_the_tokens_that_cross(top_k, nodes):
    model = ModelShape.preset("qwen3-30b-a3b", top_k=top_k)
    cost = CostModel.of(Cluster.preset("h200", nodes=nodes, ranks_per_node=1), model, sends="tokens")
    sent, more = 8_000_000, 80_000
    added = links.tokens_to(sent // nodes + more, sent, top_k) - links.tokens_to(sent // nodes, sent, top_k)
    assert cost.crossing_permille == pytest.approx(1000 * added / more, rel=0.05, abs=1)
    assert CostModel.of(cost.cluster, model).crossing_permille == 1000


@pytest.mark.parametrize("nodes", [2, 4])
def test_pairs_lower_what_chance_says_where_experts_are_chosen_together_and_never_raise_it(nodes):
    rng = np.random.default_rng(0)
    node_E, none_EE = np.arange(64) * nodes // 64, np.zeros((0, 0), dtype=np.int64)
    tables = problems.tables_of(nodes, 64, sends="tokens")._replace(top_k=8)
    none_RS = np.zeros((nodes, 0), np.int64)
    apart_TK = np.stack([rng.permutation(64)[:8] for _ in range(1000)])
    inside_TK = np.stack([rng.permutation(64 // nodes)[:8] for _ in range(1000)])
    together_TK = inside_TK + rng.integers(0, nodes, size=(1000, 1)) * (64 // nodes)
    for ids_TK, is_lower in ((apart_TK, False), (together_TK, True)):
        chosen_TE = np.zeros((1000, 64), dtype=np.int64)
        np.put_along_axis(chosen_TE, ids_TK, 1, axis=1)
        pair_EE, load_RE = chosen_TE.T @ chosen_TE, np.zeros((nodes, 64), dtype=np.int64)
        load_RE[0] = chosen_TE.sum(axis=0)
        crossing = []
        for pairs in (none_EE, pair_EE):
            line, keep_N = np.zeros(COLUMNS, dtype=np.int64), links.kept_permille(node_E, nodes, pairs, 8)
            kernels.price(load_RE, node_E, np.arange(nodes), none_RS, none_RS, keep_N, tables, False, line)
            crossing.append(line[ACROSS])
        assert bool(crossing[1] < 0.8 * crossing[0]) is is_lower
        assert crossing[1] <= crossing[0]
        really = sum(tokens_into(node, ids_TK, node_E) for node in range(1, nodes))
        assert crossing[1] == pytest.approx(really, rel=0.1 if is_lower else 0.05)


def test_on_one_node_tokens_go_once_to_each_other_rank():
    """Even choices: what arrives is what ranks have for each other, and no more than the others' tokens."""
    for ranks in (2, 4, 8):
        tables = problems.tables_of(ranks, ranks, sends="tokens")._replace(top_k=8)
        load_RE, none_RS = np.full((ranks, ranks), 8000 // ranks), np.zeros((ranks, 0), np.int64)
        line = np.zeros(COLUMNS, dtype=np.int64)
        node_R = np.zeros(ranks, np.int64)
        kernels.price(load_RE, np.arange(ranks), node_R, none_RS, none_RS, np.array([1000]), tables, False, line)
        moved = tokens_between(load_RE, node_R, 8)
        assert line[INSIDE] == pytest.approx(moved.sum(), rel=0.01)
        assert line[INSIDE] <= ranks * (ranks - 1) * 1000


def test_nodes_of_one_rank_have_no_links_inside():
    tables = problems.tables_of(2, 2, sends="tokens")
    load_RE, none_RS = np.full((2, 2), 4000), np.zeros((2, 0), np.int64)
    line = np.zeros(COLUMNS, dtype=np.int64)
    kernels.price(load_RE, np.arange(2), np.arange(2), none_RS, none_RS, np.array([1000] * 2), tables, False, line)
    assert line[INSIDE] == 0 < line[ACROSS]


def test_without_pairs_every_row_crosses():
    none_EE, all_EE = np.zeros((0, 0), dtype=np.int64), np.ones((2, 2), dtype=np.int64)
    assert links.kept_permille(np.array([0, 1]), 2, none_EE, 8).tolist() == [1000, 1000]
    assert links.kept_permille(np.array([0, 0]), 1, all_EE, 1).tolist() == [1000]
