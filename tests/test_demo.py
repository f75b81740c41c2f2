"""The demo, act by act, on small sizes: what it predicts, trains, says and writes."""

import io
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from equipoise import demo
from equipoise.core import ModelShape
from equipoise.report import build_page
from equipoise.rl.compare import PLACED, build_comparison
from equipoise.rl.config import build_config
from tests.rl import work
from tests.rl.test_compare import leg

FACTS = {"model": "qwen3-moe", "parameters": 10**6, "layers": 2, "experts": 16, "top_k": 4, "ranks": 2, "device": "cpu"}


@lru_cache(maxsize=1)
def predicted():
    return demo.predict(samples=48, layers=2)


def compared(balanced_s):
    """A comparison whose static step takes 2 s and whose balanced one takes `balanced_s`."""
    static = replace(leg("static", moved=0), seconds=(9.0, 2.0), tokens=(100, 100), skew=1.8, norms=(1.0, 1.0))
    legs = [static, replace(static, name="equipoise", seconds=(9.0, balanced_s), skew=1.0, replicas=2)]
    legs = [replace(one, losses=one.losses * 2, sizes=one.sizes * 2, weights=one.weights * 2) for one in legs]
    return replace(build_comparison(legs, is_free=False, limit=1e-5), facts=FACTS)


def test_the_first_act_predicts_a_loss_that_a_plan_gives_back():
    found = predicted()
    assert found.trial.skew_before("update").mean > 1.3 > 1.1 > found.trial.skew_after("update").mean
    assert found.seconds.saved_seconds > 0


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_planted_routes_are_distinct_and_as_uneven_as_asked_for(share):
    shape = ModelShape.preset("qwen3-30b-a3b", layers=2, experts=16, top_k=4)
    ids_TLK = demo.draw_routes(2000, shape, share=share, rng=np.random.default_rng(0))
    ordered = np.sort(ids_TLK, axis=2)
    assert ids_TLK.shape == (2000, 2, 4) and (np.diff(ordered, axis=2) > 0).all()
    assert np.mean(ids_TLK < 8) == pytest.approx(share, abs=0.02)
    assert np.bincount(ids_TLK.ravel(), minlength=16).min() > 0


@pytest.mark.dist(2)
def test_the_second_act_trains_the_same_with_level_ranks(pool, tmp_path):
    small = demo.SETTINGS["model"] | {"hidden": 32, "heads": 2, "expert_width": 16}
    rollout = {"prompts": 4, "samples": 4, "source": str(tmp_path)}
    content = {"steps": 1, "model": small, "rollout": rollout, "update": {"mini_batches": 1, "micro_batch": 4}}
    config = build_config(demo.SETTINGS | content)
    demo.record_rollouts(config, tmp_path, share=0.9)
    comparison = pool.run(work.compare_run, 2, config, ("static", "equipoise"))[0]
    assert comparison.is_good, "\n".join(comparison.lines())
    static, balanced, placed = comparison.legs
    assert placed["name"] == PLACED and static["skew"] == pytest.approx(1.8, abs=0.1)
    assert balanced["skew"] < 1.05 and balanced["displaced"] + balanced["replicas"] > 0
    assert {**FACTS, "parameters": comparison.facts["parameters"]} == comparison.facts
    assert build_page(comparison).answer.startswith("Measured here, equipoise ")


@pytest.mark.parametrize(("balanced_s", "words"), [(1.25, "1.60 times as fast"), (2.5, "was not faster than static")])
def test_the_last_act_says_what_was_measured_and_ends_with_the_page(monkeypatch, tmp_path, balanced_s, words):
    path, out, analysis = tmp_path / "page.html", io.StringIO(), predicted()
    monkeypatch.setattr(demo, "predict", lambda: analysis)
    monkeypatch.setattr(demo, "train", lambda settings, *, skew, show: compared(balanced_s))
    demo.run(path, out)
    lines = out.getvalue().splitlines()
    assert lines[-1] == str(path) and len(lines) < 25 and max(map(len, lines[:-1])) <= 80
    assert sum(line.startswith("Act ") for line in lines) == 3
    said = " ".join(out.getvalue().split())
    assert words in said and ("did not pay" in said) == (balanced_s > 2)
    times = analysis.seconds.now.total / analysis.seconds.planned.total
    assert f"expert layers would be {times:.2f} times as fast" in said
    text = path.read_text()
    assert words in text and "recover" in text and "measured-seconds" in text and "cost-parts" in text
