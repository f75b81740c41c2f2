"""The page of a simulation says what its document says, and speaks of nothing that was not simulated."""

import json
import re

import numpy as np
import pytest

from equipoise.report import build_page
from equipoise.report.words import num_bytes, percent, ratio
from tests.report.documents import POLICIES, STEPS, simulation


@pytest.fixture(scope="module")
def document():
    return simulation().to_dict()


@pytest.fixture(scope="module")
def page(document):
    return build_page(document, title="a step")


def chart(page, name):
    return next(c for c in page.charts if c.name == name)


def of(document, name):
    return next(p for p in document["policies"] if p["policy"] == name)


def test_the_answer_has_the_documents_shares_and_the_memory_it_takes(document, page):
    static, ours, balanced = (of(document, name) for name in ("static", "equipoise", "balanced"))
    lost, saved = (percent(1 - p["expert_s"] / static["expert_s"]) for p in (balanced, ours))
    held = num_bytes(ours["memory"]["replicas_bytes"])
    assert page.answer == (
        f"{lost} of the time in expert layers is lost to uneven experts; "
        f"a plan with 1 replica slot ({held} per GPU) would recover {saved}."
    )
    figures = {figure.label: figure for figure in page.figures}
    assert figures["Recovered"].words == f"{percent(ours['of_balanced'])} of balanced"
    before = np.mean(np.concatenate([w["before"]["skew_M"] for w in document["windows"]]))
    after = np.mean(np.concatenate([w["after"]["skew_M"] for w in ours["windows"]]))
    assert figures["Mean skew"].value == f"{ratio(before)} to {ratio(after)}"


def test_conditions_say_that_it_is_predicted_and_for_what(page):
    words = " ".join(page.conditions)
    for part in ("Predicted, not measured", "10 micro-steps", "8,192 tokens per rank", "top-4", "derived"):
        assert part in words
    assert page.notes == ("Compute and all-to-all do not overlap.", "Links are priced by their published rate.")


def test_every_chart_of_the_first_screen_and_below_is_there(page):
    names = [section.name for section in page.sections]
    assert names == [
        "skew-over-micro-steps",
        "cost-parts",
        "rank-heat-map",
        "layer-heat-map",
        "traffic",
        "expert-heat-map",
        "rank-seconds",
        "timeline",
        "memory",
        "sweep",
        "break-even",
        "paths",
    ]


def test_skew_over_micro_steps_is_the_documents_window_after_window(document, page):
    before, after = chart(page, "skew-over-micro-steps").traces
    wanted = [s for w in document["windows"] for s in w["before"]["skew_M"]]
    assert before["y"] == pytest.approx(wanted, abs=1e-5)
    assert after["y"] == pytest.approx(
        [s for w in of(document, "equipoise")["windows"] for s in w["after"]["skew_M"]], abs=1e-5
    )
    marks = chart(page, "skew-over-micro-steps").layout
    assert [a["text"] for a in marks["annotations"]] == list(STEPS)
    assert [s["x0"] for s in marks["shapes"]] == [STEPS["recompute"] - 0.5]


def test_cost_parts_are_the_documents_seconds(document, page):
    drawn = {
        trace["name"]: dict(zip(trace["y"], trace["x"], strict=True)) for trace in chart(page, "cost-parts").traces
    }
    for policy in document["policies"]:
        bar = f"{policy['policy']}  {policy['speedup']:.2f} x"
        assert drawn["compute"][bar] == pytest.approx(policy["seconds"]["compute"])
        assert drawn["all-to-all inside"][bar] == pytest.approx(policy["seconds"]["all_to_all_inside"])
        assert sum(part[bar] for part in drawn.values()) == pytest.approx(policy["step_s"])
    focus, whole = chart(page, "cost-parts").views
    shown = [name for name, visible in zip(drawn, focus.visible, strict=True) if visible]
    assert "attention" not in shown and "compute" in shown
    assert all(whole.visible)


def test_heat_maps_show_loads_over_their_mean(document, page):
    before, after = chart(page, "rank-heat-map").traces
    load_MR = np.concatenate([w["before"]["rank_load_MR"] for w in document["windows"]])
    assert np.allclose(np.array(before["z"]).T, load_MR / load_MR.mean(axis=1, keepdims=True), rtol=1e-3)
    assert np.abs(np.array(after["z"]) - 1).max() < np.abs(np.array(before["z"]) - 1).max()
    low, high = (chart(page, "rank-heat-map").layout["coloraxis"][end] for end in ("cmin", "cmax"))
    assert (low + high) / 2 == pytest.approx(1)
    load_LE = np.array(document["windows"][1]["load_LE"])
    (experts,) = chart(page, "expert-heat-map").traces
    assert np.allclose(experts["z"], load_LE / load_LE.mean(axis=1, keepdims=True), rtol=1e-3)


def test_traffic_memory_and_ranks_are_those_of_the_shown_window_and_group(document, page):
    before, after = chart(page, "traffic").traces
    for trace, name in ((before, "static"), (after, "equipoise")):
        assert np.allclose(np.array(trace["z"]) * 2**20, of(document, name)["windows"][1]["byte_RR"], rtol=1e-3)
    held = {row[2]: row[3] for row in chart(page, "memory").data.rows if row[:2] == ("after", 3)}
    memory = of(document, "equipoise")["memory"]
    assert held["received rows"] == memory["received_bytes_X"][3]
    assert held["replica slots"] == memory["replicas_bytes"]
    assert "limit 80 GiB" in str(chart(page, "memory").layout["annotations"])
    waits = next(t for t in chart(page, "rank-seconds").traces if t["name"] == "waiting")
    assert waits["y"][2] == pytest.approx(sum(w["ranks"]["wait"][0][2] for w in of(document, "static")["windows"]))


def test_the_timeline_has_every_event_of_both_policies(document, page):
    rows = chart(page, "timeline").data.rows
    wanted = [(n, *e.values()) for n in ("static", "equipoise") for e in of(document, n)["timeline"]]
    assert list(rows) == wanted
    assert sum(len(trace["x"]) for trace in chart(page, "timeline").traces) == len(wanted)
    assert chart(page, "timeline").note == ""


def test_the_byte_matrix_is_said_to_be_one_micro_steps(document, page):
    sent = [num_bytes(np.sum(of(document, name)["windows"][1]["byte_RR"])) for name in ("static", "equipoise")]
    assert chart(page, "traffic").caption == (
        f"Micro-step 2 of update, group 0, all layers and exchanges: {sent[0]} before, {sent[1]} after."
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"layers": 12, "drawn": 4}, "First 4 of 12 layers of micro-step 2 of update, group 0: 3.80 ms with static, "),
        ({"layers": 3}, "All 3 layers of micro-step 2 of update, group 0: "),
        ({"layers": 1}, "The only layer of micro-step 2 of update, group 0: "),
        ({"layers": 12, "drawn": 4, "stages": 2}, "First 4 of 12 layers (pipeline stage 0 of 2) of micro-step 2 of"),
        ({"layers": 6, "drawn": 4, "stages": 2}, "First 3 of 6 layers (pipeline stage 0 of 2) of micro-step 2 of"),
    ],
    ids=["some", "all", "one", "some of a stage", "all of a stage"],
)
def test_the_timeline_is_said_to_be_the_layers_that_it_holds(sizes, words):
    page = build_page(simulation(**sizes, sweep=False), title="x")
    assert chart(page, "timeline").caption.startswith(words)


def test_charts_of_pipeline_stages_say_what_a_rank_is():
    page = build_page(simulation(stages=2, layers=4), title="x")
    for name in ("traffic", "rank-heat-map"):
        assert "Rank r stands for rank r of each of the 2 pipeline stages, added up." in chart(page, name).caption
    for name in ("rank-seconds", "memory"):
        assert "Ranks are counted stage by stage, 8 to each of 2 pipeline stages." in chart(page, name).caption
    assert "pipeline" not in " ".join(c.caption for c in build_page(simulation(), title="x").charts)


@pytest.mark.parametrize(
    ("stages", "groups", "machine"),
    [
        (1, 1, "1 node of 8 H100, EP 8"),
        (2, 1, "2 nodes of 8 H100, EP 8, 2 pipeline stages, 16 ranks"),
        (1, 3, "3 nodes of 8 H100, EP 8, 3 EP groups, 24 ranks"),
        (2, 3, "6 nodes of 8 H100, EP 8, 3 EP groups, 2 pipeline stages, 48 ranks"),
    ],
)
def test_the_machine_has_the_ranks_of_all_pipeline_stages_and_groups(stages, groups, machine):
    document = simulation(stages=stages, layers=4).to_dict()
    for window in document["windows"]:
        window["groups"] = groups
    page = build_page(document, title="x")
    assert page.kind == f"Simulation of one step, qwen3-30b-a3b on {machine}"
    assert ("in 2 pipeline stages of 8 ranks each" in page.conditions[0]) is (stages == 2)
    document["cluster"]["nodes"] = 20
    assert "on 20 nodes of 8 H100" in build_page(document, title="x").kind, "a cluster that is larger is named whole"


def test_the_memory_caption_names_the_setting_of_activations(document):
    for activations, words in (("kept", "those of all its layers"), ("recomputed", "one layer's at a time")):
        asked = {**document, "setting": {**document["setting"], "activations": activations}}
        caption = chart(build_page(asked, title="x"), "memory").caption
        assert f"Activations of experts are {activations}" in caption and words in caption


def test_sweep_and_break_even_name_where_it_pays(page):
    assert [t["name"] for t in chart(page, "sweep").traces] == ["slots 0", "slots 1", "slots 2"]
    assert "At most 26.0 %, at EP 32 with 2 slots" in chart(page, "sweep").caption
    words = chart(page, "break-even").caption
    assert "Skew 1.20: from 4,096 on; skew 2.00: from 1,024 on; skew 1.01: never with those tried." in words
    assert chart(page, "break-even").layout["shapes"][0]["y0"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("names", "answer", "missing"),
    [
        (["static"], "A step takes 1.80 s in expert layers; no plan was simulated.", "Policies"),
        (["equipoise"], "With equipoise a step takes 1.43 s in expert layers.", "Policies"),
        (["balanced"], "With balanced a step takes 1.40 s in expert layers.", "Policies"),
        (
            ["static", "eplb-oracle"],
            "eplb-oracle with 1 replica slot (54.4 MiB per GPU) would recover 7.9 %.",
            "Policies",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_policies_that_were_not_simulated_are_not_spoken_of(names, answer, missing):
    chosen = [p for p in POLICIES if p[0] in names]
    page = build_page(simulation(policies=chosen, sweep=False), title="x")
    assert page.answer.endswith(answer)
    titles = [part.title for part in page.missing]
    assert missing in titles and {"Sweep", "Break-even"} <= set(titles)
    spoken = " ".join(c.caption for c in page.sections)
    assert all(p[0] not in spoken for p in POLICIES if p[0] not in names)
    assert "sweep" not in [c.name for c in page.charts]


def test_without_timeline_the_page_names_the_command_instead_of_an_empty_chart():
    page = build_page(simulation(timed=False), title="x")
    assert "timeline" not in [c.name for c in page.charts]
    (part,) = [part for part in page.missing if part.title == "Timeline"]
    assert part.command.startswith("equipoise simulate")


def test_one_of_a_thing_is_not_said_as_many():
    policies = [("static", 0, 1.5), ("equipoise", 1, 1.02)]
    document = simulation(layers=1, policies=policies, steps={"recompute": 1, "update": 3}).to_dict()
    document["sweep"]["points"] = [p for p in document["sweep"]["points"] if p["slots"] == 1]
    page = build_page(document, title="x")
    said = " ".join([page.kind, page.answer, *page.conditions, *(c.caption for c in page.sections)])
    assert "1 layer of 16 experts" in said and "with 1 slot and" in said
    assert not re.search(r"(?<![\d.,])1 (layers|slots|micro-steps|EP groups|nodes|windows|replica slots)", said)


def test_a_plan_that_saves_next_to_nothing_is_not_worth_it():
    policies = [("static", 0, 1.5), ("equipoise", 1, 1.49), ("balanced", 0, 1.4)]
    assert build_page(simulation(policies=policies), title="x").answer.endswith("which is not worth it here.")


def with_parts(document, **seconds):
    """The document with other seconds of compute and all-to-all across, by policy."""
    changed = json.loads(json.dumps(document))
    for policy in changed["policies"]:
        compute, sent = seconds.get(policy["policy"], (9.0, 9.0))
        policy["seconds"] |= {"compute": compute, "all_to_all_across": sent, "all_to_all_inside": 0.0}
        policy["expert_s"] = compute + sent
    return changed


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        ((2.0, 7.0), "equipoise takes less time than balanced because its all-to-all takes less "),
        ((1.0, 8.5), "equipoise takes less time than balanced because its experts take less "),
        ((1.0, 7.0), "equipoise takes less time than balanced because its all-to-all takes and its experts take less "),
    ],
    ids=["sends less", "computes less", "both"],
)
def test_the_reason_beside_more_than_is_lost_is_the_part_that_takes_less(document, ours, reason):
    page = build_page(with_parts(document, static=(4.0, 8.0), equipoise=ours, balanced=(2.0, 8.0)), title="x")
    assert "would recover that and more" in page.answer
    assert page.conditions[-1].startswith(reason)


def test_where_balanced_takes_longer_nothing_is_lost(document):
    page = build_page(with_parts(document, static=(4.0, 6.0), equipoise=(4.0, 6.0), balanced=(6.0, 6.0)), title="x")
    assert page.answer.startswith("Balanced ranks would not be faster here; a plan with 1 replica slot")
    assert page.answer.endswith("would save 0 %, which is not worth it here.")
    lost = page.figures[0]
    assert (lost.label, lost.value, lost.words) == ("Lost", "0 %", "balanced takes 12.0 s, static 10.0 s per step")


def test_no_share_is_said_to_be_of_a_ceiling(page):
    assert "% of balanced's speed" in chart(page, "cost-parts").caption
    assert "ceiling" not in " ".join([c.caption for c in page.sections] + [m.words for m in page.missing])
