"""The model of a run: a local HF checkpoint, or a random one of any supported family, the same bits on every rank.

A checkpoint that is damaged, lacks a weight or is of another family is refused, never filled with random weights.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from equipoise.adapters.transformers_model import family_of
from equipoise.core.errors import TrainingError
from equipoise.rl.config import ModelConfig
from equipoise.rl.task import CharTokenizer, CheckpointTokenizer, Tokenizer

LONGEST = 4096
"""Positions of a random model."""


def build_model(config: ModelConfig, *, seed: int) -> nn.Module:
    """Build the model on its device, ready to train; random weights depend on `seed`."""
    from transformers import AutoModelForCausalLM

    if config.path:
        model = load_model(config.path)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(family_config(config))
    return model.to(device=config.device, dtype=getattr(torch, config.dtype)).train()


def build_like(path: Path, config: ModelConfig) -> nn.Module:
    """Build a model of a checkpoint's architecture, on its device; its weights are still to be loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    architecture = AutoConfig.from_pretrained(path, local_files_only=True)
    with no_init_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(architecture)
    return model.to(device=config.device, dtype=getattr(torch, config.dtype)).train()


def load_model(path: str | Path) -> nn.Module:
    """Load a HF checkpoint from a folder; nothing is downloaded."""
    from transformers import AutoModelForCausalLM

    check_checkpoint(path)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype="auto", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TrainingError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    if missing := sorted(info["missing_keys"]):
        raise TrainingError(
            f"{path} lacks {len(missing)} weights, the first of them {missing[0]!r}; give the folder of a whole "
            "checkpoint"
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
    """Raise if the files of a checkpoint's weights are damaged, as far as their headers show."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"{file} is damaged ({error}); copy the checkpoint again") from error


def limits_of(config: ModelConfig) -> tuple[int, int]:
    """Return the model's number of token ids and of positions; raise for a checkpoint of an unknown family."""
    if not config.path:
        return config.vocabulary, LONGEST
    from transformers import AutoConfig, PretrainedConfig

    family_of(PretrainedConfig.get_config_dict(config.path)[0].get("model_type", ""))
    found = AutoConfig.from_pretrained(config.path, local_files_only=True)
    return found.vocab_size, found.max_position_embeddings


def open_tokenizer(config: ModelConfig) -> Tokenizer:
    """Open the tokenizer beside a checkpoint; without one, each character has an id."""
    if config.path and any(Path(config.path).glob("tokenizer*")):
        return CheckpointTokenizer(config.path)
    return CharTokenizer()


def copy_model(model: nn.Module) -> nn.Module:
    """Return a whole, independent copy that does not train, for rollouts or as the reference of the KL."""
    twin = copy.deepcopy(model).eval()
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    return twin


def packed_inputs(model: nn.Module, input_T: Tensor, position_T: Tensor) -> dict[str, Any]:
    """Return the arguments of a forward over packed samples, none of which attends to another.

    Args:
        input_T: [T] token ids
        position_T: [T] position in its sample, 0 where one begins
    """
    inputs: dict[str, Any] = {"input_ids": input_T[None], "position_ids": position_T[None], "use_cache": False}
    if model.config.model_type != "gpt_oss":
        return inputs
    # Other families find the samples by their positions; gpt-oss ignores them and needs additive [1, 1, T, T] masks.
    sample_T, place_T = (position_T == 0).cumsum(0), torch.arange(len(position_T), device=position_T.device)
    back_TT = place_T[:, None] - place_T[None, :]
    sees_TT = (sample_T[:, None] == sample_T[None, :]) & (back_TT >= 0)
    dtype = next(model.parameters()).dtype
    full, near = (
        torch.zeros_like(back_TT, dtype=dtype).masked_fill(~mask_TT, torch.finfo(dtype).min)[None, None]
        for mask_TT in (sees_TT, sees_TT & (back_TT < model.config.sliding_window))
    )
    return {**inputs, "attention_mask": {"full_attention": full, "sliding_attention": near}}


def pack_tokens(tokens: Sequence[np.ndarray], num_prompt: Sequence[int]) -> tuple[Tensor, ...]:
    """Pack samples behind each other, each without its last token, which has no target.

    Args:
        tokens: token ids of each sample, prompt and response
        num_prompt: tokens of each prompt

    Returns: [T] input ids, positions in the sample, targets, and whether a target belongs to a response
    """
    places = [np.arange(len(one) - 1) for one in tokens]
    is_response = [at >= prompt - 1 for at, prompt in zip(places, num_prompt, strict=True)]
    parts = ([one[:-1] for one in tokens], places, [one[1:] for one in tokens], is_response)
    return tuple(torch.from_numpy(np.concatenate(part)) for part in parts)


def family_config(config: ModelConfig) -> Any:
    """Return the transformers configuration of a random model."""
    import transformers

    width = config.hidden // config.heads
    shared = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "num_experts_per_tok": config.top_k,
        "intermediate_size": config.expert_width,
        "max_position_embeddings": LONGEST,
        "pad_token_id": CharTokenizer.pad,
        "bos_token_id": None,
        "eos_token_id": CharTokenizer.end,
        "use_cache": True,
        "attn_implementation": "eager" if config.family == "gpt-oss" else "sdpa",
    }
    match config.family:
        case "qwen3-moe":
            return transformers.Qwen3MoeConfig(
                **shared,
                num_experts=config.experts,
                moe_intermediate_size=config.expert_width,
                head_dim=width,
                norm_topk_prob=True,
            )
        case "olmoe":
            return transformers.OlmoeConfig(**shared, num_experts=config.experts)
        case "mixtral":
            return transformers.MixtralConfig(
                **shared, num_local_experts=config.experts, head_dim=width, sliding_window=None
            )
        case "gpt-oss":
            return transformers.GptOssConfig(
                **shared, num_local_experts=config.experts, head_dim=width, sliding_window=128, rope_scaling=None
            )
        case "deepseek-v3":
            shared["intermediate_size"] = 2 * config.expert_width
            return transformers.DeepseekV3Config(
                **shared,
                n_routed_experts=config.experts,
                moe_intermediate_size=config.expert_width,
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
