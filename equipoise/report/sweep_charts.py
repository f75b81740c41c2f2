"""Charts of sweeps: what a plan saves over one axis, and from which tokens per rank on it pays.

Takes points of a result and draws them; computes none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.report.frame import frame, limit_line, line
from equipoise.report.page import Chart, Table
from equipoise.report.theme import SERIES
from equipoise.report.words import percent

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
