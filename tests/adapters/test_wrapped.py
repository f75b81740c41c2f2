"""DDP and FSDP2 around a model with balanced experts, on gloo ranks: right, or refused by name on every rank."""

import pytest

from tests.adapters import wrapped


@pytest.fixture(scope="module")
def averaged(pool):
    return pool.run(wrapped.averaged_training, 4)


@pytest.mark.dist(4)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_training_under_a_wrapper_is_that_of_the_whole_model_with_averaged_gradients(pool, averaged, how, tmp_path):
    results = pool.run(wrapped.wrapped_training, 4, how, str(tmp_path))
    for (wanted, wanted_losses), (state, losses, is_loaded, moved) in zip(averaged, results, strict=True):
        assert losses == pytest.approx(wanted_losses, rel=1e-5)
        assert list(state) == list(wanted)
        worst = {name: float((state[name] - wanted[name]).abs().max()) for name in wanted}
        assert max(worst.values()) < 2e-6, worst
        assert is_loaded
        assert min(moved) > 0, "experts move in these windows"
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("ddp_around_a_wrapper", "`model.layers.0.mlp.experts.gate_up_proj` is managed by DDP"),
        ("ddp_before_install", "DDP was built around the model before its experts were installed"),
        ("fsdp_with_experts", "`model.layers.0.mlp.experts.gate_up_proj` was replaced by a "),
    ],
)
def test_a_wrapper_that_takes_experts_is_refused_by_name_in_the_first_window_on_every_rank(pool, wrong, words):
    for message in pool.run(wrapped.refused_wrapper, 2, wrong):
        assert words in message
        assert "ignored_params=set(handle.expert_parameters.values())" in message


@pytest.mark.dist(2)
def test_adapters_of_experts_that_come_after_install_are_refused_by_name_on_every_rank(pool):
    for message in pool.run(wrapped.refused_wrapper, 2, "lora_on_experts"):
        assert message.startswith("`model.layers.0.mlp.experts` has LoRA adapters; merge them, or adapt attention")


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("how", "frozen"), [("ddp", ("gate_up_proj", "down_proj")), ("fsdp", ("gate_up_proj",))], ids=["all", "a half"]
)
def test_low_rank_adapters_beside_attention_train_as_alone_where_experts_are_frozen(pool, how, frozen):
    wanted = pool.run(wrapped.plain_adapters, 2, frozen)
    for (losses, grads), (found_losses, found, moved) in zip(
        wanted, pool.run(wrapped.balanced_adapters, 2, how, frozen), strict=True
    ):
        assert found_losses == pytest.approx(losses, rel=1e-6)
        assert sorted(found) == sorted(grads), "what is frozen has no gradient"
        assert sum("lora_" in name for name in found) == 4
        for name, gradient in grads.items():
            assert (found[name] - gradient).abs().max() <= 5e-6 * gradient.abs().max(), name
        assert max(moved) > 0, "experts move in this window"
