"""The adapter of transformers' own expert parallelism: balance a model that is sharded already.

    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=8, ep_size=8))
    handle = install(model, cluster=cluster, options=BalancerOptions(slots=1))     # no rank ever has the whole model
    with handle.window(routes):                         # routes[m]: ids [L, T, K] that this rank replays
        with handle.micro_step(m, ids=routes[m]):
            loss = model(input_ids=..., use_cache=False).logits ...
        loss.backward()
    optimizer.step()                                    # made before or after install
    uninstall(model)                                    # the model as it was

What `install` changes on this rank, and `uninstall` takes back; no class or function of transformers is patched:
1. Every experts module gets a `forward` of ours. Outside a window it calls that of transformers.
2. Hooks, see `transformers_routers`; while a window is open FSDP2's hooks of experts modules rest, because experts
   compute on a working copy of this rank's weights, gathered once when the window begins.

Parameters, FSDP2's state and the optimizer's stay where they are. When a window ends, FSDP2 is given the gradients of
experts as in a backward pass, so that it reduces, divides and accumulates them as it would without a balancer.

Private names, read in transformers 5.20 to 5.22 and torch 2.13: `EpDispatchExpertsParallel`, whose `install_forward`
sets an experts module's forward; `_mesh_manager`; `FSDPState`, which owns FSDP2's hooks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace as replace_fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from equipoise.adapters import transformers_model
from equipoise.adapters.hooks import CopiedMoE, CopyHandle
from equipoise.adapters.protocol import (
    MicroBatch,
    Recorded,
    ReplayCounters,
    check_group,
    free_tokens,
    routes_from,
    schedule_from,
)
from equipoise.adapters.transformers_model import FAMILIES, Family, Found, adapted_paths, check_router
from equipoise.adapters.transformers_routers import RouterHooks, Routers
from equipoise.adapters.wrappers import ADAPTED, has_adapters
from equipoise.balancer import Balancer
from equipoise.core import Cluster
from equipoise.core.errors import AdapterError
from equipoise.core.options import BalancerOptions
from equipoise.layer.experts import BalancedExperts, LayerOptions
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.node import ExpertWeights
from equipoise.transfer.waits import all_or_none, gather_objects

__all__ = [
    "inspect",
    "install",
    "uninstall",
    "ShardedHandle",
    "routes_from",
    "free_tokens",
    "schedule_from",
    "MicroBatch",
    "Recorded",
    "ReplayCounters",
]

FIRST = (5, 20)
"""First minor version whose `from_pretrained` accepts an EP size of its own; 5.19 asks for ep_size=tp_size."""
STYLE = "ep_dispatch_experts"
"""Name of the style in a model's `ep_plan` that sends tokens to the ranks of their experts."""


class _ShardedExperts(CopiedMoE):
    """One experts module with its sharded parameters, and the balanced experts that compute in windows."""

    def __init__(self, module: Any, family: Family, hooks: RouterHooks, *, index: int, options: LayerOptions) -> None:
        """
        Args:
            hooks: of the decoder layer
            index: of the layer in plans
        """
        self._module, self._family, self._hooks = module, family, hooks
        self._forward = vars(module)["forward"]
        self._resting: list[tuple[dict[int, Any], dict[int, Any]]] = []
        first = module._parameters[family.tensors[0]]
        with self._unsharded() as tensors:
            home = ExpertWeights(*(self._exchanged(tensor).clone() for tensor in tensors))
        self.copy = BalancedExperts(home, layer=index, group=first.device_mesh["ep"].get_group(), options=options)

    def put(self) -> None:
        """Take the place of the module's forward."""
        self._module.forward = self._compute

    def check(self, model: nn.Module, path: str) -> None:
        """Raise if something else than this would compute at the experts' place in the model."""
        there = model.get_submodule(path)
        if has_adapters(there):
            raise AdapterError(f"`{path}` {ADAPTED}")
        if there is not self._module or vars(there).get("forward") != self._compute:
            raise AdapterError(f"`{path}` or its forward was replaced after install; change the model before it")

    def restore(self) -> None:
        """Give the module back its forward."""
        self._module.forward = self._forward

    @torch.no_grad()
    def fill(self) -> None:
        """Copy this rank's experts, as they are now, to the working copy. Every rank must call this."""
        trains = [self._module._parameters[name].requires_grad for name in self._family.tensors]
        with self._unsharded() as tensors:
            for working, tensor, is_trained in zip(self.copy.home.tensors(), tensors, trains, strict=True):
                working.copy_(self._exchanged(tensor))
                working.grad = None
                working.requires_grad_(is_trained)

    def begin(self) -> None:
        """Compute with balanced experts from now on."""
        self._hooks.balanced = self.copy
        # FSDP2 would gather parameters that no one computes with.
        for hooks in (self._module._forward_pre_hooks, self._module._forward_hooks):
            self._resting.append((hooks, dict(hooks)))
            for key, hook in tuple(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), FSDPState):
                    del hooks[key]

    def leave(self) -> None:
        """Compute as transformers does from now on."""
        self._hooks.balanced = self._hooks.current = None
        for hooks, kept in self._resting:
            hooks.clear()
            hooks.update(kept)
        self._resting = []

    def end(self) -> None:
        """Give FSDP2 the window's gradients, complete in the EP group. Every rank must call this.

        FSDP2 reduces them over the ranks that own the same experts, divides them, and adds them to the sharded
        parameters' `grad`, as after any backward: this is one, of a sum whose gradients are the given ones.
        """
        self.leave()
        gradients = [working.grad for working in self.copy.home.tensors()]
        if all(gradient is None for gradient in gradients):
            return  # a pass without backward, or frozen experts
        self._module.forward = lambda: sum(
            (tensor * self._exchanged(gradient)).sum()
            for tensor, gradient in zip(self._tensors(), gradients, strict=True)
            if gradient is not None
        )
        self._module().backward()
        self.put()
        for working in self.copy.home.tensors():
            working.grad = None

    @contextmanager
    def _unsharded(self) -> Iterator[list[Tensor]]:
        """Let FSDP2 gather this EP rank's experts, [E / R, ...]. Every rank must enter."""
        self._module.unshard()
        yield [tensor.detach() for tensor in self._tensors()]
        self._module.reshard()

    def _tensors(self) -> list[Any]:
        return [self._module._parameters[name].to_local() for name in self._family.tensors]

    def _exchanged(self, weights: Any) -> Tensor:
        """Convert from transformers' layout to that of `BalancedExperts`, or back."""
        return weights.transpose(1, 2) if self._family.is_transposed and weights.ndim == 3 else weights

    def _compute(self, hidden_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Take the place of the experts' forward."""
        if self._hooks.balanced is None:
            return self._forward(hidden_TD, ids_TK, gates_TK)
        return self._hooks.compute(hidden_TD, ids_TK, gates_TK)


class ShardedHandle(CopyHandle):
    """A sharded model whose experts are balanced in windows, seen from one rank."""

    KEPT = "_equipoise_sharded"

    def __init__(self, model: nn.Module, found: Found, *, cluster: Cluster, options: BalancerOptions) -> None:
        """Made by `install`."""
        self.found, family = found, FAMILIES[found.family]
        routers = Routers(model, found=found)
        # On CPUs grouped products are a loop over the experts, too.
        products: Any = "grouped" if next(model.parameters()).is_cuda else "loop"
        layer_options = LayerOptions(activation=family.activation, products=products)
        layers = {
            one.experts_path: _ShardedExperts(
                model.get_submodule(one.experts_path), family, hooks, index=at, options=layer_options
            )
            for at, (one, hooks) in enumerate(zip(found.layers, routers.layers, strict=True))
        }
        balancer = Balancer(cluster=cluster, model=found.shape, group=ep_group(model), options=options)
        super().__init__(model, layers, routers=routers, balancer=balancer)


def install(
    model: nn.Module,
    *,
    cluster: Cluster,
    options: BalancerOptions | None = None,
    worker: PlanWorker | None = None,
) -> ShardedHandle:
    """Balance the experts of a sharded model from now on, in windows. Every rank of the model must call this.

    Args:
        model: made by `from_pretrained` with a `DistributedConfig` of fsdp_size and ep_size
        cluster: of one EP group
        worker: a planning process to use, instead of an own one
    """
    # What one rank must refuse, all refuse.
    found = all_or_none(partial(_checked, model, cluster), partial(gather_objects, group=None))[dist.get_rank()]
    handle = ShardedHandle(model, found, cluster=cluster, options=options or BalancerOptions())
    handle.put(worker)
    return handle


def uninstall(model: nn.Module) -> None:
    """Restore the model exactly. Every rank must call this."""
    if ShardedHandle.KEPT not in vars(model):
        raise AdapterError(f"this {type(model).__name__} has no balanced experts; install them first")
    getattr(model, ShardedHandle.KEPT).uninstall()


def inspect(model: nn.Module) -> Found:
    """Find the MoE layers of a sharded model, and say what is unsupported."""
    found = transformers_model.inspect(model)
    reasons = list(_version_reasons())
    if not reasons:
        reasons += _sharding_reasons(model)
    if not reasons:
        reasons = [f"`{path}` {ADAPTED}" for one in found.layers for path in adapted_paths(model, one)]
    if not reasons:
        reasons += [reason for one in found.layers for reason in _experts_reasons(model, one.experts_path, found)]
    return replace_fields(found, unsupported=tuple(reasons))


def ep_group(model: Any) -> Any:
    """Return the ranks that tokens of a sharded model are sent between."""
    return model._mesh_manager.get_mesh("ep").get_group()


def _checked(model: nn.Module, cluster: Cluster) -> Found:
    """Refuse what cannot be balanced, before anything changes."""
    if ShardedHandle.KEPT in vars(model):
        raise AdapterError(f"this {type(model).__name__} has balanced experts already; uninstall them first")
    found = inspect(model)
    if found.unsupported:
        raise AdapterError("; ".join(found.unsupported))
    group = ep_group(model)
    check_group(group, advice="before the model is loaded")
    if cluster.ep != group.size():
        raise AdapterError(
            f"the cluster has an EP group of {cluster.ep} ranks, the model's has {group.size()}; give one with "
            f"ep={group.size()}"
        )
    for layer in found.layers:
        # The model's own router has a part of its weights on every rank; gates are made by its class.
        router = type(model.get_submodule(layer.router_path))(model.config.get_text_config())
        nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
        check_router(router, FAMILIES[found.family], path=layer.router_path, version=transformers.__version__)
    return found


def _version_reasons() -> Iterator[str]:
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < FIRST:
        yield (
            f"transformers {transformers.__version__} does not send tokens between ranks of an EP size of its own; use "
            "5.20 or newer, or the adapter equipoise.torch.transformers, which takes a whole model"
        )


def _sharding_reasons(model: Any) -> Iterator[str]:
    sizes = getattr(model.config, "distributed_config", None)
    if sizes is None or sizes.ep_size == 1:
        yield (
            "the model is not expert parallel; load it with distributed_config=DistributedConfig(fsdp_size=..., "
            "ep_size=...), or use the adapter equipoise.torch.transformers"
        )
        return
    if STYLE not in model.ep_plan.values():
        yield f"the model's ep_plan has no {STYLE!r}: its ranks all compute the same tokens; use that style"
    for name, limit in (("tp_size", 1), ("pp_size", 1), ("fsdp_mixed_precision", False), ("fsdp_cpu_offload", False)):
        if getattr(sizes, name) != limit:
            yield f"{name}={getattr(sizes, name)} is not supported; use {name}={limit}, with fsdp_size and ep_size"
    if getattr(model, "hf_quantizer", None) is not None:
        yield "the model is quantized; load it without quantization_config"


def _experts_reasons(model: Any, path: str, found: Found) -> Iterator[str]:
    experts, family = model.get_submodule(path), FAMILIES[found.family]
    if "EpDispatchExpertsParallel" not in getattr(vars(experts).get("forward"), "__qualname__", ""):
        yield f"the forward of `{path}` is not that of transformers' {STYLE!r}; load the model without patches of it"
    if sorted(experts._parameters) != sorted(family.tensors):
        yield f"`{path}` keeps {sorted(experts._parameters)}; this adapter knows {sorted(family.tensors)}"
        return
    if family.activation == "swiglu" and experts.config.hidden_act not in ("silu", "swish"):
        yield f"`{path}` activates with {experts.config.hidden_act!r}; only silu is computed by the balanced experts"
    for name in family.tensors:
        parameter = experts._parameters[name]
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or mesh.mesh_dim_names != ("efsdp", "ep"):
            yield f"`{path}.{name}` is not sharded over the meshes efsdp and ep; load the model with distributed_config"
        elif parameter.shape[0] % mesh.size():
            yield (
                f"`{path}.{name}`: {parameter.shape[0]} experts do not divide by the {mesh.size()} ranks that share "
                "them; use as many ranks as divide them"
            )
