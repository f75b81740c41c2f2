"""A tiny Qwen3-MoE trained on two local ranks in one's own loop, its routes recorded first and then replayed balanced.

    python examples/transformers_loop.py

Runs on a laptop CPU in a few seconds. Under torchrun, call `train(ep_group)` on every rank instead of `run_ranks`.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from equipoise import Cluster
from equipoise.torch import Balancer, BalancerOptions, run_ranks
from equipoise.torch import transformers as adapter

RANKS, WINDOWS, MICRO_STEPS, VOCAB = 2, 3, 2, 64
FIGURES = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 2}
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


def build() -> nn.Module:
    """The whole model, the same on every rank."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**FIGURES, **SIZES, initializer_range=0.2))


def rollout(copy_of_model: nn.Module, tokens: list[Tensor]) -> list[Tensor]:
    """Stand-in for a rollout engine: a whole copy of the model says which experts every token uses."""
    routes = []
    for batch in tokens:
        with torch.no_grad(), adapter.record(copy_of_model) as recorded:
            copy_of_model(input_ids=batch, use_cache=False)
        routes.append(recorded.ids_LTK)
    return routes


def train(group: Any) -> list[str]:
    """Train on one rank, and say what each window did."""
    model, lines = build(), []
    engine = copy.deepcopy(model)
    torch.manual_seed(1 + group.rank())  # every rank has tokens of its own
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=RANKS)
    # "skew" levels rows whatever it costs; real training keeps the default, which weighs seconds.
    options = BalancerOptions(slots=1, objective="skew")
    shape = adapter.inspect(model).shape
    with Balancer(cluster=cluster, model=shape, group=group, options=options) as balancer:
        handle = adapter.install(model, balancer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(WINDOWS):
            tokens = [torch.randint(0, VOCAB // 4, (4, 16)) for _ in range(MICRO_STEPS)]
            routes = rollout(engine, tokens)
            with balancer.window(routes):
                for m, batch in enumerate(tokens):
                    with handle.micro_step(m, ids=routes[m]):
                        logits = model(input_ids=batch, use_cache=False).logits
                    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
            for name, parameter in model.named_parameters():
                if name not in handle.expert_parameters:  # an owner's gradients are those of all ranks already
                    dist.all_reduce(parameter.grad, group=group)
            optimizer.step()
            optimizer.zero_grad()
            engine.load_state_dict(handle.state_dict())  # weight sync: the whole model, in canonical order
            done, rows = balancer.report, handle.counters
            lines.append(
                f"window {number}: {done.displaced} experts displaced, {done.replicas} replicas pulled, "
                f"{rows.used_rows} of {rows.given_rows} rows replayed so far"
            )
        adapter.uninstall(model)
    return lines


if __name__ == "__main__":
    print(*run_ranks(train, RANKS)[0], sep="\n")
