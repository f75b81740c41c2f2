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

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.adapters import transformers as adapter
from equipoise.adapters.transformers_families import family_of
from equipoise.balancer import Balancer, BalancerOptions
from equipoise.core import ModelShape, Stage, TrainingError
from equipoise.planning.report import WindowReport
from equipoise.planning.rows import WindowRoutes
from equipoise.planning.worker import PlanWorker
from equipoise.rl.batch import MicroBatch
from equipoise.rl.config import Mode, TrainConfig
from equipoise.rl.layout import Layout, build_cluster, sum_over
from equipoise.rl.model import packed_inputs
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.norm import gradient_norm


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
        with self.routers.turn(micro_step, ids=ids, record=record) as recorded:
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
