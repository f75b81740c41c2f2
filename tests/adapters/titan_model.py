"""A tiny torchtitan model on CPU ranks, sharded by torchtitan's own functions.

What a CPU needs, and where it is put right:
    minimal_async_ep.kernels    imports Triton, which CPU builds of torch do not bring: names without a body stand in
    device_type                 is CUDA where no accelerator is found: the CPU, for meshes
    inner attention             FlexAttention is compiled and packed: torchtitan's ScaledDotProductAttention, causal
    PREMUL_SUM                  is unknown to gloo: `set_force_sum_reduction_for_comms`, which FSDP2 offers
"""

import contextlib
import functools
import sys
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
if _KERNELS not in sys.modules:
    sys.modules[_KERNELS] = ModuleType(_KERNELS)
    sys.modules[_KERNELS].__getattr__ = lambda name: object() if name.endswith("_kernel") else getattr(object, name)

import torchtitan.tools.utils  # noqa: E402  # after the stand-in

torchtitan.tools.utils.device_type = "cpu"  # read by what is imported next

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, activation_checkpoint  # noqa: E402
from torchtitan.distributed import utils as titan  # noqa: E402
from torchtitan.models import deepseek_v3, qwen3  # noqa: E402
from torchtitan.models.common import (  # noqa: E402
    ComplexRoPE,
    CosSinRoPE,
    Embedding,
    Linear,
    RMSNorm,
    ScaledDotProductAttention,
)
from torchtitan.models.deepseek_v3 import sharding as deepseek_sharding  # noqa: E402
from torchtitan.models.qwen3 import sharding as qwen_sharding  # noqa: E402

LAYERS, EXPERTS, TOP_K, VOCAB, HIDDEN, WIDTH, HEAD = 2, 8, 2, 64, 64, 32, 16
BACKEND = "partial_dtensor"
"""The others shard plain tensors, which FSDP2 of torch 2.13 refuses."""


def qwen(top_k):
    """Softmax over all experts, normalised."""
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=LAYERS,
        dim=HIDDEN,
        n_heads=4,
        n_kv_heads=2,
        head_dim=HEAD,
        moe_hidden_dim=WIDTH,
        num_experts=EXPERTS,
        top_k=top_k,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=HEAD, max_seq_len=64, theta=1e4),
    )
    config = qwen3.Qwen3Model.Config(
        vocab_size=VOCAB,
        dim=HIDDEN,
        norm=qwen3._qwen3_norm(HIDDEN),
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=VOCAB, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )
    use_plain_attention(config)
    qwen_sharding.set_qwen3_sharding_config(config, enable_sp=True, enable_ep=True)
    return config, qwen3.parallelize_qwen3


def deepseek(top_k):
    """A dense layer, then sigmoid scores with a bias for choice alone, shared experts beside the routed ones."""
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=LAYERS,
        n_dense_layers=1,
        dim=HIDDEN,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=16,
        qk_nope_head_dim=HEAD,
        qk_rope_head_dim=HEAD,
        v_head_dim=HEAD,
        mscale=0.70,
        dense_hidden_dim=WIDTH,
        moe_hidden_dim=WIDTH,
        num_experts=EXPERTS,
        num_shared_experts=1,
        router_top_k=top_k,
        router_score_func="sigmoid",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=HEAD, max_seq_len=64, theta=1e4),
    )
    config = deepseek_v3.DeepSeekV3Model.Config(
        vocab_size=VOCAB,
        dim=HIDDEN,
        norm=RMSNorm.Config(normalized_shape=HIDDEN, param_init=deepseek_v3._NORM_INIT),
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init=deepseek_v3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=VOCAB, param_init=qwen3._LINEAR_INIT),
        layers=layers,
        mtp_layers=[],
    )
    use_plain_attention(config)
    deepseek_sharding.set_deepseek_v3_sharding_config(config, enable_sp=True, enable_ep=True)
    return config, deepseek_v3.parallelize_deepseekv3


def use_plain_attention(config):
    """Choose causal attention that needs no compiler."""
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()


def build(ep, *, family=qwen, top_k=TOP_K, dtype="bfloat16", checkpoints=None):
    """A model of four ranks, the same on every call.

    Args:
        checkpoints: torchtitan's name of a kind of activation checkpointing
    """
    sizes = ParallelismConfig(
        data_parallel_shard_degree=dist.get_world_size(), expert_parallel_degree=ep, spmd_backend=BACKEND
    )
    dims = ParallelDims.from_config(sizes, dist.get_world_size())
    dims.build_mesh()
    titan.set_spmd_backend(BACKEND)
    config, parallelize = family(top_k)
    with torch.device("meta"):
        model = config.build()
    model = parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=dtype),
        parallelism=sizes,
        compile_config=CompileConfig(enable=False),
        ac_config=checkpoints and getattr(activation_checkpoint, checkpoints).Config(),
        dump_folder="",
    )
    known_to_gloo(model).to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    return model


def known_to_gloo(model):
    """Let FSDP2 reduce by sums alone; torchtitan divides by nothing."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


@contextlib.contextmanager
def precise_experts():
    """Let torchtitan's experts, which cast to bf16, compute in the dtype they are given."""
    kept = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda tensor: tensor
    yield
    torch.Tensor.bfloat16 = kept


@contextlib.contextmanager
def replayed(model, ids_LTK):
    """Replay without any of ours: every router's choice is replaced, its gates are those of its live scores."""

    def replace(router, args, output, *, ids_TK):
        ids_BLK = ids_TK.view_as(output[1])
        gates_BLK = output[2].gather(-1, ids_BLK)
        if router.route_norm:
            gates_BLK = gates_BLK / (gates_BLK.sum(-1, keepdim=True) + 1e-20)
        return gates_BLK * router.route_scale, ids_BLK, output[2]

    routers = [block.moe.router for block in model.layers.values() if block.moe_enabled]
    hooks = [
        router.register_forward_hook(functools.partial(replace, ids_TK=ids_TK))
        for router, ids_TK in zip(routers, ids_LTK, strict=True)
    ]
    yield
    for hook in hooks:
        hook.remove()
