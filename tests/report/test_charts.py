"""Every chart is one that plotly accepts, property by property, and awkward inputs are drawn too."""

from itertools import pairwise

import numpy as np
import pytest

from equipoise.report import build_page
from equipoise.report.charts import (
    MAX_EVENTS,
    MAX_TICKS,
    cost_parts,
    expert_heat_map,
    layer_heat_map,
    memory,
    over_mean,
    rank_heat_map,
    rank_seconds,
    skew_over_micro_steps,
    sweep,
    timeline,
    traffic,
    whole_ticks,
)
from equipoise.report.render import themes
from tests.report.documents import simulation


@pytest.mark.parametrize("chart", build_page(simulation(), title="x").charts, ids=lambda chart: chart.name)
def test_plotly_knows_every_property(chart):
    from plotly.graph_objects import Figure

    template = themes()["dark"]["template"]
    figure = Figure(data=list(chart.traces), layout={**chart.layout, "template": template})
    assert len(figure.data) == len(chart.traces)


def test_a_layer_without_rows_is_level_and_not_a_hole():
    load = np.array([[0.0, 0.0], [1.0, 3.0]])
    assert over_mean(load).tolist() == [[1.0, 1.0], [0.5, 1.5]]
    chart = rank_heat_map({"before": load}, skew=1.4, caption="x")
    assert chart.traces[0]["z"] == [[1.0, 0.5], [1.0, 1.5]]
    assert chart.views == ()


@pytest.mark.parametrize(("skew", "ends"), [(1.0, (0.95, 1.05)), (1.4, (0.6, 1.4)), (3.5, (0.0, 2.0))])
def test_a_heat_map_has_its_strongest_colour_at_the_mean_skew_of_the_headline(skew, ends):
    load = np.array([[9.0, 1.0], [1.0, 3.0]])
    for chart in (
        rank_heat_map({"before": load}, skew=skew, caption="x"),
        layer_heat_map({"before": load}, layers=[0, 1], skew=skew, caption="x"),
    ):
        axis = chart.layout["coloraxis"]
        assert (axis["cmin"], axis["cmax"]) == pytest.approx(ends)


def test_one_rank_one_layer_one_micro_step_can_be_drawn():
    one = np.ones((1, 1))
    assert rank_heat_map({"before": one, "after": one}, skew=1.0, caption="x").traces[0]["z"] == [[1.0]]
    assert expert_heat_map({"load": one}, layers=[7], caption="x").traces[0]["y"] == ["7"]
    assert traffic({"before": np.zeros((1, 1))}, caption="x").layout["coloraxis"]["cmax"] == 1.0
    point = skew_over_micro_steps({"before": [1.5]}, windows=[("update", 1)], caption="x").traces[0]
    assert point["mode"] == "markers"


def test_many_micro_steps_are_binned_and_the_data_is_not():
    load = np.random.default_rng(0).integers(1, 9, size=(600, 4))
    chart = rank_heat_map({"before": load, "after": load}, skew=1.4, caption="x")
    assert len(chart.traces[0]["x"]) == 200
    assert chart.traces[0]["x"][:2] == ["0-2", "3-5"]
    assert "the mean of 3 micro-steps" in chart.note
    assert len(chart.data.rows) == 2400


def test_parts_that_are_nothing_everywhere_are_left_out():
    chart = cost_parts(
        {"a": {"compute": 1.0, "pull": 0.0}, "b": {"compute": 2.0}}, caption="x", title="x", terms=("compute",)
    )
    assert [trace["name"] for trace in chart.traces] == ["compute"]
    assert chart.views == ()


def test_a_long_timeline_is_cut_by_time_and_says_so():
    events = [
        {"rank": r, "lane": "compute", "name": f"layer {i}", "start_s": i * 1e-3, "end_s": i * 1e-3 + 5e-4}
        for r in range(8)
        for i in range(1000)
    ]
    chart = timeline({"static": events}, caption="x")
    assert len(chart.traces[0]["x"]) == MAX_EVENTS
    assert set(chart.traces[0]["customdata"]) == set(range(8)), "every rank is still there"
    assert "the first 4,000 of 8,000 bars" in chart.note
    assert len(chart.data.rows) == 8000


def test_memory_without_a_limit_draws_no_line():
    chart = memory({"before": {"received rows": [2**30, 2**31]}}, limit_bytes=None, caption="x")
    assert "shapes" not in chart.layout
    assert chart.layout["yaxis"]["range"][1] == pytest.approx(2.24)


@pytest.mark.parametrize(("times", "is_drawn"), [(0.5, True), (4, True), (4.01, False), (187, False)])
def test_a_limit_out_of_sight_leaves_the_axis_to_the_bars(times, is_drawn):
    peak = 7 * 2**30
    chart = memory({"before": {"received rows": [peak, peak // 2]}}, limit_bytes=int(times * peak), caption="x")
    assert ("shapes" in chart.layout) is is_drawn
    assert chart.layout["yaxis"]["range"] == pytest.approx([0, 1.12 * 7 * (max(1, times) if is_drawn else 1)])


@pytest.mark.parametrize(
    ("count", "step"), [(1, 1), (4, 1), (10, 1), (11, 2), (32, 5), (100, 10), (101, 20), (1024, 200)]
)
def test_things_that_cannot_be_halved_have_whole_ticks(count, step):
    assert whole_ticks(count) == {"tick0": 0, "dtick": step, "tickformat": ",d"}
    assert count / step <= MAX_TICKS


def test_lines_of_a_sweep_that_lie_on_each_other_are_told_apart():
    facts = {"tokens": 8192, "skew": 1.5, "saved_share": 0.1, "of_balanced": 0.9, "micro": None}
    points = [{"ep": ep, "slots": slots, **facts} for ep in (8, 1024) for slots in range(9)]
    traces = sweep(points, axes={"ep": (8, 1024, 2048), "slots": range(2)}, caption="x").traces
    assert all(trace["y"] == traces[0]["y"] for trace in traces)
    inks = {(t["line"]["color"], t["line"]["dash"], t["marker"]["symbol"]) for t in traces}
    assert len(inks) == len(traces) == 9
    assert all(one["line"]["dash"] != other["line"]["dash"] for one, other in pairwise(traces))
    assert all(trace["marker"]["symbol"].endswith("-open") for trace in traces), "a full one hides what is under it"


def test_thousands_of_tokens_and_ranks_are_written_alike():
    facts = {"slots": 1, "skew": 1.5, "saved_share": 0.1, "of_balanced": 0.9, "micro": None}
    points = [{"ep": ep, "tokens": tokens, **facts} for ep in (8, 16, 32) for tokens in (512, 1024)]
    assert [t["name"] for t in sweep(points, axes={"ep": (8, 16, 32), "tokens": (512, 1024)}, caption="x").traces] == [
        "tokens 512",
        "tokens 1,024",
    ]
    across = sweep(points, axes={"ep": (8,), "tokens": (512, 1024)}, caption="x").traces[0]
    assert across["x"] == ["512", "1,024"]
    held = memory({"before": {"received rows": [2**30] * 1025}}, limit_bytes=None, caption="x")
    spent = rank_seconds({"before": {str(rank): {"compute": 1.0} for rank in range(1025)}}, caption="x")
    assert held.traces[0]["x"][-1] == spent.traces[0]["x"][-1] == "1,024"


def test_attention_has_a_colour_of_its_own_in_the_lane_of_compute():
    event = {"rank": 2, "lane": "compute", "name": "experts backward 0", "start_s": 0.0, "end_s": 1e-3}
    attention = [{**event, "name": name} for name in ("attention 0", "attention backward 0")]
    odd = {**event, "lane": "pull", "name": "attention of another kind"}
    chart = timeline({"static": [event, *attention, odd]}, caption="x")
    compute, other, pull = chart.traces
    assert [t["name"] for t in chart.traces] == ["compute", "attention", "pull"]
    assert other["text"] == ["attention 0", "attention backward 0"] and pull["text"] == [odd["name"]]
    assert len({t["marker"]["color"] for t in chart.traces}) == 3
    assert set(other["y"]) == set(compute["y"]) != set(pull["y"])


def test_lanes_that_are_not_used_take_no_room():
    event = {"rank": 2, "lane": "compute", "name": "layer 0", "start_s": 0.0, "end_s": 1e-3}
    (alone,) = timeline({"static": [event]}, caption="x").traces
    assert alone["y"] == [2.0]
    both = timeline({"static": [event, {**event, "lane": "pull"}]}, caption="x").traces
    assert [trace["y"][0] for trace in both] == pytest.approx([1.8, 2.2])
    assert both[0]["width"] < 0.4
