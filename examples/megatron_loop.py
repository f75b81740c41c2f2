"""A small MoE model trained by Megatron-Core on four GPUs; its routes are recorded first, then replayed balanced.

torchrun --nproc-per-node=4 examples/megatron_loop.py
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action
from megatron.core.transformer.transformer_config import TransformerConfig

from equipoise import Cluster
from equipoise.torch import BalancerOptions
from equipoise.torch import megatron as adapter

RANKS, STEPS, MICRO_STEPS, SAMPLES, LENGTH, VOCAB = 4, 2, 2, 2, 16, 64
PLACES, BATCH = torch.arange(LENGTH).expand(SAMPLES, -1), {"micro_batch_size": SAMPLES, "seq_length": LENGTH}
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 8, "moe_ffn_hidden_size": 32}
KINDS = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "normalization": "RMSNorm"}
ROUTING = {"moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_enable_routing_replay": True}
OFF = dict.fromkeys(("add_bias_linear", "gradient_accumulation_fusion", "bias_activation_fusion"), False)


def build() -> tuple[Any, Any]:
    """Return the model in DDP, and its optimizer."""
    config = TransformerConfig(**SIZES, **KINDS, **ROUTING, **OFF, expert_model_parallel_size=RANKS)
    layers = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    gpt = GPTModel(config, layers, VOCAB, LENGTH, position_embedding_type="rope").cuda()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, use_distributed_optimizer=True), [model])
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    return model, optimizer


def run(model: Any, texts: list[Any], *, routes: Any = None) -> list[list[Any]]:
    """Replay routes in all micro-steps; without routes, only record them and return them by micro-step and layer."""
    recorded: list[Any] = []

    def forward_step(data: Any, chunk: Any) -> tuple[Any, Any]:
        micro_step, text = next(data)
        if routes is not None:
            RouterReplay.set_replay_data(routes[micro_step])
        loss = chunk(text[:, :-1], PLACES.cuda(), None, labels=text[:, 1:]).mean()
        recorded.append(RouterReplay.get_recorded_data())
        return loss, lambda loss: (loss, {})

    RouterReplay.set_global_router_replay_action(Action.RECORD if routes is None else Action.REPLAY_FORWARD)
    given = {"data_iterator": enumerate(texts), "num_microbatches": len(texts), "forward_only": routes is None}
    get_forward_backward_func()(forward_step_func=forward_step, model=model, **given, **BATCH)
    return recorded


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl")  # plans and counts are exchanged between CPUs
    torch.cuda.set_device(dist.get_rank())
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    model, optimizer = build()
    options = BalancerOptions(slots=1, objective="skew")  # level rows at any price; by default seconds are weighed
    handle = adapter.install([model], cluster=Cluster.preset("h200", nodes=1, ranks_per_node=RANKS), options=options)
    for step in range(STEPS):
        texts = [torch.randint(VOCAB, (SAMPLES, LENGTH + 1)).cuda() for _ in range(MICRO_STEPS)]
        routes = run(model, texts)  # in RL the rollout engine has recorded them
        model.zero_grad_buffer()
        optimizer.zero_grad()
        with handle.window(routes):
            run(model, texts, routes=routes)
        optimizer.step()
        done = handle.balancer.report
        if dist.get_rank() == 0:
            print(f"step {step}: {done.displaced} experts displaced, {done.replicas} replicas; {done.is_as_planned=}")
    adapter.uninstall(handle)
