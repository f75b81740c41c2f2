"""The dispatches of one window, made in the background before its layers run.

Whether they are made ahead is decided once per window, from what all ranks know of each other (`why_exchanged`): on all
ranks or on none, because a layer that exchanges counts needs every rank to take part.
"""

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from equipoise.core import InfeasiblePlanError, Plan, TransferError
from equipoise.core.options import BalancerOptions
from equipoise.layer.dispatch import PackedDispatch, forward_entries, prepare_entry, prepared_bytes, with_relay
from equipoise.layer.experts import BalancedExperts
from equipoise.layer.ops import order_columns
from equipoise.layer.relay import Nodes, Swap
from equipoise.planning.rows import RankRows


def why_exchanged(rows_R: Sequence[RankRows], plan: Plan, options: BalancerOptions) -> str:
    """Return why layers must exchange counts in this window; empty where dispatches are made ahead."""
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


class WindowDispatches:
    """Dispatches of one rank in one window, each a future until the background thread has made it."""

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
        """Make all dispatches in the order of the itinerary. Every rank must call this, in its background thread.

        Args:
            layers: by layer index
            swap: exchanges integers with the other ranks' background threads
        """
        nodes = Nodes(tuple(plan.cluster.node_R), rank)
        for entry in forward_entries(plan):
            if not self._made[entry].set_running_or_notify_cancel():
                break
            experts = layers[entry[1]]
            try:
                ids_TK = torch.from_numpy(np.asarray(self._routes[entry[0]][entry[1]]).astype(np.int64))
                ids_TK, _ = order_columns(ids_TK, ids_TK, order=experts.options.combine_order)
                prepared = prepare_entry(ids_TK, plan, entry, rank=rank, pad=experts.options.pad)
                if experts.options.dispatch == "two_level":
                    prepared = replace(prepared, dispatch=with_relay(prepared.dispatch, nodes=nodes, swap=swap))
                self._made[entry].set_result(prepared.packed(is_pinned=experts.gate_up.is_cuda))
            except Exception as error:  # noqa: BLE001  # raised where the entry is asked for, whatever it is
                self._made[entry].set_exception(error)
                break
        self.close()

    def take(self, micro_step: int, layer: int) -> PackedDispatch:
        """Wait until one entry's dispatch is made, and return it."""
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
        """Return whether `take` would return at once."""
        future = self._made[micro_step, layer]
        return future.done() and not future.cancelled()

    def close(self) -> None:
        """Make no more dispatches, and end every wait for one that is not made."""
        for future in self._made.values():
            future.cancel()
