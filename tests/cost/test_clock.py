"""The clock equals the event-level one, its parts add up, and nothing is faster for more to do."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.clock import (
    ATTENTION,
    COLLECT,
    COMPUTE,
    PLANNING,
    PUBLISH,
    PULL,
    RETURN,
    Pass,
    _Stage,
    draw,
    layer_ends,
    order_passes,
    passes_of,
    replay,
    waits_for,
)
from equipoise.cost.window import Edges
from tests.cost.edges import Turn, exposed_edges
from tests.cost.events import play
from tests.cost.works import in_pipeline, random_transfers, random_work

some = settings(max_examples=50, deadline=None)
shapes = st.fixed_dictionaries(
    {
        "micro_steps": st.integers(1, 4),
        "layers": st.integers(1, 3),
        "ranks": st.integers(1, 5),
        "stage": st.sampled_from(["update", "recompute"]),
        "most_ns": st.sampled_from([100, 10_000, 300_000, 5_000_000]),
        "replicas": st.integers(0, 5),
    }
)


def works_of(seed: int, stages: int, shape: dict, *, repeats: bool = False):
    rng = np.random.default_rng(seed)
    repeats = repeats and shape["stage"] == "update"
    return [random_work(rng, **shape, repeats_forward=repeats, pipeline=(p, stages)) for p in range(stages)]


@given(st.integers(0, 10**6), st.integers(1, 3), shapes, st.integers(1, 3), st.booleans())
@some
def test_the_clock_equals_the_event_level_one(seed, stages, shape, depth, repeats):
    works = in_pipeline(works_of(seed, stages, shape, repeats=repeats), depth=depth)
    assert replay(works).total == play(works).total


@given(st.integers(0, 10**6), shapes, st.integers(1, 3), st.booleans(), st.booleans())
@some
def test_the_clock_draws_the_bars_of_the_event_level_one(seed, shape, depth, repeats, reacts):
    (work,) = in_pipeline(works_of(seed, 1, shape, repeats=repeats), depth=depth)
    if reacts:
        work = replace(work, push_ML=work.push_ML + 255, planning_ML=work.planning_ML + 80)
    (bars, begin_V), played = draw(work), play([work])
    assert bars == sorted(bar for _, bar in played.bars)
    assert begin_V.tolist() == [played.visit_start[(0, v)] for v in range(len(begin_V))]


@pytest.mark.parametrize(
    "shape",
    [
        {"micro_steps": 1, "layers": 1, "ranks": 1},
        {"micro_steps": 1, "layers": 3, "ranks": 2, "replicas": 9},
        {"micro_steps": 5, "layers": 1, "ranks": 3, "most_ns": 4},
        {"micro_steps": 2, "layers": 2, "ranks": 7, "replicas": 0},
        {"micro_steps": 3, "layers": 2, "ranks": 4, "stage": "recompute", "replicas": 8, "most_ns": 4},
        {"micro_steps": 1, "layers": 4, "ranks": 2, "stage": "recompute", "replicas": 3},
        {"micro_steps": 1, "layers": 1, "ranks": 2, "stage": "recompute", "replicas": 2},
    ],
    ids=[
        "one of each",
        "pulls alone matter",
        "no compute",
        "no replica",
        "recompute, no compute",
        "one pass",
        "one visit",
    ],
)
def test_the_forms_agree_on_awkward_work(shape):
    for stages in (1, 2, 3):
        works = works_of(7, stages, {"stage": "update", "most_ns": 50_000, "replicas": 3, **shape})
        assert replay(works).total == play(works).total
        for scale in (0, 1000):
            others = [replace(work, edge_ns_2L=work.edge_ns_2L * scale) for work in works]
            assert replay(others).total == play(others).total


@given(st.integers(0, 10**6), shapes, st.integers(1, 3))
@some
def test_parts_add_up_to_the_clock_where_there_is_one_pipeline_stage(seed, shape, depth):
    (work,) = in_pipeline(works_of(seed, 1, shape), depth=depth)
    done = replay([work])
    assert done.part_QC.sum() == done.total
    assert (done.moved_Q3 >= done.exposed_Q3).all()
    assert (done.exposed_Q3 >= 0).all()
    assert done.exposed_Q3[0, :2].sum() == done.part_QC[0, PULL]
    assert done.exposed_Q3[0, 2] == done.part_QC[0, RETURN]


def test_compute_and_attention_are_those_of_the_busiest_rank():
    work = random_work(np.random.default_rng(3), replicas=0)
    done = replay([work])
    assert done.part_QC[0, COMPUTE] == (work.forward_MLR.max(axis=2) + work.backward_MLR.max(axis=2)).sum()
    attention = work.attention_MLR.max(axis=2) + work.attention_backward_MLR.max(axis=2)
    assert done.part_QC[0, ATTENTION] == attention.sum()
    assert done.total == done.part_QC.sum()


@given(st.integers(0, 10**6), shapes)
@some
def test_nothing_is_faster_for_more_to_do(seed, shape):
    (work,) = works_of(seed, 1, shape)
    total = replay([work]).total
    for name in ("forward_MLR", "attention_MLR", "exchange_ML", "planning_ML", "push_ML"):
        assert replay([replace(work, **{name: getattr(work, name) + 1000})]).total >= total
    slow = work.tables._replace(peer_ns=2 * work.tables.peer_ns, host_ns=2 * work.tables.host_ns)
    assert replay([replace(work, tables=slow)]).total >= total


def test_what_is_pushed_in_the_open_is_all_exposed():
    rng = np.random.default_rng(5)
    work = random_work(rng, replicas=0)
    pushed = replace(work, push_ML=work.push_ML + 255, planning_ML=work.planning_ML + 80)
    before, after = replay([work]), replay([pushed])
    entries = work.exchange_ML.size
    assert after.total - before.total == entries * (255 + 80)
    assert after.part_QC[0, PLANNING] == entries * 80
    assert after.exposed_Q3[0, 0] == entries * 255


def test_pulls_hide_behind_long_visits_and_stand_out_behind_short_ones():
    rng = np.random.default_rng(11)
    transfers = random_transfers(rng, entries=6, ranks=4, most=4)
    long = random_work(rng, most_ns=50_000_000, transfers=transfers, slow_permille=(0, 0))
    short = random_work(rng, most_ns=20, transfers=transfers, slow_permille=(0, 0))
    # The very first visit has nothing before it to hide behind but its own attention.
    assert replay([long]).part_QC[0, PULL] == 0
    assert replay([short]).part_QC[0, PULL] > 0.5 * replay([short]).moved_Q3[0, :2].max()


def one_pull(rng):
    """The shape of a short window in which rank 1 pulls one expert from rank 0."""
    transfers = replace(
        random_transfers(rng, entries=1, ranks=2, most=0),
        start_ML=np.array([0, 1]),
        rank_P=np.array([1]),
        home_P=np.array([0]),
        path_P2=np.array([[0, 0]]),
    )
    return {"micro_steps": 1, "layers": 1, "ranks": 2, "stage": "recompute", "most_ns": 10, "transfers": transfers}


def test_a_pull_slows_the_compute_beside_it_by_its_share():
    """One pull of one rank, whose experts decide: they take longer by a fifth of the pull."""
    rng = np.random.default_rng(0)
    shape = one_pull(rng)
    busy = np.array([[[0, 10**9]]])
    free, slowed = (
        replay([random_work(rng, **shape, forward_MLR=busy, attention_MLR=busy, slow_permille=(share, 0))])
        for share in (0, 200)
    )
    tables = random_work(rng, **shape).tables
    assert free.part_QC[0, PULL] == 0
    assert slowed.part_QC[0, PULL] == (tables.peer_ns + tables.peer_fixed_ns) * 200 // 1000


@given(st.integers(0, 10**6), shapes, st.sampled_from([0, 1, 5]))
@some
def test_exposed_edges_are_those_of_the_price_list_where_nothing_else_delays(seed, shape, times):
    (work,) = works_of(seed, 1, {**shape, "replicas": 0})
    work = replace(work, edge_slow_2L=times * work.edge_slow_2L)
    done, layers = replay([work]), range(work.shape[1])
    turns = []
    for m in range(work.shape[0]):
        forward_L, attention_L = work.forward_MLR[m].max(axis=1).tolist(), work.attention_MLR[m].max(axis=1).tolist()
        turns += map(Turn, layers, attention_L, forward_L)
        if work.stage == "update":
            back_L = (work.backward_MLR[m].max(axis=1) + work.attention_backward_MLR[m].max(axis=1)).tolist()
            turns += [Turn(layer, 0, back_L[layer]) for layer in reversed(layers)]
    edges = Edges(work.edge_ns_2L, work.edge_slow_2L)
    exposed = exposed_edges(edges, turns)
    assert (done.part_QC[0, PUBLISH], done.part_QC[0, COLLECT]) == exposed
    # A window's first and last pass are enough.
    passes = [turns[i : i + len(layers)] for i in range(0, len(turns), len(layers))]
    ends = passes[0] + (passes[-1] if len(passes) > 1 else [])
    assert exposed_edges(edges, ends) == exposed


@given(st.integers(0, 10**6), st.integers(1, 3), shapes)
@some
def test_edges_make_a_window_no_shorter_and_longer_by_what_they_take_at_most(seed, stages, shape):
    works = works_of(seed, stages, {**shape, "replicas": 0})
    bare = [replace(work, edge_ns_2L=0 * work.edge_ns_2L, edge_slow_2L=0 * work.edge_slow_2L) for work in works]
    total, least = replay(works).total, replay(bare).total
    assert least <= total <= least + sum(int(work.edge_ns_2L.sum() + work.edge_slow_2L.sum()) for work in works)
    parts_QC, bare_QC = replay(works).part_QC, replay(bare).part_QC
    assert not bare_QC[:, [PUBLISH, COLLECT]].any()
    assert np.array_equal(parts_QC[:, :PUBLISH], bare_QC[:, :PUBLISH])


def test_a_later_pipeline_stage_publishes_while_it_waits_for_the_first():
    shape = {"micro_steps": 2, "layers": 1, "ranks": 2, "stage": "update", "most_ns": 100, "replicas": 0}
    first, second = (replace(work, edge_slow_2L=0 * work.edge_slow_2L) for work in works_of(1, 2, shape))
    first = replace(first, attention_MLR=first.attention_MLR + 5000, edge_ns_2L=np.zeros((2, 1), dtype=np.int64))
    second = replace(second, edge_ns_2L=np.array([[5000], [0]]))
    assert replay([first, second]).part_QC[:, PUBLISH].tolist() == [0, 0]
    assert replay(in_pipeline([second])).part_QC[0, PUBLISH] > 4000


def test_a_pull_waits_until_its_layer_is_published():
    rng = np.random.default_rng(0)
    shape = one_pull(rng)
    work = random_work(rng, **shape, edge_ns_2L=np.array([[10**6], [0]]), slow_permille=(0, 0))
    work = replace(work, edge_slow_2L=np.zeros((2, 1), dtype=np.int64))
    pull_ns = work.tables.peer_ns + work.tables.peer_fixed_ns
    done = replay([work])
    assert done.part_QC[0, PUBLISH] == 10**6 - work.attention_MLR.max()
    assert pull_ns - 10 <= done.part_QC[0, PULL] <= pull_ns


def test_deeper_prefetch_never_exposes_more():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        work = random_work(rng, micro_steps=4, layers=3, most_ns=150_000, replicas=5)
        exposed = [int(replay(in_pipeline([work], depth=depth)).part_QC[0, PULL]) for depth in (1, 3)]
        assert exposed[1] <= exposed[0]


def test_a_pipeline_takes_at_least_its_busiest_stage_and_at_most_all_of_them_in_turn():
    for seed in range(10):
        works = works_of(
            seed, 3, {"micro_steps": 4, "layers": 2, "ranks": 3, "stage": "update", "most_ns": 9_000, "replicas": 2}
        )
        done = replay(works)
        busy = done.part_QC.sum(axis=1)
        sends = sum(int(w.send_M.sum()) for w in works) * 2
        assert busy.max() <= done.total <= busy.sum() + sends


def test_two_equal_stages_have_the_bubble_of_one_forward_one_backward():
    """One forward, one backward over p stages and m micro-steps idles (p - 1) passes of each kind per stage."""
    forward, backward, micro_steps, stages = 1000, 2500, 6, 3
    shape = (micro_steps, 1, 1)
    zero = np.zeros(shape, dtype=np.int64)
    work = random_work(
        np.random.default_rng(0),
        micro_steps=micro_steps,
        layers=1,
        ranks=1,
        replicas=0,
        forward_MLR=zero + forward,
        backward_MLR=zero + backward,
        attention_MLR=zero,
        attention_backward_MLR=zero,
        exchange_ML=zero[..., 0],
        send_M=zero[:, 0, 0],
        edge_ns_2L=np.zeros((2, 1), dtype=np.int64),
        edge_slow_2L=np.zeros((2, 1), dtype=np.int64),
    )
    assert replay(in_pipeline([work] * stages)).total == (micro_steps + stages - 1) * (forward + backward)


def test_a_wide_window_is_replayed_in_seconds():
    """94 layers x 64 micro-steps x EP64; the limit for planning and replaying is 10 s, replaying is a small part."""
    work = random_work(np.random.default_rng(0), micro_steps=64, layers=94, ranks=64, replicas=8)
    replay([random_work(np.random.default_rng(0), micro_steps=1, layers=1, ranks=2)])
    start = time.process_time()
    replay([work])
    assert time.process_time() - start < 4


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("stage", ["update", "recompute"])
@pytest.mark.parametrize("micro_steps", [1, 3, 6])
def test_every_pass_appears_once_after_those_it_waits_for(stages, stage, micro_steps):
    works = in_pipeline([random_work(np.random.default_rng(1), micro_steps=micro_steps, stage=stage)] * stages)
    done: list[Pass] = []
    for index, one in order_passes(works):
        assert passes_of(works[one.pipeline_stage], one.pipeline_stage)[index] == one
        needed = waits_for(one, stages)
        assert needed is None or needed in done
        if one.phase == 1:
            assert one._replace(phase=0) in done
        done.append(one)
    phases = 2 if stage == "update" else 1
    assert len(done) == len(set(done)) == stages * micro_steps * phases


def test_pulls_are_issued_where_the_itinerary_says_and_residents_never():
    work = random_work(np.random.default_rng(4), micro_steps=3, layers=3, replicas=4, depth=2)
    itinerary, (figures, _) = work.itinerary, _Stage.of(work)
    issued = {}
    for v in range(len(itinerary)):
        for later in figures.issue_visit_I[figures.issue_start_V[v] : figures.issue_start_V[v + 1]].tolist():
            issued[later] = v
    assert sorted(issued) == np.flatnonzero(itinerary.pulls_V & ~itinerary.resident_V).tolist()
    assert all(itinerary.ready_from_V[later] == v for later, v in issued.items())


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("stage", ["update", "recompute"])
def test_a_layers_first_visit_is_forward_and_its_last_backward_in_an_update(stages, stage):
    work = random_work(np.random.default_rng(1), micro_steps=4, layers=3, stage=stage)
    for staged in in_pipeline([work] * stages):
        itinerary = staged.itinerary
        first_L, last_L = layer_ends(itinerary)
        for layer in range(3):
            (own,) = np.nonzero(itinerary.layer_V == layer)
            assert (first_L[layer], last_L[layer]) == (own[0], own[-1])
            assert itinerary.phase_V[own[0]] == 0
            assert itinerary.phase_V[own[-1]] == (stage == "update")
        assert np.array_equal(np.argsort(last_L), [2, 1, 0] if stage == "update" else [0, 1, 2])
