"""Predicted against measured memory of balanced layers: one rank of eight, on one GPU.

    python -m benchmarks.memory -o out/memory.json
    python -m benchmarks.memory --cpu-smoke -o out/memory.json

Predicted: `equipoise.loads.plan_memory`, which knows routes, a plan and sizes alone. Measured: the most that torch's
allocator has handed out while rank 0's layers run forward and backward, less what it had before: on a GPU
`torch.cuda.max_memory_allocated`, on the CPU the allocations that torch's profiler reports.

What is real: the layers of `equipoise.layer` with the experts, routes, prepared dispatch and rows of rank 0 of an
expert-parallel group of eight on two nodes, over the collective path. What is not: the other ranks. Their group is
torch's fake one, whose collectives return at once and leave the received rows as they were allocated. Replica weights
are there already, so replica slots and pages, which the allocator does not hold, are neither predicted nor measured.

Cases: `level` (every expert equally likely), `hot` (rank 0 receives about twice the mean), `replica` (rank 0 also
computes half of the busiest expert of its node), each with activations kept and recomputed, and the log-prob pass.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from benchmarks.plain_layer import HeldBank
from benchmarks.results import Limit, format_table, read_commit, read_machine, say_limit
from equipoise.core import Cluster, LoadMatrix, ModelShape, Stage
from equipoise.core.options import Activations
from equipoise.core.plan import Bytes, Plan, ReplicaTable, Seconds, Visit
from equipoise.layer.dispatch import WindowDispatches
from equipoise.layer.experts import BalancedExperts, Window
from equipoise.loads.memory import plan_memory
from equipoise.transfer.node import ExpertWeights

MODELS, LAYERS, TOKENS, RANKS = ("deepseek-v2-lite", "qwen3-30b-a3b"), 3, 8192, 8
CASES = {"level": 1.0, "hot": 2.0, "replica": 0.8}
"""How likely rank 0's experts are, beside those of other ranks."""
PASSES: tuple[tuple[str, Stage, Activations], ...] = (
    ("update, kept", "update", "kept"),
    ("update, recomputed", "update", "recomputed"),
    ("log-prob", "recompute", "kept"),
)
LIMIT_PCT = 3.0


class JoinedBank(HeldBank):
    """Replicas that lie behind the home weights of a layer in one tensor, as in an arena."""

    def __init__(self, plan: Plan, homes: ExpertWeights, *, rank: int = 0) -> None:
        super().__init__(homes.map(lambda tensor: tensor.detach()[:0]))
        self._plan, self._rank = plan, rank
        self._all = homes.map(lambda t: torch.cat([t.detach(), t.detach()[: plan.slots]]))

    def joined(self, visit: Visit) -> ExpertWeights | None:
        """Return home slots and the replicas in use."""
        held = sum(rank == self._rank for _, rank in self._plan.replicas(visit.micro_step, visit.layer))
        return self._all.map(lambda tensor: tensor[: self._plan.home_slots + held]) if self._plan.slots else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Rank 0's layers, and what they are given."""

    experts: list[BalancedExperts]
    ids: list[Tensor]
    gates: list[Tensor]
    hidden_TD: Tensor
    grad_TD: Tensor

    def forward(self, *, is_recomputed: bool) -> Tensor:
        """Run all layers; each adds to its input."""
        # A layer that recomputes keeps its input, also the first.
        x_TD = self.hidden_TD.clone() if is_recomputed else self.hidden_TD
        for number in range(len(self.experts)):
            run = partial(self._layer, number)
            x_TD = checkpoint(run, x_TD, use_reentrant=False) if is_recomputed else run(x_TD)
        return x_TD

    def _layer(self, number: int, x_TD: Tensor) -> Tensor:
        experts, visit = self.experts[number], Visit(0, "forward", number)
        home = experts.enter(visit)
        return x_TD + experts(x_TD, self.ids[number], self.gates[number], visit, home=home)

    def run(self, stage: Stage, activations: Activations) -> None:
        """Run one pass."""
        if stage == "recompute":
            with torch.no_grad():
                self.forward(is_recomputed=False)
        else:
            torch.autograd.backward(self.forward(is_recomputed=activations == "recomputed"), self.grad_TD)


def build_plan(model: ModelShape, case: str, *, tokens: int, stage: Stage) -> tuple[Plan, list[np.ndarray]]:
    """Build a plan that keeps homes at owners, and rank 0's ids by layer."""
    rng, cluster = np.random.default_rng(0), Cluster.preset("h200", nodes=2, ranks_per_node=RANKS // 2)
    home_slots = cluster.home_slots(model)
    share_E = np.ones(model.experts)
    share_E[:home_slots] *= CASES[case]
    ids, load = [], np.zeros((1, model.layers, RANKS, model.experts), dtype=np.int64)
    for layer in range(model.layers):
        # The k largest of noisy logarithms are a draw without replacement.
        noisy_TE = np.log(share_E) + rng.gumbel(size=(tokens, model.experts))
        ids.append(np.argpartition(-noisy_TE, model.top_k, axis=1)[:, : model.top_k])
        load[0, layer, 0] = np.bincount(ids[-1].reshape(-1), minlength=model.experts)
        load[0, layer, 1:] = rng.multinomial(
            tokens * model.top_k, load[0, layer, 0] / load[0, layer, 0].sum(), RANKS - 1
        )
    busiest_L = home_slots + load[0, :, :, home_slots : home_slots * RANKS // 2].sum(axis=1).argmax(axis=1)
    count = model.layers if case == "replica" else 0
    rows_L = load.sum(axis=2)[0, np.arange(model.layers), busiest_L] // 2
    table = ReplicaTable(
        start_ML=np.arange(model.layers + 1) if count else np.zeros(model.layers + 1, dtype=np.int64),
        expert_P=busiest_L[:count],
        rank_P=np.zeros(count, dtype=np.int64),
        rows_P=rows_L[:count],
        path_P2=np.zeros((count, 2), dtype=np.int64),
    )
    place_LE = np.tile(np.arange(model.experts), (model.layers, 1))
    nothing_ML = np.zeros((1, model.layers), dtype=np.int64)
    made = Plan(
        loads=LoadMatrix(load, stage=stage),
        cluster=cluster,
        model=model,
        policy="equipoise",
        objective="skew",
        slots=1 if count else 0,
        home_LE=place_LE // home_slots,
        home_slot_LE=place_LE % home_slots,
        replica_table=table,
        ns_ML=nothing_ML,
        closed_ns_ML=nothing_ML,
        seconds=Seconds(),
        bytes=Bytes(),
        static_seconds=0.0,
    )
    return made, ids


def build_layers(plan: Plan, ids: list[np.ndarray], *, device: str) -> Layers:
    """Build rank 0's layers under a plan, gradients there already as after the first micro-step."""
    model, dtype = plan.model, torch.bfloat16 if plan.model.weight_bytes == 2 else torch.float32
    tokens, group, experts = len(ids[0]), dist.group.WORLD, []
    shapes = ((2 * model.expert_width, model.hidden), (model.hidden, model.expert_width))
    for layer in range(model.layers):
        made = (torch.randn(plan.home_slots, *shape, device=device, dtype=dtype) * 0.01 for shape in shapes)
        experts.append(BalancedExperts(ExpertWeights(*made), layer=layer, group=group))
    dispatches = WindowDispatches([ids], timeout_s=60.0)
    window = Window(plan, rank=0, transfers=JoinedBank(plan, experts[0].home), dispatches=dispatches)
    for layer in experts:
        layer.begin(window)
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
    dispatches.make(plan, experts, swap=None)
    hidden_TD = torch.randn(tokens, model.hidden, device=device, dtype=dtype)
    gates = [torch.rand(tokens, model.top_k, device=device, dtype=dtype) for _ in ids]
    return Layers(
        experts=experts,
        ids=[torch.from_numpy(one).to(device) for one in ids],
        gates=[one.requires_grad_() for one in gates],
        hidden_TD=hidden_TD.requires_grad_(),
        grad_TD=torch.ones_like(hidden_TD),
    )


def peak_bytes(run: Callable[[], object], *, device: str) -> int:
    """Return the most that torch's allocator hands out while `run` runs, beyond what it held before."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as seen:
        run()
    events = [event for event in seen.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in events]).max(initial=0))


def run_case(model: ModelShape, case: str, *, tokens: int, device: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of one model and case."""
    for name, stage, activations in PASSES:
        plan, ids = build_plan(model, case, tokens=tokens, stage=stage)
        forecast = plan_memory(plan, activations=activations)
        place = forecast.place(0)
        parts = {part: size for part, size in forecast.parts(place).items() if part not in ("slots", "page")}
        layers = build_layers(plan, ids, device=device)
        run = partial(layers.run, stage, activations)
        run()  # kernels are compiled, and libraries take their workspaces
        predicted, measured = sum(parts.values()), peak_bytes(run, device=device)
        yield {
            "model": model.name,
            "case": case,
            "pass": name,
            "rows": int(plan.rank_load_MLR[place]),
            "layer": place[1],
            "predicted_MiB": round(predicted / 2**20, 2),
            "measured_MiB": round(measured / 2**20, 2),
            "off_pct": round(100 * (predicted / measured - 1), 3),
            **{f"{part}_MiB": round(size / 2**20, 2) for part, size in parts.items()},
        }
        del layers, run
        gc.collect()


def main() -> int:
    """Measure, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description="Predicted against measured memory of balanced layers.")
    parser.add_argument("-o", "--output", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="commit of the source, where git cannot tell")
    parser.add_argument("--cpu-smoke", action="store_true", help="small sizes in float32 on the CPU")
    given = parser.parse_args()
    device, start = "cpu" if given.cpu_smoke else "cuda", time.monotonic()
    figures: dict[str, Any] = {"layers": LAYERS}
    if given.cpu_smoke:
        figures |= {"hidden": 128, "expert_width": 88, "weight_bytes": 4}
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    rows: list[dict[str, Any]] = []
    for model in (ModelShape.preset(name, **figures) for name in MODELS):
        for case in CASES:
            rows += run_case(model, case, tokens=512 if given.cpu_smoke else TOKENS, device=device)
    dist.destroy_process_group()
    # On the CPU the combine of a log-prob pass is no fused kernel, and holds the tokens twice more.
    judged = [abs(row["off_pct"]) for row in rows if device == "cuda" or row["pass"] != "log-prob"]
    limit = Limit(name="largest error, percent", value=max(judged), at_most=LIMIT_PCT)
    document = {
        "benchmark": "memory",
        "commit": given.commit or read_commit(),
        "machine": read_machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__},
        "tokens": 512 if given.cpu_smoke else TOKENS,
        "ranks": RANKS,
        "rows": rows,
        "limits": [{"name": limit.name, "value": limit.value, "at_most": limit.at_most, "holds": limit.holds}],
        "seconds": round(time.monotonic() - start, 1),
    }
    print(format_table(rows))
    print(say_limit(limit))
    if given.output:
        given.output.write_text(json.dumps(document) + "\n")
    return 0 if limit.holds else 1


if __name__ == "__main__":
    sys.exit(main())
