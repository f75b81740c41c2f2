"""`Schedule`: pieces that exist, no token forwarded twice, padding kept apart."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Piece, Schedule, ScheduleError


@st.composite
def tilings(draw):
    """Samples cut into pieces that touch but never overlap, in any order, and the number of micro-steps and ranks."""
    micro_steps, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    pieces = []
    for sample in range(draw(st.integers(0, 4))):
        edges = sorted(draw(st.sets(st.integers(0, 40), max_size=6)))
        for start, stop in pairwise(edges):
            place = draw(st.integers(0, micro_steps - 1)), draw(st.integers(0, ranks - 1))
            pieces.append(Piece(sample, start, stop, *place))
    return draw(st.permutations(pieces)), micro_steps, ranks


@settings(max_examples=80, deadline=None)
@given(tiling=tilings())
def test_pieces_keep_their_order_and_their_tokens(tiling):
    pieces, micro_steps, ranks = tiling
    schedule = Schedule.of(pieces, ranks=ranks, micro_steps=micro_steps)
    assert [Piece(*row) for row in schedule.pieces.tolist()] == pieces
    expected_MR = np.zeros((micro_steps, ranks), dtype=np.int64)
    for piece in pieces:
        expected_MR[piece.micro_step, piece.rank] += piece.stop - piece.start
    np.testing.assert_array_equal(schedule.num_tokens_MR, expected_MR)


@settings(max_examples=80, deadline=None)
@given(tiling=tilings(), data=st.data())
def test_a_token_forwarded_twice_is_refused_by_its_sample(tiling, data):
    pieces, micro_steps, ranks = tiling
    if not pieces:
        pieces = [Piece(0, 3, 5, 0, 0)]
    victim = data.draw(st.sampled_from(pieces))
    token = data.draw(st.integers(victim.start, victim.stop - 1))
    again = Piece(victim.sample, token, token + 1, micro_steps - 1, ranks - 1)
    with pytest.raises(ScheduleError, match=f"tokens of sample {victim.sample} are forwarded twice"):
        Schedule.of([*pieces, again], ranks=ranks, micro_steps=micro_steps)


def test_a_long_piece_around_a_short_one_is_refused():
    with pytest.raises(ScheduleError, match="forwarded twice"):
        Schedule.of([(0, 0, 10, 0, 0), (0, 2, 3, 1, 0), (0, 10, 12, 1, 0)], ranks=1)


def test_equal_ranges_of_different_samples_are_not_an_overlap():
    assert Schedule.of([(0, 0, 4, 0, 0), (1, 0, 4, 0, 0)], ranks=1).num_tokens_MR.tolist() == [[8]]


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        pytest.param((0, 0, 4, 2, 0), r"micro-steps are 0\.\.1", id="micro-step"),
        pytest.param((0, 0, 4, -1, 0), r"micro-steps are 0\.\.1", id="micro-step-below"),
        pytest.param((0, 0, 4, 0, 3), r"ranks 0\.\.2", id="rank"),
        pytest.param((0, 0, 4, 0, -1), r"ranks 0\.\.2", id="rank-below"),
        pytest.param((-1, 0, 4, 0, 0), "sample=-1", id="sample"),
        pytest.param((0, -1, 4, 0, 0), "start=-1", id="start"),
        pytest.param((0, 4, 4, 0, 0), "must not be empty", id="empty-range"),
        pytest.param((0, 5, 4, 0, 0), "must not be empty", id="backward-range"),
    ],
)
def test_a_piece_that_does_not_exist_is_refused_with_its_number(piece, words):
    with pytest.raises(ScheduleError, match=words) as caught:
        Schedule.of([(9, 0, 1, 0, 0), piece], ranks=3, micro_steps=2)
    assert "piece 1 is Piece(" in str(caught.value)


def test_micro_steps_follow_from_the_pieces():
    assert Schedule.of([(0, 0, 4, 3, 0)], ranks=1).micro_steps == 4
    assert Schedule.of([], ranks=2).num_tokens_MR.tolist() == [[0, 0]]


def test_padding_is_kept_apart_from_tokens():
    schedule = Schedule.of([(0, 0, 4, 0, 1)], ranks=2, padding_MR=np.array([[8, 4]], dtype=np.uint8))
    assert schedule.num_tokens_MR.tolist() == [[0, 4]]
    assert schedule.padding_MR.tolist() == [[8, 4]]
    assert schedule.padding_MR.dtype == np.int64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"padding_MR": np.zeros((2, 2), dtype=int)}, r"shape \(1, 2\)", id="padding-shape"),
        pytest.param({"padding_MR": np.array([[0, -1]])}, "padding_MR must be non-negative", id="padding-negative"),
        pytest.param({"padding_MR": np.zeros((1, 2))}, "padding_MR must hold integers", id="padding-float"),
        pytest.param({"stage": "train"}, "stage is 'train'; it must be one of recompute, update", id="stage"),
        pytest.param({"padding_policy": "zero"}, "padding_policy is 'zero'; .* spread, arange", id="padding-policy"),
        pytest.param({"last_token": "zero"}, "last_token is 'zero'; .* drop, spread, unknown", id="last-token"),
        pytest.param({"ranks": 0}, "ranks is 0; it must be at least 1", id="no-ranks"),
        pytest.param({"ranks": 2.0}, "ranks must be a whole number", id="float-ranks"),
        pytest.param({"micro_steps": 0}, "micro_steps is 0", id="no-micro-steps"),
    ],
)
def test_a_schedule_that_makes_no_sense_cannot_be_built(options, words):
    with pytest.raises(ScheduleError, match=words):
        Schedule.of([(0, 0, 4, 0, 0)], **{"ranks": 2, **options})


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([(0, 0, 4, 0)], id="four-columns"),
        pytest.param([(0, 0, 4, 0, 0), (0, 0)], id="ragged"),
        pytest.param([(0, 0.5, 4, 0, 0)], id="float"),
        pytest.param([("a", 0, 4, 0, 0)], id="text"),
    ],
)
def test_pieces_of_a_wrong_kind_are_refused_with_our_error(pieces):
    with pytest.raises(ScheduleError, match="piece"):
        Schedule.of(pieces, ranks=1)


def test_kept_pieces_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        Schedule.of([(0, 0, 4, 0, 0)], ranks=1).pieces[0, 0] = 1


def test_schedules_are_equal_by_content():
    pieces = [(0, 0, 4, 0, 0)]
    assert Schedule.of(pieces, ranks=1) == Schedule.of(pieces, ranks=1)
    assert Schedule.of(pieces, ranks=1) != Schedule.of(pieces, ranks=1, stage="recompute")


def test_a_piece_that_is_no_list_is_named():
    with pytest.raises(ScheduleError, match="piece 1 is 7; a piece has the fields"):
        Schedule.of([(0, 0, 9, 0, 0), 7], ranks=2)


def test_a_micro_step_no_trainer_has_is_refused_before_room_is_made_for_it():
    with pytest.raises(ScheduleError, match="micro_steps is 1000000000000001; their product must be at most 16777216"):
        Schedule.of([(0, 0, 9, 10**15, 0)], ranks=2)


def test_a_bool_is_no_sample_number():
    with pytest.raises(ScheduleError, match="a bool in it"):
        Schedule.of([(True, 0, 9, 0, 0)], ranks=2)
