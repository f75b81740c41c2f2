"""How near packing by experts comes to the best packing there is, on batches small enough to try every one.

    python -m benchmarks.packing_bound
    python -m benchmarks.packing_bound --write benchmarks/reports/packing_bound_202611.json

16 recorded samples, one for each of 16 ranks on two nodes. Rows are scaled so that all samples are equally long; then
the trainer's limits allow every division into halves, and no other. What is counted is the share of rows that cross
nodes, where experts go to the nodes that send them most rows and there is no replica. Once samples have nodes, the
best half of a layer's experts for a node is those of which the node sends most rows more than the other one. So the
exact optimum is the best of all 6,435 divisions; their mean is what chance gives. `gained` is the packer's share of
the way from chance to the optimum, in percent.

The packer also levels the rows of the nodes' experts, which the optimum does not; so it could not always reach it.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.packing import LAYERS, POLICY
from benchmarks.paper_cases import count_samples
from benchmarks.results import publish, read_commit, read_machine
from benchmarks.traces import ESFT_DOMAINS, FOLDER, Trace
from equipoise.core import ModelShape, RouteCounts
from equipoise.loads import pack_window, sketch_counts
from equipoise.loads.packing import build_schedule

SAMPLES, DRAWS = 16, 40
LENGTH = 2**16
"""Rows of every sample in a layer, up to rounding."""
NODE_R = [0] * (SAMPLES // 2) + [1] * (SAMPLES // 2)
NOTE = "counted, not timed: shares of rows, without replicas"


def main() -> int:
    """Compare on every trace and publish."""
    parser = argparse.ArgumentParser(description="Packing by experts beside the exact optimum of small batches")
    parser.add_argument("--write", type=Path, help="also write a JSON document")
    given = parser.parse_args()
    rows = [compare(name, model, parts) for name, model, parts in traces()]
    if given.write is not None:
        command = f"python -m benchmarks.packing_bound --write {given.write}"
        document = {"benchmark": "packing bound", "command": command, "commit": read_commit()}
        document |= {"machine": read_machine(), "note": NOTE, "draws": DRAWS, "rows": rows, "limits": []}
        given.write.write_text(json.dumps(document, indent=1) + "\n")
    return publish("packing bound", rows, note=NOTE)


def traces() -> Iterator[tuple[str, ModelShape, list[np.ndarray]]]:
    """Yield each trace's name, its model and [B, L, E] rows of the samples of each of its parts."""
    with np.load(FOLDER / "gptoss20b_decode_routes.npz", allow_pickle=False) as file:
        model = ModelShape.preset("gpt-oss-20b")
        trace = Trace(name="gpt-oss-20b", model=model, ids_TLK=file["ids"])
        yield trace.name, model, [count_samples(trace, file["offsets"])]
    with np.load(FOLDER / "dsv2lite_esft_routes.npz", allow_pickle=False) as file:
        model = ModelShape.preset("deepseek-v2-lite")
        parts = [Trace(name=d, model=model, ids_TLK=file[f"{d}_ids"].astype(np.int64)) for d in ESFT_DOMAINS]
        found = [count_samples(part, file[f"{part.name}_offsets"]) for part in parts]
    yield "DeepSeek-V2-Lite, four domains", model, found
    yield "DeepSeek-V2-Lite, intent", model, found[:1]


def compare(name: str, model: ModelShape, parts: list[np.ndarray]) -> dict[str, Any]:
    """Draw batches with equally many samples of every part; percent of rows that cross, in the mean of all draws."""
    rng, found = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = [part[rng.choice(len(part), SAMPLES // len(parts), replace=False)] for part in parts]
        count_BLE = rng.permutation(np.concatenate(drawn))
        count_BLE = count_BLE[:, np.arange(LAYERS) * count_BLE.shape[1] // LAYERS]
        count_BLE = count_BLE * LENGTH // count_BLE.sum(axis=2, keepdims=True)
        found.append((*exact_crossing(count_BLE), packed_crossing(count_BLE, model.replace(layers=LAYERS))))
    chance_X, least_X, packed_X = np.array(found).T
    gained_X = (chance_X - packed_X) / (chance_X - least_X)
    percent = {"by_chance": chance_X, "packed": packed_X, "optimum": least_X, "gained": gained_X}
    row: dict[str, Any] = {"trace": name, **{key: 100 * float(shares.mean()) for key, shares in percent.items()}}
    return {**row, "gained_least": 100 * float(gained_X.min()), "gained_most": 100 * float(gained_X.max())}


def exact_crossing(count_BLE: np.ndarray) -> tuple[float, float]:
    """Return (mean, least) share of crossing rows over all divisions of the samples into two halves."""
    samples, layers, experts = count_BLE.shape
    # The first sample's node is called the first one, which halves the divisions.
    first_X = [(0, *rest) for rest in combinations(range(1, samples), samples // 2 - 1)]
    is_first_XB = np.zeros((len(first_X), samples))
    np.put_along_axis(is_first_XB, np.array(first_X), 1, axis=1)
    rows_BF = count_BLE.reshape(samples, -1).astype(np.float64)
    first_XLE = (is_first_XB @ rows_BF).reshape(-1, layers, experts)
    second_XLE = rows_BF.sum(axis=0).reshape(layers, experts) - first_XLE
    # All experts in the second node; then those go to the first that keep most rows more there.
    more_XLE = np.sort(first_XLE - second_XLE, axis=2)[:, :, experts // 2 :]
    kept_X = second_XLE.sum(axis=(1, 2)) + more_XLE.sum(axis=(1, 2))
    share_X = 1 - kept_X / rows_BF.sum()
    return float(share_X.mean()), float(share_X.min())


def packed_crossing(count_BLE: np.ndarray, model: ModelShape) -> float:
    """Return the share of crossing rows after packing samples that were given one to each rank."""
    tokens_B = np.full(len(count_BLE), LENGTH // model.top_k)
    counts = RouteCounts(
        model=model,
        count_BLE=count_BLE,
        tokens_B=tokens_B,
        names=tuple(map(str, range(len(count_BLE)))),
        layer_numbers=model.layer_numbers,
    )
    bins_R = [[np.array([sample])] for sample in range(len(count_BLE))]
    given = build_schedule(bins_R, tokens_B, stage="update", policy=POLICY)
    return pack_window(sketch_counts(counts), given, node_R=NODE_R, policy=POLICY).crossing


if __name__ == "__main__":
    raise SystemExit(main())
