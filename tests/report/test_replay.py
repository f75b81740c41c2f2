"""The page and the trace of a rank replay: measured bars, composed as the replay composes them."""

import pytest

from equipoise.report import build_page, chrome_trace
from tests.report.documents import rank_replay


def test_the_answer_is_the_measured_share_with_its_conditions():
    page = build_page(rank_replay(), title="x")
    assert "98.5 to 98.5 % of a balanced one's throughput with equipoise, 71.0 to 71.0 % without" in page.answer
    assert page.conditions == ("Measured: medians of 9 runs.",)
    assert "NVIDIA H200" in page.kind and "commit aaaaaaaaaa" in page.kind
    assert [figure.value for figure in page.figures] == ["98.5 %", "97.5 %", "96.5 %", "98.5 %"]


def test_every_bar_is_as_long_as_measured_and_layers_begin_together():
    chart = build_page(rank_replay(), title="x").charts[1]
    rows = [row[1:] for row in chart.data.rows if row[0] == "static"]
    assert [(rank, name) for rank, _, name, _, _ in rows] == [
        (0, "layer 0"),
        (1, "layer 0"),
        (0, "layer 1"),
        (1, "layer 1"),
    ]
    assert [start for *_, start, _ in rows] == pytest.approx([0, 0, 5e-3, 5e-3])
    assert [end - start for *_, start, end in rows] == pytest.approx([5e-3, 1e-3, 2e-3, 4e-3])


def test_the_measured_timeline_is_a_trace_too():
    complete = [e for e in chrome_trace(rank_replay())["traceEvents"] if e["ph"] == "X"]
    names = [e["args"]["name"] for e in chrome_trace(rank_replay())["traceEvents"] if e["name"] == "process_name"]
    assert names[0] == "measured, qwen3, EP 2, static, rank 0"
    assert len(complete) == 8
    assert sorted({e["dur"] for e in complete}) == pytest.approx([1000, 2000, 3000, 4000, 5000])


def test_shares_are_those_of_the_rank_replay():
    chart = build_page(rank_replay(), title="x").charts[0]
    assert {trace["name"]: trace["y"][0] for trace in chart.traces} == {
        "static": 71.0,
        "equipoise": 98.5,
        "balanced": 100.0,
    }
