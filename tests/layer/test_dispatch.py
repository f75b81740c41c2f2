"""Ways of rows: each invariant of `dispatch`, with all ranks of a group played in one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.errors import InfeasiblePlanError
from equipoise.layer.dispatch import SourceSplit, assign_slots, build_dispatch, sort_rows
from equipoise.transfer.engine import NoTransfers
from equipoise.transfer.node import ExpertWeights
from tests.layer.cases import random_plan, random_routing, static_plan

cases = given(
    seed=st.integers(0, 10**6),
    ranks=st.sampled_from([1, 2, 4]),
    slots=st.integers(0, 2),
    tokens=st.integers(0, 20),
    pad=st.sampled_from([1, 16]),
)


def play(routing, plan, *, pad):
    """Dispatches of all ranks, and what each receives: (token name, expert) in arrival order."""
    ranks, width = plan.cluster.ep, plan.home_slots + plan.slots
    ids = [torch.from_numpy(a) for a in routing.ids[0][0]]
    slots = [assign_slots(ids[r], SourceSplit.of(plan, 0, 0, source=r)) for r in range(ranks)]
    sends = [sort_rows(s, num_ranks=ranks, width=width) for s in slots]
    count_RRS = torch.stack([send.count_RS for send in sends])
    dispatches = [build_dispatch(sends[r], count_RRS[:, r], home_slots=plan.home_slots, pad=pad) for r in range(ranks)]
    arriving = [[] for _ in range(ranks)]
    for source, dispatch in enumerate(dispatches):
        order = torch.argsort(dispatch.index_TK.reshape(-1))
        rows = [(source, int(row), int(ids[source].reshape(-1)[row])) for row in order]
        for holder, cut in enumerate(torch.tensor(rows).reshape(-1, 3).split(dispatch.send_R)):
            arriving[holder] += [tuple(row) for row in cut.tolist()]
    return dispatches, arriving


def rows_by_expert(dispatches, arriving, plan, *, is_home_only):
    """The rows of every expert in buffer order, for each rank that holds it."""
    found = {}
    for dispatch, rows in zip(dispatches, arriving, strict=True):
        assert len(rows) == sum(dispatch.receive_R) == dispatch.place_N.numel()
        for place, row in sorted(zip(dispatch.place_N.tolist(), rows, strict=True)):
            if not is_home_only or place < dispatch.groups.num_home_rows:
                found.setdefault(row[2], []).append(row[:2])
    return found


@cases
@settings(max_examples=30, deadline=None)
def test_every_row_is_sent_once_and_received_once(seed, ranks, slots, tokens, pad):
    routing = random_routing(seed, ranks=ranks, tokens=tokens, layers=1)
    dispatches, arriving = play(routing, random_plan(routing, seed, slots=slots), pad=pad)
    wanted = {(r, n) for r, a in enumerate(routing.ids[0][0]) for n in range(a.size)}
    got = [row[:2] for rows in arriving for row in rows]
    assert len(got) == len(wanted) and set(got) == wanted
    for rank, dispatch in enumerate(dispatches):
        places = dispatch.place_N.tolist()
        assert len(set(places)) == len(places) and all(0 <= place < dispatch.groups.num_rows for place in places)
        assert sorted(dispatch.index_TK.reshape(-1).tolist()) == list(range(routing.ids[0][0][rank].size))
        tokens_N = dispatch.token_N[dispatch.index_TK]
        assert torch.equal(tokens_N, torch.arange(len(tokens_N))[:, None].expand_as(tokens_N))


@cases
@settings(max_examples=30, deadline=None)
def test_an_experts_rows_stand_in_the_same_order_wherever_it_sits(seed, ranks, slots, tokens, pad):
    routing = random_routing(seed, ranks=ranks, tokens=tokens, layers=1)
    displaced, contiguous = random_plan(routing, seed, slots=0), static_plan(routing)
    orders = [
        rows_by_expert(*play(routing, plan, pad=pad), plan, is_home_only=True) for plan in (displaced, contiguous)
    ]
    assert orders[0] == orders[1]
    assert all(rows == sorted(rows) for rows in orders[0].values())


@cases
@settings(max_examples=30, deadline=None)
def test_each_slot_holds_rows_of_its_own_expert_and_groups_are_padded(seed, ranks, slots, tokens, pad):
    routing = random_routing(seed, ranks=ranks, tokens=tokens, layers=1)
    plan = random_plan(routing, seed, slots=slots)
    expert_of = {(int(plan.home_LE[0, e]), int(plan.home_slot_LE[0, e])): e for e in range(routing.experts)}
    used = [plan.home_slots] * ranks
    for expert, rank in plan.replicas(0, 0):
        expert_of[rank, used[rank]] = expert
        used[rank] += 1
    dispatches, arriving = play(routing, plan, pad=pad)
    for rank, (dispatch, rows) in enumerate(zip(dispatches, arriving, strict=True)):
        ends = torch.cat([dispatch.groups.home_end_S, dispatch.groups.replica_end_S + dispatch.groups.num_home_rows])
        assert ends[-1] == dispatch.groups.num_rows and not (ends % pad).any()
        filled = [
            slot for slot, end in enumerate(dispatch.groups.replica_end_S.diff(prepend=torch.zeros(1)).tolist()) if end
        ]
        assert dispatch.groups.num_replicas == (filled[-1] + 1 if filled else 0)
        slots_N = torch.searchsorted(ends.long(), dispatch.place_N, right=True).tolist()
        assert [expert_of[rank, slot] for slot in slots_N] == [row[2] for row in rows]


def test_a_plan_with_replicas_needs_an_engine():
    routing = random_routing(3, ranks=2)
    plan = random_plan(routing, 3, slots=2)
    with pytest.raises(InfeasiblePlanError, match="no engine moves them"):
        NoTransfers([ExpertWeights(torch.zeros(4, 8, 4), torch.zeros(4, 4, 4))]).open_window(plan)
