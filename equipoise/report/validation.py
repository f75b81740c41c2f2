"""Predicted against measured on a page: what `python -m benchmarks.validate` wrote, as a chart of errors.

Reads its document: replay {device, commit, ...} and rows {case, stage, "shape visited", "layer mean", "layer worst",
"run mean", "run worst"}, errors in percent of what was measured.
"""

from typing import Any

from equipoise.core import EquipoiseError
from equipoise.report.frame import frame, with_unit
from equipoise.report.page import Cell, Chart, Missing, Table
from equipoise.report.theme import BLUE, ORANGE

NOT_MEASURED = Missing(
    title="Predicted against measured",
    words="How far predictions are from what a rank replay measured can be shown beside this result:",
    command="python -m benchmarks.validate REPLAY -o validate.json; equipoise report RESULT --measured validate.json",
)
_LEVELS = {"layer": BLUE, "run": ORANGE}
_PLACE, _ERRORS = ("case", "stage", "shape visited"), ("layer mean", "layer worst", "run mean", "run worst")


def validation_chart(document: dict[str, Any], *, name: str = "the validation") -> Chart:
    """Mean errors of every case and stage."""
    if document.get("benchmark") != "validate" or not document.get("rows"):
        raise EquipoiseError(f"{name} is no validation; give what `python -m benchmarks.validate REPLAY -o FILE` wrote")
    rows = document["rows"]
    total, device = rows[-1], document["replay"]["device"]
    bars = [f"{row['case']}, {row['stage']}" for row in rows]
    cells: list[tuple[Cell, ...]] = [tuple(row[column] for column in _PLACE + _ERRORS) for row in rows]
    layout = frame(height=110 + 34 * len(rows), x="mean error, % of what was measured", y="", hover="closest")
    layout |= {"barmode": "group", "bargap": 0.3}
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "showgrid": False, "ticks": ""}
    return Chart(
        name="predicted-against-measured",
        title="Predicted against measured",
        caption=f"Predictions of a run are off by {total['run mean']:.1f} % on average, {total['run worst']:.1f} % at "
        f"worst, of a layer by {total['layer mean']:.1f} %: each rank's work on one {device}, the modelled all-to-all "
        "left out.",
        traces=tuple(_errors(level, rows, bars) for level in _LEVELS),
        layout=layout,
        data=Table(columns=(*_PLACE, *with_unit(_ERRORS, "%")), rows=tuple(cells)),
        terms=("predicted", "measured"),
    )


def _errors(level: str, rows: list[dict[str, Any]], bars: list[str]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"by {level}",
        "y": bars,
        "x": [row[f"{level} mean"] for row in rows],
        "marker": {"color": _LEVELS[level]},
        "customdata": [row[f"{level} worst"] for row in rows],
        "hovertemplate": "%{y}<br>mean %{x:.2f} %, worst %{customdata:.2f} %<extra></extra>",
    }
