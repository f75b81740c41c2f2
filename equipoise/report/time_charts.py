"""Charts of seconds: policies by cost part, ranks by what they do, the timeline of one micro-step.

Takes seconds of a result and draws them; computes none. Parts that are nothing everywhere are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.report.frame import frame, switch, with_unit
from equipoise.report.page import Cell, Chart, Table, View
from equipoise.report.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

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
