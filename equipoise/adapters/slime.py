"""Hooks for slime and miles: balance experts in training that replays routes on Megatron-Core.

    --use-rollout-routing-replay             or --use-routing-replay
    --custom-megatron-before-train-step-hook-path equipoise.adapters.slime.before_train_step
    --custom-megatron-before-log-prob-hook-path equipoise.adapters.slime.before_log_prob
    --custom-config-path balance.yaml        optional, with `equipoise: {cluster: h200, slots: 1, fill_free_rows: true}`

The first call installs the Megatron-Core adapter. Neither trainer is imported here. Read were THUDM/slime 624b824a and
radixark/miles 31f1ca96 with radixark/Megatron-LM 2e64d788, all of August 2026. These names of theirs are used:
1. `train_one_step` calls its hook before an optimizer step, `forward_only` before the log-prob passes of all optimizer
   steps of a rollout. Their local `num_microbatches`, which Megatron's schedule gets, is no argument of a hook.
2. `router.routing_replay` of a MoE layer has the [T, K] ids of every micro-step of a rollout in `top_indices_list`, cut
   and padded as the router sees them; `forward_index` is the next one. slime pads with distinct ids, miles with rows of
   -1, for which its routers take experts 0 to K-1.
   Which rows are padding is not kept: with `fill_free_rows` the trainer's own function that pads routes (`PADDERS`) is
   called with markers in place of routes, for the tokens of the caller's local `data_iterator`.
3. With `--use-rollout-routing-replay` the pass without a `store_prefix` replays; without it that pass records. The
   reference model and the teacher route on their own, and the critic (`model[0].role`) replays nothing.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from equipoise.adapters.megatron import MegatronHandle, install, installed
from equipoise.adapters.megatron_model import bare, check_free_rows, inspect
from equipoise.adapters.protocol import FILL, fills_free, trainer_options
from equipoise.core import Cluster, Stage
from equipoise.core.errors import AdapterError
from equipoise.core.options import BalancerOptions
from equipoise.transfer.waits import all_or_none, gather_objects

READ = "slime 624b824a and miles 31f1ca96"
"""Versions whose sources were read."""
PADDERS = (
    ("slime.backends.megatron_utils.cp_utils", "prepare_routed_experts_for_routing_replay"),
    ("miles.backends.training_utils.replay_data", "fill_replay_data"),
)
"""Where slime and miles pad the routes of a micro-step for this rank's routers: module and function."""


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Sequence[nn.Module], optimizer: Any, scheduler: Any
) -> None:
    """Begin the window of one optimizer step, which the reduction of gradients ends. Every rank must call this."""
    if getattr(model[0], "role", "actor") == "actor":
        _begin(args, model, caller="train_one_step", stage="update")


def before_log_prob(args: Any, model: Sequence[nn.Module], store_prefix: str) -> None:
    """Begin the first window of a pass that replays routes: one per call of the schedule. Every rank must call this."""
    is_recorded = args.use_routing_replay and not args.use_rollout_routing_replay
    if getattr(model[0], "role", "actor") != "actor" or store_prefix or is_recorded:
        return
    handle, counts = _begin(args, model, caller="forward_only", stage="recompute")

    def end_after_last(*_: Any) -> None:
        """End the window with the last forward pass of its last micro-step, and begin the next one."""
        if handle.micro_steps[-1] + 1 < counts[0]:
            return
        handle.end()
        counts.pop(0)
        if counts:
            handle.begin()
        else:
            hook.remove()

    hook = bare(model[-1]).register_forward_hook(end_after_last)


def _begin(args: Any, model: Sequence[nn.Module], *, caller: str, stage: Stage) -> tuple[MegatronHandle, list[int]]:
    """Check, install at the first call, submit all windows, begin the first; return the micro-steps of each window."""
    counts, windows, free = list[int](), list[Any](), list[Any]()

    def check() -> None:
        called_by = _caller(caller)
        found = called_by["num_microbatches"]
        counts.extend([found] if isinstance(found, int) else found)
        windows.extend(_replayed(args, model, counts))
        fills = fills_free(_given(args))
        free.extend(_free_rows(args, model, called_by, windows) if fills else [None] * len(windows))

    # Routes differ between ranks; where those of one are missing, all ranks of the training stop.
    all_or_none(check, partial(gather_objects, group=dist.group.WORLD))
    handle = installed(model)
    if handle is None:
        cluster, options = _settings(args)
        cluster.home_slots(inspect(model).shape)
        handle = install(model, cluster=cluster, options=options)
    for routes, rows in zip(windows, free, strict=True):
        handle.submit(routes, stage=stage, free=rows)
    handle.begin()
    return handle, counts


def _caller(name: str) -> Mapping[str, Any]:
    """Return the local names of the function that called the hook."""
    frame = sys._getframe()
    while frame.f_code.co_name != name and frame.f_back is not None:
        frame = frame.f_back
    found = frame.f_locals if frame.f_code.co_name == name else {}
    if found.get("num_microbatches") is None:
        raise AdapterError(f"no function {name} with num_microbatches called this hook; use {READ}")
    return found


class _Markers:
    """The trainer's micro-batches from here on, with a marker for every token that has a route."""

    KEY = "equipoise_markers"

    def __init__(self, called_by: Mapping[str, Any]) -> None:
        # A copy leaves the micro-batches to the schedule.
        self._batches = copy.copy(called_by["data_iterator"][0])

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return one micro-batch as the trainer's iterators do."""
        batch: dict[str, Any] = self._batches.get_next([key for key in keys if key != self.KEY])
        # A sample's last token has no route: the trainers pad every sample by one.
        batch[self.KEY] = [torch.ones((len(tokens) - 1, 1, 1), dtype=torch.int32) for tokens in batch["tokens"]]
        return batch

    def reset(self) -> "_Markers":
        """Stay where the trainer is."""
        return self


def _free_rows(
    args: Any, model: Sequence[nn.Module], called_by: Mapping[str, Any], windows: Sequence[Any]
) -> list[list[Tensor]]:
    """Mark the rows without a route, and take their ids out of `windows`: samples' last tokens, and padding.

    The trainers leave the logits of both out of their losses, and pad behind the tokens of a sequence.

    Returns: [T] bool by window and micro-step
    """
    check_free_rows(bare(model[0]).config)
    pad = next(
        (getattr(sys.modules.get(module), name, None) for module, name in PADDERS if module in sys.modules), None
    )
    if pad is None or "data_iterator" not in called_by:
        raise AdapterError(f"equipoise.{FILL} needs the function by which slime or miles pads routes; use {READ}")
    lay_out = _with_slime if pad.__name__ == PADDERS[0][1] else _with_miles
    rows = iter(lay_out(pad, args, _Markers(called_by), count=sum(map(len, windows))))
    free = [list(islice(rows, len(window))) for window in windows]
    for window, masks in zip(windows, free, strict=True):
        for micro_step, (by_layer, is_free_T) in enumerate(zip(window, masks, strict=True)):
            if any(len(ids) != len(is_free_T) for ids in by_layer):
                raise AdapterError(
                    f"micro-step {micro_step} replays {[len(ids) for ids in by_layer]} rows by layer, but "
                    f"{pad.__name__} lays out {len(is_free_T)}; take {FILL} out, or use {READ}"
                )
            window[micro_step] = [torch.where(is_free_T[:, None].to(ids.device), -1, ids) for ids in by_layer]
    return free


def _with_slime(pad: Any, args: Any, markers: _Markers, *, count: int) -> list[Tensor]:
    """Return the [T] rows of each micro-step that slime pads: of one expert, with id 0."""
    found = []
    for _ in range(count):
        batch = markers.get_next([markers.KEY, "tokens"])
        given = {
            name: getattr(args, name) for name in ("data_pad_size_multiplier", "sequence_parallel", "allgather_cp")
        }
        found.append(pad(batch[markers.KEY], batch["tokens"], num_experts=1, **given).flatten() == 0)
    return found


def _with_miles(pad: Any, args: Any, markers: _Markers, *, count: int) -> list[Tensor]:
    """Return the [T] rows of each micro-step that miles pads: with -1."""
    found: list[Tensor] = []
    pad(
        args=args,
        models=None,
        data_iterator=[markers],
        num_microbatches=[count],
        rollout_data={markers.KEY: None},
        data_key=markers.KEY,
        replay_list=[],
        register_replay_list_func=lambda _, laid_out, **__: found.append(laid_out.flatten() == -1),
    )
    return found


def _replayed(args: Any, model: Sequence[nn.Module], counts: Sequence[int]) -> list[list[list[Tensor]]]:
    """Return the ids that this rank's routers will replay, by window, micro-step and layer."""
    if not args.use_routing_replay:
        raise AdapterError("args.use_routing_replay is off, so no routes are known; add --use-rollout-routing-replay")
    handle = installed(model)
    if handle is not None and handle.balancer.is_open:
        raise AdapterError("the last window is open, because an error left it; restart from a checkpoint")
    found = inspect(model) if handle is None else handle.found
    by_layer = []
    for one in found.layers:
        router, name = bare(model[one.chunk]).get_submodule(one.path).mlp.router, f"chunk {one.chunk} {one.path}"
        by_layer.append(_layer_ids(router, name=name, count=sum(counts), experts=found.shape.experts))
    micro_steps = map(list, zip(*by_layer, strict=True))
    return [list(islice(micro_steps, count)) for count in counts]


def _layer_ids(router: Any, *, name: str, count: int, experts: int) -> list[Tensor]:
    """Return the [T, K] ids that a router replays in its next `count` micro-steps, padding as the router fills it."""
    replay: Any = getattr(router, "routing_replay", None)
    if not hasattr(replay, "top_indices_list") or not hasattr(replay, "forward_index"):
        raise AdapterError(f"`{name}`: router.routing_replay is {replay!r}, not a list of replayed routes; use {READ}")
    start, recorded = replay.forward_index, replay.top_indices_list
    if len(recorded) < start + count:
        raise AdapterError(
            f"`{name}`: {count} micro-steps come next, but routes of {len(recorded) - start} are left; have the "
            "rollout return routes for every sample"
        )
    found = []
    for micro_step, ids in enumerate(recorded[start : start + count], start=start):
        is_ids = torch.is_tensor(ids) and ids.dim() == 2 and ids.shape[1] == router.topk
        if is_ids:
            is_padding = (ids == -1).all(dim=1, keepdim=True)
            ids = torch.where(is_padding, torch.arange(router.topk, dtype=ids.dtype, device=ids.device), ids)
        if not is_ids or (ids < 0).any() or (ids >= experts).any():
            raise AdapterError(
                f"`{name}`: routes of micro-step {micro_step}, {getattr(ids, 'shape', type(ids))}, must be a tensor "
                f"[T, {router.topk}] of ids 0 to {experts - 1}; check the rollout with `equipoise doctor`"
            )
        found.append(ids)
    return found


def _given(args: Any) -> Mapping[str, Any]:
    """Return what the trainer's configuration says under `equipoise`."""
    return getattr(args, "equipoise", None) or {}


def _settings(args: Any) -> tuple[Cluster, BalancerOptions]:
    """Return the cluster of this rank's EP group, and options: `args.equipoise`, as `--custom-config-path` sets it."""
    if getattr(args, "offload_train", False):
        raise AdapterError(
            "args.offload_train frees memory that ranks of a node share for balanced experts; run the rollout on other "
            "GPUs, without --colocate and --offload-train"
        )
    preset, options = trainer_options(_given(args), example="`equipoise: {cluster: h200}`")
    # Both trainers number ranks node by node.
    group = parallel_state.get_expert_model_parallel_group()
    nodes = [rank // args.actor_num_gpus_per_node for rank in dist.get_process_group_ranks(group)]
    numbers = {node: number for number, node in enumerate(sorted(set(nodes)))}
    return Cluster.preset(preset, node_R=[numbers[node] for node in nodes]), options
