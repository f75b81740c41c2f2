"""Pull rates of the engine's two paths beside plain copies, and the memory that replica buffers take.

    python -m benchmarks.transfer
    python -m benchmarks.transfer --cpu-smoke

One process, one GPU, an expert-parallel group of one rank, experts of Qwen3-30B and Qwen3-235B shape.

Rates: one visit's 1 or 2 replicas come into a replica buffer as the engine brings them, in the engine's own memory.
    peer   from home weights in mapped device memory; here the device is the same, so this is a copy inside it
    host   from the host store: shared memory, registered with the driver
Beside it, as many bytes by plain copies: `one` from one tensor to another, `same` tensor by tensor as an expert is made
of, pinned host memory to device or device to device. What bounds them: device memory (read and write: a copy of n bytes
moves 2n), PCIe (64 GB/s a direction for Gen5 x16 by its standard), and a few microseconds to start each copy.

Ways: what a visit's pulls inside the device take, and what they add to products that run meanwhile, copied one after
the other (`plain`), side by side (`parallel`, which the engine uses where a node has several devices), and by one
kernel (`kernel`, where all memory is on one). All compete for the device's memory and processors.

Memory: one rank of Qwen3-30B-A3B under EP8, all 48 layers, with 2 slots at depth 1, less the same with 0 slots, as the
driver counts free memory; once with separate buffers and once as an arena.

Method: CUDA events, medians, L2 flushed, launches hidden behind a sleep, cases in turn in every run (`turns`).
Bytes are checked after the pulls: buffers start as NaN and must equal the homes.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.layer import MODELS, REPLICAS, group_of_one
from benchmarks.plain_layer import Shape, smoke_shape
from benchmarks.results import Limit, publish
from benchmarks.turns import measure_in_turn, run_in_turn
from equipoise.calibrate.bench import Bench
from equipoise.core import ModelShape
from equipoise.core.options import CopyMethod, TransferOptions
from equipoise.transfer.host_store import HostStore, Refresher
from equipoise.transfer.node import ExpertWeights, NodeMemory
from equipoise.transfer.pulls import HostPath, MappedPath, Need, PullPath, make_copier
from equipoise.transfer.waits import Lane, Mark, Transfer

LIMIT_RATE_PCT = 90.0
LIMIT_MEMORY_PCT = 2.0
PRODUCTS, PRODUCT_ROWS, PRODUCT_WIDTH, PULLS = 12, 8192, 4096, 12
"""Products [8192, 4096] x [4096, 4096] in a row, and visits pulled beside them."""
SOURCES = 8
"""Layers to pull from in turn, so that no source stays in the cache."""


class OneRank:
    """An engine's memory for a group of one: homes, buffers, host store and the paths between them."""

    def __init__(self, homes: list[ExpertWeights], *, group: dist.ProcessGroup, options: TransferOptions) -> None:
        """Move the homes in and complete the store."""
        self.node = NodeMemory(homes, group=group, node_R=(0,), options=options)
        given: dict[str, Any] = {"group": group, "node_R": (0,), "timeout_s": options.timeout_s}
        self.store = HostStore(self.node.layout, experts=self.node.layout.home_slots, **given)
        self.refresher = Refresher(self.node, self.store)
        self.refresher.complete(version=1)
        self.paths: dict[str, PullPath] = {"peer": MappedPath(self.node), "host": HostPath(self.store)}

    def close(self) -> None:
        """Free everything."""
        self.refresher.close()
        self.node.close()
        self.store.close()


def random_homes(shape: Shape, layers: int, bench: Bench) -> list[ExpertWeights]:
    """Parameters of some layers."""
    made = (shape.weights(shape.homes, bench) for _ in range(layers))
    return [ExpertWeights(*(torch.nn.Parameter(t) for t in one.tensors())) for one in made]


Rows = list[dict[str, Any]]


def measure_shape(shape: Shape, *, bench: Bench, group: dist.ProcessGroup) -> tuple[Rows, Rows]:
    """Every path and number of replicas of one shape: rates, and the methods of copying inside a device."""
    rank = OneRank(random_homes(shape, SOURCES, bench), group=group, options=TransferOptions(slots=max(REPLICAS)))
    rates: Rows = []
    for name, path in rank.paths.items():
        check_pulls(rank, path)
        rates += [measure_path(shape, rank, name, count, bench=bench) for count in REPLICAS]
    methods = [measure_ways(shape, rank, count, bench=bench) for count in REPLICAS]
    rank.close()
    return rates, methods


def check_pulls(rank: OneRank, path: PullPath) -> None:
    """Raise unless a pull brings the home's bits."""
    buffer = rank.node.buffers.slots[0]
    for tensor in buffer.tensors():
        tensor.fill_(torch.nan)
    path.pull({0: Need(0, 1, 0, 1, "peer")}, buffer)
    rank.node.synchronize(Transfer("fence"))
    for got, wanted in zip(buffer.tensors(), rank.node.homes[0].tensors(), strict=True):
        if not torch.equal(got[0], wanted[1]):
            raise RuntimeError(f"a pull by {path.name} did not bring the home's weights")


def measure_path(shape: Shape, rank: OneRank, name: str, count: int, *, bench: Bench) -> dict[str, Any]:
    """Pulls of `count` replicas and plain copies of as many bytes, in turn."""
    buffer, path = rank.node.buffers.slots[0], rank.paths[name]
    sizes = [tensor[0].numel() for tensor in buffer.tensors()] * count
    plain = OneOrSame(sizes, bench, is_pinned=name == "host")
    works: dict[str, Callable[[int], object]] = {
        "pull": partial(pull, path, buffer, count),
        "one": plain.one,
        "same": plain.same,
    }
    # As the engine does: not on the stream of the layers.
    with Lane(bench.device).work():
        times = measure_in_turn(works, bench)
    num_bytes = sum(sizes) * bench.dtype.itemsize
    row: dict[str, Any] = {"model": shape.name, "path": name, "replicas": count, "MB": num_bytes / 1e6}
    for word, timing in times.items():
        row[f"{word}_us"] = timing.median_ns / 1e3
        row[f"{word}_GBps"] = num_bytes / timing.median_ns
        row[f"{word}_spread_pct"] = 100 * timing.spread
    row["of_one_pct"] = 100 * times["one"].median_ns / times["pull"].median_ns
    row["of_same_pct"] = 100 * times["same"].median_ns / times["pull"].median_ns
    return row


def pull(path: PullPath, buffer: ExpertWeights, count: int, run: int) -> None:
    """Bring one visit's replicas, in every run from another layer."""
    path.pull({e: Need(run % SOURCES, e, 0, e, "peer") for e in range(count)}, buffer)


def measure_ways(shape: Shape, rank: OneRank, count: int, *, bench: Bench) -> dict[str, Any]:
    """Each way of copying `count` replicas: what it takes alone, and what products take longer beside it."""
    rows, width = (PRODUCT_ROWS, PRODUCT_WIDTH) if bench.is_gpu else (8, 8)
    x_TD, w_DD = bench.random(rows, width), bench.random(width, width)
    lane, buffer = Lane(bench.device), rank.node.buffers.slots[0]

    def beside(path: PullPath, pulls: int = PULLS) -> Callable[[int], object]:
        def work(run: int) -> None:
            begin = Mark.now(bench.device)
            for _ in range(PRODUCTS):
                x_TD @ w_DD.T
            with lane.work(after=begin):
                for number in range(pulls):
                    pull(path, buffer, count, run + number)
                pulled = Mark.now(bench.device)
            # Pulls end long before the products, or they would be timed themselves.
            pulled.hold_up(bench.device)

        return work

    names: tuple[CopyMethod, ...] = ("plain", "parallel", "kernel") if bench.is_gpu else ("plain",)
    methods: dict[str, PullPath] = {name: MappedPath(rank.node, make_copier(bench.device, name)) for name in names}
    works = {"alone": beside(methods["plain"], 0), **{word: beside(path) for word, path in methods.items()}}
    times = run_in_turn(works, bench)
    row: dict[str, Any] = {
        "model": shape.name,
        "replicas": count,
        "products_us": float(np.median(times["alone"])) / 1e3,
    }
    with lane.work():
        apart = measure_in_turn({word: partial(pull, path, buffer, count) for word, path in methods.items()}, bench)
    for word in methods:
        low, median, high = np.percentile((times[word] - times["alone"]) / PULLS / 1e3, [25, 50, 75])
        row |= {f"{word}_us": apart[word].median_ns / 1e3, f"{word}_added_us": median}
        row |= {f"{word}_added_p25_us": low, f"{word}_added_p75_us": high}
    return row


class OneOrSame:
    """As many bytes as a pull brings, between plain tensors."""

    def __init__(self, sizes: list[int], bench: Bench, *, is_pinned: bool) -> None:
        total = sum(sizes)
        self._sizes, self._target = sizes, torch.empty(total, dtype=bench.dtype, device=bench.device)
        self._sources = []
        for _ in range(SOURCES):
            source = bench.random(total)
            is_host = is_pinned and bench.device.type == "cuda"
            self._sources.append(source.cpu().pin_memory() if is_host else source)

    def one(self, run: int) -> None:
        """One copy."""
        self._target.copy_(self._sources[run % SOURCES], non_blocking=True)

    def same(self, run: int) -> None:
        """One copy per tensor."""
        source = self._sources[run % SOURCES].split(self._sizes)
        for into, out_of in zip(self._target.split(self._sizes), source, strict=True):
            into.copy_(out_of, non_blocking=True)


def measure_memory(shape: Shape, layers: int, *, bench: Bench, group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Device memory of a rank's engine with 2 slots, less that with none."""
    rows, base = [], 0
    for buffers, slots in (("separate", 0), ("separate", 2), ("arena", 2)):
        homes = random_homes(shape, layers, bench)
        # Buffers would be cut from what drawing the homes left over, and keep all of it.
        used_bytes(bench)
        options = TransferOptions(slots=slots, depth=1, buffers=buffers)
        node = NodeMemory(homes, group=group, node_R=(0,), options=options)
        used, layout = used_bytes(bench), node.layout
        node.close()
        del homes, node
        if slots == 0:
            base = used
            continue
        experts = layout.layers * layout.bytes_of(layout.home_slots, layout.dtype)
        rows.append(
            {
                "model": shape.name,
                "layers": layers,
                "buffers": buffers,
                "slots": slots,
                "experts_MB": experts / 1e6,
                "measured_MB": (used - base) / 1e6,
                "buffers_MB": layout.replica_bytes / 1e6,
                "mailboxes_MB": layout.mailbox_bytes / 1e6,
                "measured_pct": 100 * (used - base) / experts,
                "buffers_pct": 100 * (used - base - layout.mailbox_bytes) / experts,
            }
        )
    return rows


def used_bytes(bench: Bench) -> int:
    """Memory of the device that is not free, with nothing kept for later."""
    gc.collect()
    if bench.device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def limits_of(rates: list[dict[str, Any]], memory: list[dict[str, Any]]) -> list[Limit]:
    """Pulls at 90 % of one plain copy and of plain copies of the same tensors; buffers at 2 % of experts."""
    names = {"of_same_pct": "plain copies tensor by tensor", "of_one_pct": "one plain copy"}
    limits = [
        Limit(
            name=f"pull rate in % of {words}, {row['model']}, {row['path']}, {row['replicas']} replicas",
            value=row[key],
            at_least=LIMIT_RATE_PCT,
        )
        for row in rates
        for key, words in names.items()
    ]
    for row in memory:
        name = f"replica buffers in % of the rank's experts, {row['buffers']}"
        limits.append(Limit(name=name, value=row["buffers_pct"], at_most=LIMIT_MEMORY_PCT))
    return limits


def main() -> int:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description="Pull rates and memory of the transfer engine.")
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--commit", help="commit of the source, where git cannot tell")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU, to try the script itself")
    given = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench.on("cpu" if given.cpu_smoke else "cuda", runs=3 if given.cpu_smoke else given.runs)
    # gloo: what the engine agrees on travels on the CPU.
    with group_of_one("cpu") as group:
        shapes = [smoke_shape()] if given.cpu_smoke else [Shape.of(name) for name in MODELS]
        found = [measure_shape(shape, bench=bench, group=group) for shape in shapes]
        rates, methods = ([row for parts in found for row in parts[number]] for number in (0, 1))
        layers = 2 if given.cpu_smoke else ModelShape.preset(MODELS[0]).layers
        memory = measure_memory(shapes[0], layers, bench=bench, group=group)
    if given.cpu_smoke:
        publish("transfer memory, smoke", memory, packages=("torch",))
        publish("transfer methods, smoke", methods, packages=("torch",))
        return publish("transfer, smoke", rates, packages=("torch",))
    note = f"{torch.cuda.get_device_name()}; bf16, medians of {given.runs} runs; GB are 10^9 bytes, a pull's bytes once"
    given_to = {"note": note, "packages": ("torch",), "commit": given.commit}
    publish("transfer methods", methods, **given_to)
    worst = publish("transfer memory", memory, limits=limits_of([], memory), **given_to)
    return max(worst, publish("transfer", rates, limits=limits_of(rates, []), **given_to))


if __name__ == "__main__":
    sys.exit(main())
