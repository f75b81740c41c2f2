"""Numbers in the documents are those of the committed results."""

import json
import re

import pytest

from benchmarks.results import ROOT
from benchmarks.summary import PAGES, REPORTS, TABLES, filled


@pytest.mark.parametrize("page", PAGES)
def test_the_page_holds_what_the_command_makes(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert filled(text) == text, "run: python -m benchmarks.summary --write"


def test_every_table_stands_in_a_page():
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    for name in TABLES:
        assert f"<!-- {name} -->\n|" in pages, name


def test_a_changed_figure_is_noticed():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"<!-- replay summary -->.*?\| (\d+) \|", text, re.DOTALL)
    assert filled(text[: first.start(1)] + "1" + text[first.end(1) :]) == text


def test_every_limit_that_is_missed_is_shown():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name in ("planner_xeon", "rank_replay_h200", "validation_h200", "paper_simulated"):
        for limit in json.loads((REPORTS / f"{name}_202611.json").read_text())["limits"]:
            assert limit["holds"] or limit["name"] in page
