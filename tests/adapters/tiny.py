"""Tiny random models of every supported family, the same in every process."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, TOP_K, HIDDEN, WIDTH, VOCAB = 8, 3, 32, 32, 64
"""A width in whole vectors: in a shorter row, torch's CPU sigmoid has other bits at the end of a tensor than inside."""

SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
FIGURES = {
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "num_experts": EXPERTS,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": 48,
        "head_dim": 8,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "olmoe": {"num_hidden_layers": 2, "num_experts": EXPERTS, "intermediate_size": WIDTH, "norm_topk_prob": False},
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": EXPERTS, "intermediate_size": WIDTH},
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "num_hidden_layers": 2,
        "num_local_experts": EXPERTS,
        "intermediate_size": WIDTH,
        "head_dim": 8,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
FAMILIES = tuple(FIGURES)


def build(family, *, seed=0, **figures):
    """A model with weights large enough that routing is skewed and no gradient vanishes."""
    config = AutoConfig.for_model(family, **{**SHARED, **FIGURES[family], **figures})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if "norm" not in name and tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=make) * 0.2)
    return model
