"""What ranks do in the tests of the torchtitan adapter. Imports no planner: training processes must not."""

import contextlib
import functools
import io
import runpy
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torchtitan
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torchtitan.models import gpt_oss, qwen3
from torchtitan.models.common import Decoder, token_dispatcher

from equipoise import Cluster
from equipoise.adapters import torchtitan as adapter
from equipoise.core.options import BalancerOptions
from tests.adapters import titan_model
from tests.adapters.titan_model import VOCAB, build, known_to_gloo, precise_experts, replayed
from tests.adapters.windowed import made_routes, objects, refusal
from tests.pool import kept_worker

STEPS, SAMPLES, TOKENS = 2, 2, 12


def loss_of(model, *, step, micro_step=0):
    make = torch.Generator().manual_seed(1000 * step + 10 * micro_step + dist.get_rank())
    tokens = torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=make)
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())


def installer(ep, *, slots):
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=ep)
    options = BalancerOptions(slots=slots, objective="skew")
    return lambda model: adapter.install([model], cluster=cluster, options=options, worker=kept_worker())


def named(path):
    """The name of a tensor, whether its block is checkpointed or not."""
    return path.replace("_checkpoint_wrapped_module.", "")


def train(model, *, micro_steps, install=None, steps=STEPS):
    """Losses, gradients of the first step, weights after the last one, counts, and how much moved, of this rank."""
    shape = adapter.inspect(model).shape
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    handle = install(model) if install else None
    losses, grads, moved = [], {}, [0, 0]
    for step in range(steps):
        routes = made_routes(shape, step=step, micro_steps=micro_steps, tokens=SAMPLES * TOKENS)
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
        for wanted in model.parameters():
            got = wanted.grad
            assert (got.placements, got.device_mesh, got.shape) == (wanted.placements, wanted.device_mesh, wanted.shape)
        grads = grads or {named(name): p.grad.to_local().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    rows = None if handle is None else handle.counters.rows
    if handle is not None:
        adapter.uninstall(model)
    weights = {named(name): p.detach().to_local().clone() for name, p in model.named_parameters()}
    buffers = {named(name): buffer.clone() for name, buffer in model.named_buffers()}
    return {"losses": losses, "grads": grads, "weights": weights, "buffers": buffers, "moved": moved, "rows": rows}


def parity(group, family, ep, micro_steps, top_k, checkpoints):
    """The unmodified model, placement alone, replicas with activation checkpointing, and experts in float32."""
    make = functools.partial(build, ep, family=getattr(titan_model, family), top_k=top_k)
    legs = {"plain": train(make(), micro_steps=micro_steps)}
    legs["placed"] = train(make(), micro_steps=micro_steps, install=installer(ep, slots=0))
    legs["replicated"] = train(make(checkpoints=checkpoints), micro_steps=micro_steps, install=installer(ep, slots=1))
    with precise_experts():
        legs["exact"] = train(make(dtype="float32"), micro_steps=micro_steps, steps=1)
    return legs


def life(group):
    """What stays as it was: objects, the model outside windows, and after a window that was left with an error."""
    model = build(4)

    def loss():
        with torch.no_grad():
            return loss_of(model, step=0).item()

    losses, kept = [loss()], objects(model)
    handle = installer(4, slots=1)(model)
    losses.append(loss())
    refused = [refusal(lambda: installer(4, slots=1)(model))]
    routes = list(made_routes(handle.found.shape, step=0, micro_steps=1, tokens=SAMPLES * TOKENS))
    with handle.routers.record() as recorded:
        losses.append(loss())
    # A pass without backward leaves no gradients.
    with handle.window([recorded.ids_LTK], stage="recompute"), handle.micro_step(0, ids=recorded.ids_LTK):
        losses.append(loss())
    extra = dict(handle.extra_bytes)
    try:
        with handle.window(routes):
            refused.append(refusal(loss))
            raise ValueError("an error of the loss")
    except ValueError as error:
        refused.append(str(error))
    refused.append(refusal(handle.begin))
    adapter.uninstall(model)
    refused.append(refusal(lambda: adapter.uninstall(model)))
    losses.append(loss())
    return {
        "losses": losses,
        "same": objects(model) == kept,
        "no gradients": all(parameter.grad is None for parameter in model.parameters()),
        "refused": refused,
        "extra": extra,
        "experts": sum(p.numel() for name, p in model.named_parameters() if "inner_experts" in name) // 4,
    }


@contextlib.contextmanager
def changed(owner, name, value):
    """Set an attribute for a moment."""
    had, kept = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    yield
    if had or name == "__class__":
        setattr(owner, name, kept)
    else:
        delattr(owner, name)


def refused(group):
    """The words of every refusal, by what was asked for; nothing has changed after each."""
    model = build(4)
    kept, moe = objects(model), model.layers["0"].moe
    routed, block = moe.routed_experts, model.layers["1"]
    experts, dispatcher = routed.inner_experts, routed.token_dispatcher

    def asked():
        return refusal(lambda: installer(4, slots=1)(model))

    words = {}
    for name in ("DeepEP", "HybridEP", "MinimalAsyncEP", "TorchAO", "Local"):
        other = object.__new__(getattr(token_dispatcher, f"{name}TokenDispatcher"))
        with changed(routed, "token_dispatcher", other):
            words[name] = asked()
    for kind in (gpt_oss.moe.GptOssGroupedExperts, type("MXFP8GroupedExperts", (type(experts),), {})):
        with changed(experts, "__class__", kind):
            words[kind.__name__] = asked()
    with changed(dispatcher, "ep_mesh", None):
        words["no EP"] = asked()
    with changed(moe.router, "_debug_force_load_balance", True):
        words["round robin"] = asked()
    with changed(block, "_compiled_call_impl", block.forward):
        words["compiled"] = asked()
    experts.w2_EDF.requires_grad_(False)
    words["half frozen"] = asked()
    experts.w2_EDF.requires_grad_(True)
    with changed(torchtitan, "__version__", "0.4.0"):
        words["version"] = asked()
    forward = experts.forward
    with changed(experts, "forward", (lambda *args: forward(*args)) if group.rank() == 1 else forward):
        words["patched"] = asked()
    with changed(block._get_fsdp_state(), "_mp_policy", MixedPrecisionPolicy()):
        words["float32"] = asked()
    # The tables of a mesh's ranks stay; only what its dimensions are called changes.
    for name, mesh, called in (
        ("sharded otherwise", experts.w1_EFD.device_mesh, ("dp_shard", "ep")),
        ("tensor parallel", moe.router.gate.weight.device_mesh, ("fsdp", "tp")),
    ):
        with changed(mesh, "_mesh_dim_names", called):
            words[name] = asked()
    for divisor in (4.0, 1.0):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(divisor)
        if divisor != 1.0:
            words["divided"] = asked()
    words["cluster"] = refusal(lambda: installer(2, slots=1)(model))
    words["no experts"] = refusal(lambda: adapter.inspect(nn.Linear(1, 1)))
    words["pipeline"] = refusal(lambda: adapter.inspect([model, model]))
    return words, objects(model) == kept


def example(group):
    """Run the whole file as torchrun would, with a smaller model; return what it prints."""
    printed, parallelize = io.StringIO(), qwen3.parallelize_qwen3
    with (
        patch.object(dist, "init_process_group"),
        patch.object(torch.cuda, "set_device"),
        patch.object(Decoder, "get_attention_masks", lambda model, positions: None),
        patch.dict(qwen3.qwen3_configs, debugmodel_moe=lambda **kinds: titan_model.qwen(titan_model.TOP_K)[0]),
        patch.object(qwen3, "parallelize_qwen3", lambda *args, **kwargs: known_to_gloo(parallelize(*args, **kwargs))),
        patch.object(adapter, "install", functools.partial(adapter.install, worker=kept_worker())),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "torchtitan_loop.py"), run_name="__main__")
    return printed.getvalue().splitlines()
