"""`Passage`: layers go to their homes ahead of their first turn in a window, and back behind their last one.

The order of a window, the same on every rank:
1. `begin`, `publish`: layers are published one after the other in the background, the first first.
2. `arrive(visit)`: a layer that begins waits for its own weights, and for nothing else.
3. When a layer is over (`turns`), it is collected in the background, while the others still compute.
4. `close`: what has not been collected yet is, and the window is over.
A visit that comes when its layer is over already has it published again: late, counted as exposed, and right.

Knows the order of layers. Does not know how experts travel (`edges`), nor who pulls from homes: it says when a layer's
homes hold their weights (`arrived`) and when these are about to go (`leaving`), in the background's thread.

Invariants (asserted by the tests):
1. A layer's homes hold its weights from `arrive` until the next visit, whatever came before.
2. All ranks publish and collect layers in the same order, or all of them fail by name.
3. After `close` every owner holds its weights and gradients, whichever layers were over.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from equipoise.core.itinerary import Visit
from equipoise.core.plan import Plan
from equipoise.runtime.edges import WindowEdges
from equipoise.runtime.node import NodeMemory
from equipoise.runtime.porter import Porter
from equipoise.runtime.streams import Mark
from equipoise.runtime.turns import Turns


class Passage:
    """The way of one EP group's layers between owners and homes, seen from one rank."""

    def __init__(
        self,
        node: NodeMemory,
        edges: WindowEdges,
        *,
        arrived: Callable[[int], None],
        leaving: Callable[[int], None],
    ) -> None:
        """Start the background's thread.

        Args:
            arrived: called with a layer whose homes, on all ranks of the node, hold their weights from now on
            leaving: called with a layer that every rank of the group is about to collect; returns once nobody reads it
        """
        self._node, self._edges, self._porter = node, edges, Porter(node)
        self._arrived, self._leaving = arrived, leaving
        self._turns: Turns | None = None
        self._job_L: list[int] = []
        self._gone: set[int] = set()

    def begin(self, plan: Plan, *, with_weights: bool = True) -> None:
        """Begin a window; no weights move yet. Every rank of the group must call this.

        Args:
            with_weights: see `WindowEdges.begin`
        """
        with torch.profiler.record_function("equipoise.publish"):
            begin = time.monotonic()
            self._edges.begin(plan, with_weights=with_weights)
            self._count(begin)
        self._turns, self._gone, self._job_L = Turns(plan), set(), []

    def publish(self) -> None:
        """Start the layers on their way, and return."""
        self._job_L = [self._give_publish(layer) for layer in range(self._node.layout.layers)]

    def arrive(self, visit: Visit) -> None:
        """Come to a visit, and wait until its layer's weights are with their homes."""
        self.come_to(visit)
        layer = visit.layer
        if layer in self._gone:
            self._gone.discard(layer)
            self._job_L[layer] = self._give_publish(layer)
        if not self._porter.is_done(self._job_L[layer]):
            with torch.profiler.record_function("equipoise.await_home"):
                begin = time.monotonic()
                self._porter.wait(self._job_L[layer])
                self._count(begin)

    def come_to(self, visit: Visit) -> None:
        """Come to a visit; a layer that is over by that is collected in the background."""
        turns = self._turns
        layer = None if turns is None else turns.come_to(visit)
        if turns is None or layer is None or not self._edges.moves_anything(layer):
            return
        if turns.has_gradients:
            self._edges.complete(layer)
        self._gone.add(layer)
        self._porter.give(partial(self._collect, layer), after=Mark.now(self._node.device))

    def returned(self, micro_step: int, layer: int) -> None:
        """Note that a micro-step's gradients of a layer are with its home."""
        if self._turns is not None:
            self._turns.returned(micro_step, layer)

    @property
    def layers_home(self) -> list[int]:
        """Layers whose weights are with their homes, and not about to go; nothing may be on its way."""
        return [layer for layer in range(len(self._job_L)) if layer not in self._gone]

    def drain(self) -> None:
        """Wait until nothing is on its way."""
        begin = time.monotonic()
        self._porter.wait()
        self._count(begin)

    def close(self) -> None:
        """End the window: all that is left goes to its owners. Every rank of the group must call this."""
        with torch.profiler.record_function("equipoise.collect"):
            begin = time.monotonic()
            self._edges.end()
            self._count(begin)
        self._turns = None

    def shut(self) -> None:
        """End the background's thread. Shutting twice is allowed."""
        self._porter.close()

    def _give_publish(self, layer: int) -> int:
        return self._porter.give(partial(self._publish, layer))

    def _publish(self, layer: int) -> None:
        self._edges.publish_layer(layer)
        self._arrived(layer)

    def _collect(self, layer: int) -> None:
        self._leaving(layer)
        self._edges.collect_layer(layer)

    def _count(self, begin: float) -> None:
        """Count seconds in which training stood still."""
        self._node.counters.wait(self._edges.path, time.monotonic() - begin)
