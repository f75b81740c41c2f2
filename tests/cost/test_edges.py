"""What edges cost beyond what hides them: by hand, and the invariants of the chain."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.edges import Exposed, Turn, exposed_edges

some = settings(max_examples=100, deadline=None)


def exposed(publish, collect, turns, slowdown=0):
    return exposed_edges(np.array([publish, collect]), [Turn(*turn) for turn in turns], slowdown_permille=slowdown)


UPDATE = [(0, 10, 20), (1, 10, 20), (2, 10, 20), (2, 0, 40), (1, 0, 40), (0, 0, 40)]
"""Three layers, one micro-step."""


def test_nothing_moved_costs_nothing():
    assert exposed([0, 0, 0], [0, 0, 0], UPDATE, slowdown=225) == Exposed(0, 0)


def test_a_delay_shifts_all_later_layers_and_counts_once():
    # Layer 0 waits 5, so layer 1, published at 45, is wanted at 45; layer 2, published at 75, likewise.
    assert exposed([15, 30, 30], [0, 0, 0], UPDATE) == Exposed(5, 0)
    assert exposed([15, 30, 36], [0, 0, 0], UPDATE) == Exposed(11, 0)


def test_layers_are_collected_in_the_order_in_which_they_end():
    # Layer 2 is over at 130, 1 at 170, 0 at 210, where the window would end.
    assert exposed([0, 0, 0], [0, 0, 40], UPDATE) == Exposed(0, 0)
    assert exposed([0, 0, 0], [7, 0, 0], UPDATE) == Exposed(0, 7)
    assert exposed([0, 0, 0], [7, 10, 75], UPDATE) == Exposed(0, 12)


def test_recompute_collects_its_first_layer_first_and_after_all_is_published():
    forward = [(0, 10, 20), (1, 10, 20)]
    assert exposed([0, 0], [20, 5], forward) == Exposed(0, 5)
    # In one pass the lane is busy publishing layer 1 until 32, when layer 0 has long been over.
    assert exposed([0, 32], [50, 5], forward) == Exposed(0, 27)


def test_what_is_beside_a_transfer_is_slowed_by_its_share():
    assert exposed([0, 10, 0], [0, 0, 10], UPDATE, slowdown=200) == Exposed(2, 2)


turns = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=5)
edges = st.lists(st.integers(0, 200), min_size=5, max_size=5)


def window(pairs, micro_steps):
    forward = [Turn(layer, *pair) for layer, pair in enumerate(pairs)]
    return (forward + forward[::-1]) * micro_steps


@given(turns, edges, edges, st.integers(1, 3), st.integers(0, 400))
@some
def test_nothing_is_free_and_nothing_costs_more_than_itself_and_its_slowdown(pairs, publish, collect, steps, slowdown):
    edge_ns_2L = np.array([publish, collect])[:, : len(pairs)]
    found = exposed_edges(edge_ns_2L, window(pairs, steps), slowdown_permille=slowdown)
    for ns, (moved_L, slow_L) in zip(found, zip(edge_ns_2L, edge_ns_2L * slowdown // 1000, strict=True), strict=True):
        assert slow_L.sum() <= ns <= moved_L.sum() + slow_L.sum()


@given(turns, edges, edges, st.integers(2, 4))
@some
def test_turns_between_the_first_and_the_last_do_not_matter(pairs, publish, collect, steps):
    edge_ns_2L = np.array([publish, collect])[:, : len(pairs)]
    short, long = (exposed_edges(edge_ns_2L, window(pairs, n), slowdown_permille=225) for n in (1, steps))
    assert short == long


@given(turns, edges, edges, st.integers(0, 4), st.integers(1, 90))
@some
def test_more_to_move_never_costs_less_and_more_to_hide_behind_never_more(pairs, publish, collect, at, more):
    edge_ns_2L, at = np.array([publish, collect])[:, : len(pairs)], at % len(pairs)
    base = exposed_edges(edge_ns_2L, window(pairs, 1), slowdown_permille=100)
    longer = [(a, b + more if i == at else b) for i, (a, b) in enumerate(pairs)]
    assert sum(exposed_edges(edge_ns_2L, window(longer, 1), slowdown_permille=100)) <= sum(base)
    for edge in (0, 1):
        fuller = edge_ns_2L.copy()
        fuller[edge, at] += more
        assert sum(exposed_edges(fuller, window(pairs, 1), slowdown_permille=100)) >= sum(base)
