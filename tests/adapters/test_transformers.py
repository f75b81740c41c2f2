"""The transformers adapter on 4 ranks declared as 2 nodes: what is computed, what is left behind, what is refused."""

import pytest
import torch

from tests.adapters import work
from tests.adapters.tiny import EXPERTS, FAMILIES

TOLERANCE = 5e-6
"""Largest difference to the whole model, as a share of the largest value of the tensor; fp32."""


def largest_difference(a, b):
    assert a.abs().max() > 0, "a comparison with nothing proves nothing"
    return float((a - b).abs().max() / a.abs().max())


@pytest.fixture(scope="module")
def legs_of(pool):
    """Every family is trained once, for all tests."""
    kept = {}

    def legs(family):
        if family not in kept:
            kept[family] = pool.run(work.train_every_way, 4, family)
        return kept[family]

    return legs


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_are_those_of_the_whole_model(legs_of, family):
    for legs in legs_of(family):
        for whole, one in (
            ("off", "static"),
            ("off", "displaced"),
            ("off", "planned"),
            ("foreign off", "foreign planned"),
        ):
            for a, b in zip(legs[whole].logits, legs[one].logits, strict=True):
                assert largest_difference(a, b) < TOLERANCE
            for a, b in zip(legs[whole].input_grads, legs[one].input_grads, strict=True):
                assert largest_difference(a, b) < TOLERANCE
            assert set(legs[whole].grads) == set(legs[one].grads)
            worst = {name: largest_difference(g, legs[one].grads[name]) for name, g in legs[whole].grads.items()}
            assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_displaced_homes_change_no_bit_of_static_expert_parallelism(legs_of, family):
    for legs in legs_of(family):
        static, displaced = legs["static"], legs["displaced"]
        assert displaced.moved[0] > 0
        assert displaced.moved[1] == 0
        assert all(map(torch.equal, static.logits, displaced.logits))
        assert all(map(torch.equal, static.input_grads, displaced.input_grads))
        assert all(torch.equal(grad, displaced.grads[name]) for name, grad in static.grads.items())


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_plans_displace_and_replicate_and_every_row_follows_its_given_route(legs_of, family):
    for legs in legs_of(family):
        assert legs["planned"].moved[0] > 0
        assert legs["planned"].moved[1] > 0
        given, used, differing = legs["planned"].rows
        assert given == used > 0
        assert differing == 0
        given, used, differing = legs["foreign planned"].rows
        assert given == used > differing > 0


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_layers_computed_again_use_the_routes_and_the_plan_of_their_own_micro_step(pool, family):
    for legs in pool.run(work.train_checkpointed, 4, family):
        for name in ("reentrant", "non-reentrant"):
            assert all(map(torch.equal, legs["plain"].logits, legs[name].logits))
            assert all(map(torch.equal, legs["plain"].input_grads, legs[name].input_grads))
            assert all(torch.equal(grad, legs[name].grads[at]) for at, grad in legs["plain"].grads.items())
            assert legs[name].rows == legs["plain"].rows, "what is computed again is not counted again"


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_uninstall_restores_the_model_and_saving_is_canonical(pool, tmp_path, family):
    results = pool.run(work.install_and_uninstall, 4, family, str(tmp_path))
    for same, shapes, is_own, _ in results:
        assert all(same), same
        assert {shape[0] for shape in shapes.values()} == {EXPERTS // 4}
        assert is_own[0], "without ids the model routes as the whole one does"
        assert is_own[1], "another model of the same configuration computes its experts itself"
    written = results[0][-1]
    plain = {name.removeprefix("plain0/"): d for name, d in written.items() if name.startswith("plain0/")}
    assert "model.safetensors" in plain
    assert {name.removeprefix("installed/"): d for name, d in written.items() if name.startswith("installed/")} == plain


@pytest.mark.dist(2)
def test_a_checkpoint_that_cannot_be_written_is_an_error_on_every_rank(pool, tmp_path):
    (first, _), (kind, words) = pool.run(work.save_in_vain, 2, str(tmp_path))
    assert first == "NotADirectoryError"
    assert kind == "AdapterError"
    assert "the first rank of the EP group could not write" in words


@pytest.mark.dist(2)
def test_a_state_dict_that_does_not_fit_is_refused_by_name_and_nothing_is_loaded(pool):
    for words, is_same in pool.run(work.load_what_does_not_fit, 2):
        assert "'model.layers.1.mlp.experts.down_proj' is in one of them only" in words[0]
        assert "'model.layers.1.mlp.experts.down_proj' of the state dict has shape [2, 32, 32]" in words[1]
        assert "of the state dict has shape [8, 1, 32]" in words[2]
        assert is_same


@pytest.mark.dist(2)
def test_inside_a_window_nothing_is_loaded_stored_or_uninstalled(pool):
    for words, is_same in pool.run(work.change_inside_a_window, 2):
        assert words[0] == "cannot load a state dict: a window of the balancer is open; end it first"
        assert words[1] == "cannot uninstall: a window of the balancer is open; end it first"
        assert words[2] == "cannot read the host store: a window of the balancer is open; end it first"
        assert is_same


@pytest.mark.dist(4)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_trained_weights_are_the_same_by_state_dict_from_the_store_by_load_and_after_uninstall(pool, family):
    for changed, same in pool.run(work.train_and_load, 4, family):
        assert changed
        assert all(".experts." in name for name in changed)
        assert same == [True, True, True]


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("experts", "`model.layers.0.mlp.experts`: 6 experts do not divide by 4 ranks"),
        ("shape", "the model has experts 8, the balancer was made for 16; give it inspect(model).shape"),
        ("hook", "`model.layers.0.mlp.experts` has hooks; remove them"),
        ("gradient", "`model.layers.0.mlp.experts.down_proj` has a gradient; call zero_grad"),
        ("quantized", "quantized; load it without quantization_config"),
        ("lora", "rank 0: `model.layers.0.mlp.experts` has LoRA adapters; merge them"),
        ("gates", "makes its gates otherwise than this adapter was checked with"),
        ("dtensor", "`model.layers.0.mlp.experts.down_proj` is a Sharded, sharded or wrapped already"),
    ],
)
def test_what_is_unsupported_is_refused_with_a_word_on_what_to_change(pool, spoil, words):
    for message, is_untouched in pool.run(work.refusals, 4, spoil):
        assert words in message
        assert is_untouched


@pytest.mark.dist(4)
def test_what_one_rank_refuses_all_ranks_refuse(pool):
    messages = [message for message, is_untouched in pool.run(work.refusals, 4, "one rank") if is_untouched]
    assert len(messages) == 4
    assert all(message.startswith("rank 1: ") and "has hooks" in message for message in messages)
