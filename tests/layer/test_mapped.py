"""Rows that are read through mapped memory: the same bits as by collectives, and an end when a rank dies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.errors import TransferError
from equipoise.core.options import RowLimits, RowOffsets, TransferOptions
from equipoise.layer.dispatch import planned_counts, prepare_dispatch
from equipoise.layer.mapped import MappedTables
from tests.layer import mapped_work
from tests.layer.cases import TOP_K, random_plan, random_routing
from tests.parity.case import ParityCase
from tests.transfer.own_ranks import KILLED, run_ranks

CASES = {
    "4 ranks, no slot": (ParityCase(ranks=4, slots=0, layers=2, tokens=16, top_k=4), {}),
    "4 ranks": (ParityCase(ranks=4, slots=2, layers=2, tokens=16, top_k=4), {}),
    "activations are computed again": (ParityCase(ranks=2, slots=1, layers=2, tokens=12), {"is_checkpointed": True}),
    "a rank without tokens": (ParityCase(ranks=4, slots=1, layers=2, tokens=12), {"silent": (2,)}),
    "8 ranks": (ParityCase(ranks=8, slots=1, layers=2, tokens=8, home_slots=2), {}),
}


@pytest.mark.dist(8)
@pytest.mark.parametrize("name", CASES)
def test_mapped_rows_give_the_bits_of_exchanged_rows(pool, name):
    case, how = CASES[name]
    for (mapped, is_used), (exchanged, is_used_there) in pool.run(_both, case.ranks, case, how):
        assert is_used and not is_used_there
        assert len(mapped) == len(exchanged)
        assert all(map(torch.equal, mapped, exchanged))
        assert any(bool(tensor.any()) for tensor in mapped)


def _both(group, case, how):
    return mapped_work.both_ways(group, case, **how)


def test_a_rank_that_is_killed_ends_the_others_with_its_name():
    case = ParityCase(ranks=4, slots=1, layers=2, tokens=12)
    said = run_ranks(mapped_work.die_in_a_window, 4, case, 60.0)
    assert said[1] == KILLED
    for words in (said[0], said[2], said[3]):
        assert "rank 1 (process" in words and "is gone" in words


def tables_of(seed, *, ranks, slots, pad, silent=()):
    routing = random_routing(seed, ranks=ranks, silent=silent)
    plan = random_plan(routing, seed, slots=slots)
    ids = [torch.from_numpy(routing.ids[1][1][rank]) for rank in range(ranks)]
    prepared = [
        prepare_dispatch(ids_TK, plan, (1, 1), rank=rank, pad=pad, is_mapped=True) for rank, ids_TK in enumerate(ids)
    ]
    return plan, prepared


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    ranks=st.sampled_from([2, 4, 8]),
    slots=st.integers(0, 2),
    pad=st.sampled_from([1, 4, 96]),
    is_silent=st.booleans(),
)
def test_every_place_names_its_row_and_every_row_its_place(seed, ranks, slots, pad, is_silent):
    plan, prepared = tables_of(seed, ranks=ranks, slots=slots, pad=pad, silent=(1,) if is_silent else ())
    limits = RowLimits.of(plan, pad=pad)
    seen = set()
    for rank, dispatch in enumerate(prepared):
        tables = dispatch.mapped
        assert isinstance(tables, MappedTables)
        assert len(tables.sent_P) <= limits.computed
        assert tables.order_N.numel() <= limits.sent and tables.place_TK.shape[0] <= limits.tokens
        for place, key in enumerate(tables.sent_P.tolist()):
            if key < 0:
                assert int(dispatch.source_P[place]) == sum(dispatch.receive_R), "only padding has no row"
                continue
            source, number = divmod(key, tables.sent_stride)
            token, column = divmod(int(prepared[source].mapped.order_N[number]), TOP_K)
            # The source says the same of this row.
            back = int(prepared[source].mapped.place_TK[token, column])
            assert divmod(back, prepared[source].mapped.place_stride) == (rank, place)
            # The row is the one that would have been received there.
            assert int(dispatch.source_P[place]) == number - _first(plan, source, rank) + sum(
                dispatch.receive_R[:source]
            )
            seen.add((source, token, column))
    assert len(seen) == sum(dispatch.index_TK.numel() for dispatch in prepared)


def _first(plan, source, target):
    """Where a source's rows for a target begin in its sending order."""
    return int(planned_counts(plan, 1, 1)[source, :target].sum())


def test_limits_are_the_largest_of_all_ranks_and_parts_do_not_overlap():
    routing = random_routing(3, ranks=4)
    plan = random_plan(routing, 3, slots=1)
    limits = RowLimits.of(plan)
    assert limits.sent == int(plan.loads.load_MLRE.sum(axis=3).max()) == TOP_K * limits.tokens
    assert limits.computed == int(plan.rank_load_MLR.max())
    offsets = RowOffsets.of(limits, ranks=4, row_bytes=64, top_k=TOP_K)
    assert offsets.order - offsets.tokens >= 64 * limits.tokens and offsets.dots - offsets.rows >= 64 * limits.computed
    assert all(offset % 64 == 0 for offset in offsets) and list(offsets) == sorted(offsets)


def test_an_unknown_path_is_refused():
    with pytest.raises(TransferError, match="rows is 'nvlink'; it must be one of auto, mapped, collective"):
        TransferOptions(rows="nvlink")
