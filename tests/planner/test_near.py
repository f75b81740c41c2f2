"""`near`: experts move to the node whose sources choose them, within limits, and never to a higher burden."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planner import homes
from tests.planner import problems, reference

few = settings(max_examples=80, deadline=None)


@st.composite
def placements(draw):
    """Keyword arguments of `near`: layouts of every kind, loads of every kind, prices and limits."""
    node_R = np.array(problems.LAYOUTS[draw(st.sampled_from(sorted(problems.LAYOUTS)))])
    experts = len(node_R) * draw(st.integers(1, 3))
    owner_E = node_R[np.arange(experts) // (experts // len(node_R))]
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    cost_EN = rng.integers(0, 3000, size=(experts, node_R.max() + 1)) * draw(st.integers(0, 1))
    cost_EN[np.arange(experts), owner_E] = 0
    return {
        "load_MRE": draw(problems.loads(draw(st.sampled_from([1, 2, 5, 19])), len(node_R), experts)),
        "group_E": rng.permutation(owner_E) if draw(st.booleans()) else owner_E,
        "node_R": node_R,
        "cost_EN": cost_EN,
        "owner_E": owner_E,
        "turn_E": rng.permutation(experts) if draw(st.booleans()) else np.arange(experts),
        "weights": draw(st.sampled_from([(1, 0), (0, 1), (300, 1700)])),
        "budget": draw(st.sampled_from([0, 1, 2, experts])),
        "max_checks": draw(st.sampled_from([0, 1, 13, 400])),
        "most_steps": draw(st.sampled_from([1, 16, 32])),
    }


@given(placements())
@few
def test_the_compiled_search_equals_the_plain_one(case):
    assert np.array_equal(homes.near(*case.values()), reference.near(**case))


@given(placements())
@few
def test_nodes_keep_their_numbers_the_burden_never_rises_and_the_budget_holds(case):
    before_E, after_E, owner_E = case["group_E"], homes.near(*case.values()), case["owner_E"]
    assert np.array_equal(np.sort(after_E), np.sort(before_E))
    steps = case["load_MRE"][:: -(-len(case["load_MRE"]) // case["most_steps"])]
    given = {name: case[name] for name in ("node_R", "cost_EN", "weights")}
    was, found = (reference.burden(steps, group_E, **given) for group_E in (before_E, after_E))
    assert found < was or np.array_equal(after_E, before_E)
    if not np.array_equal(after_E, before_E):
        # From above the budget, a swap is taken only if it ends within.
        assert (after_E != owner_E).sum() <= case["budget"]


def test_experts_go_to_the_node_that_chooses_them():
    # Sources of node 0 choose experts 1 and 3 alone, whose homes are in node 1: all rows cross, and need not.
    node_R, home_E = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    load_MRE = np.array([[[0, 9, 0, 9], [0, 9, 0, 9], [9, 0, 9, 0], [9, 0, 9, 0]]])
    none_EN = np.zeros((4, 2), dtype=np.int64)
    given = load_MRE, home_E, node_R, none_EN, home_E, np.arange(4), (1, 1)
    assert homes.near(*given, 4, 100, 16).tolist() == [1, 0, 1, 0]
    assert reference.near(*given, 1, 100, 16).tolist() == home_E.tolist()
