"""Interpretation: each invariant of `interpret.py`, with the same words."""

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import ModelShape, RoutesError, Segment
from equipoise.routes.interpret import Recording, interpret, map_layers, map_named_layers

MODEL = ModelShape(
    name="tiny", experts=6, top_k=2, layer_numbers=(1, 3), hidden_layers=4, hidden=8, expert_width=4, mtp_layers=1
)
TOP1 = MODEL.replace(top_k=1)


def good_rows(num_rows, *, layers=2, seed=0):
    """[rows, layers, 2] ids, the two of a row distinct."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 6, (num_rows, layers))
    return np.stack([first, (first + rng.integers(1, 6, first.shape)) % 6], axis=2)


def one(*recordings, model=MODEL, **policy):
    """The only sample that `recordings` make."""
    (sample,) = interpret(recordings, model=model, **policy)
    return sample


def on_all_layers(rows_TLK):
    """MoE rows of layers 1 and 3 among four decoder layers, the dense ones zero."""
    wire = np.zeros((len(rows_TLK), 4, rows_TLK.shape[2]), dtype=rows_TLK.dtype)
    wire[:, [1, 3]] = rows_TLK
    return wire


# 1. The layer axis is mapped by global number.


def test_all_decoder_layers_and_moe_layers_give_the_same_routes():
    rows = good_rows(3)
    by_moe = one(Recording(name="a", rows=rows))
    by_all = one(Recording(name="a", rows=on_all_layers(rows)))
    assert by_moe == by_all
    assert np.array_equal(by_all.ids_TLK, rows)


def test_named_layers_are_sorted_by_number_and_may_be_some_of_the_model():
    rows = good_rows(3)
    swapped = interpret([Recording(name="a", rows=rows[:, ::-1], layer_numbers=(3, 1))], model=MODEL)
    assert swapped.layer_numbers == (1, 3)
    assert np.array_equal(next(swapped).ids_TLK, rows)
    stage = interpret([Recording(name="a", rows=rows[:, 1:], layer_numbers=(3,))], model=MODEL)
    assert stage.layer_numbers == (3,)
    assert np.array_equal(next(stage).ids_TLK, rows[:, 1:])


def test_a_named_dense_layer_is_dropped_when_zero():
    rows = np.concatenate([np.zeros((3, 1, 2), dtype=int), good_rows(3)], axis=1)
    stream = interpret([Recording(name="a", rows=rows, layer_numbers=(2, 1, 3))], model=MODEL)
    assert stream.layer_numbers == (1, 3)
    assert np.array_equal(next(stream).ids_TLK, rows[:, 1:])


def test_another_length_names_all_numbers():
    with pytest.raises(RoutesError, match=r"'a': 3 layers on the wire; 'tiny' has 4 decoder layers, 2 of them MoE"):
        one(Recording(name="a", rows=good_rows(2, layers=3)), model=MODEL.replace(mtp_layers=0))


@pytest.mark.parametrize("length", [pytest.param(5, id="after all layers"), pytest.param(3, id="after MoE layers")])
def test_mtp_layers_on_the_wire_are_named(length):
    with pytest.raises(RoutesError, match=f"{length} layers on the wire.*1 MTP layers in it"):
        map_layers(length, MODEL)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        pytest.param((1, 4), "names layer 4; 'tiny' has decoder layers 0..3", id="beyond the model"),
        pytest.param((-1, 1), "names layer -1", id="negative"),
        pytest.param((1, 1), "names a layer twice", id="twice"),
        pytest.param((0, 2), "names no MoE layer", id="dense only"),
    ],
)
def test_impossible_layer_numbers(numbers, words):
    with pytest.raises(RoutesError, match=words):
        map_named_layers(numbers, MODEL)


def test_a_dense_layer_that_holds_ids_is_named():
    wire = on_all_layers(good_rows(3))
    wire[2, 0, 1] = 5
    with pytest.raises(RoutesError, match="'a': row 2 holds expert 5 in dense layer 0"):
        one(Recording(name="a", rows=wire))


def test_a_missing_row_may_be_marked_in_dense_layers_too():
    wire = on_all_layers(good_rows(3))
    wire[1] = -1
    assert one(Recording(name="a", rows=wire)).known_TL.tolist() == [[True] * 2, [False] * 2, [True] * 2]


def test_hash_layers_are_kept():
    model = MODEL.replace(hash_layers=(1,))
    assert np.array_equal(one(Recording(name="a", rows=good_rows(3)), model=model).ids_TLK, good_rows(3))


# 2. Unknown rows.


def test_a_minus_one_makes_the_row_unknown_in_that_layer_only():
    rows = good_rows(3)
    rows[1, 0, 1] = -1
    sample = one(Recording(name="a", rows=rows))
    assert sample.known_TL.tolist() == [[True, True], [False, True], [True, True]]
    assert np.array_equal(sample.ids_TLK[:, 1], rows[:, 1])


@pytest.mark.parametrize("value", [0, 3])
def test_equal_ids_are_no_route(value):
    rows = good_rows(3)
    rows[2, 1] = value
    assert one(Recording(name="a", rows=rows)).known_TL.tolist() == [[True, True], [True, True], [True, False]]


def test_two_equal_ids_of_three_are_a_route():
    model = MODEL.replace(top_k=3)
    rows = np.array([[[1, 1, 2], [4, 4, 4]]])
    assert one(Recording(name="a", rows=rows), model=model).known_TL.tolist() == [[True, False]]


def test_with_top_1_an_equal_row_is_a_route():
    sample = one(Recording(name="a", rows=np.zeros((2, 2, 1), dtype=int)), model=TOP1)
    assert sample.known_TL is None
    assert sample.ids_TLK.tolist() == [[[0], [0]], [[0], [0]]]


def test_padding_rows_stand_as_they_are_dispatched():
    rows = good_rows(4)
    rows[2] = 0
    rows[3] = -1
    padding = np.array([False, False, True, True])
    sample = one(Recording(name="a", rows=rows, padding=padding, num_tokens=2))
    assert sample.padding_T.tolist() == padding.tolist()
    assert sample.known_TL.tolist() == [[True, True]] * 3 + [[False, False]]
    assert sample.ids_TLK[2].tolist() == [[0, 0], [0, 0]]


def reference_known(rows, row, layer):
    ids = rows[row, layer].tolist()
    return -1 not in ids and not (len(ids) > 1 and len(set(ids)) == 1)


@settings(max_examples=80, deadline=None)
@given(
    top_k=st.integers(1, 4),
    num_rows=st.integers(0, 6),
    dtype=st.sampled_from([np.int8, np.int16, np.int32, np.int64, np.uint8]),
    data=st.data(),
)
def test_known_rows_equal_the_plain_rule(top_k, num_rows, dtype, data):
    low = 0 if np.dtype(dtype).kind == "u" else -1
    ids = data.draw(st.lists(st.integers(low, 2), min_size=num_rows * 2 * top_k, max_size=num_rows * 2 * top_k))
    rows = np.array(ids, dtype=dtype).reshape(num_rows, 2, top_k)
    sample = one(Recording(name="a", rows=rows), model=MODEL.replace(top_k=top_k))
    for row, layer in np.ndindex(num_rows, 2):
        is_known = sample.known_TL is None or bool(sample.known_TL[row, layer])
        assert is_known == reference_known(rows, row, layer)
        if is_known:
            assert sample.ids_TLK[row, layer].tolist() == rows[row, layer].tolist()
    assert sample.ids_TLK.dtype == np.uint8


# 3. Ids outside the model.


@pytest.mark.parametrize("value", [6, 300, -2])
def test_an_id_outside_names_sample_token_layer_and_value(value):
    rows = good_rows(4)
    rows[2, 1, 0] = value
    with pytest.raises(RoutesError, match=rf"'a': token 12, layer 3 holds expert {value}; 'tiny' has experts 0..5"):
        one(Recording(name="a", rows=rows, start=10, num_tokens=14))


def test_equal_ids_outside_the_model_are_not_excused_as_missing():
    with pytest.raises(RoutesError, match="expert 200"):
        one(Recording(name="a", rows=np.full((1, 2, 2), 200, dtype=np.uint8)))


def test_another_top_k_names_both():
    with pytest.raises(RoutesError, match="'a': 3 ids per row; 'tiny' chooses 2"):
        one(Recording(name="a", rows=np.zeros((1, 2, 3), dtype=int)))


# 4. Rows against tokens, and the last row.


@pytest.mark.parametrize("num_tokens", [4, 5])
def test_one_row_per_token_or_one_less(num_tokens):
    sample = one(Recording(name="a", rows=good_rows(4), num_tokens=num_tokens))
    assert (sample.num_rows, sample.num_tokens) == (4, num_tokens)


def test_more_rows_than_tokens_is_an_error_under_every_policy():
    for policy in ({}, {"allow_short": True}, {"last_row": "placeholder"}):
        with pytest.raises(RoutesError, match="'a': 4 rows for 3 tokens"):
            one(Recording(name="a", rows=good_rows(4), num_tokens=3), **policy)


def test_fewer_rows_only_with_allow_short():
    recording = Recording(name="a", rows=good_rows(4), num_tokens=6)
    with pytest.raises(RoutesError, match="4 rows for 6 tokens; expected 6 or 5"):
        one(recording)
    sample = one(recording, allow_short=True)
    assert (sample.num_rows, sample.num_tokens) == (4, 6)


def test_a_placeholder_is_dropped_and_its_token_kept():
    rows = good_rows(4)
    sample = one(Recording(name="a", rows=rows, num_tokens=4), last_row="placeholder")
    assert sample.num_tokens == 4
    assert np.array_equal(sample.ids_TLK, rows[:3])


def test_where_the_last_row_is_not_there_none_is_dropped():
    sample = one(Recording(name="a", rows=good_rows(4), num_tokens=5), last_row="placeholder")
    assert sample.num_rows == 4


def test_the_placeholder_is_the_last_row_that_is_not_padding():
    rows = good_rows(5)
    padding = np.array([False, False, False, True, True])
    sample = one(Recording(name="a", rows=rows, num_tokens=3, padding=padding), last_row="placeholder")
    assert np.array_equal(sample.ids_TLK, rows[[0, 1, 3, 4]])
    assert sample.padding_T.tolist() == [False, False, True, True]


def test_an_unknown_policy_is_refused():
    with pytest.raises(RoutesError, match="last_row is 'drop'; it must be one of recorded, placeholder"):
        interpret([], model=MODEL, last_row="drop")


def test_without_a_number_of_tokens_the_rows_count():
    assert one(Recording(name="a", rows=good_rows(4))).num_tokens == 4
    assert one(Recording(name="a", rows=good_rows(4), tokens=np.arange(5))).num_tokens == 5


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_samples_of_no_and_of_one_token(num_tokens):
    sample = one(Recording(name="a", rows=good_rows(0), num_tokens=num_tokens))
    assert (sample.num_rows, sample.num_tokens, sample.segments) == (0, num_tokens, ())


def test_no_recording_gives_no_sample():
    stream = interpret([], model=MODEL)
    assert (list(stream), stream.layer_numbers) == ([], (1, 3))


# 5. Start offsets and turns.


@pytest.mark.parametrize("turns", [(), (Recording(name="a", rows=good_rows(3)),)], ids=["first", "later"])
def test_an_absurd_start_is_refused_before_room_is_made_for_it(turns):
    far = Recording(name="a", rows=good_rows(1), start=2_000_000_000)
    with pytest.raises(RoutesError, match=r"'a': (2000000000|1999999997) tokens without a row.*GiB.*start offset"):
        one(*turns, far)


def test_rows_before_the_start_are_unknown():
    rows = good_rows(3)
    sample = one(Recording(name="a", rows=rows, start=2, num_tokens=6, weight_version="7"))
    assert sample.known_TL.tolist() == [[False, False]] * 2 + [[True, True]] * 3
    assert np.array_equal(sample.ids_TLK[2:], rows)
    assert sample.segments == (Segment(start=0, stop=2), Segment(start=2, stop=5, weight_version="7"))


def test_turns_are_appended_with_their_weight_versions():
    rows, tokens = good_rows(7), np.arange(8) + 40
    sample = one(
        Recording(name="a", rows=rows[:4], num_tokens=5, tokens=tokens[:5], weight_version="1"),
        Recording(name="a", rows=rows[4:], start=4, num_tokens=8, tokens=tokens, weight_version="2"),
    )
    assert np.array_equal(sample.ids_TLK, rows)
    assert sample.known_TL is None
    assert sample.tokens_T.tolist() == tokens.tolist()
    assert sample.segments == (
        Segment(start=0, stop=4, weight_version="1"),
        Segment(start=4, stop=7, weight_version="2"),
    )


def test_a_gap_between_turns_is_unknown():
    rows = good_rows(6)
    sample = one(
        Recording(name="a", rows=rows[:2], num_tokens=3),
        Recording(name="a", rows=rows[4:], start=4, num_tokens=7),
    )
    assert sample.known_TL[:, 0].tolist() == [True, True, False, False, True, True]
    assert [(s.start, s.stop) for s in sample.segments] == [(0, 2), (2, 4), (4, 6)]


def test_turns_that_overlap_must_agree():
    rows = good_rows(6)
    again = rows[2:].copy()
    sample = one(
        Recording(name="a", rows=rows[:4], num_tokens=5), Recording(name="a", rows=again, start=2, num_tokens=7)
    )
    assert np.array_equal(sample.ids_TLK, rows)
    again[1, 1] = again[1, 1, ::-1]  # the order of a row's ids is not a difference
    one(Recording(name="a", rows=rows[:4], num_tokens=5), Recording(name="a", rows=again, start=2, num_tokens=7))
    again[1, 1] = (again[1, 1] + 1) % 6
    with pytest.raises(RoutesError, match="'a': two turns give token 3 different routes"):
        one(Recording(name="a", rows=rows[:4], num_tokens=5), Recording(name="a", rows=again, start=2, num_tokens=7))


def test_where_turns_overlap_a_known_row_replaces_an_unknown_one():
    rows = good_rows(5)
    early, late = rows[:4].copy(), rows[2:].copy()
    early[2], late[1] = -1, -1
    sample = one(Recording(name="a", rows=early), Recording(name="a", rows=late, start=2, num_tokens=5))
    assert sample.known_TL is None
    assert np.array_equal(sample.ids_TLK, rows)


def test_a_placeholder_between_turns_is_filled_by_the_next():
    rows = good_rows(6)
    early = rows[:4].copy()
    early[3] = [[0, 1], [0, 1]]
    sample = one(
        Recording(name="a", rows=early, num_tokens=4),
        Recording(name="a", rows=rows[3:], start=3, num_tokens=6),
        last_row="placeholder",
    )
    assert np.array_equal(sample.ids_TLK, rows[:5])


def test_turns_of_different_tokens_are_not_one_sample():
    with pytest.raises(RoutesError, match="'a': two turns disagree on token 1"):
        one(
            Recording(name="a", rows=good_rows(2), tokens=np.array([1, 2, 3])),
            Recording(name="a", rows=good_rows(2), start=2, tokens=np.array([1, 9, 3, 4, 5])),
        )


def test_a_turn_that_stands_apart_is_an_error():
    recordings = [
        Recording(name="a", rows=good_rows(2)),
        Recording(name="b", rows=good_rows(2)),
        Recording(name="a", rows=good_rows(2), start=2),
    ]
    with pytest.raises(RoutesError, match="'a': a turn from token 2 does not follow its earlier turns"):
        list(interpret(recordings, model=MODEL))


def test_padding_between_turns_keeps_its_place():
    rows = good_rows(5)
    padding = np.array([False, False, True])
    sample = one(
        Recording(name="a", rows=rows[:3], padding=padding, num_tokens=2),
        Recording(name="a", rows=rows[3:], start=2, num_tokens=4),
    )
    assert np.array_equal(sample.ids_TLK, rows)
    assert sample.padding_T.tolist() == [False, False, True, False, False]
    with pytest.raises(RoutesError, match="begins at token 1, after 2 tokens"):
        one(
            Recording(name="a", rows=rows[:3], padding=padding, num_tokens=2),
            Recording(name="a", rows=rows[3:], start=1, num_tokens=4),
        )


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 12), data=st.data())
def test_any_cut_into_turns_gives_the_same_rows(num_rows, data):
    rows = good_rows(num_rows, seed=num_rows)
    starts = sorted(data.draw(st.sets(st.integers(1, num_rows), max_size=3)))
    edges = [0, *starts, num_rows]
    turns = []
    for begin, end in pairwise(edges):
        back = data.draw(st.integers(0, begin))
        turns.append(Recording(name="a", rows=rows[back:end], start=back, num_tokens=end))
    sample = one(*turns)
    assert np.array_equal(sample.ids_TLK, rows)
    assert sample.known_TL is None


# 6. One layer axis per dump, and streaming.


@pytest.mark.parametrize(
    "second",
    [
        pytest.param({"rows": on_all_layers(good_rows(2))}, id="other length"),
        pytest.param({"rows": good_rows(2), "layer_numbers": (1, 3)}, id="named and unnamed"),
    ],
)
def test_all_recordings_have_the_same_layer_axis(second):
    recordings = [Recording(name="a", rows=good_rows(2)), Recording(name="b", **second)]
    with pytest.raises(RoutesError, match=r"sample 'b' has .* sample 'a' has"):
        list(interpret(recordings, model=MODEL))


def test_it_streams():
    def endless():
        n = 0
        while True:
            yield Recording(name=f"s{n}", rows=good_rows(2))
            n += 1

    assert [s.name for s in islice(interpret(endless(), model=MODEL), 3)] == ["s0", "s1", "s2"]
