"""A tiny Qwen3-MoE that transformers itself has sharded over four local ranks, with balanced experts.

    python examples/transformers_sharded.py

Needs transformers 5.20 or newer and accelerate, and runs on a laptop CPU. Under torchrun, call `train` on every rank.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from equipoise import Cluster
from equipoise.torch import BalancerOptions, run_ranks
from equipoise.torch import transformers_sharded as adapter

RANKS, WINDOWS, MICRO_STEPS, VOCAB = 4, 3, 2, 64
FIGURES = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 2}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


def load(group: Any) -> nn.Module:
    """Stand-in for a checkpoint of one's own; every rank reads its part of it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [folder]
        dist.broadcast_object_list(paths, group=group)
        if group.rank() == 0:
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**FIGURES, **SIZES, initializer_range=0.2)).save_pretrained(folder)
        dist.barrier(group)
        model = AutoModelForCausalLM.from_pretrained(
            paths[0], distributed_config=DistributedConfig(fsdp_size=RANKS, ep_size=RANKS)
        )
        dist.barrier(group)
    return model


def train(group: Any) -> list[str]:
    """Train on one rank, and say what each window did."""
    model, lines = load(group), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    torch.manual_seed(1 + group.rank())  # every rank has tokens of its own
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=RANKS)
    # "skew" levels rows whatever it costs; real training keeps the default, which weighs seconds.
    handle = adapter.install(model, cluster=cluster, options=BalancerOptions(slots=1, objective="skew"))
    for number in range(WINDOWS):
        tokens = [torch.randint(0, VOCAB // 4, (4, 16)) for _ in range(MICRO_STEPS)]
        # Stand-in for a rollout engine's routes: between windows the model is as transformers made it.
        routes = []
        for batch in tokens:
            with torch.no_grad(), handle.routers.record() as recorded:
                model(input_ids=batch, use_cache=False)
            routes.append(recorded.ids_LTK)
        with handle.window(routes):
            for m, batch in enumerate(tokens):
                with handle.micro_step(m, ids=routes[m]):
                    logits = model(input_ids=batch, use_cache=False).logits
                nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()  # gradients are where transformers leaves them: sharded, averaged over batches
        optimizer.zero_grad()
        done, rows = handle.balancer.report, handle.counters
        lines.append(
            f"window {number}: {done.displaced} experts displaced, {done.replicas} replicas pulled, "
            f"{rows.used_rows} of {rows.given_rows} rows replayed so far"
        )
    adapter.uninstall(model)
    return lines


if __name__ == "__main__":
    print(*run_ranks(train, RANKS)[0], sep="\n")
