"""Metrics: documented one by one, put together over ranks as documented, written to sinks that never stop a run."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from equipoise.core import RoutesError, TrainingError
from equipoise.cost import CostModel
from equipoise.rl.config import TrackConfig, build_cluster
from equipoise.rl.metrics import (
    RankFigures,
    Sink,
    Sinks,
    lost_seconds,
    numbers,
    open_lines,
    read_lines,
    skew_after,
    skew_before,
    step_metrics,
)
from equipoise.rl.preflight import shape_of
from equipoise.rl.stages import StageClock, StepTally, check_arrival
from tests.rl import work

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def tally(*, rows, arrived, **values):
    made = StepTally(losses=[1.0, 3.0], sizes=[2.0, 2.0], norms=[1.0, 2.0], **values)
    made.rows["update"] = [np.array(rows)]
    made.arrived["update"] = [] if arrived is None else [np.array(arrived)]
    made.add(ratio=10, clipped=1, kl_old=0.5, kl_reference=0.0, trained=20)
    return made


def figures(made, **values):
    given = dict(rewards=[1.0, 0.0], num_right=1, known_rows=8, rows=10, tokens=50, rollout_kl=0.0)
    given["stage_s"] = {"rollout": 0.5, "update": 1.5}
    return RankFigures(tally=made, **{**given, **values})


def two_ranks():
    # One micro-step, one layer, four experts; owners hold two each.
    first = tally(rows=[[[4, 0, 0, 0]]], arrived=[[5]], given_rows=8, replayed_rows=8, differing_rows=1)
    second = tally(rows=[[[2, 2, 1, 1]]], arrived=[[5]], given_rows=8, replayed_rows=8, differing_rows=3)
    return first, second


def test_figures_of_ranks_are_put_together():
    first, second = two_ranks()
    other = figures(second, rewards=[1.0, 1.0], num_right=2, stage_s={"rollout": 0.75, "update": 1.0})
    found = step_metrics(3, [figures(first), other], ep=2, costs={})
    assert found["step"] == 3 and found["reward"] == 0.75 and found["right_share"] == 0.75
    assert (found["loss"], found["grad_norm"]) == (2.0, 1.5)
    assert (found["ratio"], found["kl"]) == (1.0, 0.05)
    assert found["coverage"] == 0.8 and found["replayed_rows"] == 16 and found["differing_share"] == 0.25
    assert found["stage_s"] == {"rollout": 0.75, "update": 1.5} and found["rollout_s"] == 0.75
    assert found["seconds"] == 2.0 and found["tokens_per_s"] == 50.0


def report(*, planning_s, waited_s):
    """What is said of a window's plan."""
    return SimpleNamespace(planning_s=planning_s, waited_s=waited_s, exposed_s={}, bytes={}, **NOTHING)


NOTHING = dict(static_s=0.0, predicted_s=0.0, displaced=0, replicas=0)


def test_planning_is_told_of_the_rank_that_waited_longest_and_hidden_where_nobody_waited():
    first, second = two_ranks()
    first.reports = [report(planning_s=3.0, waited_s=0.5), report(planning_s=1.0, waited_s=2.0)]
    second.reports = [report(planning_s=9.0, waited_s=0.0)] * 2
    found = step_metrics(0, [figures(first), figures(second)], ep=2, costs={})
    assert (found["planning_s"], found["hidden_s"], found["waited_s"]) == (4.0, 2.5, 2.5)


def test_skew_before_is_at_the_owners_and_after_is_what_arrived():
    tallies = two_ranks()
    assert skew_before(tallies, ep=2) == pytest.approx(8 / 5)
    assert skew_after(tallies, ep=2) == 1.0
    assert skew_after([tally(rows=[[[1, 1]]], arrived=None)], ep=1) is None


def test_seconds_are_lost_where_a_rank_has_more_rows_and_nowhere_else():
    config = work.small()
    shape = shape_of(config)
    cost = CostModel.of(build_cluster(config, shape), shape)
    level, skewed = ([[[9000, 9000, 9000, 9000]]], [[[36000, 0, 0, 0]]])
    assert lost_seconds([tally(rows=level, arrived=None)] * 2, "update", cost) == 0.0
    lost = lost_seconds([tally(rows=skewed, arrived=None)] * 2, "update", cost)
    assert lost == pytest.approx((cost.compute_ns(72000, 2) - cost.compute_ns(36000, 2)) * 1e-9)
    assert lost > 0


def test_every_metric_is_documented_and_every_documented_one_is_written():
    named = set(re.findall(r"^\| `(\w+)`", DOCS.read_text(), flags=re.MULTILINE))
    assert named == set(step_metrics(0, [figures(t) for t in two_ranks()], ep=2, costs={}))


def test_a_stage_lasts_until_the_next_begins():
    times = iter([0.0, 1.0, 3.0, 7.0, 8.0])
    clock = StageClock(lambda: next(times))
    for stage in ("sync", "rollout", "sync"):
        clock.begin(stage)
    assert clock.stop() == {"sync": 3.0, "rollout": 4.0}


def test_rows_that_are_not_the_planned_ones_are_told_with_their_place():
    planned = np.array([[3, 4], [5, 6]])
    check_arrival(planned.copy(), planned, stage="update", rank=1)
    arrived = planned.copy()
    arrived[1, 0] = 7
    with pytest.raises(
        RoutesError, match=r"rank 1, update, micro-step 1, layer index 0: 7 rows arrived, the plan .* 5"
    ):
        check_arrival(arrived, planned, stage="update", rank=1)


def test_lines_after_the_checkpoint_are_dropped_when_a_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first, written in ((0, (0, 1, 2)), (1, (1,))):
        sink = open_lines(path, first_step=first)
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
    sink = open_lines(path, first_step=2)
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
    def write(metrics):
        raise ConnectionError("gone")

    def close():
        raise AssertionError("it was dropped")

    sinks = Sinks(tmp_path, TrackConfig(), first_step=0, settings={})
    sinks._sinks.insert(0, Sink("Broken", write, close))
    sinks.write({"step": 0})
    sinks.write({"step": 1})
    sinks.close()
    assert "no longer written to Broken" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_numbers_are_flat_and_without_what_is_unknown():
    given = {"step": 1, "a": 2, "b": None, "bytes": {"p2p": 3}, "stage_s": {"sync": 0.5}}
    assert numbers(given) == {"a": 2, "bytes.p2p": 3, "stage_s.sync": 0.5}
