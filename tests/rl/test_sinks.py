"""Where metrics go: lines that survive a kill, trackers that never stop training."""

import json
import sys
from types import SimpleNamespace

import pytest

from equipoise.core import TrainingError
from equipoise.rl.config import TrackConfig
from equipoise.rl.metrics import JsonLines, Sinks, numbers, read_lines


def test_lines_after_the_checkpoint_are_dropped_when_a_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first, written in ((0, (0, 1, 2)), (1, (1,))):
        sink = JsonLines(path, first_step=first)
        for step in written:
            sink.write({"step": step, "first": first})
        sink.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0, "first": 0},
        {"step": 1, "first": 1},
    ]


def test_tensorboard_gets_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = Sinks(tmp_path, TrackConfig(tensorboard=True), first_step=0, settings={})
    sinks.write({"step": 4, "reward": 0.5, "skew_after": None, "bytes": {"shm": 7}})
    sinks.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"reward", "bytes.shm"}
    assert [(e.step, e.value) for e in found.Scalars("reward")] == [(4, 0.5)]


def test_a_line_that_was_cut_short_is_as_if_not_written(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "rew')
    assert [line["step"] for line in read_lines(path)] == [0, 1]
    assert "the last line was cut short" in caplog.text
    sink = JsonLines(path, first_step=2)
    sink.write({"step": 2})
    sink.close()
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    assert read_lines(tmp_path / "absent") == []


def test_wandb_gets_the_settings_and_every_number(tmp_path, monkeypatch):
    told = []
    run = SimpleNamespace(log=lambda *given, **named: told.append((given, named)), finish=lambda: told.append("finish"))
    wandb = SimpleNamespace(init=lambda **named: told.append(named) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sinks = Sinks(tmp_path, TrackConfig(wandb_project="p"), first_step=0, settings={"seed": 3})
    sinks.write({"step": 4, "reward": 0.5, "skew_after": None, "bytes": {"shm": 7}})
    sinks.close()
    first, second, last = told
    assert first == {"project": "p", "config": {"seed": 3}} and last == "finish"
    assert second == (({"reward": 0.5, "bytes.shm": 7},), {"step": 4})


def test_wandb_that_is_not_installed_is_told_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrainingError, match=r"wandb is not installed; run: pip install 'equipoise\[wandb\]'"):
        Sinks(tmp_path, TrackConfig(wandb_project="p"), first_step=0, settings={})


def test_a_sink_that_fails_later_does_not_stop_training(tmp_path, caplog):
    class Broken:
        def write(self, metrics):
            raise ConnectionError("gone")

        def close(self):
            raise AssertionError("it was dropped")

    sinks = Sinks(tmp_path, TrackConfig(), first_step=0, settings={})
    sinks._sinks.insert(0, Broken())
    sinks.write({"step": 0})
    sinks.write({"step": 1})
    sinks.close()
    assert "no longer written to Broken" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_numbers_are_flat_and_without_what_is_unknown():
    given = {"step": 1, "a": 2, "b": None, "bytes": {"p2p": 3}, "stage_s": {"sync": 0.5}}
    assert numbers(given) == {"a": 2, "bytes.p2p": 3, "stage_s.sync": 0.5}
