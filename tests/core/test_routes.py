"""Routes: ids in range and in the smallest dtype, masks instead of defaults, segments that tile, additive counts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import ModelShape, RouteCounts, Routes, RoutesError, SampleRoutes, Segment
from equipoise.core.routes import id_dtype


def make_model(*, experts=8, top_k=2, layers=3):
    return ModelShape(
        name="tiny",
        experts=experts,
        top_k=top_k,
        layer_numbers=tuple(range(1, layers + 1)),
        hidden_layers=layers + 1,
        hidden=4,
        expert_width=4,
    )


def make_sample(*, rows=4, layers=3, top_k=2, **changes):
    ids = np.arange(rows * layers * top_k).reshape(rows, layers, top_k) % 8
    return SampleRoutes(**{"name": "s0", "ids_TLK": ids, "num_tokens": rows + 1, **changes})


IDS = np.zeros((4, 3, 2), dtype=np.int64)


@pytest.mark.parametrize(
    ("experts", "dtype"),
    [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)],
)
def test_ids_are_kept_in_the_smallest_unsigned_dtype(experts, dtype):
    model = make_model(experts=experts, top_k=1)
    ids = np.full((2, 3, 1), experts - 1, dtype=np.int64)
    routes = Routes.of([SampleRoutes(name="s", ids_TLK=ids, num_tokens=2)], model=model)
    assert routes.samples[0].ids_TLK.dtype == dtype == id_dtype(experts)
    np.testing.assert_array_equal(routes.samples[0].ids_TLK, ids)


@settings(max_examples=80, deadline=None)
@given(
    place=st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1)),
    value=st.sampled_from([-1, -128, 8, 127, 2**31]),
    known=st.booleans(),
)
def test_a_known_id_out_of_range_is_refused_at_its_place_an_unknown_one_is_not(place, value, known):
    ids = IDS.copy()
    ids[place] = value
    known_TL = np.ones((4, 3), dtype=bool)
    known_TL[place[:2]] = known
    sample = make_sample(ids_TLK=ids, known_TL=known_TL)
    if known:
        row, layer, column = place
        words = rf"row {row}, layer index {layer}, column {column} holds expert {value}; .* experts 0\.\.7"
        with pytest.raises(RoutesError, match=words):
            Routes.of([sample], model=make_model())
    else:
        kept = Routes.of([sample], model=make_model()).samples[0]
        assert not kept.known_TL[place[:2]]
        np.testing.assert_array_equal(kept.ids_TLK[known_TL], IDS[known_TL])


def test_the_range_check_works_without_a_mask():
    with pytest.raises(RoutesError, match="holds expert 9"):
        make_sample(ids_TLK=IDS + 9).check_ids(8)
    make_sample(ids_TLK=IDS + 7).check_ids(8)


def test_repeated_ids_are_left_for_the_doctor_to_judge():
    assert Routes.of([make_sample(ids_TLK=IDS)], model=make_model()).samples[0].ids_TLK.max() == 0


@pytest.mark.parametrize("rows", [0, 3, 4], ids=["no-rows", "t-minus-1", "t"])
def test_a_sample_has_a_row_per_token_or_fewer(rows):
    sample = make_sample(rows=rows, num_tokens=4)
    routes = Routes.of([sample], model=make_model())
    assert (sample.num_rows, routes.num_tokens, len(routes)) == (rows, 4, 1)


def test_more_rows_than_tokens_are_refused():
    with pytest.raises(RoutesError, match="sample 's0': 4 rows for 3 tokens; at most one per token"):
        Routes.of([make_sample(num_tokens=3)], model=make_model())


def test_padding_rows_may_stand_beside_a_full_set_of_rows():
    padding_T = np.array([False, True, False, True])
    kept = Routes.of([make_sample(num_tokens=2, padding_T=padding_T)], model=make_model()).samples[0]
    np.testing.assert_array_equal(kept.padding_T, padding_T)
    with pytest.raises(RoutesError, match="2 rows for 1 tokens"):
        Routes.of([make_sample(num_tokens=1, padding_T=padding_T)], model=make_model())


def test_narrowing_keeps_every_other_part_of_a_sample():
    parts = {
        "known_TL": np.array([[True, False, True]] * 4),
        "padding_T": np.array([False, False, False, True]),
        "segments": (Segment(start=0, stop=1, weight_version="a"), Segment(start=1, stop=4, weight_version="b")),
        "tokens_T": np.arange(5),
    }
    sample = make_sample(**parts)
    kept = Routes.of([sample], model=make_model()).samples[0]
    assert kept.ids_TLK.dtype == np.uint8
    for name, value in parts.items():
        assert np.array_equal(getattr(kept, name), value), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"ids_TLK": IDS.astype(float)}, "must be integers of shape", id="float-ids"),
        pytest.param({"ids_TLK": IDS > 0}, "must be integers of shape", id="bool-ids"),
        pytest.param({"ids_TLK": IDS[0]}, r"got int64 of shape \(3, 2\)", id="two-axes"),
        pytest.param({"num_tokens": -1}, "num_tokens is -1", id="negative-tokens"),
        pytest.param({"num_tokens": 4.0}, "num_tokens must be a whole number", id="float-tokens"),
        pytest.param({"known_TL": np.ones((4, 2), dtype=bool)}, r"known_TL must be bool of shape \(4, 3\)", id="mask"),
        pytest.param({"known_TL": np.ones((4, 3))}, "known_TL must be bool", id="float-mask"),
        pytest.param({"padding_T": np.ones(3, dtype=bool)}, r"padding_T must be bool of shape \(4,\)", id="padding"),
        pytest.param({"tokens_T": np.arange(4)}, "4 token ids for 5 tokens", id="token-ids"),
        pytest.param({"tokens_T": np.arange(5) * 0.5}, "tokens_T must hold integers", id="float-token-ids"),
    ],
)
def test_a_sample_that_makes_no_sense_cannot_be_built(changes, words):
    with pytest.raises(RoutesError, match=words) as caught:
        make_sample(**changes)
    assert "sample 's0'" in str(caught.value)


@settings(max_examples=80, deadline=None)
@given(edges=st.lists(st.integers(0, 5), min_size=2, max_size=5))
def test_segments_tile_the_rows_in_order_or_are_refused(edges):
    segments = tuple(Segment(start=a, stop=b) for a, b in pairwise(edges))
    tiles = edges == sorted(edges) and edges[0] == 0 and edges[-1] == 4
    if tiles:
        assert make_sample(segments=segments).segments == segments
    else:
        with pytest.raises(RoutesError, match=r"segments must tile rows 0\.\.4 in order"):
            make_sample(segments=segments)


def test_a_gap_between_segments_is_refused():
    with pytest.raises(RoutesError, match="segments must tile"):
        make_sample(segments=(Segment(start=0, stop=1), Segment(start=2, stop=4)))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        pytest.param(make_sample(layers=2), "2 layers and top-2; 'tiny' here needs 3 layers and top-2", id="layers"),
        pytest.param(make_sample(top_k=3), "3 layers and top-3; 'tiny' here needs 3 layers and top-2", id="top-k"),
    ],
)
def test_a_sample_of_another_shape_than_the_model_is_refused(sample, words):
    with pytest.raises(RoutesError, match=words):
        Routes.of([sample], model=make_model())


def test_some_layers_of_a_model_are_named_by_their_global_numbers():
    routes = Routes.of([make_sample(layers=2)], model=make_model(), layer_numbers=(1, 3))
    assert routes.layer_numbers == (1, 3)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        pytest.param((0, 1), r"MoE layers of 'tiny' \(1-3\), got 0-1", id="dense-layer"),
        pytest.param((3, 1), "must ascend", id="descending"),
        pytest.param((1, 1), "must ascend", id="repeated"),
        pytest.param((1, 2.5), "whole number", id="float"),
    ],
)
def test_layer_numbers_are_moe_layers_in_order(numbers, words):
    with pytest.raises(RoutesError, match=words):
        Routes.of([make_sample(layers=2)], model=make_model(), layer_numbers=numbers)


def test_routes_are_equal_by_content():
    model = make_model()
    one, same = (Routes.of([make_sample()], model=model) for _ in range(2))
    assert one == same
    assert one != Routes.of([make_sample(name="s1")], model=model)
    assert one != Routes.of([], model=model)
    assert [sample.name for sample in one] == ["s0"]


def test_kept_ids_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        make_sample().ids_TLK[0, 0, 0] = 1


def make_counts(**changes):
    parts = {
        "model": make_model(),
        "count_BLE": np.ones((2, 3, 8), dtype=np.uint16),
        "tokens_B": [4, 4],
        "names": ["a", "b"],
        "layer_numbers": [1, 2, 3],
    }
    return RouteCounts(**{**parts, **changes})


def test_counts_are_kept_as_int64_beside_names_and_lengths():
    counts = make_counts(padding_BLE=np.ones((2, 3, 8), dtype=np.uint8))
    assert (counts.count_BLE.dtype, counts.padding_BLE.dtype) == (np.int64, np.int64)
    assert (len(counts), counts.names, counts.layer_numbers) == (2, ("a", "b"), (1, 2, 3))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"count_BLE": np.ones((2, 3, 7), dtype=int)}, "7 experts; expected 3 layers and the 8", id="experts"
        ),
        pytest.param({"layer_numbers": [1, 2]}, "3 layers and 8 experts; expected 2", id="layers"),
        pytest.param({"names": ["a"]}, "2 samples counted, 2 lengths and 1 names", id="names"),
        pytest.param({"tokens_B": [4]}, "2 samples counted, 1 lengths", id="lengths"),
        pytest.param({"count_BLE": np.full((2, 3, 8), -1)}, "count_BLE holds -1; counts cannot", id="negative"),
        pytest.param({"tokens_B": [4, -2]}, "tokens_B holds -2; counts cannot", id="negative-length"),
        pytest.param({"unknown_BL": np.full((2, 3), -1)}, "unknown_BL holds -1; counts cannot", id="negative-unknown"),
        pytest.param({"count_BLE": np.ones((2, 3, 8))}, "count_BLE must hold integers", id="float"),
        pytest.param(
            {"padding_BLE": np.ones((2, 3, 7), dtype=int)}, r"padding_BLE must have shape \(2, 3, 8\)", id="pad"
        ),
        pytest.param({"unknown_BL": np.ones((2, 2), dtype=int)}, r"unknown_BL must have shape \(2, 3\)", id="unknown"),
        pytest.param({"pair_LEE": np.ones((3, 8, 7), dtype=int)}, r"pair_LEE must have shape \(3, 8, 8\)", id="pairs"),
    ],
)
def test_counts_that_do_not_fit_each_other_cannot_be_built(changes, words):
    with pytest.raises(RoutesError, match=words):
        make_counts(**changes)
