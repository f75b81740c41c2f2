"""The two training stages of a step: recompute (old log-probs, forward only) and update (GRPO).

Each window is announced as early as its routes are known, so that its plan is ready when it begins:
1. `take`: a window of recompute is announced with the sample that completes it, while others are still being made.
2. `announce`: the first update window is announced when all samples have ended.
3. `recompute` runs over all micro-batches.
4. `update`: each window begins after the next one was announced.
Where recompute itself records what the update replays (R2), the update's windows can be announced only after it.
With `update.pack` ranks exchange their samples when all have ended, and both stages run packed windows, announced then.
Ranks announce the same windows in the same order, each when it can: planning waits for the last one, in the background.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import RouteCounts, RoutesError, Schedule, Stage
from equipoise.launch import Ranks, sum_over
from equipoise.loads import pack_window, sketch_counts
from equipoise.loads.packer import micro_batches
from equipoise.planning.report import WindowReport
from equipoise.planning.rows import RankRows
from equipoise.rl.config import TrainConfig, UpdateConfig, build_cluster
from equipoise.rl.learner import Learner
from equipoise.rl.model import pack_tokens, packed_inputs
from equipoise.rl.rollout import Sample, count_ids

_SMALL = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """The samples that one rank forwards in one micro-step, packed into one sequence without padding.

    A sample of T tokens contributes its first T - 1: the last has no target and no route. So every forwarded row has a
    route where the recording is complete.
    """

    input_T: Tensor
    """[T] token ids, sample after sample."""
    position_T: Tensor
    """[T] position in its sample; 0 begins a sample, so that packed samples do not attend to each other."""
    target_T: Tensor
    """[T] the next token."""
    is_response_T: Tensor
    """[T] whether the target belongs to a response and is trained."""
    sample_T: Tensor
    """[T] index of the sample in the rank's list."""
    ids_LTK: Tensor
    """[L, T, K] expert ids to replay, -1 where unknown."""
    count_LE: np.ndarray
    """[L, E] its known rows by expert: the sum of its samples' counts."""

    def to(self, device: str) -> "PackedBatch":
        """Return the same batch on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "count_LE"})

    def with_ids(self, ids_LTK: Tensor) -> "PackedBatch":
        """Return the same tokens with other routes, such as those that recompute recorded."""
        count_LE = count_ids(ids_LTK.transpose(0, 1).cpu().numpy(), self.count_LE.shape[1])
        return replace(self, ids_LTK=ids_LTK, count_LE=count_LE)


Window = list[PackedBatch]


def pack(samples: Mapping[int, Sample], indices: Sequence[int]) -> PackedBatch:
    """Pack the samples with these indices, in order."""
    chosen = [samples[i] for i in indices]
    packed = pack_tokens([sample.tokens_T for sample in chosen], [sample.num_prompt for sample in chosen])
    input_T, position_T, target_T, is_response_T = packed
    ids_TLK = np.concatenate([sample.ids_TLK for sample in chosen])
    return PackedBatch(
        input_T=input_T,
        position_T=position_T,
        target_T=target_T,
        is_response_T=is_response_T,
        sample_T=torch.from_numpy(np.repeat(indices, [len(sample.ids_TLK) for sample in chosen])),
        ids_LTK=torch.from_numpy(ids_TLK).transpose(0, 1).contiguous(),
        count_LE=np.sum([sample.count_LE for sample in chosen], axis=0),
    )


class Intake:
    """One rank's samples of one step, packed into windows as they end.

    A micro-batch holds samples with adjacent indices and is packed when the last of them ends. Recompute takes
    micro-batches in the order in which they were packed, so that its first windows are known, and planned, while long
    samples are still being made. The update takes them in the order of their samples: what is trained together does
    not depend on lengths.
    """

    def __init__(self, *, micro_batch: int, window: int) -> None:
        """Start without samples; `micro_batch` samples make a micro-batch, `window` micro-batches make a window."""
        self._micro_batch, self._window = micro_batch, window
        self._samples: dict[int, Sample] = {}
        self._packed: dict[int, PackedBatch] = {}

    def take(self, index: int, sample: Sample) -> Window:
        """Take the sample with this index, and return the window of recompute that it completes, if any."""
        self._samples[index] = sample
        number = index // self._micro_batch
        members = range(number * self._micro_batch, (number + 1) * self._micro_batch)
        if any(member not in self._samples for member in members):
            return []
        self._packed[number] = pack(self._samples, members)
        is_full = len(self._packed) % self._window == 0
        return list(self._packed.values())[-self._window :] if is_full else []

    def packed_anew(self, samples: Mapping[int, Sample], windows: Sequence[Schedule], rank: int) -> "Intake":
        """Return an intake with a rank's micro-batches of these schedules, which number the samples of all ranks."""
        made = Intake(micro_batch=self._micro_batch, window=self._window)
        batches = [batch for schedule in windows for batch in micro_batches(schedule, rank)]
        made._packed = {number: pack(samples, batch) for number, batch in enumerate(batches)}
        made._samples = dict(samples)
        return made

    @property
    def given(self) -> list[Sample]:
        """The samples taken, by index."""
        return [self._samples[index] for index in range(len(self._samples))]

    @property
    def trained(self) -> list[Sample]:
        """The samples of all micro-batches, in the order of the update."""
        numbers = chain.from_iterable(self._packed[n].sample_T.tolist() for n in sorted(self._packed))
        return [self._samples[index] for index in dict.fromkeys(numbers)]

    @property
    def recompute(self) -> list[list[int]]:
        """Numbers of the micro-batches of each window of recompute so far."""
        return self._windows(list(self._packed))

    @property
    def update(self) -> list[list[int]]:
        """Numbers of the micro-batches of each window of the update, once all samples are there."""
        return self._windows(sorted(self._packed))

    @property
    def packed(self) -> dict[int, PackedBatch]:
        """The micro-batches packed so far, by number."""
        return dict(self._packed)

    def _windows(self, numbers: list[int]) -> list[list[int]]:
        size = self._window
        return [numbers[at : at + size] for at in range(0, len(numbers) - size + 1, size)]


def window_rows(window: Window, *, stage: Stage) -> RankRows:
    """Return the rows that this rank sends to each expert in a window, and the share of them that is known."""
    coverage_ML = np.array([(b.ids_LTK >= 0).all(dim=2).double().mean(dim=1).tolist() for b in window])
    return RankRows(
        load_MLE=np.stack([batch.count_LE for batch in window]),
        coverage_ML=None if (coverage_ML == 1).all() else coverage_ML,
        stage=stage,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one micro-batch adds to its window, summed over trained tokens."""

    loss: Tensor
    """Differentiable, already divided by the window's trained tokens."""
    size: Tensor
    """The same of the absolute terms: the loss if its terms did not cancel."""
    ratio: Tensor
    clipped: Tensor
    kl_old: Tensor
    """KL to the old policy, by Schulman's k3 estimate."""
    kl_reference: Tensor


def group_advantages(rewards_B: Sequence[float], *, samples: int) -> np.ndarray:
    """[B] rewards less the mean of their group, over its standard deviation; 0 in a group of equal rewards.

    Rewards are given group after group, `samples` in each.
    """
    reward_GB = np.asarray(rewards_B, dtype=np.float64).reshape(-1, samples)
    centred_GB = reward_GB - reward_GB.mean(axis=1, keepdims=True)
    spread_G1 = reward_GB.std(axis=1, keepdims=True)
    return np.where(spread_G1 > _SMALL, centred_GB / (spread_G1 + _SMALL), 0.0).reshape(-1)


def token_log_probs(logits_TV: Tensor, target_T: Tensor, *, temperature: float) -> Tensor:
    """[T] log-prob of each target, at the temperature that sampled it."""
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
    """Return the clipped loss, with a KL to the reference where asked for, of one micro-batch.

    Args:
        log_prob_T: [T] log-probs of the trained tokens under the weights being trained
        old_T: [T] the same under the weights that made the samples, by recompute
        advantage_T: [T] advantage of each token's sample
        tokens: trained tokens of the whole window, on all ranks
        reference_T: [T] the same under the reference, where a KL is asked for
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

    def __init__(
        self,
        learner: Learner,
        config: TrainConfig,
        ranks: Ranks,
        *,
        reference: Any = None,
        foresee: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Train `learner`.

        Args:
            reference: a whole frozen model where a KL is asked for
            foresee: called on the first rank with the memory that a planned window needs, before its first micro-step
        """
        self._learner, self._config, self._ranks, self._reference = learner, config, ranks, reference
        self._foresee = foresee if ranks.is_first else None
        self._replay = config.update.replay
        self._is_complete = True
        self.open_step()

    def open_step(self) -> None:
        """Begin a step without samples."""
        config = self._config.update
        window = self._config.rank_samples // config.mini_batches // config.micro_batch
        self._intake = Intake(micro_batch=config.micro_batch, window=window)
        self._batches: dict[int, PackedBatch] = {}
        self.tally = StepTally()

    def take(self, index: int, sample: Sample) -> None:
        """Take the sample with this index, and announce the window of recompute that it completes."""
        window = self._intake.take(index, sample)
        if window and not self._config.update.pack:
            self._submit(window, "recompute", is_replayed=self._replay == "R3")

    def announce(self) -> None:
        """Announce the first update window where its routes are known. Every rank must call this."""
        if self._config.update.pack:
            self._pack()
        packed = self._intake.packed
        unknown = sum(int((batch.ids_LTK < 0).sum()) for batch in packed.values())
        self._is_complete = self._total(unknown) == 0
        if self._replay != "R2":
            first = [packed[number] for number in self._intake.update[0]]
            self._submit(first, "update", is_replayed=self._replay == "R3")
        self._batches = {number: batch.to(self._config.model.device) for number, batch in packed.items()}

    def _pack(self) -> None:
        """Exchange all samples, pack every window, and announce the log-prob pass. Every rank must call this."""
        config, node_R = self._config, build_cluster(self._config, self._learner.shape).node_R
        gathered = self._ranks.gather(self._intake.given)
        samples = dict(enumerate(sample for mine in gathered for sample in mine))
        tokens_B = np.array([len(sample.ids_TLK) for sample in samples.values()])
        count_BLE = np.stack([sample.count_LE for sample in samples.values()])
        sketch = sketch_counts(
            RouteCounts(
                model=self._learner.shape,
                count_BLE=count_BLE,
                tokens_B=tokens_B,
                names=tuple(sample.name for sample in samples.values()),
                layer_numbers=self._learner.shape.layer_numbers,
            )
        )
        size, share = config.update.micro_batch, config.rank_samples // config.update.mini_batches
        windows = []
        for first in range(0, config.rank_samples, share):
            places = [(rank, at) for rank in range(config.ranks) for at in range(share)]
            numbers = [rank * config.rank_samples + first + at for rank, at in places]
            pieces = [(b, 0, int(tokens_B[b]), at // size, rank) for b, (rank, at) in zip(numbers, places, strict=True)]
            given = Schedule.of(pieces, ranks=config.ranks, stage="update")
            packed = pack_window(sketch, given, node_R=node_R).schedule
            # Every rank runs every micro-step: one without tokens would run none of the layers.
            windows.append(packed if packed.num_tokens_MR.all() else given)
        self._intake = self._intake.packed_anew(samples, windows, self._ranks.rank)
        for numbers in self._intake.recompute:
            self._submit([self._intake.packed[n] for n in numbers], "recompute", is_replayed=self._replay == "R3")

    @property
    def trained(self) -> list[Sample]:
        """The samples that this rank trains on, in the order of the update's micro-batches."""
        return self._intake.trained

    def recompute(self) -> tuple[list[Window], list[list[Tensor]]]:
        """Return the windows of the update, and old log-probs by window and micro-batch. Every rank must call this."""
        is_recorded = self._replay == "R2"
        old: dict[int, Tensor] = {}
        for numbers in self._intake.recompute:
            with self._window("recompute"), torch.no_grad():
                for m, number in enumerate(numbers):
                    batch = self._batches[number]
                    old[number], ids_LTK = self._forward(m, batch, replay=self._replay == "R3", record=is_recorded)
                    if is_recorded:
                        self._batches[number] = batch.with_ids(ids_LTK)
            self._close("recompute", is_replayed=self._replay == "R3")
        windows = [[self._batches[number] for number in numbers] for numbers in self._intake.update]
        if is_recorded:
            self._submit(windows[0], "update", is_replayed=True)
        return windows, [[old[number] for number in numbers] for numbers in self._intake.update]

    def update(self, windows: Sequence[Window], old: Sequence[Sequence[Tensor]], advantage_B: np.ndarray) -> None:
        """Run one optimizer step per window, with the advantages of this rank's samples. Every rank must call this."""
        if self._config.update.pack:
            advantage_B = np.concatenate(self._ranks.gather(advantage_B))
        for k, window in enumerate(windows):
            if k + 1 < len(windows):
                self._submit(windows[k + 1], "update", is_replayed=self._replay != "off")
            tokens = self._total(sum(int(batch.is_response_T.sum()) for batch in window))
            loss, size = 0.0, 0.0
            with self._window("update"):
                for m, batch in enumerate(window):
                    terms = self._terms(m, batch, old[k][m], advantage_B, tokens=tokens)
                    terms.loss.backward()
                    loss, size = loss + float(terms.loss.detach()), size + float(terms.size)
                    self.tally.add(
                        ratio=terms.ratio,
                        clipped=terms.clipped,
                        kl_old=terms.kl_old,
                        kl_reference=terms.kl_reference,
                    )
            self._close("update", is_replayed=self._replay != "off")
            totals = torch.tensor([loss, size], dtype=torch.float64)
            sum_over([totals], self._ranks.world)
            self.tally.losses.append(float(totals[0]))
            self.tally.sizes.append(float(totals[1]))
            self.tally.norms.append(self._learner.step())
            self.tally.add(trained=tokens)

    def _terms(
        self, micro_step: int, batch: PackedBatch, old_T: Tensor, advantage_B: np.ndarray, *, tokens: int
    ) -> Terms:
        log_prob_T, _ = self._forward(micro_step, batch, replay=self._replay != "off")
        mask_T = batch.is_response_T
        advantage_T = torch.from_numpy(advantage_B).to(log_prob_T)[batch.sample_T]
        reference_T = None
        if self._reference is not None:
            with torch.no_grad():
                inputs = packed_inputs(self._reference, batch.input_T, batch.position_T)
                logits_TV = self._reference(**inputs).logits[0]
                temperature = self._config.rollout.temperature
                reference_T = token_log_probs(logits_TV, batch.target_T, temperature=temperature)[mask_T]
        return grpo_terms(
            log_prob_T[mask_T],
            old_T[mask_T],
            advantage_T[mask_T],
            config=self._config.update,
            tokens=tokens,
            reference_T=reference_T,
        )

    def _forward(
        self, micro_step: int, batch: PackedBatch, *, replay: bool, record: bool = False
    ) -> tuple[Tensor, Any]:
        """Return [T] log-probs of the targets, and recorded ids; raise unless every known row was replayed."""
        counters = self._learner.routers.counters
        before = counters.rows
        logits_TV, ids_LTK = self._learner.forward(
            micro_step,
            batch.input_T,
            batch.position_T,
            ids_LTK=batch.ids_LTK if replay else None,
            record=record or not replay,
        )
        given, used, differing = (now - then for now, then in zip(counters.rows, before, strict=True))
        known_LT1 = (batch.ids_LTK >= 0).all(dim=2, keepdim=True)
        if replay:
            known = int(known_LT1.sum()) * batch.ids_LTK.shape[2]
            if not known == given == used:
                raise RoutesError(
                    f"rank {self._ranks.rank}, micro-step {micro_step}: {known} rows have recorded routes, {given} "
                    f"were given to the routers and {used} reached the experts; replay is not exact"
                )
            self.tally.replayed_rows += used
        else:
            is_same_LTK = (batch.ids_LTK[..., :, None] == ids_LTK[..., None, :]).any(dim=3)
            known_LTK = known_LT1.expand_as(is_same_LTK)
            given, differing = int(known_LTK.sum()), int((known_LTK & ~is_same_LTK).sum())
        self.tally.given_rows += given
        self.tally.differing_rows += differing
        temperature = self._config.rollout.temperature
        return token_log_probs(logits_TV, batch.target_T, temperature=temperature), ids_LTK

    @contextmanager
    def _window(self, stage: Stage) -> Iterator[None]:
        """Run the oldest announced window in a `with` block, and say first what memory it needs."""
        with self._learner.window():
            if self._foresee is not None and (need := self._learner.memory_need(stage)) is not None:
                self._foresee(need)
            yield

    def _submit(self, window: Window, stage: Stage, *, is_replayed: bool) -> None:
        """Announce a window: the ids themselves where they are replayed, else only the number of rows to expect."""
        rows = window_rows(window, stage=stage)
        self.tally.rows[stage].append(rows.load_MLE)
        self._learner.submit([batch.ids_LTK.cpu().numpy() for batch in window] if is_replayed else rows, stage=stage)

    def _close(self, stage: Stage, *, is_replayed: bool) -> None:
        """Keep the window's report, and compare the rows that arrived with the planned ones."""
        report = self._learner.report
        if report is None:
            return
        self.tally.reports.append(report)
        self.tally.arrived[stage].append(report.arrived_ML)
        # Under R2 the update replays what recompute recorded, of every row.
        is_known = self._is_complete or (self._replay == "R2" and stage == "update")
        if is_replayed and is_known and report.planned_ML is not None and report.arrived_ML is not None:
            check_arrival(report.arrived_ML, report.planned_ML, stage=stage, rank=self._ranks.rank)
            self.tally.checked_windows += 1

    def _total(self, count: int) -> int:
        """Return the sum of a count over all ranks. Every rank must call this."""
        total = torch.tensor([count], dtype=torch.float64)
        sum_over([total], self._ranks.world)
        return int(total[0])


def check_arrival(rows_ML: np.ndarray, planned_ML: np.ndarray, *, stage: Stage, rank: int) -> None:
    """Raise unless the rows that arrived on a rank are those its plan announced."""
    wrong = np.argwhere(rows_ML != planned_ML)
    if len(wrong):
        m, layer = (int(i) for i in wrong[0])
        raise RoutesError(
            f"rank {rank}, {stage}, micro-step {m}, layer index {layer}: {int(rows_ML[m, layer])} rows arrived, the "
            f"plan announced {int(planned_ML[m, layer])}; the routes replayed are not those that were planned"
        )


class StageClock:
    """Measures the seconds of each stage of a step; a stage lasts until the next begins."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start, in no stage yet; `now` returns seconds."""
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
