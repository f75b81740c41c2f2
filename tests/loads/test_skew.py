"""The one definition of skew, held against a few independent lines of numpy, on real traces too."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from benchmarks.paper_cases import fluctuation
from equipoise.core import LoadMatrix, LoadsError, ModelShape, Routes, SampleRoutes, Schedule
from equipoise.loads.matrix import count_loads
from equipoise.loads.skew import rank_loads, skew, skew_ML

TRACES = Path(__file__).parents[2].parent / "shared" / "data"

loads_strategy = hnp.arrays(
    np.int64,
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.just(6)),
    elements=st.integers(0, 50),
)


@settings(max_examples=80, deadline=None)
@given(loads_strategy, st.sampled_from([1, 2, 3, 6]))
def test_skew_is_busiest_over_mean_in_rows(load_MLRE, ep):
    summary = skew(LoadMatrix(load_MLRE), ep=ep)
    for (m, layer), got in np.ndenumerate(summary.dispatched.skew_ML):
        received = [0] * ep
        for (_, e), rows in np.ndenumerate(load_MLRE[m, layer]):
            received[e // (6 // ep)] += int(rows)
        wanted = max(received) / (sum(received) / ep) if sum(received) else 1.0
        assert got == pytest.approx(wanted, rel=1e-12)
        assert 1 <= got <= ep


def test_an_idle_layer_has_skew_one():
    assert skew_ML(np.zeros((1, 1, 4), dtype=np.int64)).tolist() == [[1.0]]


def test_opposite_micro_steps_do_not_average_away():
    load = np.zeros((2, 1, 1, 2), dtype=np.int64)
    load[0, 0, 0, 0] = load[1, 0, 0, 1] = 10
    assert skew(LoadMatrix(load), ep=2).mean == 2.0


def test_moving_rows_between_source_ranks_changes_nothing():
    load = np.arange(24).reshape(1, 2, 3, 4)
    moved = load[:, :, ::-1]
    assert skew(LoadMatrix(load), ep=2) == skew(LoadMatrix(moved), ep=2)


def test_relabelling_micro_steps_changes_no_figure():
    load = np.random.default_rng(0).integers(0, 9, (5, 2, 2, 4))
    a, b = skew(LoadMatrix(load)), skew(LoadMatrix(load[::-1]))
    assert a.dispatched.to_dict() == b.dispatched.to_dict()


def test_stages_are_never_mixed():
    load = np.ones((1, 1, 2, 4), dtype=np.int64)
    both = [LoadMatrix(load, stage="recompute"), LoadMatrix(load, stage="update")]
    with pytest.raises(LoadsError, match="one stage at a time"):
        skew(both)
    with pytest.raises(LoadsError, match="0 stages"):
        skew([])


def test_windows_of_one_stage_stand_side_by_side():
    a, b = np.array([[[[4, 0]]]]), np.array([[[[1, 1]]]])
    summary = skew([LoadMatrix(a), LoadMatrix(b)], ep=2)
    assert summary.dispatched.skew_ML.tolist() == [[2.0], [1.0]]
    assert summary.stage == "update"


def test_skew_is_reported_with_and_without_padding():
    load = np.array([[[[6, 2]]]])
    padding = np.array([[[[4, 0]]]])
    summary = skew(LoadMatrix(load, padding_MLRE=padding), ep=2)
    assert (summary.mean, summary.without_padding.mean) == (1.5, 1.0)


def test_homes_replace_contiguous_owners():
    load = LoadMatrix(np.array([[[[5, 5, 1, 1]]]]))
    home_LE = np.array([[0, 1, 0, 1]])
    assert rank_loads(load, ep=2).tolist() == [[[10, 2]]]
    assert rank_loads(load, ep=2, home_LE=home_LE).tolist() == [[[6, 6]]]
    assert skew(load, ep=2, home_LE=home_LE).max == 1.0


def test_bare_rank_loads_are_described_as_they_are():
    summary = skew(np.array([[[3, 1]], [[1, 1]]]))
    assert summary.dispatched.skew_ML.tolist() == [[1.5], [1.0]]
    assert (summary.ranks, summary.stage) == (2, None)
    with pytest.raises(LoadsError, match="already says who receives"):
        skew(np.array([[[3, 1]]]), ep=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda m: rank_loads(m, ep=3), "4 experts do not divide by 3 ranks", id="width"),
        pytest.param(lambda m: rank_loads(m, home_LE=np.array([[0, 1, 2, 9]])), "ranks 0..1", id="home"),
        pytest.param(lambda m: skew_ML(np.array([[[-1, 2]]])), "non-negative", id="negative"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(LoadsError, match=message):
        call(LoadMatrix(np.ones((1, 1, 2, 4), dtype=np.int64)))


def test_figures_are_those_of_the_distribution():
    rank_load = np.ones((4, 5, 4), dtype=np.int64)
    rank_load[:, :, 0] += np.arange(20).reshape(4, 5)
    summary = skew(rank_load)
    ratios = summary.dispatched.skew_ML
    figures = summary.to_dict()
    assert figures["p50"] == round(float(np.median(ratios)), 4)
    assert figures["p95"] == round(float(np.quantile(ratios, 0.95)), 4)
    assert figures["layers"][2]["max"] == round(float(ratios[:, 2].max()), 4)
    assert figures["micro_steps"][1]["mean"] == round(float(ratios[1].mean()), 4)
    assert summary.dispatched.worst == (3, 4)
    assert json.loads(json.dumps(figures)) == figures


def traces() -> list:
    """(name, file, array, preset, published EP8 skew, published EP16 skew) of shared/evidence.md."""
    return [
        pytest.param("dsv2lite_esft_routes.npz", "intent_ids", "deepseek-v2-lite", (1.4426, 1.8053), id="intent"),
        pytest.param("dsv2lite_esft_routes.npz", "law_ids", "deepseek-v2-lite", (1.3923, 1.7240), id="law"),
        pytest.param("dsv2lite_esft_routes.npz", "summary_ids", "deepseek-v2-lite", (1.4280, 1.8653), id="summary"),
        pytest.param(
            "dsv2lite_esft_routes.npz", "translation_ids", "deepseek-v2-lite", (1.6987, 2.3594), id="translation"
        ),
        pytest.param("gptoss20b_decode_routes.npz", "ids", "gpt-oss-20b", (1.7105, 2.5146), id="gpt-oss-20b"),
    ]


@pytest.mark.parametrize(
    ("loads", "words"),
    [
        ([1, 2], "a window of loads is a int; it must be a LoadMatrix"),
        ("loads.npz", "a window of loads is a str; it must be a LoadMatrix"),
        (None, "loads is a NoneType; it must be a LoadMatrix or a Sequence or a ndarray"),
    ],
    ids=["numbers", "path", "nothing"],
)
def test_what_is_of_another_kind_is_refused_by_name(loads, words):
    with pytest.raises(LoadsError, match=words):
        skew(loads)


@pytest.mark.data
@pytest.mark.parametrize(("file", "array", "preset", "published"), traces())
def test_real_traces_give_the_skew_of_an_independent_computation(file, array, preset, published):
    if not (TRACES / file).exists():
        pytest.skip(f"the real routing traces are not beside the project: no {file} in ../shared/data")
    ids = np.load(TRACES / file)[array]
    model = ModelShape.preset(preset)
    steps = len(ids) // 1024

    # Ours: one sample in file order, cut into micro-steps of 1,024 tokens, remainder dropped.
    routes = Routes.of([SampleRoutes(name=array, ids_TLK=ids, num_tokens=len(ids))], model=model)
    loads = count_loads(routes, Schedule.of([(0, 1024 * m, 1024 * m + 1024, m, 0) for m in range(steps)], ranks=1))

    for ep, wanted in zip((8, 16), published, strict=True):
        # Independent: ids to ranks, a histogram per (micro-step, layer), busiest over mean.
        rank = ids[: steps * 1024].astype(int).reshape(steps, 1024, model.layers, -1) // (model.experts // ep)
        per_rank = np.stack([(rank == r).sum(axis=(1, 3)) for r in range(ep)])
        independent = (per_rank.max(axis=0) / per_rank.mean(axis=0)).mean()
        assert skew(loads, ep=ep).mean == pytest.approx(independent, abs=1e-12)
        assert round(skew(loads, ep=ep).mean, 4) == wanted


@settings(max_examples=80, deadline=None)
@given(loads_strategy)
def test_fluctuation_is_the_weighted_variation_of_shares(load_MLRE):
    total_MLE, sums, rows = load_MLRE.sum(axis=2), 0.0, 0
    for layer in range(total_MLE.shape[1]):
        shares = [row / row.sum() for row in total_MLE[:, layer] if row.sum()]
        for e in range(6):
            values = [share[e] for share in shares]
            if any(values):
                weight = int(total_MLE[:, layer, e].sum())
                sums, rows = sums + weight * np.std(values) / np.mean(values), rows + weight
    assert fluctuation(LoadMatrix(load_MLRE)) == pytest.approx(sums / max(1, rows), abs=1e-12)


def test_fluctuation_sees_the_pattern_and_not_the_size():
    steady = np.array([1, 2, 3, 0]) * np.array([1, 5, 0, 2])[:, None]
    assert fluctuation(LoadMatrix(steady[:, None, None])) == pytest.approx(0)
    # Two experts that take turns: each has all rows in half of the micro-steps.
    turns = np.array([[4, 0], [0, 4]])
    assert fluctuation(LoadMatrix(turns[:, None, None])) == pytest.approx(1)
