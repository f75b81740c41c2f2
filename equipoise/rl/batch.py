"""`MicroBatch`: samples packed into one sequence without padding, and the windows of micro-batches of one step.

A sample of T tokens forwards its first T - 1: the last has no target and no route. So every forwarded row has a route,
and coverage is complete where the recording is.

Knows tokens, positions and ids. Does not know models, losses or plans.

Invariants (asserted by the tests):
1. Every forwarded token of every sample stands in exactly one micro-batch of a window, with its own routes.
2. Positions begin at 0 with every sample, so that packed samples do not see each other.
3. The windows of the update are the recompute's micro-batches, in order: routes are counted once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.core import Stage
from equipoise.planning.rows import RankRows
from equipoise.rl.sample import Sample


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

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded."""
        return len(self.input_T)

    def to(self, device: str) -> "MicroBatch":
        """The same micro-batch on another device."""
        return MicroBatch(**{name: getattr(self, name).to(device) for name in self.__slots__})


def pack(samples: Sequence[Sample], indices: Sequence[int]) -> MicroBatch:
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
    )


def split_windows(samples: Sequence[Sample], *, mini_batches: int, micro_batch: int) -> list[list[MicroBatch]]:
    """The update's windows: samples in order, `mini_batches` equal parts of micro-batches each."""
    size = len(samples) // mini_batches
    starts = range(0, size * mini_batches, size)
    return [
        [pack(samples, range(at, at + micro_batch)) for at in range(start, start + size, micro_batch)]
        for start in starts
    ]


def window_rows(window: Sequence[MicroBatch], *, experts: int, stage: Stage) -> RankRows:
    """What this rank sends to each expert in a window, and how much of it is known."""
    load_MLE = np.stack([_count(batch.ids_LTK, experts) for batch in window])
    coverage_ML = np.array([[_coverage(ids_TK) for ids_TK in batch.ids_LTK] for batch in window])
    return RankRows(load_MLE=load_MLE, coverage_ML=None if (coverage_ML == 1).all() else coverage_ML, stage=stage)


def with_ids(batch: MicroBatch, ids_LTK: Tensor) -> MicroBatch:
    """The same tokens with other routes, such as those that recompute recorded."""
    values = {name: getattr(batch, name) for name in MicroBatch.__slots__}
    return MicroBatch(**{**values, "ids_LTK": ids_LTK})


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _count(ids_LTK: Tensor, experts: int) -> np.ndarray:
    rows = [torch.bincount(ids[(ids >= 0).all(dim=1)].flatten().cpu(), minlength=experts) for ids in ids_LTK]
    return torch.stack(rows).numpy()


def _coverage(ids_TK: Tensor) -> float:
    return float((ids_TK >= 0).all(dim=1).double().mean())
