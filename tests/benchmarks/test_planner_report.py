"""The planner's page is made of its document."""

import json

import pytest

from benchmarks.planner_report import page_of
from benchmarks.results import ROOT

REPORTS = ROOT / "benchmarks" / "reports"


def test_the_committed_page_is_what_the_committed_document_makes():
    (path,) = REPORTS.glob("planner_*.json")
    assert path.with_suffix(".md").read_text() == page_of(json.loads(path.read_text()), path.name)


@pytest.mark.parametrize(("value", "word"), [(0.5, "Every line holds."), (2.0, "1 of 1 lines do not hold.")])
def test_a_limit_that_is_missed_is_said(value, word):
    rows = [
        {"table": "seconds", "trace": "t", "EP": 8, "tokens": 2048, "slots": 1, "policy": policy, "predicted_ms": ms}
        for policy, ms in (("static", 4.0), ("equipoise", 2.0), ("balanced", 1.0))
    ]
    rows += [
        {**rows[0], "policy": name} for name in ("eplb-history", "eplb-oracle", "lplb", "reactive", "reactive-free")
    ]
    document = {
        "commit": "c",
        "machine": "m",
        "versions": {"python": "3"},
        "rows": [*rows, {**rows[0], "table": "window"}],
        "limits": [{"name": "n", "value": value, "at_least": None, "at_most": 1.0, "holds": value <= 1}],
    }
    page = page_of(document, "x.json")
    assert word in page
    assert "| t | 8 | 2,048 | 1 | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 | 2.000 | 4.000 |" in page
