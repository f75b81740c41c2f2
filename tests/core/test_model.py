"""Model shapes: presets against figures written down by hand, config.json conventions, and overrides."""

import json
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import ModelShape, TopologyError
from equipoise.core.model import preset_names

QWEN3_30B_CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3_CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
}
MIXTRAL_CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
OLMOE_CONFIG = {
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
GLM_AIR_CONFIG = {
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
}

# By hand from the models' published configurations:
# MoE layers, first MoE layer, all layers, experts, top-k, hidden, expert width, shared experts, MTP layers.
PUBLISHED = {
    "qwen3-30b-a3b": (48, 0, 48, 128, 8, 2048, 768, 0, 0),
    "qwen3-235b-a22b": (94, 0, 94, 128, 8, 4096, 1536, 0, 0),
    "deepseek-v3": (58, 3, 61, 256, 8, 7168, 2048, 1, 1),
    "deepseek-v2-lite": (26, 1, 27, 64, 6, 2048, 1408, 2, 0),
    "glm-4.5-air": (45, 1, 46, 128, 8, 4096, 1408, 1, 1),
    "gpt-oss-20b": (24, 0, 24, 32, 4, 2880, 2880, 0, 0),
    "gpt-oss-120b": (36, 0, 36, 128, 4, 2880, 2880, 0, 0),
    "olmoe": (16, 0, 16, 64, 8, 2048, 1024, 0, 0),
    "mixtral-8x7b": (32, 0, 32, 8, 2, 4096, 14336, 0, 0),
}
# Megabytes of one bf16 expert, as published tables round them.
EXPERT_MB = {
    "qwen3-30b-a3b": 9.4,
    "qwen3-235b-a22b": 37.7,
    "deepseek-v3": 88,
    "glm-4.5-air": 34.6,
    "gpt-oss-120b": 49.8,
}
# Parameters of one layer's attention projections, multiplied out by hand; DeepSeek-V3's is 187,105,280 in its own
# report's arithmetic: 7168*1536 + 1536*128*192 + 7168*576 + 512*128*256 + 128*128*7168.
ATTENTION = {
    "qwen3-30b-a3b": (2 * 2048 * 4096 + 2 * 2048 * 512, 2 * 32 * 128),
    "qwen3-235b-a22b": (2 * 4096 * 8192 + 2 * 4096 * 512, 2 * 64 * 128),
    "deepseek-v3": (187_105_280, 128 * (192 + 128)),
    "deepseek-v2-lite": (2048 * 3072 + 2048 * 576 + 512 * 16 * 256 + 2048 * 2048, 16 * (192 + 128)),
    "mixtral-8x7b": (2 * 4096 * 4096 + 2 * 4096 * 1024, 2 * 32 * 128),
    "gpt-oss-120b": (2 * 2880 * 4096 + 2 * 2880 * 512, 2 * 64 * 64),
}


def make_model(**changes):
    figures = {
        "name": "tiny",
        "experts": 8,
        "top_k": 2,
        "layer_numbers": (1, 2, 3),
        "hidden_layers": 4,
        "hidden": 16,
        "expert_width": 8,
    }
    return ModelShape(**{**figures, **changes})


def test_presets_are_the_promised_ones():
    assert preset_names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_figures_are_the_published_ones(name):
    model = ModelShape.preset(name)
    found = (
        model.layers,
        model.layer_numbers[0],
        model.hidden_layers,
        model.experts,
        model.top_k,
        model.hidden,
        model.expert_width,
        model.shared_experts,
        model.mtp_layers,
    )
    assert found == PUBLISHED[name]
    assert model.layer_numbers == tuple(range(model.layer_numbers[0], model.hidden_layers))


@pytest.mark.parametrize("name", EXPERT_MB)
def test_bytes_of_one_expert_match_the_published_table(name):
    assert ModelShape.preset(name).expert_bytes / 1e6 == pytest.approx(EXPERT_MB[name], rel=0.005)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_figures_match_arithmetic_by_hand(name):
    model = ModelShape.preset(name)
    assert (model.attention_params, model.attention_width) == ATTENTION[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_preset_names_its_source(name):
    data = json.loads((resources.files("equipoise.core") / "presets" / "models" / f"{name}.json").read_text())
    assert "config.json of " in data["source"]
    assert ModelShape.preset(name).source == data["source"]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen3-30b-a3b", QWEN3_30B_CONFIG),
        ("deepseek-v3", DEEPSEEK_V3_CONFIG),
        ("mixtral-8x7b", MIXTRAL_CONFIG),
        ("olmoe", OLMOE_CONFIG),
        ("glm-4.5-air", GLM_AIR_CONFIG),
    ],
    ids=["qwen3", "deepseek-v3", "mixtral", "olmoe", "glm-air"],
)
def test_a_preset_equals_what_the_published_config_reads_as(name, config):
    preset = ModelShape.preset(name)
    assert ModelShape.from_config(config, name=name).replace(source=preset.source) == preset


def test_a_config_file_and_its_folder_read_the_same(tmp_path):
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(QWEN3_30B_CONFIG))
    by_file, by_folder = ModelShape.from_config(path), ModelShape.from_config(str(folder))
    assert by_file == by_folder
    assert by_file.name == "Qwen3-30B-A3B"
    assert by_file.source == str(path)


def test_a_multimodal_config_is_read_from_its_text_part():
    config = {"model_type": "qwen3_vl_moe", "hidden_size": 1, "text_config": QWEN3_30B_CONFIG}
    assert ModelShape.from_config(config, name="x") == ModelShape.from_config(QWEN3_30B_CONFIG, name="x")


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        pytest.param({"num_hidden_layers": 6, "mlp_only_layers": [0, 4]}, (1, 2, 3, 5), id="listed-dense-layers"),
        pytest.param({"num_hidden_layers": 6, "decoder_sparse_step": 2}, (1, 3, 5), id="stride-counted-from-1"),
        pytest.param({"num_hidden_layers": 4, "first_k_dense_replace": 2}, (2, 3), id="dense-prefix"),
    ],
)
def test_moe_layers_follow_each_convention(changes, numbers):
    assert ModelShape.from_config({**QWEN3_30B_CONFIG, **changes}).layer_numbers == numbers


def test_a_stride_of_moe_layer_freq_is_counted_from_0():
    config = {**DEEPSEEK_V3_CONFIG, "num_hidden_layers": 9, "moe_layer_freq": 2}
    assert ModelShape.from_config(config).layer_numbers == (4, 6, 8)


def test_flags_per_layer_name_the_moe_layers():
    config = {**DEEPSEEK_V3_CONFIG, "num_hidden_layers": 5, "moe_layer_freq": [0, 1, 1, 0, 1]}
    assert ModelShape.from_config(config).layer_numbers == (1, 2, 4)


@pytest.mark.parametrize("flags", [[0, 1], [0, 1, 2, 0, 1], [0, 0, 0, 0, 0]], ids=["short", "a-two", "no-moe"])
def test_wrong_flags_per_layer_are_refused(flags):
    with pytest.raises(TopologyError, match=r"moe_layer_freq|no MoE layer"):
        ModelShape.from_config({**DEEPSEEK_V3_CONFIG, "num_hidden_layers": 5, "moe_layer_freq": flags})


@pytest.mark.parametrize(
    "key", ["num_experts", "num_experts_per_tok", "num_hidden_layers", "hidden_size", "num_attention_heads"]
)
def test_a_config_without_a_needed_key_is_refused_by_its_name(key):
    config = {k: v for k, v in QWEN3_30B_CONFIG.items() if k != key}
    with pytest.raises(TopologyError, match=key):
        ModelShape.from_config(config)


@settings(max_examples=100, deadline=None)
@given(
    key=st.sampled_from(sorted(DEEPSEEK_V3_CONFIG)),
    value=st.sampled_from([None, "", "many", -1, 0, 1.5, [], [1], {}, True, 10**30, float("nan")]),
)
def test_any_single_broken_figure_is_read_or_refused_with_our_error(key, value):
    try:
        model = ModelShape.from_config({**DEEPSEEK_V3_CONFIG, key: value})
    except TopologyError as error:
        assert str(error)
    else:
        assert model.layers >= 1
        assert model.top_k <= model.experts


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param("{", "not a readable JSON file", id="truncated"),
        pytest.param("[1, 2]", "holds a list", id="not-an-object"),
        pytest.param("\ufeff{}", "not a readable JSON file", id="byte-order-mark"),
    ],
)
def test_a_file_that_is_no_config_is_refused_by_its_path(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TopologyError, match=words) as caught:
        ModelShape.from_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused_by_its_path(tmp_path):
    with pytest.raises(TopologyError, match=r"no model config at .*nowhere"):
        ModelShape.from_config(tmp_path / "nowhere")


def test_any_figure_of_a_preset_can_be_overridden():
    model = ModelShape.preset("Qwen3_30B_A3B", experts=256, layers=3, top_k=4)
    assert (model.experts, model.layers, model.top_k, model.hidden) == (256, 3, 4, 2048)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(PUBLISHED)), count=st.integers(1, 120))
def test_layers_keeps_the_dense_prefix_and_numbers_what_follows(name, count):
    whole = ModelShape.preset(name)
    model = whole.replace(layers=count)
    assert model.layers == len(model.layer_numbers) == count
    assert model.layer_numbers[0] == whole.layer_numbers[0]
    assert model.layer_numbers == tuple(range(model.layer_numbers[0], model.layer_numbers[0] + count))
    assert model.hidden_layers == model.layer_numbers[-1] + 1


def test_top_k_follows_when_experts_are_cut_below_it():
    assert ModelShape.preset("qwen3-30b-a3b", experts=4).top_k == 4


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_and_back_is_the_same_shape_also_through_json(name):
    model = ModelShape.preset(name)
    assert ModelShape.from_figures(model.figures()) == model
    assert ModelShape.from_figures(json.loads(json.dumps(model.figures()))) == model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"colour": 1}, "'colour' is unknown", id="unknown"),
        pytest.param({"layer_numbers": "012"}, "layer_numbers must be a list", id="text-for-a-list"),
        pytest.param({"layer_numbers": [0, 1.5]}, "layer_numbers must be a whole number", id="float-number"),
        pytest.param({"name": 7}, "name must be str", id="number-for-a-name"),
        pytest.param({"expert_bias": 1}, "expert_bias must be bool", id="number-for-a-bool"),
    ],
)
def test_figures_of_a_wrong_kind_are_refused(changes, words):
    with pytest.raises(TopologyError, match=words):
        ModelShape.from_figures({**make_model().figures(), **changes})


def test_missing_figures_are_refused_by_name():
    figures = make_model().figures()
    del figures["hidden"]
    with pytest.raises(TopologyError, match="'hidden' is missing"):
        ModelShape.from_figures(figures)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"top_k": 9}, "top_k is 9; there are only 8 experts", id="top-k"),
        pytest.param({"layer_numbers": ()}, "has no MoE layer", id="no-layer"),
        pytest.param({"layer_numbers": (2, 1)}, "must ascend", id="descending"),
        pytest.param({"layer_numbers": (1, 1)}, "must ascend", id="repeated"),
        pytest.param({"layer_numbers": (3, 4)}, r"within 0\.\.3", id="beyond-the-model"),
        pytest.param({"layer_numbers": (-1, 1)}, "must ascend", id="negative"),
        pytest.param({"layer_numbers": (1, 2.5)}, "whole number", id="float-layer"),
        pytest.param({"hash_layers": (0,)}, r"hash_layers \[0\] are not MoE layers", id="hash-layer"),
        pytest.param({"experts": 0}, "experts is 0; it must be at least 1", id="no-experts"),
        pytest.param({"hidden": 16.0}, "hidden must be a whole number", id="float"),
        pytest.param({"weight_bytes": 0}, "weight_bytes is 0", id="no-bytes"),
    ],
)
def test_a_model_that_makes_no_sense_cannot_be_built(changes, words):
    with pytest.raises(TopologyError, match=words):
        make_model(**changes)


@pytest.mark.parametrize(
    ("name", "figures", "words"),
    [
        pytest.param("gpt-5", {}, "no model preset 'gpt-5'; known: deepseek-v2-lite, deepseek-v3", id="preset"),
        pytest.param("olmoe", {"colour": 1}, "no figure 'colour'; known: .*expert_width.*layers", id="figure"),
        pytest.param("olmoe", {"layers": 0}, "layers is 0", id="no-layers"),
        pytest.param("olmoe", {"layers": 2, "layer_numbers": (0, 1)}, "not both", id="layers-twice"),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name, figures, words):
    with pytest.raises(TopologyError, match=words):
        ModelShape.preset(name, **figures)


def test_derived_figures_count_what_they_say():
    model = make_model()
    assert model.expert_params == 3 * 16 * 8
    assert model.expert_bytes == 2 * 3 * 16 * 8
    # Two operations per weight and row.
    assert model.row_flops == 2 * model.expert_params
    assert model.row_bytes == 2 * 16
    assert make_model(expert_bias=True).expert_params == 3 * 16 * 8 + 2 * 8 + 16
    assert make_model(weight_bytes=1).expert_bytes == 3 * 16 * 8


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        pytest.param({"experts": "x"}, "experts must be a whole number, got 'x'", id="experts"),
        pytest.param({"layer_numbers": 5}, "layer_numbers must be a list, got 5", id="layer-numbers"),
        pytest.param({"layer_numbers": ["1"]}, "layer_numbers must be a whole number", id="layer-number"),
    ],
)
def test_an_override_of_a_wrong_kind_is_refused(figures, words):
    with pytest.raises(TopologyError, match=words):
        ModelShape.preset("olmoe", **figures)


def test_a_dense_layer_that_is_no_number_is_refused():
    config = {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": ["1"]}
    with pytest.raises(TopologyError, match="an entry of mlp_only_layers must be a whole number, got '1'"):
        ModelShape.from_config(config)


def test_a_config_nested_without_end_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(TopologyError, match="not a readable JSON file"):
        ModelShape.from_config(tmp_path)


@pytest.mark.parametrize(
    ("figures", "layers"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, (1, 2)),
        ({"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]}, (0, 1, 2, 3)),
        ({"num_dense_layers": 3}, (3,)),
        ({"interleave_moe_layer_step": 2}, (1, 3)),
        ({"interleave_moe_layer_step": 2, "moe_layers": [0, 3]}, (0, 3)),
        ({"moe_layers_enum": "1,2,3,4"}, (1, 2, 3)),
        ({"expert_layer_period": 2, "expert_layer_offset": 0}, (0, 2)),
        ({"moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 2}, (1, 2)),
        ({"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": -1}, (1, 3)),
        ({"hybrid_override_pattern": "ME*E"}, (1, 3)),
    ],
    ids=str,
)
def test_moe_layers_by_the_keys_of_every_family(figures, layers):
    base = {
        key: value for key, value in QWEN3_30B_CONFIG.items() if key not in ("mlp_only_layers", "decoder_sparse_step")
    }
    shape = ModelShape.from_config({**base, "num_hidden_layers": 4, **figures})
    assert shape.layer_numbers == layers
    assert shape.hash_layers == ((0,) if "hash_moe" in str(figures) else ())


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types must have one of dense, sparse"),
        ({"mlp_layer_types": ["sparse", "mamba", "sparse", "sparse"]}, "mlp_layer_types must have one of dense"),
        (
            {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "moe_layers": [0]},
            "mlp_layer_types and moe_layers name diff",
        ),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum must be a whole number, got 'x'"),
        ({"model_type": "hy_v3"}, "some layers of hy_v3 are dense, and this config does not say which"),
        ({"enable_moe_block": False}, "has no routed experts"),
    ],
    ids=str,
)
def test_layers_that_a_config_leaves_open_or_contradicts_are_refused(figures, words):
    base = {
        key: value for key, value in QWEN3_30B_CONFIG.items() if key not in ("mlp_only_layers", "decoder_sparse_step")
    }
    with pytest.raises(TopologyError, match=words):
        ModelShape.from_config({**base, "num_hidden_layers": 4, **figures})
