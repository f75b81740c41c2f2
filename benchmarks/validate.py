"""Predictions of the cost model beside what the rank replay measured, over measured parts only.

    python -m benchmarks.validate benchmarks/reports/rank_replay_h200_202611.json

Needs no GPU. The profile is the package's own for the device; the replay's model shapes, row counts and group sizes are
others than those calibration visited, except where the table says that the expert shape was visited.

What is compared, forward alone and update:
- `rank`: the MoE part of every (micro-step, layer, rank): expert products over its rows and slots, putting received
  rows in order and back, and in an update the adds of returned gradients, each priced by itself, in the dtype that the
  replay says it added in (`added_entry_bytes`; a file that does not say it added in fp32);
- `layer`: the slowest rank of every (micro-step, layer), with spreading and combining the rank's own tokens: what a
  layer takes without its all-to-all;
- `run`: the sum of all layers of a case under a policy: what a user is told.
An error is (predicted - measured) / measured; means are of absolute errors. Noise of the measurement is part of it: the
slowest of many equal ranks is one that was measured late.

Left out: the modelled all-to-all, which was not measured, and `two calls`, which the model does not price. Listed but
not judged: `balanced, even`, whose even groups no placement gives and the model does not know.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Limit, publish
from equipoise.core import Cluster, ModelShape
from equipoise.cost import CostModel, Profile
from equipoise.cost.model import GRADIENT_BYTES, interpolate

LIMIT_PCT = 5.0
UNPRICED = ("equipoise, two calls",)
UNJUDGED = ("balanced, even",)
STAGES = {"forward": "recompute", "update": "update"}
"""Stage of the replay, and of the cost model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One variant of a case in one stage, predicted and measured, in nanoseconds."""

    case: str
    variant: str
    stage: str
    is_visited: bool
    """Whether calibration measured this expert shape."""
    predicted_MLR: np.ndarray
    measured_MLR: np.ndarray
    predicted_sent: float
    measured_sent: float

    def errors(self, level: str) -> np.ndarray:
        """Signed relative errors at one level."""
        if level == "rank":
            return (self.predicted_MLR / self.measured_MLR - 1).reshape(-1)
        predicted_ML, measured_ML = self.predicted_MLR.max(axis=2), self.measured_MLR.max(axis=2)
        predicted_ML, measured_ML = predicted_ML + self.predicted_sent, measured_ML + self.measured_sent
        if level == "layer":
            return (predicted_ML / measured_ML - 1).reshape(-1)
        return np.array([predicted_ML.sum() / measured_ML.sum() - 1])


def compare_case(case: dict[str, Any], profile: Profile, cluster: Cluster) -> Iterator[Compared]:
    """Predict every variant of one replayed case."""
    model = ModelShape.preset(case["model"])
    visited = {(table.hidden, table.expert_width) for table in profile.tables}
    for number, (stage, model_stage) in enumerate(STAGES.items()):
        cost = CostModel.of(cluster, model, stage=model_stage, profile=profile)
        for name, variant in case["variants"].items():
            if name not in UNPRICED:
                yield Compared(
                    case=case["name"],
                    variant=name,
                    stage=stage,
                    is_visited=(model.hidden, model.expert_width) in visited,
                    predicted_MLR=predict_MLR(variant, cost, case.get("added_entry_bytes", GRADIENT_BYTES)),
                    measured_MLR=np.array(variant[f"{stage}_ns_MLR"], dtype=np.float64),
                    predicted_sent=float(cost.sending_ns(case["tokens"] * case["top_k"])),
                    measured_sent=float(case["sent_ns"][number]),
                )


def predict_MLR(variant: dict[str, Any], cost: CostModel, entry_bytes: int) -> np.ndarray:
    """[M, L, R] predicted nanoseconds of each rank's MoE part; `entry_bytes` are those of one entry of a gradient."""
    rows_MLR, busy_MLR, added_MLR = (np.array(variant[f"{key}_MLR"]) for key in ("rows", "busy", "added"))
    tables = cost.tables(int(busy_MLR.max()))
    add_ns = cost.add_ns(cost.model.expert_params * entry_bytes) if cost.stage == "update" else 0
    return np.array(
        [
            interpolate(tables.rows_X, tables.compute_ns_SX[busy], int(rows)) + int(added) * add_ns
            for rows, busy, added in zip(rows_MLR.flat, busy_MLR.flat, added_MLR.flat, strict=True)
        ],
        dtype=np.float64,
    ).reshape(rows_MLR.shape)


def row_of(name: str, parts: list[Compared], *, stage: str, is_visited: bool) -> dict[str, Any]:
    """One line: errors of several comparisons together, in percent."""
    line: dict[str, Any] = {"case": name, "stage": stage, "shape visited": "yes" if is_visited else "no"}
    line["policies"] = len(parts)
    for level in ("rank", "layer", "run"):
        errors = 100 * np.concatenate([part.errors(level) for part in parts])
        line[f"{level} mean"] = round(float(np.abs(errors).mean()), 2)
        line[f"{level} worst"] = round(float(errors[np.abs(errors).argmax()]), 2)
    return line


def rows_of(compared: list[Compared]) -> list[dict[str, Any]]:
    """A line per case and stage over the judged policies, lines for what is not judged, and all together."""
    judged = [part for part in compared if part.variant not in UNJUDGED]
    rows = []
    for case, stage in dict.fromkeys((part.case, part.stage) for part in compared):
        here = [part for part in judged if (part.case, part.stage) == (case, stage)]
        rows.append(row_of(case, here, stage=stage, is_visited=here[0].is_visited))
    for name in UNJUDGED:
        for stage in STAGES:
            here = [part for part in compared if (part.variant, part.stage) == (name, stage)]
            if here:
                is_visited = all(part.is_visited for part in here)
                rows.append(row_of(f"{name} (not judged)", here, stage=stage, is_visited=is_visited))
    for words, is_wanted in (("visited shapes", True), ("other shapes", False)):
        here = [part for part in judged if part.is_visited == is_wanted]
        if here:
            rows.append(row_of(f"all, {words}", here, stage="both", is_visited=is_wanted))
    return [*rows, row_of("all", judged, stage="both", is_visited=all(part.is_visited for part in judged))]


def limits_of(rows: list[dict[str, Any]]) -> list[Limit]:
    """The promise: errors under 5 % in the mean."""
    total = rows[-1]
    return [
        Limit(name=f"mean error in %, {level}", value=total[f"{level} mean"], at_most=LIMIT_PCT)
        for level in ("rank", "layer", "run")
    ]


def main() -> int:
    """Compare and publish."""
    parser = argparse.ArgumentParser(description="Predicted against measured.")
    parser.add_argument("replay", type=Path, help="what benchmarks/rank_replay.py wrote")
    parser.add_argument("--profile", default="h200", help="a profile's name or file")
    parser.add_argument("-o", "--output", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    replay = json.loads(given.replay.read_text())
    profile, cluster = Profile.read(given.profile), Cluster.preset("h200")
    compared = [one for case in replay["cases"] for one in compare_case(case, profile, cluster)]
    rows = rows_of(compared)
    limits = limits_of(rows)
    if given.output:
        facts = {key: replay[key] for key in ("commit", "device", "driver", "torch", "date")}
        held = [{"name": one.name, "value": one.value, "at_most": one.at_most, "holds": one.holds} for one in limits]
        document = {"benchmark": "validate", "replay": facts, "profile": given.profile, "rows": rows, "limits": held}
        given.output.write_text(json.dumps(document) + "\n")
    return publish("validate", rows, limits=limits, note="errors in percent; measured parts only")


if __name__ == "__main__":
    sys.exit(main())
