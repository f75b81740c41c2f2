"""Choose which samples share a micro-step and which rank carries each, so that rows stay in their node.

The set of samples of a window never changes, so neither does its gradient, up to the order of sums. Steps:
1. `sketch_counts` keeps the shares of a few layers: 2 bytes for each sample, layer and expert.
2. `find_homes` lets samples and experts choose nodes in turns: samples whose experts agree go to one node, experts go
   to the node that sends them most rows (`follow_nodes`).
3. Several schedules are tried. *Dealt*: every micro-batch of the given schedule stays whole and in its micro-step, and
   only changes ranks, which worsens nothing. *Levelled*: samples are packed anew whatever their experts, as level as
   possible, and these micro-batches are dealt. *Regrouped*: each node packs its own samples anew; samples choose nodes
   freely, or so that nodes have as many tokens, or so that nodes get the same lengths.
4. Schedules that are worse than the given one in any of the trainer's limits (`PackingLimits`) are dropped, and those
   that cannot fit into a rank's memory where that is limited (`MemoryLimit`), and those in which more rows cross. Of
   the others that one wins whose longest micro-batches have the fewest tokens that cross, and the given one if none
   has fewer.

All sums are of integers below 2^53, so that every machine packs alike, whatever the order in which it adds.
Invariants (asserted by the tests):
1. Every sample is forwarded once, whole, in the same window as before, by a rank of the same EP group.
2. No limit of the given schedule is exceeded.
3. No more rows cross than in the given schedule, if samples of a prompt may part and memory is not limited.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np

from equipoise.core import InfeasiblePlanError, ModelShape, RouteCounts, Schedule, ScheduleError
from equipoise.core.options import Activations
from equipoise.core.value import Value, frozen_array, require_int, require_kind
from equipoise.loads.memory import GIB, WindowMemory, WindowRows, window_memory
from equipoise.loads.packing import PLAIN, TokenPolicy, build_schedule, count_padding

SKETCH_LAYERS = 8
"""Layers that a sketch keeps: a sample's node is one choice for all layers, and neighbours agree."""
WHOLE = 2**16 - 1
"""A share of 1 in a sketch."""
TURNS = 4
"""Most turns of choosing nodes for samples, then for experts."""
ROUNDS = 3
"""Assignments of experts to nodes that are tried each time, at changing prices of a full node."""
EVEN_STEPS = 16
"""Most swaps that make nodes more level afterwards."""
PRICE_STEPS = 120
"""Steps in which prices of full nodes are found, when samples choose nodes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleSketch(Value):
    """Histograms of samples in a small form: 4,096 samples of 94 layers of 256 experts take 17 MB instead of 197."""

    share_BLE: np.ndarray
    """[B, L, E] uint16 share of a sample's rows in a layer, in 1 / 65535, rounded: off by at most 8e-6."""

    def __post_init__(self) -> None:
        if self.share_BLE.dtype != np.uint16 or self.share_BLE.ndim != 3:
            raise ScheduleError(
                f"share_BLE is {self.share_BLE.dtype} of {self.share_BLE.ndim} axes; it must be uint16 [B, L, E], "
                "as sketch_counts makes it"
            )
        object.__setattr__(self, "share_BLE", frozen_array(self.share_BLE))


class PackingLimits(NamedTuple):
    """What packing must not worsen; padding tokens count."""

    longest: int
    """Tokens of the longest micro-batch: the token budget that was used, and the peak of activations."""
    tokens: int
    """Sum over micro-steps of the longest micro-batch, which all ranks wait for."""
    attention: int
    """Sum over micro-steps of the largest sum of squared lengths."""
    largest_attention: int
    """Largest sum of squared lengths of a micro-batch."""

    @classmethod
    def of(cls, schedule: Schedule) -> "PackingLimits":
        """Return the limits that a schedule keeps."""
        total_MR = schedule.num_tokens_MR + schedule.padding_MR
        square_MR = np.zeros_like(total_MR)
        _, start, stop, micro_step, rank = schedule.pieces.T
        np.add.at(square_MR, (micro_step, rank), (stop - start) ** 2)
        longest_M, square_M = total_MR.max(axis=1), square_MR.max(axis=1)
        return cls(int(longest_M.max()), int(longest_M.sum()), int(square_M.sum()), int(square_M.max()))

    def exceeded(self, schedule: Schedule) -> tuple[str, ...]:
        """Return the names of the limits that a schedule exceeds."""
        found = PackingLimits.of(schedule)
        return tuple(name for name in self._fields if getattr(found, name) > getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What a rank has left for the rows of a micro-step, whatever a plan does: level ranks, the least of all plans.

    Tokens of a micro-step are known before its experts are, so no histogram is needed. A plan's own peak is that of
    `plan_memory`; `PlanOptions.limit_bytes` keeps it.
    """

    limit_bytes: int
    """After weights, gradients and optimizer."""
    model: ModelShape
    ep: int
    """Ranks of an EP group."""
    activations: Activations = "kept"

    def memory(self, schedule: Schedule, sources: int) -> tuple[WindowMemory, ...]:
        """Return the memory of every EP group under a schedule.

        Args:
            sources: of one group: its ranks, or fewer where several of them share samples (CP, SP)
        """
        layers, found = self.model.layers, []
        tokens_MR = schedule.num_tokens_MR + schedule.padding_MR
        for first in range(0, schedule.ranks, sources):
            own_MR = -(-tokens_MR[:, first : first + sources] * sources // self.ep) * self.model.top_k
            sent_MLR = np.repeat(own_MR[:, None], layers, axis=1)
            rows = WindowRows(
                stage=schedule.stage,
                received_MLR=sent_MLR,
                sent_MLR=sent_MLR,
                home_slots=self.model.experts // self.ep,
            )
            found.append(window_memory(rows.levelled(), self.model, activations=self.activations))
        return tuple(found)

    def fits(self, schedule: Schedule, sources: int) -> bool:
        """Whether some plan may fit."""
        return all(int(memory.peak_R.max()) <= self.limit_bytes for memory in self.memory(schedule, sources))

    def refuse(self, schedule: Schedule, sources: int) -> InfeasiblePlanError:
        """Return the error that names the micro-step and the token budget that would fit."""
        memory = max(self.memory(schedule, sources), key=lambda memory: int(memory.peak_R.max()))
        micro_step, _, rank = place = memory.place()
        parts = memory.parts(place)
        scaled, longest = sum(parts.values()) - parts["gradients"], PackingLimits.of(schedule).longest
        left = max(0, self.limit_bytes - parts["gradients"])
        remedy = f"use a token budget of about {longest * left // max(1, scaled):,} tokens instead of {longest:,}"
        if left == 0:
            remedy = f"one layer's gradients alone take {parts['gradients'] / GIB:.3g} GiB: use a wider EP"
        elif self.activations == "kept" and replace(self, activations="recomputed").fits(schedule, sources):
            remedy += ", or recompute activations"
        return InfeasiblePlanError(
            f"micro-step {micro_step}: rank {rank} needs {sum(parts.values()) / GIB:.3g} GiB even where experts are "
            f"level, the limit is {self.limit_bytes / GIB:.3g} GiB; {remedy}"
        )


How = Literal["given", "dealt", "levelled", "regrouped"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing(Value):
    """A packed window."""

    schedule: Schedule
    how: How
    """Which schedule won: the given one, its micro-batches at other ranks, samples packed anew whatever their experts,
    whose micro-batches then change ranks, or samples packed anew in their nodes."""
    crossing: float
    """Share of rows that cross nodes, in the layers of the sketch, with homes that follow the samples; no replicas."""
    given_crossing: float
    """The same of the given schedule."""

    def micro_batches(self, rank: int) -> list[list[int]]:
        """Return the samples that a rank forwards in each micro-step, in the order in which it packs them."""
        return micro_batches(self.schedule, rank)


def micro_batches(schedule: Schedule, rank: int) -> list[list[int]]:
    """Return the samples that a rank forwards in each micro-step of a schedule of whole samples."""
    require_int("rank", rank, low=0, high=schedule.ranks - 1, error=ScheduleError)
    mine = schedule.pieces[schedule.pieces[:, 4] == rank]
    return [mine[mine[:, 3] == m, 0].tolist() for m in range(schedule.micro_steps)]


def sketch_counts(counts: RouteCounts, *, layers: int = SKETCH_LAYERS) -> SampleSketch:
    """Sketch histograms: the shares of evenly spaced layers.

    Args:
        counts: of all samples
        layers: how many layers to keep; all of them if the model has no more
    """
    require_kind("counts", counts, RouteCounts, error=ScheduleError)
    kept = min(require_int("layers", layers, low=1, error=ScheduleError), counts.count_BLE.shape[1])
    at = np.arange(kept) * counts.count_BLE.shape[1] // kept
    rows_BLE = counts.count_BLE[:, at].astype(np.float64)
    total_BL1 = np.maximum(rows_BLE.sum(axis=2, keepdims=True), 1)
    return SampleSketch(share_BLE=np.rint(rows_BLE * WHOLE / total_BL1).astype(np.uint16))


def pack_step(
    sketch: SampleSketch,
    given: Sequence[Schedule],
    *,
    node_R: Sequence[int],
    policy: TokenPolicy = PLAIN,
    prompt_B: Sequence[int] | None = None,
    memory: MemoryLimit | None = None,
) -> tuple[Packing, ...]:
    """Pack every window of a step; arguments as in `pack_window`."""
    return tuple(
        pack_window(sketch, each, node_R=node_R, policy=policy, prompt_B=prompt_B, memory=memory) for each in given
    )


def pack_window(
    sketch: SampleSketch,
    given: Schedule,
    *,
    node_R: Sequence[int],
    policy: TokenPolicy = PLAIN,
    prompt_B: Sequence[int] | None = None,
    memory: MemoryLimit | None = None,
) -> Packing:
    """Pack the samples of one window.

    Args:
        sketch: of all samples that the schedule may name
        given: the trainer's own schedule of whole samples, which sets the limits
        node_R: node of each rank of an EP group; a schedule of several groups has as many ranks for each
        policy: how the trainer pads its micro-batches
        prompt_B: number of each sample's prompt: samples of one prompt stay in one micro-batch; None: they need not
        memory: what every micro-step must fit into; a window that cannot is refused
    """
    _check(sketch, given, node_R=node_R, policy=policy)
    node_array_R, size = np.array(node_R, dtype=np.int64), len(node_R)
    groups = [_cut(given, start, size) for start in range(0, given.ranks, size)]
    samples = [_units(sketch, group, None) for group in groups]
    units = samples if prompt_B is None else [_units(sketch, group, prompt_B) for group in groups]
    ranks_N, limits = np.bincount(node_array_R), PackingLimits.of(given)
    own = [find_homes(each, ranks_N) for each in units]
    tried: list[tuple[How, Schedule]] = []
    if prompt_B is None:
        # Samples of a prompt may be apart in the given micro-batches.
        tried += [("given", given), ("dealt", _dealt(given, units, own, node_array_R, policy))]
    for choose in (choose_freely, choose_evenly, choose_alike):
        nodes = [choose(own_UN, each, ranks_N) for own_UN, each in zip(own, units, strict=True)]
        tried.append(("regrouped", _regrouped(given, units, nodes, node_array_R, policy)))
    alone = [each.tokens_U * 0 for each in units]
    level = _regrouped(given, units, alone, node_array_R * 0, policy, (longest_into_emptiest,))
    tried.append(("levelled", _dealt(level, units, own, node_array_R, policy)))
    kept = [(how, each) for how, each in tried if not limits.exceeded(each)]
    if not kept:
        raise ScheduleError(
            "samples of one prompt in one micro-batch would exceed the given schedule's "
            f"{limits.exceeded(level)[0]}; give a schedule that keeps them together, or leave prompt_B out"
        )
    if memory is not None:
        kept = [(how, each) for how, each in kept if memory.fits(each, size)]
        if not kept:
            raise memory.refuse(given, size)
    given_crossing = crossing_share(samples, given, node_array_R)
    crossing = [crossing_share(samples, each, node_array_R) for _, each in kept]
    # All wait for the rank that sends most: of the longest micro-batches' tokens, this share crosses. Of equally good
    # schedules, the one that changes least.
    best = min(
        range(len(kept)),
        key=lambda i: (crossing[i] > given_crossing, crossing[i] * PackingLimits.of(kept[i][1]).tokens),
    )
    return Packing(schedule=kept[best][1], how=kept[best][0], crossing=crossing[best], given_crossing=given_crossing)


def _check(sketch: SampleSketch, given: Schedule, *, node_R: Sequence[int], policy: TokenPolicy) -> None:
    require_kind("sketch", sketch, SampleSketch, error=ScheduleError)
    require_kind("given", given, Schedule, error=ScheduleError)
    nodes = sorted(set(node_R))
    if not nodes or nodes != list(range(len(nodes))):
        raise ScheduleError(f"node_R is {tuple(node_R)}; it must number its nodes 0, 1, 2, ... without gaps")
    if given.ranks % len(node_R):
        raise ScheduleError(
            f"the schedule has {given.ranks} ranks, node_R names {len(node_R)}; give the nodes of one EP group, whose "
            "size divides the ranks"
        )
    sample, start, _, micro_step, rank = given.pieces.T
    cut = np.flatnonzero((start > 0) | (np.bincount(sample, minlength=1)[sample] > 1)) if len(sample) else sample
    if len(cut):
        raise ScheduleError(
            f"sample {int(sample[cut[0]])} is cut into pieces; pack whole samples first, then slice the schedule"
        )
    if len(sample) and int(sample.max()) >= len(sketch.share_BLE):
        raise ScheduleError(
            f"sample {int(sample.max())} has no sketch; there are samples 0..{len(sketch.share_BLE) - 1}"
        )
    for m, r in np.argwhere(given.padding_MR > 0).tolist():
        length = (given.pieces[:, 2])[(micro_step == m) & (rank == r)]
        if count_padding(length, policy) != given.padding_MR[m, r]:
            raise ScheduleError(
                f"micro-step {m}, rank {r} of the schedule has {int(given.padding_MR[m, r])} padding tokens, the "
                f"policy gives {count_padding(length, policy)}; give the TokenPolicy that the schedule was made with"
            )


class Units(NamedTuple):
    """What is packed of one EP group: samples, or all samples of a prompt together; longest first."""

    samples: list[list[int]]
    tokens_U: np.ndarray
    squares_U: np.ndarray
    rows_UF: np.ndarray
    """[U, F] share of each (layer, expert) times tokens; float64 that holds integers, so that products are exact."""
    experts: int


def _cut(given: Schedule, start: int, size: int) -> Schedule:
    """Return one EP group's part of a schedule."""
    if given.ranks == size:
        return given
    pieces = given.pieces[(given.pieces[:, 4] >= start) & (given.pieces[:, 4] < start + size)] - [0, 0, 0, 0, start]
    return Schedule.of(
        pieces.tolist(),
        ranks=size,
        stage=given.stage,
        micro_steps=given.micro_steps,
        padding_MR=given.padding_MR[:, start : start + size],
        padding_policy=given.padding_policy,
        last_token=given.last_token,
    )


def _units(sketch: SampleSketch, given: Schedule, prompt_B: Sequence[int] | None) -> Units:
    length = {int(piece[0]): int(piece[2]) for piece in given.pieces}
    together: dict[int, list[int]] = {}
    for b in sorted(length):
        together.setdefault(b if prompt_B is None else int(prompt_B[b]), []).append(b)
    ordered = sorted(together.values(), key=lambda group: (-sum(length[b] for b in group), group))
    flat_BF = sketch.share_BLE.reshape(len(sketch.share_BLE), -1)
    rows_UF = np.zeros((len(ordered), flat_BF.shape[1]))
    for u, group in enumerate(ordered):
        for b in group:
            rows_UF[u] += flat_BF[b] * float(length[b])
    return Units(
        ordered,
        np.array([sum(length[b] for b in group) for group in ordered], dtype=np.int64),
        np.array([sum(length[b] ** 2 for b in group) for group in ordered], dtype=np.int64),
        rows_UF,
        sketch.share_BLE.shape[2],
    )


Choice = Callable[[np.ndarray, Units, np.ndarray], np.ndarray]
"""From own rows, units and ranks of nodes to the node of each unit: `choose_freely` and the like."""


def find_homes(units: Units, ranks_N: np.ndarray) -> np.ndarray:
    """[U, N] rows of each unit whose expert is in each node: units and experts choose nodes in turns.

    They do as long as more rows stay in their node.
    """
    node_U, most = _bisect(units, ranks_N), -1.0
    best_UN = np.zeros((len(node_U), len(ranks_N)))
    for _ in range(TURNS):
        _, home_LE = _follow(units, node_U, ranks_N)
        is_home_FN = home_LE.reshape(-1, 1) == np.arange(len(ranks_N))
        own_UN = units.rows_UF @ is_home_FN.astype(np.float64)
        node_U = choose_freely(own_UN, units, ranks_N)
        kept = float(own_UN[np.arange(len(node_U)), node_U].sum())
        if kept <= most:
            break
        best_UN, most = own_UN, kept
    return best_UN


def _follow(units: Units, node_U: np.ndarray, ranks_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the [N, L, E] rows that nodes send and the [L, E] nodes of experts that follow them."""
    member_NU = (node_U == np.arange(len(ranks_N))[:, None]).astype(np.float64)
    rows_NLE = (member_NU @ units.rows_UF).reshape(len(ranks_N), -1, units.experts)
    return rows_NLE, np.stack([follow_nodes(rows_NLE[:, layer], ranks_N) for layer in range(rows_NLE.shape[1])])


def follow_nodes(rows_NE: np.ndarray, ranks_N: np.ndarray, *, rounds: int = ROUNDS) -> np.ndarray:
    """[E] node of each expert: the one that sends it most rows, as long as nodes have places and are level.

    Args:
        rows_NE: [N, E] rows that each node sends, integers
        ranks_N: [N] ranks of each node; each holds as many experts
        rounds: assignments that are tried

    A full node gets a price on its rows, again and again; of all tries the one counts that keeps most rows in their
    node, less what the fullest node has above its share.
    """
    from scipy.optimize import linear_sum_assignment

    nodes, experts = rows_NE.shape
    # Experts that ranks cannot share evenly are dealt as evenly as possible; planning refuses them later.
    places_N = np.diff(np.cumsum(np.append(0, ranks_N)) * experts // int(ranks_N.sum()))
    of_place = np.repeat(np.arange(nodes), places_N)
    total_E, rank_count = rows_NE.sum(axis=0), int(ranks_N.sum())
    whole, price_N = max(float(total_E.sum()), 1.0), np.zeros(nodes)
    best_E, best = np.zeros(experts, dtype=np.int64), -np.inf
    for turn in range(rounds):
        worth_NE = rows_NE * 1024 - price_N[:, None] * total_E
        node_E = of_place[linear_sum_assignment(worth_NE[of_place].T, maximize=True)[1]]
        fill_N = np.bincount(node_E, weights=total_E, minlength=nodes) * rank_count / ranks_N
        value = rows_NE[node_E, np.arange(experts)].sum() - (fill_N.max() - whole)
        if value > best:
            best_E, best = node_E, value
        # Smaller steps later; 0.3 of a row at first for a node with twice its share, less the more nodes there are.
        price_N += np.floor(1536 * (fill_N - whole) / (whole * nodes * (5 + turn)))
    return best_E


def choose_alike(own_UN: np.ndarray, units: Units, ranks_N: np.ndarray) -> np.ndarray:
    """[U] node of each unit, so that all nodes get nearly the same lengths: `share_out` at prices that level tokens."""
    whole, price_N = max(int(units.tokens_U.sum()), 1), np.zeros(len(ranks_N))
    best_U, least = np.zeros(len(own_UN), dtype=np.int64), np.inf
    for turn in range(6):
        node_U = share_out(own_UN - units.tokens_U[:, None] * price_N, ranks_N)
        over_N = np.bincount(node_U, weights=units.tokens_U, minlength=len(ranks_N)) / whole
        over_N = over_N * ranks_N.sum() / ranks_N - 1
        if over_N.max() < least:
            best_U, least = node_U, over_N.max()
        price_N += np.rint(units.rows_UF.sum() / whole * over_N / (1 + turn))
    return even_out(best_U, units.tokens_U, ranks_N)


def share_out(own_UN: np.ndarray, ranks_N: np.ndarray) -> np.ndarray:
    """[U] node of each unit: of each run of as many units as there are ranks, every node takes as many as it has ranks.

    Units stand in the order of their lengths, so that all nodes get the same lengths.
    """
    from scipy.optimize import linear_sum_assignment

    of_place = np.repeat(np.arange(len(ranks_N)), ranks_N)
    node_U = np.zeros(len(own_UN), dtype=np.int64)
    for start in range(0, len(own_UN), len(of_place)):
        own_PN = own_UN[start : start + len(of_place)]
        row, place = linear_sum_assignment(own_PN[:, of_place], maximize=True)
        node_U[start + row] = of_place[place]
    return node_U


def choose_freely(own_UN: np.ndarray, units: Units, ranks_N: np.ndarray) -> np.ndarray:
    """[U] node of each unit: the one with most of its experts, at prices that level the nodes' tokens and squares.

    Lengths may differ between nodes, as those of different domains do; so this is tried first, and the limits decide.
    """
    fair_N = ranks_N / ranks_N.sum()
    size_2U = np.stack([units.tokens_U, units.squares_U]).astype(np.float64)
    whole_2 = np.maximum(size_2U.sum(axis=1), 1)
    unit_2 = units.rows_UF.sum() / whole_2
    price_2N = np.zeros((2, len(ranks_N)))
    best_U, least = np.zeros(len(own_UN), dtype=np.int64), np.inf
    for turn in range(PRICE_STEPS):
        node_U = np.argmax(own_UN - size_2U.T @ price_2N, axis=1)
        fill_2N = np.stack([np.bincount(node_U, weights=size_U, minlength=len(ranks_N)) for size_U in size_2U])
        over_2N = fill_2N / whole_2[:, None] / fair_N - 1
        if over_2N.max() < least:
            best_U, least = node_U, over_2N.max()
        # Whole numbers, so that products with sizes are exact.
        price_2N += np.rint(unit_2[:, None] * over_2N * (0.1 / (1 + turn / 20)))
    return best_U


def choose_evenly(own_UN: np.ndarray, units: Units, ranks_N: np.ndarray) -> np.ndarray:
    """[U] node of each unit as `choose_freely` has it, tokens evened out."""
    return even_out(choose_freely(own_UN, units, ranks_N), units.tokens_U, ranks_N)


def even_out(node_U: np.ndarray, tokens_U: np.ndarray, ranks_N: np.ndarray) -> np.ndarray:
    """[U] node of each unit after swaps between the fullest and the emptiest node, until none makes them more level."""
    node_U = node_U.copy()
    for _ in range(EVEN_STEPS):
        fill_N = np.bincount(node_U, weights=tokens_U, minlength=len(ranks_N)) / ranks_N
        most, least = int(fill_N.argmax()), int(fill_N.argmin())
        wanted = (fill_N[most] - fill_N[least]) / (1 / ranks_N[most] + 1 / ranks_N[least])
        full, empty = np.flatnonzero(node_U == most), np.flatnonzero(node_U == least)
        if not len(full) or not len(empty):
            break
        off = np.abs(tokens_U[full][:, None] - tokens_U[empty] - wanted)
        row, column = np.unravel_index(int(off.argmin()), off.shape)
        if off[row, column] >= wanted:
            break
        node_U[full[row]], node_U[empty[column]] = least, most
    return node_U


def _bisect(units: Units, ranks_N: np.ndarray) -> np.ndarray:
    """[U] a first node of each unit: cut along the direction in which shares differ most, again and again."""
    node_U = np.zeros(len(units.tokens_U), dtype=np.int64)
    parts = [(np.arange(len(node_U)), 0, len(ranks_N))]
    while parts:
        part, low, high = parts.pop()
        node_U[part] = low
        if high - low < 2 or len(part) < 2:
            continue
        middle = (low + high) // 2
        ordered = part[np.argsort(_main_direction(units.rows_UF[part], units.tokens_U[part]), kind="stable")]
        reach = np.cumsum(units.tokens_U[ordered]) * int(ranks_N[low:high].sum())
        first = int(np.searchsorted(reach, int(units.tokens_U[part].sum()) * int(ranks_N[low:middle].sum())))
        parts += [(ordered[:first], low, middle), (ordered[first:], middle, high)]
    return node_U


def _main_direction(rows_UF: np.ndarray, tokens_U: np.ndarray) -> np.ndarray:
    """[U] place of each unit along the first principal axis of their shares, by power iteration."""
    share_UF = np.rint(rows_UF / np.maximum(tokens_U, 1)[:, None])
    apart_UF = share_UF - np.rint(share_UF.mean(axis=0))
    at_U = apart_UF @ apart_UF[np.argmax(np.square(apart_UF).sum(axis=1))]
    for _ in range(8):
        # Rounded to 12 bits, so that all sums are exact.
        axis_F = (np.rint(at_U * 4096 / max(1.0, np.abs(at_U).max()))) @ apart_UF
        at_U = apart_UF @ np.rint(axis_F * 4096 / max(1.0, np.abs(axis_F).max()))
    return at_U


Bins = list[list[list[int]]]
"""Samples of each rank by micro-step, [R][M]."""


def _dealt(
    given: Schedule, units: Sequence[Units], own: Sequence[np.ndarray], node_R: np.ndarray, policy: TokenPolicy
) -> Schedule:
    """Give every micro-batch, whole, to a rank of the node that has most of its experts, in its own micro-step."""
    groups = [_cut(given, start, len(node_R)) for start in range(0, given.ranks, len(node_R))]
    return _join(given, [_deal(g, u, o, node_R) for g, u, o in zip(groups, units, own, strict=True)], policy)


def _deal(given: Schedule, units: Units, own_UN: np.ndarray, node_R: np.ndarray) -> Bins:
    ranks_N, size = np.bincount(node_R), len(node_R)
    own_MRN = np.zeros((given.micro_steps, size, len(ranks_N)))
    unit_of = {b: u for u, group in enumerate(units.samples) for b in group}
    batches = [micro_batches(given, rank) for rank in range(size)]
    for rank, batch in enumerate(batches):
        for m, samples in enumerate(batch):
            own_MRN[m, rank] = own_UN[sorted({unit_of[b] for b in samples})].sum(axis=0)
    bins: Bins = [[[] for _ in range(given.micro_steps)] for _ in range(size)]
    for m in range(given.micro_steps):
        free = {node: np.flatnonzero(node_R == node).tolist() for node in range(len(ranks_N))}
        for rank, node in enumerate(share_out(own_MRN[m], ranks_N).tolist()):
            bins[free[node].pop(0)][m] = batches[rank][m]
    return bins


Partition = Callable[[Sequence[int], np.ndarray, int], list[list[int]]]
"""From units, their tokens and a number of parts to the units of each part: the two functions below."""


def _regrouped(
    given: Schedule,
    units: Sequence[Units],
    nodes: Sequence[np.ndarray],
    node_R: np.ndarray,
    policy: TokenPolicy,
    partitions: Sequence[Partition] | None = None,
) -> Schedule:
    """Pack each node's units anew into level micro-batches; of the schedules within the limits, take the shortest.

    Differencing makes tokens most level; longest first spreads long samples, which levels squares. Micro-batches with
    alike squares share a micro-step, or those with alike tokens.

    Args:
        nodes: node of each unit, by EP group
        partitions: which are tried; both by default
    """
    limits, tried = PackingLimits.of(given), list[Schedule]()
    # The longest micro-step stays the one that it was, and so on.
    order_M = np.argsort(-(given.num_tokens_MR + given.padding_MR).max(axis=1), kind="stable").tolist()
    for partition in partitions or (difference, longest_into_emptiest):
        parts = [_divide(u, n, node_R, partition, len(order_M)) for u, n in zip(units, nodes, strict=True)]
        for by in ("squares_U", "tokens_U"):
            bins = [_line_up(u, p, node_R, getattr(u, by), order_M) for u, p in zip(units, parts, strict=True)]
            tried.append(_join(given, bins, policy))
    return min(tried, key=lambda each: (len(limits.exceeded(each)) > 0, PackingLimits.of(each).tokens))


def _divide(
    units: Units, node_U: np.ndarray, node_R: np.ndarray, partition: Partition, micro_steps: int
) -> list[list[list[int]]]:
    """Return the units of each micro-batch of each node."""
    return [
        partition(np.flatnonzero(node_U == node).tolist(), units.tokens_U, ranks * micro_steps)
        for node, ranks in enumerate(np.bincount(node_R).tolist())
    ]


def _line_up(
    units: Units, parts: Sequence[list[list[int]]], node_R: np.ndarray, by_U: np.ndarray, order_M: Sequence[int]
) -> Bins:
    """Let micro-batches that are alike share a micro-step.

    Args:
        parts: units of each micro-batch of each node
        by_U: what makes micro-batches alike: tokens or squares
        order_M: micro-steps, the one for the largest first
    """
    bins: Bins = [[[] for _ in order_M] for _ in node_R]
    for node, filled in enumerate(parts):
        ranks = np.flatnonzero(node_R == node).tolist()
        for place, members in enumerate(sorted(filled, key=lambda members: -int(by_U[members].sum()))):
            bins[ranks[place % len(ranks)]][order_M[place // len(ranks)]] = sorted(
                b for u in members for b in units.samples[u]
            )
    return bins


def difference(chosen: Sequence[int], tokens_U: np.ndarray, count: int) -> list[list[int]]:
    """Partition units into `count` level parts by Karmarkar and Karp's differencing.

    The two least level partial partitions are merged, the fullest part of one with the emptiest of the other.
    """
    # A partial partition: (less its tokens, units) of each part that is not empty, the fullest first.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for u in chosen:
        heap.append((-int(tokens_U[u]) if count > 1 else 0, int(u), [(-int(tokens_U[u]), [int(u)])]))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        # The first `low` parts of one meet empty parts of the other, and its first `high` empty parts of the one.
        low, high = count - len(second), count - len(first)
        both = zip(first[low:], reversed(second[high:]), strict=True)
        merged = [*first[:low], *((a[0] + b[0], a[1] + b[1]) for a, b in both), *reversed(second[:high])]
        merged.sort(key=itemgetter(0))
        least = merged[-1][0] if len(merged) == count else 0
        heapq.heappush(heap, (merged[0][0] - least, number, merged))
    parts = [part for _, part in heap[0][2]] if heap else []
    return parts + [[] for _ in range(count - len(parts))]


def longest_into_emptiest(chosen: Sequence[int], tokens_U: np.ndarray, count: int) -> list[list[int]]:
    """Put units, the longest first, into the emptiest of `count` parts."""
    heap = [(0, number) for number in range(count)]
    parts: list[list[int]] = [[] for _ in range(count)]
    for u in sorted(chosen, key=lambda u: -int(tokens_U[u])):
        total, number = heapq.heappop(heap)
        parts[number].append(u)
        heapq.heappush(heap, (total + int(tokens_U[u]), number))
    return parts


def _join(given: Schedule, groups: Sequence[Bins], policy: TokenPolicy) -> Schedule:
    """Build the schedule of all EP groups."""
    length_B = np.zeros(int(given.pieces[:, 0].max(initial=0)) + 1, dtype=np.int64)
    length_B[given.pieces[:, 0]] = given.pieces[:, 2]
    bins_R = [[np.array(samples, dtype=np.int64) for samples in rank] for bins in groups for rank in bins]
    same = replace(policy, padding=given.padding_policy, last_token=given.last_token)
    return build_schedule(bins_R, length_B, stage=given.stage, policy=same)


def crossing_share(units: Sequence[Units], schedule: Schedule, node_R: np.ndarray) -> float:
    """Return the share of rows that cross nodes, if experts follow the samples and there is no replica.

    Args:
        units: samples of each EP group
        schedule: of whole samples
        node_R: node of each rank of a group
    """
    size, ranks_N = len(node_R), np.bincount(node_R)
    rank_of = {int(piece[0]): int(piece[4]) for piece in schedule.pieces}
    kept = whole = 0.0
    for each in units:
        node_U = np.array([node_R[rank_of[group[0]] % size] for group in each.samples], dtype=np.int64)
        rows_NLE, home_LE = _follow(each, node_U, ranks_N)
        kept += float(np.take_along_axis(rows_NLE, home_LE[None], axis=0).sum())
        whole += float(rows_NLE.sum())
    return 1 - kept / whole if whole else 0.0
