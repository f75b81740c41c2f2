"""The model of a run: a local HF checkpoint, or a random one of any supported family, the same on every rank.

Knows transformers' configuration classes. Does not know ranks, experts' places or training.

Invariants (asserted by the tests):
1. The same settings and seed give the same bits on every rank and in every run.
2. Samples packed into one sequence give each token the logits it has alone.
3. Every family has routed experts in every layer it says, and can be built in a few thousand weights.
4. A checkpoint that is damaged, lacks a weight or is of another family is refused by name, never filled up at random.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from equipoise.adapters.transformers_model import family_of
from equipoise.core.errors import TrainingError
from equipoise.rl.config import ModelConfig
from equipoise.rl.task import CharTokenizer, CheckpointTokenizer, Tokenizer

LONGEST = 4096
"""Positions of a random model."""


class Limits(NamedTuple):
    """What a model can be given."""

    vocabulary: int
    """Token ids it has."""
    positions: int
    """Tokens of its longest sample."""


def build_model(config: ModelConfig, *, seed: int) -> nn.Module:
    """Build the model on its device, ready to train.

    Args:
        config: a checkpoint's folder, or family and sizes
        seed: of the random weights; a checkpoint has its own
    """
    model = load_model(config.path) if config.path else _random_model(config, seed=seed)
    dtype = getattr(torch, config.dtype)
    return model.to(device=config.device, dtype=dtype).train()


def load_model(path: str | Path) -> nn.Module:
    """Load a HF checkpoint from a folder; nothing is fetched from anywhere."""
    from transformers import AutoModelForCausalLM

    check_checkpoint(path)
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype="auto", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TrainingError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    if lost := sorted(told["missing_keys"]):
        raise TrainingError(
            f"{path} lacks {len(lost)} weights, the first of them {lost[0]!r}; give the folder of a whole checkpoint"
        )
    loaded: nn.Module = model
    return loaded


def check_checkpoint(path: str | Path) -> None:
    """Raise if a folder holds no HF checkpoint."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise TrainingError(f"no HF checkpoint at {path}: it has no config.json; give the folder of one")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise TrainingError(f"{path} has no weights (*.safetensors or *.bin); give the folder of a whole checkpoint")


def check_weights(path: str | Path) -> None:
    """Raise if the files of a checkpoint's weights are damaged, as far as their heads tell."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"{file} is damaged ({error}); copy the checkpoint anew") from error


def limits_of(config: ModelConfig) -> Limits:
    """What the configured model can be given; a checkpoint of a family that is not known is refused."""
    if not config.path:
        return Limits(config.vocabulary, LONGEST)
    from transformers import AutoConfig, PretrainedConfig

    family_of(PretrainedConfig.get_config_dict(config.path)[0].get("model_type", ""))
    told = AutoConfig.from_pretrained(config.path, local_files_only=True)
    return Limits(told.vocab_size, told.max_position_embeddings)


def open_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer beside a checkpoint; else one id per character."""
    if config.path and any(Path(config.path).glob("tokenizer*")):
        return CheckpointTokenizer(config.path)
    return CharTokenizer()


def copy_model(model: nn.Module) -> nn.Module:
    """A whole, independent copy that does not train: the rollout engine's, or the reference of the KL."""
    import copy

    twin = copy.deepcopy(model).eval()
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    return twin


def packed_inputs(model: nn.Module, input_T: Tensor, position_T: Tensor) -> dict[str, Any]:
    """The arguments of a forward over samples that stand one after another, seeing only themselves.

    Args:
        input_T: [T] token ids
        position_T: [T] place in its sample, 0 where one begins
    """
    inputs = {"input_ids": input_T[None], "position_ids": position_T[None], "use_cache": False}
    # Other families find the samples by their positions; gpt-oss does not look at them.
    return inputs if model.config.model_type != "gpt_oss" else {**inputs, "attention_mask": _masks(model, position_T)}


def _masks(model: nn.Module, position_T: Tensor) -> dict[str, Tensor]:
    """Additive [1, 1, T, T] masks by kind of attention."""
    sample_T, place_T = (position_T == 0).cumsum(0), torch.arange(len(position_T), device=position_T.device)
    back_TT = place_T[:, None] - place_T[None, :]
    sees_TT = (sample_T[:, None] == sample_T[None, :]) & (back_TT >= 0)
    dtype = next(model.parameters()).dtype
    lowest = torch.finfo(dtype).min
    full, near = (
        torch.zeros_like(back_TT, dtype=dtype).masked_fill(~mask_TT, lowest)[None, None]
        for mask_TT in (sees_TT, sees_TT & (back_TT < model.config.sliding_window))
    )
    return {"full_attention": full, "sliding_attention": near}


def family_config(config: ModelConfig) -> Any:
    """The transformers configuration of a random model."""
    return _FAMILIES[config.family](config)


def _random_model(config: ModelConfig, *, seed: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(family_config(config))
    return model


def _shared(config: ModelConfig) -> dict[str, Any]:
    """What all families call by the same name."""
    return {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_experts_per_tok": config.top_k,
        "max_position_embeddings": LONGEST,
        "pad_token_id": CharTokenizer.pad,
        "bos_token_id": None,
        "eos_token_id": CharTokenizer.end,
        "use_cache": True,
        "attn_implementation": "eager" if config.family == "gpt-oss" else "sdpa",
    }


def _qwen3_moe(config: ModelConfig) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_shared(config),
        num_experts=config.experts,
        moe_intermediate_size=config.expert_width,
        intermediate_size=config.expert_width,
        num_key_value_heads=config.heads,
        head_dim=config.hidden // config.heads,
        norm_topk_prob=True,
    )


def _olmoe(config: ModelConfig) -> Any:
    from transformers import OlmoeConfig

    return OlmoeConfig(
        **_shared(config),
        num_experts=config.experts,
        intermediate_size=config.expert_width,
        num_key_value_heads=config.heads,
    )


def _mixtral(config: ModelConfig) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **_shared(config),
        num_local_experts=config.experts,
        intermediate_size=config.expert_width,
        num_key_value_heads=config.heads,
        head_dim=config.hidden // config.heads,
        sliding_window=None,
    )


def _deepseek_v3(config: ModelConfig) -> Any:
    from transformers import DeepseekV3Config

    width = config.hidden // config.heads
    return DeepseekV3Config(
        **_shared(config),
        n_routed_experts=config.experts,
        moe_intermediate_size=config.expert_width,
        intermediate_size=2 * config.expert_width,
        num_key_value_heads=config.heads,
        first_k_dense_replace=1 if config.layers > 1 else 0,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=config.hidden,
        kv_lora_rank=config.hidden // 2,
        qk_nope_head_dim=width,
        qk_rope_head_dim=width,
        v_head_dim=width,
    )


def _gpt_oss(config: ModelConfig) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **_shared(config),
        num_local_experts=config.experts,
        intermediate_size=config.expert_width,
        num_key_value_heads=config.heads,
        head_dim=config.hidden // config.heads,
        sliding_window=128,
        rope_scaling=None,
    )


_FAMILIES: dict[str, Callable[[ModelConfig], Any]] = {
    "qwen3-moe": _qwen3_moe,
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "deepseek-v3": _deepseek_v3,
    "gpt-oss": _gpt_oss,
}
