"""Waves: their times against the reference, bounds of what they can gain, and one wave as before there were any."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster
from equipoise.cost import CostModel
from equipoise.cost.clock import ACROSS, COMPUTE, INSIDE, draw, replay
from equipoise.cost.waves import SLOWED_PERMILLE, LayerNs, Piped, WaveRows, in_waves
from equipoise.cost.window import level_work, rank_work, visit_ns
from equipoise.cost.work import Work
from tests.cost.events import play
from tests.cost.wave_events import run_waves
from tests.cost.works import TINY, in_pipeline, random_work

some = settings(max_examples=80, deadline=None)
lengths = st.sampled_from([0, 1, 7, 1000, 60_000]).flatmap(lambda most: st.integers(0, most))


@st.composite
def layers(draw):
    """(parts of an exchange, [wave][rank] experts, [rank] what follows) of one layer in one direction."""
    waves, ranks = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    part_W = draw(st.lists(lengths, min_size=waves, max_size=waves))
    wave_WR = [draw(st.lists(lengths, min_size=ranks, max_size=ranks)) for _ in range(waves)]
    return part_W, wave_WR, draw(st.lists(lengths, min_size=ranks, max_size=ranks))


def piped(part_W, wave_WR, rest_R):
    """(compute of each rank, tail, hidden) of one layer in one direction."""
    found = Piped.of(*(np.array([array], dtype=np.int64) for array in (part_W, wave_WR, rest_R)))
    return found.compute_XR[0].tolist(), int(found.tail_X[0]), int(found.hidden_X[0])


def took(layer):
    compute_R, tail, _ = piped(*layer)
    return layer[0][0] + max(compute_R) + tail


@given(layers())
@some
def test_waves_take_as_long_as_the_reference_and_what_they_slow(layer):
    compute_R, tail, hidden = piped(*layer)
    reference, slowed = run_waves(*layer), hidden * SLOWED_PERMILLE // 1000
    assert took(layer) == reference.end + slowed
    assert compute_R == [computed + slowed for computed in reference.computed_R]
    assert min(tail, hidden) >= 0 and layer[0][0] + hidden + tail == 2 * sum(layer[0]), "all of it is exchanged"


@given(layers())
@some
def test_a_layer_is_never_faster_than_its_exchanges_alone_nor_than_its_experts_alone(layer):
    part_W, wave_WR, rest_R = layer
    compute_R, _, hidden = piped(*layer)
    alone_R = [sum(wave_R[rank] for wave_R in wave_WR) + rest for rank, rest in enumerate(rest_R)]
    assert took(layer) >= max(2 * sum(part_W), part_W[0] + max(alone_R))
    assert hidden <= max(compute_R), "what is hidden fits beside the experts"


@given(layers(), st.integers(0, 99), st.integers(0, 99), st.integers(1, 5000))
@some
def test_no_layer_is_faster_for_a_longer_part_or_a_longer_wave(layer, w, r, more):
    part_W, wave_WR, rest_R = layer
    w, r = w % len(part_W), r % len(rest_R)
    longer_W = [part + more * (i == w) for i, part in enumerate(part_W)]
    longer_WR = [[ns + more * ((i, j) == (w, r)) for j, ns in enumerate(wave_R)] for i, wave_R in enumerate(wave_WR)]
    longer_R = [rest + more * (j == r) for j, rest in enumerate(rest_R)]
    for longer in ((longer_W, wave_WR, rest_R), (part_W, longer_WR, rest_R), (part_W, wave_WR, longer_R)):
        assert took(longer) >= took(layer)


class Window(NamedTuple):
    """What is priced of a window, and random work around it."""

    cost: CostModel
    work: Work
    rows_MLR: np.ndarray
    busy_MLR: np.ndarray
    wire_ML: np.ndarray

    def cut(self, waves, rows=None):
        """The work in waves; level ones if no rows are given."""
        visits = visit_ns(self.cost, rows_MLR=self.rows_MLR, busy_MLR=self.busy_MLR, sent_MLR=0 * self.rows_MLR)
        found = LayerNs.whole(visits, self.work.tables.exchange_fixed_ns + self.wire_ML)
        if waves > 1:
            wave_ML = -(-self.wire_ML // waves)
            level = WaveRows.level(self.rows_MLR, self.busy_MLR, waves)
            found = in_waves(self.cost, visits, self.wire_ML, wave_ML, level if rows is None else rows)
        return replace(self.work, **found._asdict())


def window_of(seed, stage="update", most_rows=9000, **shape):
    """A window with random rows, whose experts and exchanges have their prices."""
    rng = np.random.default_rng(seed)
    work = random_work(rng, stage=stage, **shape)
    cost = CostModel.of(Cluster.preset("h200", ep=work.shape[2]), TINY, stage=stage)
    rows_MLR, busy_MLR = rng.integers(0, most_rows, work.shape), rng.integers(1, 9, work.shape)
    return Window(cost, work, rows_MLR, busy_MLR, rng.integers(0, most_rows * 50, work.shape[:2]))


@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from(["update", "recompute"]))
@some
def test_waves_move_the_same_bytes_and_experts_take_no_less_than_in_one_call(seed, waves, stage):
    window = window_of(seed, stage)
    whole, cut = window.cut(1), window.cut(waves)
    fixed, phases = window.work.tables.exchange_fixed_ns, 1 + (stage == "update")
    network_ML2 = (cut.exchange_ML[..., None] + cut.tail_ML2 + cut.hidden_ML2)[..., :phases]
    wire_ML2, whole_ML1 = network_ML2 - 2 * waves * fixed, 2 * window.wire_ML[..., None]
    assert (np.abs(wire_ML2 - whole_ML1) <= 2 * waves**2).all(), "but for rounding"
    assert (cut.forward_MLR >= whole.forward_MLR).all() and (cut.backward_MLR >= whole.backward_MLR).all()
    assert stage == "update" or not cut.backward_MLR.any()


@given(st.integers(0, 10**6), st.integers(2, 4))
@some
def test_a_window_in_level_waves_is_never_faster_than_its_network_or_experts_nor_for_more_to_do(seed, waves):
    window = window_of(seed, replicas=0)
    total, whole = replay([window.cut(waves)]).total, window.cut(1)
    assert total >= 4 * (window.wire_ML - waves).sum()
    assert total >= (whole.forward_MLR.max(axis=2) + whole.backward_MLR.max(axis=2)).sum()
    longer = window._replace(wire_ML=window.wire_ML + 9000)
    assert replay([longer.cut(waves)]).total >= total
    fuller = window._replace(rows_MLR=window.rows_MLR * 2, busy_MLR=window.busy_MLR + 1)
    assert replay([fuller.cut(waves)]).total >= total


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 6), st.integers(0, 5))
@some
def test_waves_have_the_rows_and_slots_between_their_cuts(seed, waves, slots, zeros):
    rng = np.random.default_rng(seed)
    rows_MLRS = rng.integers(0, 50, (2, 3, 4, slots)) * (rng.integers(0, 6, (2, 3, 4, slots)) >= zeros)
    found = WaveRows.of(rows_MLRS, waves)
    assert found.rows_MLWR.shape == (2, 3, waves, 4)
    for m, layer, rank in np.ndindex(2, 3, 4):
        row_slots = np.repeat(np.arange(slots), rows_MLRS[m, layer, rank])
        begin = [wave * len(row_slots) // waves for wave in range(waves + 1)]
        by_wave = [row_slots[low:high] for low, high in pairwise(begin)]
        assert found.rows_MLWR[m, layer, :, rank].tolist() == [len(rows) for rows in by_wave]
        assert found.busy_MLWR[m, layer, :, rank].tolist() == [len(set(rows.tolist())) for rows in by_wave]


@given(st.integers(0, 10**6), st.integers(2, 4))
@some
def test_uneven_waves_take_no_less_of_the_network_than_level_ones(seed, waves):
    window = window_of(seed)
    rows_MLRS = np.random.default_rng(seed).multinomial(9000, np.full(5, 0.2), size=window.work.shape)
    window = window._replace(rows_MLR=rows_MLRS.sum(axis=3), busy_MLR=(rows_MLRS > 0).sum(axis=3))
    level, real = (window.cut(waves, rows) for rows in (None, WaveRows.of(rows_MLRS, waves)))
    network_ML2, level_ML2 = (work.exchange_ML[..., None] + work.tail_ML2 + work.hidden_ML2 for work in (real, level))
    assert (network_ML2 >= level_ML2 - 2 * waves).all()


@given(st.integers(0, 10**6), st.integers(1, 2), st.integers(1, 3), st.booleans(), st.integers(2, 4))
@some
def test_the_clock_equals_the_event_level_one_in_waves(seed, stages, depth, repeats, waves):
    """Lanes stand still while what is hidden runs; ranks are released before it ends."""
    shape = {"replicas": 4, "most_rows": [300, 9000][seed % 2], "repeats_forward": repeats}
    works = in_pipeline([window_of(seed + p, **shape).cut(waves) for p in range(stages)], depth=depth)
    assert replay(works).total == play(works).total
    (work,) = in_pipeline(works[:1], depth=depth)
    (bars, _), played, done = draw(work), play([work]), replay([work])
    assert bars == sorted(bar for _, bar in played.bars)
    assert done.part_QC.sum() == done.total == played.total


def test_exchanges_hide_behind_long_experts_and_are_exposed_but_for_the_compute_behind_short_ones():
    window = window_of(3, replicas=0)
    work = replace(window.work, edge_ns_2L=0 * window.work.edge_ns_2L, edge_slow_2L=0 * window.work.edge_slow_2L)
    fixed, entries, wire_ML = work.tables.exchange_fixed_ns, window.wire_ML.size, np.full_like(window.wire_ML, 10**6)
    long = window._replace(work=work, rows_MLR=np.full_like(window.rows_MLR, 10**6), wire_ML=wire_ML)
    cut = long.cut(4)
    done, before = replay([cut]), replay([long.cut(1)])
    exposed, whole = (int(each.part_QC[0, [INSIDE, ACROSS]].sum()) for each in (done, before))
    # Forward the first and the last part are exposed, backward the first alone: weight gradients hide the last one.
    assert exposed == 3 * (fixed + 10**6 // 4) * entries
    assert whole == 4 * (fixed + 10**6) * entries
    slowed = int((cut.hidden_ML2 * SLOWED_PERMILLE // 1000).sum())
    compute = int(done.part_QC[0, COMPUTE] - before.part_QC[0, COMPUTE])
    assert slowed < compute < 1.3 * slowed, "experts are slowed, and smaller calls cost a little more"
    short = long._replace(rows_MLR=np.ones_like(window.rows_MLR), wire_ML=1000 * wire_ML)
    assert replay([short.cut(2)]).total >= 4 * 10**9 * entries


def test_waves_of_few_rows_lose_because_every_part_has_its_fixed_time():
    window = window_of(1, replicas=0)
    few = window._replace(rows_MLR=np.full_like(window.rows_MLR, 8), wire_ML=np.full_like(window.wire_ML, 10))
    totals = [replay([few.cut(waves)]).total for waves in (1, 2, 4, 8)]
    assert totals == sorted(totals) and len(set(totals)) == 4


def test_a_token_that_crosses_in_two_waves_is_sent_twice():
    """Rows are cut in two; of tokens sent once per node, most are in both halves."""
    load_MRE = np.full((1, 4, 8), 800)
    node_R, keep_N = np.array([0, 0, 1, 1]), np.full(2, 1000)
    none_MRS = np.zeros((1, 4, 0), dtype=np.int64)
    for forwards, least in ((False, 0.5), (True, 0.9)):
        given = (load_MRE, np.arange(8) // 2, node_R, none_MRS, none_MRS, keep_N, False, 8, forwards)
        whole, half = rank_work(*given), rank_work(*given, 2)
        assert half.across_M[0] == whole.across_M[0] == whole.wave_across_M[0]
        assert half.wave_across_M[0] == pytest.approx(least * whole.across_M[0], rel=0.01)
        level = [level_work(load_MRE, node_R, top_k=8, forwards=forwards, waves=waves) for waves in (1, 2)]
        assert level[1].wave_across_M[0] == pytest.approx(least * level[0].across_M[0], rel=0.01)
        assert np.array_equal(half.rows_MR, whole.rows_MR)
