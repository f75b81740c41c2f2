"""Dispatches brought to a CUDA device: in order, out of order, and while earlier ones are in use."""

import itertools

import pytest
import torch

from equipoise.layer.dispatch import WindowDispatches, prepare_dispatch
from tests.layer.cases import random_routing, static_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Made(WindowDispatches):
    """All dispatches of a window, pinned; those in `late` are made only when asked for."""

    def __init__(self, prepared, late=()):
        super().__init__([], timeout_s=60.0)
        self._packed = {entry: one.packed(is_pinned=True) for entry, one in prepared.items()}
        self._after, self._late = dict(itertools.pairwise(prepared)), set(late)

    def take(self, micro_step, layer):
        return self._packed[micro_step, layer]

    def is_made(self, micro_step, layer):
        return (micro_step, layer) not in self._late


@pytest.mark.parametrize("late", [(), ((0, 1), (1, 0))], ids=["made ahead", "made late"])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 1, 0, 2, 3]], ids=["in order", "any order"])
def test_what_is_brought_is_what_was_made(order, late):
    routing = random_routing(14, ranks=1, tokens=4000)
    plan = static_plan(routing)
    entries = [(m, layer) for m in range(2) for layer in range(2)]
    prepared = {
        (m, layer): prepare_dispatch(torch.from_numpy(routing.ids[m][layer][0]), plan, (m, layer), rank=0)
        for m, layer in entries
    }
    dispatches, sums = Made(prepared, late), []
    for at in order:
        dispatch = dispatches.upload(*entries[at], device="cuda")
        # Read late, so that memory given away too early would be overwritten by the uploads to come.
        torch.cuda._sleep(10_000_000)
        tables = (dispatch.index_TK, dispatch.source_P, dispatch.groups.home_end_S)
        sums.append((entries[at], *(table.clone() for table in tables)))
        del dispatch, tables
    for entry, index_TK, source_P, end_S in sums:
        wanted = prepared[entry]
        assert torch.equal(index_TK.cpu(), wanted.index_TK)
        assert torch.equal(source_P.cpu(), wanted.source_P)
        assert torch.equal(end_S.cpu(), wanted.groups.home_end_S)
