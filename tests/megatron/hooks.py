"""slime's and miles' training loop, as far as their hooks see it, around the bench's model: every rank runs this.

Functions, attributes and cursors have the trainers' names; `equipoise/adapters/slime.py` says which sources were read.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from equipoise.adapters import megatron, megatron_model, slime
from equipoise.adapters.megatron_model import bare
from equipoise.core.errors import EquipoiseError
from tests.megatron import shims
from tests.megatron.layouts import Layout
from tests.megatron.life import attributes
from tests.megatron.model import (
    LENGTH,
    SAMPLES,
    Batch,
    Ids,
    Run,
    Trained,
    build,
    forward_backward,
    masters,
    moments,
    parallel,
    update,
)
from tests.megatron.work import prepare
from tests.pool import kept_worker

PADDED = 3
"""Rows of padding at the end of every micro-step."""


class Replay:
    """The replayed routes of one router."""

    def __init__(self) -> None:
        self.forward_index = 0
        self.top_indices_list: list[Tensor] = []

    def pop_forward(self) -> Tensor:
        self.forward_index += 1
        ids = self.top_indices_list[self.forward_index - 1]
        return torch.where((ids == -1).all(dim=1, keepdim=True), torch.arange(ids.shape[1], dtype=ids.dtype), ids)


class Tokens:
    """A data iterator whose micro-batches are one sample each, of as many tokens as rows but for its padding."""

    def __init__(self) -> None:
        self.taken = 0

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        self.taken += 1
        return {"tokens": [torch.zeros(LENGTH * SAMPLES - PADDED + 1)]} | dict.fromkeys(set(keys) - {"tokens"})


def prepare_routed_experts_for_routing_replay(
    routes: Sequence[Tensor],
    tokens: Sequence[Tensor],
    *,
    num_experts: int,
    data_pad_size_multiplier: int,
    sequence_parallel: bool,
    allgather_cp: bool,
) -> Tensor:
    """Pad every sample by one row and all of them to a multiple, as slime does, with running ids."""
    assert [len(ids) + 1 for ids in routes] == [len(text) for text in tokens] and not (
        sequence_parallel or allgather_cp
    )

    def padded(ids: Tensor, rows: int) -> Tensor:
        running = torch.arange(rows * ids[0].numel(), dtype=ids.dtype).view(rows, *ids.shape[1:])
        return torch.cat([ids, running % num_experts])

    laid_out = torch.cat([padded(ids, 1) for ids in routes])
    return padded(laid_out, -len(laid_out) % data_pad_size_multiplier)


def fill_replay_data(
    *,
    args: Any,
    models: Any,
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
    data_key: str,
    **given: Any,
) -> None:
    """Pad routes with rows of -1 as miles does, and hand them on."""
    for iterator in data_iterator:
        iterator.reset()
    for _ in range(sum(num_microbatches)):
        batch = data_iterator[0].get_next([data_key, "tokens", "max_seq_lens"])
        laid_out = torch.cat([torch.cat([ids, torch.full_like(ids[:1], -1)]) for ids in batch[data_key]])
        rows = -len(laid_out) % args.data_pad_size_multiplier
        laid_out = torch.cat([laid_out, torch.full_like(laid_out[:1].expand(rows, -1, -1), -1)])
        given["register_replay_list_func"](given["replay_list"], laid_out, models=models)
    del given["rollout_data"][data_key]
    for iterator in data_iterator:
        iterator.reset()


def trainer_modules(pads_with: str) -> Any:
    """Let the hooks find the trainer's function that pads routes."""
    place = next(place for place in slime.PADDERS if place[0].startswith("miles" if pads_with == "-1" else "slime"))
    module = ModuleType(place[0])
    setattr(module, place[1], globals()[place[1]])
    return patch.dict(sys.modules, {place[0]: module})


class Trainer:
    """One rank of a trainer that replays routes."""

    def __init__(
        self, run: Run, *, pads_with: str, has_hooks: bool, fills: bool = False, by_hand: Sequence[Any] = ()
    ) -> None:
        """
        Args:
            fills: whether windows fill rows that reach no loss
            by_hand: by micro-step as `fill` meets them, the rows that windows filled, by layer index
        """
        self.run, self.pads_with, self.is_replaying, self.by_hand = run, pads_with, False, list(by_hand)
        self.args = SimpleNamespace(
            use_routing_replay=True,
            use_rollout_routing_replay=True,
            actor_num_gpus_per_node=4,
            offload_train=False,
            equipoise={"cluster": "h200", "slots": 0, "objective": "skew", "planning_timeout_s": 180.0},
            data_pad_size_multiplier=LENGTH * SAMPLES,
            sequence_parallel=False,
            allgather_cp=False,
        )
        if fills:
            self.args.equipoise["fill_free_rows"] = True
        self.before_train_step = slime.before_train_step if has_hooks else None
        self.before_log_prob = slime.before_log_prob if has_hooks else None
        self.done = Trained()
        self.routers = {layer.layer_number - 1: layer.router for chunk in run.layers for layer in chunk}
        for router in self.routers.values():
            router.routing_replay = Replay()
            router.register_forward_pre_hook(self._set_targets)

    def _set_targets(self, router: Any, _: Any) -> None:
        if self.is_replaying:
            router.router_replay.set_target_indices(router.routing_replay.pop_forward().long())

    def fill(self, steps: Sequence[Ids]) -> None:
        """Give routers the routes of all micro-steps of a rollout, the last rows of each padded."""
        for by_layer in (by_layer for ids in steps for by_layer in ids):
            filled = self.by_hand.pop(0) if self.by_hand else {}
            for at, number in enumerate(self.run.numbers):
                ids = by_layer[at].to(torch.int32, copy=True)
                if self.pads_with == "-1":
                    ids[-PADDED:] = -1
                else:
                    ids[-PADDED:] = (
                        torch.arange(PADDED * ids.shape[1]).view(PADDED, -1) + at
                    ) % self.run.layout.experts
                ids = filled[at].put(ids) if at in filled else ids
                self.routers[number].routing_replay.top_indices_list.append(ids)

    def clear(self, *, only_forward: bool = False) -> None:
        for router in self.routers.values():
            router.routing_replay.forward_index = 0
            if not only_forward:
                router.routing_replay.top_indices_list = []

    def _schedule(self, one: list[Batch], *, forward_only: bool = False) -> None:
        replaying = self.run.routing(RouterReplayAction.REPLAY_FORWARD) if self.is_replaying else nullcontext()
        with replaying:
            self.done.losses += forward_backward(self.run, one, forward_only=forward_only)
        report = None if self.balancer is None else self.balancer.report
        if report is not None and all(report is not seen for seen in self.done.reports):
            self.done.reports.append(report)

    @property
    def balancer(self) -> Any:
        """The balancer that the hooks have installed, if they have."""
        handle = megatron.installed(self.run.chunks)
        return None if handle is None else handle.balancer

    @torch.no_grad()
    def forward_only(self, steps: Sequence[list[Batch]], num_microbatches: list[int], store_prefix: str = "") -> None:
        """Compute log-probs of all optimizer steps of a rollout."""
        self.is_replaying = not store_prefix and self.args.use_rollout_routing_replay
        data_iterator = [Tokens()]
        if self.before_log_prob is not None:
            self.before_log_prob(self.args, self.run.chunks, store_prefix)
        for one in steps:
            self._schedule(one, forward_only=True)
        assert data_iterator[0].taken == 0, "hooks leave the micro-batches to the schedule"
        assert self.balancer is None or not self.balancer.is_open, "the window of the last optimizer step has ended"
        self.clear(only_forward=True)

    def train_one_step(self, one: list[Batch], num_microbatches: int, step_id: int = 0) -> None:
        """Run one optimizer step."""
        self.is_replaying = True
        data_iterator = [Tokens()]
        self.run.config.finalize_model_grads_func = finalize_model_grads
        for chunk in self.run.chunks:
            chunk.zero_grad_buffer()
        self.run.optimizer.zero_grad()
        if self.before_train_step is not None:
            self.before_train_step(self.args, 0, step_id, self.run.chunks, self.run.optimizer, None)
        self._schedule(one)
        assert data_iterator[0].taken == 0, "hooks leave the micro-batches to the schedule"
        assert self.balancer is None or not self.balancer.is_open, "the reduction of gradients has ended the window"
        self.done.norms.append(update(self.run))

    def train(self, steps: Sequence[list[Batch]], routes: Sequence[Ids]) -> Trained:
        """Train a rollout of two optimizer steps, the second one shorter, then one whose log-prob pass is skipped."""
        steps = [steps[0], steps[1][:3], steps[2]]
        counts = [len(one) for one in steps]
        self.fill([routes[0], routes[1][:3]])
        self.forward_only(steps[:2], counts[:2], "ref_")
        self.forward_only(steps[:2], counts[:2])
        for step_id in range(2):
            self.train_one_step(steps[step_id], counts[step_id], step_id)
        self.clear()
        self.fill(routes[2:])
        self.train_one_step(steps[2], counts[2])
        self.clear()
        self.done.weights = {name: parameter.detach().clone() for name, parameter in self.run.named_parameters()}
        self.done.shards = [tensor.clone() for tensor in (*masters(self.run), *moments(self.run))]
        return self.done


def replay_with_hooks(group: Any, layout: Layout, pads_with: str) -> dict[str, Any]:
    """Train with and without hooks, and compare."""
    with shims.cpu_megatron(), parallel(layout), planned_by_kept_worker():
        steps, routes = prepare(layout)
        expected = Trainer(build(layout), pads_with=pads_with, has_hooks=False).train(steps, routes)
        trainer = Trainer(build(layout), pads_with=pads_with, has_hooks=True)
        found = trainer.train(steps, routes)
        megatron.uninstall(megatron.installed(trainer.run.chunks))
        return {
            "differences": found.differences(expected),
            "losses": len(expected.losses),
            "micro-steps": [len(report.planned_ML) for report in found.reports],
            "displaced": [report.displaced for report in found.reports],
            "as planned": all(report.is_as_planned for report in found.reports),
            "hooks left": sum(len(bare(chunk)._forward_hooks) for chunk in trainer.run.chunks),
        }


def fill_with_hooks(group: Any, layout: Layout, pads_with: str) -> dict[str, Any]:
    """Train in windows that fill padding, then plainly with the same experts given to it; compare what counts."""
    windows: list[dict[tuple[int, int], Any]] = []
    begin = megatron.MegatronHandle.begin

    def note(handle: Any) -> None:
        begin(handle)
        windows.append(dict(handle.balancer.filled))

    with shims.cpu_megatron(), parallel(layout), planned_by_kept_worker():
        steps, routes = prepare(layout)
        # The last rows as routers see them, samples side by side, are left out of the loss.
        is_free = (torch.arange(LENGTH * SAMPLES) >= LENGTH * SAMPLES - PADDED).view(LENGTH, SAMPLES).T
        steps = [[(m, text, labels.masked_fill(is_free, -100)) for m, text, labels in one] for one in steps]
        trainer = Trainer(build(layout), pads_with=pads_with, has_hooks=True, fills=True)
        with trainer_modules(pads_with), patch.object(megatron.MegatronHandle, "begin", note):
            found = trainer.train(steps, routes)
        megatron.uninstall(megatron.installed(trainer.run.chunks))
        # Windows of log-probs fill as those of the updates do, which have the same routes.
        by_hand = [
            {layer: filled for (m, layer), filled in windows[number].items() if m == micro_step}
            for number, count in ((2, 4), (3, 3), (4, 4))
            for micro_step in range(count)
        ]
        expected = Trainer(build(layout), pads_with=pads_with, has_hooks=False, by_hand=by_hand).train(steps, routes)
        used = [torch.bincount(one.ids_FK.flatten(), minlength=layout.experts) for one in windows[2].values()]
        return {
            "differences": found.differences(expected),
            "losses": len(expected.losses),
            "filled rows": [report.filled_rows for report in found.reports],
            "dispatch": {report.dispatch for report in found.reports},
            "as planned": all(report.is_as_planned for report in found.reports),
            "displaced": sum(report.displaced for report in found.reports),
            "experts of padding": len(torch.stack(used).sum(dim=0).nonzero()),
        }


def planned_by_kept_worker() -> Any:
    """Let the hooks use the planning process of the other tests."""
    return patch.object(slime, "install", partial(megatron.install, worker=kept_worker()))


def refuse(group: Any, layout: Layout) -> dict[str, Any]:
    """Begin a step with each kind of bad input, some of them on one rank alone; return errors, and what was changed."""
    with shims.cpu_megatron(), parallel(layout):
        steps, routes = prepare(layout)
        trainer = Trainer(build(layout), pads_with="-1", has_hooks=True)
        trainer.fill(routes[:1])
        before = attributes(trainer.run)
        errors = {name: error_of(trainer, steps[0], case) for name, case in CASES.items()}
        after = attributes(trainer.run)
        changed = [place for place in before.keys() | after.keys() if before.get(place) is not after.get(place)]
        trainer.args.use_rollout_routing_replay = False
        trainer.forward_only(steps[:1], [len(steps[0])])
        trainer.run.chunks[0].role = "critic"
        _step(trainer)
        return {"errors": errors, "changed": changed, "is installed": trainer.balancer is not None}


def error_of(trainer: Trainer, one: list[Batch], case: Callable[[Trainer], Any]) -> str:
    """Return the error with which the hook refuses a case; what the case changed is restored."""
    with case(trainer):
        try:
            trainer.train_one_step(one, len(one))
        except EquipoiseError as error:
            return f"{type(error).__name__}: {error}"
    return "none"


def other_rank(case: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
    """Apply a case on rank 2 alone."""
    return lambda trainer: case(trainer) if dist.get_rank() == 2 else nullcontext()


def _last_list(trainer: Trainer) -> Replay:
    return trainer.routers[max(trainer.routers)].routing_replay


CASES: dict[str, Callable[[Trainer], Any]] = {
    "replay off": lambda t: patch.object(t.args, "use_routing_replay", False),
    "no replay lists": lambda t: patch.object(t.routers[max(t.routers)], "routing_replay", None),
    "missing routes": other_rank(
        lambda t: patch.object(_last_list(t), "top_indices_list", _last_list(t).top_indices_list[:-1])
    ),
    "another shape": other_rank(
        lambda t: patch.object(
            _last_list(t), "top_indices_list", [ids[:, :1] for ids in _last_list(t).top_indices_list]
        )
    ),
    "ids out of range": other_rank(
        lambda t: patch.object(_last_list(t), "top_indices_list", [ids + 9 for ids in _last_list(t).top_indices_list])
    ),
    "experts do not divide": lambda t: patch.object(t.run.config, "num_moe_experts", 9),
    "another Megatron": lambda t: patch.object(megatron_model, "VERSION", "0.20.0"),
    "aux loss": lambda t: _filling(t, moe_aux_loss_coeff=0.01, moe_router_load_balancing_type="aux_loss"),
    "no padder": lambda t: _filling(t),
    "unclear": lambda t: patch.dict(t.args.equipoise, fill_free_rows="yes"),
    "another caller": lambda t: patch.object(t, "train_one_step", partial(_step, t)),
    "offload": lambda t: patch.object(t.args, "offload_train", True),
    "unknown option": lambda t: patch.object(t.args, "equipoise", {"cluster": "h200", "slot": 1}),
    "no cluster": lambda t: patch.object(t.args, "equipoise", None),
}


def _filling(trainer: Trainer, **config: Any) -> Any:
    stack = ExitStack()
    stack.enter_context(patch.dict(trainer.args.equipoise, fill_free_rows=True))
    for name, value in config.items():
        stack.enter_context(patch.object(trainer.run.config, name, value))
    return stack


def _step(trainer: Trainer, *_: Any) -> None:
    slime.before_train_step(trainer.args, 0, 0, trainer.run.chunks, trainer.run.optimizer, None)
