"""Schedules as trainers pack them: every token once, budgets kept, slices that fit together again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Piece, Schedule, ScheduleError
from equipoise.loads.packing import (
    TokenPolicy,
    longest_first,
    schedule_samples,
    schedule_tokens,
    slice_context,
    slice_sequence,
    step_schedules,
)

KEEP_LAST = TokenPolicy(last_token="unknown")


def tokens_of(schedule: Schedule) -> list[tuple[int, int]]:
    """Every (sample, token) the schedule forwards, sorted, repeats kept."""
    return sorted((p[0], t) for p in schedule.pieces.tolist() for t in range(p[1], p[2]))


def whole(lengths: list[int], *, last_dropped: bool) -> list[tuple[int, int]]:
    return [(b, t) for b, n in enumerate(lengths) for t in range(max(0, n - last_dropped))]


lengths_strategy = st.lists(st.integers(0, 40), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_fixed_samples_forward_every_token_exactly_once(lengths, ranks, size, drop):
    policy = TokenPolicy() if drop else KEEP_LAST
    schedule = schedule_samples(np.array(lengths), ranks=ranks, samples_per_micro_step=size, policy=policy)
    assert tokens_of(schedule) == whole(lengths, last_dropped=drop)
    pairs, counts = np.unique(schedule.pieces[:, 3:], axis=0, return_counts=True)
    assert len(pairs) == 0 or counts.max() <= size


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, st.integers(1, 5), st.integers(40, 90))
def test_token_packing_keeps_its_budget_and_forwards_every_token_exactly_once(lengths, ranks, budget):
    schedule = schedule_tokens(np.array(lengths), ranks=ranks, token_budget=budget, policy=KEEP_LAST)
    assert tokens_of(schedule) == whole(lengths, last_dropped=False)
    assert schedule.num_tokens_MR.max() <= budget


def test_token_packing_uses_as_few_micro_steps_as_fit():
    schedule = schedule_tokens(np.array([6, 6, 4, 4, 3, 7]), ranks=1, token_budget=10, policy=KEEP_LAST)
    assert schedule.num_tokens_MR[:, 0].tolist() == [10, 10, 10]


def test_every_rank_has_the_same_micro_steps_even_when_one_rank_has_more_to_do():
    schedule = schedule_tokens(np.array([10, 10, 1, 1]), ranks=2, token_budget=10, policy=KEEP_LAST)
    assert schedule.num_tokens_MR.tolist() == [[10, 1], [10, 1]]


def test_samples_go_to_ranks_as_consecutive_runs():
    schedule = schedule_samples(np.full(5, 3), ranks=2, samples_per_micro_step=2, policy=KEEP_LAST)
    assert [tuple(p) for p in schedule.pieces.tolist()] == [
        (0, 0, 3, 0, 0),
        (1, 0, 3, 0, 0),
        (2, 0, 3, 1, 0),
        (3, 0, 3, 0, 1),
        (4, 0, 3, 0, 1),
    ]


def test_a_sample_longer_than_the_budget_is_named():
    with pytest.raises(ScheduleError, match="sample 1 forwards 49 tokens; the token budget is 20"):
        schedule_tokens(np.array([5, 50]), ranks=1, token_budget=20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(dict(ranks=0, samples_per_micro_step=1), "ranks is 0", id="no ranks"),
        pytest.param(dict(ranks=1, samples_per_micro_step=0), "samples_per_micro_step is 0", id="no samples"),
        pytest.param(dict(ranks=1, samples_per_micro_step=1, samples=[7]), "sample 7 does not exist", id="stranger"),
        pytest.param(
            dict(ranks=1, samples_per_micro_step=1, policy=TokenPolicy(pad_to_multiple=0)),
            "pad_to_multiple is 0",
            id="multiple of nothing",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ScheduleError, match=message):
        schedule_samples(np.array([4, 4]), **call)


def test_negative_lengths_are_refused():
    with pytest.raises(ScheduleError, match=r"tokens_B\[1\] is -2"):
        schedule_samples(np.array([4, -2]), ranks=1, samples_per_micro_step=1)


def test_packed_micro_batches_are_padded_to_a_multiple():
    policy = TokenPolicy(last_token="unknown", pad_to_multiple=8)
    schedule = schedule_samples(np.array([5, 6, 16]), ranks=1, samples_per_micro_step=2, policy=policy)
    assert schedule.padding_MR.tolist() == [[5], [0]]


def test_unpacked_micro_batches_are_padded_to_their_longest_sample():
    policy = TokenPolicy(last_token="unknown", pad_to_longest=True, pad_to_multiple=4)
    schedule = schedule_samples(np.array([5, 7, 2]), ranks=1, samples_per_micro_step=2, policy=policy)
    assert schedule.padding_MR.tolist() == [[8 - 5 + 8 - 7], [2]]


def test_a_rank_with_nothing_to_forward_gets_no_padding():
    policy = TokenPolicy(last_token="unknown", pad_to_multiple=8)
    schedule = schedule_samples(np.array([5]), ranks=2, samples_per_micro_step=1, policy=policy)
    assert schedule.padding_MR.tolist() == [[3, 0]]


def test_a_step_is_a_recompute_window_and_one_window_per_mini_batch():
    lengths = [3, 4, 5, 6, 7]
    step = step_schedules(np.array(lengths), ranks=2, mini_batches=2, samples_per_micro_step=1, policy=KEEP_LAST)
    assert [s.stage for s in step] == ["recompute", "update", "update"]
    assert tokens_of(step[0]) == whole(lengths, last_dropped=False)
    assert sorted(tokens_of(step[1]) + tokens_of(step[2])) == tokens_of(step[0])
    assert set(step[1].pieces[:, 0].tolist()) == {0, 1, 2}


def test_a_step_without_recompute_has_update_windows_only():
    step = step_schedules(np.array([3, 4]), ranks=1, token_budget=10, recompute=False)
    assert [s.stage for s in step] == ["update"]


@pytest.mark.parametrize("ways", [{}, {"samples_per_micro_step": 1, "token_budget": 9}], ids=["none", "both"])
def test_a_step_needs_exactly_one_way_to_pack(ways):
    with pytest.raises(ScheduleError, match="exactly one of"):
        step_schedules(np.array([3, 4]), ranks=1, **ways)


def test_more_mini_batches_than_samples_are_refused():
    with pytest.raises(ScheduleError, match="mini_batches is 3; it must be from 1 to 2"):
        step_schedules(np.array([3, 4]), ranks=1, mini_batches=3, token_budget=9)


def test_context_slices_are_zig_zag_with_the_tail_as_padding():
    # 10 tokens over cp=2: padded to 12, chunks of 3; rank 0 takes chunks 0 and 3, rank 1 chunks 1 and 2.
    sliced = slice_context(Schedule.of([(0, 0, 10, 0, 0)], ranks=1), 2)
    assert [Piece(*p) for p in sliced.pieces.tolist()] == [
        Piece(0, 0, 3, 0, 0),
        Piece(0, 9, 10, 0, 0),
        Piece(0, 3, 6, 0, 1),
        Piece(0, 6, 9, 0, 1),
    ]
    assert sliced.padding_MR.tolist() == [[2, 0]]


def test_sequence_slices_cut_the_packed_micro_batch_across_samples():
    schedule = Schedule.of([(0, 0, 5, 0, 0), (1, 0, 4, 0, 0)], ranks=1, padding_MR=np.array([[1]]))
    sliced = slice_sequence(schedule, 4)
    assert [tuple(p) for p in sliced.pieces.tolist()] == [
        (0, 0, 3, 0, 0),
        (0, 3, 5, 0, 1),
        (1, 0, 1, 0, 1),
        (1, 1, 4, 0, 2),
    ]
    assert sliced.padding_MR.tolist() == [[0, 0, 0, 3]]


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_slicing_keeps_every_token_once_and_levels_the_ranks_cut_from_one(lengths, ranks, cp, sp, multiple):
    policy = TokenPolicy(last_token="unknown", pad_to_multiple=multiple)
    schedule = schedule_samples(np.array(lengths), ranks=ranks, samples_per_micro_step=2, policy=policy)
    sliced = slice_sequence(slice_context(schedule, cp), sp)
    assert tokens_of(sliced) == tokens_of(schedule)
    assert sliced.ranks == ranks * cp * sp
    forwarded = (sliced.num_tokens_MR + sliced.padding_MR).reshape(schedule.micro_steps, ranks, -1)
    assert (forwarded == forwarded[:, :, :1]).all()
    before = schedule.num_tokens_MR + schedule.padding_MR
    # Padding only ever grows, by less than one multiple per piece and cut.
    assert (forwarded.sum(axis=2) >= before).all()
    assert (forwarded.sum(axis=2) <= before + 3 * 2 * cp + cp * sp).all()


def test_slicing_keeps_stage_and_policies():
    schedule = Schedule.of(
        [(0, 0, 8, 0, 0)], ranks=1, stage="recompute", padding_policy="arange", last_token="spread", micro_steps=2
    )
    for sliced in (slice_context(schedule, 2), slice_sequence(schedule, 2)):
        assert (sliced.stage, sliced.padding_policy, sliced.last_token) == ("recompute", "arange", "spread")
        assert sliced.micro_steps == 2


def test_the_longest_micro_step_runs_first_and_the_next_longest_last():
    lengths, padding_MR = [3, 9, 4, 8, 9], np.array([[0], [0], [1], [0], [0]])
    before = Schedule.of([(b, 0, n, b, 0) for b, n in enumerate(lengths)], ranks=1, padding_MR=padding_MR)
    ordered = longest_first(before)
    assert ordered.num_tokens_MR[:, 0].tolist() == [9, 3, 4, 8, 9]
    assert ordered.padding_MR[:, 0].tolist() == [0, 0, 1, 0, 0]
    first, last = (ordered.pieces[ordered.pieces[:, 3] == m, 0].tolist() for m in (0, 4))
    assert (first, last) == ([1], [4]), "of two that are as long the earlier one runs first"


def test_padding_counts_as_length():
    before = Schedule.of([(0, 0, 5, 0, 0), (1, 0, 4, 1, 0)], ranks=1, padding_MR=np.array([[0], [3]]))
    assert longest_first(before).pieces[:, 0].tolist() == [0, 1]
    assert longest_first(before).num_tokens_MR[:, 0].tolist() == [4, 5]


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, st.integers(1, 3), st.integers(1, 4))
def test_running_the_longest_first_moves_whole_micro_steps(lengths, ranks, size):
    before = schedule_samples(np.array(lengths), ranks=ranks, samples_per_micro_step=size, policy=KEEP_LAST)
    after = longest_first(before)
    assert tokens_of(after) == tokens_of(before)
    assert (after.stage, after.micro_steps, after.last_token) == (before.stage, before.micro_steps, before.last_token)
    contents = [sorted(_contents(schedule)) for schedule in (before, after)]
    assert contents[0] == contents[1]
    length_M = after.num_tokens_MR.sum(axis=1)
    assert length_M[0] == length_M.max()
    assert length_M[-1] == length_M[1:].max(initial=0) or after.micro_steps == 1


def _contents(schedule: Schedule) -> list[list[list[int]]]:
    """What each micro-step forwards, in packing order, without its number."""
    columns = [0, 1, 2, 4]
    return [schedule.pieces[schedule.pieces[:, 3] == m][:, columns].tolist() for m in range(schedule.micro_steps)]
