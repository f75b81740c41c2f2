"""`eq.plan_step`: one plan per window, each warm-started from the one before, each charged with its own edges."""

import numpy as np
import pytest

import equipoise as eq
from tests.planner.test_plan import check_promises, model_for, planned, window

CLUSTER = eq.Cluster.preset("h200", nodes=2, ranks_per_node=4)


def drifting(windows, seed=0, *, drift=0.05, rows=200):
    """Windows whose experts' heat changes a little from one to the next."""
    rng = np.random.default_rng(seed)
    heat_E = rng.lognormal(0, 1, size=32)
    made = []
    for _ in range(windows):
        heat_E = heat_E * rng.lognormal(0, drift, size=32)
        made.append(eq.LoadMatrix((rng.poisson(rows, size=(4, 1, 8, 32)) * heat_E).astype(np.int64)))
    return made


def stepped(windows, **arguments):
    return eq.plan_step(windows, cluster=CLUSTER, model=model_for(windows[0]), **arguments)


def test_one_plan_per_window_in_order():
    windows = [window(1, stage="recompute"), window(1, micro_steps=1), window(2, micro_steps=2)]
    plans = stepped(windows, slots=1)
    assert [plan.loads for plan in plans] == windows
    assert isinstance(plans, tuple)
    for plan in plans:
        check_promises(plan)
        assert plan.saved_seconds >= 0


def test_every_window_is_charged_with_its_own_edges():
    for plan in stepped(drifting(3, rows=2000), slots=1):
        assert plan.displaced_LE.any()
        assert min(plan.seconds.publish, plan.seconds.collect) > 0


def test_each_window_starts_from_the_homes_of_the_one_before():
    windows = drifting(3)
    plans = stepped(windows, slots=1)
    again = planned(windows[0], slots=1)
    assert plans[0] == again
    for before, loads, plan in zip(plans, windows[1:], plans[1:], strict=False):
        assert plan == planned(loads, slots=1, warm=before)


def test_a_step_can_start_from_an_earlier_plan():
    windows = drifting(2)
    earlier = planned(windows[0], slots=1)
    assert stepped(windows[1:], slots=1, warm=earlier)[0] == planned(windows[1], slots=1, warm=earlier)


def test_warm_plans_save_nearly_what_cold_ones_do_under_drift():
    windows = drifting(12)
    warm = stepped(windows, slots=1)
    cold = [planned(loads, slots=1) for loads in windows]
    saved_warm, saved_cold = (sum(plan.saved_seconds for plan in plans) for plans in (warm, cold))
    assert saved_warm >= 0.99 * saved_cold > 0


def test_an_abrupt_change_is_recovered_within_one_window():
    before, after = drifting(1, seed=1)[0], drifting(2, seed=2)
    warm = stepped([before, *after], slots=1)
    cold = [planned(loads, slots=1) for loads in after]
    assert warm[2].saved_seconds >= 0.97 * cold[1].saved_seconds


def test_no_windows_make_no_plans():
    assert eq.plan_step([], cluster=CLUSTER, model=model_for(window())) == ()


def test_a_window_that_does_not_fit_is_refused():
    with pytest.raises(eq.LoadsError, match="loads have 1 layers"):
        stepped([window(3), window(3, layers=1)])


def test_a_step_can_be_planned_by_any_policy():
    windows = drifting(3)
    for policy in ("static", "eplb-oracle", "equipoise"):
        assert [plan.policy for plan in stepped(windows, slots=1, policy=policy)] == [policy] * 3
    by_history = stepped(windows[1:], slots=1, policy="eplb-history", history=windows[0])
    for plan, before, loads in zip(by_history, windows, windows[1:], strict=False):
        assert plan == planned(loads, slots=1, policy="eplb-history", history=before)


def test_a_window_that_is_no_list_of_windows_is_refused():
    with pytest.raises(eq.InfeasiblePlanError, match="windows is a LoadMatrix; give a list of them"):
        eq.plan_step(window(3), cluster=CLUSTER, model=model_for(window(3)))
