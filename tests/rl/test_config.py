"""Settings: ranges, shares, TOML there and back, and words for what is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import TrainingError
from equipoise.rl.config import TrainConfig, build_config, change, preset_names, read_config, write_config


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_read_and_written_back_the_same(name, tmp_path):
    config = read_config(name)
    (tmp_path / "again.toml").write_text(write_config(config))
    assert read_config(tmp_path / "again.toml") == config


def test_the_presets_are_the_promised_ones():
    assert preset_names() == ["node-gpu", "qwen3-30b-a3b-64gpu", "small-gpu", "tiny"]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    rate=st.floats(1e-9, 10.0),
    path=st.text(st.characters(codec="ascii", exclude_categories=["C"])),
    is_free=st.booleans(),
)
def test_any_value_survives_toml(tmp_path_factory, seed, rate, path, is_free):
    config = change(TrainConfig(seed=seed, compare_free=is_free), update={"learning_rate": rate}, model={"path": path})
    file = tmp_path_factory.mktemp("toml") / "c.toml"
    file.write_text(write_config(config))
    assert read_config(file) == config


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("stps=3", "unknown setting stps; did you mean steps?"),
        ("update.lerning_rate=1", "unknown setting update.lerning_rate; did you mean update.learning_rate?"),
        ("zzz.a=1", "unknown setting zzz; known here: steps"),
        ("steps=0", "setting steps is 0; expected `int` >= 1"),
        ("steps=many", "setting steps is 'many'; expected `int`, got `str`"),
        ("steps=true", "setting steps is True; expected `int`, got `bool`"),
        ("update.learning_rate=0", "setting update.learning_rate is 0; expected `float` > 0.0"),
        ("update.learning_rate=inf", "setting update.learning_rate is inf; expected `float` <= 1000000.0"),
        ("update.learning_rate=nan", "setting update.learning_rate is nan; expected `float` > 0.0"),
        ("update.weight_decay=-1", "setting update.weight_decay is -1; expected `float` >= 0.0"),
        ("update.weight_decay=inf", "setting update.weight_decay is inf; expected `float` <= 1000000.0"),
        ("update.kl=nan", "setting update.kl is nan; expected `float` >= 0.0"),
        ("track.wandb_project=2026", "setting track.wandb_project is 2026; expected `str`, got `int`, in quotes where"),
        ("seed=99999999999999999999", "setting seed is 99999999999999999999; expected `int` <= 9223372036854775807"),
        ("timeout_s=1e30", "setting timeout_s is 1e+30; expected `float` <= 1000000.0"),
        ("model.top_k=17", "setting model.top_k is 17; qwen3-moe of 16 experts can use at most 16"),
        ("model.hidden=66", "setting model.hidden is 66; it must divide by twice model.heads (4)"),
        ("backend=nccl", "setting backend is nccl, which moves CUDA tensors alone"),
        ("update.replay=R4", "setting update.replay is 'R4'; it must be one of R3, R2, off"),
        ("task.domains=add", "setting task.domains is 'add'; expected `array`, got `str`"),
        ("model=3", "setting model is a table; give its settings as model.key"),
        ("steps.more=3", "'steps' is a single setting, not a table"),
        ("steps", "--set 'steps' is not of the form a.b=value"),
        ("rollout.prompts=3", "rollout.prompts: 3 does not divide by ranks 2"),
        ("update.mini_batches=5", "does not divide by update.mini_batches 5"),
        ("ep=3", "ranks: 2 does not divide by ep 3"),
        ("ranks_per_node=4", "ranks: 2 does not divide by ranks_per_node 4"),
    ],
)
def test_what_is_wrong_is_named_with_its_limit(setting, words):
    with pytest.raises(TrainingError) as error:
        read_config("tiny", settings=[setting])
    assert words in str(error.value)


def test_settings_that_exclude_each_other_are_refused():
    deepseek = ["model.family=deepseek-v3"]
    with pytest.raises(TrainingError, match=r"model.top_k is 9; deepseek-v3 of 16 experts can use at most 8"):
        read_config("tiny", settings=[*deepseek, "model.top_k=9"])
    with pytest.raises(TrainingError, match=r"model.experts is 15; deepseek-v3 has two groups of them: make it even"):
        read_config("tiny", settings=[*deepseek, "model.experts=15"])


def test_set_takes_words_numbers_lists_and_paths():
    config = read_config(
        "tiny", settings=["steps=7", "update.learning_rate=1", "model.path=/a/b c", "task.domains=['add', 'sub']"]
    )
    assert (config.steps, config.update.learning_rate, config.model.path) == (7, 1.0, "/a/b c")
    assert config.task.domains == ("add", "sub")


def test_a_file_that_is_no_toml_and_one_that_is_not_there_are_told(tmp_path):
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(TrainingError, match=r"bad.toml is not TOML"):
        read_config(tmp_path / "bad.toml")
    with pytest.raises(TrainingError, match="no preset and no file 'tinny'; presets: node-gpu, qwen3"):
        read_config("tinny")


def test_ranks_of_groups_and_nodes_default_to_all():
    config = build_config({"ranks": 4, "rollout": {"prompts": 4}, "update": {"micro_batch": 2}, "warmup": {"batch": 4}})
    assert (config.group_ranks, config.node_ranks, config.rank_samples) == (4, 4, 8)
