"""The page of an analysis says what the analysis says."""

import json

import pytest

from equipoise.report import build_page
from equipoise.report.page import percent, ratio
from tests.report.documents import small_analysis


@pytest.fixture(scope="module")
def analysis():
    return small_analysis()


@pytest.fixture(scope="module")
def document(analysis):
    return json.loads(json.dumps(analysis.to_dict()))


def chart(page, name):
    return next(c for c in page.charts if c.name == name)


def test_an_analysis_and_its_document_make_the_same_page(analysis, document):
    assert build_page(analysis, title="x").answer == build_page(document, title="x").answer


def test_the_answer_has_the_documents_shares(document):
    page, whole = build_page(document, title="x"), document["seconds"]
    assert page.answer.startswith(f"{percent(whole['lost']['share'])} of the time in expert layers is lost")
    # A token that crosses once per node leaves little traffic to save beyond what is lost.
    assert f"would recover {percent(whole['saved']['share'])}" in page.answer
    assert "1 replica slot" in page.answer
    skew = document["plan"]["skew"]["update"]
    figures = {f.label: f for f in page.figures}
    speed = whole["now"]["total"] / whole["planned"]["total"]
    assert figures["Saved by a plan"].text.endswith(f"so {ratio(speed)} times as fast")
    assert "how samples were cut" in build_page({**document, "schedule": "how samples were cut"}, title="x").conditions
    value = figures["Mean skew"].value
    assert value == f"{ratio(skew['before']['mean'])} to {ratio(skew['after']['mean'])}"


def test_more_than_is_lost_is_recovered_only_with_the_reason_beside_it(document):
    for factor, is_more in ((0.5, False), (2.0, True)):
        changed = json.loads(json.dumps(document))
        changed["seconds"]["saved"]["share"] = factor * changed["seconds"]["lost"]["share"]
        page = build_page(changed, title="x")
        has_reason = any("less time than balanced" in words for words in page.conditions)
        assert ("beyond it" in page.answer) is has_reason is is_more


@pytest.mark.parametrize(
    ("part", "reason"),
    [("compute", "because its experts take less"), ("all_to_all", "because its all-to-all takes less")],
)
def test_the_reason_is_the_part_that_the_plan_needs_less_of(document, part, reason):
    changed = json.loads(json.dumps(document))
    whole = changed["seconds"]
    whole["saved"]["share"] = 2 * whole["lost"]["share"]
    whole["planned"] |= {
        name: whole["balanced"][name] + (-1 if name == part else 1) for name in ("compute", "all_to_all")
    }
    assert reason in build_page(changed, title="x").conditions[-1]


def test_an_analysis_without_loss_says_that_balance_would_not_help(document):
    changed = json.loads(json.dumps(document))
    changed["seconds"]["lost"] = {"seconds": 0.0, "share": 0.0}
    assert build_page(changed, title="x").answer.startswith("Balanced ranks would not be faster here; a plan with")


def test_charts_hold_the_documents_figures(document):
    page = build_page(document, title="x")
    assert [c.name for c in page.charts] == [
        "cost-parts",
        "skew-over-micro-steps",
        "skew-by-layer",
        "skew-by-width",
        "memory",
    ]
    steps = [s for stage in document["stages"].values() for s in stage["skew"]["micro_steps"]]
    before, worst, _ = chart(page, "skew-over-micro-steps").traces
    assert before["y"] == pytest.approx([s["mean"] for s in steps])
    assert worst["y"] == pytest.approx([s["max"] for s in steps])
    bars = {row[0]: sum(row[2:]) for row in chart(page, "cost-parts").data.rows}
    for name, found in zip(("log-prob", "update"), document["stages"].values(), strict=True):
        for which in ("now", "planned", "balanced"):
            assert bars[f"{name}, {which}"] == pytest.approx(found["seconds"][which]["total"])
    layers = chart(page, "skew-by-layer").traces[0]
    assert layers["y"] == pytest.approx([x["mean"] for x in document["stages"]["update"]["skew"]["layers"]])


def test_memory_names_the_limit_the_verdict_and_a_fix(document):
    memory = chart(build_page(document, title="x"), "memory")
    assert "It does not fit into 102 MiB." in memory.caption
    assert memory.layout["annotations"][0]["text"] == "limit 0.1 GiB"
    assert [row[3] for row in memory.data.rows] == document["memory"]["rank_peak_bytes"]
    assert "kept for the backward pass" in memory.caption, "what the bytes count is said"


def test_what_an_analysis_cannot_show_is_named_with_its_command(document):
    missing = {part.title: part.command for part in build_page(document, title="x").missing}
    assert missing["Policies and sweeps"].startswith("equipoise simulate")
    assert any("timeline" in title for title in missing)


def test_without_a_plan_the_page_says_why(document):
    seconds = {**document["seconds"], "planned": None, "saved": None}
    bare = {**document, "plan": None, "no_plan": "not asked for", "seconds": seconds}
    bare["stages"] = {
        name: {**stage, "seconds": {**stage["seconds"], "planned": None, "saved": None}}
        for name, stage in document["stages"].items()
    }
    page = build_page(bare, title="x")
    assert page.answer.endswith("no plan was tried: not asked for.")
    assert [t["name"] for t in chart(page, "skew-over-micro-steps").traces] == ["before", "before, worst layer"]


def test_a_plan_that_is_not_worth_it_is_called_so(document):
    poor = {**document, "plan": {**document["plan"], "worth_it": False}}
    assert build_page(poor, title="x").answer.endswith("which is not worth it here.")


def test_a_plan_that_takes_longer_is_never_said_to_recover(document):
    slow = json.loads(json.dumps(document))
    slow["seconds"]["saved"], slow["plan"]["worth_it"] = {"seconds": -0.5, "share": -0.271}, False
    page = build_page(slow, title="x")
    assert page.answer.endswith("would take 27.1 % more time, which is not worth it here.")
    figures = {figure.label: figure for figure in page.figures}
    assert (figures["Slower by"].value, figures["Slower by"].text) == (
        "27.1 %",
        "500 ms more with a plan, every cost charged",
    )
    assert "Saved by a plan" not in figures


def test_layers_have_whole_ticks(document):
    assert chart(build_page(document, title="x"), "skew-by-layer").layout["xaxis"]["dtick"] == 1


def test_placement_alone_takes_boxes_and_an_unpriced_part_is_left_out(document):
    placed = {**document, "plan": {**document["plan"], "slots": 0}}
    assert "placement alone (" in build_page(placed, title="x").answer
    stages = json.loads(json.dumps(document["stages"]))
    for stage in stages.values():
        for which in ("now", "planned", "balanced"):
            stage["seconds"][which]["all_to_all"] = None
    parts = [t["name"] for t in chart(build_page({**document, "stages": stages}, title="x"), "cost-parts").traces]
    assert "all-to-all" not in parts and "compute" in parts


def test_one_micro_step_is_not_said_as_many(document):
    assert "one step: 1 micro-step," in build_page({**document, "micro_steps": 1}, title="x").conditions[0]
