"""The two training stages of a step: recompute (old log-probabilities, forward only) and update (GRPO).

Each window is announced as early as its routes are known, so that its plan is ready when it begins:
1. `take`: each window of recompute is announced with the sample that completes it, while others are still being made;
2. `announce`: the first update window, when all samples are there;
3. `recompute` runs over all micro-batches;
4. `update`: each window begins, the next one having been announced.
Where recompute itself records what the update replays (R2), the update's windows can be announced only after it.
Ranks announce the same windows in the same order, each when it can: planning waits for the last one, in the background.

Knows windows, replay and the loss. Does not know how samples were made, nor metrics' names.

Invariants (asserted by the tests):
1. Every known row is computed with the ids that were given, counted in every micro-step; else the step is refused.
2. Where all routes are known and replayed, the rows that arrive are those the plan announced, on every rank,
   micro-step and layer.
3. Log-probabilities of recompute are those of the update's first window before its optimizer step, within rounding:
   micro-batches of the same micro-step, and so the sizes of products, differ between the two.
4. A window of recompute can be planned before the rollout has ended.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.core import RoutesError, Stage
from equipoise.planning.report import WindowReport
from equipoise.rl.batch import Intake, MicroBatch, Sample, window_rows, with_ids
from equipoise.rl.config import TrainConfig, UpdateConfig
from equipoise.rl.layout import Layout, sum_over
from equipoise.rl.learner import Learner
from equipoise.rl.model import packed_inputs
from equipoise.rl.task import Task, Tokenizer

# GRPO: advantages normalised within the samples of one question, and the clipped loss with an optional KL.
#
# Invariants (asserted by the tests):
# 1. Advantages of a group have mean 0; a group of equal rewards has none.
# 2. Where the policy is the old one the ratio is 1 and the gradient is that of the policy-gradient loss.
# 3. The terms of all micro-batches and ranks, each divided by the window's trained tokens, add up to the loss of one
#    big batch.


_SMALL = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one micro-batch adds to its window; sums over trained tokens."""

    loss: Tensor
    """Differentiable, already divided by the window's trained tokens."""
    size: Tensor
    """Sum of the absolute terms, divided likewise: how large a loss would be whose terms did not cancel."""
    ratio: Tensor
    clipped: Tensor
    kl_old: Tensor
    """KL from the old policy, by Schulman's k3 estimate."""
    kl_reference: Tensor


def group_advantages(rewards_B: Sequence[float], *, samples: int) -> np.ndarray:
    """[B] rewards less the mean of their group, over its standard deviation.

    Args:
        rewards_B: group after group
        samples: samples per group
    """
    reward_GB = np.asarray(rewards_B, dtype=np.float64).reshape(-1, samples)
    centred_GB = reward_GB - reward_GB.mean(axis=1, keepdims=True)
    spread_G1 = reward_GB.std(axis=1, keepdims=True)
    return np.where(spread_G1 > _SMALL, centred_GB / (spread_G1 + _SMALL), 0.0).reshape(-1)


def token_log_probs(logits_TV: Tensor, target_T: Tensor, *, temperature: float) -> Tensor:
    """[T] log-probability of each target, at the temperature that sampled it."""
    return -torch.nn.functional.cross_entropy(logits_TV.float() / temperature, target_T, reduction="none")


def grpo_terms(
    log_prob_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    config: UpdateConfig,
    tokens: int,
    reference_T: Tensor | None = None,
) -> Terms:
    """The terms of one micro-batch.

    Args:
        log_prob_T: [T] of the trained tokens under the weights being trained
        old_T: [T] the same under the weights that made the samples, by recompute
        advantage_T: [T] of each token's sample
        tokens: trained tokens of the whole window, on all ranks
        reference_T: [T] under the reference, where a KL is asked for
    """
    log_ratio_T = log_prob_T - old_T
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    term_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    kl_T = torch.zeros_like(ratio_T) if reference_T is None else _k3(reference_T - log_prob_T)
    loss_T = term_T + config.kl * kl_T
    with torch.no_grad():
        kl_old_T = _k3(-log_ratio_T)
    return Terms(
        loss=loss_T.sum() / tokens,
        size=loss_T.detach().abs().sum() / tokens,
        ratio=ratio_T.detach().sum(),
        clipped=(ratio_T != clipped_T).sum(),
        kl_old=kl_old_T.sum(),
        kl_reference=kl_T.detach().sum(),
    )


def _k3(log_ratio_T: Tensor) -> Tensor:
    """E[exp(x) - 1 - x] with x = log(q / p) on samples of p is KL(p || q), and never negative."""
    return torch.expm1(log_ratio_T) - log_ratio_T


# Warm-up: supervised steps on right answers, so that the first rollouts earn something.
#
# Runs on the whole model before experts are shared out: plain data parallel, the same weights on every rank
# afterwards.
# Ranks that share a device would only take turns and sum gradients of a whole model through the host: there the first
# rank warms up alone, and the others get its weights at the end.
#
# Invariants (asserted by the tests):
# 1. Weights are the same bits on all ranks, whatever the number of warm-up steps and whoever took part.
# 2. No steps change nothing.


_FIRST_QUESTION = 1_000_000
"""Steps of RL count from 0; warm-up asks what they never ask."""

Progress = Callable[[int, float], None]
"""Called with (steps done, loss)."""


def warm_up(
    model: nn.Module, config: TrainConfig, layout: Layout, *, task: Task, tokenizer: Tokenizer, show: Progress
) -> None:
    """Train `model` on right answers. Every rank must call this."""
    if not config.warmup.steps:
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warmup.learning_rate, weight_decay=0.0)
    is_alone = config.model.ranks_per_device > 1
    takes_part = layout.is_first or not is_alone
    size = config.warmup.batch // (1 if is_alone else layout.ranks)
    mine = slice(layout.rank * size, (layout.rank + 1) * size)
    for step in range(config.warmup.steps):
        asked = task.questions(config.warmup.batch, seed=config.seed, step=_FIRST_QUESTION + step)[mine]
        rows = [(tokenizer.encode(q.prompt), [*tokenizer.encode(q.answer), tokenizer.end]) for q in asked]
        total = _backward(model, rows) if takes_part else torch.zeros(2, dtype=torch.float64)
        # Also where others only wait: so that none waits longer than for one step.
        sum_over([total], layout.world)
        if takes_part:
            _reduce(model, None if is_alone else layout, tokens=float(total[1]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.update.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        show(step + 1, float(total[0] / total[1]))
    if is_alone:
        _give_out(model, layout)


def _backward(model: nn.Module, rows: list[tuple[list[int], list[int]]]) -> Tensor:
    """Make the gradient, and return the summed loss and the number of trained tokens."""
    loss, count = _loss(model, rows)
    loss.backward()
    return torch.stack([loss.detach().double(), count.double()]).cpu()


def _loss(model: nn.Module, rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Summed loss of the answers' tokens, and how many they are."""
    device = next(model.parameters()).device
    tokens = [np.array(prompt + answer) for prompt, answer in rows]
    places = [np.arange(len(t) - 1) for t in tokens]
    is_answer = [at >= len(prompt) - 1 for at, (prompt, _) in zip(places, rows, strict=True)]
    input_T, position_T, target_T, answer_T = (
        torch.from_numpy(np.concatenate(parts)).to(device)
        for parts in ([t[:-1] for t in tokens], places, [t[1:] for t in tokens], is_answer)
    )
    logits_TV = model(**packed_inputs(model, input_T, position_T)).logits[0]
    loss = torch.nn.functional.cross_entropy(logits_TV[answer_T].float(), target_T[answer_T], reduction="sum")
    return loss, answer_T.sum()


@torch.no_grad()
def _give_out(model: nn.Module, layout: Layout) -> None:
    """Take over the first rank's weights. Every rank must call this."""
    for parameter in model.parameters():
        # As bytes: not every backend sends every dtype.
        dist.broadcast(parameter.view(-1).view(torch.uint8), group=layout.world, group_src=0)


def _reduce(model: nn.Module, layout: Layout | None, *, tokens: float) -> None:
    """Sum gradients over all ranks, if any others take part, and divide them by the trained tokens.

    An expert that no token of this rank chose takes part with zeros.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if layout is not None:
        sum_over(grads, layout.world)
    for grad in grads:
        grad /= tokens


Window = list[MicroBatch]


@dataclass(slots=True, kw_only=True)
class StepTally:
    """What one rank's windows of one step did."""

    sums: dict[str, float] = field(default_factory=dict)
    """Loss, ratio and the like, summed over micro-batches."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of each optimizer step."""
    losses: list[float] = field(default_factory=list)
    """Loss of each optimizer step, over all ranks."""
    sizes: list[float] = field(default_factory=list)
    """Sum of the absolute terms of each loss."""
    reports: list[WindowReport] = field(default_factory=list)
    arrived: dict[Stage, list[Any]] = field(default_factory=lambda: {"recompute": [], "update": []})
    """[M, L] rows per window."""
    rows: dict[Stage, list[np.ndarray]] = field(default_factory=lambda: {"recompute": [], "update": []})
    """load_MLE of each window."""
    given_rows: int = 0
    replayed_rows: int = 0
    differing_rows: int = 0
    checked_windows: int = 0
    """Windows whose arrived rows were compared with the planned ones."""

    def add(self, **values: Any) -> None:
        """Add to the sums."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)


class Stages:
    """Runs the windows of one step after another."""

    def __init__(self, learner: Learner, config: TrainConfig, layout: Layout, *, reference: Any = None) -> None:
        """Train `learner`; `reference` is a whole frozen model where a KL is asked for."""
        self._learner, self._config, self._layout, self._reference = learner, config, layout, reference
        self._replay = config.update.replay
        self._is_complete = True
        self.open_step()

    def open_step(self) -> None:
        """Begin a step: samples may come."""
        config = self._config.update
        window = self._config.rank_samples // config.mini_batches // config.micro_batch
        self._intake = Intake(micro_batch=config.micro_batch, window=window)
        self.tally = StepTally()

    def take(self, place: int, sample: Sample) -> None:
        """Take the sample with this place, and have a window of recompute planned that is known with it."""
        if window := self._intake.take(place, sample):
            self._submit(window, "recompute", is_replayed=self._replay == "R3")

    def announce(self) -> list[Window]:
        """Have the first update window planned where its routes are known; return all of them. Every rank must call."""
        windows = self._intake.update
        self._is_complete = self._count(windows, lambda batch: int((batch.ids_LTK < 0).sum())) == 0
        if self._replay != "R2":
            self._submit(windows[0], "update", is_replayed=self._replay == "R3")
        return [[batch.to(self._config.model.device) for batch in window] for window in windows]

    def recompute(self, windows: Sequence[Window]) -> tuple[list[list[Tensor]], list[Window]]:
        """Return old log-probabilities by window and micro-batch, and the windows as they shall be updated."""
        used = {number: batch for number, batch in enumerate(batch for window in windows for batch in window)}
        is_recorded = self._replay == "R2"
        old: dict[int, Tensor] = {}
        for numbers in self._intake.recompute:
            with self._learner.window(), torch.no_grad():
                for m, number in enumerate(numbers):
                    batch = used[number]
                    old[number], ids_LTK = self._forward(m, batch, replay=self._replay == "R3", record=is_recorded)
                    used[number] = with_ids(batch, ids_LTK) if is_recorded else batch
            self._close("recompute", is_replayed=self._replay == "R3")
        spans = list(pairwise(np.cumsum([0, *map(len, windows)]).tolist()))
        updates = [[used[number] for number in range(a, b)] for a, b in spans]
        if is_recorded:
            self._submit(updates[0], "update", is_replayed=True)
        return [[old[number] for number in range(a, b)] for a, b in spans], updates

    def update(self, windows: Sequence[Window], old: Sequence[Sequence[Tensor]], advantage_B: np.ndarray) -> None:
        """One optimizer step per window."""
        for k, window in enumerate(windows):
            if k + 1 < len(windows):
                self._submit(windows[k + 1], "update", is_replayed=self._replay != "off")
            tokens = self._count([window], lambda batch: int(batch.is_response_T.sum()))
            loss, size = 0.0, 0.0
            with self._learner.window():
                for m, batch in enumerate(window):
                    terms = self._terms(m, batch, old[k][m], advantage_B, tokens=tokens)
                    terms.loss.backward()
                    loss, size = loss + float(terms.loss.detach()), size + float(terms.size)
                    self._add(terms)
            self._close("update", is_replayed=self._replay != "off")
            totals = torch.tensor([loss, size], dtype=torch.float64)
            sum_over([totals], self._layout.world)
            self.tally.losses.append(float(totals[0]))
            self.tally.sizes.append(float(totals[1]))
            self.tally.norms.append(self._learner.step())
            self.tally.add(trained=tokens)

    def _terms(
        self, micro_step: int, batch: MicroBatch, old_T: Tensor, advantage_B: np.ndarray, *, tokens: int
    ) -> Terms:
        log_prob_T, _ = self._forward(micro_step, batch, replay=self._replay != "off")
        mask_T = batch.is_response_T
        advantage_T = torch.from_numpy(advantage_B).to(log_prob_T)[batch.sample_T]
        reference_T = None if self._reference is None else self._reference_log_probs(batch)[mask_T]
        return grpo_terms(
            log_prob_T[mask_T],
            old_T[mask_T],
            advantage_T[mask_T],
            config=self._config.update,
            tokens=tokens,
            reference_T=reference_T,
        )

    def _forward(self, micro_step: int, batch: MicroBatch, *, replay: bool, record: bool = False) -> tuple[Tensor, Any]:
        """[T] log-probabilities of the targets, and recorded ids; replay is checked row by row."""
        counters = self._learner.routers.counters
        before = counters.rows
        logits_TV, ids_LTK = self._learner.forward(micro_step, batch, replay=replay, record=record or not replay)
        given, used, differing = (now - then for now, then in zip(counters.rows, before, strict=True))
        if replay:
            self._check_replay(micro_step, batch, given=given, used=used)
            self.tally.given_rows += given
            self.tally.replayed_rows += used
        else:
            known, differing = _count_differing(batch.ids_LTK, ids_LTK)
            self.tally.given_rows += known
        self.tally.differing_rows += differing
        temperature = self._config.rollout.temperature
        return token_log_probs(logits_TV, batch.target_T, temperature=temperature), ids_LTK

    def _check_replay(self, micro_step: int, batch: MicroBatch, *, given: int, used: int) -> None:
        known = int((batch.ids_LTK >= 0).all(dim=2).sum()) * batch.ids_LTK.shape[2]
        if not known == given == used:
            raise RoutesError(
                f"rank {self._layout.rank}, micro-step {micro_step}: {known} rows have recorded routes, {given} were "
                f"given to the routers and {used} reached the experts; replay is not exact"
            )

    def _submit(self, window: Window, stage: Stage, *, is_replayed: bool) -> None:
        """Announce a window: the ids themselves where they are replayed, else only how many rows to expect."""
        rows = window_rows(window, stage=stage)
        self.tally.rows[stage].append(rows.load_MLE)
        self._learner.submit([batch.ids_LTK.cpu().numpy() for batch in window] if is_replayed else rows, stage=stage)

    def _close(self, stage: Stage, *, is_replayed: bool) -> None:
        """Keep what the window reported, and compare the rows that arrived with the planned ones."""
        report = self._learner.report
        if report is None:
            return
        self.tally.reports.append(report)
        self.tally.arrived[stage].append(report.arrived_ML)
        # Under R2 the update replays what recompute recorded, of every row.
        is_known = self._is_complete or (self._replay == "R2" and stage == "update")
        if is_replayed and is_known and report.planned_ML is not None and report.arrived_ML is not None:
            check_arrival(report.arrived_ML, report.planned_ML, stage=stage, rank=self._layout.rank)
            self.tally.checked_windows += 1

    def _count(self, windows: Sequence[Window], figure: Callable[[MicroBatch], int]) -> int:
        """Sum a figure of all micro-batches of all ranks. Every rank must call this."""
        total = torch.tensor([sum(figure(b) for window in windows for b in window)], dtype=torch.float64)
        sum_over([total], self._layout.world)
        return int(total[0])

    @torch.no_grad()
    def _reference_log_probs(self, batch: MicroBatch) -> Tensor:
        logits_TV = self._reference(**packed_inputs(self._reference, batch.input_T, batch.position_T)).logits[0]
        return token_log_probs(logits_TV, batch.target_T, temperature=self._config.rollout.temperature)

    def _add(self, terms: Terms) -> None:
        self.tally.add(ratio=terms.ratio, clipped=terms.clipped, kl_old=terms.kl_old, kl_reference=terms.kl_reference)


def check_arrival(rows_ML: np.ndarray, planned_ML: np.ndarray, *, stage: Stage, rank: int) -> None:
    """Raise unless the rows that arrived on a rank are those its plan announced."""
    wrong = np.argwhere(rows_ML != planned_ML)
    if len(wrong):
        m, layer = (int(i) for i in wrong[0])
        raise RoutesError(
            f"rank {rank}, {stage}, micro-step {m}, layer index {layer}: {int(rows_ML[m, layer])} rows arrived, the "
            f"plan announced {int(planned_ML[m, layer])}; the routes replayed are not those that were planned"
        )


def _count_differing(known_LTK: Tensor, chosen_LTK: Tensor) -> tuple[int, int]:
    """Rows whose route was recorded, and how many of them the model chose otherwise."""
    known_LT1 = (known_LTK >= 0).all(dim=2, keepdim=True)
    is_same_LTK = (known_LTK[..., :, None] == chosen_LTK[..., None, :]).any(dim=3)
    known_LTK = known_LT1.expand_as(is_same_LTK)
    return int(known_LTK.sum()), int((known_LTK & ~is_same_LTK).sum())


# `StageClock`: what each stage of a step took on this rank, one stage after another.
#
# Invariants (asserted by the tests):
# 1. The stages' seconds add up to the step's: a stage lasts until the next begins.


class StageClock:
    """Runs from one stage to the next."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start, in no stage yet.

        Args:
            now: seconds since whenever
        """
        self._now = now
        self._seconds: dict[str, float] = {}
        self._stage, self._since = "", now()

    def begin(self, stage: str) -> None:
        """End the stage before, and begin this one."""
        now = self._now()
        if self._stage:
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def stop(self) -> dict[str, float]:
        """End the last stage and return the seconds of all."""
        self.begin("")
        return dict(self._seconds)
