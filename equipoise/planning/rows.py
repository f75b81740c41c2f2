"""`RankRows`: the rows that one rank will send in a window, counted from the routes it is going to replay.

Knows ids and histograms of one rank, and how the ranks' rows become one `LoadMatrix`. Does not know how they travel.

Invariants (asserted by the tests):
1. Every known token adds one row to each of its experts; an unknown one (an id of -1) adds none and lowers coverage.
2. An id outside the model's experts is an error that names micro-step and layer, never a count.
3. Ranks whose windows differ in micro-steps, layers, experts or stage are refused, on every rank alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from equipoise.core import (
    InfeasiblePlanError,
    LoadMatrix,
    LoadsError,
    ModelShape,
    Plan,
    RoutesError,
    TopologyError,
    TransferError,
)
from equipoise.core.loads import Stage
from equipoise.core.options import BalancerOptions
from equipoise.layer.dispatch import PackedDispatch, forward_entries, prepare_entry, prepared_bytes, with_relay
from equipoise.layer.experts import BalancedExperts
from equipoise.layer.ops import order_columns
from equipoise.layer.relay import Nodes, Swap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRows:
    """One rank's part of a window's loads."""

    load_MLE: np.ndarray
    """[M, L, E] rows this rank sends to each expert."""
    coverage_ML: np.ndarray | None = None
    """[M, L] share of this rank's tokens whose route is known; None: all are."""
    stage: Stage = "update"
    has_ids: bool = False
    """Whether they were counted from the ids that will be replayed, which this rank keeps."""

    def __post_init__(self) -> None:
        if np.ndim(self.load_MLE) != 3 or 0 in np.shape(self.load_MLE):
            raise LoadsError(f"load_MLE has shape {np.shape(self.load_MLE)}; give rows by micro-step, layer and expert")

    @property
    def facts(self) -> tuple[Any, ...]:
        """What all ranks must have in common."""
        return (*self.load_MLE.shape, self.stage)


WindowRoutes = Sequence[Sequence[Any]] | RankRows
"""routes[m][l] are the [T, K] expert ids that a rank replays in micro-step m and layer index l, -1 where unknown; they
are read until the window ends, so leave them unchanged. Or rows that were counted elsewhere."""


def count_rows(routes: WindowRoutes, *, experts: int, stage: Stage = "update") -> RankRows:
    """Count the routes that this rank will replay.

    Args:
        routes: ids by micro-step and layer, -1 where unknown; counted rows are returned as they are
        experts: routed experts of the model, E
        stage: recompute or update
    """
    if isinstance(routes, RankRows):
        return routes
    count = [[_count(ids, m, layer, experts=experts) for layer, ids in enumerate(by)] for m, by in enumerate(routes)]
    if len({len(by) for by in count}) != 1:
        raise RoutesError(f"routes have {[len(by) for by in count]} layers by micro-step; give every layer in each")
    coverage_ML = np.array([[share for _, share in by] for by in count])
    return RankRows(
        load_MLE=np.array([[rows_E for rows_E, _ in by] for by in count]),
        coverage_ML=None if (coverage_ML == 1).all() else coverage_ML,
        stage=stage,
        has_ids=True,
    )


def _count(ids: Any, micro_step: int, layer: int, *, experts: int) -> tuple[np.ndarray, float]:
    """[E] rows of the known tokens of one entry, and their share of its tokens."""
    ids_TK = np.asarray(ids)
    if ids_TK.ndim != 2 or ids_TK.dtype.kind not in "iu":
        raise RoutesError(
            f"micro-step {micro_step}, layer index {layer}: ids have shape {ids_TK.shape} and dtype {ids_TK.dtype}; "
            "give [T, K] integers"
        )
    if ids_TK.size and (ids_TK.min() < -1 or ids_TK.max() >= experts):
        bad = int(ids_TK.min() if ids_TK.min() < -1 else ids_TK.max())
        raise RoutesError(
            f"micro-step {micro_step}, layer index {layer}: expert {bad} does not exist; ids are 0..{experts - 1}, "
            "or -1 where the route is unknown"
        )
    known_T: np.ndarray = np.all(ids_TK >= 0, axis=1)
    rows_E = np.bincount(ids_TK[known_T].reshape(-1).astype(np.int64), minlength=experts)
    return rows_E, float(known_T.mean()) if len(known_T) else 1.0


def join_rows(rows_R: Sequence[RankRows], *, layer_numbers: Sequence[int]) -> LoadMatrix:
    """Put the rows of all ranks together, in rank order."""
    for rank, rows in enumerate(rows_R):
        if rows.facts != rows_R[0].facts:
            names = "micro-steps, layers, experts and stage"
            raise LoadsError(
                f"rank {rank} has {names} {rows.facts}, rank 0 has {rows_R[0].facts}; all ranks of an EP group must "
                "announce the same window"
            )
    coverage_MLR = None
    if any(rows.coverage_ML is not None for rows in rows_R):
        full_ML = np.ones(rows_R[0].load_MLE.shape[:2])
        coverage_MLR = np.stack([full_ML if rows.coverage_ML is None else rows.coverage_ML for rows in rows_R], axis=2)
    return LoadMatrix(
        np.stack([rows.load_MLE for rows in rows_R], axis=2),
        stage=rows_R[0].stage,
        coverage_MLR=coverage_MLR,
        layer_numbers_L=np.array(layer_numbers),
    )


# `WindowWays`: the dispatches of one window, made in the background before its layers run, and kept until it ends.
#
# Whether a window's dispatches are made ahead is decided once, when it is planned, from what all ranks know of each
# other (`why_exchanged`): on all ranks or on none, since a layer that exchanges counts needs all ranks to do it.
#
# Invariants (asserted by the tests):
# 1. Every rank decides alike, and says why where dispatches are not made ahead.
# 2. Entries are made in the itinerary's order, the same on all ranks, so that ways in two levels can be exchanged.
# 3. What fails while one is made is raised where it is asked for; closing ends every wait.


def why_exchanged(rows_R: Sequence[RankRows], plan: Plan, options: BalancerOptions) -> str:
    """Say why layers must exchange counts in this window; empty where dispatches are made ahead."""
    if not options.is_prepared:
        return "not asked for"
    for rank, rows in enumerate(rows_R):
        if not rows.has_ids:
            return f"rank {rank} gave counted rows, not routes"
        if rows.coverage_ML is not None:
            return f"rank {rank} knows {float(rows.coverage_ML.mean()):.1%} of its routes"
    needed = prepared_bytes(plan)
    if needed > options.prepared_bytes:
        return f"{needed:,} bytes of tables are over prepared_bytes={options.prepared_bytes:,}"
    return ""


class WindowWays:
    """Dispatches of one rank in one window."""

    def __init__(self, routes: Sequence[Sequence[Any]], *, timeout_s: float) -> None:
        """Take the routes that will be replayed; they are read until all dispatches are made.

        Args:
            routes: routes[m][l] are [T, K] ids, all known
            timeout_s: bound on waiting for one dispatch
        """
        self._routes, self._timeout_s = routes, timeout_s
        entries = [(m, layer) for m, by_layer in enumerate(routes) for layer in range(len(by_layer))]
        self._made: dict[tuple[int, int], Future[PackedDispatch]] = {entry: Future() for entry in entries}

    def make(self, plan: Plan, layers: Sequence[BalancedExperts], *, rank: int, swap: Swap) -> None:
        """Make all dispatches, in the background thread of every rank.

        Args:
            layers: by layer index
            swap: exchanges integers with the other ranks' background threads
        """
        nodes = Nodes(tuple(plan.cluster.node_R), rank)
        for entry in forward_entries(plan):
            if not self._made[entry].set_running_or_notify_cancel():
                break
            try:
                self._made[entry].set_result(self._make(plan, entry, layers[entry[1]], nodes=nodes, swap=swap))
            except Exception as error:  # noqa: BLE001  # raised where the entry is asked for, whatever it is
                self._made[entry].set_exception(error)
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

    def close(self) -> None:
        """Make no more, and end every wait for what is not made."""
        for future in self._made.values():
            future.cancel()

    def _make(
        self, plan: Plan, entry: tuple[int, int], experts: BalancedExperts, *, nodes: Nodes, swap: Swap
    ) -> PackedDispatch:
        options = experts.options
        ids_TK = torch.from_numpy(np.asarray(self._routes[entry[0]][entry[1]]).astype(np.int64))
        ids_TK, _ = order_columns(ids_TK, ids_TK, order=options.combine_order)
        prepared = prepare_entry(ids_TK, plan, entry, rank=nodes.rank, pad=options.pad)
        if options.dispatch == "two_level":
            prepared = replace(prepared, dispatch=with_relay(prepared.dispatch, nodes=nodes, swap=swap))
        return prepared.packed(is_pinned=experts.gate_up.is_cuda)


# The balanced layers of a model: found by module path, put in the order of plans, checked before the optimizer runs.
#
# Invariants (asserted by the tests):
# 1. Layers are matched by what they are, never by the order in which they were created or given.
# 2. A row that did not follow its prepared dispatch raises on every rank, not only on the one that sent it.


def find_layers(net: nn.Module) -> dict[str, BalancedExperts]:
    """Return the balanced experts of a model by module path."""
    return {path: module for path, module in net.named_modules() if isinstance(module, BalancedExperts)}


def in_plan_order(layers: Mapping[str, BalancedExperts], model: ModelShape) -> dict[str, BalancedExperts]:
    """Return the layers by path, in the order of plans, or an error naming the path or layer that does not fit."""
    paths: dict[int, str] = {}
    for path, experts in layers.items():
        if not 0 <= experts.layer < model.layers:
            raise TopologyError(
                f"`{path}` is layer index {experts.layer}; {model.name!r} has MoE layers 0..{model.layers - 1}"
            )
        if experts.layer in paths:
            raise TopologyError(f"`{path}` and `{paths[experts.layer]}` are both layer index {experts.layer}")
        paths[experts.layer] = path
    missing = [model.layer_numbers[index] for index in range(model.layers) if index not in paths]
    if missing:
        raise TopologyError(f"no balanced experts were given for layer {missing[0]}; give all {model.layers} of them")
    return {paths[index]: layers[paths[index]] for index in sorted(paths)}


def check_unattached(layers: Mapping[str, BalancedExperts]) -> None:
    """Raise if a balancer has layers: their memory and processes would be left behind by a second attachment."""
    if layers:
        raise TopologyError(
            f"this balancer has {len(layers)} layers already, the first is `{next(iter(layers))}`; give every model a "
            "balancer of its own, and close this one when its model is done"
        )


def check_matched(layers: Iterable[BalancedExperts], group: Any) -> None:
    """Raise on every rank if a row of any rank did not follow its prepared dispatch. Every rank must call this."""
    layers = list(layers)
    # On the CPU, which every EP group must be able to reduce on.
    total_L = torch.stack([experts.mismatches for experts in layers]).cpu()
    dist.all_reduce(total_L, group=group)
    for experts in layers:
        experts.check_matched()
    if total_L.any():
        raise RoutesError(
            f"{int(total_L.sum())} rows of other ranks were routed otherwise than prepared; drop this step's gradients "
            "and replay the recorded routes"
        )
