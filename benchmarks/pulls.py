"""What pulls of replica weights add to a stack of attention and balanced MoE layers.

    python -m benchmarks.pulls
    python -m benchmarks.pulls --path peer
    python -m benchmarks.pulls --cpu-smoke

One process, one GPU, an expert-parallel group of one rank with 16 home experts and 1 or 2 replicas per layer. A stack
of 4 decoder layers: projections and causal attention over sequences of 4096 tokens, then `BalancedExperts` with a
prepared dispatch. Both sides compute the same rows with the same weights:

    held     every layer's replicas are on the device already
    pulled   the engine's own puller, thread and all, brings them at every visit, forward and backward, into its two
             buffers (depth 1), from the engine's host store or its mapped home memory

A group of one has no replicas by plan, so the schedule is the benchmark's: at every visit the layer's first experts are
replicas of this rank, half of their rows go there. What is measured is what pulls cost beside the layers. What is not:
the refresh of the host store, gradients' returns (handed in and dropped), and other ranks' traffic on the same links.

What bounds a pull: PCIe, 64 GB/s a direction for Gen5 x16 by its standard. It is hidden while it takes less than a
layer.

Method: held and pulled run in turn, run by run (`turns`): random inputs, L2 flushed, launches hidden behind a sleep,
CUDA events. `added` is the median over runs of what the pulled run took more than the held one beside it, with the 25th
and 75th percentile; `noise` is the same between two held runs side by side, which should be 0. `exposed` is what the
engine itself counts: the time in which the layers' stream stood still for a pull. Before timing, outputs of both sides
are compared bit by bit and gradients within 1 % (attention's backward is not deterministic), with buffers that start as
NaN.
"""

import argparse
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.decoder_stack import LAYERS, HeldByLayer, Stack, StackBank, build_stack
from benchmarks.layer import MODELS, REPLICAS, distance, group_of_one
from benchmarks.plain_layer import Shape, smoke_shape
from benchmarks.results import Limit, publish
from benchmarks.transfer import OneRank
from benchmarks.turns import WARM, added_pct, run_in_turn
from equipoise.calibrate.bench import Bench
from equipoise.core.options import PlanOptions, TransferOptions
from equipoise.core.plan import Path as PathName
from equipoise.core.plan import Visit
from equipoise.planner.assemble import build_itinerary
from equipoise.transfer.node import ExpertWeights
from equipoise.transfer.pulls import Need, Puller, PullSchedule
from equipoise.transfer.waits import VERSION, Transfer

TOKENS = (8192, 16384)
LIMIT_ADDED_PCT = 2.0


class EveryVisit(PullSchedule):
    """A schedule on which every visit pulls the layer's first experts."""

    def __init__(self, micro_steps: int, *, replicas: int, path: str, has_backward: bool) -> None:
        stage = "update" if has_backward else "recompute"
        itinerary = build_itinerary(stage, np.ones((micro_steps, LAYERS), dtype=bool), PlanOptions(depth=1))
        super().__init__(SimpleNamespace(itinerary=itinerary, policy="every visit"), rank=0)
        self._needs_at = lambda visit: tuple(Need(visit.layer, e, 0, e, path) for e in range(replicas))


class PulledByEngine:
    """A bank whose replicas the engine's puller brings, for as many forwards as it is told."""

    def __init__(self, rank: OneRank, schedule: EveryVisit) -> None:
        """Poison the buffers and let the puller run."""
        for buffer in range(2):
            for tensor in rank.node.buffers.slots[buffer].tensors():
                tensor.fill_(torch.nan)
        self._rank, self._micro_step = rank, -1
        rank.node.synchronize(Transfer("fence"))
        rank.node.cells[0][VERSION] = 1
        self._puller = Puller(rank.node, rank.paths)
        self._puller.resume(schedule, version=1)
        for layer in range(LAYERS):
            self._puller.open_layer(layer)

    def begin(self) -> None:
        """Go on to the next micro-step of the schedule."""
        self._micro_step += 1

    def wait_for(self, visit: Visit) -> None:
        """Home weights are there."""

    def joined(self, visit: Visit) -> None:
        """Replicas are apart from the homes."""

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return what the puller brought; to the layers every micro-step is the first."""
        return self._puller.weights(visit._replace(micro_step=self._micro_step))

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Drop the gradients."""

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Add nothing."""

    def close(self) -> None:
        """Stop pulling."""
        self._puller.pause()
        self._puller.close()
        self._rank.node.synchronize(Transfer("fence"))
        self._rank.node.counters.flush()


class Case:
    """One stack and the memory of its engine."""

    def __init__(self, shape: Shape, tokens: int, replicas: int, *, bench: Bench, path: PathName) -> None:
        """Build the stack and move its experts in."""
        self.replicas, self.bench, self.path = replicas, bench, path
        self.stack: Stack = build_stack(shape, tokens, replicas=replicas, group=dist.group.WORLD, bench=bench)
        options = TransferOptions(slots=replicas, depth=1, buffers="separate", path=path)
        homes = [experts.home for experts in self.stack.experts]
        # What the engine agrees on travels on the CPU.
        self.rank = OneRank(homes, group=dist.new_group(backend="gloo"), options=options)
        copies = ([t.detach()[:replicas].clone() for t in home.tensors()] for home in homes)
        self.held = HeldByLayer([ExpertWeights(*tensors) for tensors in copies])

    def pulled(self, micro_steps: int, *, has_backward: bool) -> PulledByEngine:
        """A bank good for this many forwards."""
        schedule = EveryVisit(micro_steps, replicas=self.replicas, path=self.path, has_backward=has_backward)
        return PulledByEngine(self.rank, schedule)

    def run(self, bank: StackBank, *, has_backward: bool) -> Callable[[int], object]:
        """A forward, or a forward and backward, with replicas from `bank`."""
        forward, stack = self.stack.forward_with(bank), self.stack

        def infer(run: int) -> Tensor:
            with torch.no_grad():
                return forward()

        def update(run: int) -> tuple[Tensor, ...]:
            return torch.autograd.grad(forward(), stack.leaves, stack.given.grad_TD)

        return update if has_backward else infer

    def check(self) -> None:
        """Raise unless pulled replicas give the bits of held ones, and gradients up to attention's own scatter."""
        seen, pulled = [], self.pulled(1, has_backward=True)
        for bank in (self.held, pulled):
            out_TD = self.stack.forward_with(bank)()
            seen.append([out_TD.detach(), *torch.autograd.grad(out_TD, self.stack.leaves, self.stack.given.grad_TD)])
        pulled.close()
        if not torch.equal(seen[0][0], seen[1][0]):
            raise RuntimeError("pulled replicas do not give the outputs of held ones")
        # Attention's backward adds by atomics, so two runs of the same differ; NaN fails the comparison.
        errors = [distance(a, b) for a, b in zip(*seen, strict=True)]
        if not max(errors) < 1e-2:
            raise RuntimeError(f"pulled replicas: relative errors {errors} of gradients to held ones, limit 1e-2")

    def measure(self, word: str) -> dict[str, Any]:
        """Time held and pulled in turn: `forward`, or `update` with backward."""
        has_backward, runs = word == "update", WARM + self.bench.runs
        counters, bank = self.rank.node.counters, self.pulled(runs, has_backward=has_backward)
        before = counters.exposed_s[self.path]
        works = {
            "held": self.run(self.held, has_backward=has_backward),
            "pulled": self.run(bank, has_backward=has_backward),
            "again": self.run(self.held, has_backward=has_backward),
        }
        times = run_in_turn(works, self.bench)
        bank.close()
        added, low, high = added_pct(times["pulled"], times["held"])
        row = {f"{word}_held_ms": float(np.median(times["held"])) / 1e6}
        row[f"{word}_pulled_ms"] = float(np.median(times["pulled"])) / 1e6
        row |= {f"{word}_added_pct": added, f"{word}_p25_pct": low, f"{word}_p75_pct": high}
        row[f"{word}_noise_pct"] = added_pct(times["again"], times["held"])[0]
        row[f"{word}_exposed_ms"] = 1e3 * (counters.exposed_s[self.path] - before) / runs
        return row

    def close(self) -> None:
        """Free everything."""
        self.rank.close()


def measure_case(shape: Shape, tokens: int, replicas: int, *, bench: Bench, path: str) -> dict[str, Any]:
    """Check and time one case."""
    case = Case(shape, tokens, replicas, bench=bench, path=path)
    try:
        case.check()
        row: dict[str, Any] = {"model": shape.name, "tokens": tokens, "replicas": replicas, "path": path}
        return row | case.measure("forward") | case.measure("update")
    finally:
        case.close()


def limits_of(rows: list[dict[str, Any]]) -> list[Limit]:
    """Pulls add at most 2 %."""
    return [
        Limit(
            name=f"added in %, {row['model']}, {row['tokens']} tokens, {row['replicas']} replicas, {word}",
            value=row[f"{word}_added_pct"],
            at_most=LIMIT_ADDED_PCT,
        )
        for row in rows
        for word in ("forward", "update")
    ]


def main() -> int:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description="Pulls beside a stack of layers.")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--path", choices=("host", "peer"), default="host")
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--commit", help="commit of the source, where git cannot tell")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU, to try the script itself")
    given = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench.on("cpu" if given.cpu_smoke else "cuda", runs=3 if given.cpu_smoke else given.runs)
    shapes = [smoke_shape()] if given.cpu_smoke else [Shape.of(name) for name in given.models]
    tokens = [8] if given.cpu_smoke else given.tokens
    with group_of_one(bench.device.type):
        cases = [(shape, count, replicas) for shape in shapes for count in tokens for replicas in REPLICAS]
        rows = [measure_case(*case, bench=bench, path=given.path) for case in cases]
    if given.cpu_smoke:
        return publish("pulls, smoke", rows, packages=("torch",))
    note = f"{torch.cuda.get_device_name()}; bf16, {LAYERS} layers, {given.runs} runs in turn"
    return publish("pulls", rows, limits=limits_of(rows), note=note, packages=("torch",), commit=given.commit)


if __name__ == "__main__":
    sys.exit(main())
