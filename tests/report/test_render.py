"""One file that holds everything, and nothing in it can break out."""

import base64
import gzip
import json
import re
import sys
from dataclasses import replace

import pytest

from equipoise.core import EquipoiseError
from equipoise.report import build_page, render, write_page
from equipoise.report.render import as_csv, pair_halves, show_cell
from tests.report.documents import simulation

EVIL = "</script><script>alert(1)</script><!-- \"&'"


@pytest.fixture(scope="module")
def page():
    return build_page(simulation(), title="a step")


@pytest.fixture(scope="module")
def html(page):
    return render(page)


def files_of(html):
    """The packed files of a page, unpacked, by name."""
    found = dict(re.findall(r'data-file="([^"]+)">([^<]+)</script>', html))
    return {name: gzip.decompress(base64.b64decode(packed)).decode() for name, packed in found.items()}


def page_data(html):
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', html, re.DOTALL)
    return json.loads(found[1])


def test_the_file_names_no_address_outside_itself(html):
    assert "http://" not in html and "https://" not in html and "url(" not in html
    assert re.findall(r'(?:src|href)="([^"]*)"', html) == ["data:,"]
    assert "default-src 'none'" in html


def test_plotlys_script_is_that_of_the_installed_package(html):
    from plotly.offline import get_plotlyjs

    assert files_of(html)["plotly.min.js"] == get_plotlyjs()


def test_text_of_a_result_stays_text(page):
    document = simulation(sweep=False).to_dict()
    document["model"]["name"] = EVIL
    document["policies"][2]["timeline"][0]["name"] = EVIL
    own = render(build_page(document, title=EVIL))
    assert "alert(1)</script>" not in own
    assert own.count("<script") == own.count("</script>")
    names = [trace["text"][0] for c in page_data(own)["charts"] if c["name"] == "timeline" for trace in c["traces"]]
    assert EVIL in names


def test_the_same_page_gives_the_same_bytes(page, html):
    assert render(build_page(simulation(), title="a step")) == html


def test_downloads_are_the_result_and_every_sections_data(page, html):
    texts = files_of(html)
    texts.pop("plotly.min.js")
    assert json.loads(texts.pop("result.json")) == json.loads(json.dumps(page.document))
    assert texts == {f"{section.name}.csv": as_csv(section.data) for section in page.sections}


def test_the_first_view_is_the_one_drawn(page, html):
    for chart, drawn in zip(page.charts, page_data(html)["charts"], strict=True):
        shown = [trace["visible"] for trace in drawn["traces"]]
        assert shown == (list(chart.views[0].visible) if chart.views else [True] * len(shown))


def test_answer_figures_and_what_is_missing_stand_in_the_page(page, html):
    for words in (page.answer, page.figures[0].value, page.missing[0].text, *page.notes, *page.conditions):
        assert words.replace("'", "&#39;") in html


def test_narrow_charts_stand_side_by_side_in_twos_and_one_alone_is_wide(page):
    wide = next(c for c in page.charts if c.wide)
    narrow = [replace(wide, name=f"n{i}", wide=False) for i in range(3)]
    assert pair_halves(replace(page, sections=(*narrow, wide))) == {"n0", "n1"}
    assert pair_halves(replace(page, sections=(narrow[0], wide, narrow[1]))) == set()


def test_a_page_is_written_whole_or_not_at_all(page, tmp_path, monkeypatch):
    with pytest.raises(EquipoiseError, match=r"absent/x\.html cannot be written"):
        write_page(page, tmp_path / "absent" / "x.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(EquipoiseError, match="taken cannot be written"):
        write_page(page, tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "taken").rmdir()
    size = write_page(page, tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_size == size
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]


@pytest.mark.parametrize("name", ["plotly.offline", "jinja2"])
def test_without_the_extra_it_says_what_to_install(page, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EquipoiseError, match=r"pip install 'equipoise\[report\]'"):
        render(page)


def test_csv_quotes_what_needs_it_and_leaves_the_unknown_empty(page):
    table = replace(page.sections[0].data, columns=("a", "b,c"), rows=((None, 'x"y'),))
    assert as_csv(table) == 'a,"b,c"\n,"x""y"\n'


def test_numbers_of_a_table_align():
    assert [show_cell(v) for v in (None, 0.5, 12.25, 3, "x")] == ["", "0.5000", "12.2500", "3", "x"]


UNITS = {"skew", "load / mean", "MiB", "s", "%", "bytes", "seconds", "seconds, predicted"}
MEASURES = {"start_s", "end_s", "skew", "saved_share", "of_balanced", "tokens", "bytes"}
"""Names that say their unit themselves."""
PLACES = {
    "window",
    "micro_step",
    "micro-step",
    "micro",
    "rank",
    "layer",
    "expert",
    "source",
    "destination",
    "policy",
} | {*("lane", "name", "view", "what", "path", "ep", "slots", "bar")}


def test_every_column_of_a_download_says_its_unit():
    for section in build_page(simulation(), title="x").sections:
        for column in section.data.columns:
            unit = column.partition(", ")[2]
            assert unit in UNITS or column in MEASURES | PLACES, (section.name, column)


def test_bytes_and_ratios_are_told_apart_in_their_files():
    heads = {s.name: as_csv(s.data).splitlines()[0] for s in build_page(simulation(), title="x").sections}
    assert heads["traffic"] == 'source,destination,"before, MiB","after, MiB"'
    assert heads["layer-heat-map"] == 'layer,rank,"before, load / mean","after, load / mean"'
    assert heads["rank-seconds"].startswith('view,rank,"compute, s"')
    assert heads["skew-over-micro-steps"] == 'window,micro_step,"before, skew","after, skew"'
