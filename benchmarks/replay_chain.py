"""`Chain`: one rank's visits of a few layers, forward and back, really run on one device, with pulls beside them.

Knows the runtime's layer parts, streams and events. Does not know policies or what other ranks do.

A visit, forward: attention of the rank's own tokens; then its MoE part: wait for the replicas, put the received rows
slot by slot, products over home and replica slots, rows back in the order they came. Backward the same way back, then
attention's backward, then the adds of returned gradients.
- Pulls of the next visit start on a side stream when this one starts: from pinned host memory, or from the device
  itself in place of a peer (there is one device; its copies take memory bandwidth that a link would not).
- Replica gradients leave on the side stream after the products' backward, in the weights' dtype as they are made, into
  a staging buffer on the device; adds are in that dtype, too.
- Home and replica weights are one tensor, one grouped call per product, as mapped memory gives it; `two_calls` runs the
  two of the portable back-end.
What is timed of a visit: its MoE part (waits for late pulls included) forward, backward, and the adds.
Rows sent to others and received from them are random numbers in buffers: there is no exchange.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.calibrate.bench import Bench
from equipoise.calibrate.measures import VISIT, Attention, EmptyBank, groups_of, random_experts
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Groups
from equipoise.layer.expert_block import BlockOptions, expert_block
from equipoise.layer.ops import reorder_rows
from equipoise.transfer.node import ExpertWeights

HIDDEN_START_CYCLES = 6_000_000
"""About 3 ms of device-side sleep before a chain: longer than the host's lead must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One rank's work in one layer."""

    rows: tuple[int, ...]
    """Rows of each slot it holds, homes first."""
    homes: int
    host: tuple[int, int] = (0, 0)
    """Pulls from host memory, for forward and for backward."""
    peer: tuple[int, int] = (0, 0)
    sent: int = 0
    added: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of one visit's MoE part."""

    forward: float
    backward: float
    add: float


class ReplicaSlots:
    """A bank whose replicas stand behind the homes: the second call of two."""

    def __init__(self, held: ExpertWeights) -> None:
        self._held = held
        self.returned: ExpertWeights | None = None

    def wait_for(self, visit: Visit) -> None:
        """Home weights are there."""

    def joined(self, visit: Visit) -> None:
        """Replicas are apart from the homes."""

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return the replicas; the chain has waited for them."""
        return self._held

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Keep the gradients for their way home."""
        self.returned = gradients

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Adds are timed apart."""


class Stage:
    """Everything a case's chains share: weights, rows, attention, host store, staging; allocated once."""

    def __init__(
        self, shape: tuple[int, int], *, width: int, most_rows: int, layers: int, attention: Attention, bench: Bench
    ) -> None:
        self.bench, self.attention = bench, attention
        self.experts = [random_experts(width, shape, bench) for _ in range(layers)]
        self.rows_ND = bench.random(most_rows, shape[0])
        self.grad_ND = bench.random(most_rows, shape[0])
        self.host = _pinned(self.experts[0], bench)
        self.peer = random_experts(width, shape, bench)
        self.staging = [torch.zeros_like(t.data) for t in self.experts[0].tensors()]
        self.side = torch.cuda.Stream() if bench.is_gpu else None

    def order(self, rows: int) -> tuple[Tensor, Tensor]:
        """A random order of `rows` received rows, and its inverse."""
        there_P = torch.randperm(rows, device=self.bench.device)
        return there_P, torch.argsort(there_P)


def _pinned(experts: ExpertWeights, bench: Bench) -> ExpertWeights:
    copies = (t.detach().cpu() for t in experts.tensors())
    return ExpertWeights(*(t.pin_memory() if bench.is_gpu else t.clone() for t in copies))


class Layer:
    """One layer's work of a rank, ready to run."""

    def __init__(self, stage: Stage, at: int, work: Work, *, two_calls: bool) -> None:
        self.stage, self.work = stage, work
        rows, held = sum(work.rows), len(work.rows)
        self.weights = ExpertWeights(*(t.data[:held].requires_grad_() for t in stage.experts[at].tensors()))
        self.rows_ND = stage.rows_ND[:rows].detach().requires_grad_()
        self.grad_ND = stage.grad_ND[:rows]
        self.there_P, self.back_N = stage.order(rows)
        ends_S = torch.tensor(work.rows, device=stage.bench.device).cumsum(0).to(torch.int32)
        self.bank: EmptyBank | ReplicaSlots = EmptyBank(self.weights)
        self.home, self.groups = self.weights, groups_of(ends_S, rows)
        if two_calls and held > work.homes:
            self._split(ends_S, rows)
        self.out_ND: Tensor | None = None
        self.gradients: tuple[Tensor, ...] = ()

    def _split(self, ends_S: Tensor, rows: int) -> None:
        homes = self.work.homes
        home_rows = sum(self.work.rows[:homes])
        self.home = ExpertWeights(*(t.data[:homes].requires_grad_() for t in self.weights.tensors()))
        self.bank = ReplicaSlots(ExpertWeights(*(t.data[homes:] for t in self.weights.tensors())))
        self.groups = Groups(
            home_end_S=ends_S[:homes],
            replica_end_S=ends_S[homes:] - home_rows,
            num_home_rows=home_rows,
            num_replica_rows=rows - home_rows,
            num_replicas=len(ends_S) - homes,
        )

    def forward(self) -> None:
        """Received rows in order, products, rows back."""
        placed_ND = reorder_rows(self.rows_ND, there_P=self.there_P, back_N=self.back_N)
        options = BlockOptions()
        out_ND = expert_block(
            placed_ND, self.home, groups=self.groups, transfers=self.bank, visit=VISIT, options=options
        )
        self.out_ND = reorder_rows(out_ND, there_P=self.back_N, back_N=self.there_P)

    def backward(self) -> None:
        """Gradients of rows and weights."""
        assert self.out_ND is not None, "forward comes first"
        leaves = (self.rows_ND, *self.home.tensors())
        self.gradients = torch.autograd.grad(self.out_ND, leaves, self.grad_ND)
        self.out_ND = None

    def pull(self, phase: int) -> None:
        """Copy the replicas' weights into their slots, on the current stream."""
        # Through `data`, because backward must not take a pull for a change of what it saved: it wants the new weights.
        start = self.work.homes
        for source, count in ((self.stage.host, self.work.host[phase]), (self.stage.peer, self.work.peer[phase])):
            for into, out_of in zip(self.weights.tensors(), source.tensors(), strict=True):
                into.data[start : start + count].copy_(out_of.data[:count], non_blocking=True)
            start += count

    def send(self) -> None:
        """Copy the replicas' gradients to staging, on the current stream."""
        if not self.work.sent:
            return
        homes = self.work.homes
        if isinstance(self.bank, ReplicaSlots):
            assert self.bank.returned is not None, "backward comes first"
            parts = list(self.bank.returned.tensors())
        else:
            parts = [t[homes:] for t in self.gradients[1:]]
        for into, out_of in zip(self.stage.staging, parts, strict=True):
            into[: self.work.sent].copy_(out_of[: self.work.sent], non_blocking=True)

    def add(self) -> None:
        """Add as many returned gradients as this rank's homes get back."""
        for _ in range(self.work.added):
            for into in self.stage.staging:
                into[-1].add_(into[0], alpha=1e-3)


class Chain:
    """A rank's layers, in order."""

    def __init__(self, stage: Stage, works: list[Work], *, tokens: int, sequence: int, two_calls: bool = False) -> None:
        self.stage, self.sequence = stage, sequence
        self.layers = [Layer(stage, at, work, two_calls=two_calls) for at, work in enumerate(works)]
        hidden = stage.attention.shape.hidden
        self.x_TD = stage.bench.random(tokens, hidden).requires_grad_()
        self.grad_TD = stage.bench.random(tokens, hidden)

    def run(self) -> list[Callable[[], Times]]:
        """Enqueue all visits; each layer's times can be read once the device is idle."""
        marks = [[_mark(self.stage.bench) for _ in range(6)] for _ in self.layers]
        visits = [(0, at) for at in range(len(self.layers))] + [(1, at) for at in reversed(range(len(self.layers)))]
        arrived = self._pull(*visits[0])
        if self.stage.side is not None:
            torch.cuda._sleep(HIDDEN_START_CYCLES)
        attended = []
        for number, (phase, at) in enumerate(visits):
            here, layer = arrived, self.layers[at]
            arrived = self._pull(*visits[number + 1]) if number + 1 < len(visits) else None
            if phase == 0:
                attended.append(self.stage.attention.forward(self.x_TD, sequence=self.sequence))
            self._timed(marks[at][2 * phase :], here, layer.backward if phase else layer.forward)
            if phase == 1:
                self._send(layer)
                attention = self.stage.attention
                leaves = (self.x_TD, attention.qkv_w, attention.out_w)
                torch.autograd.grad(attended.pop(), leaves, self.grad_TD)
                self._timed(marks[at][4:], None, layer.add)
        return [lambda mark=mark: _read(mark) for mark in marks]

    def _timed(self, marks: list["Mark"], arrived: "torch.cuda.Event | None", work: Callable[[], None]) -> None:
        marks[0].record()
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
        work()
        marks[1].record()

    def _pull(self, phase: int, at: int) -> "torch.cuda.Event | None":
        work = self.layers[at].work
        if not work.host[phase] + work.peer[phase]:
            return None
        if self.stage.side is None:
            self.layers[at].pull(phase)
            return None
        # What was enqueued before has used the slots: the pull follows it.
        self.stage.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stage.side):
            self.layers[at].pull(phase)
            return self.stage.side.record_event()

    def _send(self, layer: Layer) -> None:
        if self.stage.side is None:
            return layer.send()
        self.stage.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stage.side):
            layer.send()
        # The gradients are dropped by the chain while the copy may still read them.
        for gradient in layer.gradients:
            gradient.record_stream(self.stage.side)
        return None


class Mark:
    """A point in time: an event of the device, or the host's clock."""

    def __init__(self, event: "torch.cuda.Event | None") -> None:
        self._event, self._ns = event, 0

    def record(self) -> None:
        """Now."""
        if self._event is None:
            from time import perf_counter_ns

            self._ns = perf_counter_ns()
        else:
            self._event.record()

    def ns_until(self, other: "Mark") -> float:
        """Nanoseconds between two points."""
        if self._event is None or other._event is None:
            return float(other._ns - self._ns)
        return float(self._event.elapsed_time(other._event)) * 1e6


def _mark(bench: Bench) -> Mark:
    return Mark(torch.cuda.Event(enable_timing=True) if bench.is_gpu else None)


def _read(marks: list[Mark]) -> Times:
    pairs = zip(marks[::2], marks[1::2], strict=True)
    return Times(*(start.ns_until(stop) for start, stop in pairs))
