"""Rows that are read through mapped memory: the same bits as by collectives, and an end when a rank dies."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.errors import TransferError
from equipoise.core.options import RowLimits, RowOffsets, TransferOptions
from equipoise.layer.dispatch import prepare_dispatch
from equipoise.layer.mapped import MappedTables
from tests.layer import mapped_work
from tests.layer.cases import TOP_K, random_plan, random_routing
from tests.parity.case import ParityCase
from tests.transfer.own_ranks import KILLED, run_ranks

CASES = {
    "4 ranks, no slot": (ParityCase(ranks=4, slots=0, layers=2, tokens=16, top_k=4), {}),
    "4 ranks": (ParityCase(ranks=4, slots=2, layers=2, tokens=16, top_k=4), {}),
    "activations are computed again": (ParityCase(ranks=2, slots=1, layers=2, tokens=12), {"is_checkpointed": True}),
    "tokens that need no gradient": (ParityCase(ranks=2, slots=2, layers=1, tokens=12), {"is_leaf": False}),
    "a rank without tokens": (ParityCase(ranks=4, slots=1, layers=2, tokens=12), {"silent": (2,)}),
    "gates at the activation": (
        ParityCase(ranks=4, nodes=2, slots=1, layers=2, tokens=12, gates="activation", dispatch="two_level"),
        {"is_checkpointed": True, "silent": (1,)},
    ),
    "2 nodes of 2": (ParityCase(ranks=4, nodes=2, slots=2, layers=2, tokens=16, top_k=4), {}),
    "2 nodes of 2, in two levels, computed again": (
        ParityCase(ranks=4, nodes=2, slots=1, layers=2, tokens=16, top_k=4, dispatch="two_level"),
        {"is_checkpointed": True},
    ),
    "2 nodes of 4, a rank without tokens": (
        ParityCase(ranks=8, nodes=2, slots=1, layers=2, tokens=8, home_slots=2),
        {"silent": (2,)},
    ),
    "2 nodes of 2, in two levels, a rank without tokens": (
        ParityCase(ranks=4, nodes=2, slots=0, layers=2, tokens=8, home_slots=2, dispatch="two_level"),
        {"silent": (3,)},
    ),
    "nodes of 3, 3 and 2, in two levels": (
        ParityCase(ranks=8, nodes=3, slots=1, layers=2, tokens=8, home_slots=2, top_k=4, dispatch="two_level"),
        {},
    ),
}


@pytest.mark.dist(8)
@pytest.mark.parametrize("name", CASES)
def test_mapped_rows_give_the_bits_of_exchanged_rows(pool, name):
    mapped_work.check_bits(pool, *CASES[name])


@pytest.mark.dist(2)
def test_mapped_rows_are_refused_where_no_node_has_two_ranks(pool):
    case = ParityCase(ranks=2, nodes=2, layers=1, tokens=4)
    for words in pool.run(mapped_work.refused, 2, case):
        assert "the 2 ranks of this EP group are on as many nodes; use rows='auto'" in words


def test_a_rank_that_is_killed_ends_other_nodes_too():
    said = run_ranks(mapped_work.die_in_a_window, 4, ParityCase(ranks=4, nodes=2, slots=1, layers=2, tokens=12), 60.0)
    assert said[1] == KILLED
    for words in (said[0], said[2], said[3]):
        assert "is gone" in words or "rows could not be exchanged with the other 3 ranks" in words


def test_a_rank_that_is_killed_ends_the_others_with_its_name():
    case = ParityCase(ranks=4, slots=1, layers=2, tokens=12)
    said = run_ranks(mapped_work.die_in_a_window, 4, case, 60.0)
    assert said[1] == KILLED
    for words in (said[0], said[2], said[3]):
        assert "rank 1 (process" in words and "is gone" in words


class Board:
    """Swaps between ranks that are threads."""

    def __init__(self, ranks):
        self._barrier, self._shown = threading.Barrier(ranks, timeout=30.0), [None] * ranks

    def swap(self, rank, values_NX, send_R, receive_R):
        self._shown[rank] = values_NX.split(send_R)
        self._barrier.wait()
        received = torch.cat([shown[rank] for shown in self._shown])
        self._barrier.wait()
        assert len(received) == sum(receive_R)
        return received


def tables_of(seed, *, ranks, slots, pad, silent=(), nodes=1, is_relayed=False):
    routing = random_routing(seed, ranks=ranks, silent=silent)
    plan, board = random_plan(routing, seed, slots=slots, nodes=nodes), Board(ranks)

    def prepare(rank):
        ids_TK, swap = torch.from_numpy(routing.ids[1][1][rank]), partial(board.swap, rank) if is_relayed else None
        return prepare_dispatch(ids_TK, plan, (1, 1), rank=rank, pad=pad, swap=swap, is_mapped=True)

    with ThreadPoolExecutor(ranks) as threads:
        return plan, list(threads.map(prepare, range(ranks)))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    ranks_nodes=st.sampled_from([(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (8, 3), (8, 4)]),
    slots=st.integers(0, 2),
    pad=st.sampled_from([1, 4, 96]),
    is_silent=st.booleans(),
    is_relayed=st.booleans(),
)
def test_every_place_finds_its_row_and_every_row_its_output(seed, ranks_nodes, slots, pad, is_silent, is_relayed):
    ranks, nodes = ranks_nodes
    silent = (1,) if is_silent else ()
    plan, prepared = tables_of(
        seed, ranks=ranks, slots=slots, pad=pad, silent=silent, nodes=nodes, is_relayed=is_relayed
    )
    limits, node_R = RowLimits.of(plan, pad=pad, is_relayed=is_relayed), plan.cluster.node_R
    pages = [shown_tokens(prepared, rank) for rank in range(ranks)]
    outputs = [[] for _ in range(ranks)]
    seen = set()
    for rank, dispatch in enumerate(prepared):
        tables = dispatch.mapped
        assert isinstance(tables, MappedTables) and (tables.far is None) == (nodes == 1)
        assert tables.order_N.numel() <= limits.sent and len(pages[rank]) <= limits.tokens
        for place, key in enumerate(tables.sent_P.tolist()):
            if key < 0:
                assert int(dispatch.source_P[place]) == sum(dispatch.receive_R), "only padding has no row"
                outputs[rank].append(None)
                continue
            page, number = divmod(key, tables.sent_stride)
            assert node_R[page] == node_R[rank], "pages of other nodes cannot be read"
            at, column = divmod(int(prepared[page].mapped.order_N[number]), TOP_K)
            source, token, gates = pages[page][at]
            row = (source, token, gates[column])
            # The row is the one that would have been received there.
            received = int(dispatch.source_P[place]) - sum(dispatch.receive_R[:source])
            assert int(prepared[source].index_TK[token, gates[column]]) == received + _first(plan, source, rank)
            outputs[rank].append(row)
            seen.add(row)
    assert len(seen) == sum(dispatch.index_TK.numel() for dispatch in prepared)
    for rank, dispatch in enumerate(prepared):
        returned = sent_to([[outputs[r][p] for p in x.place_F.tolist()] for r, x in far_of(prepared)], prepared, rank)
        assert len(outputs[rank]) + len(returned) <= limits.computed
        for (token, column), key in np.ndenumerate(dispatch.mapped.place_TK.numpy()):
            page, place = divmod(int(key), dispatch.mapped.place_stride)
            assert node_R[page] == node_R[rank]
            found = (outputs[page] + returned if page == rank else outputs[page])[place]
            assert found == (rank, token, column), "each token finds its output where it looks"


def far_of(prepared):
    return [(rank, dispatch.mapped.far) for rank, dispatch in enumerate(prepared) if dispatch.mapped.far is not None]


def sent_to(lists, prepared, rank):
    """What the ranks send to `rank` out of their lists of outputs, in its order of arrival."""
    found = []
    for values, (_, far) in zip(lists, far_of(prepared), strict=True):
        begin = sum(far.outputs_R[:rank])
        found += values[begin : begin + far.outputs_R[rank]]
    return found


def shown_tokens(prepared, rank):
    """[(source, token, columns of its gates)] of a rank's page: its own, then those that arrive from other nodes."""
    tokens = [(rank, token, range(TOP_K)) for token in range(len(prepared[rank].index_TK))]
    for source, far in far_of(prepared):
        begin = sum(far.copies_R[:rank])
        arriving = far.row_C[begin : begin + far.copies_R[rank]].tolist()
        assert len(arriving) == prepared[rank].mapped.far.arriving_R[source]
        for row in arriving:
            token, column = divmod(row, TOP_K)
            tokens.append((source, token, range(TOP_K) if far.passed_R else [column]))
    return tokens


def _first(plan, source, target):
    """Where a source's rows for a target begin in its sending order."""
    return int(plan.split_RER(1, 1)[source, :, :target].sum())


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
