"""Trades: every rank computes as much as before, less crosses nodes, and the compiled ones equal the plain ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.cost.kernels import count_links
from equipoise.cost.links import Holders, home_nodes, link_rows, nodes_of
from equipoise.planner import layer, replicas
from equipoise.planner.replicas import fill
from tests.core.split_reference import split_rows
from tests.cost.reference import quotas
from tests.planner import problems, reference, trade_reference
from tests.planner.reference import homes_by_rank

few = settings(max_examples=100, deadline=None)
LAYOUTS = [name for name, node_R in problems.LAYOUTS.items() if max(node_R) > 0]


@st.composite
def entries(draw):
    """(load_RE, home_E, node_R, min_rows, rep_expert_RS, rep_rows_RS) of one filled (micro-step, layer)."""
    node_R = np.array(problems.LAYOUTS[draw(st.sampled_from(LAYOUTS))])
    experts = len(node_R) * draw(st.integers(1, 4))
    load_RE = draw(problems.loads(1, len(node_R), experts))[0]
    home_E = draw(problems.homes(experts, len(node_R)))
    slots, is_filled = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    expert_RS, rows_RS = np.full((len(node_R), slots), -1), np.zeros((len(node_R), slots), dtype=np.int64)
    if is_filled:
        domain_DR = np.stack([node_R, np.zeros_like(node_R)][: draw(st.integers(1, 2))])
        fill(load_RE.sum(axis=0), home_E, homes_by_rank(home_E, len(node_R)), domain_DR, 1, 0, expert_RS, rows_RS)
    return load_RE, home_E, node_R, draw(st.sampled_from([1, 1, 40])), expert_RS, rows_RS


def compiled_across(load_RE, home_E, node_R, min_rows, expert_RS, rows_RS):
    """`replicas.trade_across` with the arguments of the plain one."""
    base = link_rows(load_RE, home_E, node_R, home_nodes(home_E, node_R), False)
    holders = Holders(home_E, nodes_of(node_R), expert_RS, rows_RS)
    link_R4 = count_links(load_RE, base, holders, False).link_R4
    return replicas.trade_across(load_RE, base, holders, homes_by_rank(home_E, len(node_R)), link_R4, min_rows)


def compiled_inside(load_RE, home_E, node_R, min_rows, expert_RS, rows_RS):
    """`replicas.trade_inside` with the arguments of the plain one."""
    base = link_rows(load_RE, home_E, node_R, home_nodes(home_E, node_R), False)
    holders = Holders(home_E, nodes_of(node_R), expert_RS, rows_RS)
    link_R4 = count_links(load_RE, base, holders, False).link_R4
    return replicas.trade_inside(base, holders, homes_by_rank(home_E, len(node_R)), link_R4, min_rows)


TRADES = {
    "across": (compiled_across, trade_reference.trade_across),
    "inside": (compiled_inside, trade_reference.trade_inside),
}


def traded(trade, entry):
    """(whether anything was traded, rep_expert_RS, rep_rows_RS) after a trade on copies."""
    *given, expert_RS, rows_RS = entry
    tables = expert_RS.copy(), rows_RS.copy()
    return bool(trade(*given, *tables)), *tables


def across_RR(load_RE, home_E, node_R, expert_RS, rows_RS):
    """[R source, R holder] rows that cross nodes."""
    quota_ER = quotas(load_RE.sum(axis=0), home_E, expert_RS, rows_RS)
    return split_rows(load_RE, quota_ER, node_R=node_R).sum(axis=1) * (node_R[:, None] != node_R)


@pytest.mark.parametrize("kind", TRADES)
@given(entry=entries())
@few
def test_compiled_trades_equal_the_plain_ones(kind, entry):
    ours, theirs = (traded(trade, entry) for trade in TRADES[kind])
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", TRADES)
@given(entry=entries())
@few
def test_every_rank_computes_as_much_as_before_and_replicas_stay(kind, entry):
    load_RE, home_E, _, min_rows, *before = entry
    is_changed, *after = traded(TRADES[kind][0], entry)
    was_ER, now_ER = (quotas(load_RE.sum(axis=0), home_E, *tables) for tables in (before, after))
    assert now_ER.min() >= 0
    assert np.array_equal(now_ER.sum(axis=0), was_ER.sum(axis=0))
    stays_RS = before[0] >= 0
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(new[stays_RS], old[stays_RS])
    new_RS = (after[0] >= 0) & ~stays_RS
    assert is_changed == new_RS.any()
    assert (after[1][new_RS] >= min_rows).all()
    # An expert is traded once, and nobody gets what it holds anyway.
    assert len(set(after[0][new_RS])) == new_RS.sum() and not set(after[0][new_RS]) & set(before[0][stays_RS])
    assert (home_E[after[0][new_RS]] != np.nonzero(new_RS)[0]).all()


@given(entries())
@few
def test_what_is_traded_across_no_longer_crosses(entry):
    load_RE, home_E, node_R, _, *before = entry
    _, *after = traded(compiled_across, entry)
    new_RS = (after[0] >= 0) & (before[0] < 0)
    was, now = (int(across_RR(load_RE, home_E, node_R, *tables).sum()) for tables in (before, after))
    assert was - now == after[1][new_RS].sum()


@given(entries())
@few
def test_trades_inside_send_no_more_across_and_stay_in_the_node(entry):
    load_RE, home_E, node_R, _, *before = entry
    _, *after = traded(compiled_inside, entry)
    was_RR, now_RR = (across_RR(load_RE, home_E, node_R, *tables) for tables in (before, after))
    assert np.array_equal(now_RR.sum(axis=1), was_RR.sum(axis=1))
    rank, slot = np.nonzero((after[0] >= 0) & (before[0] < 0))
    assert np.array_equal(node_R[rank], node_R[home_E[after[0][rank, slot]]])


def test_two_nodes_take_each_others_experts_that_they_choose():
    # Node 0 chooses expert 5 most and node 1 expert 2, and these are at home in the other one.
    node_R, home_E = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1, 2, 2, 3, 3])
    load_RE = np.ones((4, 8), dtype=np.int64)
    load_RE[:2, 5], load_RE[2:, 2] = 30, 20
    expert_RS, rows_RS = np.full((4, 1), -1), np.zeros((4, 1), dtype=np.int64)
    before = across_RR(load_RE, home_E, node_R, expert_RS, rows_RS)
    assert compiled_across(load_RE, home_E, node_R, 5, expert_RS, rows_RS)
    assert expert_RS.T.tolist() == [[-1, 5, 2, -1]] and rows_RS.T.tolist() == [[0, 40, 40, 0]]
    after = across_RR(load_RE, home_E, node_R, expert_RS, rows_RS)
    assert before.sum() - after.sum() == 80


def test_a_rank_that_receives_most_from_other_nodes_trades_with_one_that_receives_least():
    # Rank 0 computes what node 1 chooses, rank 1 what node 0 chooses itself: as many rows, but rank 0's all cross.
    node_R, home_E = np.array([0, 0, 1, 1]), np.arange(4)
    load_RE = np.array([[0, 50, 20, 20], [0, 50, 20, 20], [50, 0, 30, 30], [50, 0, 30, 30]])
    tables = np.full((4, 1), -1), np.zeros((4, 1), dtype=np.int64)
    before = across_RR(load_RE, home_E, node_R, *tables)
    assert before.sum(axis=0).tolist() == [100, 0, 40, 40] and before.sum(axis=1).max() == 50
    assert compiled_inside(load_RE, home_E, node_R, 1, *tables)
    assert tables[0].T.tolist() == [[1, 0, -1, -1]] and tables[1].T.tolist() == [[50, 50, 0, 0]]
    after = across_RR(load_RE, home_E, node_R, *tables)
    assert after.sum(axis=0).tolist() == [50, 50, 40, 40]


def test_a_rank_that_has_nothing_from_near_is_passed_over():
    # Rank 0 receives most and rank 1 least, but rank 1 has no rows at all to give back; rank 2 has.
    node_R, home_E = np.array([0, 0, 0, 1, 1, 1]), np.arange(6)
    load_RE = np.zeros((6, 6), dtype=np.int64)
    load_RE[3:, 0], load_RE[:3, 2], load_RE[3, 2], load_RE[3:, 3:], load_RE[:3, 3:] = 60, 50, 10, 40, 10
    tables = np.full((6, 1), -1), np.zeros((6, 1), dtype=np.int64)
    assert compiled_inside(load_RE, home_E, node_R, 1, *tables)
    assert tables[0].T.tolist() == [[2, -1, 0, -1, -1, -1]]


LAYOUT_CASES = [
    ((0, 0, 0, 0, 1, 1, 1, 1), 2),
    ((0, 1, 0, 1, 0, 1, 0, 1), 2),
    ((0, 0, 1, 1, 2, 2, 3, 3), 3),
    ((0, 0, 0, 0, 0, 1, 1, 1), 2),
]


@pytest.mark.parametrize(("layout", "slots"), LAYOUT_CASES)
@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("crosses", [False, True])
def test_a_plan_trades_where_that_is_cheaper_compiled_and_plain(crosses, gated, layout, slots, monkeypatch):
    node_R, load_MRE, home_E = np.array(layout), loads_by_node(layout), np.arange(32) // 4
    problem, none_EE = problem_of(node_R, slots, gated, crosses), np.zeros((0, 0), dtype=np.int64)
    tables = problems.tables_of(8, 32, "recompute" if crosses else "update")
    given = load_MRE, home_E, none_EE, problem, tables
    ours, theirs = replicas.evaluate(*given), reference.evaluate(*given)
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert np.array_equal(a, b), name
    monkeypatch.setattr(reference, "_trades", lambda *_: iter(()))
    without = reference.evaluate(*given)
    assert ours.line_MC[:, :4].sum() < without.line_MC[:, :4].sum()
    assert (ours.rep_expert_MRS >= 0).sum() > (without.rep_expert_MRS >= 0).sum()


def loads_by_node(layout):
    """[3, 8, 32] rows: the sources of a node choose alike; what one node chooses most is chance for the others."""
    rng, node_R = np.random.default_rng(0), np.array(layout)
    heat_E = rng.integers(1, 30, size=32) ** 2
    heat_NE = np.stack([rng.permutation(heat_E) for _ in range(node_R.max() + 1)])
    return rng.poisson(20 * heat_NE[node_R], size=(3, 8, 32)).astype(np.int64)


def problem_of(node_R, slots, gated, crosses):
    """Priced in seconds, everything else without meaning here."""
    none_22, none_2 = np.zeros((2, 2), dtype=np.int64), np.zeros(2, dtype=np.int64)
    figures = dict.fromkeys(replicas.LayerProblem._fields, 0)
    arrays = {
        "node_R": node_R,
        "domain_DR": np.stack([node_R, np.zeros_like(node_R)][: 1 + crosses]),
        "edge_ns_22": none_22,
        "edge_slow_22": none_22,
        "hides_2": none_2,
    }
    numbers = {"slots": slots, "min_rows": 1, "gated": gated, "layers": 1, "trades_across": int(crosses)}
    return replicas.LayerProblem(**{**figures, **arrays, **numbers})


@pytest.mark.parametrize(("seed", "hot", "dropped"), [(44, 1250, 1), (13, 625, 2)], ids=["crossing alone", "trades"])
def test_a_window_weighs_what_it_costs_to_bring_experts_to_other_nodes(seed, hot, dropped, monkeypatch):
    # Few micro-steps share that cost. Here one hot expert crosses and trades do not pay; there trades do.
    load_MLRE = np.random.default_rng(seed).integers(0, 5000 // 16 + 1, size=(3, 2, 8, 32))
    load_MLRE[..., 5] = hot
    load_MLRE[:, :, :4, 8:16] *= 3
    best = planned_across(load_MLRE)
    every = layer._variants
    assert len(list(every(problem_of(np.array([0, 1]), 2, 1, True)))) == 3
    monkeypatch.setattr(layer, "_variants", lambda problem: (v for i, v in enumerate(every(problem)) if i != dropped))
    assert planned_across(load_MLRE).seconds.total > 1.03 * best.seconds.total


def planned_across(load_MLRE):
    """A recompute window of 4 nodes of 2 ranks, whose replicas may cross nodes."""
    return eq.plan(
        eq.LoadMatrix(load_MLRE, stage="recompute"),
        cluster=eq.Cluster.preset("h200", nodes=4, ranks_per_node=2),
        model=eq.ModelShape.preset("qwen3-30b-a3b", experts=32, layers=2, top_k=2),
        slots=2,
        options=eq.PlanOptions(cross_node=True, sends="rows"),
    )
