"""Charts of loads: skew over micro-steps, by layer and by EP width; heat maps of ranks and of experts.

Takes series and arrays of a result and draws them. Skew comes from the result, which takes it from `loads.skew`; here
loads are only divided by their mean, so that a colour means the same in every layer and micro-step.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from equipoise.report.frame import (
    HALF_HEIGHT,
    STYLES,
    Grid,
    frame,
    heat_map,
    line,
    whole_ticks,
    window_marks,
    with_unit,
)
from equipoise.report.page import Chart, Table
from equipoise.report.theme import GREEN, GREY, VERMILION

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
