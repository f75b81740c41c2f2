"""Before a run starts: what the settings name is there, or refused with what to do; every preset can be forecast."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from equipoise.core import EquipoiseError, TrainingError
from equipoise.rl.config import ModelConfig, change, preset_names, read_config
from equipoise.rl.model import build_model, family_config
from equipoise.rl.preflight import (
    check_places,
    check_resumed,
    check_settings,
    dense_parameters,
    find_run,
    forecast,
    shape_of,
    too_few,
)
from equipoise.rl.rollout import Sample, to_routes
from equipoise.rl.task import CharTokenizer, open_task
from equipoise.rl.train import prepare
from equipoise.routes import write_routes
from tests.engines.answers import served
from tests.engines.live import LiveEngine
from tests.rl import work

JUDGES = """
def judge(prompt, response, answer):
    return 1.0

def two(prompt, response):
    return 1.0

def broken(prompt, response, answer):
    return answer / 2

def lost(prompt, response, answer):
    return float("nan")

scale = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder of a user's own, with what the cases name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    Path("own_judges.py").write_text(JUDGES)
    Path("broken_judge.py").write_text("def f(:\n")
    Path("broken.jsonl").write_text("{nope\n")
    Path("accents.jsonl").write_text(json.dumps({"prompt": "5\u20ac=", "answer": "1"}, ensure_ascii=False))
    Path("none.jsonl").write_text("\n")
    Path("silent.jsonl").write_text(json.dumps({"prompt": "", "answer": "1"}))
    Path("weightless").mkdir()
    Path("weightless/config.json").write_text("{}")
    Path("dense").mkdir()
    Path("dense/config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 2}')
    Path("dense/model.safetensors").touch()
    few = family_config(ModelConfig(vocabulary=64))
    few.save_pretrained("few_tokens")
    save_file({}, "few_tokens/model.safetensors")
    few.save_pretrained("damaged")
    Path("damaged/model.safetensors").write_bytes(b"12345678")
    Path("foreign").mkdir()
    Path("foreign/config.json").write_text(json.dumps(few.to_dict() | {"model_type": "stranger"}))
    Path("foreign/model.safetensors").touch()
    Path("strange").mkdir()
    for step in range(100):
        Path(f"strange/{step}.jsonl").write_text("nonsense\n")
    Path("rollouts").mkdir()
    Path("rollouts/step-000000.jsonl").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("task.reward=absent:f", "reward 'absent:f' cannot be imported as module:function (ModuleNotFoundError"),
        ("task.reward=own_judges", "reward 'own_judges' is not of the form module:function"),
        ("task.reward=own_judges:none", "has no attribute 'none'"),
        ("task.reward=own_judges:scale", "is a int; give a function of (prompt, response, answer)"),
        ("task.reward=own_judges:two", "takes (prompt, response) (too many positional arguments)"),
        ("task.reward=broken_judge:f", "cannot be imported as module:function (SyntaxError"),
        ("task.reward=own_judges:broken", "fails with TypeError: unsupported operand type(s) for /: 'str' and 'int' ("),
        (
            "task.reward=own_judges:lost",
            "reward 'own_judges:lost' of prompt '17+6=', response '23' is nan; give a finite",
        ),
        ("task.data=absent.jsonl", "setting task.data is 'absent.jsonl', which cannot be read (No such file"),
        ("task.data=broken.jsonl", "broken.jsonl line 1 is not JSON"),
        ("task.data=none.jsonl", "setting task.data is 'none.jsonl', which holds no question"),
        ("task.data=accents.jsonl", "has no token: the embedded tokenizer knows printable ASCII"),
        ("task.data=silent.jsonl", "prompt '' has no token"),
        ("task.domains=['x']", "setting task.domains is ['x']; known: add, sub, reverse, largest"),
        ("model.path=absent", "no HF checkpoint at absent: it has no config.json"),
        ("model.path=weightless", "weightless has no weights (*.safetensors or *.bin)"),
        ("model.path=dense", "model 'dense': config.json has none of the keys"),
        ("model.path=few_tokens", "the model few_tokens has 64 token ids, its tokenizer (the embedded one, an id per"),
        ("model.path=damaged", "damaged/model.safetensors is damaged (Error while deserializing header"),
        ("model.path=foreign", "model_type 'stranger' is not supported; supported: qwen3_moe"),
        ("model.experts=15", "15 experts of 'qwen3-moe' do not divide by 2 ranks"),
        ("rollout.max_new_tokens=5000", "setting rollout.max_new_tokens is 5000; with prompts of"),
        ("rollout.source=absent", "setting rollout.source is 'absent', which is no folder"),
        ("rollout.source=rollouts", "rollouts holds rollouts of 1 steps"),
        ("rollout.source=strange", "strange/0.jsonl: line 1 is not JSON"),
        ("rollout.source=http://127.0.0.1:9", "setting rollout.source is http://127.0.0.1:9, where nothing answers"),
        ("rollout.source=http://[x", "setting rollout.source is http://[x, where nothing answers"),
        ("rollout.source=http://:x", "setting rollout.source is http://:x, where nothing answers"),
        ("balance.cluster=moon", "moon"),
        ("track.wandb_project=p", "setting track.wandb_project is p, but wandb is not installed; run: pip install"),
    ],
)
def test_what_is_not_there_is_refused_by_name(here, setting, words, monkeypatch):
    monkeypatch.setattr("equipoise.rl.preflight.find_spec", lambda name: None)
    before = sorted(here.iterdir())
    with pytest.raises(EquipoiseError) as error:
        check_settings(read_config("tiny", settings=[setting]))
    assert words in str(error.value) and "\n" not in str(error.value)
    assert [path for path in sorted(here.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(EquipoiseError, match=r"setting model.device is cuda, but torch finds no GPU here"):
        check_settings(read_config("tiny", settings=["model.device=cuda"]))


def record(config, *, of_other_questions=False):
    """A folder with made-up rollouts of the first step."""
    asked = open_task(config.task).questions(config.rollout.prompts, seed=config.seed, step=int(of_other_questions))
    tokens = [np.array([*CharTokenizer().encode(question.prompt), CharTokenizer.end]) for question in asked]
    shape = shape_of(config)
    one_TLK = np.broadcast_to(np.arange(shape.top_k), (max(map(len, tokens)), shape.layers, shape.top_k))
    samples = [
        Sample(
            name=f"question {question} sample {number}",
            tokens_T=tokens_T,
            num_prompt=len(tokens_T) - 1,
            ids_TLK=one_TLK[: len(tokens_T) - 1],
            experts=shape.experts,
        )
        for question, tokens_T in enumerate(tokens)
        for number in range(config.rollout.samples)
    ]
    folder = Path(f"recorded {of_other_questions}")
    folder.mkdir()
    write_routes(to_routes(samples, shape), folder / "step-000000.jsonl", format="vllm-http")
    return str(folder)


def test_recorded_rollouts_of_other_questions_or_another_model_are_refused(here):
    config = read_config("tiny", settings=["steps=1"])
    for source, changes, words in (
        (record(config, of_other_questions=True), {}, "does not begin with question '17+6='"),
        (record(config), {"model": {"layers": 3}}, "2 layers on the wire; 'qwen3-moe' has 3"),
        ("recorded False", {"rollout": {"prompts": 128}}, "samples for 128 questions of 8 samples each"),
    ):
        changed = change(config, rollout={"source": source})
        changed = change(changed, **changes)
        with pytest.raises(EquipoiseError) as error:
            check_settings(changed)
        assert str(error.value).startswith(f"{source}/step-000000.jsonl") and words in str(error.value)


def test_what_is_there_passes(here):
    config = read_config("tiny", settings=["task.reward=own_judges:judge", "steps=1"])
    build_model(change(config, model={"layers": 1}).model, seed=0).save_pretrained("whole")
    Path("good.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    engine = LiveEngine(build_model(config.model, seed=0), "vllm 0.32")
    with served(engine.reply) as address:
        for changes in (
            {},
            {"task": {"data": "good.jsonl"}},
            {"model": {"path": "whole"}},
            {"rollout": {"source": address, "weights": "out/weights"}},
            {"rollout": {"source": record(config)}},
        ):
            check_settings(change(config, **changes))
        assert engine.calls == ["/is_paused"], "nothing is changed before a run"
        for weights, words in (("", "vLLM takes no tensors over HTTP"), ("good.jsonl/x", "good.jsonl is a file")):
            with pytest.raises(TrainingError, match=words):
                check_settings(change(config, rollout={"source": address, "weights": weights}))


def old_run(folder):
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "config.toml").write_text("steps = 1\n")
    return folder


def test_a_run_to_go_on_with_is_found_or_the_folder_explained(here):
    run = old_run(here / "run")
    assert find_run(run) == run / "config.toml"
    for folder, words in (
        (here / "absent", "there is no such folder; give the folder that the run wrote to, its --out"),
        (here / "rollouts", "is no run, it holds no config.toml"),
        (here / "own_judges.py", "is no run, it holds no config.toml"),
        (run / "checkpoints" / "step-000001", f"lies inside a run; give the run: --resume {run}"),
    ):
        with pytest.raises(EquipoiseError) as error:
            find_run(folder)
        assert str(error.value).startswith(f"--resume {folder}") and words in str(error.value)


def test_places_that_are_taken_or_cannot_be_written_are_refused(here):
    run = old_run(here / "run")
    check_places(out=run)
    check_places(out=here / "new" / "deep", record=here / "routes")
    check_places(out=run, record=here / "rollouts", is_resumed=True)
    for places, words in (
        ({"out": here / "rollouts"}, "--out {} holds something that is no training run"),
        ({"out": here / "own_judges.py"}, "--out {}: {} is a file; give a folder"),
        ({"out": here / "own_judges.py" / "run"}, "own_judges.py is a file; give a folder"),
        ({"out": run, "record": here / "rollouts"}, "--record {} holds something already"),
        ({"out": run, "record": here / "own_judges.py"}, "--record {}: {} is a file"),
    ):
        named = list(places.values())[-1]
        with pytest.raises(EquipoiseError) as error:
            check_places(**places)
        assert words.format(named, named) in str(error.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("seed=5", "setting seed is 5, the run in run has 0; a resumed run keeps it"),
        ("balance.mode=off", "setting balance.mode is 'off', the run in run has 'equipoise'"),
        ("model.layers=3", "setting model.layers is 3, the run in run has 2"),
        ("model.dtype=bfloat16", "setting model.dtype is 'bfloat16', the run in run has 'float32'"),
        ("update.kl=0.1", "setting update.kl is 0.1, the run in run has 0 and kept no weights to measure it from"),
        ("steps=2", "setting steps is 2, the run in run has trained 3 already; give at least as many"),
    ],
)
def test_what_a_checkpoint_depends_on_cannot_change_when_a_run_goes_on(here, setting, words):
    run = Path("run")
    run.mkdir()
    prepare(read_config("tiny"), run)
    changed = read_config(run / "config.toml", settings=[setting])
    check_resumed(changed, run)  # nothing was trained yet
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    (run / "checkpoints" / "step-000003" / "meta.json").touch()
    with pytest.raises(EquipoiseError) as error:
        check_resumed(changed, run)
    assert words in str(error.value)
    for allowed in (
        *("ranks=4", "ranks=1", "ep=1", "steps=3", "steps=200", "update.learning_rate=0.5", "checkpoint.every=1"),
        "track.tensorboard=true",
    ):
        check_resumed(read_config(run / "config.toml", settings=[allowed]), run)


def test_a_new_run_finds_its_folder_empty_but_for_its_settings(here):
    run, precious = old_run(here / "run"), here / "rollouts"
    (run / "link").symlink_to(precious)
    config = read_config("tiny", settings=["seed=7"])
    prepare(config, run)
    assert [path.name for path in run.iterdir()] == ["config.toml"] and list(precious.iterdir())
    assert read_config(find_run(run)) == config


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_forecast(name):
    config = read_config(name)
    # A window of a few samples is planned as well as the whole one, and faster; whether it pays is another question.
    config = change(
        config,
        rollout={"max_new_tokens": 64},
        update={"mini_batches": config.rank_samples // 2, "micro_batch": 1},
        balance={"objective": "skew"},
    )
    found = forecast(config)
    assert found.ranks == config.ranks
    assert 1.0 <= found.skew_after < found.skew_before
    assert found.total_gib < found.limit_gib
    words = found.lines()
    assert "memory per rank" in words[1] and "host memory" in words[2] and "skew" in words[3]
    assert 0 < found.host_gib < found.rollout_gib, "all experts, and nothing else"


def test_the_published_model_has_the_published_number_of_parameters():
    config = read_config("qwen3-30b-a3b-64gpu")
    shape = shape_of(config)
    total = shape.experts * shape.layers * shape.expert_params + dense_parameters(config, shape)
    assert total == pytest.approx(30.5e9, rel=0.02)


def test_a_random_models_parameters_are_forecast_as_they_are():
    config = work.small()
    shape = shape_of(config)
    total = shape.experts * shape.layers * shape.expert_params + dense_parameters(config, shape)
    real = sum(parameter.numel() for parameter in build_model(config.model, seed=0).parameters())
    assert total == pytest.approx(real, rel=0.02), "norms are left out"


def test_fewer_ranks_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = read_config("qwen3-30b-a3b-64gpu")
    assert "64 ranks on GPUs were asked for; this machine holds" in too_few(config)
    fewer = read_config("qwen3-30b-a3b-64gpu", settings=["ranks=8"])
    assert "setting ranks is 8; these settings need at least 64 (fewest_ranks)" in too_few(fewer)
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    assert "setting ranks is 64, torchrun started 8" in too_few(config)
    assert too_few(read_config("tiny", settings=["ranks=8"])) is None, "as many as torchrun started"


def test_ranks_that_do_not_fit_the_devices_are_refused():
    import torch

    if not torch.cuda.is_available():
        assert "this machine holds 0 (devices: 0, ranks on each: 4)" in too_few(read_config("small-gpu"))
