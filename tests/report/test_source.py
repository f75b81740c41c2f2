"""What a page can be made of, and how anything else is refused."""

import json
import math
import re

import pytest

import equipoise as eq
from equipoise.core import EquipoiseError
from equipoise.report import build_page, source
from tests.report.documents import simulation

DIAGNOSIS = {
    "ok": False,
    "num_samples": 12,
    "num_rows": 3456,
    "findings": [
        {
            "check": "rows-tokens",
            "verdict": "finding",
            "count": 2,
            "total": 12,
            "unit": "samples",
            "first_place": "sample 3",
            "detail": "",
            "advice": "record again",
            "share": 2 / 12,
            "rate_L": [],
        },
        {
            "check": "top-k",
            "verdict": "good",
            "count": 0,
            "total": 0,
            "unit": "routes",
            "first_place": "",
            "detail": "8 of 8",
            "advice": "",
            "share": 0.0,
            "rate_L": [],
        },
    ],
}


def test_a_result_its_document_and_its_file_make_the_same_page(tmp_path):
    result = simulation()
    (tmp_path / "step.json").write_text(json.dumps(result.to_dict()))
    pages = [build_page(source, title="x") for source in (result, result.to_dict(), tmp_path / "step.json")]
    assert len({page.answer for page in pages}) == 1
    assert pages[0].charts == pages[2].charts
    assert build_page(str(tmp_path / "step.json")).title == "step.json"


def test_write_report_is_a_verb_of_the_package(tmp_path):
    page = eq.write_report(simulation(), tmp_path / "report.html", title="my step")
    html = (tmp_path / "report.html").read_text()
    assert page.answer in html
    assert "<title>my step - Equipoise</title>" in html


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a JSON list, not a result"),
        ('{"format": "tarot-1"}', "has format 'tarot-1'; a page can be made of equipoise-analysis-2"),
        ("{}", "has format None"),
        ('{"format": "equipoise-simulation-1"}', "has no field 'cluster'|has no field 'policies'"),
        ('{"format": "equipoise-analysis-2"}', "write it again with this version"),
        ('{"format": "equipoise-run-1", "steps": [], "settings": {}}', "not what it should be .*write it again"),
        ('{"format": "equipoise-simulation-1", "policies": null}', "not what it should be .*write it again"),
    ],
)
def test_what_is_no_result_is_refused_by_name(tmp_path, content, words):
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(EquipoiseError, match=words) as caught:
        build_page(tmp_path / "odd.json")
    assert "odd.json" in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda document: document.update(policies=[]), "`policies` is empty"),
        (
            lambda document: document["policies"][1]["timeline"][5].update(lane="tarot"),
            "policy eplb-oracle has a bar .* in lane 'tarot', known are compute, all-to-all, pull, return, edges",
        ),
        (lambda document: document["windows"][1].update(load_LE=[]), "not what it should be"),
        (lambda document: document["windows"].clear(), "not what it should be"),
        (
            lambda document: document["sweep"]["break_even"]["curves"].clear(),
            r"not what it should be \(chart break-even has no data\)",
        ),
        (lambda document: document["policies"][0].update(expert_s=math.nan), "is not JSON .*NaN"),
    ],
    ids=["no policies", "unknown lane", "no experts", "no windows", "no curves", "not a number"],
)
def test_a_damaged_result_is_refused_with_its_file_the_thing_and_the_fix(tmp_path, damage, words):
    document = json.loads(json.dumps(simulation().to_dict()))
    damage(document)
    (tmp_path / "odd.json").write_text(json.dumps(document))
    with pytest.raises(EquipoiseError, match=words) as caught:
        build_page(tmp_path / "odd.json")
    assert "odd.json" in str(caught.value)
    assert re.search("write it again|give what", str(caught.value))


@pytest.mark.parametrize("thing", [None, 7, ["a.json"], object], ids=repr)
def test_a_thing_of_another_kind_is_refused_with_what_can_be_given(tmp_path, thing):
    words = (
        "give an Analysis or a Simulation, its JSON document, the path of a file with one, or a training run's folder"
    )
    with pytest.raises(EquipoiseError, match=re.escape(f"a page cannot be made of {thing!r}; {words}")):
        eq.write_report(thing, tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_a_defect_of_ours_is_not_said_to_be_one_of_the_result(monkeypatch):
    def broken(document, *, title):
        raise AssertionError("two sections of one name")

    monkeypatch.setitem(source.MAKERS, "equipoise-simulation-1", broken)
    with pytest.raises(AssertionError, match="two sections of one name"):
        build_page(simulation())


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(EquipoiseError, match=r"absent\.json cannot be read"):
        build_page(tmp_path / "absent.json")


def test_the_doctors_verdict_becomes_a_table(tmp_path):
    (tmp_path / "doctor.json").write_text(json.dumps(DIAGNOSIS))
    page = build_page(simulation(), title="x", doctor=tmp_path / "doctor.json")
    # What was asked for is not folded.
    listing = page.open_and_folded[0][-1]
    assert listing.name == "doctor"
    assert "1 of 2 checks found something in 12 samples, 3,456 rows: rows-tokens." in listing.caption
    assert listing.data.rows[0] == ("rows-tokens", "finding", "16.7 % of samples", "sample 3", "record again")
    assert listing.data.rows[1] == ("top-k", "good", "", "", "8 of 8")
    assert "The doctor's verdict" not in [part.title for part in page.missing]


def test_one_sample_of_a_verdict_is_not_said_as_many():
    page = build_page(simulation(), title="x", doctor={**DIAGNOSIS, "num_samples": 1, "num_rows": 1})
    assert "in 1 sample, 1 row:" in page.open_and_folded[0][-1].caption


def test_without_a_verdict_the_page_says_how_to_get_one():
    (part,) = [p for p in build_page(simulation(), title="x").missing if p.title == "The doctor's verdict"]
    assert "equipoise doctor" in part.command


def test_something_else_in_place_of_a_verdict_is_refused(tmp_path):
    with pytest.raises(EquipoiseError, match="is no diagnosis"):
        build_page(simulation(), title="x", doctor={"format": "equipoise-analysis-2"})
