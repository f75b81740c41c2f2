"""What a page holds refuses to be empty, unexplained or ambiguous."""

from dataclasses import replace
from typing import get_args

import pytest

from equipoise.report import build_page
from equipoise.report.page import DEFINITIONS, ChartView, Table
from equipoise.sim.result import PathName
from tests.report.documents import simulation


@pytest.fixture(scope="module")
def page():
    return build_page(simulation(), title="a step")


def chart(page, name):
    return next(c for c in page.charts if c.name == name)


def test_a_chart_without_a_point_cannot_be_made(page):
    timeline = chart(page, "timeline")
    with pytest.raises(ValueError, match="timeline has no data"):
        replace(timeline, traces=())
    with pytest.raises(ValueError, match="timeline has no data"):
        replace(timeline, traces=({**timeline.traces[0], "x": []},), views=())
    with pytest.raises(ValueError, match="timeline has no data"):
        replace(timeline, data=Table(columns=("x",), rows=()))
    heat_map = chart(page, "rank-heat-map")
    with pytest.raises(ValueError, match="rank-heat-map has no data"):
        replace(heat_map, traces=({**heat_map.traces[0], "z": [[]]},), views=())


def test_a_chart_without_caption_or_defined_words_cannot_be_made(page):
    timeline = chart(page, "timeline")
    for change in ({"caption": ""}, {"terms": ("zeal",)}):
        with pytest.raises(AssertionError, match="timeline"):
            replace(timeline, **change)


def test_a_view_must_show_something_of_its_chart(page):
    timeline = chart(page, "timeline")
    for visible in ((False,) * len(timeline.traces), (True,)):
        with pytest.raises(AssertionError, match="view all"):
            replace(timeline, views=(ChartView(label="all", visible=visible),))


def test_two_sections_of_one_name_are_refused(page):
    with pytest.raises(AssertionError, match="two sections of one name"):
        replace(page, sections=page.sections * 2)


def test_a_row_has_a_cell_under_every_column():
    with pytest.raises(AssertionError, match="a row of 1 cells under 2 columns"):
        Table(columns=("a", "b"), rows=((1, 2), (3,)))


def test_a_legend_names_every_series_once_with_its_ink(page):
    assert chart(page, "skew-over-micro-steps").legend == (
        ("before", "#d55e00", "solid"),
        ("after", "#0f7fc0", "solid"),
    )
    names = [name for name, _, _ in chart(page, "timeline").legend]
    assert names == ["compute", "attention", "all-to-all", "pull", "return"]
    assert chart(page, "rank-heat-map").legend == ()


def test_every_definition_is_a_sentence():
    for term, words in DEFINITIONS.items():
        assert words[0].isupper(), term
        assert words.endswith("."), term


@pytest.mark.parametrize("name", ["cost-parts", "rank-seconds", "timeline"])
def test_every_part_that_is_drawn_is_defined_beside_its_chart(page, name):
    drawn = {trace["name"] for trace in chart(page, name).traces}
    assert drawn <= set(chart(page, name).terms)


def test_every_path_and_column_of_the_transfers_is_defined_beside_them(page):
    listing = next(section for section in page.sections if section.name == "paths")
    heads = {column.removesuffix(", s") for column in listing.data.columns} - {"window", "path", "bytes"}
    assert heads | set(get_args(PathName)) <= set(listing.terms)


def test_definitions_say_what_is_computed():
    """The rules that words and code must share: see `sim/step.py`, `sim/sweep.py`, `loads/forecast.py`."""
    for term, rule in {
        "eplb-history": "the first half of each window's own micro-steps",
        "break-even": "at least the share that the dashed line shows",
        "received rows": "those of earlier layers and of micro-steps in flight are included",
    }.items():
        assert rule in DEFINITIONS[term]
    assert not [term for term, words in DEFINITIONS.items() if "ceiling" in words]
