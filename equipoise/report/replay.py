"""The page of a rank replay: what `python -m benchmarks.rank_replay -o FILE` wrote. Measured, one rank after another.

Reads its document: benchmark "rank replay", device, commit, torch, note, rows {case, stage, policy, skew, layer_ms,
"pct measured", "pct with all-to-all", "pct charged", spread_pct}, limits, cases [{name, variants {policy:
{forward_ns_MLR, update_ns_MLR}}}].

`validation_chart` reads what `python -m benchmarks.validate` wrote: replay {device, commit, ...} and rows {case, stage,
"shape visited", "layer mean", "layer worst", "run mean", "run worst"}, errors in percent of what was measured.

The timeline of a case is composed as the replay composes it: ranks start a layer together, when the slowest one has
finished the layer before.
"""

from itertools import pairwise
from typing import Any

from equipoise.core import EquipoiseError
from equipoise.report.charts import bars, frame, limit_line, timeline, with_unit
from equipoise.report.page import Chart, Figure, Missing, Page, Table, seconds
from equipoise.report.render import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

FORMAT = "rank replay"
STAGE = "update"
"""Stage whose timeline is shown."""
Document = dict[str, Any]
_COLOURS = (VERMILION, ORANGE, YELLOW, PURPLE, SKY, GREEN, GREY)
_COLUMNS = ("case", "stage", "policy", "skew", "layer_ms", "pct measured", "pct with all-to-all", "pct charged")
NOT_MEASURED = Missing(
    title="Predicted against measured",
    text="How far predictions are from what a rank replay measured can be shown beside this result:",
    command="python -m benchmarks.validate REPLAY -o validate.json; equipoise report RESULT --measured validate.json",
)
_LEVELS = {"layer": BLUE, "run": ORANGE}
_PLACE, _ERRORS = ("case", "stage", "shape visited"), ("layer mean", "layer worst", "run mean", "run worst")


def replay_page(document: Document, *, title: str) -> Page:
    """Make the page of a rank replay."""
    rows = document["rows"]
    ours = [row["pct measured"] for row in rows if row["policy"] == "equipoise"]
    static = [row["pct measured"] for row in rows if row["policy"] == "static"]
    return Page(
        title=title,
        kind=f"Rank replay on one {document['device']}, torch {document['torch']}, commit {document['commit'][:10]}",
        answer=f"In its measured parts the MoE layer reaches {min(ours):.1f} to {max(ours):.1f} % of a balanced one's "
        f"throughput with equipoise, {min(static):.1f} to {max(static):.1f} % without.",
        conditions=(f"Measured: {document['note']}.",),
        notes=(),
        figures=_figures(rows),
        sections=(_shares(document), _timeline(document)),
        missing=(),
        document=document,
    )


def replay_timelines(document: Document) -> dict[str, list[Document]]:
    """Return the events of the first micro-step of every case and policy, like the timeline of a result."""
    return {
        f"{case['name']}, {policy}": _events(measured[f"{STAGE}_ns_MLR"][0])
        for case in document["cases"]
        for policy, measured in case["variants"].items()
    }


def _events(ns_LR: list[list[int]]) -> list[Document]:
    starts = [0.0]
    for ns_R in ns_LR:
        starts.append(starts[-1] + max(ns_R) * 1e-9)
    return [
        {"rank": rank, "lane": "compute", "name": f"layer {layer}", "start_s": start, "end_s": start + ns * 1e-9}
        for layer, (start, _) in enumerate(pairwise(starts))
        for rank, ns in enumerate(ns_LR[layer])
    ]


def _figures(rows: list[Document]) -> tuple[Figure, ...]:
    ours = [row for row in rows if row["policy"] == "equipoise"]
    worst = min(ours, key=lambda row: row["pct measured"])
    named = {"Measured parts": "pct measured", "With all-to-all": "pct with all-to-all", "Every charge": "pct charged"}
    found = [
        Figure(
            label=label,
            value=f"{sum(row[name] for row in ours) / len(ours):.1f} %",
            text=f"of balanced, mean of {len(ours)}",
        )
        for label, name in named.items()
    ]
    where = f"{worst['case']}, {worst['stage']}"
    return (*found, Figure(label="Worst, measured", value=f"{worst['pct measured']:.1f} %", text=where))


def _shares(document: Document) -> Chart:
    rows = document["rows"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    others = [name for name in policies if name != "equipoise"]
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(others)} | {"equipoise": BLUE}
    layout = frame(height=380, x="", y="% of balanced, measured parts") | {"barmode": "group", "bargap": 0.2}
    return Chart(
        name="share-of-balanced",
        title="Throughput of the MoE layer, share of balanced",
        caption="Measured parts alone, every rank's own work composed by the slowest rank; 100 % is every rank with "
        f"the mean load. Spread over runs: {max(row['spread_pct'] for row in rows):.1f} % at most.",
        traces=tuple(
            bars(
                name,
                [f"{row['case']}<br>{row['stage']}" for row in rows if row["policy"] == name],
                [row["pct measured"] for row in rows if row["policy"] == name],
                colour=colours[name],
                hover=f"{name}: %{{y:.1f}} %<extra></extra>",
            )
            for name in policies
        ),
        layout=layout | limit_line(100, "balanced"),
        data=Table(columns=_COLUMNS, rows=tuple(tuple(row[column] for column in _COLUMNS) for row in rows)),
        terms=("balanced", "measured", "static", "reactive", "equipoise"),
    )


def _timeline(document: Document) -> Chart:
    case = document["cases"][0]
    wanted = ("static", "equipoise", "balanced")
    named = {policy: case["variants"][policy] for policy in wanted if policy in case["variants"]}
    events = {policy: _events(measured[f"{STAGE}_ns_MLR"][0]) for policy, measured in named.items()}
    ends = [f"{seconds(max(event['end_s'] for event in found))} with {policy}" for policy, found in events.items()]
    return timeline(
        events,
        caption=f"Measured, {case['name']}, first micro-step of the {STAGE}, MoE layers one after another without "
        f"their all-to-all: {', '.join(ends)}. Gaps are waits for the slowest rank.",
    )


def validation_chart(document: Document, name: str = "the validation") -> Chart:
    """Draw the mean errors of every case and stage."""
    if document.get("benchmark") != "validate" or not document.get("rows"):
        raise EquipoiseError(f"{name} is no validation; give what `python -m benchmarks.validate REPLAY -o FILE` wrote")
    rows = document["rows"]
    total, device = rows[-1], document["replay"]["device"]
    layout = frame(height=110 + 34 * len(rows), x="mean error, % of what was measured", y="")
    layout |= {"barmode": "group", "bargap": 0.3}
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "showgrid": False, "ticks": ""}
    return Chart(
        name="predicted-against-measured",
        title="Predicted against measured",
        caption=f"Predictions of a run are off by {total['run mean']:.1f} % on average, {total['run worst']:.1f} % at "
        f"worst, of a layer by {total['layer mean']:.1f} %: each rank's work on one {device}, the modelled all-to-all "
        "left out.",
        traces=tuple(
            bars(
                f"by {level}",
                [row[f"{level} mean"] for row in rows],
                [f"{row['case']}, {row['stage']}" for row in rows],
                colour=colour,
                hover="%{y}<br>mean %{x:.2f} %, worst %{customdata:.2f} %<extra></extra>",
                orientation="h",
                customdata=[row[f"{level} worst"] for row in rows],
            )
            for level, colour in _LEVELS.items()
        ),
        layout=layout,
        data=Table(
            columns=(*_PLACE, *with_unit(_ERRORS, "%")),
            rows=tuple(tuple(row[column] for column in _PLACE + _ERRORS) for row in rows),
        ),
        terms=("predicted", "measured"),
    )
