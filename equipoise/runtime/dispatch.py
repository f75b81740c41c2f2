"""`Dispatch`: the way of every row of one rank in one (micro-step, layer), there and back, as index tables.

Knows slots and counts. Does not know hidden states or experts' weights; the only communication is one exchange of
counts, and none where the plan knows every route. A way in two levels has a `relay` beside the direct tables.

Steps:
1. `sort_rows`: the source orders its rows by physical slot, so by (rank, local slot), then as given.
2. Each rank learns how many rows every source has for each of its slots: `exchange_counts`, or the plan's own split.
3. `build_dispatch`: received rows, source by source, get a place in a buffer that is slot by slot, home slots first;
   inside a slot sources ascend, and each source's rows keep their token order.

Invariants (asserted by the tests):
1. Every row is sent once and received once; place and index tables are one-to-one.
2. An expert's rows stand in the same order whichever slot holds them, so its products do not depend on where it sits.
3. Groups start at multiples of `pad`; rows of padding are zero and reach no token.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core.plan import Plan
from equipoise.runtime.assign import physical_slots, slots_per_rank
from equipoise.runtime.exchange import all_to_all
from equipoise.runtime.ordering import stable_order
from equipoise.runtime.relay import Relay


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSide:
    """What a source knows alone: the order of its rows and how many go to each slot."""

    token_N: Tensor
    """[N] token of each row, in sending order."""
    index_TK: Tensor
    """[T, K] place of each row in sending order."""
    count_RS: Tensor
    """[R, S] rows for each local slot of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Where each local slot's rows stand in the slot-major buffer, home slots first."""

    home_end_S: Tensor
    """[home slots] int32, where each home slot's rows end."""
    replica_end_S: Tensor
    """[replica slots] int32, where each replica slot's rows end, counted from the end of the home rows."""
    num_home_rows: int
    num_replica_rows: int
    num_replicas: int
    """Replica slots up to the last one that has rows."""

    @property
    def num_rows(self) -> int:
        """Rows of the buffer, padding included."""
        return self.num_home_rows + self.num_replica_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The way of every row of this rank, there and back."""

    token_N: Tensor
    """[N] token of each row, in sending order."""
    index_TK: Tensor
    """[T, K] place of each row in sending order."""
    send_R: list[int]
    """Rows sent to each rank."""
    receive_R: list[int]
    """Rows received from each rank."""
    place_N: Tensor
    """[received rows] place of each received row in the slot-major buffer."""
    source_P: Tensor
    """[buffer rows] the received row at each place; one past the last received row at a place of padding."""
    groups: Groups
    relay: Relay | None = None
    """The way there in two levels; None: rows go directly."""

    def is_same_way(self, other: "Dispatch") -> bool:
        """Whether all rows go the same way; waits for the device."""
        if (self.send_R, self.receive_R) != (other.send_R, other.receive_R):
            return False
        if not torch.equal(self.index_TK, other.index_TK) or not torch.equal(self.place_N, other.place_N):
            return False
        mine, theirs = self.relay or (), other.relay or ()
        return all(_is_equal(one, two) for one, two in zip(mine, theirs, strict=True))


def sort_rows(slots_TK: Tensor, *, num_ranks: int, width: int) -> SendSide:
    """Order this source's rows by physical slot.

    Args:
        slots_TK: [T, K] physical slots
        width: slots of one rank
    """
    slots_N = slots_TK.reshape(-1)
    order_N = stable_order(slots_N, below=num_ranks * width)
    sorted_N = slots_N[order_N]
    index_N = torch.empty_like(order_N)
    index_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    # Unlike bincount, which looks for the largest value, this does not wait for a device.
    bound_S = torch.arange(num_ranks * width + 1, device=slots_N.device)
    count_RS = torch.searchsorted(sorted_N, bound_S).diff().view(num_ranks, width)
    return SendSide(token_N=order_N // slots_TK.shape[1], index_TK=index_N.view(slots_TK.shape), count_RS=count_RS)


def exchange_counts(count_RS: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Tell every rank of `group` how many rows it will get; all of them must call.

    Returns: [R source, S] rows that each source sends to each of this rank's slots
    """
    ones_R = [1] * len(count_RS)
    return all_to_all(count_RS, ones_R, ones_R, group)


def planned_counts(plan: Plan, micro_step: int, layer: int, *, rank: int) -> Tensor:
    """[R source, S] rows that each source sends to each slot of `rank` when all routes are the planned ones."""
    width = slots_per_rank(plan)
    slot_E = physical_slots(plan, micro_step, layer)[:, rank]
    held = (slot_E >= 0).nonzero()[0]
    receive_RS = torch.zeros((plan.cluster.ep, width), dtype=torch.int64)
    split_RE = plan.split_RER(micro_step, layer)[:, held, rank]
    receive_RS[:, torch.from_numpy(slot_E[held] - rank * width)] = torch.from_numpy(split_RE)
    return receive_RS


def build_dispatch(send: SendSide, receive_RS: Tensor, *, home_slots: int, pad: int = 1) -> Dispatch:
    """Put the tables together, without communication.

    Args:
        receive_RS: [R source, S] rows that arrive for each local slot
        pad: groups are filled with zero rows to a multiple of this
    """
    receive_RS = receive_RS.to(send.token_N.device)
    length_S = (receive_RS.sum(dim=0) + pad - 1) // pad * pad
    end_S = length_S.cumsum(0)
    # A source's rows for a slot follow those of the sources before it.
    start_RS = (end_S - length_S) + receive_RS.cumsum(0) - receive_RS
    # Splits are the host's business: the one place where a dispatch made in the layer waits for the device.
    sums = torch.cat([send.count_RS.sum(dim=1), receive_RS.sum(dim=1), end_S]).tolist()
    num_ranks = len(receive_RS)
    send_R, receive_R, end = sums[:num_ranks], sums[num_ranks : 2 * num_ranks], sums[2 * num_ranks :]
    place_N = _places(start_RS.reshape(-1), receive_RS.reshape(-1), total=sum(receive_R))
    return Dispatch(
        token_N=send.token_N,
        index_TK=send.index_TK,
        send_R=send_R,
        receive_R=receive_R,
        place_N=place_N,
        source_P=_sources(place_N, num_places=end[-1]),
        groups=_groups(end_S, end, home_slots=home_slots),
    )


def _places(start_C: Tensor, length_C: Tensor, *, total: int) -> Tensor:
    """Places of received rows: cell after cell as they arrive, each cell's rows from its start on."""
    arrived_C = length_C.cumsum(0) - length_C
    offset_N = torch.repeat_interleave(start_C - arrived_C, length_C, output_size=total)
    return offset_N + torch.arange(total, device=length_C.device)


def _sources(place_N: Tensor, *, num_places: int) -> Tensor:
    """Received row at each place, the inverse of `place_N`."""
    source_P = place_N.new_full((num_places,), place_N.numel())
    source_P[place_N] = torch.arange(place_N.numel(), device=place_N.device)
    return source_P


def _groups(end_S: Tensor, end: list[int], *, home_slots: int) -> Groups:
    """Groups that end at `end_S`, whose numbers the host has in `end`."""
    home_rows, all_rows = end[home_slots - 1], end[-1]
    return Groups(
        home_end_S=end_S[:home_slots].to(torch.int32),
        replica_end_S=(end_S[home_slots:] - home_rows).to(torch.int32),
        num_home_rows=home_rows,
        num_replica_rows=all_rows - home_rows,
        num_replicas=sum(before < all_rows for before in end[home_slots - 1 : -1]),
    )


def _is_equal(one: Tensor | list[int], two: Tensor | list[int]) -> bool:
    return torch.equal(one, two) if isinstance(one, Tensor) and isinstance(two, Tensor) else one == two
