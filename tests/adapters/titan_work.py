"""What ranks do in the tests of the torchtitan adapter. Imports no planner: training processes must not."""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn

from equipoise import Cluster
from equipoise.adapters import torchtitan as adapter
from equipoise.core.options import BalancerOptions
from equipoise.planning.worker import PlanWorker
from tests.adapters import titan_model
from tests.adapters.titan_model import EXPERTS, VOCAB, build, precise_experts, replayed

STEPS, SAMPLES, TOKENS = 3, 2, 12


@functools.cache
def kept_worker():
    """One planning process for all tests of this rank; it ends with the rank."""
    return PlanWorker()


def made_routes(shape, *, step, micro_steps):
    """[micro-step] ids [L, T, K] of this rank, most of them of the first experts."""
    make = torch.Generator().manual_seed(100 * step + dist.get_rank())
    size = (micro_steps, shape.layers, SAMPLES * TOKENS, EXPERTS)
    return (torch.rand(size, generator=make) - torch.linspace(0.0, 2.0, EXPERTS)).topk(shape.top_k, dim=-1).indices


def loss_of(model, *, step, micro_step=0):
    make = torch.Generator().manual_seed(1000 * step + 10 * micro_step + dist.get_rank())
    tokens = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=make)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())


def installer(ep, *, slots):
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=ep)
    options = BalancerOptions(slots=slots, objective="skew")
    return lambda model: adapter.install([model], cluster=cluster, options=options, worker=kept_worker())


def train(model, *, micro_steps, install=None):
    """Losses, gradients of the first step, weights after the last one, counts, and how much moved, of this rank."""
    shape = adapter.inspect(model).shape
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    handle = install(model) if install else None
    losses, grads, moved = [], {}, [0, 0]
    for step in range(STEPS):
        routes = made_routes(shape, step=step, micro_steps=micro_steps)
        with contextlib.nullcontext() if handle is None else handle.window(list(routes)):
            for m in range(micro_steps):
                with replayed(model, routes[m]) if handle is None else handle.micro_step(m, ids=routes[m]):
                    loss = loss_of(model, step=step, micro_step=m)
                    # torchtitan's checkpointed blocks ask their routers again.
                    if handle is None:
                        loss.backward()
                if handle is not None:
                    loss.backward()
                losses.append(loss.item())
        if handle is not None:
            report = handle.balancer.report
            moved = [moved[0] + report.displaced, moved[1] + report.replicas]
        grads = grads or {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    rows = None if handle is None else handle.counters.rows
    if handle is not None:
        adapter.uninstall(model)
    weights = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    counts = {name: b.clone() for name, b in model.named_buffers() if "expert" in name}
    return {"losses": losses, "grads": grads, "weights": weights, "counts": counts, "moved": moved, "rows": rows}


def parity(group, family, ep, micro_steps):
    """The unmodified model, placement alone, replicas with activation checkpointing, and experts in float32."""
    make = functools.partial(build, ep, family=getattr(titan_model, family))
    legs = {"plain": train(make(), micro_steps=micro_steps)}
    legs["placed"] = train(make(), micro_steps=micro_steps, install=installer(ep, slots=0))
    legs["replicated"] = train(make(checkpointed=True), micro_steps=micro_steps, install=installer(ep, slots=1))
    with precise_experts():
        legs["exact"] = train(make(dtype="float32"), micro_steps=micro_steps)
    return legs
