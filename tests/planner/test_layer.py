"""What one layer's edges add to a window, by hand, and never less for more."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planner.layer import edge_price, edges_ns, follow_sources, owners
from tests.planner import problems

few = settings(max_examples=60, deadline=None)


def problem_of(one, **changes):
    return one[3]._replace(**changes)


def test_an_edge_is_charged_its_share_of_all_layers_and_what_no_visit_hides():
    assert edge_price(0, 500, layers=4) == 0
    assert edge_price(400, 500, layers=4) == 400 // 4
    assert edge_price(800, 500, layers=4) == (800 + 3 * 300) // 4
    assert edge_price(800, 500, layers=1) == 800


@given(problems.layers())
@settings(max_examples=5, deadline=None)
def test_publish_and_collect_go_by_the_busiest_link_with_what_crosses(one):
    # Rank 0 gives experts 0 and 1 to rank 1 for 2 and 3, in its node, and 4 goes to rank 3 for 6.
    node_R, home_E = np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0, 3, 2, 2, 3])
    changes = {"node_R": node_R, "layers": 1, "edge_fixed_ns": 5, "crossing_ns": 100}
    changes |= {"edge_slow_22": np.zeros((2, 2), dtype=np.int64), "hides_2": np.zeros(2, dtype=np.int64)}
    problem = problem_of(one, **changes, edge_ns_22=np.array([[10, 70], [20, 90]]))
    assert edges_ns(home_E, owners(8, 4), 0, problem) == (2 * 10 + 5) + (2 * 20 + 5)
    assert edges_ns(home_E, owners(8, 4), 3, problem) == (2 * 10 + 5) + (3 * 100 + 5) + (2 * 20 + 5)
    swapped_E = np.array([0, 0, 2, 1, 2, 1, 3, 3])
    assert edges_ns(swapped_E, owners(8, 4), 0, problem) == (70 + 5) + (90 + 5)
    assert edges_ns(owners(8, 4), owners(8, 4), 0, problem) == 0
    # What each slows comes on top, of both links, and of what crosses.
    slower = problem._replace(edge_slow_22=np.array([[1, 2], [4, 8]]))
    assert edges_ns(home_E, owners(8, 4), 3, slower) - edges_ns(home_E, owners(8, 4), 3, problem) == 2 * (1 + 4) + 3 * 2
    assert edges_ns(swapped_E, owners(8, 4), 0, slower) - edges_ns(swapped_E, owners(8, 4), 0, problem) == 2 + 8


@given(st.integers(1, 94), st.integers(0, 10**7), st.integers(0, 10**6), st.integers(0, 10**6))
@few
def test_an_edge_that_takes_longer_or_has_less_to_hide_behind_never_costs_less(layers, ns, more, hides):
    assert edge_price(ns, hides, layers) <= edge_price(ns + more, hides, layers)
    assert edge_price(ns, hides + more, layers) <= edge_price(ns, hides, layers)


@given(problems.layers(), st.integers(0, 5))
@few
def test_homes_at_their_owners_have_no_edges_and_others_cost_no_less(one, crossing):
    load_MRE, home_E, _, problem, _ = one
    owner_E = owners(load_MRE.shape[2], load_MRE.shape[1])
    stayed = edges_ns(owner_E, owner_E, 0, problem)
    assert stayed == 0 <= edges_ns(home_E, owner_E, 0, problem) <= edges_ns(home_E, owner_E, crossing, problem)


@given(problems.layers(), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_homes_follow_sources_that_were_packed_and_only_those(one, packed, seed):
    """Two nodes whose sources choose one half of the experts three times as often, or all alike."""
    rng = np.random.default_rng(seed)
    experts, node_R = 16, np.array([0, 0, 1, 1])
    node_E = rng.permutation(np.repeat([0, 1], experts // 2))
    likes_RE = 1 + 2 * (node_R[:, None] == node_E) if packed else np.full((4, experts), 2)
    load_MRE = rng.poisson(100 * likes_RE, size=(6, 4, experts))
    problem, home_E = problem_of(one, node_R=node_R, budget=experts), owners(experts, 4)
    # Owners that keep as many rows as homes that follow leave nothing to gain.
    is_better = packed and int((node_E != node_R[home_E]).sum()) > 4
    found = follow_sources(load_MRE, home_E, problem)
    if is_better:
        assert np.array_equal(node_R[found], node_E)
        assert np.array_equal(follow_sources(load_MRE, home_E, problem._replace(budget=3)), home_E)
    elif not packed:
        assert np.array_equal(found, home_E)
