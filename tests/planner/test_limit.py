"""A limit on memory: no plan exceeds it, the plan asked for is kept where it fits, and a refusal has the numbers."""

import numpy as np
import pytest

import equipoise as eq
from equipoise.core import InfeasiblePlanError, LoadMatrix, ModelShape
from equipoise.core.options import PlanOptions
from equipoise.loads import plan_memory

MODEL = ModelShape.preset("qwen3-30b-a3b", experts=16, top_k=2, layers=2, hidden=64, expert_width=32)
CLUSTER = eq.Cluster.preset("h200", ep=4)
ASKED = {"cluster": CLUSTER, "model": MODEL, "slots": 2}


def hot_loads(seed, *, rows=3000, micro_steps=3):
    """Rank 0's experts get most rows, in one micro-step more than in the others."""
    rng = np.random.default_rng(seed)
    load = rng.integers(0, rows // 4, (micro_steps, 2, 4, 16))
    load[..., :4] += rng.integers(0, rows, (micro_steps, 2, 4, 4))
    load[seed % micro_steps] *= 2
    return LoadMatrix(load)


def peak(plan, activations="kept"):
    return int(plan_memory(plan, activations=activations).peak_R.max())


def limited(loads, limit, **given):
    return eq.plan(loads, **ASKED, options=PlanOptions(limit_bytes=limit, **given))


def candidates(loads):
    """Peak of every plan that may be tried, by (slots, objective)."""
    goals = [(slots, goal) for slots in (2, 1, 0) for goal in ("seconds", "skew")]
    return {key: peak(eq.plan(loads, **{**ASKED, "slots": key[0]}, objective=key[1])) for key in goals}


def test_a_plan_that_fits_is_the_one_without_a_limit():
    loads = hot_loads(0)
    free = eq.plan(loads, **ASKED)
    assert limited(loads, peak(free)).digest() == free.digest()
    assert limited(loads, 10**15).digest() == free.digest()


@pytest.mark.parametrize("seed", range(3))
def test_every_plan_keeps_the_limit_or_names_the_micro_step_that_cannot(seed):
    loads = hot_loads(seed)
    peaks = candidates(loads)
    assert len(set(peaks.values())) > 2, "plans of equal peaks show nothing"
    for limit in sorted({value - 1 for value in peaks.values()} | set(peaks.values())):
        if limit < min(peaks.values()):
            with pytest.raises(InfeasiblePlanError, match=rf"micro-step {seed}, layer \d: rank \d needs") as error:
                limited(loads, limit)
            assert f"{min(peaks.values()) / 2**30:.3g} GiB (" in str(error.value)
            assert "6 plans tried, with 2 to 0 slots" in str(error.value)
        else:
            made = limited(loads, limit)
            assert peak(made) <= limit
            assert (made.slots, made.objective) in peaks and peaks[made.slots, made.objective] == peak(made)


def test_a_slot_fewer_is_taken_where_that_is_what_fits():
    # Level rows: slots only cost their own memory.
    loads = LoadMatrix(np.full((2, 2, 4, 16), 40))
    sizes = {slots: peak(eq.plan(loads, **{**ASKED, "slots": slots}, objective="skew")) for slots in (0, 1, 2)}
    assert sizes[0] < sizes[1] < sizes[2]
    assert limited(loads, sizes[1]).slots <= 1
    assert peak(limited(loads, sizes[1])) <= sizes[1]


def test_the_cheapest_remedy_is_named_and_is_one():
    loads = hot_loads(1)
    least = min(candidates(loads).values())
    with pytest.raises(
        InfeasiblePlanError, match=r"cheapest remedy: cut every micro-step into 2 \(a token budget of 1/2\)"
    ):
        limited(loads, int(0.8 * least))
    halves = LoadMatrix(np.repeat(loads.load_MLRE // 2, 2, axis=0))
    assert peak(limited(halves, int(0.8 * least))) <= int(0.8 * least)


def test_recomputed_activations_and_pipelines_count_as_they_run():
    loads = hot_loads(2)
    again = min(peak(eq.plan(loads, **ASKED, objective=goal), "recomputed") for goal in ("seconds", "skew"))
    assert again < min(candidates(loads).values())
    for given in ({"order": "recompute"}, {"activations": "recomputed"}):
        assert peak(limited(loads, again, **given), "recomputed") <= again
    with pytest.raises(InfeasiblePlanError, match="needs"):
        limited(loads, again)
    # The first of three stages has three micro-steps in flight.
    least = min(candidates(loads).values())
    with pytest.raises(InfeasiblePlanError, match="needs"):
        limited(loads, least, order="1f1b", pipeline_stages=3)


def test_other_policies_are_checked_and_stay_as_they_are():
    loads = hot_loads(0)
    static = eq.plan(loads, **ASKED, policy="static")
    fits = PlanOptions(limit_bytes=peak(static))
    assert eq.plan(loads, **ASKED, policy="static", options=fits).digest() == static.digest()
    with pytest.raises(InfeasiblePlanError, match=r"the limit is .* GiB; .*\(policy static\)"):
        eq.plan(loads, **ASKED, policy="static", options=PlanOptions(limit_bytes=peak(static) - 1))
