"""What ranks do in the tests of sharded transformers models. Imports no planner: training processes must not."""

import contextlib
import functools
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from equipoise import Cluster
from equipoise.adapters import transformers_sharded as adapter
from equipoise.adapters.transformers_routers import wrap_routers
from equipoise.core.options import BalancerOptions
from tests.adapters.tiny import VOCAB, build
from tests.adapters.windowed import made_routes, objects, refusal, run_example
from tests.pool import kept_worker

RANKS, STEPS, SAMPLES, TOKENS = 4, 3, 2, 12
logging.disable_progress_bar()


@contextlib.contextmanager
def stable_sorts():
    """Let transformers keep the order of an expert's tokens: torch leaves it open, and sums depend on it."""
    argsort = torch.argsort
    torch.argsort = functools.partial(argsort, stable=True)
    yield
    torch.argsort = argsort


def save(group, folder, family, **figures):
    """Write the whole model, which the first rank alone has."""
    if group.rank() == 0:
        build(family, **figures).save_pretrained(folder)
    dist.barrier(group)


def load(folder, ep, dtype=torch.float32, **sizes):
    """The model as transformers shards it: this rank reads its part."""
    config = DistributedConfig(**{"fsdp_size": RANKS, "ep_size": ep, **sizes})
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=config, **implementations)


def loss_of(model, *, step, micro_step=0):
    make = torch.Generator().manual_seed(1000 * step + 10 * micro_step + dist.get_rank())
    tokens = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=make)
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())


def train(model, *, micro_steps, install=None):
    """Losses, gradients of the first step, weights after the last one, and how much moved, of this rank."""
    shape = adapter.inspect(model).shape
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    handle = install(model) if install else None
    routers = wrap_routers(model) if handle is None else handle.routers
    losses, grads, moved = [], {}, [0, 0]
    for step in range(STEPS):
        routes = made_routes(shape, step=step, micro_steps=micro_steps, tokens=SAMPLES * TOKENS)
        with contextlib.nullcontext() if handle is None else handle.window(list(routes)):
            for m in range(micro_steps):
                with routers.forward_pass(m, ids=routes[m]):
                    loss = loss_of(model, step=step, micro_step=m)
                loss.backward()
                losses.append(loss.item())
        if handle is not None:
            report = handle.balancer.report
            moved = [moved[0] + report.displaced, moved[1] + report.replicas]
        trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
        grads = grads or {name: p.grad.to_local().clone() for name, p in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
    rows = routers.counters.rows
    routers.unwrap() if handle is None else adapter.uninstall(model)
    weights = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "grads": grads, "weights": weights, "moved": moved, "rows": rows}


def installer(ep, *, slots):
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=ep)
    options = BalancerOptions(slots=slots, objective="skew")
    return lambda model: adapter.install(model, cluster=cluster, options=options, worker=kept_worker())


def parity(group, folder, family, ep, micro_steps):
    """The unbalanced model, placement alone, replicas with gradient checkpointing, and float64, of one checkpoint."""
    save(group, folder, family, num_experts_per_tok=2)
    with stable_sorts():
        legs = {"plain": train(load(folder, ep), micro_steps=micro_steps)}
    legs["exact"] = train(load(folder, ep, torch.float64), micro_steps=micro_steps)
    legs["placed"] = train(load(folder, ep), micro_steps=micro_steps, install=installer(ep, slots=0))
    model = load(folder, ep)
    model.gradient_checkpointing_enable()
    model.train()
    legs["replicated"] = train(model, micro_steps=micro_steps, install=installer(ep, slots=1))
    return legs


def half_frozen(group, folder):
    """A model whose experts train only their second product, without a balancer and with one."""
    save(group, folder, "qwen3_moe", num_experts_per_tok=2)
    legs = []
    for install in (None, installer(RANKS, slots=0)):
        model = load(folder, RANKS)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("gate_up_proj"))
        with stable_sorts():
            legs.append(train(model, micro_steps=1, install=install))
    return legs


def adapted(model):
    """Put a module with an adapter in place of the experts of the first layer, as peft does; return them."""
    experts = model.model.layers[0].mlp.experts
    wrapper = nn.Module()
    wrapper.base_layer, wrapper.lora_A = experts, nn.Linear(2, 2)
    model.model.layers[0].mlp.experts = wrapper
    return experts


def life(group, folder):
    """What stays as it was: objects, the model outside windows, and after a window that was left with an error."""
    save(group, folder, "qwen3_moe")
    model = load(folder, 4)
    with torch.no_grad():
        before = loss_of(model, step=0).item()
    kept = objects(model)
    handle = installer(4, slots=1)(model)
    with torch.no_grad():
        outside = loss_of(model, step=0).item()
    refused = [refusal(lambda: installer(4, slots=1)(model)), refusal(lambda: handle.micro_step(0).__enter__())]
    handle.routers._current = None
    experts = adapted(model)
    refused.append(refusal(handle.begin))
    model.model.layers[0].mlp.experts = experts
    routes = list(made_routes(handle.found.shape, step=0, micro_steps=1, tokens=SAMPLES * TOKENS))
    extra = handle.extra_bytes
    try:
        with handle.window(routes):
            raise ValueError("an error of the loss")
    except ValueError as error:
        refused.append(str(error))
    refused.append(refusal(handle.begin))
    adapter.uninstall(model)
    refused.append(refusal(lambda: adapter.uninstall(model)))
    with torch.no_grad():
        after = loss_of(model, step=0).item()
    return {
        "losses": (before, outside, after),
        "same": objects(model) == kept,
        "refused": refused,
        "extra": dict(extra),
        "experts": sum(p.to_local().nbytes for name, p in model.named_parameters() if ".experts." in name),
    }


def refused(group, folder):
    """The words of every refusal, by what was asked for; nothing has changed after each."""
    save(group, folder, "qwen3_moe")
    model = load(folder, 4)
    kept, words = objects(model), {}
    sizes = model.config.distributed_config
    for name, value in (("tp_size", 2), ("pp_size", 2), ("fsdp_mixed_precision", True), ("fsdp_cpu_offload", True)):
        model.config.distributed_config = SimpleNamespace(**{**vars(sizes), name: value})
        words[name] = refusal(lambda: installer(4, slots=1)(model))
    model.config.distributed_config = None
    words["whole"] = refusal(lambda: installer(4, slots=1)(model))
    model.config.distributed_config = sizes
    words["cluster"] = refusal(lambda: installer(2, slots=1)(model))
    experts = model.model.layers[0].mlp.experts
    forward = experts.forward
    if group.rank() == 1:
        # One rank's patch is refused by all.
        experts.forward = lambda *args: forward(*args)
    words["patched"] = refusal(lambda: installer(4, slots=1)(model))
    experts.forward = forward
    adapted(model)
    words["lora"] = refusal(lambda: installer(4, slots=1)(model))
    model.model.layers[0].mlp.experts = experts
    return words, objects(model) == kept


def example(group):
    """Run the example on this rank; return what it prints."""
    with patch.object(adapter, "install", functools.partial(adapter.install, worker=kept_worker())):
        return run_example(group, "transformers_sharded.py")
