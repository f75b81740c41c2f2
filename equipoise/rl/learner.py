"""`Learner`: the model that is trained, whoever computes its experts: on every rank, at their owners, or as planned.

    off         all experts on every rank; gradients of everything are summed over ranks
    static      experts at their owners, contiguous; the rest is data parallel
    equipoise   the same, and windows are planned

Knows the adapter, the balancer and the optimizer. Does not know samples, losses or files.

Invariants (asserted by the tests):
1. After `step`, what is not sharded has the same bits on every rank.
2. The gradient norm is the one over the whole model, each expert counted once.
3. `state_dict` is the whole model in canonical order, in every mode.
4. A gradient that is no number stops every rank before the optimizer runs.
"""

import hashlib
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.adapters import transformers as adapter
from equipoise.adapters.transformers_model import family_of
from equipoise.balancer import Balancer
from equipoise.core import Cluster, LoadMatrix, ModelShape, Stage, TrainingError
from equipoise.core.errors import EquipoiseError, TransferError
from equipoise.core.options import BalancerOptions
from equipoise.layer.checkpoint import gradient_norm
from equipoise.planning.report import WindowReport
from equipoise.planning.rows import WindowRoutes
from equipoise.planning.worker import PlanWorker
from equipoise.rl.batch import MicroBatch
from equipoise.rl.config import Mode, TrainConfig
from equipoise.rl.launch import Event, Show
from equipoise.rl.layout import Layout, build_cluster, gather_objects, sum_over
from equipoise.rl.model import packed_inputs
from equipoise.transfer.node import ExpertWeights


class Part(NamedTuple):
    """A tensor of the whole model that one rank holds: all of it, or some experts."""

    name: str
    first: int = 0
    """The first expert."""
    experts: int = 0
    """How many; 0 where the tensor is not sharded."""


class Learner:
    """One rank's share of the model being trained."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        layout: Layout,
        *,
        mode: Mode,
        worker: PlanWorker | None = None,
    ) -> None:
        """Share out the experts and make the optimizer. Every rank must call this.

        Args:
            model: the whole model, the same on every rank; the learner owns it until `close`
            worker: a planning process to use, instead of an own one
        """
        self.model, self.mode, self._config, self._layout = model, mode, config, layout
        self.shape: ModelShape = adapter.inspect(model).shape
        self.balancer: Balancer | None = None
        self._handle: adapter.Installed | None = None
        if mode == "off":
            self.routers = adapter.wrap_routers(model)
        else:
            self.balancer = self._build_balancer(is_enabled=mode == "equipoise")
            self._handle = adapter.install(model, self.balancer, worker=worker)
            self.routers = self._handle.routers
        _use_checkpointing(model, config.update.activation_checkpointing)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.update.learning_rate,
            weight_decay=config.update.weight_decay,
            eps=config.update.adam_eps,
        )

    def submit(self, routes: WindowRoutes, *, stage: Stage) -> None:
        """Announce the next window, to be planned in the background; returns at once. Every rank must call this.

        Args:
            routes: the ids that will be replayed, by micro-step and layer; or rows, where others may come
        """
        if self.balancer is not None:
            self.balancer.submit(routes, stage=stage)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Run the oldest announced window in a `with` block. Every rank must enter."""
        if self.balancer is None:
            yield
            return
        self.balancer.begin()
        yield
        self.balancer.end()

    @property
    def report(self) -> WindowReport | None:
        """What the balancer says of the last window."""
        return None if self.balancer is None else self.balancer.report

    def forward(
        self, micro_step: int, batch: MicroBatch, *, replay: bool = True, record: bool = False
    ) -> tuple[Tensor, Any]:
        """Return (logits [T, V], recorded ids [L, T, K] or None) of one micro-batch. Every rank must call this."""
        ids = batch.ids_LTK if replay else None
        with self.routers.forward_pass(micro_step, ids=ids, record=record) as recorded:
            logits_TV = self.model(**packed_inputs(self.model, batch.input_T, batch.position_T)).logits[0]
        return logits_TV, recorded.ids_LTK if record else None

    def step(self) -> float:
        """Reduce gradients, clip them, and run the optimizer; return the norm. Every rank must call this."""
        self._reduce()
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient norm is {norm}, so the weights are left as they are; lower update.learning_rate (now "
                f"{self._config.update.learning_rate:g}) and resume from the last checkpoint"
            )
        if norm > self._config.update.max_grad_norm:
            scale = self._config.update.max_grad_norm / (norm + 1e-6)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model in canonical order, on every rank. Every rank must call this, outside windows.

        Returns: where experts are moved they are views of the node's host store, valid until the next window
        """
        if self._handle is None:
            return dict(self.model.state_dict())
        return self._handle.stored_state_dict() if self.mode == "equipoise" else self._handle.state_dict()

    def owned_parts(self) -> dict[Part, Tensor]:
        """What this rank holds itself, in the layout of the whole model."""
        experts = {} if self._handle is None else self._handle.expert_parameters
        parts = {Part(name): tensor for name, tensor in self.model.state_dict().items() if name not in experts}
        rank = dist.get_rank(self._layout.ep_group)
        is_transposed = family_of(self.model.config.model_type).is_transposed
        for name, shard in experts.items():
            tensor = shard.transpose(1, 2) if is_transposed and shard.ndim == 3 else shard
            parts[Part(name, rank * len(shard), len(shard))] = tensor
        return parts

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the weights of a whole model; outside windows only."""
        if self._handle is None:
            self.model.load_state_dict(state)
        else:
            self._handle.load_state_dict(state)

    def save_model(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Write the whole model, given its state dict, as a HF checkpoint. For the first rank alone."""
        type(self.model).save_pretrained(self.model, path, state_dict=dict(state))

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of this rank's parameters, by name."""
        named = self.model.named_parameters()
        return {name: dict(self.optimizer.state[p]) for name, p in named if p in self.optimizer.state}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a state that `optimizer_state` gave."""
        for name, parameter in self.model.named_parameters():
            if name in state:
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device) if value.ndim else value for key, value in state[name].items()
                }

    def close(self) -> None:
        """Put the model together again and free everything else. Every rank must call this."""
        if self._handle is None:
            self.routers.unwrap()
            return
        self._handle.uninstall()
        assert self.balancer is not None, "installed with one"
        self.balancer.close()

    def _build_balancer(self, *, is_enabled: bool) -> Balancer:
        return Balancer(
            cluster=build_cluster(self._config, self.shape),
            model=self.shape,
            group=self._layout.ep_group,
            options=balancer_options(self._config),
            enabled=is_enabled,
        )

    def _reduce(self) -> None:
        """Sum gradients over the ranks that hold the same parameters. Every rank must call this."""
        experts = {} if self._handle is None else self._handle.expert_parameters
        shared = [p for name, p in self.model.named_parameters() if name not in experts and p.requires_grad]
        sum_over([_gradient(parameter) for parameter in shared], self._layout.world)
        if experts and self._layout.owner_group is not None:
            sum_over([_gradient(parameter) for parameter in experts.values()], self._layout.owner_group)

    def _gradient_norm(self) -> float:
        experts = set() if self._handle is None else set(self._handle.expert_parameters)
        rest = [p for name, p in self.model.named_parameters() if name not in experts and p.grad is not None]
        squared = sum(float(p.grad.double().square().sum()) for p in rest)
        if self.balancer is None:
            return squared**0.5
        layers = [_gradients(layer.home) for layer in self.balancer.layers.values()]
        return gradient_norm(layers, group=self._layout.ep_group, other_squared=squared)


def balancer_options(config: TrainConfig) -> BalancerOptions:
    """What the balancer is told, from the settings of a run."""
    return BalancerOptions(
        slots=config.balance.slots,
        objective=config.balance.objective,
        order="plain" if config.update.activation_checkpointing == "none" else "recompute",
        # Weight sync keeps all experts in the host stores anyway; replicas cross nodes only where that pays.
        cross_node=True,
        timeout_s=config.timeout_s,
        # Ranks announce windows while they sample, some earlier than others.
        planning_timeout_s=max(BalancerOptions().planning_timeout_s, config.timeout_s),
    )


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, made of zeros where no token of this rank reached the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _gradients(home: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(None if tensor is None else _gradient(tensor) for tensor in home))


def _use_checkpointing(model: Any, kind: str) -> None:
    if kind == "none":
        model.gradient_checkpointing_disable()
    else:
        options = {"use_reentrant": kind == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


# Fingerprints: 64 bits per entry of a tensor's first axis, computed on the device that holds the tensor.
#
# An entry's bytes are read as words of 8 bytes, or of the largest of 4, 2 and 1 that divides their number. Each word
# is
# added to a number made of its place and mixed by the finalizer of SplitMix64, which is one to one; the mixed words
# are
# summed modulo 2**64.
#
# Invariants (asserted by the tests):
# 1. `fingerprints` gives what `reference_fingerprint` gives, for every dtype, size and layout in memory.
# 2. One changed word always changes a fingerprint; a flipped bit, two swapped entries or rows, a shifted row are seen.


_BITS = 64
_PLACE = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Of the finalizer: shift to the right, exclusive or, multiply. All factors are odd, so that nothing is lost."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_CHUNK = 1 << 24
"""Words that are mixed at once: what a fingerprint needs beside the tensor is a few times this."""


def fingerprints(entries_NX: Tensor) -> Tensor:
    """[N] int64 of the entries of the first axis, each over its bytes in row-major order."""
    words_NW = _words(entries_NX)
    count, width = words_NW.shape
    sum_N = torch.full((count,), width * words_NW.element_size(), dtype=torch.int64, device=words_NW.device)
    size = max(1, _CHUNK // max(1, count))
    for start in range(0, width, size):
        part_NW = words_NW[:, start : start + size].to(torch.int64)
        place_W = torch.arange(start + 1, start + 1 + part_NW.shape[1], device=words_NW.device) * _signed(_PLACE)
        mixed_NW = part_NW + place_W
        for shift, factor in _ROUNDS:
            # Masked, because shifting an int64 to the right copies its sign.
            mixed_NW ^= (mixed_NW >> shift).bitwise_and_((1 << (_BITS - shift)) - 1)
            mixed_NW *= _signed(factor)
        sum_N += mixed_NW.sum(dim=1)
    return sum_N


def reference_fingerprint(content: bytes) -> int:
    """The same of one entry's bytes, word by word."""
    size = gcd(len(content), 8)
    total = len(content)
    for place, start in enumerate(range(0, len(content), size), start=1):
        word = int.from_bytes(content[start : start + size], "little", signed=size > 1)
        mixed = (word + place * _PLACE) % 2**_BITS
        for shift, factor in _ROUNDS:
            mixed = (mixed ^ mixed >> shift) * factor % 2**_BITS
        total += mixed
    return _signed(total % 2**_BITS)


def _words(entries_NX: Tensor) -> Tensor:
    """[N, W] the words of every entry."""
    flat_NX = entries_NX.detach().reshape(len(entries_NX), entries_NX.numel() // len(entries_NX)).contiguous()
    num_bytes = flat_NX.shape[1] * flat_NX.element_size()
    return flat_NX.view(torch.uint8).view(_WORDS[gcd(num_bytes or 1, 8)])


def _signed(value: int) -> int:
    """The int64 that has these bits."""
    return value - 2**_BITS if value >> (_BITS - 1) else value


# Weight sync: canonical weights of the learner into the rollout copy, proved by fingerprint.
#
# Steps:
# 1. The learner gives the whole model in canonical order. Where a balancer moves experts, they come from the node's
# host
#    store, which is first completed with the experts of all nodes; else owners' experts are gathered. What is not
# sharded
#    is the rank's own.
# 2. Every rank copies it into its rollout copy.
# 3. Every rank takes the fingerprints of what it holds itself, on its device: each expert it owns, and everything
# that is
#    not sharded. Only fingerprints travel.
# 4. Every rank compares the same parts of its copy. One that differs stops training on every rank, by name.
#
# Invariants (asserted by the tests):
# 1. A displaced, stale or damaged expert in the store or in a copy is an error on every rank, which names the tensor,
# the
#    experts, whose copy it is and who owns them.
# 2. Whatever the mode, the copy holds the bits of the whole model.


Held = Mapping[Part, Sequence[int]]
"""What a rank holds, each with its fingerprints: one per expert, or one where it is not sharded."""


def sync_weights(learner: Learner, target: nn.Module, layout: Layout) -> str:
    """Copy the learner's weights into `target` and return their hash. Every rank must call this."""
    copy_weights(learner.state_dict(), target)
    parts_R: list[Held] = gather_objects(owned_fingerprints(learner.owned_parts()), layout)
    troubles = gather_objects(find_trouble(dict(target.state_dict()), parts_R), layout)
    for rank, trouble in enumerate(troubles):
        if trouble:
            raise TransferError(
                f"weight sync: the rollout copy of rank {rank} has {trouble}; stop and resume from the last checkpoint"
            )
    words = sorted(repr((part, tuple(found))) for parts in parts_R for part, found in parts.items())
    return hashlib.sha256("".join(words).encode()).hexdigest()


@torch.no_grad()
def copy_weights(state: Mapping[str, Tensor], target: nn.Module) -> None:
    """Copy a whole model's weights into another one."""
    for name, tensor in target.state_dict().items():
        # Whoever reads the copy, such as its fingerprint, waits for what is copied from pinned memory.
        tensor.copy_(state[name], non_blocking=True)


def owned_fingerprints(parts: Mapping[Part, Tensor]) -> dict[Part, list[int]]:
    """Fingerprints of what one rank holds."""
    found = {part: fingerprints(tensor if part.experts else tensor[None]) for part, tensor in parts.items()}
    return {part: values.tolist() for part, values in found.items()}


def find_trouble(copy: Mapping[str, Tensor], parts_R: Sequence[Held]) -> str:
    """Say which part of a copy is not what its owner holds; empty where all are.

    Args:
        copy: the state dict of the rollout copy
        parts_R: of every rank, in rank order
    """
    sharded = {part.name: part.experts > 0 for parts in parts_R for part in parts}
    found = {name: fingerprints(copy[name] if is_cut else copy[name][None]) for name, is_cut in sharded.items()}
    listed = {name: values.tolist() for name, values in found.items()}
    for rank, parts in enumerate(parts_R):
        for part, wanted in parts.items():
            there = listed[part.name][part.first :][: max(1, part.experts)]
            wrong = [part.first + at for at, (one, other) in enumerate(zip(there, wanted, strict=True)) if one != other]
            if wrong:
                return (
                    f"experts {wrong} of `{part.name}` that are not those rank {rank} owns"
                    if part.experts
                    else f"a `{part.name}` that is not that of rank {rank}"
                )
    return ""


# `StartedPlanner`: a rank's planning process, started early, with its kernels compiled while something else runs.
#
# The planner's kernels are compiled once per machine, which takes half a minute; afterwards they are read from disk
# in a
# few seconds. Either way it happens while the model warms up, not in the first step.
#
# Invariants (asserted by the tests):
# 1. `ready` returns a worker whose next window is planned without compiling.
# 2. Waiting for it is told, never silent.
# 3. After `forget` a window is planned as the first one of a run is.


_COMPILING = "compiling planner kernels, once per machine"
_PATIENCE_S = 2.0


def start_planner(
    config: TrainConfig, model: ModelShape, *, mode: Mode, worker: PlanWorker | None = None
) -> "StartedPlanner | None":
    """Start a planning process where the mode plans; returns at once."""
    if mode != "equipoise":
        return None
    return StartedPlanner(build_cluster(config, model), model, balancer_options(config), worker=worker)


class StartedPlanner:
    """One rank's planning process."""

    def __init__(
        self, cluster: Cluster, model: ModelShape, options: BalancerOptions, *, worker: PlanWorker | None = None
    ) -> None:
        """Start the process and have it plan a made-up window; returns at once.

        Args:
            worker: a process to use, left running on close; an own one by default
        """
        self._is_own = worker is None
        self.worker = PlanWorker() if worker is None else worker
        self._task = (cluster, model, options)
        self._trouble: EquipoiseError | None = None
        self._thread = threading.Thread(target=self._plan, daemon=True)
        self._thread.start()

    def ready(self, show: Show) -> PlanWorker:
        """Wait until the kernels are compiled, telling so where it takes a while."""
        begin = time.monotonic()
        self._thread.join(_PATIENCE_S)
        while self._thread.is_alive():
            show(Event("progress", {"words": _COMPILING, "done": int(time.monotonic() - begin), "total": 0}))
            self._thread.join(1.0)
        if self._trouble is not None:
            raise self._trouble
        return self.worker

    def forget(self) -> None:
        """Plan the next window as if it were the first; between windows only.

        Plans start from the homes of the one before. A run that goes on from a checkpoint has none before, so one that
        does not stop there forgets its own: both then make the same plans, and so the same bits.
        """
        self.worker.call("open", *self._task)

    def close(self) -> None:
        """End the process, where it is an own one."""
        if self._is_own:
            self.worker.close()

    def _plan(self) -> None:
        cluster, model, _ = self._task
        rng = np.random.default_rng(0)
        load_MLRE = rng.integers(1, 100, size=(2, model.layers, cluster.ep, model.experts))
        loads = LoadMatrix(load_MLRE, layer_numbers_L=np.array(model.layer_numbers))
        try:
            self.worker.call("open", *self._task)
            self.worker.call("whole", loads, [self.worker.call("share", loads, range(1))])
            # The second window starts from the first one's homes, which is another path of the search.
            self.worker.call("whole", loads, [])
        except EquipoiseError as error:
            self._trouble = error
