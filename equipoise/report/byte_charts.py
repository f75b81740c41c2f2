"""Charts of bytes: who sends how much to whom, and what each rank's memory holds against a limit that is in sight.

Takes bytes of a result and draws them; computes none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.report.frame import HALF_HEIGHT, Grid, frame, heat_map, limit_line, switch
from equipoise.report.page import Chart, Table
from equipoise.report.theme import BLUE, GREY, ORANGE

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
