"""The planner's report as a page for people, from the JSON line that `benchmarks.planner` prints last.

    python -m benchmarks.planner | tail -n 1 > benchmarks/reports/planner_cpu_202611.json
    python -m benchmarks.planner_report benchmarks/reports/planner_cpu_202611.json


Invariants (asserted by the tests):
1. The committed page is what the committed document makes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.results import Limit, say_limit

POLICIES = {
    "eplb-history": "eplb-history",
    "eplb-oracle": "eplb-oracle",
    "lplb": "lplb",
    "reactive": "reactive",
    "reactive-free": "reactive, charges at zero",
    "equipoise": "equipoise",
    "balanced": "balanced",
}
"""Columns of the speed-up table, and what they are called there."""
WORDS = """\
Seconds are predicted by the cost model (H200 nodes of 8; kernels measured on one H200, all-to-all modelled): no cluster
was run. Traces named "stacked" are composed: several real layers side by side as one wide layer. Loads are multiplied
to reach the tokens given; the skew lines use about 24,000 tokens per micro-step. On the traces as recorded (1,024
tokens per micro-step) rounding to whole rows alone can cost 1 row in 384 at EP16."""
SKEW_WORDS = """\
"of n not composed" is the mean over traces of real layers alone. Among them, 32 micro-steps of four unmixed domains on
64 experts in 2 nodes stay at 1.0050: few subsets of half the experts are level in 32 unlike micro-steps."""


def main() -> None:
    """Write the page beside the document."""
    parser = argparse.ArgumentParser(description="The planner's report as a page")
    parser.add_argument("document", type=Path, help="what benchmarks.planner printed last, as a file")
    path = parser.parse_args().document
    path.with_suffix(".md").write_text(page_of(json.loads(path.read_text()), path.name))


def page_of(document: dict[str, Any], name: str) -> str:
    """The page of a document in a file of this name."""
    versions = ", ".join(f"{package} {number}" for package, number in document["versions"].items())
    limits = [Limit(**{key: limit[key] for key in Limit.__slots__}) for limit in document["limits"]]
    missed = sum(not limit.holds for limit in limits)
    lines = [
        "# Planner: quality and speed, 2 cores of an Intel Xeon, November 2026",
        "",
        "    python -m benchmarks.planner",
        "",
        f"Commit {document['commit']}, {document['machine']}, {versions}; one run.",
        f"Every row stands in [{name}]({name}). Times vary by about a quarter between runs on this shared machine;",
        "plans do not vary at all.",
        "",
        WORDS,
        "",
        "## Limits",
        "",
        "```",
        *(say_limit(limit) for limit in limits),
        "```",
        "",
        "Every line holds." if not missed else f"{missed} of {len(limits)} lines do not hold.",
        "",
        SKEW_WORDS,
        "",
        "## Predicted speed-up over static",
        "",
        *_speed_ups(document["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _speed_ups(rows: list[dict[str, Any]]) -> list[str]:
    head = ["trace", "EP", "tokens", "slots", *POLICIES.values()]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["table"] == "seconds":
            at = row["trace"], row["EP"], row["tokens"], row["slots"]
            times.setdefault(at, {})[row["policy"]] = row["predicted_ms"]
    for (trace, ep, tokens, slots), found in times.items():
        ratios = [f"{found['static'] / found[policy]:.3f}" for policy in POLICIES]
        lines.append(f"| {trace} | {ep} | {tokens:,} | {slots} | {' | '.join(ratios)} |")
    return lines


if __name__ == "__main__":
    main()
