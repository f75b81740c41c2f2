"""The compiled planner returns exactly what the plain one does, function by function and window by window."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.planner import fast, reference
from tests.planner import problems

few = settings(max_examples=60, deadline=None)


def assert_same(ours, theirs):
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert np.array_equal(a, b), name


@given(problems.layers())
@settings(max_examples=150, deadline=None)
def test_plan_of_a_layer(layer):
    assert_same(fast.plan_layer(*layer), reference.plan_layer(*layer))


@given(problems.layers())
@few
def test_candidates(layer):
    load_MRE, warm_home_E, pair_EE, problem, _ = layer
    ours = fast.candidates(load_MRE, warm_home_E, pair_EE, problem)
    assert np.array_equal(ours, reference.candidates(load_MRE, warm_home_E, pair_EE, problem))


@given(problems.layers())
@few
def test_evaluate_value_and_edges(layer):
    load_MRE, home_E, pair_EE, problem, tables = layer
    owner_E = reference.owners(len(home_E), load_MRE.shape[1])
    ours = fast.evaluate(load_MRE, home_E, pair_EE, problem, tables)
    theirs = reference.evaluate(load_MRE, home_E, pair_EE, problem, tables)
    assert_same(ours, theirs)
    assert fast.value_of(ours, load_MRE, owner_E, problem) == reference.value_of(theirs, load_MRE, owner_E, problem)
    assert fast.edges_ns(home_E, owner_E, problem) == reference.edges_ns(home_E, owner_E, problem)


@given(problems.layers())
@few
def test_homes_stay_within_the_budget_and_every_rank_keeps_its_number(layer):
    load_MRE, _, _, problem, _ = layer
    home_E = reference.plan_layer(*layer).home_E
    ranks = load_MRE.shape[1]
    assert (home_E != reference.owners(len(home_E), ranks)).sum() <= problem.budget
    assert np.bincount(home_E, minlength=ranks).tolist() == [len(home_E) // ranks] * ranks


@given(problems.layers())
@few
def test_what_is_minimised_is_never_above_homes_at_their_owners(layer):
    load_MRE, _, pair_EE, problem, tables = layer
    owner_E = reference.owners(load_MRE.shape[2], load_MRE.shape[1])
    chosen = reference.value_of(reference.plan_layer(*layer), load_MRE, owner_E, problem)
    stayed = reference.evaluate(load_MRE, owner_E, pair_EE, problem, tables)
    assert chosen <= reference.value_of(stayed, load_MRE, owner_E, problem)


@pytest.mark.parametrize("objective", ["seconds", "skew"])
@pytest.mark.parametrize("stage", ["recompute", "update"])
@pytest.mark.parametrize("layout", ["two nodes", "uneven", "strided"])
def test_whole_windows_planned_with_the_reference_are_equal(objective, stage, layout):
    node_R = problems.LAYOUTS[layout]
    rng = np.random.default_rng(len(layout))
    load = rng.integers(0, 300, size=(5, 2, 4, 12)) * rng.integers(1, 9, size=(1, 2, 1, 12))
    window = {
        "cluster": eq.Cluster.preset("h200", node_R=node_R),
        "model": eq.ModelShape.preset("qwen3-30b-a3b", experts=12, layers=2, top_k=2),
        "slots": 1,
        "objective": objective,
        "options": eq.PlanOptions(cross_node=stage == "recompute"),
    }
    loads = eq.LoadMatrix(load, stage=stage)
    ours, theirs = eq.plan(loads, **window), eq.plan(loads, planner=reference.plan_layer, **window)
    assert ours == theirs
    assert ours.digest() == theirs.digest()


@given(st.data())
@few
def test_affinity_and_search_inputs(data):
    load_MRE, _, _, problem, _ = data.draw(problems.layers())
    experts = load_MRE.shape[2]
    ours, theirs = fast._inputs(load_MRE, problem), reference.search_inputs(load_MRE, problem)
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a, b)
    pair_EE = np.random.default_rng(experts).integers(0, 99, size=(experts, experts))
    pair_EE += pair_EE.T
    assert np.array_equal(fast.affinity(ours[1], pair_EE), reference.affinity(theirs[1], pair_EE))
