"""`equipoise train` as a user meets it: a whole run, a comparison, a resumed run, words for what is wrong."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from equipoise.cli.train import COLUMNS, RunView, summary_lines
from equipoise.rl.checkpoint import hold
from equipoise.rl.compare import build_comparison
from equipoise.rl.metrics import RunEvent
from tests.rl.test_compare import leg

# Few steps of a small model: what is tested is the way from the command line to the results.
SMALL = [
    "--set=steps=2",
    "--set=warmup.steps=20",
    "--set=rollout.prompts=4",
    "--set=rollout.samples=4",
    "--set=update.micro_batch=4",
    "--set=task.reward=tests.rl.work:share_of_digits",
]


def test_a_run_says_what_was_learnt_and_where_it_is_and_resumes(equipoise, quick_ranks, tmp_path):
    out, routes = tmp_path / "run", tmp_path / "routes"
    shown = equipoise("train", *SMALL, "--set=balance.mode=static", "-o", out, "--record", routes)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert "2 MoE layers of 16 experts, top-4; 2 ranks on 1 node, experts: static" in shown.out
    assert lines[-1] == f"page: make it with: equipoise report {out} -o {out}/report.html"
    assert lines[-3] == f"results: {out} (metrics.jsonl, config.toml, summary.json, checkpoints)"
    assert "reward" in lines[-6] and "in the first quarter of steps" in lines[-6]
    assert "skew" in lines[-5] and "before" in lines[-5] and "after" in lines[-5]
    assert lines[-2].endswith(f"equipoise doctor {routes} --model {routes}/model/config.json")
    assert equipoise("doctor", routes, "--model", routes / "model" / "config.json").code == 0
    more = equipoise("train", "--resume", out, "--set=steps=3", "--json")
    assert more.code == 0, more.err
    assert more.document["steps"] == 3
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(("loss", "code"), [(0.5, 0), (0.6, 1)], ids=["they agree", "they differ"])
def test_a_comparison_ends_with_its_verdict_and_exit_code(equipoise, monkeypatch, tmp_path, loss, code):
    legs = [replace(one, seconds=(2.0,), tokens=(10,)) for one in (leg("off"), leg("equipoise", loss=loss))]
    facts = {"model": "m", "parameters": 1, "layers": 1, "experts": 2, "top_k": 1, "ranks": 2, "device": "cpu"}
    comparison = replace(build_comparison(legs, is_free=False, limit=1e-5), facts=facts)
    monkeypatch.setattr("equipoise.rl.train.launch", lambda *arguments, show: comparison)
    shown = equipoise("train", "--compare", "off,equipoise", "--ranks", 2)
    assert shown.code == code
    assert shown.out.splitlines()[-1] == ("TRAINING DIFFERS" if code else "training is unchanged")
    folder = tmp_path / "compared"
    assert equipoise("train", "--compare", "off,equipoise", "--json", "-o", folder).document["is_good"] is not bool(
        code
    )
    assert json.loads((folder / "comparison.json").read_text())["legs"][0]["name"] == "off"
    page = tmp_path / "page.html"
    shown = equipoise("train", "--compare", "off,equipoise", "--report", page)
    assert shown.out.splitlines()[-1] == f"page: {page}"
    assert (
        f"was not faster than off: 2.00 s per step instead of 2.00 s (median); {comparison.verdict}" in page.read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "stepz=2"], "unknown setting stepz; did you mean steps?"),
        (["--preset", "huge"], "no preset and no file 'huge'; presets: node-gpu, qwen3-30b-a3b-64gpu, small-gpu, tiny"),
        (["--ranks", "two"], "setting ranks is 'two'; expected `int`, got `str`"),
        (["--model", "2026-11-15", "-o", "new"], "no HF checkpoint at 2026-11-15: it has no config.json"),
        (["--report", "deep/page.html"], "deep/page.html cannot be written: there is no folder deep"),
        (["--compare", "off,magic"], "--compare 'off,magic': give two or three different ones"),
        (["--compare", "off,static", "--record", "r"], "--record r is of one run, --compare trains several"),
        (["--compare", "off,static", "--reward", "absent:f"], "reward 'absent:f' cannot be imported"),
        (["--resume", "absent"], "--resume absent: there is no such folder; give the folder that the run wrote to"),
        (["--resume", "absent", "-o", "other"], "--out other is the resumed run's own; leave out --out or --resume"),
        (["--resume", "absent", "--preset", "tiny"], "--preset tiny is the resumed run's own"),
        (["--reward", "absent:f", "-o", "new"], "reward 'absent:f' cannot be imported as module:function"),
        (["--set", "task.data=absent.jsonl", "-o", "new"], "setting task.data is 'absent.jsonl', which cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2_and_nothing_is_made(
    equipoise, arguments, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shown = equipoise("train", *arguments)
    assert shown.code == 2 and words in shown.err and shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_interrupted_at_once_can_be_resumed(equipoise, tmp_path, monkeypatch):
    out, resumed = tmp_path / "run", []

    def interrupt(*arguments, show):
        raise KeyboardInterrupt

    monkeypatch.setattr("equipoise.rl.train.launch", interrupt)
    shown = equipoise("train", "--set=seed=7", "-o", out, "--report", out / "page.html")
    assert (
        shown.code == 130
        and shown.out.splitlines()[-1] == f"interrupted; continue with: equipoise train --resume {out}"
    )
    monkeypatch.setattr("equipoise.rl.train.launch", lambda run, config, places, show: resumed.append((config, places)))
    assert equipoise("train", "--resume", out).code == 0
    ((config, places),) = resumed
    assert config.seed == 7 and places.out == out and places.is_resumed


def test_a_folder_in_use_is_left_alone(equipoise, tmp_path):
    (tmp_path / "config.toml").write_text("steps = 3\n")
    with hold(tmp_path):
        for arguments in (["-o", tmp_path], ["--resume", tmp_path]):
            shown = equipoise("train", *arguments)
            assert shown.code == 2 and f"{tmp_path} is in use by a run that has not ended" in shown.err
    assert (tmp_path / "config.toml").read_text() == "steps = 3\n"


def test_a_folder_that_holds_something_else_is_left_alone(equipoise, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    shown = equipoise("train", "-o", tmp_path)
    assert shown.code == 2 and "holds something that is no training run" in shown.err
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_cluster_preset_prints_its_forecast_and_refuses_to_start(equipoise, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    few = ["--set=rollout.max_new_tokens=64", "--set=update.mini_batches=32", "--set=update.micro_batch=1"]
    shown = equipoise("train", "--preset", "qwen3-30b-a3b-64gpu", "--set=ranks=64", *few)
    assert shown.code == 2
    assert "forecast for 64 ranks, 30.4 B parameters" in shown.out and "memory per rank" in shown.out
    assert "64 ranks on GPUs were asked for; this machine holds" in shown.err


METRICS = {
    "step": 1,
    "reward": 0.5,
    "right_share": 0.25,
    "loss": 0.1,
    "grad_norm": 1.0,
    "kl": 0.01,
    "skew_before": 1.5,
    "skew_after": 1.0,
    "tokens_per_s": 10.0,
    "planning_s": 0.002,
    "waited_s": 0.001,
}


def seen(*events):
    console = Console(width=120, record=True, file=open("/dev/null", "w"), highlight=False, markup=False)  # noqa: PTH123, SIM115
    view = RunView(console, as_json=False, live=None)
    for event in events:
        view.show(event)
    return console.export_text()


def test_plain_lines_of_a_long_run_are_few_and_end_with_its_last_step():
    facts = {
        "model": "m",
        "parameters": 1,
        "layers": 1,
        "experts": 2,
        "top_k": 1,
        "ranks": 1,
        "nodes": 1,
        "mode": "off",
    }
    steps = (RunEvent("metrics", {**METRICS, "step": step}) for step in range(100))
    rows = seen(RunEvent("start", {**facts, "steps": 100}), *steps).splitlines()[2:]
    assert [int(row.split()[0]) for row in rows] == [*range(0, 100, 10), 99]


def test_plain_lines_show_progress_and_every_step():
    text = seen(
        RunEvent("progress", {"message": "warm-up", "done": 50, "total": 150, "loss": 1.0}),
        RunEvent("progress", {"message": "warm-up", "done": 51, "total": 150, "loss": 1.0}),
        RunEvent("progress", {"message": "compiling planner kernels, once per machine", "done": 10, "total": 0}),
        RunEvent("stage", {"step": 1, "name": "rollout", "rank": 0}),
        RunEvent("metrics", METRICS),
        RunEvent("metrics", {**METRICS, "step": 2, "skew_after": None}),
    )
    assert "warm-up: 50 of 150, loss 1.000" in text and "51 of" not in text
    assert "compiling planner kernels, once per machine: 10 s" in text
    rows = [line.split() for line in text.splitlines() if line.split()[0] in "12"]
    assert [row[0] for row in rows] == ["1", "2"] and rows[0][6:8] == ["1.500", "1.000"] and rows[1][7] == "-"


def test_the_live_table_is_whole_in_a_narrow_terminal():
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    view = RunView(console, as_json=False, live=None)
    large = {"step": 9999, "right_share": 1.0, "loss": -0.1234, "grad_norm": 12.345, "tokens_per_s": 123456.0}
    view.show(RunEvent("metrics", METRICS | large | {"planning_s": 1.234, "waited_s": 1.234}))
    console.print(view._table())
    header, row = console.file.getvalue().splitlines()[-2:]
    assert header.split() == " ".join(COLUMNS).split()
    assert " ".join(row.split()) == "9999 0.500 100.0% -0.1234 12.345 0.0100 1.500 1.000 123456 1234 1234"


def test_in_a_terminal_of_50_columns_metrics_are_rows_and_nothing_folds():
    console = Console(width=50, file=io.StringIO(), force_terminal=False)
    view = RunView(console, as_json=False, live=None)
    for step in range(9):
        view.show(RunEvent("metrics", METRICS | {"step": 1000 + step, "tokens_per_s": 123456.0}))
    console.print(view._table())
    lines = console.file.getvalue().splitlines()[-len(COLUMNS) :]
    assert [line.split()[0] for line in lines] == [name.split()[0] for name in COLUMNS]
    assert lines[0].split()[1:] == ["1004", "1005", "1006", "1007", "1008"] and max(map(len, lines)) <= 50


def test_the_summary_of_a_run_without_expert_parallelism_says_so():
    summary = json.loads(
        '{"reward_first_quarter": 0.1, "reward_last_quarter": 0.2, "right_first_quarter": 0.1, '
        '"right_last_quarter": 0.2, "skew_before": 1.2, "skew_after": null, "coverage": 1.0, "replayed_rows": 5, '
        '"checked_windows": 0, "out": "o", "record": null}'
    )
    assert "every rank has all experts" in summary_lines(summary)[1]
