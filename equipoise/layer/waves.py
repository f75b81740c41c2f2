"""Experts in waves: while the experts of one wave compute, rows of the next one travel to them, and outputs of the last
one back. Where a plan cuts every rank's slots into waves, this takes the place of exchange, expert block and exchange.

Forward: all rows leave, wave by wave. A wave's experts compute once its rows have arrived; their outputs leave at once.
Backward is the mirror image. Gradients of weights come last, when all gradients of rows have left, and hide their way.

Every slot is in one wave, so each product has the rows, in the order, that it has without waves: outputs and gradients
have the same bits. Every rank exchanges the same number of times, and saves as many tensors, whatever its rows.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Dispatch, Groups
from equipoise.layer.expert_block import (
    BlockOptions,
    Part,
    Sums,
    apply_experts,
    joined_ends,
    row_gradients,
    visit_now,
    weight_gradients,
)
from equipoise.layer.ops import Exchange, exchange_rows, gather_rows, reorder_rows, start_all_to_all
from equipoise.transfer.engine import LayerTransfers
from equipoise.transfer.node import ExpertWeights, SlotTensors


def waved_block(
    rows_ND: Tensor,
    home: ExpertWeights,
    *,
    dispatch: Dispatch,
    group: dist.ProcessGroup,
    transfers: LayerTransfers,
    visit: Visit,
    options: BlockOptions,
    gates_P: Tensor | None = None,
) -> Tensor:
    """Send rows to their experts wave by wave, compute, and return the outputs; all ranks of `group` must call.

    Args:
        rows_ND: [N, D] this rank's rows, in sending order
        home: this rank's home weights, as they entered the layer
        dispatch: with waves
        visit: of the forward
        gates_P: [buffer rows] that multiply the activation of each row that this rank computes; None: none do

    Returns: [N, D] outputs of this rank's rows, in sending order
    """
    task = _Task(dispatch, group, transfers, visit, options, home)
    return _WavedBlock.apply(rows_ND, gates_P, task, *home.flat())


def exchange_gates(gates_N1: Tensor, dispatch: Dispatch, *, group: dist.ProcessGroup) -> Tensor:
    """Send the gates of rows after them, wave by wave: [buffer rows, 1]."""
    cuts, tables = _sent_cuts(dispatch), _wave_tables(dispatch)
    parts = []
    for wave, cut, (place_N, source_P) in zip(dispatch.waves, cuts, tables, strict=True):
        received_N1 = exchange_rows(gates_N1[cut], send_R=wave.send_R, receive_R=wave.receive_R, group=group)
        parts.append(reorder_rows(received_N1, there_P=source_P, back_N=place_N))
    return torch.cat(parts)


class _Task(NamedTuple):
    """What is done to the rows of one visit."""

    dispatch: Dispatch
    group: dist.ProcessGroup
    transfers: LayerTransfers
    visit: Visit
    options: BlockOptions
    form: ExpertWeights
    """Home weights, for their form."""

    def depart(self, rows_ND: Tensor) -> list[Exchange]:
        """Let all rows, in sending order, leave for their experts."""
        pairs = zip(self.dispatch.waves, _sent_cuts(self.dispatch), strict=True)
        return [self._start(rows_ND[cut], wave.send_R, wave.receive_R, None) for wave, cut in pairs]

    def send_back(self, rows_PD: Tensor, index: int, returned_ND: Tensor) -> Exchange:
        """Let the rows of a wave, slot by slot, leave for where they came from, into their part of `returned_ND`."""
        wave, (place_N, _) = self.dispatch.waves[index], _wave_tables(self.dispatch)[index]
        into_ND = returned_ND[_sent_cuts(self.dispatch)[index]]
        return self._start(gather_rows(rows_PD, place_N), wave.receive_R, wave.send_R, into_ND)

    def _start(self, rows_ND: Tensor, send_R: list[int], receive_R: list[int], out: Tensor | None) -> Exchange:
        out = rows_ND.new_empty((sum(receive_R), *rows_ND.shape[1:])) if out is None else out
        return start_all_to_all(rows_ND, send_R, receive_R, self.group, out)

    def held(self, now: Visit, home: ExpertWeights) -> list[list["_Held"]]:
        """Return, wave by wave, the weights that compute its rows: of home slots, and last of replicas."""
        groups, joined = self.dispatch.groups, self.transfers.joined(now)
        homes = groups.home_end_S.numel()
        if joined is not None:
            ends_S = joined_ends(groups, joined)
            sides = [_Held(joined, ends_S, slice(0, homes), 0), _Held(joined, ends_S, slice(homes, len(ends_S)), 0)]
        else:
            replica = self.transfers.weights(now)
            assert replica.num_slots >= groups.num_replicas, "rows for replicas that were not pulled"
            ends_S = groups.replica_end_S[: replica.num_slots]
            sides = [
                _Held(home, groups.home_end_S, slice(0, homes), 0),
                _Held(replica, ends_S + groups.num_home_rows, slice(homes, homes + len(ends_S)), homes),
            ]
        return sides
