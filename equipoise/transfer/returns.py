"""`Mailboxes`: replica gradients on their way home, handed over in both directions by a tag in shared memory.

Each rank has slots x (depth + 1) mailboxes of one expert each, which only it fills and only the expert's home empties.
A mailbox's tag is 0 while it is free; otherwise it names the gradient that lies in it, complete:
    bits 40..62  window, counted from 1
    bits 28..39  micro-step
    bits 16..27  layer index
    bits  0..15  expert
A negative tag names the gradient that is being written. So a home finds what it waits for by name, whatever the order
in which others fill their boxes, and a box is filled again only once its home has set the tag back to 0. On a device a
tag is written by the stream that copied or added (`NodeMemory.write_behind`), so that handing in does not wait for the
device. The home's thread does wait for the tag: until then it feeds no more layers.

Where ranks read each other's rows in mapped memory, nobody waits and there are no tags. Steps of the rows order the
boxes (`mapped_rows`): a home reads behind a step that the replica's rank ended after it had filled its boxes, and a box
is filled again behind a step that its home ended after it had read it. Boxes are then taken in turn, so that a home
knows from the plan where a gradient lies.

An expert's returned gradients are added in ascending rank order, each exactly once. Where gradients accumulate in a
wider dtype than they are computed in, they are added to the accumulated gradient, so that no sum is rounded to the
narrower one; what the replica itself rounded is lost before.

A home in another node cannot map a mailbox. Its gradients are sent (`FarReturns`), on connections of their own, because
training hands them in while another thread publishes or collects layers.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from operator import contains
from typing import Any, NamedTuple

import numpy as np
import torch

from equipoise.core.errors import TransferError
from equipoise.core.plan import Plan, Replica, Visit
from equipoise.transfer.mapped_rows import MappedRows
from equipoise.transfer.nccl import NcclGroup
from equipoise.transfer.node import ExpertWeights, GradientOf, NodeMemory, copy_expert
from equipoise.transfer.pulls import needs_of
from equipoise.transfer.waits import REACHED, TAGS, Mark, Message, OwnGroup, Transfer


def far_replicas(plan: Plan, micro_step: int, layer: int) -> list[Replica]:
    """Replicas outside their home's node, by expert and then by rank; the same on all ranks."""
    node_R, home_E = plan.cluster.node_R, plan.home_LE[layer]
    return sorted(r for r in plan.replicas(micro_step, layer) if node_R[r.rank] != node_R[home_E[r.expert]])


def returns_far(plan: Plan) -> bool:
    """Whether any gradient of this window returns to another node."""
    entries = np.ndindex(*plan.ns_ML.shape) if plan.loads.stage == "update" else ()
    return any(far_replicas(plan, *entry) for entry in entries)


class Sent(NamedTuple):
    """What one rank sends and receives for one (micro-step, layer)."""

    messages: list[Message]
    transfers: list[Transfer]
    works: list[Any]
    """One per message by gloo, one for all by NCCL."""
    arriving: dict[Replica, torch.Tensor]
    """All numbers of a gradient in a row, by the replica that computed them."""


class FarReturns:
    """Gradients of replicas to homes in other nodes: sent when they are handed in, waited for by whoever adds them.

    So they travel while attention runs backward. A gradient is one message. Both ranks of a pair go through the far
    replicas of a (micro-step, layer) in the same order, and through layers as their all-to-alls do.
    """

    def __init__(self, node: NodeMemory) -> None:
        """Connect. Every rank of the group must call this."""
        self._node, timeout_s = node, 2 * node.options.timeout_s
        self._gloo = OwnGroup(node.group, timeout_s=timeout_s)
        self._nccl: NcclGroup | None = None
        if node.transport == "nccl":
            wait = partial(node.watchdog.wait, transfer=Transfer("return", path="p2p"))
            self._nccl = NcclGroup(node.group, device=node.device, node_R=node.node_R, timeout_s=timeout_s, wait=wait)
        self._under_way: dict[tuple[int, int], Sent] = {}

    def start(self, plan: Plan, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Send this rank's far gradients, in slot order, and receive those for its homes; waits for neither."""
        node, needs = self._node, needs_of(plan, Visit(micro_step, "backward", layer), rank=self._node.rank)
        slots, sent = {need.expert: slot for slot, need in enumerate(needs)}, Sent([], [], [], {})
        device, dtype = "cpu" if self._nccl is None else node.device, node.layout.return_dtype
        for replica in far_replicas(plan, micro_step, layer):
            home = int(plan.home_LE[layer, replica.expert])
            if node.rank not in (replica.rank, home):
                continue
            is_leaving = replica.rank == node.rank
            if is_leaving:
                parts = [tensor[slots[replica.expert]].reshape(-1) for tensor in gradients.tensors()]
                numbers = torch.cat(parts).to(device, dtype)
            else:
                count = sum(int(tensor[0].numel()) for tensor in node.homes[layer].tensors())
                numbers = sent.arriving[replica] = torch.empty(count, device=device, dtype=dtype)
            peer = home if is_leaving else replica.rank
            sent.messages.append(Message(numbers, peer, is_leaving))
            sent.transfers.append(Transfer("return", layer, replica.expert, "p2p", peer))
        if sent.messages:
            node.watchdog.check(sent.transfers[0])
            start = self._gloo.start if self._nccl is None else self._nccl.start
            sent.works.extend(start(sent.messages))
            self._under_way[micro_step, layer] = sent

    def finish(self, micro_step: int, layer: int) -> dict[Replica, torch.Tensor]:
        """Wait, bounded, for what was started, and return what arrived."""
        sent, node = self._under_way.pop((micro_step, layer), None), self._node
        if sent is None:
            return {}
        end, transfer = time.monotonic() + node.options.timeout_s, sent.transfers[0]
        try:
            if self._nccl is not None:
                # One batch has one end, so an error names no expert.
                transfer = transfer._replace(expert=None, peer=None)
                self._nccl.finish(sent.works[0], partial(node.watchdog.wait, transfer=transfer))
                return sent.arriving
            for work, transfer in zip(sent.works, sent.transfers, strict=True):  # noqa: B007  # named by the error below
                work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
        except TransferError:
            raise
        except RuntimeError as error:
            self._gloo.abandon(sent.works)
            raise node.watchdog.lost(transfer, error) from error
        return sent.arriving

    def close(self) -> None:
        """Let go of the connections. Closing twice is allowed."""
        self._under_way.clear()
        self._gloo.close()
        if self._nccl is not None:
            self._nccl.close()


@dataclass(slots=True)
class BoxTurns:
    """Whose turn it is to use which mailboxes of every rank, and the steps of mapped rows that come in between.

    All ranks go through backward in the same order, so all count alike, and all end a step where one is missing: in
    front of a layer whose input needs no gradient, or one whose rows went by collectives.
    """

    rows: MappedRows
    read_at: list[int]
    """Last step before each set of boxes was read; layers use the sets one after the other. -1: never read."""
    filled: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Turn and last step of each (micro-step, layer) whose boxes are filled and not read yet."""
    next_turn: int = 0

    def fill(self, micro_step: int, layer: int) -> int:
        """Return the set of boxes to fill; what the current stream does next comes behind its last reader."""
        turn, self.next_turn = self.next_turn, (self.next_turn + 1) % len(self.read_at)
        if turn in (kept for kept, _ in self.filled.values()):
            raise TransferError(
                f"micro-step {micro_step}, layer index {layer}: gradients of replicas of {len(self.filled)} layers "
                "are computed and not added yet; let each layer's backward pass end before the next layers'"
            )
        if self.read_at[turn] == self.rows.number:
            self.rows.end(layer=layer)
        self.filled[micro_step, layer] = turn, self.rows.number
        return turn

    def read(self, micro_step: int, layer: int) -> int:
        """Return the set of boxes to read; what the current stream does next comes behind all that filled it."""
        turn, filled_at = self.filled.pop((micro_step, layer))
        if filled_at == self.rows.number:
            self.rows.end(layer=layer)
        self.read_at[turn] = self.rows.number
        return turn


class Mailboxes:
    """The returns of one rank, out and in."""

    def __init__(self, node: NodeMemory, *, gradient_of: GradientOf | None = None) -> None:
        """
        Args:
            gradient_of: where gradients accumulate, if not in `grad`
        """
        self._node, self._gradient_of = node, gradient_of
        self._tags = {rank: cells[TAGS:] for rank, cells in node.cells.items()}
        self._tagged = REACHED
        """The last tag that this rank's stream writes."""
        self._handed_in: set[tuple[int, int]] = set()
        self._window = 0
        self._far: FarReturns | None = None
        self._turns: BoxTurns | None = None

    def open_window(self, plan: Plan, *, number: int, rows: MappedRows | None = None) -> None:
        """Begin a window, counted from 1, whose gradients all have a tag. Every rank of the group must call this.

        Args:
            rows: whose steps order the boxes; None: tags do
        """
        loads = plan.loads
        counts = {"micro-steps": loads.num_micro_steps, "layers": loads.num_layers, "experts": loads.num_experts}
        for (name, count), most in zip(counts.items(), (2**12, 2**12, 2**16), strict=True):
            if count > most:
                raise TransferError(f"a window of {count:,} {name}; tags name at most {most:,}: cut it into several")
        if number >= 2**23:
            raise TransferError(f"window {number:,}; tags count fewer than {2**23:,}: open the balancer anew")
        self._window, self._handed_in = number, set()
        self._turns = None if rows is None else BoxTurns(rows, [-1] * (self._node.layout.depth + 1))
        if self._far is None and plan.cross_node and returns_far(plan):
            # Bounded, unlike what follows: all ranks are here from now on.
            self._node.agreement.largest([0], Transfer("return", path="p2p"))
            self._far = FarReturns(self._node)

    def hand_in(self, plan: Plan, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Copy the gradients of this rank's replicas into free boxes, waiting for free ones.

        A box is free once its home has read it. Homes read in the order of the backward pass, as boxes are filled, so
        the wait is for layers behind this one and never for this one.
        """
        needs = needs_of(plan, Visit(micro_step, "backward", layer), rank=self._node.rank)
        if gradients.num_slots != len(needs):
            raise self._node.watchdog.abort(
                f"micro-step {micro_step}, layer index {layer}: {gradients.num_slots} gradients handed in for "
                f"{len(needs)} replicas"
            )
        if (micro_step, layer) in self._handed_in:
            # Not by `abort`: every rank comes here, with replicas or without, and all shall say the same.
            raise TransferError(
                f"micro-step {micro_step}, layer index {layer}: gradients handed in twice in one window; run a layer "
                "once per micro-step, and backward once per forward, without retain_graph"
            )
        self._handed_in.add((micro_step, layer))
        if plan.cross_node and plan.loads.stage == "recompute":
            self._check_same_node([need.source for need in needs], micro_step, layer)
        if self._far is not None and plan.cross_node:
            self._far.start(plan, micro_step, layer, gradients)
        if self._turns is not None:
            first = self._node.layout.slots * self._turns.fill(micro_step, layer)
            for slot, need in enumerate(needs):
                if need.source in self._node.peers:
                    copy_expert(self._node.mailboxes[self._node.rank], first + slot, gradients, slot)
            return
        waited = 0.0
        boxes, tags = self._node.mailboxes[self._node.rank], self._tags[self._node.rank]
        for slot, need in enumerate(needs):
            if need.source not in self._node.peers:
                continue
            transfer = Transfer("return", layer, need.expert, self._node.direct_path, need.source)
            waited += self._node.watchdog.wait(partial(contains, tags, 0), transfer)
            box, name = int(np.flatnonzero(tags == 0)[0]), self._name(micro_step, layer, need.expert)
            tags[box] = -name
            copy_expert(boxes, box, gradients, slot)
            # Last, because the home reads the box as soon as the tag names it.
            self._tag(tags, box, name)
        if self._node.device.type == "cpu":
            self._node.counters.wait(self._node.direct_path, waited)

    def collect(self, plan: Plan, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Wait for what replicas of this rank's home experts returned, and add it in place."""
        node, homes = self._node, plan.home_LE[layer]
        mine = sorted(r for r in plan.replicas(micro_step, layer) if homes[r.expert] == node.rank)
        if plan.cross_node and plan.loads.stage == "recompute":
            self._check_same_node([replica.rank for replica in mine], micro_step, layer)
        arrived: dict[Replica, torch.Tensor] = {}
        if self._far is not None and plan.cross_node:
            with node.counters.timed("p2p", node.device):
                arrived = self._far.finish(micro_step, layer)
        # Returned gradients are added to the new ones, or to those that accumulate where these are wider.
        totals = list(gradients.tensors())
        for at, parameter in enumerate(node.homes[layer].tensors()):
            kept = None if self._gradient_of is None else self._gradient_of(parameter)
            if kept is not None and kept.dtype.itemsize > totals[at].dtype.itemsize:
                totals[at] = kept
        first = 0 if self._turns is None else node.layout.slots * self._turns.read(micro_step, layer)
        for replica in mine:
            expert, rank = replica
            slot, added = int(plan.home_slot_LE[layer, expert]), 0
            if replica in arrived:
                self._add(totals, slot, arrived[replica])
                continue
            tags = self._tags[rank]
            if self._turns is not None:
                needs = needs_of(plan, Visit(micro_step, "backward", layer), rank=rank)
                box = first + [need.expert for need in needs].index(expert)
            else:
                name = self._name(micro_step, layer, expert)
                transfer = Transfer("return", layer, expert, node.direct_path, rank)
                with node.counters.timed(node.direct_path, node.device):
                    node.watchdog.wait(partial(contains, tags, name), transfer)
                box = int(np.flatnonzero(tags == name)[0])
            for total, returned in zip(totals, node.mailboxes[rank].tensors(), strict=True):
                total[slot].add_(returned[box])
                added += int(returned[box].nbytes)
            if self._turns is None:
                # Last, because the replica's rank fills the box again as soon as it is free.
                self._tag(tags, box, 0)
            node.counters.arrive(node.direct_path, added)
            node.counters.returns += 1

    def _add(self, totals: list[torch.Tensor], slot: int, numbers: torch.Tensor) -> None:
        """Add a gradient that came from another node, all its numbers in a row."""
        sizes, node = [int(total[slot].numel()) for total in totals], self._node
        for total, part in zip(totals, numbers.to(node.device).split(sizes), strict=True):
            total[slot].add_(part.view(total[slot].shape))
        node.counters.arrive("p2p", numbers.nbytes)
        node.counters.returns += 1

    def finish(self) -> None:
        """Wait until all tags so far have been set."""
        self._node.watchdog.wait(self._tagged.is_reached, Transfer("return", path=self._node.direct_path))

    def close(self) -> None:
        """Let go of the tags. Closing twice is allowed."""
        self._tags = {}
        if self._far is not None:
            self._far.close()

    def check_empty(self) -> None:
        """Raise if a gradient of this rank was never read; called once all ranks have finished the window."""
        for micro_step, layer in () if self._turns is None else self._turns.filled:
            # The same on all ranks, unlike tags.
            raise TransferError(
                f"the returned gradients of layer index {layer}, micro-step {micro_step} were never collected by "
                "their homes; every backward pass of the window must run on all ranks"
            )
        occupied = self._tags[self._node.rank]
        left = occupied[occupied != 0]
        if len(left):
            expert, layer, micro_step = int(left[0]) & 0xFFFF, int(left[0]) >> 16 & 0xFFF, int(left[0]) >> 28 & 0xFFF
            raise self._node.watchdog.abort(
                f"the returned gradient of expert {expert}, layer index {layer}, micro-step {micro_step} was never "
                "collected by its home; every backward pass of the window must run on all ranks"
            )

    def _check_same_node(self, ranks: Iterable[int], micro_step: int, layer: int) -> None:
        """Refuse returns across nodes in a recompute window, which must not run backward."""
        others = sorted(set(ranks) - set(self._node.peers))
        if others:
            raise self._node.watchdog.abort(
                f"micro-step {micro_step}, layer index {layer}: gradients of replicas cannot return between this rank "
                f"and rank {others[0]}, in another node; run backward in update windows only"
            )

    def _tag(self, tags: np.ndarray, box: int, name: int) -> None:
        """Set a box's tag behind what the current stream does with the box."""
        self._node.write_behind(tags, box, name)
        self._tagged = Mark.now(self._node.device)

    def _name(self, micro_step: int, layer: int, expert: int) -> int:
        return self._window << 40 | micro_step << 28 | layer << 16 | expert
