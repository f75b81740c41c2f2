"""RL post-training of a Mixture-of-Experts model, balanced by foresight: the loop.

One step, in this order, the same on every rank:
1. sync: canonical weights go to the rollout copy, proved by fingerprints.
2. rollout: the copy answers this rank's questions and records its routes. Histograms are counted as samples end, and
   windows of recompute planned in the background as soon as they are known, while long answers are still being made.
3. announce: the first update window is planned too,
4. reward: while answers are judged and advantages made.
5. recompute: old log-probabilities, forward only, replaying the routes.
6. update: GRPO, one optimizer step per window; the next window is planned meanwhile.
7. metrics, and a checkpoint where one is due.

Knows the order of things; each line's how is in the file it names.

Invariants (asserted by the tests):
1. One seed, one result: samples, losses and weights have the same bits in every run, also in a resumed one.
2. Losses and weights do not depend on the mode, within the limits of `compare`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.adapters.transformers import inspect
from equipoise.core import Stage
from equipoise.cost import CostModel
from equipoise.planning.worker import PlanWorker
from equipoise.rl.batch import Sample
from equipoise.rl.checkpoint import State
from equipoise.rl.config import Mode, TrainConfig
from equipoise.rl.launch import Event, Show, ignore
from equipoise.rl.layout import Layout, build_cluster, gather_objects
from equipoise.rl.learner import Learner, sync_weights
from equipoise.rl.metrics import RankFigures, step_metrics
from equipoise.rl.model import copy_model, open_tokenizer
from equipoise.rl.rollout import Engine, Outside, RecordedRollouts, Request, Sampler
from equipoise.rl.stages import StageClock, Stages, Window, group_advantages
from equipoise.rl.task import Question, Tokenizer, find_reward, open_task


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """One rank's rollout of one step."""

    questions: list[Question]
    samples: list[Sample]
    """A question's samples side by side."""
    ended: list[int]
    """Places of the samples in the order in which they ended."""


class Trainer:
    """One rank of a training run."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        layout: Layout,
        *,
        mode: Mode | None = None,
        show: Show = ignore,
        worker: PlanWorker | None = None,
    ) -> None:
        """Share out the experts and make the rollout copy. Every rank must call this.

        Args:
            model: the whole model with the weights to start from, the same on every rank
            mode: other than the configured one, in a comparison
            worker: a planning process to use, instead of an own one
        """
        self.config, self.layout, self._show = config, layout, show
        self.task, self.reward = open_task(config.task), find_reward(config.task.reward)
        self.tokenizer = open_tokenizer(config.model)
        self.reference = copy_model(model) if config.update.kl else None
        self.engine = _open_engine(model, config, self.tokenizer)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.learner = Learner(model, config, layout, mode=mode or config.balance.mode, worker=worker)
        cluster = build_cluster(config, self.learner.shape)
        stages: tuple[Stage, ...] = ("recompute", "update")
        self._costs = {stage: CostModel.of(cluster, self.learner.shape, stage=stage) for stage in stages}
        self.stages = Stages(self.learner, config, layout, reference=self.reference)
        self._clock = StageClock()
        self.experience: Experience | None = None
        """The last step's rollout."""

    def step(self, step: int, *, given: Experience | None = None) -> dict[str, Any]:
        """Train one step and return its metrics. Every rank must call this.

        Args:
            given: a rollout to train on instead of an own one, in a comparison
        """
        self.stages.open_step()
        self._clock = StageClock()
        experience = self.experience = self._roll_out(step) if given is None else self._replayed(given)
        samples = experience.samples
        windows = self.stages.announce()
        rewards = self._judge(step, experience)
        advantage_B = group_advantages(rewards, samples=self.config.rollout.samples)
        self._tell(step, "recompute")
        old, windows = self.stages.recompute(windows)
        self._tell(step, "update")
        self.stages.update(windows, old, advantage_B)
        figures = RankFigures(
            tally=self.stages.tally,
            rewards=rewards,
            num_right=self._count_right(experience),
            known_rows=sum(sample.known_rows for sample in samples),
            rows=sum(sample.ids_TLK.shape[0] * sample.ids_TLK.shape[1] for sample in samples),
            tokens=sum(len(sample.tokens_T) for sample in samples),
            rollout_kl=_rollout_kl(samples, windows, old),
            stage_s=self._clock.stop(),
        )
        gathered = gather_objects(figures, self.layout)
        return step_metrics(step, gathered, ep=self.config.group_ranks, costs=self._costs)

    def restore(self, state: State) -> None:
        """Go on from a checkpoint whose weights the model already has."""
        self.learner.load_optimizer_state(state.optimizer)
        if self.reference is not None and state.reference is not None:
            self.reference.load_state_dict(state.reference)
        torch.set_rng_state(state.random)

    def close(self) -> None:
        """Put the model together again and free the rest. Every rank must call this."""
        self.learner.close()

    def _roll_out(self, step: int) -> Experience:
        version = ""
        if isinstance(self.engine, Sampler):
            self._tell(step, "sync")
            version = sync_weights(self.learner, self.engine.model, self.layout)
        self._tell(step, "rollout")
        share = self.config.rollout.prompts // self.layout.ranks
        questions = self.task.questions(self.config.rollout.prompts, seed=self.config.seed, step=step)
        first = self.layout.rank * share
        request = Request(
            step=step,
            first=first,
            questions=questions[first : first + share],
            seed=seed_of(self.config.seed, step, self.layout.rank),
            weight_version=version[:12],
        )
        found: dict[int, Sample] = {}
        for place, sample in self.engine.generate(request):
            found[place] = sample
            self.stages.take(place, sample)
        samples = [found[place] for place in range(len(found))]
        return Experience(questions=list(request.questions), samples=samples, ended=list(found))

    def _replayed(self, given: Experience) -> Experience:
        for place in given.ended:
            self.stages.take(place, given.samples[place])
        return given

    def _judge(self, step: int, experience: Experience) -> list[float]:
        self._tell(step, "reward")
        return [
            self.reward(question.prompt, self.tokenizer.decode(sample.response_T.tolist()), question.answer)
            for question, sample in self._answered(experience)
        ]

    def _count_right(self, experience: Experience) -> int:
        decode = self.tokenizer.decode
        return sum(decode(s.response_T.tolist()) == q.answer for q, s in self._answered(experience))

    def _answered(self, experience: Experience) -> list[tuple[Question, Sample]]:
        count = self.config.rollout.samples
        return [(experience.questions[place // count], sample) for place, sample in enumerate(experience.samples)]

    def _tell(self, step: int, name: str) -> None:
        self._clock.begin(name)
        self._show(Event("stage", {"step": step, "name": name, "rank": self.layout.rank}))


def _open_engine(model: nn.Module, config: TrainConfig, tokenizer: Tokenizer) -> Sampler | RecordedRollouts | Engine:
    """Our own sampling on a copy of the model, or what the settings name."""
    source = config.rollout.source
    if not source:
        return Sampler(copy_model(model), config=config.rollout, tokenizer=tokenizer)
    outside = Outside(config=config.rollout, model=inspect(model).shape, tokenizer=tokenizer)
    return Engine(source, outside) if source.startswith("http") else RecordedRollouts(source, outside)


def seed_of(*parts: int) -> int:
    """One seed from several numbers, without the accidents of adding them."""
    return int(np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)[0] >> 1)


def _rollout_kl(samples: Sequence[Sample], windows: Sequence[Window], old: Sequence[Sequence[Tensor]]) -> float:
    """Mean k3 estimate of the KL between the engine's log-probabilities and recompute's, on response tokens.

    Args:
        windows: of the update, whose micro-batches hold the samples in order
        old: recompute's log-probabilities, by window and micro-batch
    """
    engine = [sample.log_probs_T for sample in samples if sample.log_probs_T is not None]
    if len(engine) < len(samples):
        return 0.0
    pairs = zip(chain.from_iterable(old), chain.from_iterable(windows), strict=True)
    trainer = torch.cat([old_T[batch.is_response_T] for old_T, batch in pairs]).cpu()
    gap = trainer.float() - torch.from_numpy(np.concatenate(engine)).float()
    return float((torch.expm1(gap) - gap).mean())
