"""Make one HTML file of a page: template, styles and script from package data, plotly's script from its package.

A browser fetches nothing when it opens the page: everything is in the file, and its content policy forbids the rest.
Templates hold no figures and no logic beyond loops. Data is in two places:
    page-data     JSON: charts (traces, layout, views), themes
    files         each a gzip of the text, base64: plotly's script; for download, the result as JSON and every
                  section's data as CSV
"""

import base64
import csv
import gzip
import io
import json
from importlib import resources
from pathlib import Path
from typing import Any

from equipoise.core import EquipoiseError
from equipoise.core.files import whole_file
from equipoise.report.page import DEFINITIONS, Cell, Chart, Page, Table

# Light and dark differ in ink, grid and ground, never in the colour of a series.
BLUE, ORANGE, GREEN, VERMILION = "#0f7fc0", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, YELLOW, GREY = "#cc79a7", "#56b4e9", "#d1c21a", "#8c8c8c"
SERIES = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, GREY)

GROUND = {"light": "#ffffff", "dark": "#15181c"}
INK = {"light": "#1d2126", "dark": "#e4e6e9"}
QUIET = {"light": "#4a525c", "dark": "#b4bac2"}
GRID = {"light": "#e6e8eb", "dark": "#2b3036"}
MIDDLE = {"light": "#f3f3f0", "dark": "#23272d"}

CIVIDIS = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


def themes() -> dict[str, dict[str, Any]]:
    """Return for each scheme `template`, for every chart, and `scales`, for heat maps by their name."""
    spread = [[i / (len(CIVIDIS) - 1), colour] for i, colour in enumerate(CIVIDIS)]
    found = {}
    for scheme in ("light", "dark"):
        diverging = [[0.0, BLUE], [0.5, MIDDLE[scheme]], [0.75, ORANGE], [1.0, VERMILION]]
        found[scheme] = {"template": _template(scheme), "scales": {"diverging": diverging, "sequential": spread}}
    return found


def _template(scheme: str) -> dict[str, Any]:
    colorbar = {
        "thickness": 10,
        "outlinewidth": 0,
        "ticks": "",
        "tickfont": {"size": 11, "color": QUIET[scheme]},
        "title": {"side": "right", "font": {"size": 11, "color": QUIET[scheme]}},
    }
    axis = {
        "gridcolor": GRID[scheme],
        "linecolor": GRID[scheme],
        "zerolinecolor": GRID[scheme],
        "tickcolor": GRID[scheme],
        "automargin": True,
        "separatethousands": True,
        "ticks": "outside",
        "ticklen": 4,
        "title": {"standoff": 8, "font": {"size": 12, "color": QUIET[scheme]}},
        "tickfont": {"size": 11, "color": QUIET[scheme]},
    }
    return {
        # Drawn only where a chart gives the outline a width: bars that touch would be read as one.
        "data": {"bar": [{"marker": {"line": {"color": GROUND[scheme]}}}]},
        "layout": {
            "font": {"family": FONT, "size": 12, "color": INK[scheme]},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "colorway": list(SERIES),
            # Turned to the left, a label ends at its tick: turned to the right, the last one would leave the chart.
            "xaxis": axis | {"autotickangles": [0, -45, -90]},
            "yaxis": axis,
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "hoverlabel": {"bgcolor": GROUND[scheme], "bordercolor": GRID[scheme], "font": {"color": INK[scheme]}},
            "coloraxis": {"colorbar": colorbar},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": QUIET[scheme], "activecolor": INK[scheme]},
            "annotationdefaults": {"font": {"color": QUIET[scheme], "size": 11}, "showarrow": False},
            "shapedefaults": {"line": {"color": QUIET[scheme]}},
        },
    }


TEMPLATES = "templates"


def render(page: Page) -> str:
    """Return the HTML of a page."""
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise EquipoiseError(
            f"a page needs {error.name}, which is not installed; run: pip install 'equipoise[report]'"
        ) from error
    # Step 1: charts as the script draws them, each with the first of its views.
    charts = []
    for chart in page.charts:
        shown = chart.views[0].visible if chart.views else (True,) * len(chart.traces)
        charts.append(
            {
                "name": chart.name,
                "traces": [{**trace, "visible": visible} for trace, visible in zip(chart.traces, shown, strict=True)],
                "layout": chart.layout,
                "views": [{"visible": view.visible, "layout": view.layout} for view in chart.views],
                "scale": chart.scale,
            }
        )
    # Step 2: JSON that may be inside a script element: no character of it can end the element or open a comment.
    data = json.dumps({"charts": charts, "themes": themes()}, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    # Step 3: the files the page offers, by name.
    files = {"plotly.min.js": get_plotlyjs(), "result.json": json.dumps(page.document)}
    files |= {f"{section.name}.csv": as_csv(section.data) for section in page.sections}
    # Step 4: the template.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("equipoise.report", TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = show_cell
    templates = resources.files("equipoise.report") / TEMPLATES
    return str(
        environment.get_template("page.html").render(
            page=page,
            halves=pair_halves(page),
            definitions=DEFINITIONS,
            style=(templates / "page.css").read_text(encoding="utf-8"),
            script=(templates / "page.js").read_text(encoding="utf-8"),
            page_data=data,
            files={name: _pack(text) for name, text in files.items()},
        )
    )


def write_page(page: Page, path: Path) -> int:
    """Write a page whole or not at all, and return its bytes."""
    content = render(page).encode()
    with whole_file(path) as draft:
        draft.write_bytes(content)
    return len(content)


def pair_halves(page: Page) -> frozenset[str]:
    """Return the sections at half width: narrow charts that follow one another, in pairs; one left over is wide."""
    halves: list[str] = []
    for sections in page.open_and_folded:
        waiting: str | None = None
        for section in sections:
            is_narrow = isinstance(section, Chart) and not section.wide
            if is_narrow and waiting is not None:
                halves += [waiting, section.name]
            waiting = section.name if is_narrow and waiting is None else None
    return frozenset(halves)


def show_cell(value: Cell) -> str:
    """Format a cell of a table on the page: as many decimals in every row, so that columns align."""
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def as_csv(table: Table) -> str:
    """Write a table as CSV, with its columns first; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return text.getvalue()


def _pack(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()
