"""The torchtitan adapter: balance the experts of a model that torchtitan's expert parallelism has sharded.

    handle = install(trainer.model_parts, cluster=cluster, options=BalancerOptions(slots=1))     # after parallelize
    with handle.window(routes):                         # routes[m]: ids [L, T, K] that this rank replays
        with handle.micro_step(m, ids=routes[m]):
            loss = loss_fn(model(tokens), ...)
        loss.backward()
    optimizer.step()                                    # made before or after install
    uninstall(trainer.model_parts)                      # the model as it was

torchtitan has no replay of routes: ids are replaced after the router, and gates gathered anew from its live scores.
What `install` changes on this rank, and `uninstall` takes back; no class or function of torchtitan is patched:
1. Every `RoutedExperts` gets a token dispatcher of ours and its `GroupedExperts` a `forward` of ours, instance by
   instance. Outside a window both call torchtitan's.
2. Hooks of transformer blocks and routers, see `hooks`. Load-balancing biases and `tokens_per_expert_E` count the ids
   of experts, wherever these compute.

Parameters, FSDP2's state and the optimizer's stay where they are. Experts compute in bf16, as torchtitan's do, on a
working copy gathered once when the window begins; gradients are kept in float32, and reduced over the ranks that own
the same experts when it ends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torchtitan
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from equipoise.adapters.hooks import CopiedMoE, CopyHandle, LayerHooks, Passes
from equipoise.adapters.protocol import MicroBatch, check_group, routes_from, schedule_from
from equipoise.adapters.wrappers import gradient_divisor
from equipoise.balancer import Balancer
from equipoise.core import Cluster, ModelShape
from equipoise.core.errors import AdapterError
from equipoise.core.options import BalancerOptions
from equipoise.layer.experts import BalancedExperts, LayerOptions, VisitRows
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.node import ExpertWeights
from equipoise.transfer.waits import all_or_none, gather_objects

__all__ = ["inspect", "install", "uninstall", "TitanHandle", "routes_from", "schedule_from", "MicroBatch"]

READ = (0, 3)
"""The minor version whose sources were read; its one release, 0.3.0, is tested."""
KINDS: dict[str, tuple[type, str]] = {
    "": (MoE, "use torchtitan's own MoE"),
    ".router": (TokenChoiceTopKRouter, "use torchtitan's own router"),
    ".routed_experts": (RoutedExperts, "use torchtitan's own RoutedExperts"),
    ".routed_experts.inner_experts": (
        GroupedExperts,
        "biases, other activations, fused and quantized (fp8, MX) experts are not computed here; use GroupedExperts",
    ),
    ".routed_experts.token_dispatcher": (
        AllToAllTokenDispatcher,
        "DeepEP, HybridEP, MinimalAsyncEP and TorchAO's dispatcher are not supported; use "
        "moe_comm_backend='standard' and expert_parallel_degree above 1",
    ),
}
"""The parts of a MoE layer by path, and what else is refused in their place. A subclass computes something else."""
WEIGHTS = ("w1_EFD", "w3_EFD", "w2_EDF")
"""Gate, up and down of `GroupedExperts`."""
LAYER = LayerOptions(gates="caller", combine_order="expert", first="apart")
"""How torchtitan's experts and its dispatcher compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTitan:
    """What the adapter found in a torchtitan model."""

    shape: ModelShape
    paths: tuple[str, ...]
    """Of the blocks with a MoE layer, in the order of layers in plans and in routes."""
    unsupported: tuple[str, ...] = ()
    """Why experts cannot be balanced, one reason each; empty: they can."""


class TitanMoE(LayerHooks, CopiedMoE):
    """One MoE layer while it is installed: its token dispatcher, and its experts' forward, as stages of our layer."""

    def __init__(self, moe: Any, *, index: int, totals: dict[Any, Tensor]) -> None:
        """
        Args:
            index: of the layer in plans
            totals: gradients in float32 of working copies, while a window is open
        """
        super().__init__(index=index)
        self._routed, self._experts = moe.routed_experts, moe.routed_experts.inner_experts
        self._dispatcher, self._forward = self._routed.token_dispatcher, vars(self._experts)["forward"]
        self.ep_mesh, self.num_experts = self._dispatcher.ep_mesh, self._dispatcher.num_experts
        self.top_k = self._dispatcher.top_k
        self.copy = BalancedExperts(self._gathered(), layer=index, group=self.ep_mesh.get_group(), options=LAYER)
        self._totals, self._has_gradients = totals, False
        for tensor in self.copy.home.tensors():
            tensor.requires_grad_(self._experts.w1_EFD.requires_grad)
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._accumulate)

    def route(self, module: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """After the router: replace its ids by those of the pass, with gates from the live scores."""
        _, own_BLK, scores_BLE = output
        ids_TK = self.choose(own_BLK.flatten(0, 1))
        if ids_TK is None:
            return None
        ids_BLK = ids_TK.view_as(own_BLK)
        gates_BLK = scores_BLE.gather(dim=-1, index=ids_BLK)
        if module.route_norm:
            gates_BLK = gates_BLK / (gates_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        return gates_BLK * module.route_scale, ids_BLK, scores_BLE

    def dispatch(self, x_TD: Tensor, gates_TK: Tensor, ids_TK: Tensor, counts_E: Tensor) -> Any:
        """Send tokens to the ranks that compute them; the experts and `combine` get what was sent."""
        self.count_use(ids_TK)
        if self.balanced is None:
            return self._dispatcher.dispatch(x_TD, gates_TK, ids_TK, counts_E)
        sent = self.balanced.send(x_TD, ids_TK, gates_TK, self._visit(), home=self._take_home())
        return sent.rows_PD, sent, sent

    def compute(self, rows_RD: Tensor, sent: Any) -> Tensor:
        """Take the place of the experts' forward."""
        if not isinstance(sent, VisitRows):
            return self._forward(rows_RD, sent)
        return self.copy.compute(sent._replace(rows_PD=rows_RD)).rows_PD

    def combine(self, rows_RD: Tensor, sent: Any, x_TD: Tensor) -> Tensor:
        """Return rows to their tokens and add each token's in ascending order of experts."""
        if not isinstance(sent, VisitRows):
            return self._dispatcher.combine(rows_RD, sent, x_TD)
        # Rounded row by row and then added, as torchtitan does behind its exchange.
        gated_RD = (rows_RD.to(torch.float32) * sent.gates[:, None]).to(rows_RD.dtype)
        return self.copy.receive(sent._replace(rows_PD=gated_RD))

    def put(self) -> None:
        """Take the place of the layer's dispatcher and of its experts' forward."""
        self._routed.token_dispatcher, self._experts.forward = self, self.compute

    def restore(self) -> None:
        """Give the layer back its dispatcher and its experts their forward."""
        self._routed.token_dispatcher, self._experts.forward = self._dispatcher, self._forward

    def check(self, model: nn.Module, path: str) -> None:
        """Raise if the layer's dispatcher, or its experts or their forward, was replaced after install."""
        routed = self._routed
        is_ours = routed.token_dispatcher is self and routed.inner_experts is self._experts
        if not is_ours or vars(self._experts).get("forward") != self.compute:
            raise AdapterError(f"experts of `{path}` were replaced after install; change the model before it")

    @torch.no_grad()
    def fill(self) -> None:
        """Gather this EP rank's experts, as they are now, into the working copy. Every rank must call this."""
        self._has_gradients = False
        for working, tensor in zip(self.copy.home.tensors(), self._gathered().tensors(), strict=True):
            working.copy_(tensor)
            self._totals[working] = torch.zeros_like(tensor, dtype=torch.float32)

    def begin(self) -> None:
        """Compute with balanced experts from now on."""
        self.balanced = self.copy

    def leave(self) -> None:
        """Compute as torchtitan does from now on."""
        self.balanced = self.current = None
        for working in self.copy.home.tensors():
            self._totals.pop(working, None)

    def end(self) -> None:
        """Add the window's gradients, complete in the EP group, to those of the sharded parameters."""
        gate_up, down = (self._totals[working] for working in self.copy.home.tensors())
        self.leave()
        if not self._has_gradients:
            return  # a pass without backward
        for name, total in zip(WEIGHTS, (*gate_up.chunk(2, dim=1), down), strict=True):
            parameter = self._experts._parameters[name]
            # FSDP2's own reduction: a sum over the ranks that own the same experts, each of which keeps its shard.
            owners, (fsdp, _) = parameter.device_mesh["efsdp"], parameter.placements
            summed = DTensor.from_local(total.contiguous(), owners, [Partial()], run_check=False)
            local = summed.redistribute(placements=[Shard(fsdp.dim)]).to_local().to(parameter.dtype)
            mesh, place = parameter.device_mesh, {"shape": parameter.shape, "stride": parameter.stride()}
            gradient = DTensor.from_local(local, mesh, parameter.placements, run_check=False, **place)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    @property
    def extra_bytes(self) -> int:
        """Bytes of the working copy, and of its gradients in float32 while a window is open."""
        return sum(tensor.nbytes + 4 * tensor.numel() for tensor in self.copy.home.tensors())

    def _gathered(self) -> ExpertWeights:
        """[E / ep, ...] in bf16, from the ranks that own parts of the same experts. Every rank must call this."""
        found = []
        for name in WEIGHTS:
            parameter = self._experts._parameters[name]
            local = parameter.detach().to_local().to(torch.bfloat16)
            shards = [Shard(parameter.placements[0].dim)]
            found.append(
                DTensor.from_local(local, parameter.device_mesh["efsdp"], shards, run_check=False).full_tensor()
            )
        return ExpertWeights(torch.cat(found[:2], dim=1), found[2].clone())

    @torch.no_grad()
    def _accumulate(self, working: Tensor) -> None:
        """Add a micro-step's gradient in float32, as FSDP2 does."""
        assert working.grad is not None, "called after accumulation"
        self._totals[working].add_(working.grad)
        working.grad, self._has_gradients = None, True


class TitanHandle(CopyHandle):
    """A torchtitan model whose experts are balanced in windows, seen from one rank."""

    KEPT = "_equipoise"

    def __init__(self, model: nn.Module, found: FoundTitan, *, cluster: Cluster, options: BalancerOptions) -> None:
        """Made by `install`."""
        self.found, routers, totals = found, Passes(model, shape=found.shape), dict[Any, Tensor]()
        moes = [model.get_submodule(path).moe for path in found.paths]
        self._moes = [TitanMoE(moe, index=index, totals=totals) for index, moe in enumerate(moes)]
        balancer = Balancer(
            cluster=cluster,
            model=found.shape,
            group=self._moes[0].ep_mesh.get_group(),
            options=replace(options, grad_dtype="float32"),
            gradient_of=totals.get,
        )
        super().__init__(model, dict(zip(found.paths, self._moes, strict=True)), routers=routers, balancer=balancer)

    def put(self, worker: PlanWorker | None) -> None:
        """Attach the balancer, then change the model, which cannot fail."""
        super().put(worker)
        for path, layer in zip(self.found.paths, self._moes, strict=True):
            block = self.model.get_submodule(path)
            inner = getattr(block, "_checkpoint_wrapped_module", block)
            self.routers.hooked(
                block.register_forward_pre_hook(self.routers.start, with_kwargs=True),
                inner.register_forward_pre_hook(layer.enter, with_kwargs=True),
                inner.moe.router.register_forward_hook(layer.route, prepend=True),
            )


def install(
    model_parts: nn.Module | Sequence[nn.Module],
    *,
    cluster: Cluster,
    options: BalancerOptions | None = None,
    worker: PlanWorker | None = None,
) -> TitanHandle:
    """Balance the experts of a parallelized model from now on, in windows. Every rank of the model must call this.

    Args:
        model_parts: the model, or the trainer's list of this one model
        cluster: of one EP group
        options: slots and the rest; gradients are float32
        worker: a planning process to use, instead of an own one
    """
    # What one rank must refuse, all refuse.
    found = all_or_none(partial(_checked, model_parts, cluster), partial(gather_objects, group=None))[dist.get_rank()]
    handle = TitanHandle(_only(model_parts), found, cluster=cluster, options=options or BalancerOptions())
    handle.put(worker)
    return handle


def uninstall(model_parts: nn.Module | Sequence[nn.Module]) -> None:
    """Restore the model exactly. Every rank must call this."""
    model = _only(model_parts)
    if TitanHandle.KEPT not in vars(model):
        raise AdapterError(f"this {type(model).__name__} has no balanced experts; install them first")
    getattr(model, TitanHandle.KEPT).uninstall()


def inspect(model_parts: nn.Module | Sequence[nn.Module]) -> FoundTitan:
    """Find the MoE layers of a parallelized model, and say what is unsupported."""
    model: Any = _only(model_parts)
    layers = getattr(model, "layers", None)
    blocks = {f"layers.{n}": block for n, block in layers.items()} if isinstance(layers, nn.ModuleDict) else {}
    paths = tuple(path for path, block in blocks.items() if getattr(block, "moe_enabled", False))
    if not paths:
        raise AdapterError(f"no block of this {type(model).__name__} has experts; balance a torchtitan MoE decoder")
    reasons = [*_version_reasons(), *(reason for path in paths for reason in _kind_reasons(blocks[path], path))]
    if not reasons:
        reasons = [reason for path in paths for reason in _sharding_reasons(blocks[path], path)]
    if not reasons and (divisor := gradient_divisor(model)) != 1.0:
        reasons = [f"FSDP2 divides gradients by {divisor:g}; torchtitan's own parallelize functions make that 1"]
    router, experts = blocks[paths[0]].moe.router, blocks[paths[0]].moe.routed_experts.inner_experts
    shape = ModelShape(
        name="torchtitan",
        experts=router.num_experts,
        top_k=router.top_k,
        layer_numbers=tuple(int(path.rpartition(".")[2]) for path in paths),
        hidden_layers=len(blocks),
        hidden=router.gate.in_features,
        expert_width=next(experts.parameters()).shape[1],
        weight_bytes=torch.bfloat16.itemsize,
    )
    return FoundTitan(shape=shape, paths=paths, unsupported=tuple(reasons))


def _only(model_parts: nn.Module | Sequence[nn.Module]) -> nn.Module:
    parts = [model_parts] if isinstance(model_parts, nn.Module) else list(model_parts)
    if len(parts) != 1:
        raise AdapterError(f"{len(parts)} model parts were given; a pipeline is not supported: use one stage")
    return parts[0]


def _checked(model_parts: nn.Module | Sequence[nn.Module], cluster: Cluster) -> FoundTitan:
    """Refuse what cannot be balanced, before anything changes."""
    model = _only(model_parts)
    if TitanHandle.KEPT in vars(model):
        raise AdapterError(f"this {type(model).__name__} has balanced experts already; uninstall them first")
    found = inspect(model)
    if found.unsupported:
        raise AdapterError("; ".join(found.unsupported))
    group = model.get_submodule(found.paths[0]).moe.routed_experts.token_dispatcher.ep_mesh.get_group()
    check_group(group, advice="before torchtitan's trainer is made")
    if cluster.ep != group.size():
        raise AdapterError(
            f"the cluster has an EP group of {cluster.ep} ranks, the model's has {group.size()}; give one with "
            f"ep={group.size()}"
        )
    return found


def _version_reasons() -> Iterator[str]:
    if tuple(int(part) for part in torchtitan.__version__.split(".")[:2] if part.isdigit()) != READ:
        yield f"torchtitan {torchtitan.__version__} is not {READ[0]}.{READ[1]}; use 0.3.0, which is tested"


def _kind_reasons(block: Any, path: str) -> Iterator[str]:
    """What a layer is made of."""
    for below, (kind, fix) in KINDS.items():
        part = attrgetter(f"moe{below}")(block)
        if type(part) is not kind:
            yield f"`{path}.moe{below}` is a {type(part).__name__}, not torchtitan's {kind.__name__}: {fix}"
    if any(module._compiled_call_impl is not None for module in block.modules()):
        yield f"`{path}` is compiled; set compile.enable=False, or leave 'model' out of compile.components"


def _sharding_reasons(block: Any, path: str) -> Iterator[str]:
    """How a layer is sharded."""
    router, routed = block.moe.router, block.moe.routed_experts
    experts, path = routed.inner_experts, f"{path}.moe"
    if router._debug_force_load_balance:
        yield f"`{path}.router` routes round-robin (debug.moe_force_load_balance); turn it off"
    if routed.token_dispatcher.ep_mesh is None:
        yield f"`{path}` is not expert parallel; use expert_parallel_degree above 1 (expert tensor parallelism is not)"
        return
    forward = getattr(vars(experts).get("forward"), "__qualname__", "none of its own")
    if not forward.startswith("Module.parallelize."):
        yield f"the forward of `{path}.routed_experts.inner_experts` is {forward}, not torchtitan's; remove patches"
    if len({weight.requires_grad for weight in experts.parameters()}) > 1:
        yield f"`{path}.routed_experts.inner_experts` trains some of its weights alone; freeze all of them or none"
    gate = getattr(router.gate.weight, "device_mesh", None)
    if gate is None or gate.mesh_dim_names != ("fsdp",):
        names = None if gate is None else gate.mesh_dim_names
        yield (
            f"`{path}.router.gate` is sharded over {names}, not over fsdp alone; use "
            "parallelism.spmd_backend='partial_dtensor' without tensor parallelism or replicated data parallelism"
        )
    for name in WEIGHTS:
        weight = experts._parameters[name]
        mesh = getattr(weight, "device_mesh", None)
        if mesh is None or mesh.mesh_dim_names != ("efsdp", "ep"):
            yield f"`{path}.routed_experts.inner_experts.{name}` is not sharded over efsdp and ep by FSDP2"
        elif weight.shape[weight.placements[0].dim] % (mesh.size() if weight.placements[0].dim == 0 else mesh.size(0)):
            yield (
                f"`{path}.routed_experts.inner_experts.{name}` of shape {list(weight.shape)} does not divide by its "
                f"{mesh.size()} ranks; use as many as divide it"
            )
        elif weight.device.type != mesh.device_type:
            yield f"`{path}.routed_experts.inner_experts.{name}` is off-loaded; use training.enable_cpu_offload=False"
    policy = block._get_fsdp_state()._mp_policy if isinstance(block, FSDPModule) else None
    if policy is None or policy.param_dtype is not torch.bfloat16:
        yield f"`{path}` computes outside bf16; use training.mixed_precision_param='bfloat16'"
