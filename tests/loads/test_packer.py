"""The packer: every sample once, no limit exceeded, fewer rows across nodes; small cases against all schedules."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import InfeasiblePlanError, ModelShape, RouteCounts, Schedule, ScheduleError
from equipoise.loads import (
    MemoryLimit,
    PackingLimits,
    TokenPolicy,
    pack_step,
    pack_window,
    schedule_samples,
    schedule_tokens,
    sketch_counts,
    slice_sequence,
    step_schedules,
)
from equipoise.loads.packer import difference, follow_nodes


def counts_of(count_BLE, tokens_B=None):
    count_BLE = np.asarray(count_BLE, dtype=np.int64)
    samples, layers, experts = count_BLE.shape
    model = ModelShape.preset("qwen3-30b-a3b", experts=experts, layers=layers, top_k=1)
    return RouteCounts(
        model=model,
        count_BLE=count_BLE,
        tokens_B=count_BLE[:, 0].sum(axis=1) if tokens_B is None else tokens_B,
        names=tuple(f"s{b}" for b in range(samples)),
        layer_numbers=model.layer_numbers,
    )


def random_counts(rng, samples, *, experts=8, layers=2, kinds=2, longest=60):
    """Samples of a few kinds, each with its own experts; some forward nothing."""
    taste_KLE = rng.dirichlet(np.full(experts, 0.3), size=(kinds, layers))
    length_B = rng.integers(0, longest + 1, size=samples)
    return counts_of(
        [
            [rng.multinomial(length, taste_E) for taste_E in taste_KLE[rng.integers(kinds)]]
            for length in length_B.tolist()
        ]
    )


def crossing_by_loops(counts, schedule, node_R):
    """Share of rows that cross two nodes, with the best of all homes of as many experts in each as it has ranks."""
    size, experts = len(node_R), counts.count_BLE.shape[2]
    places = experts * np.bincount(node_R) // size
    crossing = whole = 0
    for first in range(0, schedule.ranks, size):
        mine = [p for p in schedule.pieces.tolist() if first <= p[4] < first + size]
        for layer in range(counts.count_BLE.shape[1]):
            kept = 0
            for inside in combinations(range(experts), int(places[0])):
                own = sum(
                    int(counts.count_BLE[p[0], layer, e])
                    for p in mine
                    for e in range(experts)
                    if (e in inside) == (node_R[p[4] - first] == 0)
                )
                kept = max(kept, own)
            rows = sum(int(counts.count_BLE[p[0], layer].sum()) for p in mine)
            crossing, whole = crossing + rows - kept, whole + rows
    return crossing / max(whole, 1)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 40),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 3),
    groups=st.integers(1, 2),
    pad=st.sampled_from([1, 8]),
    by_tokens=st.booleans(),
)
def test_every_sample_once_and_no_limit_exceeded(seed, samples, nodes, ranks, groups, pad, by_tokens):
    rng = np.random.default_rng(seed)
    counts = random_counts(rng, samples, experts=nodes * ranks * 2, kinds=3)
    policy, node_R = TokenPolicy(last_token="unknown", pad_to_multiple=pad), np.repeat(np.arange(nodes), ranks)
    rule = {"token_budget": 96} if by_tokens else {"samples_per_micro_step": 2}
    step = step_schedules(
        counts.tokens_B,
        ranks=groups * len(node_R),
        mini_batches=min(2, samples),
        policy=policy,
        **rule,
    )
    packed = pack_step(sketch_counts(counts), step, node_R=node_R, policy=policy)
    again = pack_step(sketch_counts(counts), step, node_R=node_R, policy=policy)
    for before, after, same in zip(step, packed, again, strict=True):
        made = after.schedule
        assert np.array_equal(made.pieces, same.schedule.pieces)
        assert (made.stage, made.ranks, made.micro_steps) == (before.stage, before.ranks, before.micro_steps)
        of_group = [
            sorted((*p[:3], p[4] // len(node_R)) for p in schedule.pieces.tolist()) for schedule in (before, made)
        ]
        assert of_group[0] == of_group[1]
        assert PackingLimits.of(before).exceeded(made) == ()
        assert after.crossing <= after.given_crossing
        assert after.crossing * PackingLimits.of(made).tokens <= after.given_crossing * PackingLimits.of(before).tokens


@pytest.mark.parametrize("seed", range(6))
def test_no_better_than_the_best_of_all_and_no_worse_than_the_given_one(seed):
    """Six samples on two nodes of one rank: all schedules within the limits, all homes."""
    rng = np.random.default_rng(seed)
    counts = random_counts(rng, 6, experts=4, layers=1, longest=40)
    given_schedule = schedule_samples(
        counts.tokens_B, ranks=2, samples_per_micro_step=3, policy=TokenPolicy(last_token="unknown")
    )
    limits = PackingLimits.of(given_schedule)
    pieces = given_schedule.pieces.tolist()

    def crossing_tokens(schedule: Schedule) -> float:
        return crossing_by_loops(counts, schedule, [0, 1]) * PackingLimits.of(schedule).tokens

    best = min(
        crossing_tokens(schedule)
        for places in product(range(2 * given_schedule.micro_steps), repeat=len(pieces))
        if not limits.exceeded(
            schedule := Schedule.of(
                [(*piece[:3], place // 2, place % 2) for piece, place in zip(pieces, places, strict=True)],
                ranks=2,
                micro_steps=given_schedule.micro_steps,
            )
        )
    )
    made = pack_window(sketch_counts(counts), given_schedule, node_R=[0, 1])
    assert best <= crossing_tokens(made.schedule) <= crossing_tokens(given_schedule)
    found = crossing_by_loops(counts, made.schedule, [0, 1])
    assert found <= crossing_by_loops(counts, given_schedule, [0, 1])
    # Homes are chosen level, too, so that the packer's own figure is not below the loops' free choice.
    assert found <= made.crossing + 1e-3


def test_kinds_of_samples_get_a_node_each():
    """Two kinds with experts of their own, dealt alternately: half of the rows cross before, none after."""
    count_BLE = [[[0, 0, 9, 9] if b % 2 else [9, 9, 0, 0]] * 3 for b in range(16)]
    counts = counts_of(count_BLE)
    window = schedule_samples(
        counts.tokens_B, ranks=4, samples_per_micro_step=2, policy=TokenPolicy(last_token="unknown")
    )
    made = pack_window(sketch_counts(counts), window, node_R=[0, 0, 1, 1])
    assert (made.how, made.crossing, made.given_crossing) == ("regrouped", 0.0, 0.5)
    kinds = [{b % 2 for batch in made.micro_batches(rank) for b in batch} for rank in range(4)]
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3]
    assert [len(batch) for batch in made.micro_batches(0)] == [2, 2]


def test_whole_micro_batches_change_ranks_where_regrouping_would_exceed_a_limit():
    """Two and two of length 30, three and three of 20: longest first, a node makes 70 of what was 60."""
    length_B, kind_B = [30, 30, 30, 30, 20, 20, 20, 20, 20, 20], [0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    counts = counts_of(
        [[[length, 0] if kind == 0 else [0, length]] for length, kind in zip(length_B, kind_B, strict=True)]
    )
    place_B = [(0, 0)] * 2 + [(0, 1)] * 2 + [(1, 0)] * 3 + [(1, 1)] * 3
    pieces = [(b, 0, length_B[b], *place) for b, place in enumerate(place_B)]
    window = Schedule.of(pieces, ranks=2, last_token="unknown")
    made = pack_window(sketch_counts(counts), window, node_R=[0, 1])
    assert (made.how, made.crossing, made.given_crossing) == ("dealt", 0.0, 0.5)
    assert PackingLimits.of(made.schedule).longest == PackingLimits.of(window).longest == 60
    assert sorted(made.micro_batches(0)[1]) in ([4, 5, 6], [7, 8, 9])


def test_shorter_micro_steps_count_as_much_as_fewer_crossing_rows():
    """In each micro-step one rank has 160 tokens, where 120 are enough; samples are alike, so as many rows cross."""
    counts = counts_of(np.array([10, 30, 10, 10] * 2)[:, None, None] * np.ones((1, 1, 4), dtype=np.int64))
    length_B = counts.tokens_B
    place_B = [(0, 0), (0, 0), (1, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1)]
    window = Schedule.of([(b, 0, int(length_B[b]), *at) for b, at in enumerate(place_B)], ranks=2, last_token="unknown")
    made = pack_window(sketch_counts(counts), window, node_R=[0, 1])
    assert (made.how, made.crossing, made.given_crossing) == ("regrouped", 0.5, 0.5)
    assert (PackingLimits.of(made.schedule).tokens, PackingLimits.of(window).tokens) == (240, 320)


def test_samples_are_packed_anew_whatever_their_experts_where_nodes_have_few_of_them():
    """21 samples on four nodes: what each node could pack of its own is longer."""
    counts = random_counts(np.random.default_rng(3), 21, experts=16, kinds=3)
    policy = TokenPolicy(last_token="unknown")
    window = schedule_tokens(counts.tokens_B, ranks=8, token_budget=96, policy=policy)
    made = pack_window(sketch_counts(counts), window, node_R=[0, 0, 1, 1, 2, 2, 3, 3], policy=policy)
    assert made.how == "levelled" and made.crossing < 0.8 * made.given_crossing
    assert PackingLimits.of(made.schedule).tokens < 0.8 * PackingLimits.of(window).tokens


def test_nothing_changes_where_nothing_is_gained():
    counts = counts_of(np.full((8, 2, 4), 5))
    policy = TokenPolicy(last_token="unknown")
    window = schedule_samples(counts.tokens_B, ranks=2, samples_per_micro_step=2, policy=policy)
    made = pack_window(sketch_counts(counts), window, node_R=[0, 1])
    assert made.how == "given" and made.schedule is window and made.crossing == 0.5


def test_samples_of_a_prompt_stay_in_one_micro_batch():
    rng = np.random.default_rng(3)
    counts = random_counts(rng, 32, kinds=4, longest=30)
    prompt_B = np.arange(32) // 4
    policy = TokenPolicy(last_token="unknown")
    window = schedule_samples(counts.tokens_B, ranks=4, samples_per_micro_step=4, policy=policy)
    made = pack_window(sketch_counts(counts), window, node_R=[0, 0, 1, 1], prompt_B=prompt_B)
    places = {(int(prompt_B[p[0]]), p[3], p[4]) for p in made.schedule.pieces.tolist()}
    assert len(places) == len({prompt for prompt, *_ in places})
    tight = schedule_samples(
        counts.tokens_B, ranks=4, samples_per_micro_step=1, policy=TokenPolicy(last_token="unknown")
    )
    with pytest.raises(ScheduleError, match="samples of one prompt in one micro-batch would exceed"):
        pack_window(sketch_counts(counts), tight, node_R=[0, 0, 1, 1], prompt_B=prompt_B)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), hot=st.sampled_from([1, 1000]), alike=st.booleans(), empty=st.booleans())
def test_experts_follow_as_in_the_best_of_all_assignments(seed, hot, alike, empty):
    """`follow_nodes` against all assignments: the best one where experts are equally hot, else never above it."""
    rng = np.random.default_rng(seed)
    rows_NE = rng.integers(0, 100, size=(2, 6)).astype(np.float64) * (0 if empty else 1)
    rows_NE[:, 0] *= hot
    if alike:
        rows_NE[1] = rows_NE.max() - rows_NE[0]

    def value(node_E):
        fill_N = np.bincount(node_E, weights=rows_NE.sum(axis=0), minlength=2) * 2
        return rows_NE[node_E, np.arange(6)].sum() - (fill_N.max() - rows_NE.sum())

    best = max(value(np.isin(np.arange(6), inside).astype(np.int64)) for inside in combinations(range(6), 3))
    found = follow_nodes(rows_NE, np.array([1, 1]), rounds=16)
    assert np.bincount(found, minlength=2).tolist() == [3, 3]
    assert value(follow_nodes(rows_NE, np.array([1, 1]), rounds=1)) <= value(found) <= best
    if alike:
        assert value(found) == best


def plain_difference(chosen, tokens_U, count):
    """Karmarkar and Karp's differencing of as many parts from the start, empty ones too."""
    heap = [(-int(tokens_U[u]) * (count > 1), u, [(int(tokens_U[u]), [u])] + [(0, [])] * (count - 1)) for u in chosen]
    while len(heap) > 1:
        (_, number, first), (_, _, second), *heap = sorted(heap, key=lambda partial: partial[:2])
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heap.append((merged[-1][0] - merged[0][0], number, merged))
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(count)]


@settings(deadline=None, max_examples=100)
@given(tokens=st.lists(st.integers(1, 30), max_size=24), count=st.integers(1, 30), skipped=st.integers(0, 3))
def test_differencing_without_empty_parts_is_plain_differencing(tokens, count, skipped):
    chosen = list(range(skipped, len(tokens)))
    assert difference(chosen, np.array(tokens), count) == plain_difference(chosen, tokens, count)


def test_a_sketch_is_off_by_at_most_half_a_step():
    counts = random_counts(np.random.default_rng(0), 20, layers=12, longest=5000)
    share_BLE = counts.count_BLE / np.maximum(counts.count_BLE.sum(axis=2, keepdims=True), 1)
    kept = sketch_counts(counts, layers=5).share_BLE
    assert kept.shape == (20, 5, 8) and kept.dtype == np.uint16
    assert np.abs(kept / 65535 - share_BLE[:, [0, 2, 4, 7, 9]]).max() <= 0.5 / 65535 + 1e-12
    assert np.array_equal(sketch_counts(counts).share_BLE.shape, (20, 8, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_R": [0, 2]}, "without gaps"),
        ({"node_R": [0, 1, 1]}, "the schedule has 2 ranks, node_R names 3"),
        ({"given": "sliced"}, "is cut into pieces; pack whole samples first"),
        ({"given": "stranger"}, "sample 9 has no sketch; there are samples 0..5"),
        ({"given": "padded"}, "2 padding tokens, the policy gives 0"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(change, message):
    counts = counts_of(np.full((6, 1, 4), 5))
    policy = TokenPolicy(last_token="unknown")
    windows = {
        "plain": schedule_samples(counts.tokens_B, ranks=2, samples_per_micro_step=1, policy=policy),
        "stranger": Schedule.of([(9, 0, 5, 0, 0)], ranks=2),
        "padded": Schedule.of([(0, 0, 5, 0, 0)], ranks=2, padding_MR=np.array([[2, 0]])),
    }
    windows["sliced"] = slice_sequence(
        schedule_samples(counts.tokens_B, ranks=1, samples_per_micro_step=1, policy=policy), 2
    )
    arguments = {"node_R": [0, 1], **change}
    window = windows[arguments.pop("given", "plain")]
    with pytest.raises(ScheduleError, match=message):
        pack_window(sketch_counts(counts), window, **arguments)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_limit_on_memory_drops_schedules_and_names_the_micro_step_that_cannot_fit(groups):
    rng = np.random.default_rng(4)
    counts = random_counts(rng, 40 * groups, longest=200)
    window = schedule_samples(counts.tokens_B, ranks=4 * groups, samples_per_micro_step=2)
    limit = {"ep": 4, "model": counts.model}
    free = pack_window(sketch_counts(counts), window, node_R=[0, 0, 1, 1])
    needs = [
        max(int(m.peak_R.max()) for m in MemoryLimit(limit_bytes=1, **limit).memory(each, 4))
        for each in (free.schedule, window)
    ]
    # Every rank of a level micro-step receives as many rows; a longer one needs more.
    tokens_M = window.num_tokens_MR[:, :4].sum(axis=1)
    memory = MemoryLimit(limit_bytes=1, **limit).memory(window, 4)[0]
    assert np.argmax(memory.total_MLR.max(axis=(1, 2))) == tokens_M.argmax()
    roomy = pack_window(
        sketch_counts(counts), window, node_R=[0, 0, 1, 1], memory=MemoryLimit(limit_bytes=max(needs), **limit)
    )
    assert roomy == free
    kept = MemoryLimit(limit_bytes=needs[1], **limit)
    packed = pack_window(sketch_counts(counts), window, node_R=[0, 0, 1, 1], memory=kept)
    assert kept.fits(packed.schedule, 4)
    tight = MemoryLimit(limit_bytes=min(needs) // 2, **limit)
    with pytest.raises(InfeasiblePlanError, match=r"micro-step \d+: rank \d needs .* GiB even where experts are level"):
        pack_window(sketch_counts(counts), window, node_R=[0, 0, 1, 1], memory=tight)
