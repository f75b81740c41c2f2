"""Other rows than planned: who computes them is what the layer does, and the worst that they can cost is bounded."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import LoadMatrix, LoadsError
from equipoise.cost.clock import replay
from equipoise.cost.kernels import COLUMNS
from equipoise.cost.window import Edges
from equipoise.layer.dispatch import SourceSplit, assign_slots
from equipoise.planner import PlanOptions, plan
from equipoise.planner.assemble import Draft, WindowTask, build_plan, home_slots_of
from equipoise.sim.replay import live_rows, overhead_seconds, owners_LR, plan_work, replica_rows_MLR
from tests.layer.cases import random_plan, random_routing
from tests.sim.steps import MODEL, cluster_of, skewed_loads

NANO = 10**9


def seconds_of(work):
    return replay([work]).total / NANO


def most_rows_MLR(plan, live):
    """[M, L, R] the most rows a rank can get if these come, from what the plan alone and the owners' ranks say.

    With every expert at its owner, no rank has more than the busiest one. Of each owner's experts a rank has at most
    those, so the experts at home on it have at most that many times as many as they have owners; and its replicas take
    at most what was planned.
    """
    owned_MLR = live.total_MLE().reshape(*plan.ns_ML.shape, plan.cluster.ep, -1).sum(axis=3)
    return owned_MLR.max(axis=2, keepdims=True) * owners_LR(plan) + replica_rows_MLR(plan)


def rows_alone(work):
    """The same rows, with all experts already where they compute."""
    empty = np.zeros_like(work.transfers.start_ML)
    none = {name: np.zeros(0, dtype=np.int64) for name in ("rank_P", "home_P")}
    transfers = type(work.transfers)(start_ML=empty, **none, path_P2=np.zeros((0, 2), dtype=np.int64))
    edges = {name: np.zeros_like(getattr(work, name)) for name in ("edge_ns_2L", "edge_slow_2L")}
    fields = {name: getattr(work, name) for name in work.__dataclass_fields__}
    return type(work)(**{**fields, **edges, "transfers": transfers})


def hostile(made, seed, *, kind):
    """Rows that a plan did not expect, as many from each source as planned."""
    rng = np.random.default_rng(seed)
    row_MLR = made.loads.load_MLRE.sum(axis=3)
    load = np.zeros_like(made.loads.load_MLRE)
    for m, layer, r in np.ndindex(row_MLR.shape):
        if kind == "one rank":
            weight_E = (made.home_LE[layer] == seed % made.cluster.ep).astype(float)
        elif kind == "one expert":
            weight_E = (np.arange(MODEL.experts) == seed % MODEL.experts).astype(float)
        elif kind == "the coldest":
            weight_E = 1.0 / (1 + made.loads.total_MLE()[m, layer]) ** 2
        else:
            weight_E = rng.dirichlet(np.full(MODEL.experts, 0.2))
        load[m, layer, r] = rng.multinomial(row_MLR[m, layer, r], weight_E / weight_E.sum())
    return LoadMatrix(load, stage=made.loads.stage)


@pytest.fixture(scope="module")
def plans():
    """A plan of each kind: all of it, without homes, without replicas, far replicas; update and recompute."""
    kinds = ({}, {"max_displaced": 0}, {"cross_node": True})
    made = [
        plan(
            skewed_loads(seed, stage=stage), cluster=cluster_of(), model=MODEL, slots=2, options=PlanOptions(**options)
        )
        for seed, options in enumerate(kinds)
        for stage in ("update", "recompute")
    ]
    return [*made, plan(skewed_loads(9), cluster=cluster_of(), model=MODEL, slots=0)]


def test_planned_rows_are_taken_as_planned(plans):
    for made in plans:
        assert np.array_equal(live_rows(made, made.loads), made.replica_table.rows_P)
        live, planned = plan_work(made, live=made.loads), plan_work(made)
        assert np.array_equal(live.rows_MLR, planned.rows_MLR) and np.array_equal(live.exchange_ML, planned.exchange_ML)
        assert live.transfers == planned.transfers and seconds_of(live) == seconds_of(planned)


@given(seed=st.integers(0, 10**6), ranks=st.sampled_from([2, 4]), slots=st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_replicas_take_what_the_layer_gives_them(seed, ranks, slots):
    planned, came = (random_routing(seed + i, ranks=ranks, tokens=30, layers=2) for i in (0, 1))
    made = random_plan(planned, seed, slots=slots)
    rows_P, width = live_rows(made, came.loads()), made.home_slots + made.slots
    for m, layer in np.ndindex(2, 2):
        got_ER = np.zeros((planned.experts, ranks), dtype=np.int64)
        for source in range(ranks):
            ids_TK = torch.from_numpy(came.ids[m][layer][source])
            holder_TK = assign_slots(ids_TK, SourceSplit.of(made, m, layer, source=source)) // width
            np.add.at(got_ER, (ids_TK.numpy(), holder_TK.numpy()), 1)
        start = made.replica_table.start_ML[m * 2 + layer]
        for at, (expert, rank) in enumerate(made.replicas(m, layer)):
            assert rows_P[start + at] == got_ER[expert, rank]


@pytest.mark.parametrize("kind", ["one rank", "one expert", "the coldest", "at random"])
def test_no_rank_gets_more_rows_than_is_said_and_no_window_takes_longer(plans, kind):
    for seed, made in enumerate(plans):
        live = hostile(made, seed, kind=kind)
        work = plan_work(made, live=live)
        most_MLR = most_rows_MLR(made, live)
        assert (work.rows_MLR <= most_MLR).all()
        assert (live_rows(made, live) <= made.replica_table.rows_P).all()
        assert seconds_of(work) <= seconds_of(rows_alone(work)) + overhead_seconds(work)
        if not made.displaced_LE.any():
            static = plan_work(plan(live, cluster=made.cluster, model=MODEL, policy="static"))
            busiest_ML = static.rows_MLR.max(axis=2) + replica_rows_MLR(made).max(axis=2)
            assert (work.rows_MLR.max(axis=2) <= busiest_ML).all()


def test_the_bound_of_displaced_homes_is_reached():
    """Each rank's home experts come from two owners; all rows go to those on one rank, as many to each owner's."""
    loads, cluster = skewed_loads(3, micro_steps=1), cluster_of()
    home_E = np.roll(np.arange(16) // 2, 1)
    task = WindowTask(
        loads=loads,
        cluster=cluster,
        model=MODEL,
        slots=0,
        objective="seconds",
        options=PlanOptions(),
        policy="equipoise",
    )
    static = plan(loads, cluster=cluster, model=MODEL, policy="static")
    home_LE = np.tile(home_E, (MODEL.layers, 1))
    empty = np.zeros((1, MODEL.layers, 8, 0), dtype=np.int64)
    line = np.zeros((1, MODEL.layers, COLUMNS), dtype=np.int64)
    draft = Draft(
        home_LE=home_LE,
        home_slot_LE=home_slots_of(home_LE, 8),
        rep_expert_MLRS=empty,
        rep_rows_MLRS=empty,
        line_MLC=line,
        closed_MLC=line,
        edges=Edges.none(MODEL.layers),
    )
    made = build_plan(task, draft)
    live = np.zeros_like(loads.load_MLRE)
    live[..., home_E == 3] = 100
    live = LoadMatrix(live)
    work = plan_work(made, live=live)
    assert work.rows_MLR.max() == 2 * plan_work(static, live=live).rows_MLR.max() == most_rows_MLR(made, live).max()


def test_rows_of_another_window_are_refused(plans):
    with pytest.raises(LoadsError, match="give the same window's"):
        live_rows(plans[0], skewed_loads(0, micro_steps=3))
