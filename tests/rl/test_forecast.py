"""Forecasts: every preset on a laptop, and fewer ranks refused with a word."""

import pytest

from equipoise.rl.config import change, preset_names, read_config
from equipoise.rl.model import build_model
from equipoise.rl.preflight import dense_parameters, forecast, shape_of, too_few
from tests.rl import work


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_forecast(name):
    config = read_config(name)
    # A window of a few samples plans as well as the whole one, and faster.
    config = change(
        config, rollout={"max_new_tokens": 64}, update={"mini_batches": config.rank_samples // 2, "micro_batch": 1}
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
