"""Experts in waves: while the experts of one wave compute, rows travel to those of the next and back from the last.

Where a plan cuts every rank's rows into waves, `waved_block` takes the place of exchange, expert block and exchange:
1. Forward: all rows leave, wave by wave. A wave's experts compute when its rows are there; their outputs leave at once.
2. Backward is the mirror image of it. Gradients of weights come last, of all waves in one product per slot, when all
   gradients of rows have left.

A cut may divide the rows of a slot. Outputs and gradients of rows have the bits that they have without waves wherever a
row's product does not depend on its group, as with replicas; so have gradients of weights, but for a slot that is cut,
whose rows are added in another order. Every rank exchanges as often, and saves as many tensors, whatever its rows.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Dispatch, Wave
from equipoise.layer.expert_block import (
    BlockOptions,
    SlotRows,
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
    """Send the gates of rows ahead of them, wave by wave: [buffer rows, 1]."""
    parts = []
    for wave, sent, place_N, source_P in dispatch.by_wave():
        received_N1 = exchange_rows(gates_N1[sent], send_R=wave.send_R, receive_R=wave.receive_R, group=group)
        parts.append(reorder_rows(received_N1, there_P=source_P, back_N=place_N))
    return torch.cat(parts)


class _Task(NamedTuple):
    """What is done to the rows of one visit."""

    dispatch: Dispatch
    group: dist.ProcessGroup
    transfers: LayerTransfers
    visit: Visit
    options: BlockOptions
    home: ExpertWeights
    """In forward alone; in backward only its form."""

    def depart(self, rows_ND: Tensor) -> list[Exchange]:
        """Let all rows, in sending order, leave for their experts."""
        started = []
        for wave, sent, _, _ in self.dispatch.by_wave():
            received_ND = rows_ND.new_empty((sum(wave.receive_R), rows_ND.shape[1]))
            started.append(start_all_to_all(rows_ND[sent], wave.send_R, wave.receive_R, self.group, received_ND))
        return started

    def holders(self, now: Visit, home: ExpertWeights) -> list["_Holder"]:
        """Return what computes at a visit, with all slots and rows: home slots and then replicas, or both in one."""
        groups, joined = self.dispatch.groups, self.transfers.joined(now)
        if joined is not None:
            end_S = joined_ends(groups, joined)
            return [_Holder(joined, end_S, slice(0, len(end_S)), slice(0, groups.num_rows))]
        homes, replica = groups.home_end_S.numel(), self.transfers.weights(now)
        assert replica.num_slots >= groups.num_replicas, "rows for replicas that were not pulled"
        end_S = groups.replica_end_S[: replica.num_slots] + groups.num_home_rows
        return [
            _Holder(home, groups.home_end_S, slice(0, homes), slice(0, groups.num_home_rows)),
            _Holder(replica, end_S, slice(homes, homes + len(end_S)), slice(groups.num_home_rows, groups.num_rows)),
        ]


class _Holder(NamedTuple):
    """Slots that lie behind one another in memory, and their rows."""

    weights: ExpertWeights
    end_S: Tensor
    """[slots] where each slot's rows end in the slot-major buffer."""
    slots: slice
    rows: slice

    def in_wave(self, wave: Wave) -> "_Holder":
        """The part of it that computes in a wave; `end_S` then counts from its first row."""
        slots, rows = _common(self.slots, wave.slots), _common(self.rows, wave.rows)
        cut = slice(slots.start - self.slots.start, slots.stop - self.slots.start)
        # The last slot may go on in the next wave.
        end_S = self.end_S[cut].clamp(max=rows.stop) - rows.start
        return _Holder(self.weights.map(lambda tensor: _cut_slots(tensor, cut)), end_S, slots, rows)

    def part(self, rows_PD: Tensor, gates_P: Tensor | None, pre_NF: Tensor) -> SlotRows:
        """What products of these slots need, given rows, and gates, of the whole buffer."""
        gates_N = None if gates_P is None else gates_P[self.rows]
        return SlotRows(rows_PD[self.rows], gates_N, pre_NF, self.weights, self.end_S)


def _cut_slots(tensor: Tensor | SlotTensors, cut: slice) -> Tensor | SlotTensors:
    if isinstance(tensor, SlotTensors):
        return SlotTensors(tensor[cut]) if cut.start < cut.stop else tensor[0].new_empty((0, *tensor[0].shape))
    return tensor[cut]


def _common(one: slice, other: slice) -> slice:
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


class _WavedBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, gates_P: Tensor | None, task: _Task, *tensors: Tensor) -> Tensor:
        coming = task.depart(rows_ND)
        now, home = visit_now(task.visit), task.home.filled(tensors)
        task.transfers.wait_for(now)
        holders = task.holders(now, home)
        rows_PD = rows_ND.new_empty((task.dispatch.groups.num_rows, rows_ND.shape[1]))
        returned_ND, pre_parts, going = torch.empty_like(rows_ND), list[Tensor](), list[Exchange]()
        for wave, sent, place_N, source_P in task.dispatch.by_wave():
            # What was received goes as soon as it is ordered by slot.
            gather_rows(coming.pop(0).wait(), source_P, out=rows_PD[wave.rows])
            outs = []
            for holder in holders:
                part = holder.in_wave(wave).part(rows_PD, gates_P, rows_PD)
                out_ND, pre_NF = apply_experts(part.rows_ND, part.weights, part.end_S, task.options, part.gates_N)
                outs.append(out_ND)
                pre_parts.append(pre_NF)
            back_ND = gather_rows(_joined(outs), place_N)
            going.append(start_all_to_all(back_ND, wave.receive_R, wave.send_R, task.group, returned_ND[sent]))
            # Two of each wave, whether home and replicas are one tensor or two.
            pre_parts += [pre_NF[:0]] * (2 - len(outs))
        for exchange in going:
            exchange.wait()
        ctx.save_for_backward(rows_PD, gates_P, *pre_parts, *tensors)
        ctx.task = task._replace(home=task.home.map(lambda tensor: tensor.detach()))
        return returned_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        task, num_kept = ctx.task, 2 * len(ctx.task.dispatch.waves)
        rows_PD, gates_P, *saved = ctx.saved_tensors
        pre_parts, tensors = saved[:num_kept], saved[num_kept:]
        coming = task.depart(grad_ND)
        visit, home = task.visit._replace(phase="backward"), task.home.filled(tensors)
        task.transfers.wait_for(visit)
        holders = task.holders(visit, home)
        grad_rows_ND, going = torch.empty_like(grad_ND, memory_format=torch.contiguous_format), list[Exchange]()
        # What gradients of weights are summed from is kept of all waves, slot by slot.
        is_trained, (num_rows, width) = any(ctx.needs_input_grad[3:]), (len(rows_PD), pre_parts[0].shape[1])
        grad_pre_PF, act_PF = (rows_PD.new_empty((num_rows * is_trained, size)) for size in (width, width // 2))
        kept, grad_gates = Sums(torch.empty_like(rows_PD), grad_pre_PF, act_PF, rows_PD), list[Tensor | None]()
        for index, (wave, sent, place_N, source_P) in enumerate(task.dispatch.by_wave()):
            gather_rows(coming.pop(0).wait(), source_P, out=kept.grad_ND[wave.rows])
            grads = []
            for at, holder in enumerate(holders):
                here = holder.in_wave(wave)
                part = here.part(rows_PD, gates_P, pre_parts[2 * index + at])
                grad_part_ND, grad_gates_N, sums = row_gradients(kept.grad_ND[here.rows], part, task.options)
                grads.append(grad_part_ND)
                grad_gates.append(grad_gates_N)
                if is_trained:
                    grad_pre_PF[here.rows], act_PF[here.rows] = sums.grad_pre_NF, sums.act_NF
            back_ND = gather_rows(_joined(grads), place_N)
            going.append(start_all_to_all(back_ND, wave.receive_R, wave.send_R, task.group, grad_rows_ND[sent]))
        own_flat: list[Tensor | None] = [None] * len(tensors)
        if is_trained:
            own_flat = _sum_weights(task, kept, holders[-1]).flat(task.home)
        for exchange in going:
            exchange.wait()
        return grad_rows_ND, None if gates_P is None else torch.cat(grad_gates), None, *own_flat


def _sum_weights(task: _Task, sums: Sums, last: _Holder) -> ExpertWeights:
    """Hand in the gradients of replicas, and return those of the home slots."""
    groups = task.dispatch.groups
    cut, held = groups.num_home_rows, last.slots.stop - groups.home_end_S.numel()
    # Of a part only the ends count, and which weights there are.
    part = SlotRows(sums.rows_ND, None, sums.grad_pre_NF, task.home, groups.replica_end_S[:held])
    replicas = weight_gradients(Sums(*(rows_NX[cut:] for rows_NX in sums)), part, task.options)
    task.transfers.hand_in(task.visit.micro_step, task.visit.layer, replicas)
    part = part._replace(end_S=groups.home_end_S)
    return weight_gradients(Sums(*(rows_NX[:cut] for rows_NX in sums)), part, task.options)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
