"""The transformers adapter: balance the experts of a Hugging Face MoE model in your own training loop.

    found = inspect(model)                                          # what is there, and what is unsupported
    balancer = Balancer(cluster=cluster, model=found.shape, group=ep_group)
    handle = install(model, balancer)                               # each rank keeps the experts it owns
    with balancer.window(routes):
        with handle.micro_step(m, ids=routes[m]):                   # names the forward pass, replays its routes
            loss = model(input_ids=..., use_cache=False).logits ...
        loss.backward()
    optimizer.step()                                                # made after install
    uninstall(model)                                                # the model as it was, with the trained weights

What `install` changes, and `uninstall` restores byte by byte:
1. Every experts module holds the parameters of the experts this rank owns, [E / R, ...], gpt-oss's transposed to
   [out, in]. The full parameters stay the same objects and hold no memory meanwhile.
2. `equipoise` is registered in transformers' `ALL_EXPERTS_FUNCTIONS`, and chosen by a copy of the configuration that
   only this model's experts modules see: another model made from the same configuration is not touched.
3. Hooks, see `transformers_routers`. Forward functions, routers, shared experts and dense layers stay as they are.
4. `model.save_pretrained` writes the canonical checkpoint; every rank must call it.
5. A DDP that is built around the model leaves the experts alone; see `wrappers`.

Tested with transformers 5.17. A router whose gates differ from the known ones, as in another version, is refused.
A refused install changes nothing and is refused on every rank.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from equipoise.adapters.protocol import (
    MicroBatch,
    Recorded,
    ReplayCounters,
    RouteIds,
    cut,
    free_tokens,
    gather,
    routes_from,
    schedule_from,
)
from equipoise.adapters.transformers_model import FAMILIES, Family, Found, check_router, inspect
from equipoise.adapters.transformers_routers import Routers, record, replay, wrap_routers
from equipoise.adapters.wrappers import check_untouched, copy_whole, gradient_divisor, ignored_by_ddp, whole
from equipoise.balancer import Balancer
from equipoise.core.errors import AdapterError
from equipoise.layer.experts import BalancedExperts, LayerOptions
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.node import ExpertWeights
from equipoise.transfer.waits import all_or_none, gather_objects

__all__ = [
    "inspect",
    "install",
    "uninstall",
    "Installed",
    "wrap_routers",
    "record",
    "replay",
    "routes_from",
    "free_tokens",
    "schedule_from",
    "MicroBatch",
    "Recorded",
    "ReplayCounters",
]


NAME = "equipoise"
"""Our function's name among transformers' experts functions."""
KEPT = "_equipoise"
"""Attribute of an installed model that holds its handle, and of an experts module that holds its layer."""


def balanced_experts(module: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """The experts function registered with transformers."""
    return getattr(module, KEPT).compute(hidden_TD, ids_TK, gates_TK)


class _LentExperts:
    """One experts module, with its full parameters kept aside while balanced experts replace them."""

    def __init__(self, module: Any, family: Family) -> None:
        self.module, self._family = module, family
        self.full = {name: module._parameters[name] for name in family.tensors}
        """The parameters of all experts, without memory while balanced ones replace them; as in `ExpertWeights`."""
        self._config = module.config

    def cut(self, group: Any) -> ExpertWeights:
        """Return this rank's experts in the layout of `BalancedExperts`."""
        return ExpertWeights(*(self.exchanged(cut(full, group)) for full in self.full.values()))

    def swap(self, balanced: BalancedExperts, *, config: Any, layer: Any) -> None:
        """Put the balanced parameters under the module's names."""
        for (name, full), parameter in zip(self.full.items(), balanced.home.tensors(), strict=True):
            parameter.requires_grad_(full.requires_grad)
            self.module._parameters[name] = parameter
            full.data = full.data.new_empty(0)  # the same object, without memory until `restore`
        self.module.config = config
        setattr(self.module, KEPT, layer)

    def restore(self, group: Any) -> None:
        """Put the full parameters back, with the owners' values. Every rank must call this."""
        for name, full in self.full.items():
            full.data = self.gathered(self.module._parameters[name], group)
            self.module._parameters[name] = full
        self.module.config = self._config
        delattr(self.module, KEPT)

    def gathered(self, shard: Tensor, group: Any, *, to: int | None = None) -> Any:
        """[E, ...] in transformers' layout; None on a rank that gets nothing. Every rank must call this."""
        full = gather(shard, group, to=to)
        return None if full is None else self.exchanged(full)

    def exchanged(self, weights: Tensor) -> Tensor:
        """Convert weights from transformers' layout to that of `BalancedExperts`, or back."""
        if self._family.is_transposed and weights.ndim == 3:
            return weights.transpose(1, 2).contiguous()
        return weights


class Installed:
    """A model whose experts are balanced, seen from one rank."""

    def __init__(self, model: nn.Module, balancer: Balancer, found: Found, lent: Mapping[str, _LentExperts]) -> None:
        """Made by `install`."""
        self.model, self.balancer, self.found = model, balancer, found
        self._lent = lent
        self.routers = Routers(model, found=found, before_forward=self._check_wrapped)
        self._installed: dict[str, nn.Parameter] = {}
        self._divisor = 1.0
        self._divided: dict[str, Any] = {}

    def start(self) -> None:
        """Note the parameters that `install` has put in place, and make DDP leave them alone."""
        self._installed = self.expert_parameters
        self._undo_ddp = ignored_by_ddp(self.model, self._installed)

    @property
    def counters(self) -> ReplayCounters:
        """Router calls and replayed rows so far."""
        return self.routers.counters

    @property
    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the experts this rank owns, by name; their gradients are sums over the whole EP group.

        Under DDP or FSDP2 the sums are divided by what those divide all other gradients by.
        """
        return {
            f"{path}.{name}": parameter
            for path, lent in self._lent.items()
            for name, parameter in lent.module._parameters.items()
        }

    def micro_step(self, micro_step: int, *, ids: RouteIds | None = None, record: bool = False) -> Any:
        """Wrap the forward pass of one micro-step in a `with` block; backward may run later, also checkpointed.

        Args:
            micro_step: its number in the balancer's window
            ids: what this rank's tokens replay, see `RouteIds`; None: the model routes itself
            record: give a `Recorded`, which then holds the ids that were used
        """
        return self.routers.forward_pass(micro_step, ids=ids, record=record)

    def full(self, name: str, shard: Tensor, *, to: int | None = None) -> Tensor | None:
        """Gather what is kept per owned expert, such as optimizer state. Every rank must call this.

        Args:
            name: of the expert parameter that `shard` is shaped like
            to: the only rank that gets the result; None: every rank

        Returns: [E, ...] in transformers' layout
        """
        return self._lent[name.rpartition(".")[0]].gathered(shard, self.balancer.group, to=to)

    def state_dict(self, *, to: int | None = None) -> dict[str, Tensor]:
        """Return the state dict of the whole model in canonical order. Every rank must call this.

        Args:
            to: the only rank that gets it, the others get {}; None: every rank
        """
        with self.balancer.canonical():
            experts = {name: self.full(name, p, to=to) for name, p in self.expert_parameters.items()}
            state = {name: whole(tensor) for name, tensor in self.model.state_dict().items()}
            return {name: experts.get(name, state[name]) for name in state if to in (None, self.balancer.group.rank())}

    def stored_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model, with experts in the node's host store. Every rank must call this.

        No expert travels between ranks of a node: each writes its own to memory that all of them read, and receives
        those of other nodes. Call it outside windows, and only where the balancer is enabled.

        Returns: the canonical order; experts are on the CPU and unchanged until the next window opens
        """
        self._refuse_inside("read the host store")
        store = self.balancer.complete_store()
        experts = {
            f"{path}.{name}": lent.exchanged(tensor)
            for layer, (path, lent) in enumerate(self._lent.items())
            for name, tensor in zip(lent.full, store.experts(layer).tensors(), strict=True)
        }
        return {name: experts.get(name, whole(tensor)) for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the weights of the whole model; each rank keeps those of its experts. Call it outside windows."""
        self._refuse_inside("load a state dict")
        own = self.model.state_dict()
        wrong = sorted(set(own) ^ set(state))
        if wrong:
            raise AdapterError(f"the state dict does not fit the model: {wrong[0]!r} is in one of them only")
        mine = {name: self._share(name, tensor) for name, tensor in state.items()}
        for name, tensor in own.items():
            if tensor.shape != mine[name].shape:
                raise AdapterError(
                    f"{name!r} of the state dict has shape {list(state[name].shape)}, which does not fit the model's; "
                    "give the state dict of the whole model"
                )
        for name, tensor in own.items():
            copy_whole(tensor, mine[name])

    def save_pretrained(self, path: str | Path, **options: Any) -> None:
        """Write what the whole model's `save_pretrained` would write. Every rank must call this; the first one writes.

        Args:
            options: of transformers' `save_pretrained`
        """
        group, state = self.balancer.group, self.state_dict(to=0)
        is_first, is_written = dist.get_rank(group) == 0, torch.zeros((), dtype=torch.int64)
        try:
            if is_first:
                type(self.model).save_pretrained(self.model, path, state_dict=state, **options)
                is_written += 1
        finally:
            # Also where writing failed: the other ranks wait for this message.
            dist.broadcast(is_written, dist.get_global_rank(group, 0), group=group)
        if not is_first and not is_written:
            raise AdapterError(f"the first rank of the EP group could not write {str(path)!r}; see its error")

    def _refuse_inside(self, what: str) -> None:
        """Raise inside a window: experts are at their homes, and their gradients are not collected yet."""
        if self.balancer.is_open:
            raise AdapterError(f"cannot {what}: a window of the balancer is open; end it first")

    def _check_wrapped(self) -> None:
        """In every forward: refuse wrappers that took experts, and divide experts' gradients as they divide others."""
        check_untouched(
            self.model, self._installed, lent=(p for lent in self._lent.values() for p in lent.full.values())
        )
        self._divisor = gradient_divisor(self.model)
        if self._divisor == 1.0:
            return
        if self.balancer.has_own_gradients:
            raise AdapterError(
                "the balancer was given gradient_of, and the model is wrapped in DDP or FSDP2, which average `grad`; "
                "use one of the two"
            )
        for name, parameter in self._installed.items():
            if name not in self._divided and parameter.requires_grad:
                self._divided[name] = parameter.register_hook(lambda gradient: gradient / self._divisor)

    def _share(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole model, in the layout it has while installed."""
        lent = self._lent.get(name.rpartition(".")[0])
        return tensor if lent is None else lent.exchanged(cut(tensor, self.balancer.group))

    def uninstall(self) -> None:
        """Restore the model. Every rank must call this, with no window open."""
        self._refuse_inside("uninstall")
        self.routers.unwrap()
        for remover in self._divided.values():
            remover.remove()
        self._undo_ddp()
        for lent in self._lent.values():
            lent.restore(self.balancer.group)
        del self.model.save_pretrained
        delattr(self.model, KEPT)


def install(
    model: nn.Module, balancer: Balancer, *, options: LayerOptions | None = None, worker: PlanWorker | None = None
) -> Installed:
    """Let each rank keep the experts it owns, and the balancer run them. Every rank of its group must call this.

    Args:
        model: the whole model, the same on every rank; make optimizers after this
        balancer: made without layers, for `inspect(model).shape`
        options: how experts compute; activation and combine order are the family's
        worker: a planning process to use, instead of an own one
    """
    # What one rank must refuse, all refuse.
    gather = partial(gather_objects, group=balancer.group)
    found = all_or_none(partial(_checked, model, balancer), gather)[balancer.group.rank()]
    family = FAMILIES[found.family]
    lent = {x.experts_path: _LentExperts(model.get_submodule(x.experts_path), family) for x in found.layers}
    options = replace_fields(options or LayerOptions(), activation=family.activation, combine_order="top_k")
    balanced = {
        path: BalancedExperts(one.cut(balancer.group), layer=index, group=balancer.group, options=options)
        for index, (path, one) in enumerate(lent.items())
    }
    balancer.attach(balanced, worker=worker)
    # From here on nothing fails: the model is either as it was, or wholly installed.
    ALL_EXPERTS_FUNCTIONS.register(NAME, balanced_experts)
    handle = Installed(model, balancer, found, lent)
    config = copy.copy(next(iter(lent.values())).module.config)
    config._experts_implementation_internal = NAME
    for layer, (path, one) in zip(handle.routers.layers, lent.items(), strict=True):
        layer.balanced = balanced[path]
        one.swap(balanced[path], config=config, layer=layer)
    handle.start()
    setattr(model, KEPT, handle)
    model.save_pretrained = handle.save_pretrained  # type: ignore[assignment]  # restored by uninstall
    return handle


def uninstall(model: nn.Module) -> None:
    """Restore the model exactly, with the weights it has now. Every rank must call this; then close the balancer."""
    if KEPT not in vars(model):
        raise AdapterError(f"this {type(model).__name__} has no balanced experts; install them first")
    getattr(model, KEPT).uninstall()


def _checked(model: nn.Module, balancer: Balancer) -> Found:
    if KEPT in vars(model):
        raise AdapterError(f"this {type(model).__name__} has balanced experts already; uninstall them first")
    if balancer.layers:
        raise AdapterError("the balancer has layers already; give every model a balancer of its own")
    found = inspect(model)
    if found.unsupported:
        raise AdapterError("; ".join(found.unsupported))
    ranks = dist.get_world_size(balancer.group)
    if found.shape.experts % ranks:
        raise AdapterError(
            f"`{found.layers[0].experts_path}`: {found.shape.experts} experts do not divide by {ranks} ranks; use an "
            "EP group whose size divides them"
        )
    for name in ("experts", "top_k", "layer_numbers", "hidden", "expert_width"):
        there, wanted = getattr(found.shape, name), getattr(balancer.model, name)
        if there != wanted:
            raise AdapterError(
                f"the model has {name} {there}, the balancer was made for {wanted}; give it inspect(model).shape"
            )
    for layer in found.layers:
        router = model.get_submodule(layer.router_path)
        check_router(router, FAMILIES[found.family], path=layer.router_path, version=transformers.__version__)
    return found
