"""Dispatches made ahead: they are those the layer would make, and packing them changes nothing."""

import pytest
import torch
from hypothesis import settings

from equipoise.core import LoadMatrix
from equipoise.core.errors import InfeasiblePlanError
from equipoise.layer.dispatch import prepare_dispatch, prepared_bytes, with_relay
from equipoise.layer.relay import NodeRanks
from tests.layer.cases import random_plan, random_routing, static_plan
from tests.layer.test_dispatch import cases, play


@cases
@settings(max_examples=30, deadline=None)
def test_with_planned_routes_the_prepared_dispatch_equals_the_exchanged_one(seed, ranks, slots, tokens, pad):
    routing = random_routing(seed, ranks=ranks, tokens=tokens, layers=1)
    plan = random_plan(routing, seed, slots=slots)
    dispatches, _ = play(routing, plan, pad=pad)
    for rank, dispatch in enumerate(dispatches):
        ids_TK = torch.from_numpy(routing.ids[0][0][rank])
        prepared = prepare_dispatch(ids_TK, plan, (0, 0), rank=rank, pad=pad)
        assert (prepared.send_R, prepared.receive_R) == (dispatch.send_R, dispatch.receive_R)
        assert torch.equal(prepared.place_N, dispatch.place_N) and torch.equal(prepared.index_TK, dispatch.index_TK)
        assert torch.equal(prepared.groups.home_end_S, dispatch.groups.home_end_S)
        assert torch.equal(prepared.groups.replica_end_S, dispatch.groups.replica_end_S)


def test_partial_coverage_cannot_be_prepared():
    routing = random_routing(3, ranks=2)
    plan = static_plan(routing)
    coverage = torch.ones(plan.loads.load_MLRE.shape[:3]).numpy()
    coverage[1, 0, 1] = 0.5
    loads = LoadMatrix(plan.loads.load_MLRE, coverage_MLR=coverage)
    partial = type(plan)(**{**fields_of(plan), "loads": loads})
    with pytest.raises(InfeasiblePlanError, match=r"coverage is down to 0\.500"):
        prepare_dispatch(torch.from_numpy(routing.ids[0][0][0]), partial, (0, 0), rank=0)


def fields_of(plan):
    return {f: getattr(plan, f) for f in plan.__dataclass_fields__ if plan.__dataclass_fields__[f].init}


def alone(rows_NX, send_R, receive_R):
    """An exchange in a group of one."""
    assert send_R == receive_R == [len(rows_NX)]
    return rows_NX


@pytest.mark.parametrize("is_two_level", [False, True], ids=["direct", "two levels"])
def test_packing_changes_no_value(is_two_level):
    routing = random_routing(3, ranks=1)
    ids_TK = torch.from_numpy(routing.ids[0][0][0])
    prepared = prepare_dispatch(ids_TK, static_plan(routing), (0, 0), rank=0)
    if is_two_level:
        prepared = with_relay(prepared, nodes=NodeRanks((0,), 0), swap=alone)
    packed = prepared.packed()
    again = packed.unpack("cpu")
    assert packed.flat_X.dtype == torch.int32 and again.index_TK.dtype == torch.int64
    assert again.is_same(prepared)
    assert again.groups.home_end_S.dtype == torch.int32, "grouped products want it"
    assert torch.equal(again.token_N, prepared.token_N)
    assert torch.equal(again.source_P, prepared.source_P)
    assert torch.equal(again.ids_TK, ids_TK)


@pytest.mark.parametrize(("is_mapped", "nodes"), [(False, 1), (True, 1), (True, 2)])
def test_the_bytes_of_a_window_are_foreseen(is_mapped, nodes):
    routing = random_routing(4, ranks=2)
    plan = random_plan(routing, 4, slots=1, nodes=nodes)
    found = []
    for rank in range(2):
        total = 0
        for m in range(2):
            for layer in range(2):
                ids_TK = torch.from_numpy(routing.ids[m][layer][rank])
                packed = prepare_dispatch(ids_TK, plan, (m, layer), rank=rank, is_mapped=is_mapped).packed()
                # The ends of 5 slots are beyond what grows with rows.
                total += packed.flat_X.nbytes - 4 * 5
        found.append(total)
    foreseen = prepared_bytes(plan, is_mapped=is_mapped)
    # How many rows cross nodes is bounded by all of them.
    assert foreseen == max(found) if nodes == 1 else 0.7 * foreseen < max(found) < foreseen
