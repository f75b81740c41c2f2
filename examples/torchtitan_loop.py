"""A small Qwen3-MoE sharded by torchtitan on four GPUs; its routes are recorded first, then replayed balanced.

torchrun --nproc-per-node=4 examples/torchtitan_loop.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.qwen3 import parallelize_qwen3, qwen3_configs
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.tools.utils import device_type

from equipoise import Cluster
from equipoise.torch import BalancerOptions
from equipoise.torch import torchtitan as adapter

RANKS, STEPS, MICRO_STEPS, SAMPLES, LENGTH, VOCAB = 4, 2, 2, 2, 16, 64


def build() -> Any:
    """Return the model as torchtitan shards it. In torchtitan's own trainer this is done already."""
    sizes = ParallelismConfig(
        data_parallel_shard_degree=RANKS, expert_parallel_degree=RANKS, spmd_backend="partial_dtensor"
    )
    set_spmd_backend(sizes.spmd_backend)
    dims = ParallelDims.from_config(sizes, RANKS)
    dims.build_mesh()
    config = qwen3_configs["debugmodel_moe"](attn_backend="flex", moe_comm_backend="standard")
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=True)
    with torch.device("meta"):
        model = config.build()
    settings = {"training": TrainingConfig(), "parallelism": sizes, "compile_config": CompileConfig(enable=False)}
    model = parallelize_qwen3(model, parallel_dims=dims, **settings, ac_config=None, dump_folder="")
    model.to_empty(device=device_type)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def loss_of(model: Any, text: Any) -> Any:
    places = torch.arange(LENGTH, device=device_type).expand(SAMPLES, -1)
    logits = model(text[:, :-1], places, model.get_attention_masks(places))
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl")  # plans and counts are exchanged between CPUs
    torch.cuda.set_device(dist.get_rank())
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    options = BalancerOptions(slots=1, objective="skew")  # level rows at any price; by default seconds are weighed
    handle = adapter.install(model, cluster=Cluster.preset("h200", nodes=1, ranks_per_node=RANKS), options=options)
    for step in range(STEPS):
        texts = [torch.randint(VOCAB, (SAMPLES, LENGTH + 1)).to(device_type) for _ in range(MICRO_STEPS)]
        routes = []
        for text in texts:  # in RL the rollout engine has recorded them
            with torch.no_grad(), handle.routers.record() as recorded:
                loss_of(model, text)
            routes.append(recorded.ids_LTK)
        with handle.window(routes):
            for m, text in enumerate(texts):
                with handle.micro_step(m, ids=routes[m]):
                    loss = loss_of(model, text)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done, rows = handle.balancer.report, handle.counters
        if dist.get_rank() == 0:
            moved = f"{done.displaced} experts displaced, {done.replicas} replicas"
            print(f"step {step}: {moved}; {rows.used_rows} of {rows.given_rows} rows replayed")
    adapter.uninstall(model)
