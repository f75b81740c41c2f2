"""Micro-batches to routes and schedules: every token's ids at its place, whatever the padding."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.adapters import protocol, transformers
from equipoise.adapters.protocol import MicroBatch, free_tokens, routes_from, schedule_from
from equipoise.core import ModelShape, Piece, Routes, RoutesError, SampleRoutes, ScheduleError
from equipoise.loads import count_loads
from equipoise.planning.rows import count_rows, join_rows

MODEL = ModelShape.preset("qwen3-30b-a3b", experts=8, layers=2, top_k=2)


def sample(name, num_tokens, *, rows=None, known=None):
    rows = num_tokens if rows is None else rows
    ids_TLK = np.random.default_rng(num_tokens).integers(0, MODEL.experts, (rows, MODEL.layers, MODEL.top_k))
    return SampleRoutes(name=name, ids_TLK=ids_TLK.astype(np.uint8), num_tokens=num_tokens, known_TL=known)


def padded(samples, lengths, *, side, width, **more):
    """A batch with one row per sample and all padding on one side."""
    mask = np.zeros((len(samples), width), dtype=np.int64)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    mask = mask if side == "right" else mask[:, ::-1]
    numbers = tuple(range(len(samples)))
    return MicroBatch(
        input_ids=np.zeros_like(mask), samples=numbers, lengths=tuple(lengths), attention_mask=mask, **more
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    extra=st.integers(0, 3),
    side=st.sampled_from(["left", "right"]),
    policy=st.sampled_from(["arange", "first", "unknown", "spread"]),
)
def test_every_token_has_its_ids_at_its_place_and_padding_what_the_policy_says(lengths, extra, side, policy):
    width = max(1, max(lengths) + extra)
    routes = tuple(sample(f"s{n}", length) for n, length in enumerate(lengths))
    batch = padded(routes, lengths, side=side, width=width, routes=routes, padding_policy=policy)
    ids_BSLK = (
        routes_from(batch, model=MODEL).transpose(1, 0, 2).reshape(len(lengths), width, MODEL.layers, MODEL.top_k)
    )
    padding = []
    for row, length in enumerate(lengths):
        tokens = slice(0, length) if side == "right" else slice(width - length, width)
        assert np.array_equal(ids_BSLK[row, tokens], routes[row].ids_TLK)
        padding.append(np.delete(ids_BSLK[row], np.arange(width)[tokens], axis=0))
    padding_PLK = np.concatenate(padding)
    assert len(padding_PLK) == batch.num_padding == len(lengths) * width - sum(lengths)
    is_last = np.zeros((len(lengths), width), dtype=bool)
    for row, length in enumerate(lengths):
        is_last[row, (length if side == "right" else width) - 1] = length > 0
    assert np.array_equal(free_tokens(batch).reshape(is_last.shape), is_last | ~batch.token_BS)
    if policy in ("unknown", "spread"):
        assert (padding_PLK == -1).all()
    else:
        assert ((padding_PLK >= 0) & (padding_PLK[:, :, :1] != padding_PLK[:, :, 1:]).any(axis=2, keepdims=True)).all()


@pytest.mark.parametrize("policy", ["arange", "first", "spread"])
def test_rows_of_the_routes_are_the_loads_of_the_schedule(policy):
    """Two ways to one number: ids laid out for the router, and pieces counted by the load counter."""
    routes = tuple(sample(f"s{n}", length) for n, length in enumerate((5, 3, 4, 6)))
    batches = []
    for m in range(2):
        numbers = (2 * m, 2 * m + 1)
        lengths = tuple(routes[n].num_tokens - 1 for n in numbers)
        mask = np.arange(8) < np.array(lengths)[:, None]
        batches.append(
            [
                MicroBatch(
                    input_ids=np.zeros((2, 8), dtype=int),
                    samples=numbers,
                    lengths=lengths,
                    routes=tuple(routes[n] for n in numbers),
                    attention_mask=mask,
                    padding_policy=policy,
                )
            ]
        )
    schedule = schedule_from(batches, stage="recompute")
    laid_out = [routes_from(by_rank[0], model=MODEL) for by_rank in batches]
    free = [free_tokens(by_rank[0]) for by_rank in batches]
    rows = count_rows(laid_out, experts=MODEL.experts, free=free)
    window = join_rows([rows], layer_numbers=MODEL.layer_numbers, top_k=MODEL.top_k)
    loads = count_loads(Routes.of(routes, model=MODEL), schedule)
    assert np.array_equal(loads.load_MLRE, window.load_MLRE)
    assert loads.num_filled == window.num_filled == (policy == "spread") * loads.padding_MLRE.sum()
    assert schedule.stage == "recompute"
    assert rows.coverage_ML is None


def test_packed_samples_stand_one_behind_the_other_and_may_begin_late():
    routes = (sample("a", 5), sample("b", 4))
    batch = MicroBatch(
        input_ids=np.zeros((1, 8), dtype=int), samples=(7, 3), lengths=(3, 4), starts=(2, 0), routes=routes
    )
    ids_LTK = routes_from(batch, model=MODEL)
    assert np.array_equal(ids_LTK[:, :3].transpose(1, 0, 2), routes[0].ids_TLK[2:5])
    assert np.array_equal(ids_LTK[:, 3:7].transpose(1, 0, 2), routes[1].ids_TLK)
    assert free_tokens(batch).tolist() == [False] * 2 + [True] + [False] * 3 + [True, True], "last tokens and padding"
    assert free_tokens(replace(batch, routes=())).tolist() == [False] * 7 + [True], "who knows where samples end?"
    cut = replace(batch, lengths=(2, 3), attention_mask=np.arange(8)[None] < 5)
    assert free_tokens(cut).tolist() == [False] * 5 + [True] * 3, "the last forwarded tokens have successors"
    schedule = schedule_from([[batch]])
    assert schedule.pieces.tolist() == [list(Piece(7, 2, 5, 0, 0)), list(Piece(3, 0, 4, 0, 0))]
    assert schedule.padding_MR.tolist() == [[1]]


def test_unknown_routes_are_minus_one_and_never_an_expert():
    known = np.ones((4, 2), dtype=bool)
    known[1, 0] = False
    routes = (sample("short", 5, rows=3), None, sample("holes", 4, known=known))
    batch = MicroBatch(input_ids=np.zeros((3, 5), dtype=int), samples=(0, 1, 2), lengths=(5, 5, 4), routes=routes)
    ids_BSLK = routes_from(batch, model=MODEL).transpose(1, 0, 2).reshape(3, 5, 2, 2)
    assert (ids_BSLK[0, 3:] == -1).all()
    assert (ids_BSLK[0, :3] >= 0).all()
    assert (ids_BSLK[1] == -1).all()
    assert (ids_BSLK[2, 1, 0] == -1).all()
    assert (ids_BSLK[2, 1, 1] >= 0).all()


def test_what_does_not_fit_is_refused():
    ids = np.zeros((2, 4), dtype=int)
    with pytest.raises(ScheduleError, match="lengths add up to 7 tokens, the attention mask shows 8"):
        MicroBatch(input_ids=ids, samples=(0, 1), lengths=(4, 3), attention_mask=np.ones((2, 4)))
    with pytest.raises(ScheduleError, match="routes names 1 samples, the micro-batch has 2"):
        MicroBatch(input_ids=ids, samples=(0, 1), lengths=(4, 4), routes=(None,))
    good = MicroBatch(input_ids=ids, samples=(0, 1), lengths=(4, 4))
    with pytest.raises(ScheduleError, match=r"batches for \[1, 2\] ranks"):
        schedule_from([[good], [good, good]])
    one_layer = SampleRoutes(name="thin", ids_TLK=np.zeros((4, 1, 2), dtype=int), num_tokens=4)
    with pytest.raises(RoutesError, match="sample 'thin': routes have layers and choices"):
        routes_from(MicroBatch(input_ids=ids[:1], samples=(0,), lengths=(4,), routes=(one_layer,)), model=MODEL)


def test_the_transformers_adapter_has_the_functions_that_every_adapter_has():
    asked = {"inspect", "install", "uninstall", "routes_from", "schedule_from"}
    assert all(f"`{name}`" in protocol.__doc__ for name in asked)
    assert asked <= set(transformers.__all__)
    assert all(callable(getattr(transformers, name)) for name in transformers.__all__)
