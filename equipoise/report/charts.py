"""Charts as plotly draws them: one function per chart, from plain arrays of a result. Nothing is computed here.

Loads are only divided by their mean, so that a colour means the same in every layer and micro-step; parts that are 0
everywhere are left out. Traces and layouts are plain dicts: they go into the page as JSON, and a page can be summarised
where plotly is not installed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from equipoise.report.page import (
    MAX_CELLS,
    Cell,
    Chart,
    ChartView,
    Table,
    bin_labels,
    bin_matrix,
    binning_note,
    percent,
)
from equipoise.report.render import BLUE, GREEN, GREY, ORANGE, PURPLE, SERIES, SKY, VERMILION, YELLOW

STYLES = {
    "before": (VERMILION, "solid"),
    "after": (BLUE, "solid"),
    "before, worst layer": (VERMILION, "dot"),
}
"""Colour and dash of the lines that mean the same in every chart."""
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
    "planning": "#8b5a2b",
    "training": "#5f7da3",
    "attention": "#a9adb3",
    "waiting": VERMILION,
    "bubble": "#c7cacd",
    "rollout": "#d9dbde",
    "other": GREY,
}
"""A part has one colour in every chart; what balance does not touch is grey."""
HALF_HEIGHT = 420
"""Of heat maps beside each other, pixels."""
MAX_TICKS = 10
"""Of an axis that counts: as many fit in a narrow window."""
MAX_SHOWN_WINDOWS = 8
"""More windows than these are not named in a chart: the names would overlap."""
MIB, GIB = 2**20, 2**30

Windows = Sequence[tuple[str, int]]
"""(name, micro-steps) of each window, in order."""
PartSeconds = Mapping[str, Mapping[str, float]]
"""Seconds by name of the bar, then by part."""


def frame(*, height: int, x: str, y: str, hover: Literal["closest", "x unified"] = "closest") -> dict[str, Any]:
    """Return a layout with named axes; the page writes the legend itself, where it can wrap."""
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return {"height": height, "hovermode": hover, "showlegend": False, **axes}


def whole_ticks(count: int) -> dict[str, Any]:
    """Return ticks of an axis that counts things, such as micro-steps: every 1, 2, 5, 10, 20, ..."""
    steps = (digit * 10**power for power in range(len(str(count)) + 1) for digit in (1, 2, 5))
    return {"tick0": 0, "dtick": next(step for step in steps if step * MAX_TICKS >= count), "tickformat": ",d"}


def line(name: str, x: Sequence[Cell], y: Sequence[float], *, style: tuple[str, str]) -> dict[str, Any]:
    """Draw one line; `style` is its colour and dash."""
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


def bars(name: str, x: Sequence[Cell], y: Sequence[Cell], *, colour: str, hover: str, **more: Any) -> dict[str, Any]:
    """Draw the bars of one series; `orientation="h"` for horizontal ones."""
    marker = {"color": colour}
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": marker, "hovertemplate": hover, **more}


def limit_line(value: float, text: str, *, at: Literal["left", "right"] = "left") -> dict[str, Any]:
    """Draw a dashed line across the chart at a limit, with its name at the end that is free."""
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    name = {"xref": "paper", "x": int(at == "right"), "y": value, "text": text, "xanchor": at, "yanchor": "bottom"}
    return {
        "shapes": [{**across, "line": {"width": 1.25, "dash": "dash"}}],
        "annotations": [{**name, "showarrow": False}],
    }


def with_unit(names: Iterable[str], unit: str) -> tuple[str, ...]:
    """Return the headers of a table: 'before, MiB'."""
    return tuple(f"{name}, {unit}" for name in names)


def switch(view_of_trace: Sequence[str]) -> tuple[ChartView, ...]:
    """Return a view for each name, which shows the traces of that name; none if there is only one."""
    names = dict.fromkeys(view_of_trace)
    if len(names) < 2:
        return ()
    return tuple(ChartView(label=n.capitalize(), visible=tuple(other == n for other in view_of_trace)) for n in names)


def skew_over_micro_steps(series: Mapping[str, Sequence[float]], *, windows: Windows, caption: str) -> Chart:
    """Draw the skew of each micro-step of the whole step, a line for each series."""
    places = [(name, place) for name, length in windows for place in range(length)]
    layout = frame(height=320, x="micro-step of the step", y="busiest rank / mean rank", hover="x unified")
    layout["xaxis"] |= whole_ticks(len(places))
    if 1 < len(windows) <= MAX_SHOWN_WINDOWS:
        # A thin line where a window begins, with its name.
        starts = np.cumsum([0, *(length for _, length in windows)])[:-1].tolist()
        mark = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0.75}}
        text = {"y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
        layout |= {
            "shapes": [{**mark, "x0": s - 0.5, "x1": s - 0.5} for s in starts[1:]],
            "annotations": [{**text, "x": s, "text": name} for s, (name, _) in zip(starts, windows, strict=True)],
            "margin": {"t": 24},
        }
    return Chart(
        name="skew-over-micro-steps",
        title="Load of the busiest rank over micro-steps",
        caption=caption,
        traces=tuple(
            line(name, range(len(places)), values, style=STYLES.get(name, (GREEN, "solid")))
            for name, values in series.items()
        ),
        layout=layout,
        data=Table(
            columns=("window", "micro_step", *with_unit(series, "skew")),
            rows=tuple((*place, *values) for place, *values in zip(places, *series.values(), strict=True)),
        ),
        terms=("skew", "micro-step", "window", "before", "after"),
    )


def skew_by_layer(series: Mapping[str, Sequence[float]], *, layers: Sequence[int], caption: str) -> Chart:
    """Draw the skew of each layer over its micro-steps: lines `mean` and `max`."""
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
            columns=("layer", *with_unit(series, "skew")), rows=tuple(zip(layers, *series.values(), strict=True))
        ),
        terms=("skew",),
        wide=False,
    )


def skew_by_width(widths: Mapping[int, Mapping[str, float]], *, caption: str) -> Chart:
    """Draw the skew at several EP widths: mean, 95th percentile and worst."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatGrid:
    """Axes of a heat map."""

    rows: str
    columns: str
    row_labels: Sequence[int] | None = None
    """Counted from 0 where they are left out, as columns are."""
    value: str = "load / mean"
    """What a cell holds."""
    format: str = ".2f"


def heat_map(
    matrices: dict[str, np.ndarray],
    grid: HeatGrid,
    *,
    ends: tuple[float, float],
    height: int | None = None,
    limits: tuple[int, int] = MAX_CELLS,
) -> dict[str, Any]:
    """Return traces, layout, data, views and note of heat maps over the same axes, one shown at a time.

    Args:
        matrices: [rows, columns] by the name of their view
        grid: the axes
        ends: lowest and highest value that has a colour of its own, the same for all
        height: in pixels; by the number of rows where it is left out
        limits: most rows and columns; beyond, cells are binned
    """
    binned = {name: bin_matrix(matrix, limits=limits) for name, matrix in matrices.items()}
    first = next(iter(binned.values()))
    num_rows, num_columns = next(iter(matrices.values())).shape
    numbers = range(num_rows) if grid.row_labels is None else grid.row_labels
    rows, columns = bin_labels(numbers, first.row_size), bin_labels(range(num_columns), first.column_size)
    layout = frame(height=height or max(240, min(520, 110 + 13 * len(rows))), x=grid.columns, y=grid.rows)
    # Labels of blocks are strings; without this plotly would read "12-15" as a date.
    layout["xaxis"] |= {"type": "category", "nticks": 16, "showgrid": False, "ticks": ""}
    layout["yaxis"] |= {"type": "category", "nticks": 12, "showgrid": False, "ticks": "", "autorange": "reversed"}
    layout["coloraxis"] = {"cmin": ends[0], "cmax": ends[1], "colorbar": {"title": {"text": grid.value}}}
    place = f"{grid.rows} %{{y}}, {grid.columns} %{{x}}"
    hover = f"{place}<br>{grid.value} %{{z:{grid.format}}}<extra></extra>"

    # As many digits as are seen, so that a page stays small.
    def short(value: float, digits: int) -> float:
        return float(f"{value:.{digits}g}")

    stacked = np.stack(list(matrices.values()), axis=-1).tolist()
    return {
        "traces": tuple(
            {
                "type": "heatmap",
                "name": name,
                "x": columns,
                "y": rows,
                "z": [[short(v, 4) for v in row] for row in found.cells.tolist()],
                "coloraxis": "coloraxis",
                "hovertemplate": hover,
            }
            for name, found in binned.items()
        ),
        "layout": layout,
        "data": Table(
            columns=(grid.rows, grid.columns, *with_unit(matrices, grid.value)),
            rows=tuple(
                (int(numbers[i]), j, *(short(v, 7) for v in values))
                for i, row in enumerate(stacked)
                for j, values in enumerate(row)
            ),
        ),
        "views": switch(list(matrices)),
        "note": binning_note(first, f"{grid.rows}s", f"{grid.columns}s"),
    }


def over_mean(load: np.ndarray) -> np.ndarray:
    """Divide each row of [rows, columns] by its mean; a row without load is level."""
    mean = load.mean(axis=1, keepdims=True)
    return np.where(mean > 0, load / np.where(mean > 0, mean, 1.0), 1.0)


def _about_one(skew: float) -> tuple[float, float]:
    """Return the ends of the colours: symmetric about one, so that level is the background's colour, in all views.

    The last colour is the page's mean skew, so that a heat map looks as uneven as the headline says: at least 1.05,
    at most twice the mean.
    """
    reach = min(1.0, max(0.05, skew - 1))
    return 1 - reach, 1 + reach


def rank_heat_map(load_MR: Mapping[str, np.ndarray], *, skew: float, caption: str) -> Chart:
    """Draw each rank's rows in each micro-step over the mean rank's, by view: [micro-steps, ranks].

    `skew` is the headline's mean skew, which has the last colour.
    """
    ratios = {name: over_mean(load).T for name, load in load_MR.items()}
    return Chart(
        name="rank-heat-map",
        title="Load of each rank in each micro-step",
        caption=caption,
        scale="diverging",
        terms=("load", "rank", "micro-step", "before", "after"),
        **heat_map(ratios, HeatGrid(rows="rank", columns="micro-step"), ends=_about_one(skew)),
    )


def layer_heat_map(load_LR: Mapping[str, np.ndarray], *, layers: Sequence[int], skew: float, caption: str) -> Chart:
    """Draw each rank's rows in each layer over the mean rank's, by view: [layers, ranks]; `skew` as above."""
    ratios = {name: over_mean(load) for name, load in load_LR.items()}
    grid = HeatGrid(rows="layer", columns="rank", row_labels=layers)
    return Chart(
        name="layer-heat-map",
        title="Load of each rank in each layer",
        caption=caption,
        scale="diverging",
        terms=("load", "rank", "before", "after"),
        wide=False,
        **heat_map(ratios, grid, ends=_about_one(skew), height=HALF_HEIGHT),
    )


def expert_heat_map(load_LE: Mapping[str, np.ndarray], *, layers: Sequence[int], caption: str) -> Chart:
    """Draw each expert's rows over the mean expert's of its layer, by view; `load_LE`: [layers, experts]."""
    ratios = {name: over_mean(load) for name, load in load_LE.items()}
    grid = HeatGrid(rows="layer", columns="expert", row_labels=layers)
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


def traffic(byte_RR: Mapping[str, np.ndarray], *, caption: str) -> Chart:
    """Draw the bytes of all-to-all by view; `byte_RR`: [source, destination]."""
    mebibytes = {name: bytes_ / MIB for name, bytes_ in byte_RR.items()}
    grid = HeatGrid(rows="source", columns="destination", value="MiB", format=",.4r")
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


def cost_parts(
    parts: PartSeconds,
    *,
    caption: str,
    title: str,
    terms: tuple[str, ...],
    focus: Sequence[str] = (),
    texts: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Chart:
    """Draw stacked bars of seconds by part.

    Args:
        parts: bars in their order from the top
        caption: what is seen
        title: of the chart
        terms: terms to define beside the parts that are drawn
        focus: parts of the first view; a second view then shows all of them. Empty for no switch
        texts: beside the bars of the first and the second view; their names by default
    """
    names = _shown_parts(parts)
    focused, every = texts or (list(parts), list(parts))
    layout = frame(height=110 + 34 * len(parts), x="seconds", y="") | {"barmode": "stack", "bargap": 0.35}
    layout["yaxis"] |= {"autorange": "reversed", "showgrid": False, "ticks": "", "type": "category"}
    layout["yaxis"] |= {"tickmode": "array", "tickvals": list(parts), "ticktext": list(focused)}
    chosen = tuple(name in focus for name in names)
    views: tuple[ChartView, ...] = ()
    if any(chosen) and not all(chosen):
        experts, whole = ({"yaxis.ticktext": list(words)} for words in (focused, every))
        views = (
            ChartView(label="Expert layers", visible=chosen, layout=experts),
            ChartView(label="Whole step", visible=(True,) * len(names), layout=whole),
        )
    return Chart(
        name="cost-parts",
        title=title,
        caption=caption,
        traces=tuple(
            bars(
                name,
                [round(p.get(name, 0.0), 9) for p in parts.values()],
                list(parts),
                colour=PART_COLOURS[name],
                hover=f"{name} %{{x:.4g}} s<extra>%{{y}}</extra>",
                orientation="h",
            )
            for name in names
        ),
        layout=layout,
        data=Table(
            columns=("bar", *with_unit(("total", *names), "s")),
            rows=tuple((bar, sum(p.values()), *(p.get(name, 0.0) for name in names)) for bar, p in parts.items()),
        ),
        terms=(*names, *(term for term in terms if term not in names)),
        views=views,
    )


def _shown_parts(parts: PartSeconds) -> list[str]:
    """Return the parts that are not 0 everywhere, in the order of their colours."""
    return [name for name in PART_COLOURS if any(p.get(name) for p in parts.values())]


def rank_seconds(views: Mapping[str, PartSeconds], *, caption: str) -> Chart:
    """Draw what every rank does with its seconds, by view: seconds by rank, then by part."""
    kinds = _shown_parts({f"{v} {r}": p for v, ranks in views.items() for r, p in ranks.items()})
    layout = frame(height=320, x="rank", y="seconds", hover="x unified") | {"barmode": "stack", "bargap": 0.15}
    layout["xaxis"] |= {"type": "category", "nticks": 32}
    # The same axis for both views, or a shorter step would look as long.
    layout["yaxis"]["range"] = [0, 1.05 * max(sum(p.values()) for ranks in views.values() for p in ranks.values())]
    return Chart(
        name="rank-seconds",
        title="What each rank does with its time",
        caption=caption,
        traces=tuple(
            bars(
                kind,
                [f"{int(rank):,}" for rank in ranks],
                [round(p.get(kind, 0.0), 9) for p in ranks.values()],
                colour=PART_COLOURS[kind],
                hover="%{y:.4g} s",
            )
            for ranks in views.values()
            for kind in kinds
        ),
        layout=layout,
        data=Table(
            columns=("view", "rank", *with_unit(kinds, "s")),
            rows=tuple(
                (view, rank, *(p.get(kind, 0.0) for kind in kinds))
                for view, ranks in views.items()
                for rank, p in ranks.items()
            ),
        ),
        terms=(*kinds, "rank"),
        views=switch([view for view in views for _ in kinds]),
    )


LANES = ("compute", "all-to-all", "pull", "return", "edges")
KINDS = ("compute", "attention", *LANES[1:])
"""Kinds of a timeline's bars, each with its colour; attention shares the lane of compute."""
MAX_EVENTS = 4000
"""Bars of one timeline that a browser draws without delay."""
OUTLINE = 0.5
"""Width of the outline of a timeline's bars, pixels: thin enough for bars of a pixel."""
EventDict = Mapping[str, Any]
"""rank, lane, name, start_s, end_s, as in the result."""


def check_lanes(events: Sequence[EventDict], *, of: str) -> None:
    """Refuse a bar whose lane is unknown: the chart would leave it out silently."""
    odd = next((event for event in events if event["lane"] not in LANES), None)
    if odd is not None:
        raise ValueError(
            f"the timeline of {of} has a bar {odd['name']!r} in lane {odd['lane']!r}, known are {', '.join(LANES)}"
        )


def timeline(events: Mapping[str, Sequence[EventDict]], *, caption: str) -> Chart:
    """Draw the bars of one micro-step: a row per rank with its lanes, a colour for each kind, one policy at a time."""
    drawn = {policy: sorted(found, key=lambda e: e["start_s"])[:MAX_EVENTS] for policy, found in events.items()}
    by_kind = {(p, kind): [e for e in found if _kind(e) == kind] for p, found in drawn.items() for kind in KINDS}
    shown = {key: found for key, found in by_kind.items() if found}
    kinds = [kind for kind in KINDS if kind in {name for _, name in shown}]
    used = [lane for lane in LANES if any(e["lane"] == lane for found in drawn.values() for e in found)]
    ranks = 1 + max(e["rank"] for found in events.values() for e in found)
    # Axes of the same reach for every policy: a row per rank, the first one on top.
    layout = frame(height=max(260, min(760, 110 + 34 * ranks)), x="milliseconds since the micro-step began", y="rank")
    layout |= {"barmode": "overlay", "bargap": 0}
    layout["yaxis"] |= {"range": [ranks - 0.5, -0.5], "showgrid": False, "zeroline": False}
    layout["yaxis"]["dtick"] = max(1, ranks // 16)
    layout["xaxis"] |= {"range": [0, 1e3 * max(e["end_s"] for found in drawn.values() for e in found)]}
    # What was cut to keep the page small.
    note, longest = "", max(events, key=lambda policy: len(events[policy]))
    if len(events[longest]) > MAX_EVENTS:
        until, end = drawn[longest][-1]["start_s"], max(e["end_s"] for e in events[longest])
        note = (
            f"Cut to keep the page small: the first {len(drawn[longest]):,} of {len(events[longest]):,} bars, "
            f"{until * 1e3:.3g} of {end * 1e3:.3g} ms. The CSV and the trace file have them all."
        )
    columns = ("rank", "lane", "name", "start_s", "end_s")
    return Chart(
        name="timeline",
        title="Timeline within one micro-step",
        caption=caption,
        traces=tuple(_bars_of_kind(kind, used, found) for (_, kind), found in shown.items()),
        layout=layout,
        data=Table(
            columns=("policy", *columns),
            rows=tuple((policy, *(e[c] for c in columns)) for policy, found in events.items() for e in found),
        ),
        terms=("micro-step", *kinds, *(("publish", "collect") if "edges" in used else ()), "hidden"),
        views=switch([policy for policy, _ in shown]),
        note=note,
    )


def _kind(event: EventDict) -> str:
    """Return a bar's lane, or attention, which only the name tells from experts: 'attention backward 3'."""
    is_attention = event["lane"] == "compute" and event["name"].startswith("attention ")
    return "attention" if is_attention else str(event["lane"])


def _bars_of_kind(kind: str, used: Sequence[str], events: Sequence[EventDict]) -> dict[str, Any]:
    """Draw one kind on all ranks, from start to end; the lanes in use share four fifths of a rank's row."""
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
        # The theme gives the outline the background's colour, so that bars that touch are seen apart.
        "marker": {"color": PART_COLOURS[kind], "line": {"width": OUTLINE}},
        "hovertemplate": f"rank %{{customdata}}, {kind}: %{{text}}<br>%{{x:.3f}} ms from %{{base:.3f}}<extra></extra>",
    }


LIMIT_IN_SIGHT = 4
"""A limit over this many times the tallest bar is said and not drawn: bars under it would be a flat line."""
_MEMORY_COLOURS = {
    "expert weights": GREY,
    "replica slots": ORANGE,
    "rows read in place": SKY,
    "received rows": BLUE,
}


def memory(views: Mapping[str, Mapping[str, Sequence[int]]], *, limit_bytes: int | None, caption: str) -> Chart:
    """Draw what every rank's memory holds at worst, stacked, and the limit if it is not far above.

    Args:
        views: by before and after, or one view where there is no plan: bytes of every rank, by what they hold
        limit_bytes: what a rank has; None where it is not known
        caption: what is seen, the limit included
    """
    layout = frame(height=320, x="rank", y="GiB", hover="x unified") | {"barmode": "stack", "bargap": 0.15}
    layout["xaxis"] |= {"type": "category", "nticks": 32}
    top = max(sum(column) for held_by in views.values() for column in zip(*held_by.values(), strict=True))
    if limit_bytes is not None and not limit_bytes > LIMIT_IN_SIGHT * top > 0:
        top = max(top, limit_bytes)
        layout |= limit_line(limit_bytes / GIB, f"limit {limit_bytes / GIB:.3g} GiB")
    layout["yaxis"]["range"] = [0, 1.12 * top / GIB]
    return Chart(
        name="memory",
        title="Memory per rank",
        caption=caption,
        traces=tuple(
            bars(
                held,
                [f"{rank:,}" for rank in range(len(values))],
                [round(value / GIB, 5) for value in values],
                colour=_MEMORY_COLOURS[held],
                hover="%{y:.3f} GiB",
            )
            for held_by in views.values()
            for held, values in held_by.items()
        ),
        layout=layout,
        data=Table(
            columns=("view", "rank", "what", "bytes"),
            rows=tuple(
                (view, rank, held, value)
                for view, held_by in views.items()
                for held, values in held_by.items()
                for rank, value in enumerate(values)
            ),
        ),
        terms=("received rows", "replica", "slot", "rank"),
        views=switch([view for view, held_by in views.items() for _ in held_by]),
        wide=False,
    )


def activations_text(activations: str, *, stages: int = 1) -> str:
    """Say which activations of experts count as received rows; `stages`: of the pipeline."""
    if activations == "kept" and stages > 1:
        return (
            "Activations of experts are kept for the backward pass, so in an update a stage holds those of all its "
            f"layers for as many micro-steps as are in flight: {stages} on the first stage, 1 on the last."
        )
    if activations == "kept":
        return "Activations of experts are kept for the backward pass, so an update holds those of all its layers."
    return "Activations of experts are recomputed in the backward pass, so a rank holds one layer's at a time."


AXES = {
    "ep": "EP width",
    "slots": "replica slots per rank",
    "micro": "samples per micro-step",
    "tokens": "tokens per rank and micro-step",
}
_DASHES = ("solid", "dash", "dot")
_SYMBOLS = ("circle-open", "square-open", "diamond-open", "triangle-up-open", "cross-open", "star-open", "hexagon-open")
"""Open, so that one line's points are seen through those of another that lies on it."""


def sweep(points: Sequence[Mapping[str, Any]], *, axes: Mapping[str, Sequence[int]], caption: str) -> Chart:
    """Draw the saved share over the axis with most values, a line for every choice of the other axes.

    Points and axes are as in the result.
    """
    across = max(axes, key=lambda name: len(axes[name]))
    others = [name for name in axes if name != across]
    lines: dict[str, list[Mapping[str, Any]]] = {}
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
    """Draw the saved share over tokens per rank at several skews, and the share `worth` from which on a plan pays.

    Curves are as in the result.
    """
    layout = frame(height=320, x=AXES["tokens"], y="saved of static's expert seconds, %", hover="x unified")
    tokens = sorted({p["tokens"] for curve in curves for p in curve["points"]})
    layout["xaxis"] |= {"type": "log", "tickvals": tokens, "ticktext": [f"{t:,}" for t in tokens]}
    return Chart(
        name="break-even",
        title="From when on a plan pays",
        caption=caption,
        traces=tuple(
            _shares(
                f"skew {curve['skew']:.2f}",
                [p["tokens"] for p in curve["points"]],
                [p["saved_share"] for p in curve["points"]],
                place,
            )
            for place, curve in enumerate(curves)
        ),
        layout=layout | limit_line(worth * 100, f"break-even: {percent(worth)}", at="right"),
        data=Table(
            columns=("skew", "tokens", "saved_share"),
            rows=tuple((c["skew"], p["tokens"], p["saved_share"]) for c in curves for p in c["points"]),
        ),
        terms=("break-even", "skew", "saved"),
        wide=False,
    )


def _shares(name: str, x: Sequence[Any], shares: Sequence[float], place: int) -> dict[str, Any]:
    """Draw one line; its dash and points distinguish it from lines that it covers."""
    style = (SERIES[place % len(SERIES)], _DASHES[place % len(_DASHES)])
    trace = line(name, x, [100 * share for share in shares], style=style)
    marker = {**trace["marker"], "symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 9, "line": {"width": 1.5}}
    return {**trace, "mode": "lines+markers", "marker": marker, "hovertemplate": "%{y:.1f} %"}
