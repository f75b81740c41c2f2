"""The page of a simulation says what its document says, and speaks of nothing that was not simulated."""

import json
import re

import numpy as np
import pytest

from equipoise.cli.simulate import NO_CURVES, STOPPED
from equipoise.report import build_page
from equipoise.report.page import num_bytes, percent, ratio
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
    assert figures["Saved by a plan"].text == f"expert layers {ours['speedup']:.2f} times as fast"
    before = np.mean(np.concatenate([w["before"]["skew_M"] for w in document["windows"]]))
    after = np.mean(np.concatenate([w["after"]["skew_M"] for w in ours["windows"]]))
    assert figures["Mean skew"].value == f"{ratio(before)} to {ratio(after)}"


def test_conditions_say_that_it_is_predicted_and_for_what(page):
    words = " ".join(page.conditions)
    sizes = "2 windows, 10 micro-steps in all, with 8,192 tokens per rank in each"
    for part in ("Predicted, not measured", sizes, "top-4", "derived"):
        assert part in words
    assert page.notes == ("Compute and all-to-all do not overlap.", "Links are priced by their published rate.")


def test_every_chart_of_the_first_screen_and_below_is_there(page):
    names = [section.name for section in page.sections]
    assert names == [
        "skew-over-micro-steps",
        "cost-parts",
        "rank-heat-map",
        "timeline",
        "memory",
        "layer-heat-map",
        "traffic",
        "expert-heat-map",
        "rank-seconds",
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
    assert marks["xaxis"]["dtick"] == 1, "no halves of a micro-step"
    assert [a["text"] for a in marks["annotations"]] == ["log-prob", "update"]
    assert [s["x0"] for s in marks["shapes"]] == [STEPS["recompute"] - 0.5]


def test_cost_parts_are_the_documents_seconds(document, page):
    drawn = {
        trace["name"]: dict(zip(trace["y"], trace["x"], strict=True)) for trace in chart(page, "cost-parts").traces
    }
    for policy in document["policies"]:
        bar = policy["policy"]
        assert drawn["compute"][bar] == pytest.approx(policy["seconds"]["compute"])
        assert drawn["all-to-all inside"][bar] == pytest.approx(policy["seconds"]["all_to_all_inside"])
        assert sum(part[bar] for part in drawn.values()) == pytest.approx(policy["step_s"])
    focus, whole = chart(page, "cost-parts").views
    for view, speed in ((focus, "speedup"), (whole, "step_speedup")):
        assert view.layout["yaxis.ticktext"] == [f"{p['policy']}  {p[speed]:.2f} x" for p in document["policies"]]
    assert chart(page, "cost-parts").layout["yaxis"]["ticktext"] == focus.layout["yaxis.ticktext"]
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
    assert "shapes" not in chart(page, "memory").layout, "80 GiB over bars of 11 GiB are out of sight"
    assert "GiB after, of 80.0 GiB." in chart(page, "memory").caption
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
        assert "Rank r is rank r of each of the 2 pipeline stages, added up." in chart(page, name).caption
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
    links = ("network_bytes_per_s", "nvlink_bytes_per_s")
    document["cluster"] = {name: value for name, value in document["cluster"].items() if name not in links}
    for window in document["windows"]:
        window["groups"] = groups
    page = build_page(document, title="x")
    assert page.kind == f"Simulation of one step, qwen3-30b-a3b on {machine}"
    assert ("in 2 pipeline stages of 8 ranks each" in page.conditions[0]) is (stages == 2)
    document["cluster"]["nodes"] = 20
    assert "on 20 nodes of 8 H100" in build_page(document, title="x").kind, "a cluster that is larger is named whole"


@pytest.mark.parametrize(
    ("links", "words"),
    [
        (
            {"network_bytes_per_s": 50 * 10**9, "nvlink_bytes_per_s": 450 * 10**9},
            "400 Gb/s network and 450 GB/s NVLink",
        ),
        (
            {"network_bytes_per_s": 3125 * 10**6, "nvlink_bytes_per_s": 18 * 10**11},
            "25 Gb/s network and 1,800 GB/s NVLink",
        ),
        ({"network_bytes_per_s": 50 * 10**9}, None),
        ({"nvlink_bytes_per_s": 450 * 10**9}, None),
        ({}, None),
    ],
    ids=["both", "other rates", "network alone", "nvlink alone", "neither"],
)
def test_links_of_a_rank_are_named_where_both_are_known(document, links, words):
    both = ("network_bytes_per_s", "nvlink_bytes_per_s")
    cluster = {name: value for name, value in document["cluster"].items() if name not in both}
    kind = build_page({**document, "cluster": cluster | links}, title="x").kind
    assert kind.endswith(", EP 8" if words is None else f", EP 8, {words} per rank")


def test_the_memory_caption_names_the_setting_of_activations(document):
    for activations, words in (("kept", "those of all its layers"), ("recomputed", "one layer's at a time")):
        asked = {**document, "setting": {**document["setting"], "activations": activations}}
        caption = chart(build_page(asked, title="x"), "memory").caption
        assert f"Activations of experts are {activations}" in caption and words in caption


def test_sweep_and_break_even_name_where_it_pays(page):
    assert [t["name"] for t in chart(page, "sweep").traces] == ["slots 0", "slots 1", "slots 2"]
    assert "At most 26.0 %, at EP 32 with 2 slots" in chart(page, "sweep").caption
    words = chart(page, "break-even").caption
    assert "Skew 1.20: from 4,096 on; skew 2.00: from 1,024 on; skew 1.01: never with the numbers tried." in words
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


def slowed(document, name="equipoise", *, planning):
    """The document with one policy that takes so many seconds of planning more."""
    changed = json.loads(json.dumps(document))
    static, policy = of(changed, "static"), of(changed, name)
    policy["seconds"]["planning"] = planning
    exposed_s = policy["exposed_share"] * policy["expert_s"] + planning
    for field in ("expert_s", "step_s", "training_s"):
        policy[field] += planning
    policy["exposed_share"] = exposed_s / policy["expert_s"]
    policy["speedup"] = static["expert_s"] / policy["expert_s"]
    return changed


def test_a_plan_that_takes_longer_is_never_said_to_recover(document):
    slow = slowed(document, planning=1.0)
    static, ours = of(slow, "static"), of(slow, "equipoise")
    more, longer = (percent(ours[name] / static[name] - 1) for name in ("expert_s", "step_s"))
    page = build_page(slow, title="x")
    assert page.answer.endswith(f"would take {more} more time, which is not worth it here.")
    figures = {figure.label: figure for figure in page.figures}
    assert figures["Slower by"].value == more
    assert figures["Whole step longer by"].value == longer
    assert figures["Whole step longer by"].text == f"{percent(static['expert_share'])} of training is experts"
    assert not {"Saved by a plan", "Whole step"} & set(figures)
    assert not [text for f in page.figures for text in (f.value, f.text) if "-" in text or "as fast" in text]


def test_without_balanced_a_plan_that_takes_longer_is_called_so_too(document):
    slow = slowed(document, planning=1.0)
    slow["policies"] = [p for p in slow["policies"] if p["policy"] in ("static", "equipoise")]
    for policy in slow["policies"]:
        policy["of_balanced"] = None
    assert re.search(
        r"would take [\d.]+ % more time, which is not worth it here\.$", build_page(slow, title="x").answer
    )


def test_planning_is_charged_apart_from_moving(document, page):
    moving = sum(of(document, "equipoise")["seconds"][name] for name in ("pull", "return", "publish", "collect"))
    whole = of(document, "equipoise")["expert_s"]
    figures = {figure.label: figure for figure in page.figures}
    assert figures["Cost of moving"].value == percent(moving / whole)
    slow = build_page(slowed(document, planning=1.0), title="x")
    figures = {figure.label: figure for figure in slow.figures}
    assert figures["Planning and moving"].value == percent((1 + moving) / (1 + whole))
    assert figures["Planning and moving"].text == (
        f"planning {percent(1 / (1 + whole))}, moving {percent(moving / (1 + whole))}"
    )
    assert "Cost of moving" not in figures
    assert "transfers and planning that nothing hides" in chart(slow, "rank-seconds").caption
    assert "planning" not in chart(page, "rank-seconds").caption


def test_the_fastest_plan_is_named_beside_balanced_which_is_none(page):
    assert chart(page, "cost-parts").caption.startswith(
        "The fastest plan is equipoise with 1.43 s in expert layers, 1.26 times static's speed and 97.6 % of "
        "balanced's speed; with equally many rows on every rank (balanced) they would take 1.40 s. "
    )


def test_where_every_plan_is_slower_than_static_none_is_called_the_fastest(document):
    slow = slowed(slowed(document, planning=1.0), "eplb-oracle", planning=3.0)
    caption = chart(build_page(slow, title="x"), "cost-parts").caption
    assert caption.startswith(
        "No plan is faster than static, which takes 1.80 s in expert layers: the fastest one, equipoise, takes 2.43 s"
    )
    assert "times static's speed" not in caption


def test_a_sweep_that_saves_nowhere_says_so(document):
    slow = json.loads(json.dumps(document))
    for place, point in enumerate(slow["sweep"]["points"]):
        point["saved_share"] = -0.03 * (1 + place)
    caption = chart(build_page(slow, title="x"), "sweep").caption
    assert (
        caption == "A plan takes more time everywhere, 3.0 % at least, at EP 8 with 0 slots and 8,192 tokens per rank."
    )


@pytest.mark.parametrize(
    ("note", "sweep", "break_even"),
    [
        (None, "Not asked for:", "Not asked for:"),
        (NO_CURVES, "Not asked for:", NO_CURVES),
        (STOPPED.format("Break-even"), "Not asked for:", STOPPED.format("Break-even")),
    ],
    ids=["not asked for", "no rows", "interrupted"],
)
def test_what_was_left_out_is_missing_for_the_reason_in_the_notes(document, note, sweep, break_even):
    notes = [*document["notes"], *([] if note is None else [note])]
    missing = {m.title: m for m in build_page({**document, "sweep": None, "notes": notes}, title="x").missing}
    assert (missing["Sweep"].text, missing["Break-even"].text) == (sweep, break_even)
    assert missing["Sweep"].command.endswith("--sweep ep=8,16 slots=0,1,2")
    # It was asked for where a note says why it is not there.
    assert missing["Break-even"].command.endswith("" if note else "--break-even")
    assert bool(missing["Break-even"].command) is (note is None)


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
    assert "would recover that and save" in page.answer
    assert page.conditions[-1].startswith(reason)


def test_where_balanced_takes_longer_nothing_is_lost(document):
    page = build_page(with_parts(document, static=(4.0, 6.0), equipoise=(4.0, 6.0), balanced=(6.0, 6.0)), title="x")
    assert page.answer.startswith("Balanced ranks would not be faster here; a plan with 1 replica slot")
    assert page.answer.endswith("would save 0 %, which is not worth it here.")
    lost = page.figures[0]
    assert (lost.label, lost.value, lost.text) == ("Lost", "0 %", "balanced takes 12.0 s, static 10.0 s per step")


def test_no_share_is_said_to_be_of_a_ceiling(page):
    assert "% of balanced's speed" in chart(page, "cost-parts").caption
    assert "ceiling" not in " ".join([c.caption for c in page.sections] + [m.text for m in page.missing])
