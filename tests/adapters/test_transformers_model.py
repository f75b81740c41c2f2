"""What `inspect` finds in models of every family, and the reasons it gives."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from equipoise.adapters import transformers_model
from equipoise.adapters.transformers_model import inspect
from equipoise.core import AdapterError
from tests.adapters import work
from tests.adapters.tiny import EXPERTS, FAMILIES, HIDDEN, TOP_K, WIDTH, build

NUMBERS = {"qwen3_moe": (0, 2), "olmoe": (0, 1), "mixtral": (0, 1), "deepseek_v3": (1, 2), "gpt_oss": (0, 1)}


def test_every_supported_family_is_tested():
    assert set(FAMILIES) == set(transformers_model.FAMILIES) == set(NUMBERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_moe_layers_are_found_by_path_and_global_number_and_dense_ones_are_not(family):
    model = build(family)
    found = inspect(model)
    assert found.family == family
    assert found.unsupported == ()
    assert tuple(layer.number for layer in found.layers) == NUMBERS[family] == found.shape.layer_numbers
    shape = found.shape
    assert (shape.experts, shape.top_k, shape.hidden, shape.expert_width) == (EXPERTS, TOP_K, HIDDEN, WIDTH)
    assert found.shape.hidden_layers == len(model.model.layers)
    assert found.shape.weight_bytes == 4
    assert found.shape.expert_bias == (family == "gpt_oss")
    for layer in found.layers:
        assert layer.path == f"model.layers.{layer.number}"
        assert type(model.get_submodule(layer.experts_path)).__name__.endswith("Experts")
        assert "outer" in type(model.get_submodule(layer.router_path)).__name__


def test_a_model_without_a_head_has_paths_of_its_own():
    found = inspect(build("qwen3_moe").model)
    assert [layer.experts_path for layer in found.layers] == ["layers.0.mlp.experts", "layers.2.mlp.experts"]
    assert found.base_path == ""


@pytest.mark.parametrize("spoil", ["hook", "gradient", "quantized", "lora", "kept copy", "device", "dtensor"])
def test_every_reason_is_named_and_the_model_can_still_be_inspected(spoil):
    model = build("qwen3_moe")
    work.SPOILS[spoil](model, 0)
    (reason,) = inspect(model).unsupported
    assert ";" in reason, "the fix follows the reason"


def test_other_activations_half_precision_integers_and_unlike_layers_are_reasons():
    assert "activates with 'gelu'; only silu" in inspect(build("mixtral", hidden_act="gelu")).unsupported[0]
    model = build("mixtral")
    model.model.layers[1].mlp.experts.to(torch.bfloat16)
    assert "experts differ in dtype or shape between layers" in inspect(model).unsupported[0]
    model = build("mixtral").to(torch.float8_e4m3fn)
    assert "is torch.float8_e4m3fn; experts must be in 16 or 32 bit" in inspect(model).unsupported[0]


def test_a_compiled_model_is_a_reason():
    (reason,) = inspect(torch.compile(build("mixtral"))).unsupported
    assert reason == "the model is compiled; install on the model itself, without torch.compile"


def test_a_replaced_forward_is_a_reason():
    model = build("gpt_oss")
    model.model.layers[0].mlp.forward = lambda hidden: hidden
    assert inspect(model).unsupported == (
        "the forward of `model.layers.0.mlp` was replaced, by kernels or by a patch; load without use_kernels",
    )


def test_a_model_of_peft_is_an_error_that_says_what_to_give():
    model = build("mixtral")
    model.get_base_model = lambda: model
    with pytest.raises(AdapterError, match=r"holds the model with its adapters; give get_base_model\(\) of it"):
        inspect(model)


def test_what_is_no_moe_model_of_transformers_is_an_error():
    with pytest.raises(AdapterError, match="a Linear is no transformers model"):
        inspect(torch.nn.Linear(2, 2))
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=1,
        hidden_size=8,
        vocab_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with pytest.raises(AdapterError, match="model_type 'llama' is not supported"):
        inspect(AutoModelForCausalLM.from_config(config))
    with pytest.raises(AdapterError, match="has no MoE layer"):
        inspect(build("qwen3_moe", mlp_only_layers=[0, 1, 2]))
