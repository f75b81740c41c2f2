"""`Dispatch`: where every row of one rank goes in one (micro-step, layer), and back, as index tables.

1. `assign_slots`: each row gets a physical slot, as the plan's split says. Physical slots number every slot of the EP
   group: rank * (home slots + replica slots) + local slot, home slots first, then replicas in the plan's order.
2. `sort_rows`: the source orders its rows by physical slot, so by (rank, local slot), then as given.
3. Each rank learns how many rows every source has for each of its slots: `exchange_counts`, or the plan's own split.
4. `build_dispatch`: received rows, source by source, get a place in a buffer that is slot by slot, home slots first;
   inside a slot sources ascend, and each source's rows keep their token order.
A plan may cut every rank's rows into waves, which travel one after another: rows are then ordered by wave first.
Where the plan knows every route, `prepare_dispatch` does all of that without communication, and `WindowDispatches` for
a whole window, in the background. With `with_relay` tokens are sent in two levels (`relay`); where ranks map each
other's memory, tables of `mapped` say where rows are read.

Invariants (asserted by the tests):
1. Every row is sent once and received once; place and index tables are one-to-one.
2. An expert's rows are in the same order whichever slot holds it, so its products do not depend on placement.
3. Groups start at multiples of `pad`; rows of padding are zero and reach no token.
4. With planned routes, the prepared dispatch equals the one that the layer would make with an exchange of counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core.errors import InfeasiblePlanError, RoutesError, TransferError
from equipoise.core.options import DISPATCH_BYTES
from equipoise.core.plan import Plan, wave_cuts
from equipoise.layer.mapped import FarRows, MappedTables, make_tables
from equipoise.layer.ops import all_to_all
from equipoise.layer.relay import NodeRanks, Relay, Swap, make_relay

if TYPE_CHECKING:
    from equipoise.layer.experts import BalancedExperts

_DIGITS = 1 << 16


def stable_order(keys_N: Tensor, *, below: int) -> Tensor:
    """[N] positions of the keys in ascending order, equal keys as given: `torch.argsort(keys_N, stable=True)`, faster.

    Args:
        below: every key is at least 0 and below this
    """
    if keys_N.device.type != "cpu" or below > _DIGITS:
        return torch.argsort(keys_N, stable=True)
    return torch.from_numpy(np.argsort(keys_N.numpy().astype(np.uint16), kind="stable"))


class FilledRows(NamedTuple):
    """Tokens of one (micro-step, layer) that get the window's experts instead of those that their router chooses."""

    token_F: Tensor
    """[F] their places among the ids' rows."""
    ids_FK: Tensor
    """[F, K] distinct experts."""
    num_tokens: int
    """Rows of the ids, T."""

    @classmethod
    def of(cls, token_F: np.ndarray, ids_FK: np.ndarray, *, num_tokens: int) -> "FilledRows":
        """Take arrays."""
        return cls(torch.from_numpy(token_F), torch.from_numpy(ids_FK), num_tokens)

    def put(self, ids_TK: Tensor) -> Tensor:
        """Return a copy of a layer's ids with those of the filled tokens in their place."""
        if len(ids_TK) != self.num_tokens:
            raise RoutesError(
                f"{len(ids_TK)} rows of ids came to a layer of which {len(self.token_F)} tokens are filled among "
                f"{self.num_tokens}; give free tokens for the rows that this micro-step's router sees"
            )
        token_F = self.token_F.to(ids_TK.device, non_blocking=True)
        return ids_TK.index_copy(0, token_F, self.ids_FK.to(ids_TK, non_blocking=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSplit:
    """How one source rank's rows of each expert are shared out, in one (micro-step, layer)."""

    home_slot_E: Tensor
    """[E] physical slot of each expert's home."""
    expert_H: Tensor
    """[H] experts, ascending; one entry per holder that takes rows from this source."""
    end_H: Tensor
    """[H] where the holder's share of its expert's rows ends. Example: expert_H = [3, 3], end_H = [10, 14]: the
    first holder takes rows 0..9 of expert 3, the second 10..13, and any row from 14 on goes home."""
    slot_H: Tensor
    """[H] physical slot of the holder."""

    @classmethod
    def of(cls, plan: Plan, micro_step: int, layer: int, *, source: int, device: str = "cpu") -> "SourceSplit":
        """Read one entry of a plan as `source` sees it."""
        slot_ER = physical_slots(plan, micro_step, layer)
        split_ER = plan.split_RER(micro_step, layer)[source]
        expert_H, rank_H = np.nonzero(split_ER)
        end_H = np.cumsum(split_ER, axis=1)[expert_H, rank_H]
        home_slot_E = slot_ER[np.arange(len(slot_ER)), plan.home_LE[layer]]
        arrays = (home_slot_E, expert_H, end_H, slot_ER[expert_H, rank_H])
        names = ("home_slot_E", "expert_H", "end_H", "slot_H")
        return cls(**{name: torch.from_numpy(array).to(device) for name, array in zip(names, arrays, strict=True)})


def physical_slots(plan: Plan, micro_step: int, layer: int) -> np.ndarray:
    """[E, R] physical slot of each expert on each rank that holds it, -1 elsewhere."""
    experts = np.arange(plan.loads.num_experts)
    width = plan.home_slots + plan.slots
    slot_ER = np.full((len(experts), plan.cluster.ep), -1, dtype=np.int64)
    slot_ER[experts, plan.home_LE[layer]] = plan.home_LE[layer] * width + plan.home_slot_LE[layer]
    used_R = np.zeros(plan.cluster.ep, dtype=np.int64)
    for expert, rank in plan.replicas(micro_step, layer):
        slot_ER[expert, rank] = rank * width + plan.home_slots + used_R[rank]
        used_R[rank] += 1
    return slot_ER


def assign_slots(ids_TK: Tensor, split: SourceSplit, *, has_gaps: bool = False) -> Tensor:
    """Give each row of this source a physical slot. The one seam between a plan and the dispatch.

    A wrong or partial plan changes where rows go, never whether they do.

    Args:
        ids_TK: [T, K] expert ids that the tokens really use
        split: what the plan says for this source rank
        has_gaps: whether an id may be -1: no row, of a token with fewer than K experts

    Returns: [T, K] int64 physical slots, -1 where there is no row
    """
    ids_N, num_experts = ids_TK.reshape(-1).long(), len(split.home_slot_E)
    # A device would have to be waited for; there the gather below asserts the same range.
    if not ids_N.is_cuda and ids_N.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids_N))
        lowest = -1 if has_gaps else 0
        if low < lowest or high >= num_experts:
            raise RoutesError(
                f"a token was routed to expert {low if low < lowest else high}; ids are 0..{num_experts - 1} (fill "
                "missing routes first)"
            )
    home_slot_E = split.home_slot_E
    if has_gaps:
        # What is no row counts as one of an expert behind all others, whose home slot is -1.
        ids_N = torch.where(ids_N == -1, num_experts, ids_N)
        home_slot_E = torch.cat([home_slot_E, home_slot_E.new_full((1,), -1)])
    # Step 1: number the rows of each expert in token order, then top-k column order. The key of a row is (expert,
    # number), as one integer.
    stride = ids_N.numel() + 1
    order_N = stable_order(ids_N, below=num_experts + 1)
    sorted_N = ids_N[order_N]
    number_N = torch.empty_like(order_N)
    number_N[order_N] = torch.arange(ids_N.numel(), device=ids_N.device) - torch.searchsorted(sorted_N, sorted_N)
    key_N = ids_N * stride + number_N
    # Step 2: holders of an expert take its rows in ascending rank order, each as many as the split gives it. A row's
    # holder is the first one of its expert whose share ends beyond the row.
    end_H = split.expert_H * stride + split.end_H.clamp(max=stride - 1)
    at_N = torch.searchsorted(end_H, key_N, right=True)
    # Step 3: rows beyond the split, of routes that the plan did not know, go to the expert's home. One entry past the
    # end means "no holder".
    expert_H = torch.cat([split.expert_H, split.expert_H.new_full((1,), -1)])
    slot_H = torch.cat([split.slot_H, split.slot_H.new_full((1,), -1)])
    # Gathered, not indexed: an index of -1 would mean the last expert, and no one would notice on a device.
    home_slot_N = home_slot_E.gather(0, ids_N)
    slot_N = torch.where(expert_H[at_N] == ids_N, slot_H[at_N], home_slot_N)
    return slot_N.view(ids_TK.shape)


class WaveCuts(NamedTuple):
    """Where the waves of one (micro-step, layer) begin, all but the first; see `core.split.Cuts`."""

    slot_RW: Tensor
    before_RW: Tensor
    rows_RW: Tensor
    own_W: list[int]
    """Slots of this rank in which they begin, on the host."""
    rank: int

    @classmethod
    def of(cls, plan: Plan, micro_step: int, layer: int, *, rank: int, device: str = "cpu") -> "WaveCuts":
        """Read one entry of a plan as `rank` sees it."""
        cuts = wave_cuts(plan, micro_step, layer)
        slot_RW, before_RW, rows_RW = (torch.from_numpy(array).to(device) for array in cuts)
        return cls(slot_RW, before_RW, rows_RW, cuts.slot_XW[rank].tolist(), rank)

    def split(self, count_RS: Tensor, *, is_own: bool = False) -> Tensor:
        """[R, S, waves] rows of each wave, of the rows that one source sends to every slot.

        The source's first rows for a slot that is cut belong to the wave before, in the proportion of the plan.

        Args:
            is_own: `count_RS` are the rows that every source sends to this rank
        """
        ranks = slice(self.rank, self.rank + 1) if is_own else slice(None)
        slot_R1W, before_R1W, rows_R1W = (table_RW[ranks, None] for table_RW in self[:3])
        slot_S1, count_RS1 = torch.arange(count_RS.shape[1], device=count_RS.device)[:, None], count_RS[..., None]
        divided_RSW = torch.where(slot_S1 == slot_R1W, count_RS1 * before_R1W // rows_R1W.clamp(min=1), 0)
        ahead_RSW = torch.where(slot_S1 < slot_R1W, count_RS1, divided_RSW)
        return torch.cat([torch.zeros_like(count_RS1), ahead_RSW, count_RS1], dim=2).diff(dim=2)


class Wave(NamedTuple):
    """Rows that travel together, and compute while those of the next wave travel."""

    slots: slice
    """Local slots of these rows, home slots first. The last one may be the next wave's first, too."""
    rows: slice
    """Their places in the slot-major buffer."""
    send_R: list[int]
    """Rows sent to this wave on each rank."""
    receive_R: list[int]
    """Rows received from each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSide:
    """What a source knows alone: the order of its rows and how many go to each slot."""

    token_N: Tensor
    """[T * K] token of each row, in sending order; those of no row at the end."""
    index_TK: Tensor
    """[T, K] place of each row in sending order."""
    count_RS: Tensor
    """[R, S] rows for each local slot of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Where each local slot's rows lie in the slot-major buffer, home slots first."""

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
    """Where every row of this rank goes, and back."""

    token_N: Tensor
    """[N] token of each row, in sending order."""
    index_TK: Tensor
    """[T, K] place of each row in sending order; N, one past the last, where a token has no row."""
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
    """The two levels in which tokens are sent; None: rows are sent directly."""
    mapped: MappedTables | None = None
    """Where rows are read from, if the ranks of a node map each other's memory; None: all rows are sent."""
    waves: tuple[Wave, ...] = ()
    """In which rows travel, at least two; empty: all at once. With waves, `place_N` and `source_P` are the tables of
    one wave after the other, which count from that wave's first place and first received row."""
    ids_TK: Tensor | None = None
    """[T, K] the ids it was made for, where it was made ahead of the layer."""

    @property
    def row_N(self) -> Tensor:
        """[N] token * K + column of each row, in sending order."""
        num_rows, index_X = len(self.token_N), self.index_TK.reshape(-1)
        # Entries of no row all write the one behind the last, which is cut off.
        row_X = torch.empty(num_rows + 1, dtype=torch.int64, device=index_X.device)
        row_X[index_X] = torch.arange(len(index_X), device=index_X.device)
        return row_X[:num_rows]

    def by_wave(self) -> Iterator[tuple[Wave, slice, Tensor, Tensor]]:
        """Yield each wave with its part of the sending order, `place_N` and `source_P`."""
        sent, received, place = 0, 0, 0
        for wave in self.waves:
            ends = sent + sum(wave.send_R), received + sum(wave.receive_R), wave.rows.stop
            yield wave, slice(sent, ends[0]), self.place_N[received : ends[1]], self.source_P[place : ends[2]]
            sent, received, place = ends

    def is_same(self, other: "Dispatch") -> bool:
        """Whether all rows go to the same places; waits for the device."""
        if (self.send_R, self.receive_R, self.waves) != (other.send_R, other.receive_R, other.waves):
            return False
        if not torch.equal(self.index_TK, other.index_TK) or not torch.equal(self.place_N, other.place_N):
            return False
        if self.relay is None or other.relay is None:
            return True
        pairs = zip(self.relay, other.relay, strict=True)
        return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)

    def packed(self, *, is_pinned: bool = False) -> "PackedDispatch":
        """Put all tables into one array of half the bytes, for keeping on the host.

        Args:
            is_pinned: in memory from which a device copies without waiting
        """
        tables: list[Tensor] = []
        _map_tables(self, tables.append)
        flat_X = torch.cat([table.reshape(-1).to(torch.int32) for table in tables])
        form = _map_tables(self, lambda table: table.to("meta"))
        return PackedDispatch(flat_X=flat_X.pin_memory() if is_pinned else flat_X, form=form)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedDispatch:
    """A dispatch as one array of int32, which one copy uploads to a device."""

    flat_X: Tensor
    form: Dispatch
    """The dispatch with tables that have a shape and no memory."""

    def unpack(self, device: str) -> Dispatch:
        """The dispatch where the layer computes; does not wait where the array is in pinned memory."""
        # Widened there: a copy between devices that also converts would convert first, and wait.
        wide_X = self.flat_X.to(device, non_blocking=True).long()
        tables: list[Tensor] = []
        _map_tables(self.form, tables.append)
        parts = iter(wide_X.split([table.numel() for table in tables]))
        whole: Dispatch = _map_tables(self.form, lambda table: next(parts).view(table.shape))
        # Grouped products want int32.
        ends = {"home_end_S": whole.groups.home_end_S.int(), "replica_end_S": whole.groups.replica_end_S.int()}
        return replace(whole, groups=replace(whole.groups, **ends))


def _map_tables(tables: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tables with every tensor changed, also inside, in a fixed order."""
    if isinstance(tables, Tensor):
        return change(tables)
    if isinstance(tables, Relay | MappedTables | FarRows):
        return type(tables)(*(_map_tables(part, change) for part in tables))
    if isinstance(tables, Groups | Dispatch):
        parts = {field.name: _map_tables(getattr(tables, field.name), change) for field in fields(tables)}
        return replace(tables, **parts)
    return tables


def sort_rows(slots_TK: Tensor, *, num_ranks: int, width: int, cuts: WaveCuts | None = None) -> SendSide:
    """Order this source's rows by physical slot, or by wave and then slot.

    Args:
        slots_TK: [T, K] physical slots, -1 where there is no row
        width: slots of one rank
        cuts: where waves begin; None: all rows travel at once
    """
    # What is no row is sorted behind all slots, and counted nowhere.
    num_slots = num_ranks * width
    slots_N = torch.where(slots_TK < 0, num_slots, slots_TK).reshape(-1)
    order_N = stable_order(slots_N, below=num_slots + 1)
    sorted_N = slots_N[order_N]
    # Unlike bincount, which looks for the largest value, this does not wait for a device.
    start_S = torch.searchsorted(sorted_N, torch.arange(num_slots + 1, device=slots_N.device))
    count_RS = start_S.diff().view(num_ranks, width)
    if cuts is not None:
        # Waves of the rows of each slot, and one behind them for what is no row.
        end_SW = cuts.split(count_RS).cumsum(dim=2).view(num_slots, -1)
        end_SW = torch.cat([end_SW, end_SW.new_zeros((1, end_SW.shape[1]))])
        number_N = torch.arange(sorted_N.numel(), device=sorted_N.device) - start_S[sorted_N]
        wave_N = (number_N[:, None] >= end_SW[sorted_N]).sum(dim=1)
        order_N = order_N[stable_order(wave_N, below=end_SW.shape[1] + 1)]
    index_N = torch.empty_like(order_N)
    index_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return SendSide(token_N=order_N // slots_TK.shape[1], index_TK=index_N.view(slots_TK.shape), count_RS=count_RS)


def exchange_counts(count_RS: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Tell every rank of `group` how many rows it will get; all of them must call.

    Returns: [R source, S] rows that each source sends to each of this rank's slots
    """
    ones_R = [1] * len(count_RS)
    return all_to_all(count_RS, ones_R, ones_R, group)


def build_dispatch(
    send: SendSide, receive_RS: Tensor, *, home_slots: int, pad: int = 1, cuts: WaveCuts | None = None
) -> Dispatch:
    """Put the tables together, without communication.

    Args:
        receive_RS: [R source, S] rows that arrive for each local slot
        pad: groups are filled with zero rows to a multiple of this
        cuts: where waves begin, as rows were sorted; None: all rows travel at once
    """
    receive_RS = receive_RS.to(send.token_N.device)
    num_ranks, width = receive_RS.shape
    # Step 1: groups of rows that lie behind one another: slots, or the part of each wave in its slots. A slot that is
    # cut has a part in both waves, so that group g of wave w is slot g - w.
    begin_W, receive_RG, send_WR = [0], receive_RS, send.count_RS.sum(dim=1)
    if cuts is not None:
        begin_W += [slot + wave for wave, slot in enumerate(cuts.own_W, start=1)]
        receive_RSW, send_WR = cuts.split(receive_RS, is_own=True), cuts.split(send.count_RS).sum(dim=1).t()
        receive_RG = receive_RS.new_zeros((num_ranks, width + len(cuts.own_W)))
        for wave, part_RS in enumerate(receive_RSW.unbind(2)):
            receive_RG[:, wave : wave + width] += part_RS
    groups_W = [slice(*pair) for pair in pairwise([*begin_W, receive_RG.shape[1]])]
    length_G = (receive_RG.sum(dim=0) + pad - 1) // pad * pad
    end_G = length_G.cumsum(0)
    # A source's rows for a group follow those of the sources before it.
    start_RG = (end_G - length_G) + receive_RG.cumsum(0) - receive_RG
    # Step 2: the host needs the splits. This is the one place where a dispatch made in the layer waits for the device.
    receive_WR = [receive_RG[:, groups].sum(dim=1) for groups in groups_W]
    sums = torch.cat([send_WR.reshape(-1), *receive_WR, end_G]).tolist()
    num_splits = 2 * len(groups_W) * num_ranks
    splits, ends = [sums[i : i + num_ranks] for i in range(0, num_splits, num_ranks)], [0, *sums[num_splits:]]
    waves = tuple(
        Wave(slice(g.start - w, g.stop - w), slice(ends[g.start], ends[g.stop]), splits[w], splits[len(groups_W) + w])
        for w, g in enumerate(groups_W)
    )
    # Step 3: the tables, wave by wave. A slot ends with its part in the last wave that has one.
    tables = [_place_rows(receive_RG[:, g], start_RG[:, g], wave) for g, wave in zip(groups_W, waves, strict=True)]
    place_N, source_P = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*tables, strict=True))
    last_S = [slot + sum(begin - wave <= slot for wave, begin in enumerate(begin_W)) - 1 for slot in range(width)]
    end_S, slot_ends = (end_G if cuts is None else end_G[last_S]), [ends[last + 1] for last in last_S]
    home_rows, all_rows = slot_ends[home_slots - 1], ends[-1]
    groups = Groups(
        home_end_S=end_S[:home_slots].to(torch.int32),
        replica_end_S=(end_S[home_slots:] - home_rows).to(torch.int32),
        num_home_rows=home_rows,
        num_replica_rows=all_rows - home_rows,
        num_replicas=sum(before < all_rows for before in slot_ends[home_slots - 1 : -1]),
    )
    send_R = [sum(rows) for rows in zip(*(wave.send_R for wave in waves), strict=True)]
    receive_R = [sum(rows) for rows in zip(*(wave.receive_R for wave in waves), strict=True)]
    num_rows = sum(send_R)
    return Dispatch(
        token_N=send.token_N[:num_rows],
        index_TK=send.index_TK.clamp(max=num_rows),
        send_R=send_R,
        receive_R=receive_R,
        place_N=place_N,
        source_P=source_P,
        groups=groups,
        waves=waves if cuts is not None else (),
    )


def _place_rows(receive_RG: Tensor, start_RG: Tensor, wave: Wave) -> tuple[Tensor, Tensor]:
    """Return the tables of a wave: [N] the place of each received row, [P] the row at each place."""
    # Received rows arrive cell by cell (source, group); each cell's rows are placed from the cell's start on.
    length_C = receive_RG.reshape(-1)
    offset_C = start_RG.reshape(-1) - wave.rows.start - (length_C.cumsum(0) - length_C)
    row_N = torch.arange(sum(wave.receive_R), device=length_C.device)
    place_N = torch.repeat_interleave(offset_C, length_C, output_size=len(row_N)) + row_N
    source_P = place_N.new_full((wave.rows.stop - wave.rows.start,), len(row_N))
    source_P[place_N] = row_N
    return place_N, source_P


def with_relay(dispatch: Dispatch, *, nodes: NodeRanks, swap: Swap) -> Dispatch:
    """The same dispatch in two levels. Every rank must call this, in the same order of dispatches."""
    send_R, receive_R = dispatch.send_R, dispatch.receive_R
    relay = make_relay(dispatch.token_N, send_R=send_R, receive_R=receive_R, nodes=nodes, swap=swap)
    return replace(dispatch, relay=relay)


def prepare_dispatch(
    ids_TK: Tensor,
    plan: Plan,
    entry: tuple[int, int],
    *,
    rank: int,
    pad: int = 1,
    swap: Swap | None = None,
    is_mapped: bool = False,
    has_gaps: bool = False,
) -> Dispatch:
    """Make the dispatch of one (micro-step, layer) ahead of its layer, as `rank` sees it.

    Args:
        ids_TK: [T, K] the ids this rank will replay; the plan must know those of all ranks
        swap: exchanges integers with the other ranks, for a dispatch in two levels; None: a direct one, made without
            communication
        is_mapped: for ranks that map the memory of their nodes
        has_gaps: whether an id may be -1: no row
    """
    coverage_MLR = plan.loads.coverage_MLR
    if coverage_MLR is not None and not (coverage_MLR == 1).all():
        raise InfeasiblePlanError(
            f"a dispatch can be prepared only where every route is known; coverage is down to "
            f"{float(coverage_MLR.min()):.3f}: let the layer exchange counts"
        )
    # Step 1: order this rank's rows, and compare their counts with the plan's, which other ranks prepare to receive.
    width, ranks = plan.home_slots + plan.slots, plan.cluster.ep
    split = SourceSplit.of(plan, *entry, source=rank, device=str(ids_TK.device))
    # Rows that are read in place, or go in two levels, travel all at once.
    has_waves = plan.waves > 1 and not is_mapped and swap is None
    cuts = WaveCuts.of(plan, *entry, rank=rank, device=str(ids_TK.device)) if has_waves else None
    send = sort_rows(assign_slots(ids_TK, split, has_gaps=has_gaps), num_ranks=ranks, width=width, cuts=cuts)
    # A holder's share begins where the one before it ends, at row 0 for the first holder of an expert.
    is_first_H = split.expert_H != split.expert_H.roll(1)
    is_first_H[:1] = True
    rows_H = torch.where(is_first_H, split.end_H, split.end_H - split.end_H.roll(1))
    planned_RS = torch.zeros_like(send.count_RS)
    planned_RS.view(-1).index_add_(0, split.slot_H, rows_H)
    wrong = (planned_RS != send.count_RS).nonzero()
    if len(wrong):
        to_rank, slot = wrong[0].tolist()
        raise RoutesError(
            f"slot {slot} of rank {to_rank} gets {int(send.count_RS[to_rank, slot])} rows from these ids, but the plan "
            f"says {int(planned_RS[to_rank, slot])}; prepare with the ids that were counted, or let the layer exchange "
            "counts"
        )
    # Step 2: the plan says how many rows each source sends to each slot, of this rank and of the others.
    slot_ER = physical_slots(plan, *entry)
    expert_H, rank_H = (slot_ER >= 0).nonzero()
    count_RRS = torch.zeros((ranks, ranks, width), dtype=torch.int64)
    count_RRS.numpy()[:, rank_H, slot_ER[expert_H, rank_H] % width] = plan.split_RER(*entry)[:, expert_H, rank_H]
    # Step 3: put the tables together.
    dispatch = build_dispatch(send, count_RRS[:, rank], home_slots=plan.home_slots, pad=pad, cuts=cuts)
    dispatch = replace(dispatch, ids_TK=ids_TK)
    nodes = NodeRanks(tuple(plan.cluster.node_R), rank)
    if is_mapped:
        if dispatch.token_N.numel() < ids_TK.numel():
            raise RoutesError(
                f"{ids_TK.numel() - dispatch.token_N.numel()} ids are -1, of tokens with fewer than {ids_TK.shape[1]} "
                "experts; mapped rows do not carry these: use rows='collective'"
            )
        tables = make_tables(dispatch.index_TK, count_RRS, dispatch.source_P, nodes=nodes, pad=pad, swap=swap)
        return replace(dispatch, mapped=tables)
    if swap is None:
        return dispatch
    return with_relay(dispatch, nodes=nodes, swap=swap)


def prepared_bytes(plan: Plan, *, is_mapped: bool = False) -> int:
    """Bytes of all packed dispatches of a window, on the rank that needs most."""
    sent_R, received_R = plan.loads.load_MLRE.sum(axis=(0, 1, 3)), plan.rank_load_MLR.sum(axis=(0, 1))
    way = "exchanged" if not is_mapped else "mapped" if len(set(plan.cluster.node_R)) == 1 else "mapped beyond a node"
    sent_bytes, received_bytes = DISPATCH_BYTES[way]
    return int((sent_bytes * sent_R + received_bytes * received_R).max())


class _Upload(NamedTuple):
    entry: tuple[int, int]
    dispatch: Dispatch
    is_there: torch.cuda.Event


class WindowDispatches:
    """The dispatches of one rank in one window: made in the background, and uploaded one entry ahead."""

    def __init__(self, routes: Sequence[Sequence[Any]], *, timeout_s: float, is_mapped: bool = False) -> None:
        """Take the routes that will be replayed; they are read until all dispatches are made.

        Args:
            routes: routes[m][l] are [T, K] ids, all known but those that are filled
            timeout_s: bound on waiting for one dispatch
            is_mapped: make them for ranks that map each other's memory
        """
        self._routes, self._timeout_s, self.is_mapped = routes, timeout_s, is_mapped
        self.filled: Mapping[tuple[int, int], FilledRows] = {}
        """By (micro-step, layer index), known once the window is planned."""
        entries = [(m, layer) for m, by_layer in enumerate(routes) for layer in range(len(by_layer))]
        self._made: dict[tuple[int, int], Future[PackedDispatch]] = {entry: Future() for entry in entries}
        self._after: dict[tuple[int, int], tuple[int, int]] = {}
        self._stream: torch.cuda.Stream | None = None
        self._ahead: _Upload | None = None

    def make(self, plan: Plan, layers: "Sequence[BalancedExperts]", *, swap: Swap) -> None:
        """Make all dispatches, in the background thread of every rank, in the order in which layers run forward.

        Args:
            layers: by layer index
            swap: exchanges integers with the other ranks' background threads
        """
        itinerary, order = plan.itinerary, list(self._made)
        if itinerary is not None:
            order = [(visit.micro_step, visit.layer) for visit in itinerary.visits() if visit.phase == "forward"]
        self._after = dict(pairwise(order))
        for micro_step, layer in order:
            future = self._made[micro_step, layer]
            if not future.set_running_or_notify_cancel():
                break
            try:
                ids_TK = torch.from_numpy(np.asarray(self._routes[micro_step][layer]).astype(np.int64))
                if (micro_step, layer) in self.filled:
                    ids_TK = self.filled[micro_step, layer].put(ids_TK)
                dispatch = layers[layer].prepare(ids_TK, micro_step, plan=plan, swap=swap, is_mapped=self.is_mapped)
                future.set_result(dispatch.packed(is_pinned=layers[layer].gate_up.is_cuda))
            except Exception as error:  # noqa: BLE001  # raised where the entry is asked for, whatever it is
                future.set_exception(error)
                break
        self.close()

    def take(self, micro_step: int, layer: int) -> PackedDispatch:
        """Return one entry's dispatch; waits until it is made."""
        if (micro_step, layer) not in self._made:
            raise InfeasiblePlanError(
                f"no routes were submitted for micro-step {micro_step}, layer index {layer}; the window has "
                f"{len(self._routes)} micro-steps"
            )
        try:
            with torch.profiler.record_function("equipoise.take_dispatch"):
                return self._made[micro_step, layer].result(self._timeout_s)
        except (FutureTimeoutError, CancelledError) as error:
            raise TransferError(
                f"no dispatch for micro-step {micro_step}, layer index {layer} within {self._timeout_s:g} s: preparing "
                "it hangs, ended with an earlier entry's error, or the window is over"
            ) from error

    def is_made(self, micro_step: int, layer: int) -> bool:
        """Whether `take` would return at once."""
        future = self._made[micro_step, layer]
        return future.done() and not future.cancelled()

    def upload(self, micro_step: int, layer: int, *, device: str) -> Dispatch:
        """Return one entry's dispatch on `device`, and start to upload the next one."""
        entry = (micro_step, layer)
        if not device.startswith("cuda"):
            return self.take(*entry).unpack(device)
        ahead, self._ahead = self._ahead, None
        upload = ahead if ahead is not None and ahead.entry == entry else self._start_upload(entry, device)
        after = self._after.get(entry)
        if after is not None and self.is_made(*after):
            self._ahead = self._start_upload(after, device)
        # The layer's stream waits for the copy, and keeps the memory until it has used it. All tables but the groups'
        # ends are parts of one array.
        dispatch = upload.dispatch
        current = torch.cuda.current_stream(dispatch.index_TK.device)
        current.wait_event(upload.is_there)
        for tensor in (dispatch.index_TK, dispatch.groups.home_end_S, dispatch.groups.replica_end_S):
            tensor.record_stream(current)
        return dispatch

    def close(self) -> None:
        """Make no more, and end every wait for what is not made."""
        for future in self._made.values():
            future.cancel()

    def _start_upload(self, entry: tuple[int, int], device: str) -> _Upload:
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            return _Upload(entry, self.take(*entry).unpack(device), self._stream.record_event())
