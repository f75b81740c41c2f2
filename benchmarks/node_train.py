"""Whole training steps on ranks that share a GPU: tokens per second of every stage, `static` and `equipoise`.

`equipoise train --preset node-gpu` runs once in each mode, with the same seed. Under `seconds` a plan is used only if
it pays, so the table also says how much was displaced and replicated. First steps warm up and are left out.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODES = ("static", "equipoise")
WARM = 2
STAGES = ("rollout", "sync", "recompute", "update")


def train_mode(
    mode: str, *, steps: int, preset: str = "node-gpu", settings: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Train in one mode and return one row per stage.

    Args:
        steps: in all, of which `WARM` are left out
        settings: `a.b=value` each, see `equipoise train --set`
    """
    with tempfile.TemporaryDirectory(prefix="node-train-") as folder:
        changed = (f"steps={steps}", f"balance.mode={mode}", *settings)
        command = [sys.executable, "-m", "equipoise", "train", "--preset", preset, "--out", folder, "--json"]
        subprocess.run([*command, *(word for one in changed for word in ("--set", one))], check=True)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return stage_rows(mode, [json.loads(line) for line in lines])


def stage_rows(mode: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second of each stage and of the whole step, medians over the steps that are not warm-up."""
    timed, rows = steps[WARM:], []
    for stage in (*STAGES, "step"):
        seconds = [step["seconds"] if stage == "step" else step["stage_s"][stage] for step in timed]
        tokens = [step["tokens_per_s"] * step["seconds"] for step in timed]
        rates = [count / took for count, took in zip(tokens, seconds, strict=True)]
        middle = statistics.median(rates)
        rows.append(
            {
                "mode": mode,
                "stage": stage,
                "seconds": round(statistics.median(seconds), 3),
                "tokens_per_s": round(middle),
                "spread_pct": round(100 * (max(rates) - min(rates)) / middle, 1),
                "skew_after": round(statistics.median(step["skew_after"] for step in timed), 3),
                "displaced": round(statistics.median(step["displaced"] for step in timed)),
                "replicas": round(statistics.median(step["replicas"] for step in timed)),
            }
        )
    return rows
