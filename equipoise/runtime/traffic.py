"""`Traffic`: the rows that reached one rank in a window, entry by entry, and the bytes it sent for them.

Knows numbers that the host has anyway, so noting them waits for nothing. Does not know rows or experts.

A token sent is counted on its way there, in forward; outputs and gradients come back row by row either way.

Invariants (asserted by the tests):
1. Where all routes are the planned ones, `arrived_ML` is the plan's load of this rank.
2. In two levels, `two_level across` is never more than `direct across`.
"""

from collections import Counter

import numpy as np

from equipoise.runtime.dispatch import Dispatch
from equipoise.runtime.relay import Nodes


class Traffic:
    """What the layers of one rank sent and received in one window."""

    def __init__(self, shape_ML: tuple[int, int], nodes: Nodes) -> None:
        others = [rank for rank in range(len(nodes.node_R)) if rank != nodes.rank]
        self._tiers = {
            "across": [rank for rank in others if not nodes.is_near(rank)],
            "inside": [rank for rank in others if nodes.is_near(rank)],
        }
        self.arrived_ML: np.ndarray = np.full(shape_ML, -1, dtype=np.int64)
        """[M, L] rows that arrived at this rank; -1 where its layer has not run."""
        self.bytes: Counter[str] = Counter()
        """Sent by this rank: `direct` and, where rows go in two levels, `two_level`; `across` and `inside` nodes."""

    def note(self, micro_step: int, layer: int, way: Dispatch, *, row_bytes: int) -> None:
        """Count one layer's rows; a recomputed layer counts its bytes again."""
        self.arrived_ML[micro_step, layer] = sum(way.receive_R)
        self._add("direct", way.send_R, row_bytes)
        if way.relay is not None:
            self._add("two_level", way.relay.copies_R, row_bytes)
            self._add("two_level", way.relay.inner_send_R, row_bytes)

    def _add(self, name: str, sent_R: list[int], row_bytes: int) -> None:
        for tier, ranks in self._tiers.items():
            self.bytes[f"{name} {tier}"] += row_bytes * sum(sent_R[rank] for rank in ranks)
