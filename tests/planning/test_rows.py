"""Rows of one rank, counted from the routes it replays, and joined with those of the others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import LoadsError, RoutesError
from equipoise.planning.rows import RankRows, count_rows, fill_rows, join_forecasts, join_rows, learn_unknown


def routes_of(seed, *, micro_steps, layers, experts):
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(-1, experts, size=(rng.integers(0, 6), 2)) for _ in range(layers)] for _ in range(micro_steps)
    ]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), micro_steps=st.integers(1, 3), layers=st.integers(1, 3), experts=st.integers(1, 5))
def test_counting_equals_one_token_after_the_other(seed, micro_steps, layers, experts):
    routes = routes_of(seed, micro_steps=micro_steps, layers=layers, experts=experts)
    rows = count_rows(routes, experts=experts)
    for m, by_layer in enumerate(routes):
        for layer, ids_TK in enumerate(by_layer):
            wanted, known = [0] * experts, 0
            for ids_K in ids_TK.tolist():
                if -1 not in ids_K:
                    known += 1
                    for expert in ids_K:
                        wanted[expert] += 1
            assert rows.load_MLE[m, layer].tolist() == wanted
            share = 1.0 if rows.coverage_ML is None else rows.coverage_ML[m, layer]
            assert share == (known / len(ids_TK) if len(ids_TK) else 1.0)


def test_where_gaps_are_allowed_a_token_with_some_experts_is_known():
    ids = np.array([[2, -1, 1], [-1, -1, -1], [0, 1, 2]])
    rows = count_rows([[ids]], experts=3, allow_gaps=True)
    assert rows.load_MLE.tolist() == [[[1, 2, 2]]]
    assert rows.has_gaps and rows.coverage_ML.tolist() == [[2 / 3]]
    whole = count_rows([[ids[2:]]], experts=3, allow_gaps=True)
    assert not whole.has_gaps and whole.coverage_ML is None


@pytest.mark.parametrize(("bad", "words"), [(4, "expert 4 does not exist"), (-2, "expert -2 does not exist")])
def test_an_id_outside_the_model_is_named_with_its_place(bad, words):
    good = np.zeros((3, 2), dtype=np.int64)
    with pytest.raises(RoutesError, match=f"micro-step 1, layer index 0: {words}"):
        count_rows([[good], [np.full((1, 2), bad)]], experts=4)


@pytest.mark.parametrize(
    "routes", [[[np.zeros((2, 2))]], [[np.zeros(3, dtype=int)]]], ids=["not integers", "without an axis of choices"]
)
def test_ids_of_another_form_are_refused(routes):
    with pytest.raises(RoutesError, match=r"give \[T, K\] integers"):
        count_rows(routes, experts=4)


def test_micro_steps_must_have_the_same_layers():
    ids = np.zeros((1, 1), dtype=np.int64)
    with pytest.raises(RoutesError, match=r"\[2, 1\] layers by micro-step"):
        count_rows([[ids, ids], [ids]], experts=2)


def test_counted_rows_pass_unchanged():
    rows = RankRows(load_MLE=np.ones((1, 2, 3), dtype=np.int64))
    assert count_rows(rows, experts=3) is rows


def test_rows_without_a_micro_step_are_refused():
    with pytest.raises(LoadsError, match=r"load_MLE has shape \(0, 2, 3\)"):
        RankRows(load_MLE=np.ones((0, 2, 3)))


def test_joined_rows_stand_by_rank_with_their_coverage():
    one = RankRows(load_MLE=np.arange(12).reshape(2, 2, 3), stage="recompute")
    two = RankRows(load_MLE=np.arange(12).reshape(2, 2, 3) + 100, coverage_ML=np.full((2, 2), 0.5), stage="recompute")
    loads = join_rows([one, two], layer_numbers=(1, 5), top_k=2)
    assert np.array_equal(loads.load_MLRE[:, :, 0], one.load_MLE)
    assert np.array_equal(loads.load_MLRE[:, :, 1], two.load_MLE)
    assert loads.stage == "recompute"
    assert loads.layer_numbers_L.tolist() == [1, 5]
    assert (loads.coverage_MLR[:, :, 0] == 1).all() and (loads.coverage_MLR[:, :, 1] == 0.5).all()


@pytest.mark.parametrize("other", [{"load_MLE": np.ones((2, 1, 3))}, {"stage": "recompute"}], ids=["shape", "stage"])
def test_ranks_that_announce_other_windows_are_refused(other):
    rows = {"load_MLE": np.ones((1, 1, 3), dtype=np.int64)}
    with pytest.raises(LoadsError, match="rank 1 has micro-steps, layers, experts and stage"):
        join_rows([RankRows(**rows), RankRows(**{**rows, **other})], layer_numbers=(0,), top_k=1)


def test_of_an_unknown_window_nothing_is_known_but_its_size():
    rows = RankRows.unknown(3, layers=2, experts=4, stage="recompute")
    assert rows.load_MLE.shape == (3, 2, 4) and not rows.load_MLE.any()
    assert not rows.coverage_ML.any() and rows.stage == "recompute" and not rows.has_ids
    with pytest.raises(LoadsError, match="micro_steps"):
        RankRows.unknown(0, layers=2, experts=4)


def test_forecasts_of_ranks_are_put_together_and_one_that_saw_nothing_expects_nothing():
    before_LE = np.arange(6).reshape(2, 3)
    joined = join_forecasts([before_LE, None, 2 * before_LE])
    assert joined.load_MLRE.shape == (1, 2, 3, 3)
    assert joined.load_MLRE[0].transpose(1, 0, 2).tolist() == [
        before_LE.tolist(),
        [[0] * 3] * 2,
        (2 * before_LE).tolist(),
    ]
    assert join_forecasts([None, None]) is None


def test_what_is_learnt_is_half_the_last_windows_unknown_rows_by_micro_step():
    known = RankRows(load_MLE=np.array([[[4, 0]], [[4, 2]]]), coverage_ML=np.full((2, 1), 0.5))
    assert learn_unknown(None, np.array([[8, 2]]), known=known) is None, "every row was known"
    first = learn_unknown(None, np.array([[10, 22]]), known=known)
    assert first.tolist() == [[1, 10]]
    second = learn_unknown(first, np.array([[48, 0]]), known=known)
    assert second.tolist() == [[10, 5]], "(1 + 20) / 2, and fewer than known are none"
    assert learn_unknown(second, np.array([[8, 2]]), known=known) is second
    filled = RankRows(load_MLE=known.load_MLE)
    assert learn_unknown(second, np.array([[10, 22]]), known=filled) is second, "what was filled teaches nothing"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 3),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 6),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_free_tokens_without_a_route_get_distinct_least_loaded_experts(seed, ranks, experts, top_k, share):
    top_k, rng = min(top_k, experts), np.random.default_rng(seed)
    windows = [[[_some_ids(rng, 5 + m, experts, top_k) for _ in range(2)] for m in range(2)] for _ in range(ranks)]
    free = [[rng.random(5 + m) < share for m in range(2)] for _ in range(ranks)]
    rows_R = [count_rows(w, experts=experts, free=f) for w, f in zip(windows, free, strict=True)]
    loads = join_rows(rows_R, layer_numbers=(0, 1), top_k=top_k)
    filled = np.zeros_like(loads.load_MLRE[..., 0])
    for rank, (window, is_free) in enumerate(zip(windows, free, strict=True)):
        found = fill_rows(rows_R, window, is_free, rank=rank, top_k=top_k)
        again = fill_rows(rows_R, window, is_free, rank=rank, top_k=top_k)
        for m, layer in np.ndindex(2, 2):
            ids_TK, wanted_T = window[m][layer], is_free[m] & (window[m][layer] < 0).any(axis=1)
            assert ((m, layer) in found) == bool(wanted_T.any()), "no entry where nothing is filled"
            known_TK = ids_TK[~wanted_T & (ids_TK >= 0).all(axis=1)]
            if wanted_T.any():
                given = found[m, layer]
                assert given.token_F.tolist() == np.flatnonzero(wanted_T).tolist() and given.num_tokens == len(ids_TK)
                assert (given.ids_FK.diff(dim=1) > 0).all(), "distinct"
                assert (given.ids_FK == again[m, layer].ids_FK).all(), "deterministic"
                known_TK = np.concatenate([known_TK, given.ids_FK.numpy()])
                filled[m, layer, rank] = given.ids_FK.numel()
            counted_E = np.bincount(known_TK.ravel().astype(int), minlength=experts)
            assert loads.load_MLRE[m, layer, rank].tolist() == counted_E.tolist()
            share_known = 1.0 if loads.coverage_MLR is None else loads.coverage_MLR[m, layer, rank]
            assert share_known == len(known_TK) / len(ids_TK)
    assert (filled == (0 if loads.filled_MLR is None else loads.filled_MLR)).all()
    if share == 1:
        assert loads.coverage_MLR is None, "all tokens are free, so coverage is complete"
    if share == 0:
        assert loads.filled_MLR is None


def _some_ids(rng, tokens, experts, top_k):
    """Distinct ids of each token, some of them unknown."""
    ids_TK = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    ids_TK[rng.random(tokens) < 0.4] = -1
    return ids_TK


def test_filled_rows_level_experts_and_ranks():
    # Two ranks with the same routes and three free tokens each; expert 0 is hot, 3 is idle.
    ids = np.array([[0, 1], [0, 2], [0, 1], [-1, -1], [-1, -1], [-1, -1]])
    free = [np.array([False, False, False, True, True, True])]
    rows_R = [count_rows([[ids]], experts=4, free=free)] * 2
    loads = join_rows(rows_R, layer_numbers=(0,), top_k=2)
    assert loads.total_MLE().tolist() == [[[6, 6, 6, 6]]]
    assert loads.num_filled == 12


def test_a_token_with_some_experts_is_known_where_gaps_are_allowed_and_not_filled():
    ids, free = np.array([[2, -1], [-1, -1]]), [np.array([True, True])]
    rows = count_rows([[ids]], experts=3, allow_gaps=True, free=free)
    assert rows.free_ML.tolist() == [[1]] and rows.coverage_ML is None
    found = fill_rows([rows], [[ids]], free, rank=0, top_k=2)
    assert found[0, 0].token_F.tolist() == [1] and found[0, 0].ids_FK.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("free", "words"),
    [
        ([np.ones(2, dtype=bool)], "micro-step 0, layer index 0: free tokens have shape .2,.*a mask of 3 bools"),
        ([np.ones(3, dtype=int)], "dtype int64; give a mask of 3 bools"),
        ([np.ones(3, dtype=bool)] * 2, "for 2 micro-steps, routes for 1"),
    ],
    ids=["another length", "integers", "another number of micro-steps"],
)
def test_a_mask_of_another_form_is_refused(free, words):
    with pytest.raises(RoutesError, match=words):
        count_rows([[np.full((3, 2), -1)]], experts=4, free=free)


def test_free_tokens_need_the_routes():
    with pytest.raises(RoutesError, match="give the routes themselves"):
        count_rows(RankRows(load_MLE=np.ones((1, 2, 3), dtype=np.int64)), experts=3, free=[np.ones(1, dtype=bool)])
