"""`PreparedDispatch`: a dispatch made ahead of its layer, from a plan that knows every route.

Knows a plan's entry and the ids this rank will replay. Does not know when it is made, nor hidden states. It needs no
communication, except where rows go in two levels: which rows share a token is known to their source alone.

Steps: assign slots, sort rows by them, take from the plan what others will send (`planned_counts`), build the tables.

Invariants (asserted by the tests):
1. With planned routes, the prepared dispatch equals the one that the layer would make with an exchange of counts.
2. Ids that make other counts than the plan's are refused, because other ranks prepare to receive the plan's.
3. Packing changes no value.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.core.errors import InfeasiblePlanError, RoutesError
from equipoise.core.plan import Plan
from equipoise.runtime.assign import SourceSplit, assign_slots
from equipoise.runtime.dispatch import Dispatch, Groups, build_dispatch, planned_counts, sort_rows
from equipoise.runtime.relay import Nodes, Relay, Swap, make_relay

BYTES_PER_ROW = 12, 8
"""A packed dispatch's bytes for each row sent (its token, place and id) and each received (its place and source)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDispatch:
    """A dispatch made ahead of the layer, and the ids it was made for."""

    dispatch: Dispatch
    ids_TK: Tensor

    def count_mismatches(self, ids_TK: Tensor) -> Tensor:
        """Count, on the device and without waiting, the rows whose expert is not the prepared one."""
        return (ids_TK != self.ids_TK).sum()

    def packed(self, *, is_pinned: bool = False) -> "PackedDispatch":
        """Put all tables into one array of half the bytes, for keeping on the host.

        Args:
            is_pinned: in memory from which a device copies without waiting
        """
        flat: list[Tensor] = []

        def take(table: Tensor) -> torch.Size:
            flat.append(table.reshape(-1).to(torch.int32))
            return table.shape

        shape = _mapped(self, take, Tensor)
        flat_X = torch.cat(flat)
        return PackedDispatch(flat_X=flat_X.pin_memory() if is_pinned else flat_X, shape=shape)

    def to(self, device: str) -> "PreparedDispatch":
        """Bring the tables to where the layer computes."""
        return self.packed().unpack(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDispatch:
    """A prepared dispatch as one array of int32, which one copy brings to a device."""

    flat_X: Tensor
    shape: Any
    """The dispatch with the shape of each table in the table's place."""

    def unpack(self, device: str) -> PreparedDispatch:
        """The dispatch where the layer computes; does not wait where the array is in pinned memory."""
        # Widened there: a copy between devices that also converts would convert first, and wait.
        wide_X = self.flat_X.to(device, non_blocking=True).long()
        begin = 0

        def cut(shape: torch.Size) -> Tensor:
            nonlocal begin
            begin += shape.numel()
            return wide_X[begin - shape.numel() : begin].view(shape)

        whole: PreparedDispatch = _mapped(self.shape, cut, torch.Size)
        groups = whole.dispatch.groups
        # Grouped products want int32.
        ends = {"home_end_S": groups.home_end_S.int(), "replica_end_S": groups.replica_end_S.int()}
        return replace(whole, dispatch=replace(whole.dispatch, groups=replace(groups, **ends)))


def prepare_dispatch(
    ids_TK: Tensor, split: SourceSplit, receive_RS: Tensor, *, home_slots: int, pad: int = 1
) -> PreparedDispatch:
    """Make a whole dispatch ahead of its layer, without communication. Needs all routes of all sources to be planned.

    Args:
        ids_TK: [T, K] the ids this rank will replay
        split: this rank's share of the plan there
        receive_RS: what `planned_counts` says
    """
    num_ranks, width = receive_RS.shape
    send = sort_rows(assign_slots(ids_TK, split), num_ranks=num_ranks, width=width)
    _check_planned(send.count_RS, split)
    dispatch = build_dispatch(send, receive_RS, home_slots=home_slots, pad=pad)
    return PreparedDispatch(dispatch=dispatch, ids_TK=ids_TK)


def prepare_entry(ids_TK: Tensor, plan: Plan, entry: tuple[int, int], *, rank: int, pad: int = 1) -> PreparedDispatch:
    """Make the dispatch of one (micro-step, layer) as `rank` sees it."""
    check_covered(plan)
    split = SourceSplit.of(plan, *entry, source=rank, device=str(ids_TK.device))
    receive_RS = planned_counts(plan, *entry, rank=rank)
    return prepare_dispatch(ids_TK, split, receive_RS, home_slots=plan.home_slots, pad=pad)


def with_relay(way: Dispatch, *, nodes: Nodes, swap: Swap) -> Dispatch:
    """The same dispatch in two levels. Every rank must call this, in the same order of dispatches."""
    given: dict[str, Any] = {"send_R": way.send_R, "receive_R": way.receive_R, "nodes": nodes, "swap": swap}
    return replace(way, relay=make_relay(way.token_N, **given))


def check_covered(plan: Plan) -> None:
    """Refuse a plan that does not know every route of every rank."""
    coverage_MLR = plan.loads.coverage_MLR
    if coverage_MLR is not None and not (coverage_MLR == 1).all():
        raise InfeasiblePlanError(
            f"a dispatch can be prepared only where every route is known; coverage is down to "
            f"{float(coverage_MLR.min()):.3f}: let the layer exchange counts"
        )


def prepared_bytes(plan: Plan) -> int:
    """Bytes of all packed dispatches of a window, on the rank that needs most."""
    sent_R, received_R = plan.loads.load_MLRE.sum(axis=(0, 1, 3)), plan.rank_load_MLR.sum(axis=(0, 1))
    sent_bytes, received_bytes = BYTES_PER_ROW
    return int((sent_bytes * sent_R + received_bytes * received_R).max())


def _check_planned(count_RS: Tensor, split: SourceSplit) -> None:
    planned_RS = torch.zeros_like(count_RS)
    planned_RS.view(-1).index_add_(0, split.slot_H, split.rows_H)
    wrong = (planned_RS != count_RS).nonzero()
    if len(wrong):
        rank, slot = wrong[0].tolist()
        raise RoutesError(
            f"slot {slot} of rank {rank} gets {int(count_RS[rank, slot])} rows from these ids, but the plan says "
            f"{int(planned_RS[rank, slot])}; prepare with the ids that were counted, or let the layer exchange counts"
        )


def _mapped(tables: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """The same tables with every value of a kind changed, also inside, in a fixed order."""
    if isinstance(tables, kind):
        return change(tables)
    if isinstance(tables, Relay):
        return Relay(*(_mapped(part, change, kind) for part in tables))
    if isinstance(tables, Groups | Dispatch | PreparedDispatch):
        parts = {field.name: _mapped(getattr(tables, field.name), change, kind) for field in fields(tables)}
        return replace(tables, **parts)
    return tables
