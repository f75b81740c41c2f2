"""What packing samples by their experts gives, alone and with a plan; simulated.

    python -m benchmarks.packing
    python -m benchmarks.packing --write benchmarks/reports/packing_simulated_202611

What bounds it: `balanced`, every rank computing the mean and an even spread of rows over all ranks. Packing can go
below it, because rows that stay in their node do not cross.

Update windows at EP16, EP32 and EP64 on 8-GPU H200 nodes with 400 Gb/s per GPU. Recorded sequences are whole samples
of a batch of 1,024 (2,048 at EP64), drawn in turns and mixed; there are 494 answers of gpt-oss-20b and 213 sequences of
DeepSeek-V2-Lite, a quarter of the samples from each of its four domains, so that each comes several times, as rollouts
of a prompt do. A micro-batch has at most 8 samples' mean tokens, or 2 where that is said. Loads are then multiplied to
4,096 tokens a sample.
"composed" layers are four of gpt-oss side by side (`traces.stacked`): a token chooses 16 experts there and reaches
every node, so only rows are shown. Packers:
    given     consecutive samples to ranks, each rank the longest first into the emptiest micro-batch
    length    as verl 0.9.1 packs: Karmarkar-Karp over 24,576 * length + length ** 2, equally many samples to each rank,
              then a rank's samples to micro-batches; micro-batches with similar sums of squares share a micro-step
    experts   ours, within the limits of `given`
    strict    ours, within the limits of `length`, whose sums of squares leave little room to regroup samples
Prices are those of the planner's other benchmarks: kernels measured on one H200, all-to-all modelled; no cluster was
run. 8 MoE layers of each model. The sketch, the rounds and the homes that a planner tries were chosen on these traces,
so others may gain less.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper_ablations import options_of
from benchmarks.paper_cases import EXPERTS, MEAN_TOKENS, cluster_of, count_samples, in_turns, samples_of
from benchmarks.results import Limit, format_table, publish, read_commit, read_machine, say_limit
from benchmarks.traces import ESFT_DOMAINS, FOLDER, Trace, stacked
from equipoise.core import Cluster, LoadMatrix, ModelShape, RouteCounts, Schedule
from equipoise.core.plan import Plan, Sends
from equipoise.loads import Packing, TokenPolicy, count_loads, pack_window, schedule_tokens, sketch_counts
from equipoise.loads.packing import build_schedule
from equipoise.planner import plan
from equipoise.sim import StepSetting, simulate

Row = dict[str, Any]
LAYERS = 8
POLICY = TokenPolicy(last_token="unknown")
NOTE = "simulated: kernels and transfers measured on one H200, all-to-all modelled, no cluster was run"
SHOWN = (
    ("static, given", "given", "static", 0),
    ("static, length", "length", "static", 0),
    ("static, experts", "experts", "static", 0),
    ("plan, given", "given", "equipoise", 2),
    ("plan, length", "length", "equipoise", 2),
    ("plan, strict", "strict", "equipoise", 2),
    ("plan, experts", "experts", "equipoise", 2),
    ("plan, length, 1 slot", "length", "equipoise", 1),
    ("plan, experts, 1 slot", "experts", "equipoise", 1),
)
"""(name, packer, policy, slots)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Samples of one window."""

    name: str
    counts: RouteCounts
    crossing: tuple[Sends, ...] = ("tokens", "rows")
    samples_per_batch: int = 8
    """Of a micro-batch, in the mean."""


def main() -> int:
    """Compare, measure the packer's own time, publish."""
    parser = argparse.ArgumentParser(description="Packing samples by their experts, simulated")
    parser.add_argument("--write", type=Path, help="also write <path>.json and <path>.md")
    given = parser.parse_args()
    rows = [row for ranks in (16, 32, 64) for batch in batches(ranks) for row in compare(batch, cluster_of(ranks))]
    speed = [speed_of(*size) for size in ((1024, 48, 128, 1.0), (4096, 94, 256, 10.0))]
    limits = [*limits_of(rows), *(Limit(name=r["size"], value=r["seconds"], at_most=r["limit"]) for r in speed)]
    if given.write is not None:
        write_report(given.write, rows, speed, limits)
    print(format_table(speed))
    return publish("packing", rows, limits=limits, note=NOTE)


def batches(ranks: int) -> Iterator[Batch]:
    """Every batch whose experts divide by the ranks."""
    with np.load(FOLDER / "gptoss20b_decode_routes.npz", allow_pickle=False) as file:
        gpt = Trace(name="gpt-oss-20b", model=ModelShape.preset("gpt-oss-20b"), ids_TLK=file["ids"])
        offsets = file["offsets"]
    wide = stacked(gpt, EXPERTS, overlapping=True)
    for trace, crossing in ((gpt, ("tokens", "rows")), (wide, ("rows",))):
        if trace.model.experts % ranks == 0:
            name = trace.name if trace is gpt else "gpt-oss-20b composed"
            counts = batch_of(trace, [count_samples(trace, offsets)], ranks)
            yield Batch(name=name, counts=counts, crossing=crossing)
            yield Batch(name=f"{name}, 2 samples", counts=counts, crossing=crossing, samples_per_batch=2)
    with np.load(FOLDER / "dsv2lite_esft_routes.npz", allow_pickle=False) as file:
        model = ModelShape.preset("deepseek-v2-lite")
        parts = [Trace(name=d, model=model, ids_TLK=file[f"{d}_ids"].astype(np.int64)) for d in ESFT_DOMAINS]
        found = [count_samples(part, file[f"{part.name}_offsets"]) for part in parts]
    if model.experts % ranks == 0:
        yield Batch(name="DeepSeek-V2-Lite, four domains", counts=batch_of(parts[0], found, ranks))
        yield Batch(name="DeepSeek-V2-Lite, intent", counts=batch_of(parts[0], found[:1], ranks))


def batch_of(trace: Trace, parts: Sequence[np.ndarray], ranks: int) -> RouteCounts:
    """Draw equally many samples of every part, in turns, and mix them; evenly spaced layers are kept."""
    each = samples_of(ranks) // len(parts)
    drawn = []
    for part in parts:
        tokens_B = part[:, 0].sum(axis=1)
        drawn.append(part[in_turns(tokens_B, int(tokens_B.sum()) * -(-each // len(part)))[:each]])
    count_BLE = np.concatenate(drawn)[np.random.default_rng(1).permutation(each * len(parts))]
    count_BLE = count_BLE[:, np.arange(LAYERS) * count_BLE.shape[1] // LAYERS]
    model = trace.model.replace(layers=LAYERS)
    return RouteCounts(
        model=model,
        count_BLE=count_BLE,
        tokens_B=count_BLE[:, 0].sum(axis=1) // model.top_k,
        names=tuple(map(str, range(len(count_BLE)))),
        layer_numbers=model.layer_numbers,
    )


def compare(batch: Batch, cluster: Cluster) -> Iterator[Row]:
    """One row for each way of crossing nodes and each pair of packer and policy; balanced is of `length`."""
    counts, ranks = batch.counts, cluster.ep
    budget = int(max(counts.tokens_B.mean() * batch.samples_per_batch, counts.tokens_B.max()))
    given = schedule_tokens(counts.tokens_B, ranks=ranks, token_budget=budget, policy=POLICY)
    factor = MEAN_TOKENS / counts.tokens_B.mean()
    length = pack_by_length(counts.tokens_B, ranks, given.micro_steps, factor)
    packed, strict = (
        pack_window(sketch_counts(counts), each, node_R=cluster.node_R, policy=POLICY) for each in (given, length)
    )
    schedules = {"given": given, "length": length, "experts": packed.schedule, "strict": strict.schedule}
    loads = {
        name: LoadMatrix(np.rint(count_loads(counts, each).load_MLRE * factor).astype(np.int64))
        for name, each in schedules.items()
    }
    for sends in batch.crossing:
        level = replayed(loads["length"], "balanced", 0, cluster, counts.model, sends)
        for name, packer, policy, slots in SHOWN:
            made = replayed(loads[packer], policy, slots, cluster, counts.model, sends)
            yield {
                "trace": batch.name,
                "EP": ranks,
                "crossing": sends,
                "plan": name,
                **{key: made[key] / level[key] for key in level},
                "micro_steps": given.micro_steps,
                "how": (strict if packer == "strict" else packed).how if packer in ("experts", "strict") else "",
                "rows_across": packed.crossing,
                "rows_across_strict": strict.crossing,
                "rows_across_length": strict.given_crossing,
                "fewest_rows_across": bound_of(counts, packed, cluster),
            }


def replayed(
    loads: LoadMatrix, policy: str, slots: int, cluster: Cluster, model: ModelShape, sends: Sends
) -> dict[str, float]:
    """Bytes across nodes, and seconds of all-to-all, of experts and of the window with attention."""
    made: Plan = plan(loads, cluster=cluster, model=model, slots=slots, policy=policy, options=options_of(sends))
    setting = StepSetting(sends=sends, timeline_layers=0)
    seconds = simulate([made.loads], [made], cluster=cluster, model=model, setting=setting).policies[0].seconds
    return {
        "bytes": float(made.bytes.all_to_all_across),
        "all_to_all": seconds.all_to_all_inside + seconds.all_to_all_across,
        "experts": seconds.experts,
        "step": seconds.total,
    }


def bound_of(counts: RouteCounts, packed: Packing, cluster: Cluster) -> float:
    """A share of rows that no packing and no homes without replicas can stay below: every sample alone on its node.

    Relaxed: each sample may choose its own best experts, as many as a node has, in every layer.
    """
    samples = packed.schedule.pieces[:, 0]
    own = counts.model.experts // cluster.num_ep_nodes
    count_BLE = np.sort(counts.count_BLE[samples], axis=2)
    return 1 - float(count_BLE[:, :, -own:].sum()) / float(count_BLE.sum())


def pack_by_length(tokens_B: np.ndarray, ranks: int, micro_steps: int, factor: float) -> Schedule:
    """Balance work as verl does: ranks first, with equally many samples, then micro-batches of each rank.

    Args:
        factor: by which samples are longer than recorded
    """
    length_B, bins_R = np.rint(tokens_B * factor).astype(np.int64), []
    work_B = 24576 * length_B + length_B**2
    for mine in _differenced(np.flatnonzero(tokens_B > 0), work_B, ranks, equal=True):
        parts = _differenced(np.array(sorted(mine)), work_B, micro_steps, equal=False)
        parts.sort(key=lambda part: (-int((tokens_B[part] ** 2).sum()), part))
        bins_R.append([np.array(sorted(part), dtype=np.int64) for part in parts])
    return build_schedule(bins_R, tokens_B, stage="update", policy=POLICY)


def _differenced(chosen: np.ndarray, work_B: np.ndarray, count: int, *, equal: bool) -> list[list[int]]:
    """Partition by Karmarkar and Karp: the two least level partial partitions are merged, large parts with small.

    `equal`: start from runs of `count` samples, so that every part gets one sample of each run.
    """
    order = chosen[np.argsort(work_B[chosen], kind="stable")].tolist()
    if equal:
        starts = [order[i : i + count] for i in range(0, len(order), count)]
    else:
        starts = [[b] for b in order]
    heap = []
    for number, run in enumerate(starts):
        parts = sorted(((int(work_B[b]), [b]) for b in run), reverse=True)
        parts += [(0, [])] * (count - len(parts))
        heap.append((parts[-1][0] - parts[0][0], number, parts))
    heapify(heap)
    while len(heap) > 1:
        (_, number, first), (_, _, second) = heappop(heap), heappop(heap)
        merged = sorted(
            ((a[0] + b[0], [*a[1], *b[1]]) for a, b in zip(first, reversed(second), strict=True)), reverse=True
        )
        heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(count)]


def limits_of(rows: Sequence[Row]) -> Iterator[Limit]:
    """The aims, on the least favourable case of each kind; a case has no limit twice."""
    for sends, share in (("tokens", 0.90), ("rows", 0.75)):
        some = [row for row in rows if row["crossing"] == sends]
        both = [row for row in some if row["plan"] == "plan, experts"]
        worst = max(both, key=lambda row: row["bytes"])
        where = f"{sends} cross nodes, worst of {len(both)} ({worst['trace']}, EP{worst['EP']})"
        yield Limit(name=f"bytes across nodes of balanced's, {where}", value=worst["bytes"], at_most=share)
        narrow = [row for row in both if row["EP"] <= 32]
        worst = max(narrow, key=lambda row: row["step"])
        where = f"{sends} cross nodes, worst of {len(narrow)} at EP16 and EP32 ({worst['trace']}, EP{worst['EP']})"
        yield Limit(name=f"balanced's throughput, {where}", value=1 / worst["step"], at_least=1.03)
        found = {(row["trace"], row["EP"], row["plan"]): row["step"] for row in some}
        ratios = {
            (trace, ranks): found[trace, ranks, "plan, experts, 1 slot"] / step
            for (trace, ranks, name), step in found.items()
            if name == "plan, length"
        }
        case = max(ratios, key=lambda key: ratios[key])
        where = f"{sends} cross nodes, worst of {len(ratios)} ({case[0]}, EP{case[1]})"
        yield Limit(name=f"packed with 1 slot over not packed with 2, {where}", value=ratios[case], at_most=1.0)


def speed_of(samples: int, layers: int, experts: int, limit: float) -> Row:
    """Processor seconds of one core to sketch and pack random samples of 16 kinds; the slowest of EP16, EP32, EP64."""
    rng = np.random.default_rng(0)
    model = ModelShape.preset("qwen3-30b-a3b", experts=experts, layers=layers)
    kind_KLE = rng.dirichlet(np.full(experts, 0.5), size=(16, layers))
    length_B = np.minimum(32768, rng.lognormal(8, 0.7, size=samples)).astype(np.int64) + 1
    count_BLE = np.empty((samples, layers, experts), dtype=np.int32)
    for b, kind in enumerate(rng.integers(0, 16, size=samples)):
        count_BLE[b] = kind_KLE[kind] * (8 * length_B[b]) + rng.integers(0, 4, size=experts)
    counts = RouteCounts(
        model=model,
        count_BLE=count_BLE,
        tokens_B=length_B,
        names=tuple(map(str, range(samples))),
        layer_numbers=model.layer_numbers,
    )
    taken = []
    for ranks in (16, 32, 64):
        given = schedule_tokens(length_B, ranks=ranks, token_budget=65536, policy=POLICY)
        start = time.process_time()
        pack_window(sketch_counts(counts), given, node_R=cluster_of(ranks).node_R, policy=POLICY)
        taken.append(time.process_time() - start)
    size = f"pack {samples:,} samples x {layers} layers x {experts} experts, processor seconds"
    return {"size": size, "seconds": max(taken), "limit": limit}


def write_report(path: Path, rows: Sequence[Row], speed: Sequence[Row], limits: Sequence[Limit]) -> None:
    """Write `<path>.json` and `<path>.md`."""
    said = [
        {"name": x.name, "value": x.value, "at_least": x.at_least, "at_most": x.at_most, "holds": x.holds}
        for x in limits
    ]
    command = f"python -m benchmarks.packing --write {path}"
    document = {"benchmark": "packing", "command": command, "commit": read_commit(), "machine": read_machine()}
    document |= {"note": NOTE, "rows": list(rows), "speed": list(speed), "limits": said}
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = (__doc__ or "").split("\n\n", 2)[2]
    shown = [{key: value for key, value in row.items() if key != "micro_steps"} for row in rows]
    lines = ["# Packing samples by their experts", "", f"`{command}`, {NOTE}.", "", "```", text.strip(), "```", ""]
    lines += ["Bytes and seconds over balanced's; `rows_across`: share of rows that cross before replicas, packed,"]
    lines += ["with `length`, and the least that a relaxed problem allows.", "", "```", format_table(shown), "```", ""]
    lines += ["```", format_table(speed), *(say_limit(limit) for limit in limits), "```"]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
