"""`Relocator`: experts change slots in place, within and across nodes, a layer at a time and as a whole.

Home slots are a permutation of owned slots, so no new parameters and no second copy of a model are needed. Inside a
node experts pass through the outboxes in memory that its ranks have mapped, across nodes by point-to-point between
buffers of one layer on the CPU.

Knows moves and tensors with a slot axis. Does not know why experts move, nor whether someone reads the slots meanwhile.

Steps of a relocation, called by all ranks of the group with the same moves:
1. Stage: copy what leaves to the own outbox; receive what comes from other nodes into the buffer. No slot is written.
   Wait until the device has done so.
2. Agree: all ranks compare the relocation's number, its moves and its bytes; nobody agrees before all has arrived.
3. Write: everything is now in memory that a failing rank cannot take away, so each rank only copies.

Invariants (asserted by the tests):
1. Every moved expert arrives bit for bit, every other slot keeps its bits, tensors stay the same objects.
2. A layer moves as a whole or not at all: a rank that fails before step 3 leaves the slots of all ranks untouched.
3. Every wait is bounded; an error names rank, layer, expert and path.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from equipoise.core.errors import TransferError
from equipoise.core.plan import Plan
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.connection import Message
from equipoise.runtime.copies import Copier, Copy, PlainCopies
from equipoise.runtime.layout import allocate_experts
from equipoise.runtime.node import NodeMemory
from equipoise.runtime.watchdog import WRITTEN, Transfer

EdgeKind = Literal["publish", "collect"]


class Move(NamedTuple):
    """One expert's way from a slot of a rank to a slot of a rank."""

    expert: int
    source: int
    source_slot: int
    target: int
    target_slot: int

    def back(self) -> "Move":
        """The same way in the other direction."""
        return Move(self.expert, self.target, self.target_slot, self.source, self.source_slot)


def owner_to_home(plan: Plan, layer: int) -> list[Move]:
    """Every expert of a layer that changes its slot when a window begins, ascending."""
    owned = plan.home_slots
    homes, slots = plan.home_LE[layer].tolist(), plan.home_slot_LE[layer].tolist()
    moves = [Move(e, *divmod(e, owned), home, slot) for e, (home, slot) in enumerate(zip(homes, slots, strict=True))]
    return [move for move in moves if move[1:3] != move[3:5]]


class Relocator:
    """Carries out moves on the tensors of one EP group."""

    def __init__(self, node: NodeMemory) -> None:
        """Allocate the buffer for what comes from other nodes, where there are any; on the CPU, as gloo wants it."""
        self._node = node
        self._number = int(node.words[node.rank][WRITTEN])
        self._buffers = self._receive_buffers()

    def relocate(self, kind: EdgeKind, layer: int, moves: Sequence[Move], tensors: ExpertWeights) -> None:
        """Move experts between slots in place: stage, agree, write. Every rank of the group must call this."""
        if not moves:
            return
        self._number += 1
        whole = Transfer(kind, layer=layer, path=self._node.direct_path)
        with torch.profiler.record_function(f"equipoise.{kind}"):
            self._node.wait_peers(WRITTEN, self._number - 1, whole)
            self._stage(moves, tensors)
            self._receive(kind, layer, moves, tensors)
            self._node.settle(whole)
            self._agree(whole._replace(path="p2p"), moves, tensors)
            self._write(moves, tensors)
            self._node.settle(whole)
        self._node.words[self._node.rank][WRITTEN] = self._number

    def wait_written(self, transfer: Transfer) -> None:
        """Wait until all ranks of the node have written what was relocated so far: then others may read it."""
        self._node.wait_peers(WRITTEN, self._number, transfer)

    def _stage(self, moves: Sequence[Move], tensors: ExpertWeights) -> None:
        outbox = self._node.outbox(self._node.rank, tensors.gate_up_SFD.dtype)
        for box, move in enumerate(self._leaving_inside(moves, self._node.rank)):
            copy_expert(outbox, box, tensors, move.source_slot)

    def _receive(self, kind: EdgeKind, layer: int, moves: Sequence[Move], tensors: ExpertWeights) -> None:
        """Send to and receive from other nodes, bounded; both sides go through the moves in the same order."""
        messages: list[Message] = []
        transfers: list[Transfer] = []
        buffer = self._buffer(tensors.gate_up_SFD.dtype)
        for move in moves:
            is_leaving, is_coming = move.source == self._node.rank, move.target == self._node.rank
            if not self.crosses(move) or not (is_leaving or is_coming):
                continue
            peer = move.target if is_leaving else move.source
            held = tensors if is_leaving else buffer
            slot = move.source_slot if is_leaving else move.target_slot
            for tensor in held.tensors():
                row = tensor.detach()[slot]
                row = row.contiguous().cpu() if is_leaving else row
                messages.append(Message(row, peer, is_leaving))
                transfers.append(Transfer(kind, layer, move.expert, "p2p", peer))
        if messages:
            self._node.finish(messages, transfers)

    def _agree(self, transfer: Transfer, moves: Sequence[Move], tensors: ExpertWeights) -> None:
        """Compare what must be the same on all ranks before any of them writes."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.tensors())
        facts = {"number": self._number, "moves": digest_moves([moves]), "bytes": num_bytes}
        self._node.agree_equal(facts, transfer)

    def _write(self, moves: Sequence[Move], tensors: ExpertWeights) -> None:
        dtype, me = tensors.gate_up_SFD.dtype, self._node.rank
        for source in self._node.peers:
            outbox = self._node.outbox(source, dtype)
            for box, move in enumerate(self._leaving_inside(moves, source)):
                if move.target == me:
                    copied = copy_expert(tensors, move.target_slot, outbox, box)
                    self._node.counters.arrive(self._node.direct_path, copied if source != me else 0)
        buffer = self._buffer(dtype)
        for move in moves:
            if move.target == me and self.crosses(move):
                copied = copy_expert(tensors, move.target_slot, buffer, move.target_slot)
                self._node.counters.arrive("p2p", copied)

    def _leaving_inside(self, moves: Sequence[Move], source: int) -> list[Move]:
        """Moves of a rank that stay in its node, in the order of its outbox."""
        return [move for move in moves if move.source == source and not self.crosses(move)]

    def crosses(self, move: Move) -> bool:
        """Whether an expert changes nodes."""
        return self._node.node_R[move.source] != self._node.node_R[move.target]

    def _receive_buffers(self) -> dict[torch.dtype, ExpertWeights]:
        layout, has_one_node = self._node.layout, len(set(self._node.node_R)) == 1
        slots = 0 if has_one_node else layout.home_slots
        return {dtype: allocate_experts(layout, slots, dtype) for dtype in {layout.dtype, layout.grad_dtype}}

    def _buffer(self, dtype: torch.dtype) -> ExpertWeights:
        if dtype not in self._buffers:
            raise TransferError(f"gradients are {dtype}; give grad_dtype={dtype} when the node's memory is opened")
        return self._buffers[dtype]


def copy_expert(target: ExpertWeights, target_slot: int, source: ExpertWeights, source_slot: int) -> int:
    """Copy one expert between slots, on the current stream, and return its bytes."""
    return copy_all(copies_of(target, target_slot, source, source_slot), PlainCopies())


def copies_of(target: ExpertWeights, target_slot: int, source: ExpertWeights, source_slot: int) -> list[Copy]:
    """The copies that bring one expert from a slot to a slot."""
    pairs = zip(target.tensors(), source.tensors(), strict=True)
    return [Copy(into[target_slot], out_of[source_slot]) for into, out_of in pairs]


def copy_all(copies: Sequence[Copy], copier: Copier) -> int:
    """Make copies on the current stream and return their bytes."""
    copier.copy(copies)
    return sum(int(copy.into.nbytes) for copy in copies)


def digest_moves(moves: Sequence[Sequence[Move]]) -> int:
    """62 bits of a hash, so that the number and its negative fit 64."""
    return int.from_bytes(hashlib.sha256(repr([list(m) for m in moves]).encode()).digest()[:8], "big") >> 2
