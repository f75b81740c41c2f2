"""Quality on real routing traces: skew limits, the node bound, and seconds against every rival.

The traces have 8 micro-steps of 1,024 tokens per domain; the limits are for about 24,000 tokens a micro-step. So loads
are multiplied by 24 where a limit is held: the same pattern, with the row rounding of that size; most are held on the
traces as they are, too. Layers wider than the models' are composed of several real ones ("stacked", see
`benchmarks.traces`). Limits are means over traces and widths; the one width that misses its mean is held to its figure.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.traces import joined, read_traces, scaled, stacked
from equipoise.planner import PlanOptions, plan
from tests.planner.bounds import node_bound_ML, node_bound_rows_ML
from tests.planner.cases import cluster_of

TRACES = Path(__file__).parents[2].parent / "shared" / "data"
pytestmark = pytest.mark.data

ONE_DOMAIN = {
    # (ranks, experts of the stacked layer or None for the model's own): limit with 2 slots, with 1 slot.
    (8, None): (1.0005, 1.001),
    (16, None): (1.0015, 1.002),
    (32, 256): (1.004, 1.005),
    (64, 256): (1.013, 1.014),
}
FOUR_DOMAINS = {
    # ranks: the limit, and the widths (None: the model's own) over which it is a mean.
    8: (1.001, (None, 128, 256)),
    16: (1.004, (None, 128, 256)),
    32: (1.013, (128, 256)),
    64: (1.030, (256,)),
}


@pytest.fixture(scope="module")
def traces():
    if not TRACES.is_dir():
        pytest.skip("the real routing traces are not beside the project (../shared/data)")
    return read_traces(TRACES)


@pytest.fixture(scope="module")
def small_plans(traces):
    """`small_plans(ranks)`: plans of micro-steps of a thousand tokens, 2 slots, by trace; each set is made once."""

    @cache
    def planned(ranks):
        given = {"cluster": cluster_of(ranks), "slots": 2, "objective": "skew"}
        return {t.name: plan(loads, model=t.model, **given) for t, loads in windows(traces, ranks, None)}

    return planned


@pytest.fixture(scope="module")
def four_domains(traces):
    """`four_domains(ranks, experts, factor)`: mean skew of four unmixed domains, each computed once."""
    return cache(lambda ranks, experts, factor: skew_of_four(traces, ranks, experts=experts, factor=factor))


def windows(traces, ranks, experts):
    """(trace, its first 16 micro-steps at most) with at least 4 home experts per rank."""
    wide = [stacked(trace, experts) if experts else trace for trace in traces]
    return [(t, t.loads(ranks, micro_steps=16)) for t in wide if t.model.experts >= 4 * ranks]


def mean_skew(made):
    return float((made.rank_load_MLR.max(axis=-1) / made.rank_load_MLR.mean(axis=-1)).mean())


@pytest.mark.parametrize("slots", [2, 1], ids="{} slots".format)
@pytest.mark.parametrize("ranks, experts", ONE_DOMAIN, ids=str)
def test_one_domain_is_level(traces, ranks, experts, slots):
    found = [
        mean_skew(plan(scaled(loads, 24), cluster=cluster_of(ranks), model=t.model, slots=slots, objective="skew"))
        for t, loads in windows(traces, ranks, experts)
    ]
    assert np.mean(found) <= ONE_DOMAIN[ranks, experts][2 - slots]


@pytest.mark.parametrize("factor", [24, 1], ids="{}k tokens".format)
@pytest.mark.parametrize("ranks", FOUR_DOMAINS, ids="EP{}".format)
def test_four_unmixed_domains_are_level_in_the_mean(four_domains, ranks, factor):
    limit, widths = FOUR_DOMAINS[ranks]
    found = [four_domains(ranks, experts, factor) for experts in widths]
    assert np.mean(found) <= limit, found


def test_four_unmixed_domains_stay_below_the_limit_with_two_homes_per_rank(traces):
    """16 of 128 experts in each of 8 nodes: few swaps, so the search must be long to find the last permille."""
    four = [stacked(trace, 128) for trace in traces[:4]]
    loads = scaled(joined([trace.loads(64, micro_steps=8) for trace in four]), 24)
    made = plan(loads, cluster=cluster_of(64), model=four[0].model, slots=1, objective="skew")
    # A search an eighth as long ends at 1.029.
    assert mean_skew(made) <= 1.028


def test_the_narrowest_layer_misses_the_mean_by_what_is_stated(four_domains):
    """64 experts on two nodes with 32 unlike micro-steps: few subsets of 32 experts are level in all of them."""
    assert 1.004 < four_domains(16, None, 24) <= 1.0051


def skew_of_four(traces, ranks, *, experts, factor):
    parts = windows(traces[:4], ranks, experts)
    loads = scaled(joined([part for _, part in parts]), factor)
    made = plan(loads, cluster=cluster_of(ranks), model=parts[0][0].model, slots=2, objective="skew")
    if factor > 1:
        assert mean_skew(made) <= node_bound_ML(loads, made.home_LE, made.cluster).mean() * 1.001
    return mean_skew(made)


def test_one_domain_is_level_also_in_micro_steps_of_a_thousand_tokens(small_plans):
    assert np.mean([mean_skew(made) for made in small_plans(16).values()]) <= ONE_DOMAIN[16, None][0]


@pytest.mark.parametrize("ranks", [8, 16], ids="EP{}".format)
def test_two_slots_reach_the_node_bound_in_whole_rows(small_plans, ranks):
    for name, made in small_plans(ranks).items():
        rows_ML = node_bound_rows_ML(made.loads, made.home_LE, made.cluster)
        reached = made.rank_load_MLR.max(axis=-1).sum()
        assert rows_ML.sum() <= reached <= rows_ML.sum() * 1.001, name


def test_one_slot_is_nearly_as_level_in_micro_steps_of_a_thousand_tokens(traces):
    """Every third layer: what more slots bring is said by the tests above, over all of them."""
    found = []
    for trace, loads in windows(traces, 16, None):
        some = type(loads)(loads.load_MLRE[:, ::3])
        model = type(trace.model).preset(trace.model.name, layers=some.num_layers)
        found.append(mean_skew(plan(some, cluster=cluster_of(16), model=model, slots=1, objective="skew")))
    assert np.mean(found) <= ONE_DOMAIN[16, None][1]


@pytest.mark.parametrize("ranks", [8, 16], ids="EP{}".format)
@pytest.mark.parametrize("factor", [1, 8, 64], ids="{}k tokens".format)
def test_no_policy_is_faster_in_predicted_seconds(traces, ranks, factor):
    for trace, loads in windows(traces[:4], ranks, None):
        some = scaled(type(loads)(loads.load_MLRE[:, ::6]), factor)
        model = type(trace.model).preset(trace.model.name, layers=some.num_layers)
        given_to = {"cluster": cluster_of(ranks), "model": model, "slots": 1, "options": PlanOptions(sends="rows")}
        ours = plan(some, **given_to).seconds.total
        rivals = {
            p: plan(some, policy=p, **given_to).seconds.total for p in ("static", "eplb-oracle", "lplb", "reactive")
        }
        assert ours <= min(rivals.values()), (trace.name, ours, rivals)
