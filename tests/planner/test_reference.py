"""The compiled planner returns exactly what the plain one does, function by function and window by window."""

import numpy as np
import pytest
from hypothesis import given, settings

import equipoise as eq
from equipoise.planner import layer, replicas
from tests.cost.reference import quotas
from tests.planner import problems, reference

PLAIN = layer.Kernels(reference.level, reference.near, reference.evaluate)

few = settings(max_examples=60, deadline=None)


def assert_same(ours, theirs):
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert np.array_equal(a, b), name


@given(problems.layers())
@few
def test_plan_of_a_layer(one):
    assert_same(layer.plan_layer(*one), reference.plan_layer(*one))


@given(problems.layers())
@few
def test_candidates(one):
    load_MRE, warm_home_E, pair_EE, problem, _ = one
    ours = layer.candidates(load_MRE, warm_home_E, pair_EE, problem, layer.COMPILED)
    theirs = layer.candidates(load_MRE, warm_home_E, pair_EE, problem, PLAIN)
    assert np.array_equal(ours, theirs)


@given(problems.layers())
@few
def test_evaluate(one):
    load_MRE, home_E, pair_EE, problem, tables = one
    ours = replicas.evaluate(load_MRE, home_E, pair_EE, problem, tables)
    assert_same(ours, reference.evaluate(load_MRE, home_E, pair_EE, problem, tables))


@given(problems.layers())
@few
def test_the_busiest_rank_of_the_skew_objective_is_that_of_the_quotas(one):
    load_MRE, home_E, pair_EE, problem, tables = one
    plan = reference.evaluate(load_MRE, home_E, pair_EE, problem, tables)
    total = 0
    for m, load_RE in enumerate(load_MRE):
        rows_R = quotas(load_RE.sum(axis=0), plan.home_E, plan.rep_expert_MRS[m], plan.rep_rows_MRS[m]).sum(axis=0)
        total += int(rows_R.max()) * (2**40 // max(1, int(load_RE.sum()) // len(load_RE)))
    owner_E = layer.owners(len(home_E), load_MRE.shape[1])
    assert layer.value_of(plan, load_MRE, owner_E, problem._replace(by_skew=1)) == total


@given(problems.layers())
@few
def test_homes_stay_within_the_budget_and_every_rank_keeps_its_number(one):
    load_MRE, _, _, problem, _ = one
    home_E = layer.plan_layer(*one).home_E
    ranks = load_MRE.shape[1]
    assert (home_E != layer.owners(len(home_E), ranks)).sum() <= problem.budget
    assert np.bincount(home_E, minlength=ranks).tolist() == [len(home_E) // ranks] * ranks


@given(problems.layers())
@few
def test_what_is_minimised_is_never_above_homes_at_their_owners(one):
    load_MRE, _, pair_EE, problem, tables = one
    owner_E = layer.owners(load_MRE.shape[2], load_MRE.shape[1])
    chosen = layer.value_of(layer.plan_layer(*one), load_MRE, owner_E, problem)
    stayed = replicas.evaluate(load_MRE, owner_E, pair_EE, problem, tables)
    assert chosen <= layer.value_of(stayed, load_MRE, owner_E, problem)


# Levelling rows takes the reference five times as long as pricing seconds, so each layout is levelled in one stage.
WHOLE_WINDOWS = [
    *((layout, stage, "seconds") for layout in ("two nodes", "uneven", "strided") for stage in ("recompute", "update")),
    ("two nodes", "update", "skew"),
    ("uneven", "recompute", "skew"),
    ("strided", "update", "skew"),
]


@pytest.mark.parametrize(("layout", "stage", "objective"), WHOLE_WINDOWS)
def test_whole_windows_planned_with_the_reference_are_equal(layout, stage, objective):
    node_R = problems.LAYOUTS[layout]
    rng = np.random.default_rng(len(layout))
    load = rng.integers(0, 300, size=(2, 2, 4, 8)) * rng.integers(1, 9, size=(1, 2, 1, 8))
    window = {
        "cluster": eq.Cluster.preset("h200", node_R=node_R),
        "model": eq.ModelShape.preset("qwen3-30b-a3b", experts=8, layers=2, top_k=2),
        "slots": 1,
        "objective": objective,
        "options": eq.PlanOptions(cross_node=True),
    }
    loads = eq.LoadMatrix(load, stage=stage)
    ours, theirs = eq.plan(loads, **window), eq.plan(loads, planner=reference.plan_layer, **window)
    assert ours == theirs
    assert ours.digest() == theirs.digest()
