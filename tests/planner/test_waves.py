"""Waves of a finished plan: what it decided stays, the clock prices them, and `auto` takes the fastest."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.core import LoadMatrix
from equipoise.cost.clock import replay
from equipoise.planner import PlanOptions, plan
from equipoise.planner.assemble import TRIED_WAVES
from equipoise.sim.replay import plan_work
from tests.planner.cases import cluster_of, model_of


def even_loads(ranks, experts, rows):
    """Every expert has nearly the same rows, so that contiguous slots make level waves."""
    shape = (3, 2, ranks, experts)
    return LoadMatrix(np.random.default_rng(5).integers(rows * 9 // 10, rows, shape) // experts)


WIDE = even_loads(16, 128, 32768)
CLUSTER, MODEL = cluster_of(16), model_of(WIDE)


def made_with(waves, *, loads=WIDE, policy="equipoise", sends="rows"):
    options = PlanOptions(waves=waves, sends=sends)
    return plan(loads, cluster=CLUSTER, model=MODEL, policy=policy, options=options)


@pytest.mark.parametrize("policy", ["equipoise", "static", "balanced", "eplb-oracle", "reactive"])
@pytest.mark.parametrize("sends", ["rows", "tokens"])
def test_auto_takes_the_fewest_of_the_fastest_waves_and_keeps_what_was_decided(policy, sends):
    by_waves = [made_with(waves, policy=policy, sends=sends) for waves in TRIED_WAVES]
    chosen = made_with("auto", policy=policy, sends=sends)
    totals = [one.seconds.total for one in by_waves]
    assert [one.waves for one in by_waves] == list(TRIED_WAVES)
    assert chosen == by_waves[totals.index(min(totals))]
    if sends == "rows":
        assert chosen.waves > 1 and chosen.seconds.all_to_all < by_waves[0].seconds.all_to_all
    assert replace(chosen, waves=1, seconds=by_waves[0].seconds) == by_waves[0]


def test_seconds_are_those_of_the_clock():
    chosen = made_with("auto")
    assert replay([plan_work(chosen, sends="rows")]).seconds == chosen.seconds
    assert chosen.digest() != made_with(1).digest()


def test_small_and_empty_windows_keep_one_wave():
    for loads in (even_loads(16, 128, 300), LoadMatrix(np.zeros_like(WIDE.load_MLRE))):
        assert made_with("auto", loads=loads).waves == 1


def test_rows_of_one_hot_expert_are_cut_too():
    """One expert has all of its rank's rows: waves divide them, so that something runs beside each part."""
    hot = LoadMatrix(8 * WIDE.load_MLRE * (np.arange(128) % 8 == 0), stage="recompute")
    given = {"cluster": CLUSTER, "model": MODEL, "policy": "static"}
    assert plan(hot, options=PlanOptions(waves="auto", sends="rows"), **given).waves > 1


def test_a_group_of_one_node_is_cut_only_where_that_is_asked_for():
    """Its ranks read rows where they are, all at once, unless they are told otherwise."""
    loads = even_loads(8, 128, 65536)
    given = {"cluster": cluster_of(8), "model": model_of(loads)}
    asked = {waves: plan(loads, options=PlanOptions(waves=waves, sends="rows"), **given).waves for waves in ("auto", 2)}
    assert asked == {"auto": 1, 2: 2}
