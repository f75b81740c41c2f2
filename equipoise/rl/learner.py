"""The model that is trained: its experts on every rank, at their owners, or as planned; its weights given to rollouts.

    off         all experts on every rank; gradients of everything are summed over ranks
    static      experts at their owners, contiguous; the rest is data parallel
    equipoise   the same, and windows are planned

Three sections: warm-up of the whole model, `Learner`, and weight sync with its fingerprints.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.adapters import transformers as adapter
from equipoise.adapters.transformers_model import checkpoint_tensors, family_of
from equipoise.balancer import Balancer
from equipoise.core import ModelShape, Stage, TrainingError
from equipoise.core.errors import TransferError
from equipoise.core.options import Activations, BalancerOptions
from equipoise.engines.weights import WeightSender
from equipoise.launch import Ranks, sum_over
from equipoise.layer.checkpoint import expert_state_dict, gradient_norm, load_expert_state_dict
from equipoise.loads.memory import plan_memory
from equipoise.planning.report import WindowReport
from equipoise.planning.rows import WindowRoutes
from equipoise.planning.worker import PlanWorker
from equipoise.rl.config import Mode, TrainConfig, build_cluster
from equipoise.rl.model import pack_tokens, packed_inputs
from equipoise.rl.task import TaskSource, Tokenizer
from equipoise.transfer.node import ExpertWeights
from equipoise.transfer.waits import all_or_none

_FIRST_QUESTION = 1_000_000
"""RL steps count from 0; warm-up uses step numbers from here on, so that it asks other questions."""


def warm_up(
    model: nn.Module,
    config: TrainConfig,
    ranks: Ranks,
    *,
    task: TaskSource,
    tokenizer: Tokenizer,
    show: Callable[[int, float], None],
) -> None:
    """Train the whole model on right answers, so that the first rollouts earn rewards. Every rank must call this.

    Plain data parallel: afterwards all ranks have the same bits. Ranks that share a device would only alternate on it;
    there the first rank trains alone and broadcasts its weights at the end. `show` is called with (steps done, loss).
    """
    if not config.warmup.steps:
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warmup.learning_rate, weight_decay=0.0)
    is_alone = config.model.ranks_per_device > 1
    takes_part = ranks.is_first or not is_alone
    size = config.warmup.batch // (1 if is_alone else ranks.size)
    mine = slice(ranks.rank * size, (ranks.rank + 1) * size)
    for step in range(config.warmup.steps):
        asked = task.questions(config.warmup.batch, seed=config.seed, step=_FIRST_QUESTION + step)[mine]
        total = torch.zeros(2, dtype=torch.float64)
        if takes_part:
            answered = [(tokenizer.encode(q.prompt), [*tokenizer.encode(q.answer), tokenizer.end]) for q in asked]
            loss, count = _supervised_loss(model, answered)
            loss.backward()
            total = torch.stack([loss.detach().double(), count.double()]).cpu()
        # Every step also where the others do not train, so that no rank waits longer than one step.
        sum_over([total], ranks.world)
        if takes_part:
            # An expert that no token of this rank chose contributes zeros.
            gradients = [_gradient(parameter) for parameter in model.parameters()]
            if not is_alone:
                sum_over(gradients, ranks.world)
            for gradient in gradients:
                gradient /= float(total[1])
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.update.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        show(step + 1, float(total[0] / total[1]))
    if is_alone:
        with torch.no_grad():
            for parameter in model.parameters():
                # As bytes: not every backend sends every dtype.
                dist.broadcast(parameter.view(-1).view(torch.uint8), group=ranks.world, group_src=0)


def _supervised_loss(model: nn.Module, answered: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the answers' tokens, and their number, of (prompt, answer) pairs of token ids."""
    packed = pack_tokens([np.array(p + a) for p, a in answered], [len(prompt) for prompt, _ in answered])
    device = next(model.parameters()).device
    input_T, position_T, target_T, answer_T = (part_T.to(device) for part_T in packed)
    logits_TV = model(**packed_inputs(model, input_T, position_T)).logits[0]
    loss = torch.nn.functional.cross_entropy(logits_TV[answer_T].float(), target_T[answer_T], reduction="sum")
    return loss, answer_T.sum()


class Learner:
    """One rank's share of the model being trained."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, ranks: Ranks, *, mode: Mode, worker: PlanWorker | None = None
    ) -> None:
        """Move the experts to their owners and make the optimizer. Every rank must call this.

        The learner owns the model, the same on every rank, until `close`, and starts a planning process if given none.
        """
        self.model, self.mode, self._config, self._ranks = model, mode, config, ranks
        self.shape: ModelShape = adapter.inspect(model).shape
        self.balancer: Balancer | None = None
        self._handle: adapter.Installed | None = None
        if mode == "off":
            self.routers = adapter.wrap_routers(model)
        else:
            self.balancer = Balancer(
                cluster=build_cluster(config, self.shape),
                model=self.shape,
                group=ranks.ep_group,
                options=balancer_options(config),
                enabled=mode == "equipoise",
            )
            self._handle = adapter.install(model, self.balancer, worker=worker)
            self.routers = self._handle.routers
        kind = config.update.activation_checkpointing
        if kind == "none":
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"})
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.update.learning_rate,
            weight_decay=config.update.weight_decay,
            eps=config.update.adam_eps,
        )

    def submit(self, routes: WindowRoutes, *, stage: Stage) -> None:
        """Announce the next window, to be planned in the background; returns at once. Every rank must call this.

        Routes are the ids that will be replayed, by micro-step and layer; or rows, where the model will route.
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
        """The balancer's report of the last window."""
        return None if self.balancer is None else self.balancer.report

    def memory_need(self, stage: Stage) -> dict[str, Any] | None:
        """Return the most that one rank needs in the open window for rows and gradients; None if none is planned.

        Modelled from the plan, weights and optimizer aside; `limit_bytes` is all memory of a described device.
        """
        plan = None if self.balancer is None else self.balancer.plan
        if self.balancer is None or plan is None or plan.itinerary is None:
            return None
        kept: Activations = "kept" if self._config.update.activation_checkpointing == "none" else "recomputed"
        memory = plan_memory(plan, activations=kept)
        micro_step, layer, rank = place = memory.place()
        parts = memory.parts(place)
        return {
            "stage": stage,
            "peak_bytes": sum(parts.values()) - parts["slots"] - parts["page"],
            "rank": rank,
            "micro_step": micro_step,
            "layer": self.shape.layer_numbers[layer],
            "slot_bytes": self.balancer.extra_bytes + self.balancer.row_bytes,
            "limit_bytes": plan.cluster.memory_bytes,
        }

    def forward(
        self,
        micro_step: int,
        input_T: Tensor,
        position_T: Tensor,
        *,
        ids_LTK: Tensor | None = None,
        record: bool = False,
    ) -> tuple[Tensor, Any]:
        """Return (logits [T, V], recorded ids [L, T, K] or None) of packed samples. Every rank must call this.

        Without expert ids to replay, the model routes.
        """
        with self.routers.forward_pass(micro_step, ids=ids_LTK, record=record) as recorded:
            logits_TV = self.model(**packed_inputs(self.model, input_T, position_T)).logits[0]
        return logits_TV, recorded.ids_LTK if record else None

    def step(self) -> float:
        """Reduce gradients, clip them, and run the optimizer; return the norm. Every rank must call this."""
        # Step 1: sum gradients over the ranks that hold the same parameters.
        experts = self._expert_parameters
        dense = [p for name, p in self.model.named_parameters() if name not in experts and p.requires_grad]
        sum_over([_gradient(parameter) for parameter in dense], self._ranks.world)
        if experts and self._ranks.owner_group is not None:
            sum_over([_gradient(parameter) for parameter in experts.values()], self._ranks.owner_group)

        # Step 2: the norm over the whole model, each expert counted once.
        squared = sum(float(_gradient(p).double().square().sum()) for p in dense)
        norm = squared**0.5
        if self.balancer is not None:
            layers = [
                ExpertWeights(*(None if tensor is None else _gradient(tensor) for tensor in layer.home))
                for layer in self.balancer.layers.values()
            ]
            norm = gradient_norm(layers, group=self._ranks.ep_group, other_squared=squared)
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient norm is {norm}, so the weights are left as they are; lower update.learning_rate (now "
                f"{self._config.update.learning_rate:g}) and resume from the last checkpoint"
            )

        # Step 3: clip, and change the weights.
        if norm > self._config.update.max_grad_norm:
            scale = self._config.update.max_grad_norm / (norm + 1e-6)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model in canonical order, on every rank. Every rank must call this, outside windows.

        Returns: under `equipoise` experts are views of the node's host store, valid until the next window
        """
        if self._handle is None:
            return dict(self.model.state_dict())
        return self._handle.stored_state_dict() if self.mode == "equipoise" else self._handle.state_dict()

    def save_model(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Write the whole model, given its state dict, as a HF checkpoint. For the first rank alone."""
        type(self.model).save_pretrained(self.model, path, state_dict=dict(state))

    def training_state(self) -> dict[str, Tensor]:
        """Return this rank's weights and optimizer state under names that no number of ranks changes.

        model.norm.weight                       weights that every rank has
        optimizer.model.norm.weight.exp_avg     what the optimizer keeps for them
        model.layers.0.mlp.experts.7.gate_up    the same of each owned expert, see `layer.checkpoint`
        """
        experts = self._expert_parameters
        state = {name: tensor for name, tensor in self.model.state_dict().items() if name not in experts}
        for name, parameter in self.model.named_parameters():
            if name not in experts:
                kept = self.optimizer.state.get(parameter, {})
                state |= {f"optimizer.{name}.{kind}": value for kind, value in kept.items()}
        return state if self.balancer is None else state | expert_state_dict(self.balancer.layers, self.optimizer)

    def needs(self, name: str) -> bool:
        """Whether an entry of some rank's `training_state` is one that this rank loads: not another rank's expert."""
        for path, layer in () if self.balancer is None else self.balancer.layers.items():
            if name.startswith(f"{path}."):
                slots = layer.gate_up.shape[0]
                expert = int(name.removeprefix(f"{path}.").partition(".")[0])
                return expert // slots == dist.get_rank(self._ranks.ep_group)
        return True

    @torch.no_grad()
    def load_training_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `training_state`, saved by this or another number of ranks."""
        experts = self._expert_parameters
        for name, tensor in self.model.state_dict().items():
            if name not in experts:
                if name not in state or state[name].shape != tensor.shape:
                    found = "is missing" if name not in state else f"has shape {tuple(state[name].shape)}"
                    raise TrainingError(
                        f"the checkpoint does not fit the model: `{name}` of shape {tuple(tensor.shape)} {found}"
                    )
                tensor.copy_(state[name])
        for name, parameter in self.model.named_parameters():
            prefix = f"optimizer.{name}."
            kept = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if kept:
                # Scalars such as `step` stay on the host, where AdamW keeps them.
                self.optimizer.state[parameter] = {
                    kind: value.to(parameter.device) if value.ndim else value for kind, value in kept.items()
                }
        if self.balancer is not None:
            load_expert_state_dict(self.balancer.layers, state, self.optimizer)

    def owned_parts(self) -> "dict[Part, Tensor]":
        """Return the tensors that this rank holds, in the layout of the whole model."""
        experts = self._expert_parameters
        parts = {Part(name): tensor for name, tensor in self.model.state_dict().items() if name not in experts}
        rank = dist.get_rank(self._ranks.ep_group)
        is_transposed = family_of(self.model.config.model_type).is_transposed
        for name, shard in experts.items():
            tensor = shard.transpose(1, 2) if is_transposed and shard.ndim == 3 else shard
            parts[Part(name, rank * len(shard), len(shard))] = tensor
        return parts

    def close(self) -> None:
        """Restore the whole model and free everything else. Every rank must call this."""
        if self._handle is None:
            self.routers.unwrap()
            return
        self._handle.uninstall()
        assert self.balancer is not None, "installed with one"
        self.balancer.close()

    @property
    def _expert_parameters(self) -> dict[str, nn.Parameter]:
        """Experts that this rank owns, by the name of their parameter; none where every rank has all experts."""
        return {} if self._handle is None else self._handle.expert_parameters


def balancer_options(config: TrainConfig) -> BalancerOptions:
    """Return the balancer's options for a run."""
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


def _gradient(parameter: Any) -> Tensor:
    """Return the gradient; zeros are made where no token of this rank reached the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient: Tensor = parameter.grad
    return gradient


class Part(NamedTuple):
    """A tensor of the whole model that one rank holds: all of it, or some experts."""

    name: str
    first: int = 0
    """The first expert."""
    experts: int = 0
    """Number of experts; 0 where the tensor is not sharded."""


Held = Mapping[Part, Sequence[int]]
"""The parts that a rank holds with their fingerprints: one per expert, or one where a part is not sharded."""


def sync_weights(learner: Learner, target: nn.Module, ranks: Ranks) -> str:
    """Copy the learner's weights into a rollout copy and return their hash. Every rank must call this.

    1. Copy the whole model, in canonical order, into `target`.
    2. Compute the fingerprints of what this rank holds itself, on its device, and exchange them.
    3. Compare them with the copy's. A part that differs stops training on every rank, and the error names it.
    """
    copy_weights(learner.state_dict(), target)
    held_R: list[Held] = ranks.gather(owned_fingerprints(learner.owned_parts()))

    def compare() -> None:
        if difference := find_difference(dict(target.state_dict()), held_R):
            raise TransferError(
                f"weight sync: the rollout copy has {difference}; stop and resume from the last checkpoint"
            )

    all_or_none(compare, ranks.gather)
    return _name_weights(held_R)


def push_weights(learner: Learner, sender: WeightSender, ranks: Ranks, *, step: int) -> str:
    """Give the learner's weights to an outside engine and return their version. Every rank must call this.

    1. Gather the whole model in canonical order, and compare it with what each rank holds itself.
    2. The first rank sends it, in the names of its Hugging Face checkpoint. Ranks meet after each bucket, so that none
       waits longer than one takes, and an update that fails ends on all of them.
    """
    state = learner.state_dict()
    held_R: list[Held] = ranks.gather(owned_fingerprints(learner.owned_parts()))
    # With the step: a version that the engine has had before could not be told from an update that was lost.
    version = f"step-{step}-{_name_weights(held_R)[:12]}"
    sending = iter(()) if not ranks.is_first else sender.send(checkpoint_tensors(learner.model, state), version)

    def compare() -> None:
        if ranks.is_first and (difference := find_difference(state, held_R)):
            raise TransferError(f"weight sync: the gathered weights have {difference}; resume from the last checkpoint")

    all_or_none(compare, ranks.gather)
    while not all_or_none(lambda: next(sending, None) is None, ranks.gather)[0]:
        pass
    return version


def _name_weights(held_R: Sequence[Held]) -> str:
    """Return the hash of all ranks' fingerprints."""
    parts = sorted(repr((part, tuple(found))) for held in held_R for part, found in held.items())
    return hashlib.sha256("".join(parts).encode()).hexdigest()


@torch.no_grad()
def copy_weights(state: Mapping[str, Tensor], target: nn.Module) -> None:
    """Copy a whole model's weights into another one."""
    for name, tensor in target.state_dict().items():
        # From pinned memory without waiting: a reader of the copy on the device waits for it.
        tensor.copy_(state[name], non_blocking=True)


def owned_fingerprints(parts: Mapping[Part, Tensor]) -> dict[Part, list[int]]:
    """Return the fingerprints of what one rank holds."""
    found = {part: fingerprints(tensor if part.experts else tensor[None]) for part, tensor in parts.items()}
    return {part: values.tolist() for part, values in found.items()}


def find_difference(copy: Mapping[str, Tensor], held_R: Sequence[Held]) -> str:
    """Describe a part of a copy's state dict that is not what its owner holds; empty where all parts are equal."""
    sharded = {part.name: part.experts > 0 for held in held_R for part in held}
    found = {name: fingerprints(copy[name] if is_cut else copy[name][None]) for name, is_cut in sharded.items()}
    listed = {name: values.tolist() for name, values in found.items()}
    for rank, held in enumerate(held_R):
        for part, wanted in held.items():
            there = listed[part.name][part.first :][: max(1, part.experts)]
            wrong = [part.first + at for at, (one, other) in enumerate(zip(there, wanted, strict=True)) if one != other]
            if wrong:
                return (
                    f"experts {wrong} of `{part.name}` that are not those rank {rank} owns"
                    if part.experts
                    else f"a `{part.name}` that is not that of rank {rank}"
                )
    return ""


_BITS = 64
_PLACE = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Of SplitMix64's finalizer: shift right, exclusive or, multiply. All factors are odd, so the mixing is one to one."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_CHUNK = 1 << 24
"""Words that are mixed at once: a fingerprint's temporary memory is a few times this."""


def fingerprints(entries_NX: Tensor) -> Tensor:
    """[N] int64 fingerprints of the entries of the first axis, each over its bytes in row-major order.

    An entry's bytes are read as words of 8 bytes, or of the largest of 4, 2 and 1 that divides their number. A number
    made of its place is added to each word, the sum is mixed by the finalizer of SplitMix64, and the mixed words are
    added modulo 2**64: one changed word always changes the fingerprint.
    """
    flat_NX = entries_NX.detach().reshape(len(entries_NX), entries_NX.numel() // len(entries_NX)).contiguous()
    num_bytes = flat_NX.shape[1] * flat_NX.element_size()
    words_NW = flat_NX.view(torch.uint8).view(_WORDS[gcd(num_bytes or 1, 8)])
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


def _signed(value: int) -> int:
    """Return the int64 that has these bits."""
    return value - 2**_BITS if value >> (_BITS - 1) else value
