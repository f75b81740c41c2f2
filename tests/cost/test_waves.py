"""Waves: their times against the reference, bounds of what they can gain, and one wave as before there were any."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster
from equipoise.cost import CostModel
from equipoise.cost.clock import ACROSS, COMPUTE, INSIDE, draw, replay
from equipoise.cost.waves import SLOWED_PERMILLE, Piped, in_waves
from equipoise.cost.window import visit_ns
from tests.cost.events import play
from tests.cost.wave_events import run_waves
from tests.cost.works import TINY, in_pipeline, random_work

some = settings(max_examples=80, deadline=None)
lengths = st.sampled_from([0, 1, 7, 1000, 60_000]).flatmap(lambda most: st.integers(0, most))
ranks = st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4)
"""(one wave, what follows all waves) of each rank."""


def piped(part, ranks, waves):
    """(compute of each rank, tail, hidden) of one layer in one direction."""
    wave_R, rest_R = (np.array(column, dtype=np.int64).reshape(1, 1, -1) for column in zip(*ranks, strict=True))
    found = Piped.of(np.array([[part]]), wave_R, rest_R, waves)
    return found.compute_MLR[0, 0].tolist(), int(found.tail_ML[0, 0]), int(found.hidden_ML[0, 0])


@given(lengths, ranks, st.integers(2, 8))
@some
def test_waves_take_as_long_as_the_reference_and_what_they_slow(part, ranks, waves):
    compute_R, tail, hidden = piped(part, ranks, waves)
    reference = run_waves(part, *map(list, zip(*ranks, strict=True)), waves)
    slowed = hidden * SLOWED_PERMILLE // 1000
    assert part + max(compute_R) + tail == reference.end + slowed
    assert compute_R == [computed + slowed for computed in reference.computed_R]
    assert min(tail, hidden) >= 0 and part + hidden + tail == 2 * waves * part, "exposed or hidden, all is exchanged"


@given(lengths, ranks, st.integers(2, 8))
@some
def test_a_layer_is_never_faster_than_its_exchanges_alone_nor_than_its_experts_alone(part, ranks, waves):
    compute_R, tail, hidden = piped(part, ranks, waves)
    took = part + max(compute_R) + tail
    assert took >= 2 * waves * part
    assert took >= max(waves * wave + rest for wave, rest in ranks) + part
    assert hidden <= max(compute_R), "what is hidden fits beside the experts"


@given(lengths, ranks, st.integers(2, 8), st.integers(0, 3), st.integers(1, 5000), st.booleans())
@some
def test_a_layer_is_never_faster_for_longer_parts_or_longer_waves(part, ranks, waves, at, more, in_rest):
    def took(part, ranks):
        compute_R, tail, _ = piped(part, ranks, waves)
        return part + max(compute_R) + tail

    wave, rest = ranks[at % len(ranks)]
    longer = list(ranks)
    longer[at % len(ranks)] = (wave, rest + more) if in_rest else (wave + more, rest)
    assert took(part, longer) >= took(part, ranks)
    assert took(part + more, ranks) >= took(part, ranks)


def priced_work(seed, stage="update", most_rows=9000, **shape):
    """A cost model and random work whose experts and exchanges have the prices of their rows."""
    rng = np.random.default_rng(seed)
    work = random_work(rng, stage=stage, **shape)
    cost = CostModel.of(Cluster.preset("h200", ep=work.shape[2]), TINY, stage=stage)
    rows_MLR, busy_MLR = rng.integers(0, most_rows, work.shape), rng.integers(1, 9, work.shape)
    return cost, priced(cost, work, rows_MLR, busy_MLR, rng.integers(0, most_rows * 50, work.shape[:2]))


def priced(cost, work, rows_MLR, busy_MLR, wire_ML):
    """The same work with other rows and bytes: wire_ML nanoseconds on the busiest link."""
    exchange_ML = work.tables.exchange_fixed_ns + wire_ML
    visits = visit_ns(cost, rows_MLR=rows_MLR, busy_MLR=busy_MLR, sent_MLR=np.zeros_like(rows_MLR))
    return replace(
        work,
        forward_MLR=visits.forward_MLR,
        backward_MLR=visits.backward_MLR,
        rows_MLR=rows_MLR,
        busy_MLR=busy_MLR,
        exchange_ML=exchange_ML,
        tail_ML2=np.stack([exchange_ML, exchange_ML], axis=2),
    )


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_one_wave_is_the_work_as_it_is(seed):
    cost, work = priced_work(seed)
    assert in_waves(cost, work, 1) is work


@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from(["update", "recompute"]))
@some
def test_waves_move_the_same_bytes_and_experts_take_no_less_than_in_one_call(seed, waves, stage):
    cost, work = priced_work(seed, stage)
    cut = in_waves(cost, work, waves)
    fixed = work.tables.exchange_fixed_ns
    wire_ML2 = (cut.exchange_ML[..., None] + cut.tail_ML2 + cut.hidden_ML2 - 2 * waves * fixed)[
        ..., : 1 + (stage == "update")
    ]
    whole_ML1 = 2 * (work.exchange_ML - fixed)[..., None]
    assert (wire_ML2 >= whole_ML1).all() and (wire_ML2 < whole_ML1 + 2 * waves).all()
    assert (cut.forward_MLR >= work.forward_MLR).all() and (cut.backward_MLR >= work.backward_MLR).all()
    if stage == "recompute":
        assert not cut.backward_MLR.any()


@given(st.integers(0, 10**6), st.integers(2, 4))
@some
def test_a_window_in_waves_is_never_faster_than_its_network_or_its_experts_nor_for_more_to_do(seed, waves):
    cost, work = priced_work(seed, replicas=0)
    total = replay([in_waves(cost, work, waves)]).total
    assert total >= 4 * (work.exchange_ML - work.tables.exchange_fixed_ns).sum()
    assert total >= (work.forward_MLR.max(axis=2) + work.backward_MLR.max(axis=2)).sum()
    wire_ML = work.exchange_ML - work.tables.exchange_fixed_ns
    for rows, busy, wire in ((500, 0, 0), (0, 1, 0), (0, 0, 9000)):
        more = priced(cost, work, work.rows_MLR + rows, work.busy_MLR + busy, wire_ML + wire)
        assert replay([in_waves(cost, more, waves)]).total >= total


@given(st.integers(0, 10**6), st.integers(1, 2), st.integers(1, 3), st.booleans(), st.integers(2, 4))
@some
def test_the_clock_equals_the_event_level_one_in_waves(seed, stages, depth, repeats, waves):
    """Lanes stand still while what is hidden runs; ranks are released before it ends."""
    works = []
    for p in range(stages):
        cost, work = priced_work(seed + p, replicas=4, most_rows=[300, 9000][seed % 2], repeats_forward=repeats)
        works.append(in_waves(cost, work, waves))
    works = in_pipeline(works, depth=depth)
    assert replay(works).total == play(works).total
    (work,) = in_pipeline(works[:1], depth=depth)
    (bars, _), played = draw(work), play([work])
    assert bars == sorted(bar for _, bar in played.bars)
    done = replay([work])
    assert done.part_QC.sum() == done.total == played.total


def test_exchanges_hide_behind_long_experts_and_are_exposed_but_for_the_compute_behind_short_ones():
    cost, work = priced_work(3, replicas=0)
    still = {"edge_ns_2L": 0 * work.edge_ns_2L, "edge_slow_2L": 0 * work.edge_slow_2L}
    long = priced(cost, replace(work, **still), 0 * work.rows_MLR + 10**6, work.busy_MLR, 0 * work.exchange_ML + 10**6)
    done, before = replay([in_waves(cost, long, 4)]), replay([long])
    exposed, whole = (int(each.part_QC[0, [INSIDE, ACROSS]].sum()) for each in (done, before))
    part = long.tables.exchange_fixed_ns + 10**6 // 4
    # Forward the first and the last part are exposed, backward the first alone: weight gradients hide the last one.
    assert exposed == 3 * part * work.exchange_ML.size
    assert whole == 4 * (long.tables.exchange_fixed_ns + 10**6) * work.exchange_ML.size
    slowed = int((in_waves(cost, long, 4).hidden_ML2 * SLOWED_PERMILLE // 1000).sum())
    compute = int(done.part_QC[0, COMPUTE] - before.part_QC[0, COMPUTE])
    assert slowed < compute < 1.3 * slowed, "experts are slowed, and smaller calls cost a little more"
    short = priced(cost, long, 0 * work.rows_MLR + 1, work.busy_MLR, 0 * work.exchange_ML + 10**9)
    assert replay([in_waves(cost, short, 2)]).total >= 4 * 10**9 * work.exchange_ML.size


def test_waves_of_few_rows_lose_because_every_part_has_its_fixed_time():
    cost, work = priced_work(1, replicas=0)
    few = priced(cost, work, 0 * work.rows_MLR + 8, work.busy_MLR, 0 * work.exchange_ML + 10)
    totals = [replay([in_waves(cost, few, waves)]).total for waves in (1, 2, 4, 8)]
    assert totals == sorted(totals) and len(set(totals)) == 4
