"""`WindowEdges`: experts change slots between owners and homes where a window begins and ends, a layer at a time.

Publish moves weights from owners to homes; collect moves accumulated gradients from homes to owners, and the weights
where the parameter is its own master. In between, `canonical` lends the weights back to their owners.

Home slots are a permutation of owned slots, so experts move in place (`Relocator`), in rounds of a few experts each:
1. Stage: copy what leaves to a box of the own outbox, or send it to a box on a rank of another node.
2. Agree, in the first round: all ranks compare the relocation's moves and bytes. Until here no slot is written.
3. Write: each rank copies from boxes to those of its slots whose own experts are in boxes or have moved on.
A rank that fails before the first write leaves the slots of all ranks untouched. A later failure raises on every rank
and says that the layer is in pieces: its weights are then to be had from a checkpoint alone.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch

from equipoise.core.errors import TransferError
from equipoise.core.plan import Plan
from equipoise.transfer.node import ExpertWeights, GradientOf, NodeMemory, SlotTensors, copy_expert
from equipoise.transfer.waits import STAGED, WRITTEN, Message, Transfer

EdgeKind = Literal["publish", "collect"]

_GRAD_OF: GradientOf = attrgetter("grad")


class Move(NamedTuple):
    """One expert's move from a slot of a rank to a slot of a rank."""

    expert: int
    source: int
    source_slot: int
    target: int
    target_slot: int


def owner_to_home(plan: Plan, layer: int) -> list[Move]:
    """Every expert of a layer that changes its slot when a window begins, ascending."""
    owned = plan.home_slots
    homes, slots = plan.home_LE[layer].tolist(), plan.home_slot_LE[layer].tolist()
    moves = [Move(e, *divmod(e, owned), home, slot) for e, (home, slot) in enumerate(zip(homes, slots, strict=True))]
    return [move for move in moves if move[1:3] != move[3:5]]


def digest(value: object) -> int:
    """62 bits of a hash of nested lists of numbers, so that the result and its negative fit 64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 2


class Boxed(NamedTuple):
    """A move, and the box in which its expert waits: on its source inside a node, on its target across nodes."""

    move: Move
    box: int


class Round(NamedTuple):
    """What is staged and then written before boxes are filled again; a box stays full until it is written."""

    staged: list[Boxed]
    written: list[Boxed]


def plan_rounds(places: Mapping[Move, Hashable], *, boxes: int) -> list[Round]:
    """Divide a layer's moves into rounds, so that no place needs more than `boxes` boxes; the same on all ranks.

    Moves form cycles: what moves to a slot makes the slot's own expert move. A cycle's first expert is staged, and
    stays in its box. Its slot is then free for the expert that moves there, whose slot is free for the next, and so on
    backwards along the cycle. With the last expert the first one's target is free, and its box is written.

    Why no slot is overwritten too early: an expert is written in the round in which its target's own expert is staged,
    or later, and a round stages before it writes. Why this ends: a cycle that keeps a box beyond its round leaves its
    place one other box, so the cycle that has begun first stages at least one expert in every round.

    Args:
        places: where the box of each move is
        boxes: at least 2, or as many as a rank has slots
    """
    # Step 1: cycles, each move behind the one that takes its slot; the last one of a list begins.
    into, cycles = {move[3:5]: move for move in places}, list[list[Move]]()
    while into:
        cycle = [into.pop(next(iter(into)))]
        while cycle[-1][1:3] in into:
            cycle.append(into.pop(cycle[-1][1:3]))
        cycles.append(cycle[::-1])
    # Step 2: rounds.
    free: defaultdict[Hashable, list[int]] = defaultdict(lambda: list(range(boxes)))
    kept: Counter[Hashable] = Counter()
    waiting = [(cycle, list[Boxed]()) for cycle in cycles]
    rounds: list[Round] = []
    while waiting:
        now = Round([], [])
        # Those that have begun come first: they keep boxes.
        for cycle, first in sorted(waiting, key=lambda one: not one[1]):
            needed = Counter(places[move] for move in cycle)
            is_whole = all(len(free[place]) >= count for place, count in needed.items())
            if not first and not is_whole and kept[places[cycle[-1]]] + 1 >= boxes:
                continue
            while cycle and free[places[cycle[-1]]]:
                boxed = Boxed(cycle[-1], free[places[cycle[-1]]].pop(0))
                cycle.pop()
                now.staged.append(boxed)
                if first:
                    now.written.append(boxed)
                else:
                    first.append(boxed)
                    kept[places[boxed.move]] += 1
            if not cycle and first:
                now.written.append(first[0])
                kept[places[first[0].move]] -= 1
        assert now.staged, f"{boxes} boxes are too few"
        for move, box in now.written:
            free[places[move]].append(box)
        waiting = [one for one in waiting if one[0]]
        rounds.append(now)
    return rounds


class Relocator:
    """Carries out moves on the tensors of one EP group.

    Inside a node experts pass through the outboxes, which its ranks have mapped; across nodes they are sent to a
    landing of their target.
    """

    def __init__(self, node: NodeMemory) -> None:
        self._node, self._boxes = node, node.layout.boxes
        self.number = int(node.cells[node.rank][WRITTEN])
        """Rounds begun so far."""

    def relocate(self, kind: EdgeKind, layer: int, moves: Sequence[Move], tensors: ExpertWeights) -> None:
        """Move experts between slots in place: stage, agree, write. Every rank of the group must call this."""
        node, whole = self._node, Transfer(kind, layer=layer, path=self._node.direct_path)
        places: dict[Move, Hashable] = {
            move: ("landing", move.target) if self.crosses(move) else ("outbox", move.source) for move in moves
        }
        rounds = plan_rounds(places, boxes=self._boxes)
        with torch.profiler.record_function(f"equipoise.{kind}"):
            for at, now in enumerate(rounds):
                self.number += 1
                try:
                    # Boxes are free once every rank has written what it read from them.
                    node.watchdog.wait_peers(WRITTEN, self.number - 1, whole)
                    self._stage(whole, now.staged, tensors)
                    node.synchronize(whole)
                    if at == 0:
                        self._agree(whole._replace(path="p2p"), moves, tensors)
                    node.cells[node.rank][STAGED] = self.number
                    node.watchdog.wait_peers(STAGED, self.number, whole)
                    self._write(now.written, tensors)
                    node.synchronize(whole)
                except TransferError as error:
                    if at == 0:
                        raise
                    raise TransferError(
                        f"{error}; layer index {layer} is in pieces, {at} of {len(rounds)} rounds of its {kind} were "
                        "written: load the last checkpoint"
                    ) from error
                node.cells[node.rank][WRITTEN] = self.number

    def crosses(self, move: Move) -> bool:
        """Whether an expert changes nodes."""
        return self._node.node_R[move.source] != self._node.node_R[move.target]

    def _stage(self, whole: Transfer, staged: Sequence[Boxed], tensors: ExpertWeights) -> None:
        """Copy to the outbox what stays in the node, and send to and receive from other nodes."""
        node, dtype = self._node, tensors.gate_up_SFD.dtype
        outbox, landing = node.outbox(node.rank, dtype), node.landings[dtype]
        messages: list[Message] = []
        transfers: list[Transfer] = []
        # Both sides go through the moves in the same order.
        for move, box in staged:
            is_leaving = move.source == node.rank
            if not self.crosses(move):
                if is_leaving:
                    copy_expert(outbox, box, tensors, move.source_slot)
            elif is_leaving or move.target == node.rank:
                experts, slot = (tensors, move.source_slot) if is_leaving else (landing, box)
                peer = move.target if is_leaving else move.source
                messages += node.messages(experts, slot, peer=peer, is_leaving=is_leaving)
                name = whole._replace(expert=move.expert, path="p2p", peer=peer)
                transfers += [name] * (len(messages) - len(transfers))
        if messages:
            node.exchange(messages, transfers)

    def _agree(self, transfer: Transfer, moves: Sequence[Move], tensors: ExpertWeights) -> None:
        """Compare what must be the same on all ranks before any of them writes."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.tensors())
        facts = {"number": self.number, "moves": digest(moves), "bytes": num_bytes}
        self._node.agreement.require_equal(facts, transfer)

    def _write(self, written: Sequence[Boxed], tensors: ExpertWeights) -> None:
        """Copy to this rank's slots what its node's outboxes and its landing hold for it."""
        node, dtype = self._node, tensors.gate_up_SFD.dtype
        for move, box in written:
            if move.target != node.rank:
                continue
            is_across = self.crosses(move)
            boxes = node.landings[dtype] if is_across else node.outbox(move.source, dtype)
            copied = copy_expert(tensors, move.target_slot, boxes, box)
            node.counters.arrive("p2p" if is_across else node.direct_path, copied if move.source != node.rank else 0)


class _KnownGradient(NamedTuple):
    """A gradient that nobody but autograd and this room may change in a window."""

    parameter: torch.Tensor
    gradient: Any
    version: int | None
    """How often torch has seen it written; None where there is nothing to count, or
    the gradient is part of a larger buffer, whose parts torch counts together."""

    @classmethod
    def of(cls, parameter: torch.Tensor, gradient: Any) -> "_KnownGradient":
        if gradient is None or isinstance(gradient, SlotTensors):
            return cls(parameter, gradient, None)
        is_part = gradient.untyped_storage().nbytes() > gradient.nbytes
        return cls(parameter, gradient, None if is_part else gradient._version)

    def is_changed(self, now: torch.Tensor | None, *, writes: int = 0) -> bool:
        """Whether another gradient is in its place, or it was written otherwise than `writes` times since."""
        if now is None or self.version is None or now is not self.gradient:
            return now is not self.gradient
        return bool(now._version != self.version + writes)


class WindowEdges:
    """Publishes weights to homes and collects gradients to owners, for all layers of one EP group."""

    def __init__(self, node: NodeMemory, *, gradient_of: GradientOf | None = None, names: Sequence[str] = ()) -> None:
        """
        Args:
            gradient_of: where gradients lie, if not in `grad`; they must be there before the first window
            names: what errors call the layers; left out: by index
        """
        self._node, self._gradient_of = node, gradient_of or _GRAD_OF
        self._names: dict[int, str] = {}
        """By id of a parameter."""
        for layer, weights in enumerate(node.homes):
            for field, tensor in zip(weights._fields, weights, strict=True):
                title = f"`{names[layer]}`" if names else f"layer index {layer}"
                self._names[id(tensor)] = f"{title} {field.rpartition('_')[0]}"
        self._accumulated: dict[int, _KnownGradient] = {}
        """By id of a parameter: its gradient as autograd left it."""
        self._changed: list[str] = []
        """Parameters whose gradients someone else has changed in the window."""
        self._removers: list[Any] = []
        self._lent: list[torch.Tensor] = []
        """Frozen parameters that hold zeros for their layer's moves: an optimizer would decay what has a gradient."""
        self._moves: list[list[Move]] | None = None
        self._back: list[list[Move]] = []
        """By layer: experts that move from owners to homes, and back."""
        self._with_weights = True
        self._published: set[int] = set()
        self._collected: dict[int, list[_KnownGradient]] = {}
        self._relocator = Relocator(node)
        self.path = node.direct_path
        """What counters call the path that experts take at this window's edges."""

    def begin(self, plan: Plan, *, with_weights: bool = True) -> None:
        """Take a plan's placement and move gradients that owners hold already, so that the window's are added to them.

        No weights move yet. Every rank of the group must call this, with the same plan.

        Args:
            with_weights: False only where the optimizer keeps masters of its own and overwrites every owned parameter
                before anyone reads one; then the unchanged weights need not travel back
        """
        node, layout = self._node, self._node.layout
        if self._moves is not None:
            raise TransferError("a window is already published; collect it before the next")
        facts = {"layers": plan.home_LE.shape[0], "home slots": plan.home_slots, "nodes of ranks": plan.cluster.node_R}
        wanted = {"layers": layout.layers, "home slots": layout.home_slots, "nodes of ranks": node.node_R}
        for name, value in facts.items():
            if value != wanted[name]:
                raise TransferError(f"the plan has {name} {value}, the node's memory was opened for {wanted[name]}")
        if plan.persistent:
            raise TransferError(f"a plan of policy {plan.policy!r} is not executed: its homes are no permutation")
        moves, whole = [owner_to_home(plan, layer) for layer in range(layout.layers)], Transfer("publish", path="p2p")
        node.agreement.require_equal({"placement": digest(moves)}, whole)
        has_gradients = self._layers_with_gradients(whole, range(len(moves)), is_nonzero=True)
        for layer, layer_moves in enumerate(moves):
            if has_gradients[layer]:
                self._relocator.relocate("publish", layer, layer_moves, self._gradients(layer))
        every = [move for layer_moves in moves for move in layer_moves if move.source != move.target]
        node.counters.publishes += sum(move.target == node.rank for move in every)
        self.path = "p2p" if any(self._relocator.crosses(move) for move in every) else node.direct_path
        self._moves, self._with_weights = moves, with_weights
        self._back = [[Move(m.expert, *m[3:5], *m[1:3]) for m in layer_moves] for layer_moves in moves]
        self._published, self._collected = set(), {}
        self.unfollow()
        if self._gradient_of is _GRAD_OF:
            for layer in (layer for layer, layer_moves in enumerate(moves) if layer_moves):
                trained = [tensor for tensor in node.homes[layer].tensors() if tensor.requires_grad]
                self._removers += [tensor.register_post_accumulate_grad_hook(self._follow) for tensor in trained]

    def unfollow(self) -> None:
        """Stop following what happens to gradients."""
        for remover in self._removers:
            remover.remove()
        self._removers, self._accumulated, self._changed = [], {}, []

    def _follow(self, parameter: torch.Tensor) -> None:
        """Called by autograd when it has added to a gradient: one write since it last did, or someone else wrote."""
        before = self._accumulated.get(id(parameter))
        if before is not None and before.is_changed(parameter.grad, writes=1):
            self._changed.append(self._names[id(parameter)])
        self._accumulated[id(parameter)] = _KnownGradient.of(parameter, parameter.grad)

    def publish_layer(self, layer: int) -> None:
        """Move a layer's weights to its homes, and its gradients if they were collected. Every rank must call this."""
        assert self._moves is not None, "layers are published in a window that has begun"
        moves = self._moves[layer]
        if layer in self._collected:
            self._note_changes(self._collected.pop(layer))
            if self._layers_with_gradients(Transfer("publish", layer), [layer])[0]:
                self._relocator.relocate("publish", layer, moves, self._gradients(layer))
        if layer not in self._published:
            # Not through the parameters: a layer may let them into the graph before their weights arrive, and autograd
            # would count that as a change in place, though nothing reads them until then.
            self._relocator.relocate("publish", layer, moves, self._node.home[self._node.rank][layer])
            self._published.add(layer)
        # Others may read the layer once all ranks of the node have written everything relocated so far.
        whole = Transfer("publish", layer, path=self._node.direct_path)
        self._node.watchdog.wait_peers(WRITTEN, self._relocator.number, whole)

    def complete(self, layer: int) -> None:
        """Take a layer's gradients as complete: from now on nobody but this object changes them in this window.

        Called in the thread that computes gradients, before `collect_layer`, which another thread may call.
        """
        parameters = list(self._node.homes[layer].tensors())
        followed = [self._accumulated.pop(id(parameter), None) for parameter in parameters]
        self._note_changes(known for known in followed if known is not None)
        if any(self._gradient_of(parameter) is not None for parameter in parameters):
            self._gradients(layer)
        self._collected[layer] = [_KnownGradient.of(p, self._gradient_of(p)) for p in parameters]

    def collect_layer(self, layer: int) -> None:
        """Move a layer's weights, and its gradients if they are complete, to their owners. Every rank must call this.

        `end` collects gradients that are not complete yet.
        """
        back, complete = self._back[layer], [layer] if layer in self._collected else []
        if any(self._layers_with_gradients(Transfer("collect", layer), complete)):
            self._relocator.relocate("collect", layer, back, self._gradients(layer))
            # Zeros that stand for a gradient which only other ranks have are no change.
            self._collected[layer] = [
                known if known.gradient is not None else _KnownGradient.of(known.parameter, known.parameter.grad)
                for known in self._collected[layer]
            ]
        if self._with_weights and layer in self._published:
            self._relocator.relocate("collect", layer, back, self._node.home[self._node.rank][layer])
            self._published.discard(layer)

    def end(self) -> None:
        """Move to owners whatever is still with homes. Every rank of the group must call this."""
        if self._moves is None:
            raise TransferError("no window is published; publish one before collecting")
        moves, whole = self._moves, Transfer("collect", path="p2p")
        collected, published = sorted(self._collected), sorted(self._published)
        facts = {"layers collected": digest(collected), "layers published": digest(published)}
        self._node.agreement.require_equal(facts, whole)
        left = [layer for layer in range(len(moves)) if layer not in self._collected]
        has_gradients = dict(zip(left, self._layers_with_gradients(whole, left), strict=True))
        for layer in range(len(moves)):
            back = self._back[layer]
            if has_gradients.get(layer, False):
                self._relocator.relocate("collect", layer, back, self._gradients(layer))
            if self._with_weights and layer in self._published:
                self._relocator.relocate("collect", layer, back, self._node.home[self._node.rank][layer])
        arriving = [m for back in self._back for m in back if m.target == self._node.rank and m.source != m.target]
        self._node.counters.collects += len(arriving)
        for frozen in self._lent:
            frozen.grad = None
        self._moves, self._lent = None, []
        self.unfollow()

    @contextmanager
    def canonical(self) -> Iterator[None]:
        """Hold the weights at their owners for the length of a `with` block. Every rank must enter and leave it."""
        moves = self._moves or []
        layers = [layer for layer in range(len(moves)) if layer in self._published]
        for layer in layers:
            self._relocator.relocate("collect", layer, self._back[layer], self._node.home[self._node.rank][layer])
        try:
            yield
        finally:
            for layer in layers:
                # Through the parameters, wherever the block has left them.
                homes = self._node.homes[layer].map(lambda tensor: tensor.detach())
                self._relocator.relocate("publish", layer, moves[layer], homes)

    def moves_anything(self, layer: int) -> bool:
        """Whether any expert of a layer is displaced."""
        return bool(self._moves and self._moves[layer])

    def check_unchanged(self) -> None:
        """Raise if a parameter was moved in the window, or someone else than autograd changed a gradient."""
        self._node.check()
        self._note_changes([*self._accumulated.values(), *chain.from_iterable(self._collected.values())])
        if self._changed:
            raise TransferError(
                f"the gradient of {self._changed[0]} was changed or replaced inside the window, where experts of its "
                "layer are away from their owners; clip, scale, zero and assign gradients after the window has ended"
            )

    def _note_changes(self, known: Iterable[_KnownGradient]) -> None:
        """Note the parameters whose gradients are not as they are known."""
        changed = (one for one in known if one.is_changed(self._gradient_of(one.parameter)))
        self._changed += [self._names[id(one.parameter)] for one in changed]

    def _gradients(self, layer: int) -> ExpertWeights:
        """The gradients of a layer, zeros where a rank has none and another has."""
        homes = self._node.homes[layer]
        if self._gradient_of is _GRAD_OF:
            for tensor in homes.tensors():
                if tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)
                    self._lent += [] if tensor.requires_grad else [tensor]
        found = homes.map(self._gradient_of)
        if len(list(found.tensors())) < len(list(homes.tensors())):
            raise self._node.watchdog.abort(
                f"layer index {layer}: gradient_of finds no gradient for a parameter of this rank while another rank "
                "has one; allocate the accumulated gradients of all experts before the window opens"
            )
        return found

    def _layers_with_gradients(
        self, transfer: Transfer, layers: Sequence[int], *, is_nonzero: bool = False
    ) -> list[bool]:
        """Whether any rank has gradients in each of some layers, nonzero ones if asked for; the same on all ranks."""
        mine: list[int] = []
        for layer in layers:
            gradients = [self._gradient_of(tensor) for tensor in self._node.homes[layer].tensors()]
            mine.append(any(g is not None and (not is_nonzero or bool(g.any())) for g in gradients))
        return [value > 0 for value in self._node.agreement.largest(mine, transfer)] if mine else []
