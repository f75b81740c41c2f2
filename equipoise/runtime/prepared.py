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

    def packed(self, *, is_pinned: bool = False) -> "PreparedDispatch":
        """Half the bytes, for keeping on the host; `to` makes it usable again.

        Args:
            is_pinned: in memory from which a device copies without waiting
        """

        def pack(tensor: Tensor) -> Tensor:
            small = tensor.to(torch.int32)
            return small.pin_memory() if is_pinned else small

        packed: PreparedDispatch = _mapped(self, pack)
        return packed

    def to(self, device: str | torch.device) -> "PreparedDispatch":
        """Bring the tables to where the layer computes, without waiting where they are in pinned memory."""
        # Widened there: a copy between devices that also converts would convert first, and wait.
        moved: PreparedDispatch = _mapped(self, lambda tensor: tensor.to(device, non_blocking=True).long())
        return replace(moved, dispatch=replace(moved.dispatch, groups=_narrowed(moved.dispatch.groups)))


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


def _mapped(tables: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tables with every tensor changed, also those inside."""
    return replace(tables, **{field.name: _changed(getattr(tables, field.name), change) for field in fields(tables)})


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Relay):
        return Relay(*(_changed(part, change) for part in value))
    return _mapped(value, change) if isinstance(value, Groups | Dispatch) else value


def _narrowed(groups: Groups) -> Groups:
    """Ends as int32, which grouped products want."""
    return replace(groups, home_end_S=groups.home_end_S.int(), replica_end_S=groups.replica_end_S.int())
