"""verl's Megatron engine with balanced experts: in training that replays routes, windows are opened by themselves.

    VERL_USE_EXTERNAL_MODULES=equipoise.adapters.verl
    actor_rollout_ref.actor.megatron.router_replay.mode=R3                                  or R2
    +actor_rollout_ref.actor.megatron.override_mcore_model_config.equipoise.slots=1         optional, as are others
    +actor_rollout_ref.actor.megatron.override_mcore_model_config.equipoise.fill_free_rows=true    optional

Importing this module registers `BalancedEngine` for NVIDIA's GPUs, which verl prefers to the engine that it registers
for any vendor; nothing of verl is replaced but, during one call, the name by which its engine finds Megatron's
schedule. Read and run was verl 0.9.1. These names of it are used:
1. `MegatronEngineWithLMHead.forward_backward_batch` gets `get_forward_backward_func` from its module and calls the
   schedule with all micro-batches of an optimizer step, or of a log-prob pass (`forward_only`).
2. `set_router_replay_data` cuts the routes of a micro-batch as the routers will see them, and leaves them in
   `router.router_replay`: `target_topk_idx`, and where `target_replay_mask` is false the router chooses by itself.
   Its `forward_step` calls it for one micro-batch at a time; here it is called ahead for all of them. In R3 the mask is
   false at padding and at the last token of a sample, whose logits it does not use; in R2, which has no mask, one of
   all tokens is cut here to find padding, where windows fill rows.
3. `enable_routing_replay` of a batch says whether it replays; a batch of mode R2 without `routed_experts` records.
"""

import copy
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import verl
from megatron.core import parallel_state
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id
from verl.utils.megatron import router_replay_utils
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import transformer_impl

from equipoise.adapters.megatron import MegatronHandle, install
from equipoise.adapters.megatron_model import bare, check_free_rows, inspect
from equipoise.adapters.protocol import fills_free, trainer_options
from equipoise.core import Cluster
from equipoise.core.errors import AdapterError
from equipoise.transfer.waits import all_or_none, gather_objects

TESTED = "0.9.1"
"""The version of verl that is read and run."""


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor="nvidia")
class BalancedEngine(transformer_impl.MegatronEngineWithLMHead):
    """verl's engine for language models on Megatron-Core; it balances experts wherever routes are replayed."""

    handle: MegatronHandle | None = None
    """Of the model, from the first window on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if verl.__version__ != TESTED:
            raise AdapterError(f"verl {verl.__version__} is not supported; use verl=={TESTED}")
        super().__init__(*args, **kwargs)
        # A reference model has no gradients and replays nothing.
        if not self.engine_config.forward_only and not self.enable_routing_replay:
            raise AdapterError(
                "router_replay.mode is 'disabled', so no routes are known; set actor_rollout_ref.actor.megatron."
                "router_replay.mode=R3, or take equipoise.adapters.verl out of VERL_USE_EXTERNAL_MODULES"
            )

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """Run a batch as verl does, in a window where it replays routes. Every rank must call this."""
        is_replayed = tensordict_utils.get_non_tensor_data(data, key="enable_routing_replay", default=False)
        is_recorded = forward_only and self.engine_config.router_replay.mode == "R2" and "routed_experts" not in data
        with self._scheduled() if is_replayed and not is_recorded else nullcontext():
            return super().forward_backward_batch(data, loss_function, forward_only)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Offload or load as verl does. Every rank must call this."""
        with self.handle.suspended() if self.handle is not None else nullcontext():
            super().to(device, model, optimizer, grad)

    @contextmanager
    def _scheduled(self) -> Iterator[None]:
        """Let verl's engine find a schedule that runs in a window."""
        find = transformer_impl.get_forward_backward_func
        transformer_impl.get_forward_backward_func = lambda: partial(self._run, find())
        try:
            yield
        finally:
            transformer_impl.get_forward_backward_func = find

    def _run(self, schedule: Any, *, data_iterator: Any, forward_only: bool, **given: Any) -> Any:
        """Run Megatron's schedule in a window of the routes that its micro-batches replay."""
        one = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        # A copy of verl's iterator leaves the micro-batches to the schedule.
        batches, routes = list(copy.copy(one)), list[list[Tensor]]()
        # Routes differ between ranks; where those of one are missing, all ranks of the training stop.
        check, fills = partial(self._fill, routes, batches), self._fills_free
        all_or_none(check, partial(gather_objects, group=dist.group.WORLD))
        if self.handle is None:
            self.handle = self._install()
        # Rows that a router chooses for by itself are those whose logits verl does not use, in all layers alike.
        free = [(by_layer[0] < 0).all(dim=1) for by_layer in routes if by_layer] if fills else None
        with self.handle.window(routes, stage="recompute" if forward_only else "update", free=free or None):
            return schedule(data_iterator=data_iterator, forward_only=forward_only, **given)

    @property
    def _given(self) -> Mapping[str, Any]:
        """What `override_mcore_model_config` says under `equipoise`."""
        return self.engine_config.override_mcore_model_config.get("equipoise", {})

    @property
    def _fills_free(self) -> bool:
        return fills_free(self._given)

    def _fill(self, routes: list[list[Tensor]], batches: Sequence[Any]) -> None:
        """Append the ids that this rank's routers will replay, by micro-step and layer."""
        if self.engine_config.dynamic_context_parallel:
            raise AdapterError("dynamic_context_parallel is not supported; set it to false")
        if self._fills_free:
            check_free_rows(self.tf_config)
        layers = inspect(self.module).layers if self.handle is None else self.handle.found.layers
        chunks = [bare(chunk) for chunk in self.module]
        routers = [chunks[one.chunk].get_submodule(one.path).mlp.router for one in layers]
        for micro_step, batch in enumerate(batches):
            if batch.get("routed_experts", None) is None:
                raise AdapterError(
                    f"micro-step {micro_step} has no routed_experts; have the rollout return them "
                    "(actor_rollout_ref.rollout.enable_rollout_routing_replay=True), or record them in mode R2"
                )
            try:
                self._set_targets(batch, chunks)
                routes.append([_targets(router, micro_step) for router in routers])
            finally:
                for router in routers:
                    router.router_replay.clear_indices()

    def _set_targets(self, batch: Any, chunks: Sequence[Any]) -> None:
        """Cut the routes of a micro-batch for this rank's routers, as `forward_step` does."""
        names = ("input_ids", "routed_experts", "response_mask", "attention_mask")
        found = {name: batch[name].to(get_device_id()) for name in names if name in batch}
        routes, mask = found["routed_experts"], None
        try:
            if self.engine_config.router_replay.mode == "R3":
                routes = router_replay_utils.align_r3_router_replay_data(routes, found["input_ids"])
                mask = router_replay_utils.build_r3_replay_mask(found["input_ids"], found["response_mask"])
            elif self._fills_free and routes.is_nested:
                mask = torch.nested.nested_tensor_from_jagged(
                    torch.ones(len(routes.values()), dtype=torch.bool, device=routes.device), offsets=routes.offsets()
                )
            router_replay_utils.set_router_replay_data(
                routes, found.get("attention_mask"), self.tf_config, replay_mask=mask, model=chunks
            )
        except RuntimeError as error:
            raise AdapterError(f"routed_experts do not fit the batch: {error}") from error

    def _install(self) -> MegatronHandle:
        """Balance the model's experts, with the options of `override_mcore_model_config.equipoise`."""
        preset, options = trainer_options(self._given, example="equipoise.cluster=h200")
        # Ray decides which machine a rank runs on.
        hosts = gather_objects(socket.gethostname(), parallel_state.get_expert_model_parallel_group())
        nodes = [list(dict.fromkeys(hosts)).index(host) for host in hosts]
        cluster = Cluster.preset(preset, node_R=nodes)
        cluster.home_slots(inspect(self.module).shape)
        return install(self.module, cluster=cluster, options=options)


def _targets(router: Any, micro_step: int) -> Tensor:
    """Return the [T, K] ids that a router will replay, -1 where it chooses by itself."""
    ids, mask = router.router_replay.target_topk_idx, router.router_replay.target_replay_mask
    experts = router.config.num_moe_experts
    if ids.shape[1] != router.topk or ids.min() < 0 or ids.max() >= experts:
        raise AdapterError(
            f"layer {router.layer_number - 1}, micro-step {micro_step}: {ids.shape[1]} ids per token of routed_experts "
            f"are from {int(ids.min())} to {int(ids.max())}; the router takes {router.topk} of 0 to {experts - 1}; "
            "check the rollout with `equipoise doctor`"
        )
    return ids if mask is None else torch.where(mask.bool()[:, None], ids, -1)
