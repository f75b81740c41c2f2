"""EPLB: DeepSeek's own skews on real traces, and each step against its definition."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.traces import read_traces
from equipoise.core import InfeasiblePlanError
from equipoise.planner import plan
from equipoise.planner.baselines import count_copies, pack, place, share_evenly
from tests.planner.cases import cluster_of, model_of, skewed_loads

TRACES = Path(__file__).parents[2].parent / "shared" / "data"

YARDSTICK = {
    # trace: (contiguous, oracle, first half predicts second half) at EP8 and at EP16, from DeepSeek's own code.
    "ESFT intent": ((1.4426, 1.0430, 1.0509), (1.8053, 1.0860, 1.0972)),
    "ESFT law": ((1.3923, 1.0720, 1.0766), (1.7240, 1.1184, 1.1432)),
    "ESFT summary": ((1.4280, 1.1067, 1.1146), (1.8653, 1.1847, 1.2010)),
    "ESFT translation": ((1.6987, 1.0442, 1.0567), (2.3594, 1.0796, 1.0989)),
    "gpt-oss-20b": ((1.7105, 1.4218, 1.5141), (2.5146, 1.6300, 1.8749)),
}


@pytest.fixture(scope="module")
def traces():
    if not TRACES.is_dir():
        pytest.skip("the real routing traces are not beside the project (../shared/data)")
    return {trace.name: trace for trace in read_traces(TRACES)}


def mean_skew(made):
    return float((made.rank_load_MLR.max(axis=-1) / made.rank_load_MLR.mean(axis=-1)).mean())


@pytest.mark.data
@pytest.mark.parametrize("ranks", [8, 16], ids="EP{}".format)
@pytest.mark.parametrize("name", YARDSTICK)
def test_skews_of_deepseeks_own_code_are_reproduced(traces, name, ranks):
    trace = traces[name]
    loads = trace.loads(ranks)
    half = loads.num_micro_steps // 2
    early, late = loads.micro_steps(0, half), loads.micro_steps(half, 2 * half)
    given_to = {"cluster": cluster_of(ranks), "model": trace.model, "slots": 2}
    contiguous, oracle, history = YARDSTICK[name][ranks // 16]
    assert round(mean_skew(plan(loads, policy="static", **given_to)), 4) == contiguous
    assert mean_skew(plan(loads, policy="eplb-oracle", **given_to)) == pytest.approx(oracle, rel=0.005)
    predicted = plan(late, policy="eplb-history", history=early, **given_to)
    assert mean_skew(predicted) == pytest.approx(history, rel=0.005)


loads_E = st.lists(st.integers(0, 200), min_size=2, max_size=5).map(np.array)


@given(loads_E, st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_no_other_counts_of_copies_have_a_smaller_largest_load(load_E, extra):
    copies_E = count_copies(load_E, len(load_E) + extra)
    assert copies_E.sum() == len(load_E) + extra
    others = [c for c in itertools.product(range(1, extra + 2), repeat=len(load_E)) if sum(c) == copies_E.sum()]
    best = min(float((load_E / np.array(c)).max()) for c in others)
    assert float((load_E / copies_E).max()) == best


def test_copies_go_to_the_largest_load_per_copy_and_ties_to_the_lowest():
    assert count_copies(np.array([10, 40, 10, 20]), 6).tolist() == [1, 3, 1, 1]
    assert count_copies(np.array([7, 7, 7]), 5).tolist() == [2, 2, 1]


def test_packing_takes_the_largest_first_and_keeps_equal_counts():
    assert pack(np.array([1.0, 9.0, 5.0, 4.0, 3.0, 2.0]), 2).tolist() == [0, 0, 1, 1, 0, 1]
    # The last copy may not join rank 1, which is lighter but full.
    assert pack(np.array([10.0, 1.0, 1.0, 1.0]), 2).tolist() == [0, 1, 1, 0]


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_rank_is_full_and_every_expert_has_a_copy(seed, ranks, slots):
    load_E = np.random.default_rng(seed).integers(0, 1000, size=8)
    copies_ER = place(load_E, ranks=ranks, slots=slots)
    assert (copies_ER.sum(axis=0) == 8 // ranks + slots).all()
    assert (copies_ER.sum(axis=1) >= 1).all()


def test_rows_are_shared_by_copies_and_the_remainder_moves_on():
    copies_ER = np.array([[2, 1], [0, 1]])
    quota_MER = share_evenly(np.array([[10, 5], [10, 5]]), copies_ER)
    # Three copies of 10 rows: 4, 3, 3 from the first copy on, then from another.
    assert quota_MER[0].tolist() == [[7, 3], [0, 5]]
    assert quota_MER[1].tolist() == [[6, 4], [0, 5]]


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_shares_differ_by_at_most_a_row_per_copy_and_add_up(seed):
    rng = np.random.default_rng(seed)
    load_ME = rng.integers(0, 50, size=(3, 6))
    copies_ER = rng.integers(0, 3, size=(6, 4))
    copies_ER[:, 0] += 1
    quota_MER = share_evenly(load_ME, copies_ER)
    assert (quota_MER.sum(axis=2) == load_ME).all()
    even_MER = load_ME[:, :, None] * copies_ER / copies_ER.sum(axis=1)[:, None]
    assert (np.abs(quota_MER - even_MER) <= copies_ER).all()
    assert (quota_MER[:, copies_ER == 0] == 0).all()


def test_the_plan_shares_rows_as_the_placement_says():
    loads = skewed_loads(8, ranks=4, experts=16)
    made = plan(loads, cluster=cluster_of(4, per_node=2), model=model_of(loads), slots=2, policy="eplb-oracle")
    total_MLE = loads.total_MLE()
    for layer in range(2):
        copies_ER = place(total_MLE[:, layer].sum(axis=0), ranks=4, slots=2)
        quota_MER = share_evenly(total_MLE[:, layer], copies_ER)
        for m in range(3):
            assert (made.quota_ER(m, layer) == quota_MER[m]).all()
        # Home is the owner's copy where it has one, else the lowest rank's.
        owner_E = np.arange(16) // 4
        expected = [
            owner if row[owner] else int(np.flatnonzero(row)[0]) for owner, row in zip(owner_E, copies_ER, strict=True)
        ]
        assert made.home_LE[layer].tolist() == expected


def test_history_is_asked_for_by_name():
    loads = skewed_loads(0)
    with pytest.raises(InfeasiblePlanError, match=r"eplb-history.*pass history="):
        plan(loads, cluster=cluster_of(8), model=model_of(loads), policy="eplb-history")


def test_history_of_another_model_is_refused():
    loads, other = skewed_loads(0), skewed_loads(0, layers=1)
    with pytest.raises(InfeasiblePlanError, match="history has 1 layers of 32 experts, the window 2 of 32"):
        plan(loads, cluster=cluster_of(8), model=model_of(loads), policy="eplb-history", history=other)


def test_history_that_misleads_costs_more_than_the_oracle():
    loads, other = skewed_loads(0, rows=2**18), skewed_loads(1, rows=2**18)
    given_to = {"cluster": cluster_of(8), "model": model_of(loads), "slots": 1}
    oracle = plan(loads, policy="eplb-oracle", **given_to)
    misled = plan(loads, policy="eplb-history", history=other, **given_to)
    assert plan(loads, policy="eplb-history", history=loads, **given_to).digest() == oracle.digest()
    assert misled.seconds.compute > oracle.seconds.compute
