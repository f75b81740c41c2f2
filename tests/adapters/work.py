"""What ranks do in the adapter's tests. Imports no planner: training processes must not."""

import contextlib
import functools
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from equipoise import Cluster
from equipoise.adapters import transformers as adapter
from equipoise.balancer import Balancer, BalancerOptions
from equipoise.core.errors import EquipoiseError
from tests.adapters.tiny import VOCAB, build
from tests.pool import kept_worker

MICRO_STEPS, SAMPLES, TOKENS = 2, 2, 12


@dataclass
class Leg:
    """What one way of training gave on one rank; gradients are those of the whole model, summed over ranks."""

    logits: list = field(default_factory=list)
    input_grads: list = field(default_factory=list)
    grads: dict = field(default_factory=dict)
    moved: tuple = (0, 0)
    rows: tuple = ()


def tokens_of(rank, micro_step):
    return torch.randint(0, VOCAB, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(100 * rank + micro_step))


def recorded_routes(model, rank, *, micro_steps=MICRO_STEPS):
    """[micro-step] ids_LTK that the whole model chooses for this rank's tokens."""
    routes = []
    for micro_step in range(micro_steps):
        with torch.no_grad(), adapter.record(model) as recorded:
            model(input_ids=tokens_of(rank, micro_step), use_cache=False)
        routes.append(recorded.ids_LTK)
    return routes


def other_routes(model, rank):
    """Routes that the model would not choose: ids shifted by one, crowded onto the first experts."""
    experts = adapter.inspect(model).shape.experts
    return [(ids_LTK // 2 * 2 + 1) % experts for ids_LTK in recorded_routes(model, rank)]


def make_balancer(model, group, *, slots=1, nodes=2, enabled=True, **figures):
    cluster = Cluster.preset("h200", nodes=nodes, ranks_per_node=group.size() // nodes)
    options = BalancerOptions(slots=slots, objective="skew", timeout_s=60.0, planning_timeout_s=180.0, **figures)
    shape = adapter.inspect(model).shape
    return Balancer(cluster=cluster, model=shape, group=group, options=options, enabled=enabled)


def forward(model, rank, micro_step):
    """Embeddings, whose gradients are kept, and the logits."""
    inputs = model.get_input_embeddings()(tokens_of(rank, micro_step))
    if inputs.requires_grad:
        inputs.retain_grad()
    return inputs, model(inputs_embeds=inputs, use_cache=False).logits


def loss_of(logits):
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    return (logits * direction).mean() + logits.square().mean()


def run_micro_steps(model, rank, turns, leg, *, in_flight=1):
    """Forward and backward over all micro-steps; `in_flight` forwards come before the first backward."""
    passes = []

    def backward(inputs, logits):
        loss_of(logits).backward()
        leg.logits.append(logits.detach())
        leg.input_grads.append(inputs.grad)

    for micro_step, turn in enumerate(turns):
        with turn:
            passes.append(forward(model, rank, micro_step))
        if len(passes) == in_flight:
            backward(*passes.pop(0))
    for one in passes:
        backward(*one)


def off_leg(group, model, routes=None):
    """Plain data parallel: all experts on every rank, transformers' own eager experts."""
    leg, routers = Leg(), adapter.wrap_routers(model)
    turns = [contextlib.nullcontext()] * MICRO_STEPS if routes is None else [routers.replay(ids) for ids in routes]
    run_micro_steps(model, group.rank(), turns, leg)
    routers.unwrap()
    leg.grads = {name: summed(p.grad, group) for name, p in model.named_parameters()}
    model.zero_grad()
    return leg


def balanced_leg(group, model, routes, *, in_flight=1, **figures):
    """The same under a balancer; leaves the model uninstalled."""
    leg, balancer = Leg(), make_balancer(model, group, **figures)
    with balancer:
        handle = adapter.install(model, balancer, worker=kept_worker())
        with balancer.window(routes):
            turns = [handle.micro_step(m, ids=ids) for m, ids in enumerate(routes)]
            run_micro_steps(model, group.rank(), turns, leg, in_flight=in_flight)
        experts = handle.expert_parameters
        for name, p in model.named_parameters():
            leg.grads[name] = handle.full(name, p.grad) if name in experts else summed(p.grad, group)
        leg.moved = (balancer.report.displaced, balancer.report.replicas)
        leg.rows = (handle.counters.given_rows, handle.counters.used_rows, handle.counters.differing_rows)
        adapter.uninstall(model)
    model.zero_grad()
    return leg


def summed(grad, group):
    """The sum over ranks, added in rank order: gloo's own sum does not always have the same bits."""
    parts = [torch.empty_like(grad) for _ in range(group.size())]
    dist.all_gather(parts, grad, group=group)
    return functools.reduce(torch.add, parts)


def train_every_way(group, family):
    """off, static, displaced and planned, on the routes the model chooses and on foreign ones."""
    model = build(family)
    routes = recorded_routes(model, group.rank())
    legs = {"off": off_leg(group, model)}
    legs["static"] = balanced_leg(group, model, routes, enabled=False)
    legs["displaced"] = balanced_leg(group, model, routes, slots=0)
    legs["planned"] = balanced_leg(group, model, routes, slots=1)
    foreign = other_routes(model, group.rank())
    legs["foreign off"] = off_leg(group, model, foreign)
    legs["foreign planned"] = balanced_leg(group, model, foreign, slots=1)
    return legs


def train_checkpointed(group, family):
    """Plain, then under both kinds of gradient checkpointing, two micro-steps in flight, 1 slot."""
    model = build(family).train()
    routes = other_routes(model, group.rank())
    legs = {"plain": balanced_leg(group, model, routes)}
    for name, use_reentrant in (("reentrant", True), ("non-reentrant", False)):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        legs[name] = balanced_leg(group, model, routes, in_flight=2, order="plain")
    return legs


def footprint(model):
    """Everything uninstall must bring back: objects, bytes, hooks, attributes, configuration."""
    seen = {}
    for path, module in model.named_modules():
        hooks = {name: list(getattr(module, name)) for name in vars(module) if name.endswith("hooks")}
        seen[path] = (id(module), sorted(vars(module)), hooks, id(vars(module).get("config")), type(module).forward)
    objects = {name: (id(p), p.requires_grad, tuple(p.shape)) for name, p in model.named_parameters()}
    state = {name: (t.dtype, t.numpy().tobytes()) for name, t in model.state_dict().items()}
    return seen, objects, list(state), state, model.config.to_dict(), model.config._experts_implementation


def install_and_uninstall(group, family, folder):
    """Footprints before and after, and what a plain and an installed model write."""
    model = build(family)
    # First, because transformers notes architecture and dtype in the configuration when it saves.
    model.save_pretrained(Path(folder) / f"plain{group.rank()}")
    before, other = footprint(model), type(model)(model.config)
    full = [p for path, p in model.named_parameters() if ".experts." in path]
    other.load_state_dict(model.state_dict())
    with make_balancer(model, group) as balancer:
        handle = adapter.install(model, balancer, worker=kept_worker())
        shapes = {name: tuple(p.shape) for name, p in handle.expert_parameters.items()}
        assert full and all(p.untyped_storage().nbytes() == 0 for p in full), (
            "what is cut to its owners holds no memory"
        )
        unknown = [torch.full((len(handle.found.layers), SAMPLES * TOKENS, handle.found.shape.top_k), -1)]
        with torch.no_grad(), balancer.window(unknown, stage="recompute"):
            with handle.micro_step(0, record=True) as recorded:
                model(input_ids=tokens_of(group.rank(), 0), use_cache=False)
            model.save_pretrained(Path(folder) / "installed")
            logits = other(input_ids=tokens_of(group.rank(), 0), use_cache=False).logits
        adapter.uninstall(model)
    after = footprint(model)
    with torch.no_grad(), adapter.record(model) as own:
        expected = model(input_ids=tokens_of(group.rank(), 0), use_cache=False).logits
    same = [a == b for a, b in zip(before, after, strict=True)]
    is_own = torch.equal(recorded.ids_LTK, own.ids_LTK), torch.equal(logits, expected)
    return same, shapes, is_own, files(Path(folder)) if group.rank() == 0 else None


def files(folder):
    """Digest of every file below a folder."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.*")}


def save_in_vain(group, folder):
    """What every rank says when the first one cannot write."""
    if group.rank() == 0:
        (Path(folder) / "file").touch()
    model = build("mixtral")
    with make_balancer(model, group) as balancer:
        adapter.install(model, balancer, worker=kept_worker())
        try:
            model.save_pretrained(Path(folder) / "file" / "model")
        except (EquipoiseError, OSError) as error:
            return type(error).__name__, str(error)
        finally:
            adapter.uninstall(model)
    return "nothing", ""


def load_what_does_not_fit(group):
    """What `load_state_dict` says of a lost name and of a tensor that would broadcast; and whether anything changed."""
    model = build("gpt_oss")
    name, words = "model.layers.1.mlp.experts.down_proj", []
    with make_balancer(model, group, nodes=1) as balancer:
        handle = adapter.install(model, balancer, worker=kept_worker())
        before = handle.state_dict()
        lost = {key: tensor + 1 for key, tensor in before.items() if key != name}
        for state in (lost, lost | {name: before[name][:2]}, lost | {name: before[name].transpose(1, 2)[:, :1]}):
            try:
                handle.load_state_dict(state)
            except EquipoiseError as error:
                words.append(str(error))
        is_same = equal_states(handle.state_dict(), before)
        adapter.uninstall(model)
    return words, is_same


def change_inside_a_window(group):
    """What is said where weights would be written or taken away inside a window; and whether anything changed."""
    model = build("mixtral")
    routes = recorded_routes(model, group.rank())
    with make_balancer(model, group) as balancer:
        handle = adapter.install(model, balancer, worker=kept_worker())
        before, words = handle.state_dict(), []
        with balancer.window(routes):
            turns = [handle.micro_step(m, ids=ids) for m, ids in enumerate(routes)]
            run_micro_steps(model, group.rank(), turns, Leg())
            load = functools.partial(handle.load_state_dict, before)
            for change in (load, functools.partial(adapter.uninstall, model), handle.stored_state_dict):
                try:
                    change()
                except EquipoiseError as error:
                    words.append(str(error))
        is_same = equal_states(handle.state_dict(), before)
        adapter.uninstall(model)
    return words, is_same


def train_and_load(group, family):
    """Weights after one step: by state dict; by uninstall, by load into a second model, from the host store."""
    model, second = build(family), build(family, seed=1)
    routes = recorded_routes(model, group.rank())
    with make_balancer(model, group) as balancer, make_balancer(second, group) as other:
        handle = adapter.install(model, balancer, worker=kept_worker())
        with balancer.window(routes):
            turns = [handle.micro_step(m, ids=ids) for m, ids in enumerate(routes)]
            run_micro_steps(model, group.rank(), turns, Leg())
        with torch.no_grad():
            for p in handle.expert_parameters.values():
                p -= 0.1 * p.grad
        state = handle.state_dict()
        stored = {name: tensor.clone() for name, tensor in handle.stored_state_dict().items()}
        adapter.install(second, other, worker=kept_worker()).load_state_dict(state)
        adapter.uninstall(model)
        adapter.uninstall(second)
    trained, start = model.state_dict(), build(family).state_dict()
    changed = sorted(name for name in trained if not torch.equal(trained[name], start[name]))
    return changed, [equal_states(x, state) for x in (trained, second.state_dict(), stored)]


def equal_states(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def refusals(group, spoil):
    """What install says, and whether the model is as it was; `spoil` names what is wrong."""
    model = build("qwen3_moe", **({"num_experts": 6} if spoil == "experts" else {}))
    balancer = make_balancer(model if spoil != "shape" else build("qwen3_moe", num_experts=16), group)
    SPOILS[spoil](model, group.rank())
    before = footprint(model)
    try:
        adapter.install(model, balancer, worker=kept_worker())
    except EquipoiseError as error:
        return str(error), footprint(model) == before
    return "not refused", False


def nothing(model, rank):
    """The trouble is elsewhere."""


def hook(model, rank):
    model.model.layers[0].mlp.experts.register_forward_hook(lambda *_: None)


def hook_on_one_rank(model, rank):
    if rank == 1:
        hook(model, rank)


def gradient(model, rank):
    parameter = model.model.layers[0].mlp.experts.down_proj
    parameter.grad = torch.zeros_like(parameter)


def quantize(model, rank):
    model.config.quantization_config = {"quant_method": "fp8"}


def lora(model, rank):
    """peft wraps the module whose parameters are adapted; another kind of its adapters only keeps a copy beside it."""
    block = model.model.layers[0].mlp
    wrapper = torch.nn.Module()
    wrapper.base_layer, wrapper.lora_A = block.experts, torch.nn.Linear(2, 2)
    block.experts = wrapper


def kept_copy(model, rank):
    wrapper = torch.nn.Module()
    wrapper.original_module = model.model.layers[0].mlp.gate
    model.model.layers[0].mlp.gate = wrapper


def another_device(model, rank):
    model.lm_head.to("meta")


def other_gates(model, rank):
    model.model.layers[0].mlp.gate.norm_topk_prob = False
    model.model.layers[0].mlp.gate.top_k = 2
    original = type(model.model.layers[0].mlp.gate).forward

    class Other(type(model.model.layers[0].mlp.gate)):
        def forward(self, hidden):
            logits, gates, ids = original(self, hidden)
            return logits, gates * 2, ids

    model.model.layers[0].mlp.gate.__class__ = Other


def as_dtensor(model, rank):
    experts = model.model.layers[0].mlp.experts
    experts._parameters["down_proj"] = torch.nn.Parameter(experts.down_proj.data.as_subclass(Sharded))


class Sharded(torch.Tensor):
    """Stands for DTensor and every other wrapper of a parameter's memory."""


SPOILS = {
    "experts": nothing,
    "shape": nothing,
    "hook": hook,
    "one rank": hook_on_one_rank,
    "gradient": gradient,
    "quantized": quantize,
    "lora": lora,
    "kept copy": kept_copy,
    "device": another_device,
    "gates": other_gates,
    "dtensor": as_dtensor,
}
