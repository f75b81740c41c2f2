"""`WindowEdges`: experts change place between owners and homes where a window begins and ends, a layer at a time.

Publish brings weights from owners to homes; collect brings accumulated gradients from homes to owners, and the weights
where the parameter is its own master. Between the two, `canonical` lends the weights back to their owners.

Knows placements, and which layers are where. Does not know how experts travel (`relocate`), when a layer's turn is
(`passage`), nor replicas: whoever calls makes sure nobody pulls.

Invariants (asserted by the tests):
1. `end` after `begin` gives every owner its weights back bit for bit, and its experts' gradients in place, whatever was
   published and collected in between.
2. Parameters and existing gradient tensors stay the same objects.
3. Gradients from before the window are kept: what the window adds comes on top of them.
4. Inside `canonical` every owner holds its own experts; afterwards the homes do again, with what was written.
5. A gradient that changes after it was collected, and before the window ends, is noticed by name.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from equipoise.core.errors import TransferError
from equipoise.core.plan import Plan
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.node import NodeMemory
from equipoise.runtime.relocate import Move, Relocator, digest_moves, owner_to_home
from equipoise.runtime.watchdog import Transfer

GradientOf = Callable[[torch.Tensor], torch.Tensor | None]
"""Finds a parameter's accumulated gradient. Example: `lambda parameter: parameter.main_grad` (Megatron)."""


class _Written(NamedTuple):
    """A gradient that is complete, and how often torch will have seen it written when it has been collected."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    version: int | None
    """None where it is part of a larger buffer, whose parts torch counts together."""

    def is_changed(self, now: torch.Tensor | None) -> bool:
        """Whether another gradient is in its place, or someone else has written it."""
        return (self.version is not None and self.gradient._version != self.version) or now is not self.gradient


class WindowEdges:
    """Publishes weights to homes and collects gradients to owners, for all layers of one EP group."""

    def __init__(self, node: NodeMemory, *, gradient_of: GradientOf | None = None) -> None:
        """
        Args:
            gradient_of: where gradients lie, if not in `grad`; they must be there before the first window
        """
        self._node, self._gradient_of = node, gradient_of or _grad_of
        self._moves: list[list[Move]] | None = None
        self._with_weights = True
        self._published: set[int] = set()
        self._collected: dict[int, list[_Written]] = {}
        self._relocator = Relocator(node)
        self.path = node.direct_path
        """How experts travel at this window's edges, as counters call it."""

    def begin(self, plan: Plan, *, with_weights: bool = True) -> None:
        """Take a plan's placement and move gradients that owners hold already, so that the window's are added to them.

        No weights move yet. Every rank of the group must call this, with the same plan.

        Args:
            with_weights: False only where the optimizer keeps masters of its own and overwrites every owned parameter
                before anyone reads one; then the unchanged weights need not travel back
        """
        if self._moves is not None:
            raise TransferError("a window is already published; collect it before the next")
        self._check_plan(plan)
        moves = [owner_to_home(plan, layer) for layer in range(self._node.layout.layers)]
        whole = Transfer("publish", path="p2p")
        self._node.agree_equal({"placement": digest_moves(moves)}, whole)
        has_gradients = self._layers_with_gradients(whole, range(len(moves)), is_any=_is_nonzero)
        for layer, layer_moves in enumerate(moves):
            if has_gradients[layer]:
                self._relocator.relocate("publish", layer, layer_moves, self._gradients(layer))
        self._node.counters.publishes += self._arrivals(moves)
        self._moves, self._with_weights = moves, with_weights
        self._published, self._collected = set(), {}
        crosses = any(self._relocator.crosses(move) for layer_moves in moves for move in layer_moves)
        self.path = "p2p" if crosses else self._node.direct_path

    def publish_layer(self, layer: int) -> None:
        """Bring a layer's weights to its homes, and its gradients if they were collected. Every rank must call this."""
        moves = self._open_moves()[layer]
        if layer in self._collected:
            del self._collected[layer]
            if self._layers_with_gradients(Transfer("publish", layer), [layer], is_any=_is_there)[0]:
                self._relocator.relocate("publish", layer, moves, self._gradients(layer))
        if layer not in self._published:
            self._relocator.relocate("publish", layer, moves, self._weights(layer))
            self._published.add(layer)
        self._relocator.wait_written(Transfer("publish", layer, path=self._node.direct_path))

    def complete(self, layer: int) -> None:
        """Take a layer's gradients as complete: from here on nobody but this object changes them in this window.

        Called in the thread that computes gradients, before `collect_layer`, which another thread may call.
        """
        back, parameters = self._back(layer), list(self._node.homes[layer].tensors())
        written = sum(move.target == self._node.rank for move in back)
        if any(self._gradient_of(parameter) is not None for parameter in parameters):
            self._gradients(layer)
        found = [(parameter, self._gradient_of(parameter)) for parameter in parameters]
        self._collected[layer] = [_Written(p, g, _version_of(g, written)) for p, g in found if g is not None]

    def collect_layer(self, layer: int) -> None:
        """Bring a layer's weights, and its gradients if they are complete, to their owners. Every rank must call this.

        What is not complete is left to the window's end.
        """
        back, complete = self._back(layer), [layer] if layer in self._collected else []
        if any(self._layers_with_gradients(Transfer("collect", layer), complete, is_any=_is_there)):
            self._relocator.relocate("collect", layer, back, self._gradients(layer))
        if self._with_weights and layer in self._published:
            self._relocator.relocate("collect", layer, back, self._weights(layer))
            self._published.discard(layer)

    def end(self) -> None:
        """Bring to owners what is still with homes. Every rank of the group must call this."""
        moves, whole = self._open_moves(), Transfer("collect", path="p2p")
        facts = {"layers collected": _digest(self._collected), "layers published": _digest(self._published)}
        self._node.agree_equal(facts, whole)
        left = [layer for layer in range(len(moves)) if layer not in self._collected]
        has_gradients = dict(zip(left, self._layers_with_gradients(whole, left, is_any=_is_there), strict=True))
        for layer in range(len(moves)):
            back = self._back(layer)
            if has_gradients.get(layer, False):
                self._relocator.relocate("collect", layer, back, self._gradients(layer))
            if self._with_weights and layer in self._published:
                self._relocator.relocate("collect", layer, back, self._weights(layer))
        self._node.counters.collects += self._arrivals([self._back(layer) for layer in range(len(moves))])
        self._moves = None

    @contextmanager
    def canonical(self) -> Iterator[None]:
        """Hold the weights at their owners for the length of a `with` block. Every rank must enter and leave it."""
        moves = self._moves or []
        layers = [layer for layer in range(len(moves)) if layer in self._published]
        for layer in layers:
            self._relocator.relocate("collect", layer, self._back(layer), self._weights(layer))
        try:
            yield
        finally:
            for layer in layers:
                # Through the parameters, wherever the block has left them.
                homes = ExpertWeights(*(None if t is None else t.detach() for t in self._node.homes[layer]))
                self._relocator.relocate("publish", layer, moves[layer], homes)

    def moves_anything(self, layer: int) -> bool:
        """Whether any expert of a layer is displaced."""
        return bool(self._open_moves()[layer])

    def check_unchanged(self) -> None:
        """Raise if a gradient was changed after it had been collected."""
        for layer, known in self._collected.items():
            if any(one.is_changed(self._gradient_of(one.parameter)) for one in known):
                raise TransferError(
                    f"rank {self._node.rank}: a gradient of layer index {layer} was changed inside the window after "
                    "the layer's last backward, on its way to its owner; clip, scale and zero gradients after the "
                    "window has ended"
                )

    def _open_moves(self) -> list[list[Move]]:
        if self._moves is None:
            raise TransferError("no window is published; publish one before collecting")
        return self._moves

    def _back(self, layer: int) -> list[Move]:
        """A layer's moves from homes to owners."""
        return [move.back() for move in self._open_moves()[layer]]

    def _weights(self, layer: int) -> ExpertWeights:
        # Not through the parameters: a layer may let them into the graph before their weights come, and autograd would
        # hold that against it, though nothing is read until then.
        return self._node.home(self._node.rank, layer)

    def _gradients(self, layer: int) -> ExpertWeights:
        """The gradients of a layer, zeros where a rank has none and another has."""
        homes = self._node.homes[layer]
        if self._gradient_of is _grad_of:
            for tensor in homes.tensors():
                tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        found = ExpertWeights(*(None if t is None else self._gradient_of(t) for t in homes))
        if len(list(found.tensors())) < len(list(homes.tensors())):
            raise self._node.watchdog.abort(
                f"layer index {layer}: gradient_of finds no gradient for a parameter of this rank while another rank "
                "has one; allocate the accumulated gradients of all experts before the window opens"
            )
        return found

    def _layers_with_gradients(
        self, transfer: Transfer, layers: Sequence[int], *, is_any: Callable[[torch.Tensor | None], bool]
    ) -> list[bool]:
        """Whether any rank has gradients in each of some layers, the same on all ranks."""
        homes = [self._node.homes[layer] for layer in layers]
        mine = [int(any(is_any(self._gradient_of(t)) for t in weights.tensors())) for weights in homes]
        return [value > 0 for value in self._node.agree(mine, transfer)] if mine else []

    def _arrivals(self, moves: Sequence[Sequence[Move]]) -> int:
        return sum(m.target == self._node.rank and m.source != m.target for layer in moves for m in layer)

    def _check_plan(self, plan: Plan) -> None:
        layout, node = self._node.layout, self._node
        facts = {"layers": plan.home_LE.shape[0], "home slots": plan.home_slots, "nodes of ranks": plan.cluster.node_R}
        wanted = {"layers": layout.layers, "home slots": layout.home_slots, "nodes of ranks": node.node_R}
        for name, value in facts.items():
            if value != wanted[name]:
                raise TransferError(f"the plan has {name} {value}, the node's memory was opened for {wanted[name]}")
        if plan.persistent:
            raise TransferError(f"a plan of policy {plan.policy!r} is not executed: its homes are no permutation")


def _digest(layers: Iterable[int]) -> int:
    """A number that tells sets of layers apart."""
    return digest_moves([[Move(layer, 0, 0, 0, 0) for layer in sorted(layers)]])


def _version_of(gradient: torch.Tensor, written: int) -> int | None:
    """What torch will count once `written` slots of a gradient have been written."""
    is_part = gradient.untyped_storage().nbytes() > gradient.nbytes
    return None if is_part else gradient._version + written


def _grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


def _is_there(gradient: torch.Tensor | None) -> bool:
    return gradient is not None


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())
