"""`MicroBatch`: samples packed into one sequence without padding; `Intake`: samples as they end become windows.

A sample of T tokens forwards its first T - 1: the last has no target and no route. So every forwarded row has a route,
and coverage is complete where the recording is.

A micro-batch holds samples that stand side by side, and is packed when the last of them ends. Recompute takes
micro-batches in the order in which they were packed, so that its first windows are known, and planned, while long
samples are still being made. The update takes them in the order of their samples: what is trained together does not
depend on lengths.

Knows tokens, positions and ids. Does not know models, losses or plans.

Invariants (asserted by the tests):
1. Every forwarded token of every sample stands in exactly one micro-batch of a window, with its own routes.
2. Positions begin at 0 with every sample, so that packed samples do not see each other.
3. The windows of recompute and those of the update hold the same micro-batches, in orders of their own.
4. A window of recompute is given out with the sample that completes it, whatever is still to come.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment, Stage
from equipoise.planning.rows import RankRows

# `Sample`: one response with the routes that made it; and samples as `Routes` of the core, the form engines record.
#
# Invariants (asserted by the tests):
# 1. A sample of T tokens has T - 1 rows: the last token was sampled and never forwarded.
# 2. `to_routes` gives routes that write, read and diagnose as an engine's recording would.
# 3. A sample's histogram counts every known row once, and histograms add up.
# 4. `from_routes` marks unknown rows -1 and never gives them an expert.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A prompt and one response to it."""

    name: str
    """Step, question and number within its group; unique in a run."""
    tokens_T: np.ndarray
    """[T] token ids, prompt and response."""
    num_prompt: int
    ids_TLK: np.ndarray
    """[T - 1, L, K] expert ids, -1 in rows whose route is unknown."""
    experts: int
    """Routed experts of the model."""
    log_probs_T: np.ndarray | None = None
    """[response] log-probability of each response token where the engine said so."""
    weight_version: str = ""
    count_LE: np.ndarray = field(init=False)
    """[L, E] known rows by expert, counted when the sample ends; counts of samples add up to those of a window."""

    def __post_init__(self) -> None:
        if len(self.ids_TLK) != len(self.tokens_T) - 1:
            raise RoutesError(
                f"sample {self.name!r}: {len(self.ids_TLK)} rows for {len(self.tokens_T)} tokens; "
                "there must be one fewer, since the last token is never forwarded"
            )
        if not 0 < self.num_prompt < len(self.tokens_T):
            raise RoutesError(
                f"sample {self.name!r}: {self.num_prompt} of {len(self.tokens_T)} tokens are the prompt's; "
                "a sample needs a prompt and a response"
            )
        object.__setattr__(self, "count_LE", count_ids(self.ids_TLK, self.experts))

    @property
    def response_T(self) -> np.ndarray:
        """Token ids of the response."""
        return self.tokens_T[self.num_prompt :]

    @property
    def known_rows(self) -> int:
        """(token, layer) entries whose route is known."""
        return int((self.ids_TLK >= 0).all(axis=2).sum())


def count_ids(ids_TLK: np.ndarray, experts: int) -> np.ndarray:
    """[L, E] rows by expert, of the tokens whose ids are known."""
    layers = ids_TLK.shape[1]
    known_TL = np.all(ids_TLK >= 0, axis=2)
    place_TLK = ids_TLK + experts * np.arange(layers)[None, :, None]
    return np.bincount(place_TLK[known_TL].reshape(-1), minlength=layers * experts).reshape(layers, experts)


def to_routes(samples: Sequence[Sample], model: ModelShape) -> Routes:
    """The samples' routes, as the rest of the package knows them."""
    return Routes.of([_to_core(sample) for sample in samples], model=model)


def from_routes(routes: SampleRoutes, model: ModelShape, *, num_prompt: int) -> Sample:
    """A sample from a recording that has token ids; rows that are missing or unknown become -1."""
    if routes.tokens_T is None:
        raise RoutesError(f"sample {routes.name!r} has no token ids; record them, training needs them")
    ids_TLK = np.full((routes.num_tokens - 1, model.layers, model.top_k), -1, dtype=np.int64)
    rows = min(routes.num_rows, len(ids_TLK))
    ids_TLK[:rows] = routes.ids_TLK[:rows]
    if routes.known_TL is not None:
        ids_TLK[:rows][~routes.known_TL[:rows]] = -1
    return Sample(
        name=routes.name,
        tokens_T=np.asarray(routes.tokens_T),
        num_prompt=num_prompt,
        ids_TLK=ids_TLK,
        experts=model.experts,
    )


def _to_core(sample: Sample) -> SampleRoutes:
    known_TL: np.ndarray = np.all(sample.ids_TLK >= 0, axis=2)
    rows = len(sample.ids_TLK)
    return SampleRoutes(
        name=sample.name,
        ids_TLK=np.where(known_TL[:, :, None], sample.ids_TLK, 0),
        known_TL=None if known_TL.all() else known_TL,
        num_tokens=len(sample.tokens_T),
        tokens_T=sample.tokens_T,
        segments=(Segment(start=0, stop=rows, weight_version=sample.weight_version),) if sample.weight_version else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """What one rank forwards in one micro-step."""

    input_T: Tensor
    """[T] token ids, sample after sample."""
    position_T: Tensor
    """[T] place in its sample."""
    target_T: Tensor
    """[T] the token that follows."""
    is_response_T: Tensor
    """[T] whether the target belongs to a response: what is trained on."""
    sample_T: Tensor
    """[T] index of the sample in the rank's list."""
    ids_LTK: Tensor
    """[L, T, K] expert ids to replay, -1 where unknown."""
    count_LE: np.ndarray
    """[L, E] its known rows by expert: the sum of its samples' histograms."""

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded."""
        return len(self.input_T)

    def to(self, device: str) -> "MicroBatch":
        """The same micro-batch on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "count_LE"})


def pack(samples: Mapping[int, Sample], indices: Sequence[int]) -> MicroBatch:
    """Pack the samples with these indices, in order."""
    chosen = [samples[i] for i in indices]
    lengths = [len(sample.tokens_T) - 1 for sample in chosen]
    place = [np.arange(length) for length in lengths]
    response = [at >= sample.num_prompt - 1 for at, sample in zip(place, chosen, strict=True)]
    return MicroBatch(
        input_T=_joined([sample.tokens_T[:-1] for sample in chosen]),
        position_T=_joined(place),
        target_T=_joined([sample.tokens_T[1:] for sample in chosen]),
        is_response_T=_joined(response),
        sample_T=_joined([np.full(length, i) for length, i in zip(lengths, indices, strict=True)]),
        ids_LTK=_joined([sample.ids_TLK for sample in chosen]).transpose(0, 1).contiguous(),
        count_LE=np.sum([sample.count_LE for sample in chosen], axis=0),
    )


class Intake:
    """One rank's samples of one step, on their way into windows."""

    def __init__(self, *, micro_batch: int, window: int) -> None:
        """Take samples from now on.

        Args:
            micro_batch: samples of a micro-batch
            window: micro-batches of a window
        """
        self._micro_batch, self._window = micro_batch, window
        self._samples: dict[int, Sample] = {}
        self._packed: dict[int, MicroBatch] = {}

    def take(self, place: int, sample: Sample) -> list[MicroBatch]:
        """Take the sample with this place, and return the window of recompute that it completes, if it does."""
        self._samples[place] = sample
        number = place // self._micro_batch
        members = range(number * self._micro_batch, (number + 1) * self._micro_batch)
        if any(member not in self._samples for member in members):
            return []
        self._packed[number] = pack(self._samples, members)
        is_full = len(self._packed) % self._window == 0
        return list(self._packed.values())[-self._window :] if is_full else []

    @property
    def recompute(self) -> list[list[int]]:
        """Numbers of the micro-batches of each window of recompute so far."""
        return _parts(list(self._packed), self._window)

    @property
    def update(self) -> list[list[MicroBatch]]:
        """The windows of the update, once all samples are there."""
        return [[self._packed[number] for number in part] for part in _parts(sorted(self._packed), self._window)]


def window_rows(window: Sequence[MicroBatch], *, stage: Stage) -> RankRows:
    """What this rank sends to each expert in a window, and how much of it is known."""
    coverage_ML = np.array([_coverage_L(batch.ids_LTK) for batch in window])
    return RankRows(
        load_MLE=np.stack([batch.count_LE for batch in window]),
        coverage_ML=None if (coverage_ML == 1).all() else coverage_ML,
        stage=stage,
    )


def with_ids(batch: MicroBatch, ids_LTK: Tensor) -> MicroBatch:
    """The same tokens with other routes, such as those that recompute recorded."""
    count_LE = count_ids(ids_LTK.transpose(0, 1).cpu().numpy(), batch.count_LE.shape[1])
    return replace(batch, ids_LTK=ids_LTK, count_LE=count_LE)


def _parts(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[at : at + size] for at in range(0, len(numbers) - size + 1, size)]


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _coverage_L(ids_LTK: Tensor) -> list[float]:
    return (ids_LTK >= 0).all(dim=2).double().mean(dim=1).tolist()
