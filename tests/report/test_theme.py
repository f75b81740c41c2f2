"""Colours: readable in both schemes, and the same series has the same colour in both."""

import pytest

from equipoise.report import build_page
from equipoise.report.charts import PART_COLOURS
from equipoise.report.render import GROUND, INK, QUIET, SERIES, themes
from tests.report.documents import metrics, simulation, small_analysis, write_run

SAME = {"waiting for plans": "planning", "exposed transfers": "transfers"}
"""Parts that have a longer name on the page of a run."""


def luminance(colour):
    """Relative luminance as WCAG defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ink_and_series_stand_out_from_the_ground(scheme):
    ground = GROUND[scheme]
    assert contrast(INK[scheme], ground) >= 7
    assert contrast(QUIET[scheme], ground) >= 7
    assert min(contrast(colour, ground) for colour in SERIES) >= 1.7


def test_a_part_has_one_colour_on_every_page_and_no_other_part_of_a_chart_has_it(tmp_path):
    run = write_run(tmp_path / "run", [metrics(step) for step in range(3)])
    legends = [
        {name: colour for name, colour, _ in chart.legend if name in PART_COLOURS or colour in PART_COLOURS.values()}
        for result in (simulation(), small_analysis(), run)
        for chart in build_page(result, title="x").charts
        if chart.traces[0]["type"] == "bar" and chart.name not in ("memory", "bytes-over-steps")
    ]
    assert len(legends) > 3
    for legend in legends:
        assert len(set(legend.values())) == len(legend), legend
        for name, colour in legend.items():
            assert colour == PART_COLOURS[SAME.get(name, name)], name


def test_schemes_differ_in_ground_and_never_in_series():
    light, dark = (themes()[scheme]["template"]["layout"] for scheme in ("light", "dark"))
    assert light["colorway"] == dark["colorway"]
    assert light["font"]["color"] != dark["font"]["color"]
    assert light["xaxis"]["gridcolor"] != dark["xaxis"]["gridcolor"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_level_cell_has_almost_the_colour_of_the_ground(scheme):
    scales = themes()[scheme]["scales"]
    (middle,) = [colour for stop, colour in scales["diverging"] if stop == 0.5]
    assert contrast(middle, GROUND[scheme]) < 1.3
    for stops in scales.values():
        assert [stop for stop, _ in stops] == sorted(stop for stop, _ in stops)
        assert (stops[0][0], stops[-1][0]) == (0, 1)
    lightness = [luminance(colour) for _, colour in scales["sequential"]]
    assert lightness == sorted(lightness)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_bars_are_outlined_in_the_colour_of_the_ground(scheme):
    (bar,) = themes()[scheme]["template"]["data"]["bar"]
    assert bar["marker"]["line"] == {"color": GROUND[scheme]}


@pytest.mark.parametrize("axis", ["xaxis", "yaxis"])
def test_thousands_are_written_alike_on_every_axis(axis):
    assert all(found["template"]["layout"][axis]["separatethousands"] for found in themes().values())
