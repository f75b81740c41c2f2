"""The balanced layer on one GPU, beside a plain grouped_mm MoE layer with the same rows.

    python -m benchmarks.layer
    python -m benchmarks.layer --cpu-smoke

One process, an expert-parallel group of one rank, 16 experts: the share of one rank of 8. What a group of one cannot
show is the network: it exchanges no rows. Every variant gets the same hidden states, routes, gates and weights:

    plain                   torch ops: sort by expert, gather, two grouped products around SwiGLU, weighted sum; no
                            slower than torch ops need be: gathers go back as gathers, nothing waits for the device
    plain, parallel         the same, and what expert parallelism adds to any layer: rows put expert by expert after
                            they arrive, and back
    fused                   as `plain`, with the kernels that the balanced layer uses between its products; what
                            remains between this and the layer is balancing and parallelism
    fused, parallel         as `plain, parallel` with those kernels
    sorted                  BalancedExperts without replicas, dispatch made in the layer: counts exchanged, host waits
    prepared                BalancedExperts without replicas, dispatch made ahead and uploaded
    1 replica, 2 replicas   prepared, as many rows in all, a share of them on replicas that are there: two grouped
                            calls per product. Rows of 16 + n slots instead of 16, so groups are smaller
    ..., arena              the same with home and replica slots in one tensor (`transfer/node.py`): one grouped call
                            per product, two for the weight gradients

What bounds the cases: the products, by the dense bf16 rate; then device memory, which every gather reads and writes
once: 2 x rows x hidden x 2 bytes.

Method: as in `equipoise/calibrate/bench.py` (random inputs, L2 flushed, launches hidden behind a sleep, CUDA events,
medians; where the host waits inside the layer nothing is hidden after it). Variants run in turn, twice; a figure is
the mean of both medians, `repeat_pct` how far they are apart, `spread_pct` (p90 - p10) / median, the larger of both
rounds. Before timing, every variant without replicas is compared with `plain`, `plain` with float64, and an
arena with two calls.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.plain_layer import VISIT, HeldBank, Inputs, Shape, fused_moe, plain_moe, smoke_shape
from benchmarks.results import Limit, publish
from equipoise.calibrate.bench import Bench, Timing, measure
from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.options import TransferOptions
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Dispatch, SourceSplit, assign_slots, build_dispatch, sort_rows
from equipoise.layer.experts import BalancedExperts, Window
from equipoise.planner import plan
from equipoise.transfer.cuda_pages import CudaPager
from equipoise.transfer.engine import LayerTransfers
from equipoise.transfer.node import Arena, ExpertLayout, ExpertWeights
from equipoise.transfer.pages import HostPager
from tests.layer.reference import dense_experts

MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b")
TOKENS = (1024, 8192, 16384)
REPLICAS = (1, 2)
ROUNDS = 2
LIMIT_PCT = 3.0

Forward = Callable[[], Tensor]


def build_layer(
    shape: Shape,
    given: Inputs,
    home: ExpertWeights,
    *,
    group: dist.ProcessGroup,
    transfers: LayerTransfers,
    layer: int = 0,
) -> BalancedExperts:
    """A balanced layer that follows a plan without replicas for these routes; `transfers` may hold some anyway."""
    count_E = np.bincount(given.ids_TK.cpu().numpy().reshape(-1), minlength=shape.homes)
    model = ModelShape.preset("qwen3-30b-a3b", experts=shape.homes, layers=layer + 1, top_k=shape.top_k)
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=1, ep=1)
    loads = LoadMatrix(np.tile(count_E, (1, layer + 1, 1, 1)))
    made = plan(loads, cluster=cluster, model=model, slots=0, policy="static")
    experts = BalancedExperts(home, layer=layer, group=group).to(home.down_SDF.device)
    experts.begin(Window(made, rank=0, transfers=transfers))
    return experts


def prepare_with_replicas(ids_TK: Tensor, *, homes: int, replicas: int) -> Dispatch:
    """Prepare a dispatch in which ids from `homes` on stand for replica slots."""
    slots = homes + replicas
    count_S = torch.bincount(ids_TK.cpu().reshape(-1), minlength=slots)
    all_S = torch.arange(slots)
    used_H = all_S[count_S > 0]
    split = SourceSplit(home_slot_E=all_S, expert_H=used_H, end_H=count_S[used_H], slot_H=used_H)
    send = sort_rows(assign_slots(ids_TK.cpu(), split), num_ranks=1, width=slots)
    made = replace(build_dispatch(send, count_S[None], home_slots=homes), ids_TK=ids_TK.cpu())
    return made.packed().unpack(str(ids_TK.device))


def move_to_replicas(ids_TK: Tensor, *, homes: int, replicas: int) -> Tensor:
    """Give each replica half the rows of one of the first experts, the most popular ones."""
    moved_TK = ids_TK.clone()
    half_T = torch.arange(ids_TK.shape[0], device=ids_TK.device) % 2 == 0
    for replica in range(replicas):
        moved_TK[(ids_TK == replica) & half_T[:, None]] = homes + replica
    return moved_TK


def build_variants(shape: Shape, given: Inputs, layer: BalancedExperts, *, bench: Bench) -> dict[str, Forward]:
    """Every variant's forward; the parameters of `layer` are the weights of all."""
    weights, empty = layer.home, HeldBank(shape.weights(0, bench))
    prepared = layer.prepare(given.ids_TK.cpu(), 0).packed().unpack(str(bench.device))
    tensors = (given.hidden_TD, given.ids_TK, given.gates_TK, VISIT)
    made: dict[str, Forward] = {
        "plain": lambda: plain_moe(given, weights),
        "plain, parallel": lambda: plain_moe(given, weights, is_parallel=True),
        "fused": lambda: fused_moe(given, weights, empty),
        "fused, parallel": lambda: fused_moe(given, weights, empty, is_parallel=True),
        "sorted": lambda: layer(*tensors),
        "prepared": lambda: layer(*tensors, prepared=prepared),
    }
    for count in REPLICAS:
        name, replicas = f"{count} replica{'s' * (count > 1)}", shape.weights(count, bench)
        made[name] = _with_replicas(shape, given, layer, bank=HeldBank(replicas))
        made[f"{name}, arena"] = _with_replicas(shape, given, layer, bank=ArenaBank(layer.home, replicas))
    return made


def _with_replicas(shape: Shape, given: Inputs, layer: BalancedExperts, *, bank: HeldBank) -> Forward:
    held, count = (
        build_layer(shape, given, layer.home, group=layer.group, transfers=bank),
        bank.weights(VISIT).num_slots,
    )
    # Gradients of all variants are asked for in the same tensors.
    held.gate_up, held.down = layer.gate_up, layer.down
    ids_TK = move_to_replicas(given.ids_TK, homes=shape.homes, replicas=count)
    prepared = prepare_with_replicas(ids_TK, homes=shape.homes, replicas=count)
    return lambda: held(given.hidden_TD, ids_TK, given.gates_TK, VISIT, prepared=prepared)


class ArenaBank(HeldBank):
    """A bank whose replicas lie behind a copy of the home weights, in an arena of one layer."""

    def __init__(self, home: ExpertWeights, replicas: ExpertWeights) -> None:
        super().__init__(replicas)
        device = home.down_SDF.device
        pager = HostPager() if device.type == "cpu" else CudaPager(torch.device("cuda", torch.cuda.current_device()))
        layout = ExpertLayout.of([home], TransferOptions(slots=replicas.num_slots))
        pages = [pager.make(size) for size in layout.pieces(pager.granule)[:-1]]
        self._arena = Arena(layout, pager=pager, homes=pages)
        for one in pages:
            one.release()
        for joined, *parts in zip(self._arena.joined[0][0], home.tensors(), replicas.tensors(), strict=True):
            joined.copy_(torch.cat([part.detach() for part in parts]))

    def joined(self, visit: Visit) -> ExpertWeights:
        """Return home and replica weights in one."""
        return ExpertWeights(*self._arena.joined[0][0])


def check_variants(variants: Mapping[str, Forward], leaves: tuple[Tensor, ...], given: Inputs) -> None:
    """Raise unless variants give what `plain` gives, and arenas what two calls give, outputs and gradients."""
    seen: dict[str, list[Tensor]] = {}
    for name in variants:
        out_TD = variants[name]()
        got = [out_TD.detach(), *torch.autograd.grad(out_TD, leaves, given.grad_TD)]
        kind = name.removesuffix(", arena") if "replica" in name else "plain"
        wanted = seen.setdefault(kind, got)
        errors = [distance(a, b) for a, b in zip(got, wanted, strict=True)]
        # bf16 operands land between 1e-3 and 1e-2; NaN fails the comparison.
        if not max(errors) < 2e-2:
            raise RuntimeError(f"{name}: relative errors {errors} of output and gradients to {kind}, limit 2e-2")


def check_plain(shape: Shape, bench: Bench) -> None:
    """Raise unless `plain` is right, on few tokens, against float64."""
    given, home = Inputs.random(shape, 64, bench), shape.weights(shape.homes, bench)
    exact = ExpertWeights(*(t.double() for t in home.tensors()))
    wanted_TD = dense_experts(given.hidden_TD.double(), given.ids_TK, given.gates_TK.double(), exact)
    error = distance(plain_moe(given, home), wanted_TD)
    if not error < 1e-2:
        raise RuntimeError(f"plain layer of {shape.name}: relative error {error:.2e} to float64, limit 1e-2")


def distance(got: Tensor, wanted: Tensor) -> float:
    wanted = wanted.detach().double()
    return float((got.detach().double() - wanted).norm() / wanted.norm())


def measure_case(shape: Shape, tokens: int, bench: Bench, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Check and time every variant of one case."""
    given, bank = Inputs.random(shape, tokens, bench), HeldBank(shape.weights(0, bench))
    layer = build_layer(shape, given, shape.weights(shape.homes, bench), group=group, transfers=bank)
    variants = build_variants(shape, given, layer, bench=bench)
    leaves = (given.hidden_TD, given.gates_TK, layer.gate_up, layer.down)
    check_variants(variants, leaves, given)
    times: dict[str, list[tuple[Timing, Timing]]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, forward in variants.items():
            times[name].append(time_forward_and_update(forward, leaves, given.grad_TD, bench))
    base = {name: [mean_ms([r[part] for r in rounds]) for part in (0, 1)] for name, rounds in times.items()}
    start = {"model": shape.name, "tokens": tokens, "rows": tokens * shape.top_k}
    return [{**start, "variant": name, **_row(rounds, base)} for name, rounds in times.items()]


def time_forward_and_update(
    forward: Forward, leaves: tuple[Tensor, ...], grad_TD: Tensor, bench: Bench, *, update: Forward | None = None
) -> tuple[Timing, Timing]:
    """Time the forward alone, and forward with backward; gradients are made, not accumulated.

    Args:
        update: the forward that a backward follows, where it is another
    """
    start = update or forward

    def infer() -> Tensor:
        with torch.no_grad():
            return forward()

    return measure(infer, bench), measure(lambda: torch.autograd.grad(start(), leaves, grad_TD), bench)


def mean_ms(rounds: list[Timing]) -> float:
    """Mean of the rounds' medians."""
    return float(np.mean([timing.median_ns for timing in rounds])) / 1e6


def _row(rounds: list[tuple[Timing, Timing]], base: Mapping[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for part, word in enumerate(("forward", "update")):
        timings = [timing[part] for timing in rounds]
        mean, medians = mean_ms(timings), [timing.median_ns for timing in timings]
        row[f"{word}_ms"] = mean
        for name in ("plain", "fused", "fused, parallel", "prepared"):
            row[f"{word}_over_{name.replace(', ', '_')}_pct"] = 100 * (mean / base[name][part] - 1)
        row[f"{word}_repeat_pct"] = 100 * (max(medians) / min(medians) - 1)
        row[f"{word}_spread_pct"] = 100 * max(timing.spread for timing in timings)
    return row


def limits_of(rows: list[dict[str, Any]]) -> list[Limit]:
    """The promise: a prepared layer without replicas costs at most 3 % more than the plain one."""
    return [
        Limit(
            name=f"prepared over plain in %, {row['model']}, {row['tokens']} tokens, {word}",
            value=row[f"{word}_over_plain_pct"],
            at_most=LIMIT_PCT,
        )
        for row in rows
        if row["variant"] == "prepared"
        for word in ("forward", "update")
    ]


@contextmanager
def group_of_one(device: str) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def measure_layers(shapes: list[Shape], tokens: tuple[int, ...], bench: Bench) -> list[dict[str, Any]]:
    """All cases."""
    rows = []
    with group_of_one(bench.device.type) as group:
        for shape in shapes:
            check_plain(shape, bench)
            for count in tokens:
                rows += measure_case(shape, count, bench, group)
    return rows


def main() -> int:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description="The balanced layer beside a plain one.")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--commit", help="commit of the source, where git cannot tell")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU, to try the script itself")
    given = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench.on("cpu" if given.cpu_smoke else "cuda", runs=given.runs)
    if given.cpu_smoke:
        rows = measure_layers([smoke_shape()], (8,), bench)
        return publish("layer, smoke", rows, packages=("torch",))
    rows = measure_layers([Shape.of(name) for name in given.models], tuple(given.tokens), bench)
    note = f"{torch.cuda.get_device_name()}; bf16, medians of {given.runs} runs; update: forward and backward"
    return publish("layer", rows, limits=limits_of(rows), note=note, packages=("torch",), commit=given.commit)


if __name__ == "__main__":
    sys.exit(main())
