"""The page of a training run: its folder read with care, its figures as they were written."""

import json

import pytest

from equipoise.core import EquipoiseError
from equipoise.report import build_page
from tests.report.documents import metrics, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "mine", [metrics(step) for step in range(8)])


def chart(page, name):
    return next(c for c in page.charts if c.name == name)


def test_the_answer_is_what_was_gained(run):
    page = build_page(run)
    assert page.title == "mine"
    assert page.kind == "Training run of 8 steps, olmoe, mode equipoise"
    assert page.answer == (
        "The busiest rank had 1.02 times the mean load, 1.50 without balancing; expert layers are predicted to be 1.33 "
        "times as fast on the described cluster. Measured: 2.00 s per step, 1,500 tokens/s."
    )
    assert "rows arrived exactly as planned in 16 windows" in " ".join(page.conditions)
    values = {f.label: f.value for f in page.figures}
    assert values["Waited"] == "7.5 %"
    assert values["Tokens per second"] == "1,500"
    assert values["Predicted speed-up"] == "1.33 x"
    assert values["Reward"] == "0.05 to 0.65"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"saved_s": -0.1}, "expert layers are predicted to be 25.0 % slower on the described cluster."),
        ({"saved_s": 0.0}, "1.50 without balancing; no time is saved."),
        ({"static_s": 0.0, "saved_s": 0.0}, "times the mean load, 1.50 without balancing. Measured"),
        ({"skew_after": None}, "Every rank had all experts; spread over ranks, the busiest would have 1.50 times"),
    ],
)
def test_no_gain_is_promised_where_there_is_none(tmp_path, changed, words):
    assert words in build_page(write_run(tmp_path / "run", [metrics(0, **changed)])).answer


def test_charts_hold_the_figures_of_every_step(run):
    page = build_page(run)
    assert [c.name for c in page.charts] == [
        "time-over-steps",
        "skew-over-steps",
        "predicted-seconds",
        "reward",
        "bytes-over-steps",
    ]
    assert chart(page, "reward").traces[0]["y"] == pytest.approx([0.1 * step for step in range(8)])
    totals = [sum(row[1:]) for row in chart(page, "time-over-steps").data.rows]
    assert totals == pytest.approx([2.0] * 8)
    peer = next(t for t in chart(page, "bytes-over-steps").traces if t["name"] == "peer")
    assert peer["y"] == pytest.approx([1.0 + step for step in range(8)])
    assert "25.0 % less than without balancing" in chart(page, "predicted-seconds").caption
    assert "not measured on this machine" in chart(page, "predicted-seconds").caption
    assert "at any cost" not in chart(page, "predicted-seconds").caption
    assert chart(page, "bytes-over-steps").caption.endswith("by the path they took: edge, peer.")


def test_a_run_that_levels_rows_whatever_it_costs_says_so(run):
    settings = run / "config.toml"
    settings.write_text(settings.read_text() + 'objective = "skew"\n')
    assert "at any cost (balance.objective = skew)" in chart(build_page(run), "predicted-seconds").caption


def test_a_run_without_expert_parallelism_has_no_skew_after_and_moves_nothing(tmp_path):
    plain = {"skew_after": None, "bytes": {}, "static_s": 0.0, "saved_s": 0.0, "checked_windows": 0}
    page = build_page(write_run(tmp_path / "off", [metrics(step, **plain) for step in range(3)]))
    assert [t["name"] for t in chart(page, "skew-over-steps").traces] == ["before"]
    assert page.answer.startswith("Every rank had all experts")
    assert [c.name for c in page.charts] == ["time-over-steps", "skew-over-steps", "reward"]


def test_a_reward_that_is_the_share_of_right_answers_is_one_line(tmp_path):
    steps = [metrics(step, reward=0.1 * step, right_share=0.1 * step) for step in range(4)]
    drawn = chart(build_page(write_run(tmp_path / "same", steps)), "reward")
    assert [trace["name"] for trace in drawn.traces] == ["reward"]
    assert drawn.caption == "Reward is the share of right answers: 0 % in the first quarter, 30.0 % in the last."


def test_a_path_that_moved_nothing_is_not_spoken_of(tmp_path):
    moved = write_run(tmp_path / "one", [metrics(step, bytes={"peer": 2**20, "store": 0}) for step in range(2)])
    assert chart(build_page(moved), "bytes-over-steps").caption.endswith("by the path they took: peer.")
    still = write_run(tmp_path / "none", [metrics(0, bytes={"peer": 0, "store": 0})])
    assert "bytes-over-steps" not in [c.name for c in build_page(still).charts]


def test_a_run_says_that_its_predicted_seconds_were_not_measured(run, tmp_path):
    parts = {part.title: part for part in build_page(run).missing}
    assert "Not measured: a run times its steps" in parts["Measured seconds of expert layers"].text
    drawn = chart(build_page(run), "predicted-seconds")
    assert "not measured on this machine" in drawn.caption
    # A cut axis would make a small difference look large.
    assert drawn.layout["yaxis"]["rangemode"] == "tozero"
    unplanned = write_run(tmp_path / "off", [metrics(0, static_s=0.0, saved_s=0.0)])
    assert "Measured seconds of expert layers" not in [part.title for part in build_page(unplanned).missing]


def test_one_step_is_enough(tmp_path):
    page = build_page(write_run(tmp_path / "young", [metrics(0)]))
    assert chart(page, "reward").traces[0]["mode"] == "markers"


def test_an_unfinished_last_line_is_left_out_and_a_broken_one_refused(tmp_path):
    live = write_run(tmp_path / "live", [metrics(0), metrics(1)], tail='{"step": 2, "rew')
    assert len(build_page(live).document["steps"]) == 2
    broken = write_run(tmp_path / "broken", [metrics(0)], tail="oops\n" + json.dumps(metrics(1)) + "\n")
    with pytest.raises(EquipoiseError, match=r"metrics\.jsonl, line 2, is not JSON"):
        build_page(broken)


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EquipoiseError, match=r"empty has no metrics\.jsonl"):
        build_page(tmp_path / "empty")
    with pytest.raises(EquipoiseError, match="has no step yet"):
        build_page(write_run(tmp_path / "fresh", []))
    odd = write_run(tmp_path / "odd", [metrics(0)])
    (odd / "config.toml").write_text("ranks = [")
    with pytest.raises(EquipoiseError, match=r"odd/config\.toml is not TOML"):
        build_page(odd)


def test_errors_of_a_rank_replay_can_stand_beside_it(run, tmp_path):
    row = {"shape visited": "no", "layer mean": 3.0, "layer worst": -9.0, "run mean": 1.5, "run worst": 2.5}
    rows = [{"case": name, "stage": stage, **row} for name, stage in (("qwen3", "update"), ("all", "both"))]
    document = {"benchmark": "validate", "replay": {"device": "NVIDIA H200"}, "rows": rows, "limits": []}
    page = build_page(run, measured=document)
    errors = chart(page, "predicted-against-measured")
    assert "off by 1.5 % on average, 2.5 % at worst" in errors.caption
    assert errors.traces[0]["y"] == ["qwen3, update", "all, both"]
    assert "Predicted against measured" not in [part.title for part in page.missing]
    with pytest.raises(EquipoiseError, match="is no validation"):
        build_page(run, measured={"benchmark": "planner"})
