"""What pulls of replica weights from pinned host memory add to a stack of attention and balanced MoE layers.

    python -m benchmarks.pulls
    python -m benchmarks.pulls --cpu-smoke

One process, one GPU, an expert-parallel group of one rank with 16 home experts and 1 or 2 replicas per layer. A stack
of 4 decoder layers: projections and causal attention over sequences of 4096 tokens, then `BalancedExperts` with a
prepared dispatch. Both sides compute the same rows with the same weights:

    held     every layer's replicas are on the device already
    pulled   two buffers shared by all layers (depth 1); at each visit, forward and backward, a side stream copies the
             next visit's replicas from pinned memory into the buffer that is free, and the layer waits for its own

What is measured is the copy that a pull from the host makes and what it costs beside the layers. What is not: the
refresh of the host store, gradients' returns (handed in and dropped), pulls from peers, and other ranks' traffic on
the same links. A replica that is still there from its forward visit is pulled again.

What bounds a pull: PCIe, 64 GB/s a direction for Gen5 x16 by its standard. It is hidden while it takes less than a
layer.

Method: as in `benchmarks/layer.py`. The pulls of the next iteration's first layer run behind the last layer, as they
would in training. Pull rates: one visit's replicas alone, beside one plain copy of as many bytes; and as the pulls went
beside the layers, by events on the side stream. Before timing, outputs of both sides are compared bit by bit and
gradients within 1 % (attention's backward is not deterministic), with buffers that start as NaN.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layer import (
    MODELS,
    REPLICAS,
    ROUNDS,
    build_layer,
    distance,
    group_of_one,
    mean_ms,
    move_to_replicas,
    prepare_with_replicas,
    time_forward_and_update,
)
from benchmarks.plain_layer import Inputs, Shape, smoke_shape
from benchmarks.results import Limit, publish
from equipoise.calibrate.bench import Bench, Timing, measure
from equipoise.core.itinerary import Visit
from equipoise.runtime.bank import ExpertWeights, ReplicaBank
from equipoise.runtime.experts import BalancedExperts
from equipoise.runtime.prepared import PreparedDispatch

TOKENS = (8192, 16384)
LAYERS = 4
SEQUENCE = 4096
HEADS = {"qwen3-30b-a3b": (32, 4, 128), "qwen3-235b-a22b": (64, 4, 128), "smoke": (4, 2, 8)}
"""Query heads, key-value heads, head width."""
LIMIT_ADDED_PCT = 2.0
LIMIT_RATE_PCT = 90.0


class HeldByLayer:
    """A bank that holds every layer's replicas on the device."""

    def __init__(self, stored: list[ExpertWeights], device: torch.device) -> None:
        self._held = [ExpertWeights(*(t.to(device) for t in one.tensors())) for one in stored]

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return the layer's replicas."""
        return self._held[visit.layer]

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Drop the gradients."""

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Add nothing."""


class PulledByVisit(HeldByLayer):
    """A bank that pulls each visit's replicas from host memory while the visit before computes.

    Visits must come in order, forward through all layers and, where `has_backward`, back; then from the start.
    """

    def __init__(self, stored: list[ExpertWeights], device: torch.device, *, has_backward: bool) -> None:
        layers = list(range(len(stored)))
        forward = [("forward", layer) for layer in layers]
        self.visits = forward + ([("backward", layer) for layer in layers[::-1]] if has_backward else [])
        assert len(self.visits) % 2 == 0, "two buffers take turns, also from the last visit to the first"
        self._stored, self._at = stored, 0
        self._buffers = [ExpertWeights(*(_poisoned(t, device) for t in stored[0].tensors())) for _ in range(2)]
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.pulls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Start and end of every pull."""
        self._pull(0)

    def weights(self, visit: Visit) -> ExpertWeights:
        """Wait for this visit's replicas and start the pull of the next; the same visit may ask again."""
        at = self._at
        assert (visit.phase, visit.layer) == self.visits[at], f"{visit} comes out of order"
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self.pulls[-1][1])
        self._at = (at + 1) % len(self.visits)
        self._pull(self._at)
        return self._buffers[at % 2]

    def _pull(self, at: int) -> None:
        source, buffer = self._stored[self.visits[at][1]], self._buffers[at % 2]
        if self._stream is None:
            return copy_replicas(buffer, source)
        # The visit that used this buffer last has been enqueued: the pull follows it.
        self._stream.wait_stream(torch.cuda.current_stream())
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            start.record()
            copy_replicas(buffer, source)
            end.record()
        return self.pulls.append((start, end))


def copy_replicas(buffer: ExpertWeights, source: ExpertWeights) -> None:
    """Copy all slots, on the current stream, without waiting where the source is pinned."""
    for into, out_of in zip(buffer.tensors(), source.tensors(), strict=True):
        into.copy_(out_of, non_blocking=True)


def _poisoned(like: Tensor, device: torch.device) -> Tensor:
    return torch.full(like.shape, torch.nan, dtype=like.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One layer's projections and causal attention."""

    qkv_w: Tensor
    out_w: Tensor
    heads: tuple[int, int, int]

    @classmethod
    def random(cls, shape: Shape, bench: Bench) -> "Attention":
        """Draw the weights of a model's attention."""
        heads, kv_heads, width = HEADS[shape.name]
        qkv_w = bench.random((heads + 2 * kv_heads) * width, shape.hidden, scale=shape.hidden**-0.5)
        out_w = bench.random(shape.hidden, heads * width, scale=(heads * width) ** -0.5)
        return cls(qkv_w=qkv_w.requires_grad_(), out_w=out_w.requires_grad_(), heads=(heads, kv_heads, width))

    def forward(self, x_TD: Tensor) -> Tensor:
        """Attend inside sequences of 4096 tokens."""
        heads, kv_heads, width = self.heads
        sequences = max(len(x_TD) // SEQUENCE, 1)
        parts = F.linear(x_TD, self.qkv_w).split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        q, k, v = (part.view(sequences, -1, part.shape[1] // width, width).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(mixed.transpose(1, 2).reshape(len(x_TD), heads * width), self.out_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Decoder layers whose routes are given."""

    given: Inputs
    prepared: PreparedDispatch
    attention: list[Attention] = field(default_factory=list)
    experts: list[BalancedExperts] = field(default_factory=list)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Everything that gets a gradient."""
        of_attention = (t for one in self.attention for t in (one.qkv_w, one.out_w))
        of_experts = (t for one in self.experts for t in one.home.tensors())
        return self.given.hidden_TD, self.given.gates_TK, *of_attention, *of_experts

    def forward_with(self, bank: ReplicaBank) -> Callable[[], Tensor]:
        """The stack's forward with replicas from `bank`."""

        def forward() -> Tensor:
            x_TD = self.given.hidden_TD
            for number, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
                assert experts.window is not None, "layers follow a plan"
                experts.window.bank = bank
                visit = Visit(0, "forward", number)
                home = experts.enter(visit)
                x_TD = x_TD + attention.forward(F.rms_norm(x_TD, x_TD.shape[1:]))
                rows = (F.rms_norm(x_TD, x_TD.shape[1:]), self.prepared.ids_TK, self.given.gates_TK)
                x_TD = x_TD + experts(*rows, visit, home=home, prepared=self.prepared)
            return x_TD

        return forward


def build_stack(shape: Shape, tokens: int, *, replicas: int, group: dist.ProcessGroup, bench: Bench) -> Stack:
    """A random stack; every layer has the same routes and its own weights."""
    given = Inputs.random(shape, tokens, bench)
    ids_TK = move_to_replicas(given.ids_TK, homes=shape.homes, replicas=replicas)
    stack = Stack(given=given, prepared=prepare_with_replicas(ids_TK, homes=shape.homes, replicas=replicas))
    bank = HeldByLayer([], bench.device)
    for number in range(LAYERS):
        home = shape.weights(shape.homes, bench)
        stack.attention.append(Attention.random(shape, bench))
        stack.experts.append(build_layer(shape, given, home, group=group, bank=bank, layer=number))
    return stack


def store_replicas(shape: Shape, *, replicas: int, bench: Bench) -> list[ExpertWeights]:
    """Every layer's replicas in host memory, pinned where there is a device."""
    stored = [ExpertWeights(*(t.cpu() for t in shape.weights(replicas, bench).tensors())) for _ in range(LAYERS)]
    if bench.device.type == "cpu":
        return stored
    return [ExpertWeights(*(t.pin_memory() for t in one.tensors())) for one in stored]


def check_pulled(stack: Stack, stored: list[ExpertWeights], device: torch.device) -> None:
    """Raise unless pulled replicas give the bits of held ones, and gradients up to attention's own scatter."""
    seen = []
    for bank in (HeldByLayer(stored, device), PulledByVisit(stored, device, has_backward=True)):
        out_TD = stack.forward_with(bank)()
        seen.append([out_TD.detach(), *torch.autograd.grad(out_TD, stack.leaves, stack.given.grad_TD)])
    if not torch.equal(seen[0][0], seen[1][0]):
        raise RuntimeError("pulled replicas do not give the outputs of held ones")
    # Attention's backward adds by atomics, so two runs of the same differ; NaN fails the comparison.
    errors = [distance(a, b) for a, b in zip(*seen, strict=True)]
    if not max(errors) < 1e-2:
        raise RuntimeError(f"pulled replicas: relative errors {errors} of gradients to held ones, limit 1e-2")


def measure_case(shape: Shape, tokens: int, replicas: int, *, bench: Bench, group: dist.ProcessGroup) -> dict[str, Any]:
    """Time held and pulled in turn."""
    stack = build_stack(shape, tokens, replicas=replicas, group=group, bench=bench)
    stored = store_replicas(shape, replicas=replicas, bench=bench)
    check_pulled(stack, stored, bench.device)
    held, pulled, times = HeldByLayer(stored, bench.device), _PulledBoth(stored, bench.device), []
    for _ in range(ROUNDS):
        times.append((_time(stack, (held, held), bench), _time(stack, (pulled.forward, pulled.update), bench)))
    row: dict[str, Any] = {"model": shape.name, "tokens": tokens, "replicas": replicas}
    for part, word in enumerate(("forward", "update")):
        sides = [[one[side][part] for one in times] for side in (0, 1)]
        held_ms, pulled_ms = (mean_ms(side) for side in sides)
        row |= {f"{word}_held_ms": held_ms, f"{word}_pulled_ms": pulled_ms}
        row[f"{word}_added_pct"] = 100 * (pulled_ms / held_ms - 1)
        row[f"{word}_repeat_pct"] = max(100 * (_ratio(side) - 1) for side in sides)
    return row | rates_of(stored, pulled.update, bench)


class _PulledBoth:
    """A bank for forward alone and one for forward with backward: their visits differ."""

    def __init__(self, stored: list[ExpertWeights], device: torch.device) -> None:
        self.forward = PulledByVisit(stored, device, has_backward=False)
        self.update = PulledByVisit(stored, device, has_backward=True)


def _time(stack: Stack, banks: tuple[ReplicaBank, ReplicaBank], bench: Bench) -> tuple[Timing, Timing]:
    forward, update = (stack.forward_with(bank) for bank in banks)
    return time_forward_and_update(forward, stack.leaves, stack.given.grad_TD, bench, update=update)


def _ratio(timings: list[Timing]) -> float:
    medians = [timing.median_ns for timing in timings]
    return max(medians) / min(medians)


def rates_of(stored: list[ExpertWeights], bank: PulledByVisit, bench: Bench) -> dict[str, Any]:
    """Bytes per second of one visit's pull: alone, beside the layers, and of a plain copy of as many bytes."""
    if bench.device.type == "cpu":
        return {}
    num_bytes = sum(t.nbytes for t in stored[0].tensors())
    buffer = ExpertWeights(*(_poisoned(t, bench.device) for t in stored[0].tensors()))
    host = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device=bench.device)
    plain_ns = measure(lambda: device.copy_(host, non_blocking=True), bench).median_ns
    alone_ns = measure(lambda: copy_replicas(buffer, stored[0]), bench).median_ns
    # The first pulls warm up, the last may be unfinished work of the next iteration.
    beside_ns = float(np.median([start.elapsed_time(end) * 1e6 for start, end in bank.pulls[8:-1]]))
    return {
        "pull_MB": num_bytes / 1e6,
        "plain_GBps": num_bytes / plain_ns,
        "pull_GBps": num_bytes / alone_ns,
        "beside_GBps": num_bytes / beside_ns,
        "pull_of_plain_pct": 100 * plain_ns / alone_ns,
        "beside_of_plain_pct": 100 * plain_ns / beside_ns,
    }


def limits_of(rows: list[dict[str, Any]]) -> list[Limit]:
    """Pulls add at most 2 %, and go at least at 90 % of a plain copy's rate."""
    limits = []
    for row in rows:
        case = f"{row['model']}, {row['tokens']} tokens, {row['replicas']} replicas"
        for word in ("forward", "update"):
            value = row[f"{word}_added_pct"]
            limits.append(Limit(name=f"added in %, {case}, {word}", value=value, at_most=LIMIT_ADDED_PCT))
        value = row["pull_of_plain_pct"]
        limits.append(Limit(name=f"pull rate in % of a plain copy, {case}", value=value, at_least=LIMIT_RATE_PCT))
    return limits


def main() -> int:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description="Pulls from host memory beside a stack of layers.")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU, to try the script itself")
    given = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench.on("cpu" if given.cpu_smoke else "cuda", runs=given.runs)
    shapes = [smoke_shape()] if given.cpu_smoke else [Shape.of(name) for name in given.models]
    tokens = [8] if given.cpu_smoke else given.tokens
    with group_of_one(bench.device.type) as group:
        cases = [(shape, count, replicas) for shape in shapes for count in tokens for replicas in REPLICAS]
        rows = [measure_case(*case, bench=bench, group=group) for case in cases]
    if given.cpu_smoke:
        return publish("pulls, smoke", rows, packages=("torch",))
    note = f"{torch.cuda.get_device_name()}; bf16, {LAYERS} layers, medians of {given.runs} runs; GB are 10^9 bytes"
    return publish("pulls", rows, limits=limits_of(rows), note=note, packages=("torch",))


if __name__ == "__main__":
    sys.exit(main())
