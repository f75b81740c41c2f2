"""The papers' comparison as files: every row as JSON, and a page for people."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Limit, format_table, read_commit, read_machine

PUBLISHED = (
    ("over Megatron-LM / other systems, training throughput", "step_over_static", "1.21-1.58x", "up to 1.45x"),
    ("over EPLB with oracle loads (ReLibra: EPLB and LPLB)", "step_over_eplb-oracle", "1.06-1.21x", "-"),
    ("over ReLibra's method, as built here", "step_over_relibra", "-", "-"),
    ("the most anyone could gain there: balanced over the same, expert time", "most_over_eplb-oracle", "-", "-"),
    ("share of forced-balanced throughput", "step_of_balanced", "90-94 %", "-"),
    ("the same, expert time", "of_balanced", "-", "-"),
    ("the same, expert compute alone", "compute_of_balanced", "-", "-"),
    ("fluctuation of an expert's share over micro-steps", "fluctuation", "no figure found", "no figure found"),
    ("rank skew before, static", "skew", "above 2.0 as EP grows", "-"),
    ("rank skew after", "skew_after", "1.00-1.08 (EP8-64)", "-"),
)
"""(what, our column, ReLibra arXiv 2605.08639, ForeMoE arXiv 2606.11867), authors' own figures."""

SKEW_WORDS = (
    "Generated loads are more skewed under contiguous placement than the recorded ones, so static looks worse there;",
    "for speed-ups over static, look at the real columns first. Of mathematics and code the recordings have too few",
    "tokens for 32 micro-steps: the same answers come again in other orders. Composed micro-steps hold about three",
    "answers and fluctuate more than those of whole samples, which hold 32: gains over oracle EPLB are smaller there.",
)
AIM_WORDS = (
    "Throughput is that of a step without rollout, optimizer and head, ReLibra's measure. Expert time is compute,",
    "all-to-all, transfers and planning. What is missing to balanced beyond expert compute is the busiest link of the",
    "all-to-all, which an even spread does not have, and exposed overhead. Over oracle EPLB no one can gain more than",
    "balanced does (`most/eplb`): where that is below 1.2, the aim is out of reach.",
)
COLUMN_WORDS = (
    "`/x`: expert time of policy x over ours; `react-0` is reactive with its charges at zero; `of bal`: balanced's",
    "expert time over ours, `compute`: the same of compute alone; `step/x`: whole step without rollout; `experts`:",
    "share of expert time in static's step; `exposed`: transfers and planning that nothing hides, of our expert time;",
    "`most/eplb`: oracle EPLB's expert time over balanced's; `step of bal`: balanced's step over ours.",
)


def write_report(
    path: Path,
    rows: Sequence[Any],
    taken_apart: Sequence[Any],
    *,
    limits: Sequence[Limit],
    layers: int,
    note: str,
    only: Sequence[str] = (),
) -> None:
    """Write `<path>.json` and `<path>.md`."""
    chosen = f"--only {' '.join(only)} " if only else ""
    said = [{"name": x.name, "value": x.value, "holds": x.holds} for x in limits]
    document = {
        "benchmark": "paper",
        "command": f"python -m benchmarks.paper --layers {layers} {chosen}--write {path}",
        "layers": layers,
        "commit": read_commit(),
        "machine": read_machine(),
        "rows": [*rows, *taken_apart],
        "limits": said,
    }
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(page_of(document, rows, taken_apart, limits, note)) + "\n")


def page_of(
    document: dict[str, Any], rows: Sequence[Any], taken_apart: Sequence[Any], limits: Sequence[Limit], note: str
) -> list[str]:
    """Lines of the page."""
    return [
        "# The papers' comparison, simulated",
        "",
        f"    {document['command']}",
        "",
        f"Commit {document['commit']}; computed on {document['machine']}. No spread: same input, same result.",
        "",
        f"{note[0].upper()}{note[1:]}.",
        "",
        f"Of each model {document['layers']} MoE layers are simulated, of the composed one all 21.",
        "",
        "## Beside the papers",
        "",
        "Least to most over all cases of a kind. Not the same traces, cluster or code: the papers' figures are their",
        "authors' measurements, ours are simulated.",
        "",
        *_beside(rows),
        "",
        *SKEW_WORDS,
        "",
        "## Aims",
        "",
        *AIM_WORDS,
        "",
        "```",
        *(_limit(limit) for limit in limits),
        "```",
        "",
        "## Every case",
        "",
        *COLUMN_WORDS,
        "",
        "```",
        format_table([_short(row) for row in rows]),
        "```",
        "",
        "## Taken apart",
        "",
        "```",
        format_table([{k: v for k, v in row.items() if k != "table"} for row in taken_apart]),
        "```",
    ]


def _beside(rows: Sequence[Any]) -> list[str]:
    kinds = list(dict.fromkeys((row["source"], row["crossing"]) for row in rows))
    head = ["", *(f"{source}, {crossing} cross" for source, crossing in kinds), "ReLibra", "ForeMoE"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for what, column, relibra, foremoe in PUBLISHED:
        if column not in rows[0]:
            continue
        ranges = []
        for kind in kinds:
            values = [row[column] for row in rows if (row["source"], row["crossing"]) == kind]
            ranges.append(f"{min(values):.3f}-{max(values):.3f}")
        lines.append(f"| {what} | {' | '.join(ranges)} | {relibra} | {foremoe} |")
    return lines


def _limit(limit: Limit) -> str:
    bound = f"at least {limit.at_least}" if limit.at_least is not None else f"at most {limit.at_most}"
    return f"{'holds' if limit.holds else 'FAILS'}: {limit.name} is {limit.value:.4f}, {bound}"


def _short(row: Any) -> dict[str, Any]:
    """A row with short column names, so that a line fits on a page."""
    names = {
        "source": "source",
        "model": "model",
        "workload": "load",
        "EP": "EP",
        "crossing": "crossing",
        "skew": "skew",
        "skew_after": "after",
        "fluctuation": "fluct",
        "over_static": "/static",
        "over_lpt": "/lpt",
        "over_eplb-oracle": "/eplb",
        "over_eplb-oracle-blind": "/blind",
        "over_lplb": "/lplb",
        "over_relibra": "/relibra",
        "over_reactive": "/react",
        "over_reactive-free": "/react-0",
        "of_balanced": "of bal",
        "compute_of_balanced": "compute",
        "step_over_static": "step/static",
        "step_over_eplb-oracle": "step/eplb",
        "step_over_relibra": "step/relibra",
        "step_of_balanced": "step of bal",
        "most_over_eplb-oracle": "most/eplb",
        "expert_share": "experts",
        "exposed": "exposed",
    }
    return {short: row[name] for name, short in names.items() if name in row}
