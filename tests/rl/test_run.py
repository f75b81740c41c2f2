"""Whole runs on ranks of the pool: one seed one result, resumed or not, replay and arrival proved, routes that pass."""

import json
import shutil

import pytest
import torch

from equipoise.core import ModelShape, TrainingError
from equipoise.rl.config import ModelConfig, change
from equipoise.rl.model import build_model, load_model, open_tokenizer
from equipoise.routes import diagnose, stream_recordings
from tests.rl import work
from tests.rl.test_model import FAMILIES, save_tokenizer, tiny

TIMES = ("planning_s", "hidden_s", "waited_s", "exposed_s", "rollout_s", "stage_s", "seconds", "tokens_per_s")
"""Metrics that are measured times; all others are the same in every run of one seed."""
BRIEF = {"warmup": {"steps": 2}, "checkpoint": {"every": 0}}


def lines_of(out):
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def newest_weights(out):
    return load_model(sorted((out / "checkpoints").glob("step-*"))[-1] / "model").state_dict()


@pytest.mark.dist(2)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(pool, tmp_path):
    config = work.small(steps=4, checkpoint={"every": 2}, update={"kl": 0.05})
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    pool.run(work.train_run, 2, config, whole)
    pool.run(work.train_run, 2, change(config, steps=2), halves)
    # A step that was trained after the checkpoint and lost: its line must go.
    with (halves / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "reward": 99}) + "\n")
    pool.run(work.resume_run, 2, config, halves)
    assert lines_of(whole) == lines_of(halves)
    assert work.same_weights(newest_weights(whole), newest_weights(halves))
    assert sum(line["replicas"] for line in lines_of(whole)) > 0, "without replicas plans would not matter"


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_a_checkpoint_loads_the_same_bits_under_any_number_of_ranks_and_trains_on(pool, tmp_path, family):
    config = work.small(model={"family": family})
    saved = merged(pool.run(work.save_after, 2, config, tmp_path, 2))
    assert any(name.endswith(".experts.7.gate_up.exp_avg") for name in saved)
    drawn = {}
    for ranks, ep in ((2, 0), (1, 0), (4, 0), (4, 2)):
        sizes = {"ranks": ranks, "ep": ep}
        found = pool.run(work.restored_state, ranks, change(config, **sizes), tmp_path)
        assert work.same_weights(merged([state for state, _ in found]), saved), sizes
        drawn[ranks] = [number for _, number in found]
    assert len(set(drawn[4])) == 4, "ranks without a saved random state do not draw the same numbers"
    for ranks, ep in ((4, 2), (1, 0)):
        out = tmp_path / f"on {ranks}"
        shutil.copytree(tmp_path / "checkpoints", out / "checkpoints")
        pool.run(work.resume_run, ranks, change(config, ranks=ranks, ep=ep, steps=3), out)
        (line,) = lines_of(out)
        assert line["step"] == 2 and line["grad_norm"] > 0 and line["coverage"] == 1.0
        assert not work.same_weights(newest_weights(out), newest_weights(tmp_path)), "it has learnt something more"


def merged(states):
    """All ranks' entries; those that several ranks have must have the same bits."""
    whole = {}
    for state in states:
        for name, tensor in state.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


@pytest.mark.dist(2)
def test_replay_is_exact_arrival_is_planned_and_skew_is_gone(pool):
    config = work.small()
    (metrics, weights), (_, other) = pool.run(work.metrics_of, 2, config, 2)
    (alone, _), _ = pool.run(work.metrics_of, 2, change(config, update={"mini_batches": 1}), 1)
    assert alone[0]["ratio"] == pytest.approx(1.0, abs=1e-5) and alone[0]["kl"] < 1e-9, "one window: no step between"
    for line in metrics:
        assert line["coverage"] == 1.0
        assert line["replayed_rows"] > 0
        assert line["checked_windows"] == 2 * 4, "two ranks, two windows of recompute and two of the update"
        assert line["skew_before"] > line["skew_after"] >= 1.0
        assert line["ratio"] == pytest.approx(1.0, abs=0.1)
        assert line["grad_norm"] > 0, "a step without a gradient shows nothing"
    assert work.same_weights(weights, other), "every rank gives out the same whole model"


@pytest.mark.dist(2)
def test_a_window_is_planned_before_the_rollout_has_ended(pool):
    for events, metrics in pool.run(work.planned_in_the_tail, 2, work.small()):
        first, last, *rest = events
        assert (first, last) == ("planned recompute", "the last sample ends")
        assert rest == ["planned recompute", "planned update", "planned update"]
        assert metrics["planning_s"] > 0 and metrics["hidden_s"] <= metrics["planning_s"]


@pytest.mark.dist(2)
@pytest.mark.parametrize("replay", ["R2", "off"])
def test_without_the_rollouts_routes_the_share_of_other_choices_is_told(pool, replay):
    config = work.small(update={"replay": replay, "learning_rate": 0.01})
    (metrics, _), _ = pool.run(work.metrics_of, 2, config, 2 if replay == "off" else 1)
    assert all(0.0 <= line["differing_share"] < 0.5 for line in metrics)
    if replay == "R2":
        assert all(line["replayed_rows"] > 0 and line["checked_windows"] == 2 * 2 for line in metrics)
    else:
        assert all(line["replayed_rows"] == 0 and line["checked_windows"] == 0 for line in metrics)
        assert any(line["differing_share"] > 0 for line in metrics), "weights moved, so must some choices"


@pytest.mark.dist(2)
def test_activation_checkpointing_changes_nothing(pool):
    plain = work.small(balance={"mode": "static"})
    wanted = pool.run(work.metrics_of, 2, plain, 1)[0][1]
    for kind in ("reentrant", "non-reentrant"):
        found = pool.run(work.metrics_of, 2, change(plain, update={"activation_checkpointing": kind}), 1)[0][1]
        assert work.same_weights(wanted, found), kind


@pytest.mark.dist(4)
def test_two_ep_groups_train_what_one_trains(pool):
    config = work.small(ranks=4, rollout={"prompts": 4}, balance={"mode": "static"})
    whole = pool.run(work.metrics_of, 4, config, 1)[0][1]
    groups = pool.run(work.metrics_of, 4, change(config, ep=2), 1)
    for _, weights in groups:
        for name, tensor in whole.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.dist(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_routes_pass_the_doctor_with_no_finding(pool, tmp_path, family):
    steps = 2 if family == FAMILIES[0] else 1
    config = work.small(steps=steps, model={"family": family, "top_k": 4}, balance={"mode": "static"}, **BRIEF)
    out, record = tmp_path / "out", tmp_path / "routes"
    out.mkdir()
    summary = pool.run(work.record_run, 2, config, out, record)[0]
    assert summary["record"] == str(record)
    shape = ModelShape.from_config(record / "model" / "config.json")
    diagnosis = diagnose(stream_recordings(record, model=shape), model=shape)
    assert diagnosis.ok, diagnosis.fired
    assert diagnosis.num_samples == steps * 16


@pytest.mark.dist(2)
def test_a_checkpoint_has_its_models_tokenizer_and_one_of_another_seed_is_refused(pool, tmp_path):
    given, out = tmp_path / "given", tmp_path / "out"
    out.mkdir()
    build_model(tiny("qwen3-moe"), seed=0).save_pretrained(given)
    save_tokenizer(given)
    config = work.small(steps=1, model={"path": str(given)}, task={"domains": ["add"]}, balance={"mode": "static"})
    pool.run(work.train_run, 2, config, out)
    saved, own = (open_tokenizer(ModelConfig(path=str(p))) for p in (out / "checkpoints/step-000001/model", given))
    assert saved.encode("1+2=3") == own.encode("1+2=3") and saved.end == own.end == 0
    said = pool.run(work.resume_error, 2, change(config, seed=5), out)
    assert said[0] == said[1]
    assert said[0][0] == TrainingError.__name__ and "seed is 0, this run has 5" in said[0][1]


@pytest.mark.dist(2)
def test_a_gradient_that_is_no_number_stops_every_rank_before_the_weights_change(pool):
    for words, is_same in pool.run(work.lose_a_gradient, 2, work.small(balance={"mode": "static"})):
        assert words.startswith("the gradient norm is nan, so the weights are left as they are; lower update.learning")
        assert is_same


@pytest.mark.dist(4)
def test_packed_training_has_the_losses_and_gradients_of_the_same_samples(pool):
    sizes = {"ranks": 4, "ranks_per_node": 2, "rollout": {"prompts": 8}, "update": {"micro_batch": 2}}
    config = work.small(**sizes)
    (given, _), *_ = pool.run(work.metrics_of, 4, config, 2)
    (packed, weights), *others = pool.run(work.metrics_of, 4, change(config, update={"pack": True}), 2)
    for before, after in zip(given, packed, strict=True):
        for name in ("loss", "loss_size", "grad_norm", "ratio", "kl"):
            assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-6), name
        assert (after["reward"], after["replayed_rows"]) == (before["reward"], before["replayed_rows"])
        assert after["checked_windows"] == before["checked_windows"] > 0
    # Samples really moved: what each rank sends, and with it the price of a window, is another.
    assert any(a["static_s"] != b["static_s"] for a, b in zip(packed, given, strict=True))
    assert all(work.same_weights(weights, other) for _, other in others)
