"""The plain text says what the document says, in as many columns as there are."""

from dataclasses import replace

import numpy as np
import pytest

from equipoise.core import LoadMatrix
from equipoise.sim import StepSetting, simulate
from equipoise.sim.result import BreakEvenCurve, Sweep, SweepPoint
from equipoise.sim.step import DEMO_POLICIES, demo_step
from equipoise.sim.summary import WIDEST, Unit, plural, summary, table
from tests.sim.steps import MODEL, cluster_of, skewed_loads

POINT = SweepPoint(
    ep=8, slots=1, micro=2, tokens=4096, skew=1.5, seconds={"static": 2.0, "equipoise": 1.5, "balanced": 1.2}
)
CURVE = BreakEvenCurve(skew=1.5, points=((1024, 0.001), (2048, 0.02)), worth=0.01)


def test_figures_are_those_of_the_document():
    found = simulate(skewed_loads(), ["static", "equipoise", "balanced"], cluster=cluster_of(), model=MODEL)
    found = replace(found, sweep=Sweep(axes={"ep": (8,)}, points=(POINT,), curves=(CURVE,)))
    text, document = summary(found, title="a step"), found.to_dict()
    for entry in document["policies"]:
        line = next(x for x in text.splitlines() if x.startswith(f"  {entry['policy']} "))
        assert f"{entry['expert_s'] * 1e3:.2f}" in line
        assert f"{entry['of_balanced']:.1%}" in line
        assert f"{entry['speedup']:.2f}x" in line
    words = " ".join(text.split())
    speed = document["policies"][1]["speedup"]
    assert f"expert layers {speed:.2f} times as fast ({1 - 1 / speed:.1%} less time)" in words
    assert "log-prob: " in text or "update: " in text
    assert all(f"- {note}" in words for note in document["notes"])
    assert "2,048" in next(x for x in text.splitlines() if x.startswith("  1.50"))
    assert "25.0%" in text
    tables = [x for x in text.splitlines() if x.startswith("  ")]
    assert max(map(len, tables)) <= 100


def test_the_parts_that_are_shown_of_a_policy_add_up_to_its_step_in_100_columns():
    setting = StepSetting(pipeline_stages=2, rollout_s=120.0, other_s=2.5, planning_s=121.0)
    given = {"cluster": cluster_of(), "model": MODEL, "setting": setting}
    found = simulate(skewed_loads(), ["static", "eplb-oracle", "equipoise", "reactive"], **given)
    text = summary(found, title="a step")
    parts = text[text.index("Parts, s") : text.index("\n\n", text.index("Parts, s"))].splitlines()[1:]
    assert max(map(len, parts)) <= WIDEST
    heads = [line for line in parts if line.startswith("  policy")]
    assert "rollout" in heads[-1]
    assert "other" in heads[-1]
    for entry in found.to_dict()["policies"]:
        own = [line.split() for line in parts if line.startswith(f"  {entry['policy']} ")]
        assert len(own) == len(heads) == 2
        figures = [float(cell) for _, *cells in own for cell in cells]
        assert sum(figures) == pytest.approx(entry["step_s"], abs=0.0005 * len(figures))


@pytest.mark.parametrize("width", [80, 50])
def test_a_narrow_terminal_gets_the_same_numbers_on_more_lines(width):
    found = simulate(skewed_loads(), ["static", "equipoise", "reactive"], cluster=cluster_of(), model=MODEL)
    wide, text = (summary(found, title="a step", width=columns) for columns in (300, width))
    assert max(map(len, text.splitlines())) <= width < max(map(len, wide.splitlines()))
    for policy in ("static", "equipoise", "reactive"):
        cells = [
            [cell for line in shown.splitlines() if line.startswith(f"  {policy} ") for cell in line.split()[1:]]
            for shown in (wide, text)
        ]
        assert cells[0] == cells[1] and len(cells[0]) > 9


def test_one_is_not_many():
    loads = LoadMatrix(np.ones((1, 1, 1, 1), dtype=np.int64))
    model = MODEL.replace(experts=1, top_k=1, layers=1)
    found = simulate(loads, ["static", "equipoise"], cluster=cluster_of(1), model=model)
    first = summary(found, title="a step", width=300).splitlines()[:5]
    assert f"{model.name}, 1 MoE layer of 1 expert, top-1" in first[0]
    assert first[1].startswith("1 rank in nodes of 4")
    assert "update: 1 micro-step, 1 token per rank and micro-step" in first[2]
    assert "Equipoise, 1 slot (" in first[4]
    assert [plural(number, "slot") for number in (0, 1, 2, 4096)] == ["0 slots", "1 slot", "2 slots", "4,096 slots"]


def test_a_plan_that_takes_longer_is_said_to():
    setting = StepSetting(planning_s=5.0)
    found = simulate(skewed_loads(), ["static", "equipoise"], cluster=cluster_of(), model=MODEL, setting=setting)
    text = summary(found, title="a step", width=300)
    assert "% more time), the whole step" in text
    assert "Not worth it here." in text
    assert "-" not in text[text.index("Equipoise,") : text.index("Not worth")]


def test_all_ranks_of_the_step_are_counted():
    loads = skewed_loads(ranks=16)
    found = simulate(loads, "static", cluster=cluster_of(), model=MODEL, setting=StepSetting(pipeline_stages=2))
    text = summary(found, title="a step")
    assert "32 ranks (EP 8 x 2 pipeline stages x 2 EP groups) in nodes of 4" in text
    assert f"(EP group {found.shown.group} of 0 to 1)" in text


def test_nothing_is_promised_where_nothing_was_compared():
    found = simulate(skewed_loads(), "static", cluster=cluster_of(), model=MODEL)
    text = summary(found, title="a step")
    assert "less time" not in text
    assert " - " in text


def test_a_plan_that_saves_next_to_nothing_is_not_worth_it():
    level = LoadMatrix(np.full_like(skewed_loads().load_MLRE, 100))
    for loads, is_worth in ((level, False), (skewed_loads(), True)):
        found = simulate(loads, ["static", "equipoise"], cluster=cluster_of(), model=MODEL)
        assert ("Not worth it here." in summary(found, title="a step", width=300)) is not is_worth


def test_a_step_of_less_than_a_second_is_shown_in_milliseconds():
    assert Unit.of([{"step_s": 0.9}, {"step_s": 0.2}]).show(0.0123) == "12.30"
    assert Unit.of([{"step_s": 0.9}, {"step_s": 1.2}]).show(0.0123) == "0.012"


def test_a_table_has_names_to_the_left_and_figures_to_the_right():
    assert table([["name", "s"], ["a", "10.0"]]) == ["  name     s", "  a     10.0"]


def test_the_demo_is_one_step_of_both_stages():
    model, windows = demo_step(layers=2, ranks=8)
    assert [w.stage for w in windows] == ["recompute", "update"]
    assert windows[0].load_MLRE.shape[1:] == (2, 8, model.experts)
    assert {"static", "equipoise", "balanced"} <= set(DEMO_POLICIES)
