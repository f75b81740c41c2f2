"""Every MoE family of the installed transformers: its layers by `ModelShape.from_config` against those of its model.

Models are built on the meta device from the family's own default configuration, so their modules say which layers have
experts. A configuration is read right or refused; none is read wrongly.
"""

import re
import sys
from inspect import getsource

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from equipoise.core import EquipoiseError, ModelShape

GIVEN = {
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 2},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 64},
    "inkling_text": {"dense_mlp_idx": 2},
    "lfm2_moe": {"num_hidden_layers": 6, "layer_types": ["conv", "full_attention"] * 3},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]},
    "qwen3_moe": {"mlp_only_layers": [3], "decoder_sparse_step": 2},
}
"""Figures without which a family's default has no experts, cannot be built, or has no dense layer."""
REFUSED = {
    "dbrx": "figures are in ffn_config",
    "deepseek_ocr2": "no number of experts per token",
    "diffusion_gemma": "no number of experts",
    "doge": "experts are product keys",
    "ernie4_5_vl_moe": "one number of experts for text and one for images",
    "gemma4": "dense by default",
    "longcat_flash": "experts that compute nothing, and two layers in one",
    "nllb-moe": "encoder and decoder",
    "qwen3_omni_moe": "two language models",
    "switch_transformers": "encoder and decoder",
    "vitpose_backbone": "no language model",
}
"""Families that are refused, with the reason."""
LEFT_OUT = "vision|audio|encoder|predictor|thinker|talker|omni_moe_text|ocr2_|gemma_text|step3p5|qwen4_exp"
"""Parts of models that are walked as a whole; the last one's default configuration cannot be built."""
WHOLE = ("mlp_layer_types", "moe_layer_freq", "moe_layers", "layers_block_type", "hybrid_override_pattern")
STATED = (*WHOLE, "first_k_dense_replace", "num_dense_layers", "dense_mlp_idx", "moe_layer_start_index")
STATED += ("expert_layer_period", "expert_layer_offset", "moe_layer_interval", "moe_layer_end_index", "mlp_only_layers")


def families():
    """Text configurations whose source speaks of experts, by model type."""
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        kind = CONFIG_MAPPING[model_type]
        if "expert" in getsource(sys.modules[kind.__module__]) and not re.search(LEFT_OUT, model_type):
            yield model_type, kind


def moe_layers(config):
    """Numbers of the decoder layers that have experts, read from the model's modules."""
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(text if type(text) in transformers.MODEL_MAPPING else config)
    found = set()
    for path, module in model.named_modules():
        place = re.search(r"(?:^|\.)layers\.(\d+)\..*experts$", path)
        if place and "shared" not in path and next(module.parameters(), None) is not None:
            found.add(int(place[1]))
    return tuple(sorted(found))


@pytest.fixture(scope="module")
def configs():
    """Model type to configuration."""
    transformers.logging.set_verbosity_error()
    return {model_type: kind(**GIVEN.get(model_type, {})) for model_type, kind in families()}


def test_every_family_is_read_as_its_model_is_built_or_refused(configs):
    wrong, refused, partly = {}, set(), set()
    for model_type, config in configs.items():
        try:
            shape = ModelShape.from_config(config.to_dict())
        except EquipoiseError:
            refused.add(model_type.removesuffix("_text"))
            continue
        built = moe_layers(config)
        if shape.layer_numbers != built:
            wrong[model_type] = (shape.layer_numbers, built)
        if shape.layers < shape.hidden_layers:
            partly.add(model_type)
    assert wrong == {}
    assert refused - {"youtu", "gemma4"} == set(REFUSED) - {"gemma4"}
    assert len(configs) - len(refused) >= 58, "most families are read"
    assert {"llama4_text", "jamba", "lfm2_moe", "nemotron_h", "ernie4_5_moe", "kimi_linear", "afmoe"} <= partly


def test_a_config_that_does_not_say_which_layers_are_dense_is_refused(configs):
    """`mlp_layer_types` and its like removed: what the configuration class would fill in is not in a bare file."""
    for model_type, config in configs.items():
        if model_type.removesuffix("_text") in REFUSED or model_type in GIVEN:
            continue
        content = config.to_dict()
        if (shape := _read(content)) is None or shape.layers == shape.hidden_layers:
            continue
        bare = {key: value for key, value in (content.get("text_config") or content).items() if key not in STATED}
        with pytest.raises(EquipoiseError, match=r"some layers of .* are dense, and this config does not say which"):
            ModelShape.from_config({**bare, "model_type": bare["model_type"]})


def _read(content):
    try:
        return ModelShape.from_config(content)
    except EquipoiseError:
        return None
