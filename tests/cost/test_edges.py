"""What edges cost beyond what hides them: by hand, and the invariants of the chain."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.window import Edges
from tests.cost.edges import Exposed, Turn, exposed_edges

some = settings(max_examples=100, deadline=None)


def exposed(publish, collect, turns, slow=0):
    ns_2L = np.array([publish, collect])
    return exposed_edges(Edges(ns_2L, ns_2L * slow // 1000), [Turn(*turn) for turn in turns])


def slowing(publish, collect, layers, permille):
    """Edges of some layers that slow the compute beside them by a share of their time."""
    ns_2L = np.array([publish, collect])[:, :layers]
    return Edges(ns_2L, ns_2L * permille // 1000)


UPDATE = [(0, 10, 20), (1, 10, 20), (2, 10, 20), (2, 0, 40), (1, 0, 40), (0, 0, 40)]
"""Three layers, one micro-step."""


def test_nothing_moved_costs_nothing():
    assert exposed([0, 0, 0], [0, 0, 0], UPDATE, slow=225) == Exposed(0, 0)


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
    assert exposed([0, 10, 0], [0, 0, 10], UPDATE, slow=200) == Exposed(2, 2)


turns = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=5)
edges = st.lists(st.integers(0, 200), min_size=5, max_size=5)


def window(pairs, micro_steps):
    forward = [Turn(layer, *pair) for layer, pair in enumerate(pairs)]
    return (forward + forward[::-1]) * micro_steps


@given(turns, edges, edges, st.integers(1, 3), st.integers(0, 400))
@some
def test_nothing_is_free_and_nothing_costs_more_than_itself_and_its_slowdown(pairs, publish, collect, steps, slowdown):
    edges = slowing(publish, collect, len(pairs), slowdown)
    found = exposed_edges(edges, window(pairs, steps))
    for ns, moved_L, slow_L in zip(found, *edges, strict=True):
        assert slow_L.sum() <= ns <= moved_L.sum() + slow_L.sum()


@given(turns, edges, edges, st.integers(2, 4))
@some
def test_turns_between_the_first_and_the_last_do_not_matter(pairs, publish, collect, steps):
    edges = slowing(publish, collect, len(pairs), 225)
    short, long = (exposed_edges(edges, window(pairs, n)) for n in (1, steps))
    assert short == long


@given(turns, edges, edges, st.integers(0, 4), st.integers(1, 90))
@some
def test_more_to_move_never_costs_less_and_more_to_hide_behind_never_more(pairs, publish, collect, at, more):
    edges, at = slowing(publish, collect, len(pairs), 100), at % len(pairs)
    base = exposed_edges(edges, window(pairs, 1))
    longer = [(a, b + more if i == at else b) for i, (a, b) in enumerate(pairs)]
    assert sum(exposed_edges(edges, window(longer, 1))) <= sum(base)
    for edge in (0, 1):
        for field in edges._fields:
            fuller = getattr(edges, field).copy()
            fuller[edge, at] += more
            assert sum(exposed_edges(edges._replace(**{field: fuller}), window(pairs, 1))) >= sum(base)
