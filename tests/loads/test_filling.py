"""Rows without a route: right totals, ids of a token distinct, the lowest possible maximum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from equipoise.core import ModelShape
from equipoise.loads.filling import arange_rows, first_rows, spread_ids, spread_rows


def lowest_maximum(load_E: np.ndarray, *, tokens: int, top_k: int) -> int:
    """The best a token-by-token search can reach: each token takes the top_k least loaded experts."""
    load = load_E.copy()
    for _ in range(tokens):
        load[np.argsort(load, kind="stable")[:top_k]] += 1
    return int(load.max())


cases = st.integers(1, 9).flatmap(
    lambda experts: st.tuples(
        hnp.arrays(np.int64, (2, experts), elements=st.integers(0, 30)),
        hnp.arrays(np.int64, st.integers(1, 4), elements=st.integers(0, 7)),
        st.integers(1, experts),
    )
)


@settings(max_examples=100, deadline=None)
@given(cases)
def test_every_rank_gets_its_rows_and_no_expert_twice_from_one_token(case):
    load_LE, tokens_R, top_k = case
    rows_LRE = spread_rows(load_LE, tokens_R, top_k)
    assert (rows_LRE.sum(axis=2) == tokens_R * top_k).all()
    assert (rows_LRE >= 0).all() and (rows_LRE <= tokens_R[:, None]).all()


@settings(max_examples=100, deadline=None)
@given(cases)
def test_spread_reaches_the_lowest_possible_maximum(case):
    load_LE, tokens_R, top_k = case
    filled_LE = load_LE + spread_rows(load_LE, tokens_R, top_k).sum(axis=1)
    for load_E, filled_E in zip(load_LE, filled_LE, strict=True):
        assert filled_E.max() == lowest_maximum(load_E, tokens=int(tokens_R.sum()), top_k=top_k)


def test_spread_fills_the_valleys_first_and_ties_by_expert_number():
    rows = spread_rows(np.array([[5, 0, 5, 1]]), np.array([2, 1]), 2)
    # Six rows, at most three per expert: experts 1 and 3 take three each.
    assert rows.sum(axis=1).tolist() == [[0, 3, 0, 3]]
    assert rows.tolist() == [[[0, 2, 0, 2], [0, 1, 0, 1]]]
    assert spread_rows(np.zeros((1, 4), dtype=np.int64), np.array([1]), 3).tolist() == [[[1, 1, 1, 0]]]


@pytest.mark.parametrize(("experts", "top_k", "hidden_layers"), [(7, 4, 5), (8, 2, 4), (12, 3, 2), (3, 3, 1)])
def test_running_ids_equal_those_written_out(experts, top_k, hidden_layers):
    numbers = tuple(range(1, hidden_layers)) or (0,)
    model = ModelShape(
        name="m",
        experts=experts,
        top_k=top_k,
        layer_numbers=numbers,
        hidden_layers=hidden_layers,
        hidden=1,
        expert_width=1,
    )
    tokens_R = np.array([0, 3, 29])
    rows_LRE = arange_rows(model, numbers, tokens_R)
    for r, tokens in enumerate(tokens_R):
        written_out = np.arange(tokens * hidden_layers * top_k).reshape(tokens, hidden_layers, top_k) % experts
        for i, number in enumerate(numbers):
            wanted = np.bincount(written_out[:, number].ravel(), minlength=experts)
            assert rows_LRE[i, r].tolist() == wanted.tolist()


def test_first_ids_take_every_token():
    assert first_rows(4, np.array([3, 0]), 2).tolist() == [[3, 3, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("top_k", [1, 4])
def test_nothing_to_spread_adds_nothing(top_k):
    assert not spread_rows(np.array([[1, 2, 3, 4]]), np.array([0, 0]), top_k).any()


by_layer = st.integers(1, 9).flatmap(
    lambda experts: st.integers(1, 4).flatmap(
        lambda ranks: st.tuples(
            hnp.arrays(np.int64, (3, experts), elements=st.integers(0, 30)),
            hnp.arrays(np.int64, (3, ranks), elements=st.integers(0, 7)),
            st.integers(1, experts),
        )
    )
)


@settings(max_examples=100, deadline=None)
@given(by_layer)
def test_ids_written_out_are_distinct_and_are_the_rows_that_are_counted(case):
    load_LE, tokens_LR, top_k = case
    rows_LRE = spread_rows(load_LE, tokens_LR, top_k)
    for rank in range(tokens_LR.shape[1]):
        found = spread_ids(load_LE, tokens_LR, top_k, rank=rank)
        for layer, ids_TK in enumerate(found):
            assert ids_TK.shape == (tokens_LR[layer, rank], top_k)
            assert (np.diff(ids_TK, axis=1) > 0).all(), "ascending, so distinct"
            counted = np.bincount(ids_TK.ravel(), minlength=load_LE.shape[1])
            assert counted.tolist() == rows_LRE[layer, rank].tolist()


@settings(max_examples=50, deadline=None)
@given(by_layer)
def test_each_layer_is_filled_as_if_it_were_alone(case):
    load_LE, tokens_LR, top_k = case
    alone = [spread_rows(load_LE[[n]], tokens_LR[n], top_k)[0] for n in range(len(load_LE))]
    assert (spread_rows(load_LE, tokens_LR, top_k) == np.stack(alone)).all()
