"""`WindowEdges`: experts change place between owners and homes where a window begins and ends.

Publish brings weights from owners to homes; collect brings accumulated gradients from homes to owners, and the weights
where the parameter is its own master. Between the two, `canonical` lends the weights back to their owners.

Knows placements. Does not know how experts travel (`relocate`), nor replicas: whoever calls makes sure nobody pulls.

Invariants (asserted by the tests):
1. `collect` after `publish` gives every owner its weights back bit for bit, and its experts' gradients in place.
2. Parameters and existing gradient tensors stay the same objects.
3. Gradients from before the window are kept: what the window adds comes on top of them.
4. Inside `canonical` every owner holds its own experts; afterwards the homes do again, with what was written.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from equipoise.core.errors import TransferError
from equipoise.core.plan import Plan
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.node import NodeMemory
from equipoise.runtime.relocate import Move, Relocator, digest_moves, owner_to_home
from equipoise.runtime.watchdog import Transfer

GradientOf = Callable[[torch.Tensor], torch.Tensor | None]
"""Finds a parameter's accumulated gradient. Example: `lambda parameter: parameter.main_grad` (Megatron)."""


class WindowEdges:
    """Publishes weights to homes and collects gradients to owners, for all layers of one EP group."""

    def __init__(self, node: NodeMemory, *, gradient_of: GradientOf | None = None) -> None:
        """
        Args:
            gradient_of: where gradients lie, if not in `grad`; they must be there before the first window
        """
        self._node, self._gradient_of = node, gradient_of or _grad_of
        self._moves: list[list[Move]] | None = None
        self._relocator = Relocator(node)

    @property
    def is_published(self) -> bool:
        """Whether a window is open: homes hold the weights."""
        return self._moves is not None

    def publish(self, plan: Plan) -> None:
        """Bring weights from owners to homes. Every rank of the group must call this, with the same plan.

        Gradients that owners hold already travel too, so that those of the window are added to them.
        """
        if self._moves is not None:
            raise TransferError("a window is already published; collect it before the next")
        self._check_plan(plan)
        moves = [owner_to_home(plan, layer) for layer in range(self._node.layout.layers)]
        whole = Transfer("publish", path="p2p")
        self._node.agree_equal({"placement": digest_moves(moves)}, whole)
        has_gradients = self._layers_with_gradients(whole, is_any=_is_nonzero)
        for layer, layer_moves in enumerate(moves):
            self._relocator.relocate("publish", layer, layer_moves, self._weights(layer))
            if has_gradients[layer]:
                self._relocator.relocate("publish", layer, layer_moves, self._gradients(layer))
        self._node.counters.publishes += self._arrivals(moves)
        self._moves = moves

    def collect(self, *, with_weights: bool = True) -> None:
        """Bring gradients and weights to owners. Every rank of the group must call this.

        Args:
            with_weights: False only where the optimizer keeps masters of its own and overwrites every owned parameter
                before anyone reads one; then the unchanged weights need not travel back
        """
        if self._moves is None:
            raise TransferError("no window is published; publish one before collecting")
        back = [[move.back() for move in layer_moves] for layer_moves in self._moves]
        has_gradients = self._layers_with_gradients(Transfer("collect", path="p2p"), is_any=_is_there)
        for layer, layer_moves in enumerate(back):
            if has_gradients[layer]:
                self._relocator.relocate("collect", layer, layer_moves, self._gradients(layer))
            if with_weights:
                self._relocator.relocate("collect", layer, layer_moves, self._weights(layer))
        self._node.counters.collects += self._arrivals(back)
        self._moves = None

    @contextmanager
    def canonical(self) -> Iterator[None]:
        """Hold the weights at their owners for the length of a `with` block. Every rank must enter and leave it."""
        moves = self._moves or []
        for layer, layer_moves in enumerate(moves):
            self._relocator.relocate("collect", layer, [move.back() for move in layer_moves], self._weights(layer))
        try:
            yield
        finally:
            for layer, layer_moves in enumerate(moves):
                self._relocator.relocate("publish", layer, layer_moves, self._weights(layer))

    def _weights(self, layer: int) -> ExpertWeights:
        return ExpertWeights(*(None if t is None else t.detach() for t in self._node.homes[layer]))

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
        self, transfer: Transfer, *, is_any: Callable[[torch.Tensor | None], bool]
    ) -> list[bool]:
        """Whether any rank has gradients in a layer, the same on all ranks."""
        mine = [int(any(is_any(self._gradient_of(t)) for t in homes.tensors())) for homes in self._node.homes]
        return [value > 0 for value in self._node.agree(mine, transfer)]

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


def _grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


def _is_there(gradient: torch.Tensor | None) -> bool:
    return gradient is not None


def _is_nonzero(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())
