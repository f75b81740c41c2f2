"""What ranks do where DDP or FSDP2 wraps a model with balanced experts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from equipoise.adapters import transformers as adapter
from equipoise.core.errors import EquipoiseError
from tests.adapters.tiny import build
from tests.adapters.work import loss_of, make_balancer, other_routes, tokens_of
from tests.pool import kept_worker

WINDOWS, RATE = 2, 0.1


def shard(model, group, *, ignored=None):
    """FSDP2 on every decoder layer and on the model; gloo adds, and cannot average."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, ignored_params=ignored)
        module.set_force_sum_reduction_for_comms(True)
    return model


def wrap(how, model, group, handle):
    if how == "ddp":
        return DDP(model, process_group=group)
    return shard(model, group, ignored=set(handle.expert_parameters.values()))


def averaged_training(group):
    """Weights of the whole model trained on all ranks' tokens, gradients averaged as DDP does it, and its losses."""
    model, losses = build("qwen3_moe"), []
    routes, routers = other_routes(model, group.rank()), adapter.wrap_routers(model)
    for _ in range(WINDOWS):
        model.zero_grad()
        for m, ids in enumerate(routes):
            with routers.replay(ids):
                loss = loss_of(model(input_ids=tokens_of(group.rank(), m), use_cache=False).logits)
            loss.backward()
            losses.append(float(loss))
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter -= RATE * parameter.grad / group.size()
    routers.unwrap()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, losses


def wrapped_training(group, how, folder):
    """The same under a balancer and a wrapper, with the moves of its windows; saved and loaded on the way."""
    model, losses = build("qwen3_moe"), []
    routes = other_routes(model, group.rank())
    with make_balancer(model, group) as balancer:
        handle = adapter.install(model, balancer, worker=kept_worker())
        net = wrap(how, model, group, handle)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
        for _ in range(WINDOWS):
            optimizer.zero_grad()
            with balancer.window(routes):
                for m, ids in enumerate(routes):
                    with handle.micro_step(m, ids=ids):
                        logits = net(input_ids=tokens_of(group.rank(), m), use_cache=False).logits
                    loss = loss_of(logits)
                    loss.backward()
                    losses.append(float(loss.detach()))
            optimizer.step()
        state = {name: tensor.clone() for name, tensor in handle.state_dict().items()}
        handle.load_state_dict({name: tensor + 1 for name, tensor in state.items()})
        loaded = handle.state_dict()
        is_loaded = all(torch.equal(loaded[name], tensor + 1) for name, tensor in state.items())
        model.save_pretrained(folder)
        adapter.uninstall(model)
    return state, losses, is_loaded, (balancer.report.displaced, balancer.report.replicas)


class Policy(nn.Module):
    """A module of the user's around the model: names inside it are not those of the model."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, **inputs):
        return self.net(**inputs)


def ddp_around_a_wrapper(model, group, install):
    install()
    return DDP(Policy(model), process_group=group)


def ddp_before_install(model, group, install):
    net = DDP(model, process_group=group)
    install()
    return net


def fsdp_with_experts(model, group, install):
    install()
    return shard(model, group)


def lora_on_experts(model, group, install):
    """As peft's target_parameters: its wrapper takes the experts' place."""
    install()
    for layer in model.model.layers:
        wrapper = nn.Module()
        wrapper.base_layer, wrapper.lora_A = layer.mlp.experts, nn.Linear(2, 2)
        wrapper.forward = wrapper.base_layer.forward
        layer.mlp.experts = wrapper
    return model


def refused_wrapper(group, wrong):
    """What a rank says in the first window of a model that was wrapped wrongly."""
    model = build("mixtral")
    routes = other_routes(model, group.rank())
    with make_balancer(model, group, nodes=1) as balancer:
        kept = []

        def install():
            kept.append(adapter.install(model, balancer, worker=kept_worker()))

        net = globals()[wrong](model, group, install)
        try:
            with balancer.window(routes), kept[0].micro_step(0, ids=routes[0]):
                net(input_ids=tokens_of(group.rank(), 0), use_cache=False)
        except EquipoiseError as error:
            return str(error)
    return "not refused"


class LowRank(nn.Module):
    """What peft puts in a product's place: the product, and a small one beside it that trains."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        make = torch.Generator().manual_seed(7)
        for name, shape in (("lora_A", (4, base_layer.in_features)), ("lora_B", (base_layer.out_features, 4))):
            module = nn.Linear(shape[1], shape[0], bias=False)
            module.weight.data = 0.2 * torch.randn(shape, generator=make)
            self.add_module(name, module)

    def forward(self, hidden):
        return self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))


def adapted(frozen):
    """A model of which adapters beside attention train and, of the experts, what is not frozen."""
    model = build("mixtral")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name and not name.endswith(frozen))
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    return model


def plain_adapters(group, frozen):
    """Losses and gradients of the whole model, averaged over the ranks, by name."""
    model, losses = adapted(frozen), []
    routes, routers = other_routes(model, group.rank()), adapter.wrap_routers(model)
    for m, ids in enumerate(routes):
        with routers.replay(ids):
            loss = loss_of(model(input_ids=tokens_of(group.rank(), m), use_cache=False).logits)
        loss.backward()
        losses.append(float(loss))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in grads.values():
        dist.all_reduce(gradient, group=group)
    return losses, {name: gradient / group.size() for name, gradient in grads.items()}


def balanced_adapters(group, how, frozen):
    """The same under a balancer and a wrapper."""
    model, losses = adapted(frozen), []
    routes = other_routes(model, group.rank())
    with make_balancer(model, group, nodes=1) as balancer:
        handle = adapter.install(model, balancer, worker=kept_worker())
        net = wrap(how, model, group, handle)
        with balancer.window(routes):
            for m, ids in enumerate(routes):
                with handle.micro_step(m, ids=ids):
                    loss = loss_of(net(input_ids=tokens_of(group.rank(), m), use_cache=False).logits)
                loss.backward()
                losses.append(float(loss))
        experts, grads = handle.expert_parameters, {}
        for name, p in model.named_parameters():
            if p.grad is not None:
                grads[name] = handle.full(name, p.grad) if name in experts else adapter.whole(p.grad)
        moved = (balancer.report.displaced, balancer.report.replicas)
        adapter.uninstall(model)
    return losses, grads, moved
