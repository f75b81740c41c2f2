"""`level` and `polish`: groups keep their sizes, limits hold, and small cases reach the best there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.planner import homes
from tests.planner import problems, reference

few = settings(max_examples=80, deadline=None)


@st.composite
def groupings(draw):
    """Keyword arguments of `level`, with groups of unlike sizes, ties and limits."""
    ranks_G = np.array(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    per_rank = draw(st.integers(1, 3))
    experts, micro_steps = int(ranks_G.sum()) * per_rank, draw(st.sampled_from([1, 2, 5]))
    load_EM = draw(problems.loads(1, experts, micro_steps))[0]
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    owner_E = np.repeat(np.arange(len(ranks_G)), ranks_G * per_rank)
    affinity_EE = -rng.integers(0, 2**20, size=(experts, experts)) * draw(st.integers(0, 1))
    cost_EG = rng.integers(0, 3000, size=(experts, len(ranks_G))) * draw(st.integers(0, 1))
    cost_EG[np.arange(experts), owner_E] = 0
    return {
        "load_EM": load_EM,
        "share_EM": (load_EM << 20) // max(1, int(load_EM.sum(axis=0).max())),
        "group_E": rng.permutation(owner_E) if draw(st.booleans()) else owner_E,
        "ranks_G": ranks_G,
        "weight_M": rng.integers(1, 2000, size=micro_steps),
        "cost_EG": cost_EG,
        "affinity_EE": affinity_EE + affinity_EE.T,
        "owner_E": owner_E if draw(st.booleans()) else np.where(rng.random(experts) < 0.3, -1, owner_E),
        "budget": draw(st.sampled_from([0, 1, 2, experts])),
        "patience": draw(st.sampled_from([0, 3, 50])),
        "max_checks": draw(st.sampled_from([0, 1, 13, 2000])),
    }


@given(groupings())
@few
def test_compiled_level_equals_the_plain_one(case):
    assert np.array_equal(homes.level(*case.values()), reference.level(**case))


@given(groupings())
@few
def test_compiled_objective_equals_the_plain_one(case):
    ranks_G, group_E = case["ranks_G"], case["group_E"]
    rows_GM = np.stack([case["load_EM"][group_E == g].sum(axis=0) for g in range(len(ranks_G))])
    common = homes.common_multiple(ranks_G)
    assert common == np.lcm.reduce(ranks_G)
    ours = homes.busiest(rows_GM, common // ranks_G, common, case["weight_M"])
    none_EG = np.zeros_like(case["cost_EG"])
    assert ours == reference.busiest(group_E, case["load_EM"], ranks_G, case["weight_M"], none_EG)


@given(groupings())
@few
def test_compiled_polish_equals_the_plain_one(case):
    ranks_G, group_E, weight_M = case["ranks_G"], case["group_E"].copy(), case["weight_M"]
    common = int(np.lcm.reduce(ranks_G))
    weight_G, work_EM = common // ranks_G, case["load_EM"] * weight_M
    work_GM = np.stack([weight_G[g] * work_EM[group_E == g].sum(axis=0) for g in range(len(ranks_G))])
    room = case["budget"] - int((group_E != case["owner_E"]).sum())
    limits = case["owner_E"], room, case["max_checks"]
    homes.polish(work_EM, group_E, work_GM, weight_G, common * case["cost_EG"], *limits)
    taken = {name: case[name] for name in ("load_EM", "group_E", "ranks_G", "weight_M", "cost_EG", "owner_E")}
    wanted = reference.polish(**taken, budget=case["budget"], max_checks=case["max_checks"])
    assert np.array_equal(group_E, wanted)


@pytest.mark.parametrize("seed", [0, 4, 6])
def test_polish_looks_at_every_pair_of_groups_again_after_a_swap(seed):
    """No single swap is left that lowers the sum of the fullest groups."""
    load_EM = np.random.default_rng(seed).integers(0, 1000, size=(12, 4))
    group_E, ones_G = np.repeat([0, 1], 6), np.ones(2, dtype=np.int64)

    def rows(group_E):
        return np.stack([load_EM[group_E == g].sum(axis=0) for g in (0, 1)])

    none_EG, anywhere_E = np.zeros((12, 2), dtype=np.int64), np.full(12, -1)
    homes.polish(load_EM, group_E, rows(group_E), ones_G, none_EG, anywhere_E, 12, 10**6)
    for e, f in itertools.product(np.flatnonzero(group_E == 0), np.flatnonzero(group_E == 1)):
        swapped_E = group_E.copy()
        swapped_E[e], swapped_E[f] = 1, 0
        assert rows(swapped_E).max(axis=0).sum() >= rows(group_E).max(axis=0).sum()


@given(groupings())
@few
def test_groups_keep_their_sizes_and_the_objective_never_rises(case):
    result = homes.level(*case.values())
    groups = len(case["ranks_G"])
    assert np.array_equal(np.bincount(result, minlength=groups), np.bincount(case["group_E"], minlength=groups))
    rest = case["load_EM"], case["ranks_G"], case["weight_M"], case["cost_EG"]
    if (case["group_E"] != case["owner_E"]).sum() <= case["budget"]:
        assert reference.busiest(result, *rest) <= reference.busiest(case["group_E"], *rest)
        assert (result != case["owner_E"]).sum() <= case["budget"]


def arguments(load_EM, ranks_G, *, cost=0, budget=99):
    """Arguments of `level` for a search from contiguous groups."""
    experts, groups = len(load_EM), len(ranks_G)
    owner_E = np.repeat(np.arange(groups), np.array(ranks_G) * (experts // sum(ranks_G)))
    cost_EG = np.full((experts, groups), cost)
    cost_EG[np.arange(experts), owner_E] = 0
    return {
        "load_EM": load_EM,
        "share_EM": (load_EM << 20) // load_EM.sum(axis=0).max(),
        "group_E": owner_E,
        "ranks_G": np.array(ranks_G),
        "weight_M": np.full(load_EM.shape[1], 1024),
        "cost_EG": cost_EG,
        "affinity_EE": np.zeros((experts, experts), dtype=np.int64),
        "owner_E": owner_E,
        "budget": budget,
        "patience": 500,
        "max_checks": 20_000,
    }


def best_by_trying_all(load_EM, ranks_G):
    """The least true objective over every way to fill two groups."""
    experts = len(load_EM)
    first = ranks_G[0] * (experts // sum(ranks_G))
    values = []
    for chosen in itertools.combinations(range(experts), first):
        group_E = np.ones(experts, dtype=np.int64)
        group_E[list(chosen)] = 0
        none_EG = np.zeros((experts, 2), dtype=np.int64)
        weight_M = np.full(load_EM.shape[1], 1024)
        values.append(reference.busiest(group_E, load_EM, np.array(ranks_G), weight_M, none_EG))
    return min(values)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks_G", [(2, 2), (3, 1), (1, 3)], ids=str)
def test_small_cases_come_within_half_a_percent_of_the_best_of_all(seed, ranks_G):
    load_EM = np.random.default_rng(seed).integers(0, 1000, size=(12, 4)) ** 2 // 100
    case = arguments(load_EM, ranks_G)
    found = reference.busiest(homes.level(*case.values()), load_EM, case["ranks_G"], case["weight_M"], case["cost_EG"])
    best = best_by_trying_all(load_EM, ranks_G)
    assert best <= found <= best * 1.005


def test_one_group_has_nothing_to_swap():
    case = arguments(np.arange(8).reshape(4, 2), (2,))
    assert homes.level(*case.values()).tolist() == [0, 0, 0, 0]


def test_two_hot_experts_of_one_group_are_parted():
    load_EM = np.array([[100], [100], [1], [1]])
    result = homes.level(*arguments(load_EM, (1, 1)).values())
    assert result[0] != result[1]


def test_an_expert_moves_only_if_it_pays():
    load_EM = np.array([[100], [100], [1], [1]])
    # Two experts move for 99 rows less on the fullest group, 1024 parts each.
    assert homes.level(*arguments(load_EM, (1, 1), cost=99 * 512 + 1).values()).tolist() == [0, 0, 1, 1]
    assert homes.level(*arguments(load_EM, (1, 1), cost=99 * 512 - 1).values()).tolist() != [0, 0, 1, 1]


def test_a_budget_of_one_allows_no_swap():
    load_EM = np.array([[100], [100], [1], [1]])
    assert homes.level(*arguments(load_EM, (1, 1), budget=1).values()).tolist() == [0, 0, 1, 1]


def test_groups_of_unlike_sizes_are_compared_by_rows_per_rank():
    load_EM = np.array([[30], [30], [30], [90]])
    result = homes.level(*arguments(load_EM, (3, 1)).values())
    # The hot expert sits best beside two others on the larger group: 150 rows over 3 ranks.
    assert result[3] == 0


def test_co_active_experts_end_in_one_group_where_loads_do_not_care():
    case = arguments(np.full((4, 1), 10), (1, 1))
    case["affinity_EE"][0, 2] = case["affinity_EE"][2, 0] = -(2**50)
    swapped = reference.best_swap(
        case["share_EM"] @ case["share_EM"].T + case["affinity_EE"],
        case["group_E"],
        case["ranks_G"],
        np.ones(4, dtype=np.bool_),
    )
    # Bringing 0 and 2 together takes a swap of 0 with 3, or of 1 with 2; the lower pair wins the tie.
    assert swapped is not None and swapped[:2] == (0, 3) and swapped[2] < 0
