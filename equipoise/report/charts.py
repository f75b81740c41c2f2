"""What charts share: a frame with named axes, lines, heat maps with a before/after switch.

Knows plotly's words for traces and layout. Does not know loads or seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from equipoise.report.page import MAX_CELLS, Cell, Chart, Table, View, bin_labels, bin_matrix, binning_note, percent
from equipoise.report.render import BLUE, GREEN, GREY, ORANGE, PURPLE, SERIES, SKY, VERMILION, YELLOW

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


# Charts of loads: skew over micro-steps, by layer and by EP width; heat maps of ranks and of experts.
#
# Takes series and arrays of a result and draws them. Skew comes from the result, which takes it from `loads.skew`;
# here
# loads are only divided by their mean, so that a colour means the same in every layer and micro-step.


Series = Mapping[str, Sequence[float]]
"""Values by the name of their line."""
Windows = Sequence[tuple[str, int]]
"""(words, micro-steps) of each window, in order."""


def skew_over_micro_steps(series: Series, *, windows: Windows, caption: str) -> Chart:
    """Skew of each micro-step, one line by name.

    Args:
        series: skew per micro-step of the whole step
        windows: to which windows these micro-steps belong
        caption: what is seen
    """
    places = [(name, place) for name, length in windows for place in range(length)]
    lines = tuple(
        {
            **line(name, range(len(places)), values, style=STYLES.get(name, (GREEN, "solid"))),
            "hovertemplate": "%{y:.3f}",
        }
        for name, values in series.items()
    )
    layout = frame(height=320, x="micro-step of the step", y="busiest rank / mean rank", hover="x unified")
    layout["xaxis"] |= whole_ticks(len(places))
    return Chart(
        name="skew-over-micro-steps",
        title="Load of the busiest rank over micro-steps",
        caption=caption,
        traces=lines,
        layout=layout | window_marks(windows),
        data=Table(
            columns=("window", "micro_step", *with_unit(series, "skew")),
            rows=tuple((*place, *(values[i] for values in series.values())) for i, place in enumerate(places)),
        ),
        terms=("skew", "micro-step", "window", "before", "after"),
    )


def skew_by_layer(series: Series, *, layers: Sequence[int], caption: str) -> Chart:
    """Skew of each layer over its micro-steps."""
    styles = {"mean": (VERMILION, "solid"), "max": (VERMILION, "dot")}
    layout = frame(height=280, x="layer", y="busiest rank / mean rank", hover="x unified")
    layout["xaxis"] |= whole_ticks(1 + max(layers) - min(layers))
    return Chart(
        name="skew-by-layer",
        title="Skew by layer",
        caption=caption,
        traces=tuple(line(name, layers, values, style=styles[name]) for name, values in series.items()),
        layout=layout,
        data=Table(
            columns=("layer", *with_unit(series, "skew")),
            rows=tuple((layer, *(values[i] for values in series.values())) for i, layer in enumerate(layers)),
        ),
        terms=("skew",),
        wide=False,
    )


def skew_by_width(widths: Mapping[int, Mapping[str, float]], *, caption: str) -> Chart:
    """Skew at several EP widths: mean, 95th percentile and worst."""
    eps = sorted(widths)
    styles = {"mean": (VERMILION, "solid"), "p95": (VERMILION, "dot"), "max": (GREY, "dash")}
    columns = ("mean", "p50", "p95", "max")
    layout = frame(height=280, x="EP width", y="busiest rank / mean rank", hover="x unified")
    layout["xaxis"]["type"] = "category"
    return Chart(
        name="skew-by-width",
        title="Skew by EP width",
        caption=caption,
        traces=tuple(
            {**line(n, [str(w) for w in eps], [widths[w][n] for w in eps], style=s), "mode": "lines+markers"}
            for n, s in styles.items()
        ),
        layout=layout,
        data=Table(
            columns=("ep", *with_unit(columns, "skew")), rows=tuple((w, *(widths[w][c] for c in columns)) for w in eps)
        ),
        terms=("skew", "rank"),
        wide=False,
    )


def rank_heat_map(load_MR: Mapping[str, np.ndarray], *, caption: str) -> Chart:
    """Rows of each rank in each micro-step over the mean rank's, by view.

    Args:
        load_MR: [micro-steps, ranks] rows of all layers, before and after
        caption: what is seen
    """
    micro_steps, ranks = next(iter(load_MR.values())).shape
    ratios = {name: over_mean(load).T for name, load in load_MR.items()}
    grid = Grid(
        rows="rank",
        columns="micro-step",
        row_labels=range(ranks),
        column_labels=range(micro_steps),
        value="load / mean",
    )
    return Chart(
        name="rank-heat-map",
        title="Load of each rank in each micro-step",
        caption=caption,
        scale="diverging",
        terms=("load", "rank", "micro-step", "before", "after"),
        **heat_map(ratios, grid, ends=_about_one(ratios)),
    )


def layer_heat_map(load_LR: Mapping[str, np.ndarray], *, layers: Sequence[int], caption: str) -> Chart:
    """Rows of each rank in each layer over the mean rank's, by view.

    Args:
        load_LR: [layers, ranks] rows of all micro-steps, before and after
        layers: global layer numbers
        caption: what is seen
    """
    ratios = {name: over_mean(load) for name, load in load_LR.items()}
    ranks = next(iter(load_LR.values())).shape[1]
    grid = Grid(rows="layer", columns="rank", row_labels=layers, column_labels=range(ranks), value="load / mean")
    return Chart(
        name="layer-heat-map",
        title="Load of each rank in each layer",
        caption=caption,
        scale="diverging",
        terms=("load", "rank", "before", "after"),
        wide=False,
        **heat_map(ratios, grid, ends=_about_one(ratios), height=HALF_HEIGHT),
    )


def expert_heat_map(load_LE: Mapping[str, np.ndarray], *, layers: Sequence[int], caption: str) -> Chart:
    """Rows of each expert over the mean expert of its layer, by view.

    Args:
        load_LE: [layers, experts] rows, by window or by before and after
        layers: global layer numbers
        caption: what is seen
    """
    ratios = {name: over_mean(load) for name, load in load_LE.items()}
    experts = next(iter(load_LE.values())).shape[1]
    grid = Grid(rows="layer", columns="expert", row_labels=layers, column_labels=range(experts), value="load / mean")
    # A handful of very hot experts would leave all others in one colour.
    high = max(1.0, *(float(np.percentile(r, 99.5)) for r in ratios.values()))
    return Chart(
        name="expert-heat-map",
        title="Load of each expert in each layer",
        caption=caption,
        scale="sequential",
        terms=("load", "expert"),
        **heat_map(ratios, grid, ends=(0.0, high)),
    )


def over_mean(load: np.ndarray) -> np.ndarray:
    """[rows, columns] each row divided by its mean; a row without load is level."""
    mean = load.mean(axis=1, keepdims=True)
    return np.where(mean > 0, load / np.where(mean > 0, mean, 1.0), 1.0)


def _about_one(ratios: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Ends of the colours: symmetric about one, so that level is the ground's colour, and the same for all views.

    From nothing to twice the mean at most: what is hotter has the last colour.
    """
    reach = min(1.0, max(0.05, *(float(np.abs(r - 1).max()) for r in ratios.values())))
    return 1 - reach, 1 + reach


# Charts of seconds: policies by cost part, ranks by what they do, the timeline of one micro-step.
#
# Takes seconds of a result and draws them; computes none. Parts that are nothing everywhere are left out.


PART_COLOURS = {
    "compute": BLUE,
    "all-to-all": SKY,
    "all-to-all inside": SKY,
    "all-to-all across": GREEN,
    "transfers": ORANGE,
    "pull": ORANGE,
    "return": YELLOW,
    "publish": PURPLE,
    "collect": "#9a5fb4",
    "edges": PURPLE,
    "planning": VERMILION,
    "attention": "#a9adb3",
    "waiting": VERMILION,
    "bubble": "#c7cacd",
    "rollout": "#d9dbde",
    "other": GREY,
}
"""A part has one colour in every chart; what balance does not touch is grey."""
LANES = ("compute", "all-to-all", "pull", "return", "edges")
KINDS = ("compute", "attention", *LANES[1:])
"""Kinds of a timeline's bars, each with its colour; attention stands in the lane of compute."""
MAX_EVENTS = 4000
"""Bars of one timeline that a browser draws without delay."""
OUTLINE = 0.5
"""Width of the outline of a timeline's bars, pixels: thin enough for bars of a pixel."""

Parts = Mapping[str, Mapping[str, float]]
"""Seconds by name of the bar, then by part."""
Event = Mapping[str, Any]
"""rank, lane, name, start_s, end_s, as in the result."""


def cost_parts(parts: Parts, *, caption: str, title: str, terms: tuple[str, ...], focus: Sequence[str] = ()) -> Chart:
    """Stacked bars of seconds by part.

    Args:
        parts: bars in their order from the top
        caption: what is seen
        title: of the chart
        terms: words to define beside the parts that are drawn
        focus: parts of the first view; a second view then shows all of them. Empty for no switch
    """
    names = _shown_parts(parts)
    rows: list[tuple[Cell, ...]] = [
        (bar, sum(p.values()), *(p.get(name, 0.0) for name in names)) for bar, p in parts.items()
    ]
    layout = frame(height=110 + 34 * len(parts), x="seconds", y="")
    layout |= {"barmode": "stack", "bargap": 0.35}
    layout["yaxis"] |= {"autorange": "reversed", "showgrid": False, "ticks": "", "type": "category"}
    chosen = tuple(name in focus for name in names)
    views: tuple[View, ...] = ()
    if any(chosen) and not all(chosen):
        views = (
            View(label="Expert layers", visible=chosen),
            View(label="Whole step", visible=(True,) * len(names)),
        )
    return Chart(
        name="cost-parts",
        title=title,
        caption=caption,
        traces=tuple(_bars(name, parts) for name in names),
        layout=layout,
        data=Table(columns=("bar", *with_unit(("total", *names), "s")), rows=tuple(rows)),
        terms=(*names, *(term for term in terms if term not in names)),
        views=views,
    )


def rank_seconds(views: Mapping[str, Parts], *, caption: str) -> Chart:
    """What every rank does with its seconds, by view.

    Args:
        views: by before and after: seconds by rank, then by part
        caption: what is seen
    """
    kinds = _shown_parts({f"{v} {r}": p for v, ranks in views.items() for r, p in ranks.items()})
    traces = [_columns(kind, ranks) for ranks in views.values() for kind in kinds]
    layout = frame(height=320, x="rank", y="seconds", hover="x unified") | {"barmode": "stack", "bargap": 0.15}
    layout["xaxis"]["type"] = "category"
    layout["xaxis"]["nticks"] = 32
    # The same axis for both views, or a shorter step would look as long.
    layout["yaxis"]["range"] = [0, 1.05 * max(sum(p.values()) for ranks in views.values() for p in ranks.values())]
    rows: list[tuple[Cell, ...]] = [
        (view, rank, *(p.get(kind, 0.0) for kind in kinds))
        for view, ranks in views.items()
        for rank, p in ranks.items()
    ]
    return Chart(
        name="rank-seconds",
        title="What each rank does with its time",
        caption=caption,
        traces=tuple(traces),
        layout=layout,
        data=Table(columns=("view", "rank", *with_unit(kinds, "s")), rows=tuple(rows)),
        terms=(*kinds, "rank"),
        views=switch([view for view in views for _ in kinds]),
    )


def timeline(events: Mapping[str, Sequence[Event]], *, caption: str) -> Chart:
    """Bars of one micro-step: a row per rank with its lanes, a colour for each kind, one policy at a time.

    Args:
        events: of every policy that has a timeline
        caption: what is seen
    """
    drawn = {policy: sorted(found, key=lambda e: e["start_s"])[:MAX_EVENTS] for policy, found in events.items()}
    bars = {(p, kind): [e for e in found if _kind(e) == kind] for p, found in drawn.items() for kind in KINDS}
    shown = {key: found for key, found in bars.items() if found}
    kinds = [kind for kind in KINDS if kind in {name for _, name in shown}]
    used = [lane for lane in LANES if any(e["lane"] == lane for found in drawn.values() for e in found)]
    ranks = 1 + max(e["rank"] for found in events.values() for e in found)
    end_s = max(e["end_s"] for found in drawn.values() for e in found)
    columns = ("rank", "lane", "name", "start_s", "end_s")
    rows = tuple((policy, *(e[c] for c in columns)) for policy, found in events.items() for e in found)
    return Chart(
        name="timeline",
        title="Timeline within one micro-step",
        caption=caption,
        traces=tuple(_bars_of_kind(kind, used, found) for (_, kind), found in shown.items()),
        layout=_timeline_frame(ranks, end_s),
        data=Table(columns=("policy", *columns), rows=rows),
        terms=("micro-step", *kinds, *(("publish", "collect") if "edges" in used else ()), "hidden"),
        views=switch([policy for policy, _ in shown]),
        note=_cut_note(events, drawn),
    )


def check_lanes(events: Sequence[Event], *, of: str) -> None:
    """Refuse a bar whose lane is unknown: it would be missing from the chart without a word."""
    odd = next((event for event in events if event["lane"] not in LANES), None)
    if odd is not None:
        raise ValueError(
            f"the timeline of {of} has a bar {odd['name']!r} in lane {odd['lane']!r}, known are {', '.join(LANES)}"
        )


def _timeline_frame(ranks: int, end_s: float) -> dict[str, Any]:
    """Axes of the same reach for every policy: a row per rank, the first one on top."""
    layout = frame(height=max(260, min(760, 110 + 34 * ranks)), x="milliseconds since the micro-step began", y="rank")
    layout |= {"barmode": "overlay", "bargap": 0}
    layout["yaxis"] |= {"range": [ranks - 0.5, -0.5], "showgrid": False, "zeroline": False}
    layout["yaxis"]["dtick"] = max(1, ranks // 16)
    layout["xaxis"] |= {"range": [0, 1e3 * end_s]}
    return layout


def _shown_parts(parts: Parts) -> list[str]:
    """Parts that are something somewhere, in the order of their colours."""
    return [name for name in PART_COLOURS if any(p.get(name) for p in parts.values())]


def _bars(name: str, parts: Parts) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(parts),
        "x": [round(p.get(name, 0.0), 9) for p in parts.values()],
        "marker": {"color": PART_COLOURS[name]},
        "hovertemplate": f"{name} %{{x:.4g}} s<extra>%{{y}}</extra>",
    }


def _columns(kind: str, ranks: Parts) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": kind,
        "x": [f"{int(rank):,}" for rank in ranks],
        "y": [round(p.get(kind, 0.0), 9) for p in ranks.values()],
        "marker": {"color": PART_COLOURS[kind]},
        "hovertemplate": "%{y:.4g} s",
    }


def _kind(event: Event) -> str:
    """A bar's lane, or attention, which the name alone tells from experts: 'attention 3', 'attention backward 3'."""
    is_attention = event["lane"] == "compute" and event["name"].startswith("attention ")
    return "attention" if is_attention else str(event["lane"])


def _bars_of_kind(kind: str, used: Sequence[str], events: Sequence[Event]) -> dict[str, Any]:
    """One kind on all ranks: bars from start to end; the lanes in use share four fifths of a rank's row."""
    height = 0.8 / len(used)
    offset = (used.index(events[0]["lane"]) - (len(used) - 1) / 2) * height
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "base": [round(e["start_s"] * 1e3, 5) for e in events],
        "x": [round((e["end_s"] - e["start_s"]) * 1e3, 5) for e in events],
        "y": [round(e["rank"] + offset, 3) for e in events],
        "width": round(0.9 * height, 3),
        "text": [e["name"] for e in events],
        "textposition": "none",
        "customdata": [e["rank"] for e in events],
        # The theme gives the outline the ground's colour, so that bars that touch are seen apart.
        "marker": {"color": PART_COLOURS[kind], "line": {"width": OUTLINE}},
        "hovertemplate": f"rank %{{customdata}}, {kind}: %{{text}}<br>%{{x:.3f}} ms from %{{base:.3f}}<extra></extra>",
    }


def _cut_note(events: Mapping[str, Sequence[Event]], drawn: Mapping[str, Sequence[Event]]) -> str:
    longest = max(events, key=lambda policy: len(events[policy]))
    if len(events[longest]) <= MAX_EVENTS:
        return ""
    until, end = drawn[longest][-1]["start_s"], max(e["end_s"] for e in events[longest])
    return (
        f"Cut to keep the page small: the first {len(drawn[longest]):,} of {len(events[longest]):,} bars, "
        f"{until * 1e3:.3g} of {end * 1e3:.3g} ms. The CSV and the trace file have them all."
    )


# Charts of bytes: who sends how much to whom, and what each rank's memory holds against a limit that is in sight.
#
# Takes bytes of a result and draws them; computes none.


MIB, GIB = 2**20, 2**30
LIMIT_IN_SIGHT = 4
"""A limit over so many times the tallest bar is said and not drawn: bars under it would be a flat line."""
_MEMORY_COLOURS = {"expert weights": GREY, "replica slots": ORANGE, "received rows": BLUE}

RankBytes = Mapping[str, Sequence[int]]
"""Bytes of every rank, by what they hold."""


def traffic(byte_RR: Mapping[str, np.ndarray], *, caption: str) -> Chart:
    """Bytes of all-to-all from source to destination rank, by view.

    Args:
        byte_RR: [source, destination] bytes, before and after
        caption: what is seen
    """
    mebibytes = {name: bytes_ / MIB for name, bytes_ in byte_RR.items()}
    ranks = range(next(iter(byte_RR.values())).shape[0])
    grid = Grid(
        rows="source",
        columns="destination",
        row_labels=ranks,
        column_labels=ranks,
        value="MiB",
        format=",.4r",
    )
    high = max(float(matrix.max()) for matrix in mebibytes.values()) or 1.0
    return Chart(
        name="traffic",
        title="Bytes from source to destination",
        caption=caption,
        scale="sequential",
        terms=("all-to-all", "rank", "before", "after"),
        wide=False,
        **heat_map(mebibytes, grid, ends=(0.0, high), height=HALF_HEIGHT, limits=(128, 128)),
    )


def memory(views: Mapping[str, RankBytes], *, limit_bytes: int | None, caption: str) -> Chart:
    """What every rank's memory holds at worst, stacked, against the limit where that is in sight.

    Args:
        views: by before and after; one view where there is no plan
        limit_bytes: what a rank has; None where it is not known
        caption: what is seen, the limit included
    """
    traces = [_column(held, values) for held_by in views.values() for held, values in held_by.items()]
    rows = tuple(
        (view, rank, held, value)
        for view, held_by in views.items()
        for held, values in held_by.items()
        for rank, value in enumerate(values)
    )
    return Chart(
        name="memory",
        title="Memory per rank",
        caption=caption,
        traces=tuple(traces),
        layout=_memory_layout(views, limit_bytes),
        data=Table(columns=("view", "rank", "what", "bytes"), rows=rows),
        terms=("received rows", "replica", "slot", "rank"),
        views=switch([view for view, held_by in views.items() for _ in held_by]),
        wide=False,
    )


def activations_words(activations: str, *, stages: int = 1) -> str:
    """Which activations of experts the received rows count, `kept` or `recomputed`; `stages`: of the pipeline."""
    if activations == "kept" and stages > 1:
        return (
            "Activations of experts are kept for the backward pass, so in an update a stage holds those of all its "
            f"layers for as many micro-steps as are in flight: {stages} on the first stage, 1 on the last."
        )
    if activations == "kept":
        return "Activations of experts are kept for the backward pass, so an update holds those of all its layers."
    return "Activations of experts are recomputed in the backward pass, so a rank holds one layer's at a time."


def _memory_layout(views: Mapping[str, RankBytes], limit_bytes: int | None) -> dict[str, Any]:
    layout = frame(height=320, x="rank", y="GiB", hover="x unified") | {"barmode": "stack", "bargap": 0.15}
    layout["xaxis"] |= {"type": "category", "nticks": 32}
    peak = max(sum(column) for held_by in views.values() for column in zip(*held_by.values(), strict=True))
    if limit_bytes is None or limit_bytes > LIMIT_IN_SIGHT * peak > 0:
        layout["yaxis"]["range"] = [0, 1.12 * peak / GIB]
        return layout
    layout["yaxis"]["range"] = [0, 1.12 * max(peak, limit_bytes) / GIB]
    return layout | limit_line(limit_bytes / GIB, f"limit {limit_bytes / GIB:.3g} GiB")


def _column(held: str, values: Sequence[int]) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": held,
        "x": [f"{rank:,}" for rank in range(len(values))],
        "y": [round(value / GIB, 5) for value in values],
        "marker": {"color": _MEMORY_COLOURS[held]},
        "hovertemplate": "%{y:.3f} GiB",
    }


# Charts of sweeps: what a plan saves over one axis, and from which tokens per rank on it pays.
#
# Takes points of a result and draws them; computes none.


AXES = {
    "ep": "EP width",
    "slots": "replica slots per rank",
    "micro": "samples per micro-step",
    "tokens": "tokens per rank and micro-step",
}
_DASHES = ("solid", "dash", "dot")
_SYMBOLS = ("circle-open", "square-open", "diamond-open", "triangle-up-open", "cross-open", "star-open", "hexagon-open")
"""Open, so that one line's points are seen through those of another that lies on it."""

Point = Mapping[str, Any]
"""ep, slots, micro, tokens, skew, seconds, saved_share, of_balanced, as in the result."""


def sweep(points: Sequence[Point], *, axes: Mapping[str, Sequence[int]], caption: str) -> Chart:
    """Saved share over the axis with most values, a line for every choice of the other axes.

    Args:
        points: of the sweep
        axes: values of each axis that was swept
        caption: what is seen
    """
    across = max(axes, key=lambda name: len(axes[name]))
    others = [name for name in axes if name != across]
    lines: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda p: p[across]):
        lines.setdefault(", ".join(f"{name} {point[name]:,}" for name in others) or "equipoise", []).append(point)
    layout = frame(height=320, x=AXES[across], y="saved of static's expert seconds, %", hover="x unified")
    layout["xaxis"]["type"] = "category"
    columns = ("ep", "slots", "micro", "tokens", "skew", "saved_share", "of_balanced")
    return Chart(
        name="sweep",
        title=f"What a plan saves by {AXES[across]}",
        caption=caption,
        traces=tuple(
            _shares(name, [f"{p[across]:,}" for p in found], [p["saved_share"] for p in found], place)
            for place, (name, found) in enumerate(lines.items())
        ),
        layout=layout,
        data=Table(columns=columns, rows=tuple(tuple(p[c] for c in columns) for p in points)),
        terms=("saved", "slot", "static", "skew"),
        wide=False,
    )


def break_even(curves: Sequence[Mapping[str, Any]], *, worth: float, caption: str) -> Chart:
    """Saved share over tokens per rank at several skews, with the line from which on a plan pays.

    Args:
        curves: skew, tokens, points {tokens, saved_share}, as in the result
        worth: share under which a plan is not worth it
        caption: what is seen
    """
    traces = tuple(
        _shares(
            f"skew {curve['skew']:.2f}",
            [p["tokens"] for p in curve["points"]],
            [p["saved_share"] for p in curve["points"]],
            place,
        )
        for place, curve in enumerate(curves)
    )
    layout = frame(height=320, x=AXES["tokens"], y="saved of static's expert seconds, %", hover="x unified")
    tokens = sorted({p["tokens"] for curve in curves for p in curve["points"]})
    layout["xaxis"] |= {"type": "log", "tickvals": tokens, "ticktext": [f"{t:,}" for t in tokens]}
    rows = tuple((c["skew"], p["tokens"], p["saved_share"]) for c in curves for p in c["points"])
    return Chart(
        name="break-even",
        title="From when on a plan pays",
        caption=caption,
        traces=traces,
        layout=layout | limit_line(worth * 100, f"break-even: {percent(worth)}", at="right"),
        data=Table(columns=("skew", "tokens", "saved_share"), rows=rows),
        terms=("break-even", "skew", "saved"),
        wide=False,
    )


def _shares(name: str, x: Sequence[Any], shares: Sequence[float], place: int) -> dict[str, Any]:
    """One line; lines that lie on each other are told apart by dash and by the shape of their points."""
    style = (SERIES[place % len(SERIES)], _DASHES[place % len(_DASHES)])
    trace = line(name, x, [100 * share for share in shares], style=style)
    marker = {**trace["marker"], "symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 9, "line": {"width": 1.5}}
    return {**trace, "mode": "lines+markers", "marker": marker, "hovertemplate": "%{y:.1f} %"}
