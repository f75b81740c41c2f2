"""Slots of rows: each invariant of `assign`, and the fast version against the row-by-row one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.errors import RoutesError
from equipoise.layer.dispatch import SourceSplit, assign_slots, physical_slots
from tests.layer.cases import random_plan, random_routing, static_plan
from tests.layer.reference import assign_slots_by_hand

cases = given(
    seed=st.integers(0, 10**6),
    ranks=st.sampled_from([1, 2, 4]),
    slots=st.integers(0, 2),
    tokens=st.integers(0, 30),
)


def splits_of(seed, ranks, slots, tokens):
    routing = random_routing(seed, ranks=ranks, tokens=tokens, layers=1)
    plan = random_plan(routing, seed, slots=slots)
    return routing, plan, [SourceSplit.of(plan, 1, 0, source=rank) for rank in range(ranks)]


@cases
@settings(max_examples=50, deadline=None)
def test_the_fast_version_equals_the_one_by_hand_also_for_routes_nobody_planned(seed, ranks, slots, tokens):
    routing, _, splits = splits_of(seed, ranks, slots, tokens)
    unplanned = np.random.default_rng(seed).integers(0, routing.experts, size=(2 * tokens, 3))
    for rank, split in enumerate(splits):
        for ids in (routing.ids[1][0][rank], unplanned):
            ids_TK = torch.from_numpy(ids)
            assert torch.equal(assign_slots(ids_TK, split), assign_slots_by_hand(ids_TK, split))


@cases
@settings(max_examples=50, deadline=None)
def test_each_row_gets_one_slot_that_holds_its_expert(seed, ranks, slots, tokens):
    routing, plan, splits = splits_of(seed, ranks, slots, tokens)
    slot_ER = physical_slots(plan, 1, 0)
    width = plan.home_slots + plan.slots
    held = {int(slot): expert for expert in range(routing.experts) for slot in slot_ER[expert] if slot >= 0}
    # One slot, one expert: no two experts share a physical slot, and none lies outside its rank.
    assert len(held) == (slot_ER >= 0).sum()
    assert all(slot // width == rank for expert in slot_ER for rank, slot in enumerate(expert) if slot >= 0)
    wrong = np.random.default_rng(seed).integers(0, routing.experts, size=(tokens, 2))
    for ids in (routing.ids[1][0][0], wrong):
        slots_TK = assign_slots(torch.from_numpy(ids), splits[0])
        assert [held[slot] for slot in slots_TK.reshape(-1).tolist()] == ids.reshape(-1).tolist()


@cases
@settings(max_examples=50, deadline=None)
def test_with_planned_routes_rows_per_holder_equal_the_split(seed, ranks, slots, tokens):
    routing, plan, splits = splits_of(seed, ranks, slots, tokens)
    split_RER, width = plan.split_RER(1, 0), plan.home_slots + plan.slots
    for rank, split in enumerate(splits):
        ids = routing.ids[1][0][rank].reshape(-1)
        holder = assign_slots(torch.from_numpy(ids[:, None]), split).reshape(-1).numpy() // width
        counted_ER = np.zeros((routing.experts, ranks), dtype=np.int64)
        np.add.at(counted_ER, (ids, holder), 1)
        assert np.array_equal(counted_ER, split_RER[rank])


def test_rows_beyond_the_split_go_home_and_holders_come_in_rank_order():
    split = SourceSplit(
        home_slot_E=torch.tensor([0, 1, 4, 5]),
        expert_H=torch.tensor([1, 1, 3]),
        end_H=torch.tensor([2, 3, 1]),
        slot_H=torch.tensor([1, 7, 2]),
    )
    ids_TK = torch.tensor([[1, 3], [1, 3], [1, 0], [1, 2]])
    # Expert 1: two rows to slot 1, one to slot 7, the fourth home to 1. Expert 3: one to slot 2, the second home to 5.
    assert assign_slots(ids_TK, split).tolist() == [[1, 2], [1, 5], [7, 0], [1, 4]]


@pytest.mark.parametrize("bad", [-1, 8], ids=["missing", "too high"])
def test_an_id_outside_the_model_is_refused_never_sent_to_expert_0(bad):
    routing = random_routing(0, ranks=2)
    split = SourceSplit.of(static_plan(routing), 0, 0, source=0)
    with pytest.raises(RoutesError, match=rf"expert {bad}; ids are 0\.\.7"):
        assign_slots(torch.tensor([[0, bad]]), split)


@pytest.mark.parametrize("is_unknown", [True, False], ids=["unknown", "beyond the last"])
def test_an_expert_that_does_not_exist_is_never_another_one(monkeypatch, is_unknown):
    """Where ids are on a device nothing waits to look at them; the lookup itself must fail."""
    routing, _, splits = splits_of(3, 2, 1, 12)
    monkeypatch.setattr(torch, "aminmax", lambda ids_N: (0, 0))
    ids_TK = torch.from_numpy(routing.ids[1][0][0]).clone()
    ids_TK[0, 0] = -1 if is_unknown else routing.experts
    with pytest.raises(RuntimeError, match="out of bounds"):
        assign_slots(ids_TK, splits[0])
