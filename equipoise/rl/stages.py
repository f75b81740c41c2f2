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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import RoutesError, Stage
from equipoise.planning.report import WindowReport
from equipoise.rl.batch import Intake, MicroBatch, window_rows, with_ids
from equipoise.rl.config import TrainConfig
from equipoise.rl.grpo import Terms, grpo_terms, token_log_probs
from equipoise.rl.layout import Layout, sum_over
from equipoise.rl.learner import Learner
from equipoise.rl.model import packed_inputs
from equipoise.rl.sample import Sample

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
