"""What charts share: a frame with named axes, lines, heat maps with a before/after switch.

Knows plotly's words for traces and layout. Does not know loads or seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from equipoise.report.binning import MAX_CELLS, bin_labels, bin_matrix, binning_note
from equipoise.report.page import Cell, Table, View
from equipoise.report.theme import BLUE, VERMILION

STYLES = {
    "before": (VERMILION, "solid"),
    "after": (BLUE, "solid"),
    "before, worst layer": (VERMILION, "dot"),
}
"""Colour and dash of the lines that mean the same in every chart."""
HALF_HEIGHT = 420
"""Of heat maps that stand side by side, pixels."""
MAX_TICKS = 10
"""Of an axis that counts: as many stand side by side in a narrow window."""
MAX_SHOWN_WINDOWS = 8
"""More windows than these are not named in a chart: the names would lie on each other."""


def frame(*, height: int, x: str, y: str, hover: Literal["closest", "x unified"] = "closest") -> dict[str, Any]:
    """A layout with named axes."""
    return {
        "height": height,
        "hovermode": hover,
        # The page writes the legend itself, where it can wrap.
        "showlegend": False,
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
    }


def whole_ticks(count: int) -> dict[str, Any]:
    """Ticks of an axis over `count` things that cannot be halved, such as micro-steps: steps of 1, 2, 5, 10, 20, ..."""
    steps = (digit * 10**power for power in range(len(str(count)) + 1) for digit in (1, 2, 5))
    return {"tick0": 0, "dtick": next(step for step in steps if step * MAX_TICKS >= count), "tickformat": ",d"}


def line(name: str, x: Sequence[Cell], y: Sequence[float], *, style: tuple[str, str]) -> dict[str, Any]:
    """One line; `style` is its colour and dash."""
    colour, dash = style
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": name,
        "x": list(x),
        "y": [round(float(v), 5) for v in y],
        "line": {"color": colour, "dash": dash, "width": 1.25 if dash == "dot" else 2},
        "marker": {"color": colour},
        "hovertemplate": "%{y:.3f}",
    }


def window_marks(windows: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Shapes and annotations: a thin line where a window begins, with its name."""
    if not 1 < len(windows) <= MAX_SHOWN_WINDOWS:
        return {}
    starts = np.cumsum([0, *(length for _, length in windows)])[:-1].tolist()
    lines = [
        {"type": "line", "x0": s - 0.5, "x1": s - 0.5, "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0.75}}
        for s in starts[1:]
    ]
    words = [
        {"x": s, "y": 1, "yref": "paper", "text": name, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
        for s, (name, _) in zip(starts, windows, strict=True)
    ]
    return {"shapes": lines, "annotations": words, "margin": {"t": 24}}


def limit_line(value: float, words: str, *, at: Literal["left", "right"] = "left") -> dict[str, Any]:
    """Shapes and annotations: a dashed line across the chart at a limit, with its name at the end that is free."""
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {
        "shapes": [{**across, "line": {"width": 1.25, "dash": "dash"}}],
        "annotations": [
            {"xref": "paper", "x": int(at == "right"), "y": value, "text": words, "xanchor": at, "yanchor": "bottom"}
            | {"showarrow": False}
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Axes of a heat map."""

    rows: str
    columns: str
    row_labels: Sequence[int]
    column_labels: Sequence[int]
    value: str
    """What a cell holds."""
    format: str = ".2f"


def heat_map(
    matrices: dict[str, np.ndarray],
    grid: Grid,
    *,
    ends: tuple[float, float],
    height: int | None = None,
    limits: tuple[int, int] = MAX_CELLS,
) -> dict[str, Any]:
    """Traces, layout, data, views and note of heat maps over the same axes, one shown at a time.

    Args:
        matrices: [rows, columns] by the name of their view
        grid: the axes
        ends: lowest and highest value that has a colour of its own, the same for all
        height: in pixels; by the number of rows where it is left out
        limits: most rows and columns; beyond, cells are binned
    """
    binned = {name: bin_matrix(matrix, limits=limits) for name, matrix in matrices.items()}
    first = next(iter(binned.values()))
    rows, columns = bin_labels(grid.row_labels, first.row_size), bin_labels(grid.column_labels, first.column_size)
    layout = frame(height=height or max(240, min(520, 110 + 13 * len(rows))), x=grid.columns, y=grid.rows)
    # Labels of blocks are words; without this plotly would read "12-15" as a date.
    layout["xaxis"] |= {"type": "category", "nticks": 16, "showgrid": False, "ticks": ""}
    layout["yaxis"] |= {"type": "category", "nticks": 12, "showgrid": False, "ticks": "", "autorange": "reversed"}
    layout["coloraxis"] = {"cmin": ends[0], "cmax": ends[1], "colorbar": {"title": {"text": grid.value}}}
    traces = [_cells(name, cells.cells, rows, columns, grid) for name, cells in binned.items()]
    return {
        "traces": tuple(traces),
        "layout": layout,
        "data": _matrix_table(matrices, grid),
        "views": switch(list(matrices)),
        "note": binning_note(first, f"{grid.rows}s", f"{grid.columns}s"),
    }


def switch(view_of_trace: Sequence[str]) -> tuple[View, ...]:
    """A view for each name, which shows the traces that belong to it; none where there is one name."""
    names = dict.fromkeys(view_of_trace)
    if len(names) < 2:
        return ()
    return tuple(View(label=n.capitalize(), visible=tuple(other == n for other in view_of_trace)) for n in names)


def _cells(name: str, cells: np.ndarray, rows: list[str], columns: list[str], grid: Grid) -> dict[str, Any]:
    place = f"{grid.rows} %{{y}}, {grid.columns} %{{x}}"
    return {
        "type": "heatmap",
        "name": name,
        "x": columns,
        "y": rows,
        "z": [[_short(v) for v in row] for row in cells.tolist()],
        "coloraxis": "coloraxis",
        "hovertemplate": f"{place}<br>{grid.value} %{{z:{grid.format}}}<extra></extra>",
    }


def _matrix_table(matrices: dict[str, np.ndarray], grid: Grid) -> Table:
    stacked = np.stack(list(matrices.values()), axis=-1).tolist()
    rows = tuple(
        (int(grid.row_labels[i]), int(grid.column_labels[j]), *(_short(v, digits=7) for v in values))
        for i, line_ in enumerate(stacked)
        for j, values in enumerate(line_)
    )
    return Table(columns=(grid.rows, grid.columns, *with_unit(matrices, grid.value)), rows=rows)


def with_unit(names: Iterable[str], unit: str) -> tuple[str, ...]:
    """Headers of a table: 'before, MiB'."""
    return tuple(f"{name}, {unit}" for name in names)


def _short(value: float, *, digits: int = 4) -> float:
    """The value with as many digits as are seen, so that a page stays small."""
    return float(f"{value:.{digits}g}")
