"""One predictor: plan, analyze and simulate give the same seconds for the same window, to the nanosecond."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import Plan, Seconds
from equipoise.planner import PlanOptions, plan
from equipoise.planner.baselines import POLICIES
from equipoise.sim import StepSetting, analyze_loads, simulate
from equipoise.sim.result import Parts

MODEL = ModelShape.preset("qwen3-30b-a3b", experts=16, layers=3, top_k=2)

windows = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "nodes": st.integers(1, 2),
        "stage": st.sampled_from(["update", "recompute"]),
        "micro_steps": st.integers(1, 3),
        "tokens": st.sampled_from([8, 300, 4096, 60_000]),
        "coverage": st.sampled_from([1.0, 0.5]),
    }
)


def window_of(
    *, seed: int, nodes: int, stage: str, micro_steps: int, tokens: int, coverage: float
) -> tuple[LoadMatrix, Cluster]:
    """Hot experts of their own in every micro-step and layer, on nodes of four ranks."""
    rng, ranks = np.random.default_rng(seed), 4 * nodes
    share_MLE = rng.dirichlet(np.full(MODEL.experts, 0.3), size=(micro_steps, MODEL.layers))
    sent_R = rng.integers(0, tokens + 1, size=ranks) * MODEL.top_k
    load = np.stack([rng.multinomial(rows, share_MLE) for rows in sent_R], axis=2)
    known = None if coverage == 1 else np.full((micro_steps, MODEL.layers, ranks), coverage)
    return LoadMatrix(load, stage=stage, coverage_MLR=known), Cluster.preset("h200", nodes=nodes, ranks_per_node=4)


def ns(seconds: Seconds | Parts) -> tuple[int, ...]:
    """The parts that plan and simulation share, and their total, in nanoseconds."""
    if isinstance(seconds, Parts):
        exchanged, total = seconds.all_to_all_inside + seconds.all_to_all_across, seconds.experts
    else:
        exchanged, total = seconds.all_to_all, seconds.total
    moved = (seconds.pull, seconds.return_, seconds.publish, seconds.collect)
    return tuple(round(part * 1e9) for part in (seconds.compute, exchanged, *moved, seconds.planning, total))


def simulated(loads: LoadMatrix, how: str | Plan, **given) -> tuple[int, ...]:
    (result,) = simulate(loads, how, setting=StepSetting(sends=given.pop("sends", "tokens")), **given).policies
    return ns(result.seconds)


@given(windows, st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_plan_analyze_and_simulate_agree(window, slots):
    loads, cluster = window_of(**window)
    given = {"cluster": cluster, "model": MODEL}
    analyzed = analyze_loads([loads], slots=slots, **given).seconds
    for policy, found in (("static", analyzed.now), ("balanced", analyzed.balanced), ("equipoise", analyzed.planned)):
        made = plan(loads, slots=slots, policy=policy, **given)
        assert ns(made.seconds) == ns(found) == simulated(loads, policy, slots=slots, **given)
        assert made.static_seconds == analyzed.now.total
        assert ns(made.seconds) == simulated(loads, made, **given)


@given(
    windows,
    st.integers(0, 2),
    st.sampled_from(("equipoise", *POLICIES)),
    st.sampled_from(["rows", "tokens"]),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_plan_and_simulate_agree_under_every_policy_and_option(window, slots, policy, sends, depth, has_pairs):
    loads, cluster = window_of(**window)
    pair_LEE = None
    if has_pairs:
        half_LEE = np.random.default_rng(window["seed"]).integers(0, 50, (MODEL.layers, MODEL.experts, MODEL.experts))
        pair_LEE = half_LEE + half_LEE.transpose(0, 2, 1) + 900 * np.eye(MODEL.experts, dtype=np.int64)
    options = PlanOptions(depth=depth, sends=sends, cross_node=window["stage"] == "recompute")
    given = {"cluster": cluster, "model": MODEL, "options": options, "pair_LEE": pair_LEE, "slots": slots}
    history = loads.micro_steps(0, max(1, loads.num_micro_steps // 2))
    made = plan(loads, policy=policy, history=history, **given)
    assert ns(made.seconds) == simulated(loads, policy, sends=sends, history=history, **given)
    assert made.seconds.total <= made.static_seconds or policy != "equipoise"


@given(windows, st.integers(0, 2))
@settings(max_examples=20, deadline=None)
def test_analyze_and_simulate_agree_on_a_step_of_two_windows_and_groups(window, slots):
    """Two windows of two EP groups each: the slowest group counts, and later windows start from earlier plans."""
    one, cluster = window_of(**window)
    other, _ = window_of(**{**window, "seed": window["seed"] + 1})
    both = [one.load_MLRE, other.load_MLRE]
    step = [
        LoadMatrix(np.concatenate(pair, axis=2), stage=stage)
        for pair, stage in ((both, "recompute"), (both[::-1], "update"))
    ]
    given = {"cluster": cluster, "model": MODEL, "slots": slots}
    analyzed, found = analyze_loads(step, **given).stages, simulate(step, ["static", "equipoise", "balanced"], **given)
    for w, stage in enumerate(("recompute", "update")):
        seconds = analyzed[stage].seconds
        for result, each in zip(found.policies, (seconds.now, seconds.planned, seconds.balanced), strict=True):
            assert ns(result.windows[w].seconds) == ns(each)
