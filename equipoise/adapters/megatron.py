"""The Megatron-Core adapter: balance the experts of a GPTModel in the training that is there already.

    found = inspect(model_chunks)                       # what is there, and what is unsupported
    handle = install(model_chunks, cluster=cluster, options=BalancerOptions(slots=1))
    with handle.window(routes):                         # routes[m][l]: [T, K] ids that this rank replays
        losses = forward_backward_func(...)             # Megatron's own schedules, pipelined or not
    optimizer.step()
    uninstall(handle)                                   # the model as it was

What `install` changes on this rank, and `uninstall` takes back; no class or function of Megatron is patched:
1. Every decoder `MoELayer` gets a token dispatcher of ours and its experts object a `forward` of ours. Outside a window
   both call Megatron's.
2. Forward pre-hooks: of model chunks, which count micro-steps, and of transformer layers, which let home weights into
   the graph before attention.
3. While an update window is open, `config.finalize_model_grads_func` first ends the window, then reduces gradients.

Parameters, `main_grad`, DDP's buffers and the optimizer's shards stay where they are. Experts compute on a working copy
of the weights, filled when a window begins; or in place, without a copy: ranks of a node share the memory that expert
parameters are in, and experts move between these parameters for the length of a window. Gradients are added to
`main_grad`, as DDP's hooks do. `extra_bytes` names what this takes. MTP's layers are left alone.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from equipoise.adapters.megatron_model import (
    FoundChunks,
    FoundMoE,
    bare,
    check_free_rows,
    expert_parameters,
    inspect,
)
from equipoise.adapters.protocol import Windowed, check_group, is_in_backward
from equipoise.balancer import Balancer
from equipoise.core import Cluster, Stage
from equipoise.core.errors import AdapterError
from equipoise.core.options import BalancerOptions
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Dispatch, FilledRows
from equipoise.layer.experts import BalancedExperts, LayerOptions, VisitRows
from equipoise.planning.rows import FreeTokens
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.node import ExpertWeights, SlotTensors
from equipoise.transfer.waits import all_or_none, gather_objects

__all__ = ["inspect", "install", "uninstall", "MegatronHandle"]

KEPT = "_equipoise"
"""Attribute of an installed model chunk that holds its handle."""
Kept = Literal["copy", "in place"]
"""Where the weights are that experts compute with."""
LAYER = LayerOptions(gates="activation", combine_order="expert", products="loop", has_gaps=True)
"""How Megatron's experts and its dispatchers compute."""


class LentMoE(MoETokenDispatcher):
    """The dispatcher of one `MoELayer` while it is installed: Megatron's calls, one to one, as stages of our layer.

    State is kept between the calls of one forward pass, as Megatron's own dispatchers do.
    """

    def __init__(self, layer: Any, found: FoundMoE, *, index: int, handle: "MegatronHandle", weights: Kept) -> None:
        """
        Args:
            layer: the transformer layer
            index: of the layer in plans
        """
        self._is_copy = weights == "copy"
        self._moe, self._found, self.index, self._handle = layer.mlp, found, index, handle
        self._kept: MoETokenDispatcher = self._moe.token_dispatcher
        # Not initialised like Megatron's: what others read of a dispatcher is what the kept one has.
        self.__dict__.update({name: value for name, value in vars(self._kept).items() if name not in vars(self)})
        self._layer, self._hook = layer, list[Any]()
        self._in_flight: deque[int] = deque()
        self._entered: tuple[Visit, ExpertWeights] | None = None
        self._now: tuple[Tensor, Visit, ExpertWeights, Dispatch | None] | None = None
        """Ids, visit, home weights and prepared dispatch of the pass between `dispatch_preprocess` and
        `combine_postprocess`."""
        self._rows: VisitRows | None = None
        combine = torch.stack if self._is_copy else SlotTensors
        home = ExpertWeights(*(combine([same_memory(w) for w in weights]) for weights in self.weights))
        # Grouped experts are for GPUs: there one product of all slots, where they are one tensor.
        is_grouped = isinstance(self._moe.experts, TEGroupedMLP) and self._is_copy and home.gate_up_SFD.is_cuda
        options = replace(LAYER, products="grouped") if is_grouped else LAYER
        self.balanced = BalancedExperts(home, layer=index, group=self._moe.ep_group, options=options)
        if self.weights[0][0].requires_grad:
            for leaf in self.balanced.home.flat():
                leaf.requires_grad_().register_post_accumulate_grad_hook(self._accumulate)
        else:
            self.balanced.requires_grad_(False)

    def put(self) -> None:
        """Take the place of the layer's dispatcher and of its experts' forward."""
        self._moe.token_dispatcher, self._moe.experts.forward = self, self._compute
        self._hook.append(self._layer.register_forward_pre_hook(self._before_layer))

    @property
    def chunk(self) -> int:
        """Index of the layer's model chunk."""
        return self._found.chunk

    @property
    def path(self) -> str:
        """The layer's path, with its chunk."""
        return f"chunk {self.chunk} {self._found.path}"

    @property
    def weights(self) -> tuple[SlotTensors, SlotTensors]:
        """Megatron's parameters of both products, expert by expert."""
        return expert_parameters(self._moe.experts)

    @torch.no_grad()
    def begin(self) -> None:
        """Forget the last window, and fill the working copy with this rank's own experts as they are now."""
        self._in_flight.clear()
        self._entered = self._now = self._rows = None
        if not self._is_copy:
            return
        for working, weights in zip(self.balanced.home.tensors(), self.weights, strict=True):
            for slot, weight in enumerate(weights):
                working[slot].copy_(weight)

    def gradients(self) -> dict[Any, SlotTensors]:
        """Return where gradients accumulate, by what experts compute with: all slots, and each where it is apart."""
        found: dict[Any, SlotTensors] = {}
        for home, weights in zip(self.balanced.home.tensors(), self.weights, strict=True):
            # Trainers free the memory of gradients for passes without backward.
            if not weights[0].requires_grad or not weights[0].main_grad.untyped_storage().nbytes():
                continue
            found[home] = SlotTensors(weight.main_grad for weight in weights)
            if isinstance(home, SlotTensors):
                found.update({leaf: SlotTensors([total]) for leaf, total in zip(home, found[home], strict=True)})
        return found

    def restore(self) -> None:
        """Give the layer back its dispatcher and its experts their forward."""
        self._hook.pop().remove()
        self._moe.token_dispatcher = self._kept
        del self._moe.experts.forward

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """Find this visit's home weights and the experts of every token, ascending."""
        entered, self._entered, self._now, self._rows = self._entered, None, None, None
        # Megatron may call a MoE layer that it computes again without its transformer layer.
        entered = entered or self._enter()
        if entered is None:
            return self._kept.dispatch_preprocess(tokens, routing_map, probs)
        self.hidden_shape = tokens.shape
        visit, window, prepared = entered[0], self.balanced.window, None
        assert window is not None, "entered"
        if window.dispatches is not None:
            prepared = window.dispatches.upload(visit.micro_step, visit.layer, device=str(routing_map.device))
        if prepared is not None and prepared.ids_TK is not None and len(prepared.ids_TK) == len(routing_map):
            # What the router chose need not be sorted, only compared.
            ids_TK = prepared.ids_TK
            self._count_others(routing_map, ids_TK, window.filled.get((visit.micro_step, visit.layer)))
        else:
            # Chosen experts first, ascending; what is behind them is no row.
            ids_TK = torch.argsort(routing_map.to(torch.uint8), dim=1, descending=True, stable=True)
            ids_TK = ids_TK[:, : self.config.moe_router_topk]
            ids_TK = torch.where(routing_map.gather(1, ids_TK), ids_TK, -1)
        self._now = (ids_TK, *entered, prepared)
        return tokens.view(-1, tokens.shape[-1]), probs.gather(1, ids_TK.clamp(min=0))

    @torch.no_grad()
    def _count_others(self, routing_map: Tensor, ids_TK: Tensor, filled: FilledRows | None) -> None:
        """Count a routing map's rows that a prepared dispatch does not have, but for filled tokens; does not wait."""
        is_row_TK = ids_TK >= 0
        other_T = (is_row_TK & ~routing_map.gather(1, ids_TK.clamp(min=0))).sum(dim=1)
        other_T += (routing_map.sum(dim=1) - is_row_TK.sum(dim=1)).clamp(min=0)
        if filled is not None:
            other_T.index_fill_(0, filled.token_F.to(other_T.device, non_blocking=True), 0)
        self.balanced.mismatches += other_T.sum()

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> Any:
        """Send rows and gates to the ranks that compute them."""
        if self._now is None:
            return self._kept.token_dispatch(hidden_states, probs)
        ids_TK, visit, home, prepared = self._now
        self._rows = self.balanced.send(hidden_states, ids_TK, probs, visit, home=home, prepared=prepared)
        return self._rows.rows_PD, self._rows.gates

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> Any:
        """Return rows as they are: sending put them slot by slot."""
        if self._rows is None:
            return self._kept.dispatch_postprocess(hidden_states, probs)
        groups = self._rows.dispatch.groups
        ends = torch.cat([groups.home_end_S, groups.replica_end_S + groups.num_home_rows])
        return hidden_states, ends.diff(prepend=ends.new_zeros(1)), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return rows as they are."""
        return self._kept.combine_preprocess(hidden_states) if self._rows is None else hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return rows to their tokens and add each token's in ascending order of experts."""
        if self._rows is None:
            return self._kept.token_combine(hidden_states)
        return self.balanced.receive(self._rows._replace(rows_PD=hidden_states))

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Give tokens the shape they came with."""
        if self._rows is None:
            return self._kept.combine_postprocess(hidden_states)
        self._rows = self._now = None
        return hidden_states.view(self.hidden_shape)

    def _compute(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Take the place of the experts' forward."""
        if self._rows is None:
            output: tuple[Tensor, None] = type(self._moe.experts).forward(
                self._moe.experts, rows, tokens_per_expert, probs
            )
            return output
        return self.balanced.compute(self._rows._replace(rows_PD=rows, gates=probs)).rows_PD, None

    def _before_layer(self, *_: Any) -> None:
        """Let home weights into the graph before attention, so that the wait for returns hides behind its backward."""
        self._entered = self._enter()

    def _enter(self) -> tuple[Visit, ExpertWeights] | None:
        """Find which micro-step this forward pass is; None outside a window."""
        if not self._handle.balancer.is_open:
            return None
        if is_in_backward():
            # Computed again: of the forward passes in flight Megatron's schedules run backward the oldest first.
            micro_step = self._in_flight.popleft()
        else:
            micro_step = self._handle.micro_steps[self.chunk]
            self._in_flight.append(micro_step)
        visit = Visit(micro_step, "forward", self.index)
        return visit, self.balanced.enter(visit)

    @torch.no_grad()
    def _accumulate(self, working: Tensor) -> None:
        """Add a gradient to `main_grad`, expert by expert, as DDP's own hook does."""
        assert working.grad is not None, "called after accumulation"
        # Only parameters with an accumulated gradient have this hook.
        totals = self._handle.totals[working]
        for total, gradient in zip(totals, working.grad if self._is_copy else [working.grad], strict=True):
            total.add_(gradient)
        working.grad = None
        self._handle.release(self._handle.balancer.layers_home())

    def release(self, chunk: Any) -> bool:
        """Tell DDP that these experts' gradients are complete, where it reduces a bucket as soon as all of it is.

        Returns: False where DDP does not listen, because the chunk's last micro-step has not begun
        """
        parameters = [weight for weights in self.weights for weight in weights if weight.requires_grad]
        groups = [chunk.param_to_bucket_group[parameter] for parameter in parameters]
        if not all(group.is_last_microbatch for group in groups):
            return False
        for parameter, group in zip(parameters, groups, strict=True):
            group.register_grad_ready(parameter, chunk.force_all_reduce)
        return True


class MegatronHandle(Windowed):
    """Model chunks whose experts are balanced, seen from one rank."""

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        found: FoundChunks,
        *,
        cluster: Cluster,
        options: BalancerOptions,
        weights: Kept,
    ) -> None:
        """Made by `install`."""
        self._weights = weights
        self.model_chunks, self.found = tuple(model_chunks), found
        self.micro_steps = [-1] * len(model_chunks)
        """Micro-step of the last forward pass of each chunk."""
        self.totals: dict[Any, SlotTensors] = {}
        """Where a working parameter's gradient accumulates: Megatron's `main_grad` of each expert."""
        self._finalize: Any = None
        self._unreleased: list[LentMoE] = []
        """Layers of the open window whose gradients DDP does not reduce yet, the last one first."""
        self._home: set[int] = set()
        self._is_failed = False
        bares = [bare(chunk) for chunk in model_chunks]
        self._config = get_model_config(bares[0])
        layers = [bares[one.chunk].get_submodule(one.path) for one in found.layers]
        self.balancer = Balancer(
            cluster=cluster,
            model=found.shape,
            group=parallel_state.get_expert_model_parallel_group(),
            options=options,
            # A pipeline stage of dense layers has nothing to balance; its windows do nothing.
            enabled=bool(layers),
            gradient_of=self.totals.get,
        )
        pairs = zip(layers, found.layers, strict=True)
        self._lent = [
            LentMoE(layer, one, index=at, handle=self, weights=weights) for at, (layer, one) in enumerate(pairs)
        ]
        self._hooks: list[Any] = []

    def put(self, worker: PlanWorker | None) -> None:
        """Attach the balancer, then change the model, which cannot fail."""
        if self._lent:
            self.balancer.attach({lent.path: lent.balanced for lent in self._lent}, worker=worker)
        for lent in self._lent:
            lent.put()
        for at, chunk in enumerate(map(bare, self.model_chunks)):
            self._hooks.append(chunk.register_forward_pre_hook(partial(self._count, at)))
            setattr(chunk, KEPT, self)

    @property
    def extra_bytes(self) -> Mapping[str, int]:
        """Bytes of this rank beyond what Megatron holds, by what they are for."""
        held = [tensor.nbytes for lent in self._lent for tensor in lent.balanced.home.tensors()]
        copies = sum(held) if self._weights == "copy" else 0
        moving = {"balancer": self.balancer.extra_bytes, "rows in place of all-to-all": self.balancer.row_bytes}
        return {"working copy of the weights": copies, **moving}

    def submit(
        self, routes: Sequence[Sequence[Any]], *, stage: Stage = "update", free: FreeTokens | None = None
    ) -> None:
        """Plan the next window in the background, from what this rank will replay in it. Every rank must call this.

        Args:
            routes: routes[m][l] are the [T, K] ids of micro-step m and layer `found.layers[l]`, rows in the order in
                which this rank's router sees them; an id that repeats in a row counts once; a row of -1 is unknown
            free: free[m] is a [T] mask of rows that reach no loss: where one is -1 the dispatcher gives it the least
                loaded experts, whatever its router chooses
        """
        if free is not None:
            check_free_rows(self._config)
            free = [torch.as_tensor(is_free_T).cpu().numpy() for is_free_T in free]
        if self._lent:
            given = [[distinct(ids) for ids in by_layer] for by_layer in routes]
            self.balancer.submit(given, stage=stage, free=free)

    def begin(self) -> None:
        """Begin the window: call it before Megatron's schedule. Every rank must call this."""
        if self._is_failed:
            raise AdapterError("a window was left with an error; uninstall, load a checkpoint and install again")
        is_early = any(self._is_early(chunk) for chunk in range(len(self.model_chunks)))
        if is_early and self._config.grad_sync_func is not None:
            raise AdapterError(
                "config.grad_sync_func starts the reduction of expert gradients before they are home; leave it None "
                "(align_grad_reduce=False) with overlap_grad_reduce"
            )
        for chunk in self.model_chunks:
            if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
                chunk.start_param_sync(force_sync=True)
        self.micro_steps = [-1] * len(self.model_chunks)
        if not self._lent:
            return
        self.totals.clear()
        for lent in self._lent:
            lent.begin()
            self.totals.update(lent.gradients())
        self._home = set()
        self._unreleased = [lent for lent in reversed(self._lent) if self._is_early(lent.chunk)]
        # A working copy need not return: Megatron's own parameters stayed at their owners.
        self.balancer.begin(with_weights=self._weights == "in place")
        self._finalize, self._config.finalize_model_grads_func = self._config.finalize_model_grads_func, self._reduce

    def end(self) -> None:
        """End the window, if Megatron's gradient reduction has not: gradients go to their owners."""
        if self.balancer.is_open:
            self._unwrap()
            self.balancer.end()

    def abort(self, reason: str) -> None:
        """Give up the open window, on all ranks of the node: uninstall, load a checkpoint and install again."""
        self._is_failed = True
        self._unwrap()
        self.balancer.abort(reason)

    def _unwrap(self) -> None:
        """Give Megatron back its function that reduces gradients."""
        if self._config.finalize_model_grads_func == self._reduce:
            self._config.finalize_model_grads_func, self._finalize = self._finalize, None

    def suspended(self) -> AbstractContextManager[None]:
        """Stop all transfers while buffers are offloaded and reloaded. Every rank must enter."""
        if self._weights == "in place" and self._lent:
            # A storage that torch has shared has no allocator any more: resizing it from zero ends the process.
            raise AdapterError(
                "torch cannot free and allocate the memory of parameters again once it is shared in place; install "
                "with weights='copy' to offload between windows"
            )
        return self.balancer.suspended()

    def _is_early(self, chunk: int) -> bool:
        """Whether DDP reduces the gradients of a chunk's buckets while backward still runs."""
        config = getattr(self.model_chunks[chunk], "ddp_config", None)
        return bool(getattr(config, "overlap_grad_reduce", False))

    def release(self, home: Sequence[int]) -> None:
        """Let DDP reduce the gradients of layers that are home, always in the same order: its ranks must agree."""
        self._home.update(home)
        while self._unreleased and self._unreleased[0].index in self._home:
            lent = self._unreleased[0]
            if not lent.release(self.model_chunks[lent.chunk]):
                return
            self._unreleased.pop(0)

    def _count(self, chunk: int, *_: Any) -> None:
        """Count the forward passes of a chunk."""
        if self.balancer.is_open or not self._lent:
            self.micro_steps[chunk] += 1

    def _reduce(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Take the place of `config.finalize_model_grads_func` in a window: gradients must be home to be reduced."""
        finalize = self._finalize
        self.end()
        self.release(range(len(self._lent)))
        if finalize is not None:
            finalize(model, *args, **kwargs)

    def uninstall(self) -> None:
        """Restore the model chunks and free what was added. Every rank must call this, with no window open."""
        if self.balancer.is_open and not self._is_failed:
            raise AdapterError("a window is open; end it before experts are uninstalled")
        for hook in self._hooks:
            hook.remove()
        for lent in self._lent:
            lent.restore()
        for chunk in self.model_chunks:
            delattr(bare(chunk), KEPT)
        self.balancer.close()


def install(
    model_chunks: Sequence[nn.Module],
    *,
    cluster: Cluster,
    options: BalancerOptions | None = None,
    weights: Kept = "copy",
    worker: PlanWorker | None = None,
) -> MegatronHandle:
    """Balance the experts of these model chunks from now on, in windows. Every rank of the model must call this.

    Args:
        model_chunks: as Megatron's schedules take them, wrapped in its DistributedDataParallel
        cluster: of one EP group
        options: slots and the rest; order of execution, pipeline stage and the gradients' dtype are filled in here
        weights: `copy`: experts compute on a working copy of the weights; `in place`: they move between Megatron's own
            parameters, whose memory the ranks of a node share, on the CPU alone
        worker: a planning process to use, instead of an own one
    """
    group = parallel_state.get_expert_model_parallel_group()
    check_group(group, advice="before initialize_model_parallel")
    # What one rank must refuse, all refuse.
    gather = partial(gather_objects, group=group)
    found = all_or_none(partial(_checked, model_chunks, cluster), gather)[group.rank()]
    options = _filled_in(options or BalancerOptions(), model_chunks, found)
    handle = MegatronHandle(model_chunks, found, cluster=cluster, options=options, weights=weights)
    handle.put(worker)
    return handle


def installed(model_chunks: Sequence[nn.Module]) -> MegatronHandle | None:
    """Return the handle of these model chunks, or None where nothing is installed."""
    return getattr(bare(model_chunks[0]), KEPT, None)


def uninstall(handle: MegatronHandle) -> None:
    """Restore the model chunks of a handle. Every rank must call this."""
    handle.uninstall()


def same_memory(parameter: Tensor) -> Tensor:
    """Return a tensor over the same memory that autograd knows nothing of: DDP's hooks do not see its gradient."""
    place = parameter.storage_offset(), parameter.shape, parameter.stride()
    return torch.empty(0, dtype=parameter.dtype, device=parameter.device).set_(parameter.untyped_storage(), *place)


def distinct(ids: Any) -> np.ndarray:
    """[T, K] ids ascending, each once: Megatron's routing map holds no expert twice. -1 takes the place of the rest."""
    ids_TK = np.sort(torch.as_tensor(ids).cpu().numpy(), axis=1)
    ids_TK[:, 1:][ids_TK[:, 1:] == ids_TK[:, :-1]] = -1
    return ids_TK


def _checked(model_chunks: Sequence[nn.Module], cluster: Cluster) -> FoundChunks:
    """Refuse what cannot be balanced, before anything changes."""
    found = inspect(model_chunks)
    if any(KEPT in vars(bare(chunk)) for chunk in model_chunks):
        raise AdapterError("these model chunks have balanced experts already; uninstall them first")
    if found.unsupported:
        raise AdapterError("; ".join(found.unsupported))
    ranks = parallel_state.get_expert_model_parallel_world_size()
    if cluster.ep != ranks:
        raise AdapterError(
            f"the cluster has an EP group of {cluster.ep} ranks, Megatron's has {ranks}; give one with ep={ranks}"
        )
    for one in found.layers:
        experts = bare(model_chunks[one.chunk]).get_submodule(one.path).mlp.experts
        if any(p.requires_grad and not hasattr(p, "main_grad") for p in experts.parameters()):
            raise AdapterError(
                f"`{one.path}`: expert parameters have no main_grad; install after the model is wrapped in Megatron's "
                "DistributedDataParallel"
            )
    return found


def _filled_in(options: BalancerOptions, model_chunks: Sequence[nn.Module], found: FoundChunks) -> BalancerOptions:
    """Options with what Megatron decides: dtype of gradients, order of execution, pipeline stage."""
    if not found.layers:
        return options
    first = found.layers[0]
    experts = bare(model_chunks[first.chunk]).get_submodule(first.path).mlp.experts
    gradient = getattr(next(experts.parameters()), "main_grad", None)
    config, stages = get_model_config(bare(model_chunks[0])), parallel_state.get_pipeline_model_parallel_world_size()
    is_again, chunks = config.recompute_granularity is not None, len(model_chunks)
    grad_dtype: Any = options.grad_dtype if gradient is None else str(gradient.dtype).removeprefix("torch.")
    return replace(
        options,
        grad_dtype=grad_dtype,
        order="1f1b" if stages > 1 else "recompute" if is_again else "plain",
        pipeline_stage=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_stages=stages,
        chunk_layers=tuple(sum(one.chunk == at for one in found.layers) for at in range(chunks)) if chunks > 1 else (),
        chunk_group=getattr(config, "microbatch_group_size_per_vp_stage", None) if chunks > 1 else None,
    )
