"""Colours and type of the charts, light and dark: two plotly templates and the scales of heat maps.

Knows colours alone. Series take the Okabe-Ito palette, which stays apart under the common colour blindnesses;
heat maps take cividis, or a scale from blue through the page's ground to vermilion where a value has a middle.

Invariants (asserted by the tests):
1. Light and dark differ in ink, grid and ground, never in the colour of a series.
2. Ink stands out from its ground by a contrast of at least 7, series colours by at least 1.7.
"""

from typing import Any

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
    """For each scheme: `template` for every chart, and `scales` for heat maps by their name."""
    return {scheme: {"template": _template(scheme), "scales": _scales(scheme)} for scheme in ("light", "dark")}


def _template(scheme: str) -> dict[str, Any]:
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
            "coloraxis": {"colorbar": _colorbar(scheme)},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": QUIET[scheme], "activecolor": INK[scheme]},
            "annotationdefaults": {"font": {"color": QUIET[scheme], "size": 11}, "showarrow": False},
            "shapedefaults": {"line": {"color": QUIET[scheme]}},
        },
    }


def _colorbar(scheme: str) -> dict[str, Any]:
    return {
        "thickness": 10,
        "outlinewidth": 0,
        "ticks": "",
        "tickfont": {"size": 11, "color": QUIET[scheme]},
        "title": {"side": "right", "font": {"size": 11, "color": QUIET[scheme]}},
    }


def _scales(scheme: str) -> dict[str, list[list[Any]]]:
    diverging = ((0.0, BLUE), (0.5, MIDDLE[scheme]), (0.75, ORANGE), (1.0, VERMILION))
    spread = [[i / (len(CIVIDIS) - 1), colour] for i, colour in enumerate(CIVIDIS)]
    return {"diverging": [list(stop) for stop in diverging], "sequential": spread}
