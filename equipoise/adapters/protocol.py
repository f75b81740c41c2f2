"""What every adapter offers, and the micro-batches it takes routes and schedules from.

Knows token ids, masks and routes of samples. Does not know any framework, nor plans.

Rows are in the order in which a router sees them: the batch flattened, sample after sample, padding included.

Invariants (asserted by the tests):
1. A token's ids stand at the token's place of the flattened batch, whatever the padding side; nothing is shifted.
2. A token without a route has -1 in every layer, never an expert; padding has what its policy says.
3. The rows of `routes_from` and the tokens of `schedule_from` are those the model forwards, one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from equipoise.core import ModelShape, PaddingPolicy, Piece, RoutesError, SampleRoutes, Schedule, Stage
from equipoise.core.errors import ScheduleError
from equipoise.core.value import int64_array


class Adapter(Protocol):
    """The face of a framework's adapter: a module with these functions."""

    def inspect(self, model: Any) -> Any:
        """Find the MoE layers by module path and global number, and what is unsupported."""
        ...

    def install(self, model: Any, balancer: Any) -> Any:
        """Put balanced experts in the place of the model's; refuse what is unsupported, on every rank."""
        ...

    def uninstall(self, model: Any) -> None:
        """Restore the model exactly."""
        ...

    def routes_from(self, batch: Any, *, model: ModelShape) -> np.ndarray:
        """[L, T, K] ids that this rank replays in one micro-step."""
        ...

    def schedule_from(self, batches: Any, *, stage: Stage) -> Schedule:
        """Who forwards which tokens in which micro-step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One rank's micro-step: samples side by side with padding, or one behind the other in a single packed row."""

    input_ids: Any
    """[B, S] token ids as the model gets them."""
    samples: tuple[int, ...]
    """Number of each sample among those of the step, in order of the batch."""
    lengths: tuple[int, ...]
    """Tokens of each sample that are forwarded."""
    routes: tuple[SampleRoutes | None, ...] = ()
    """The recorded routes of each sample; None or left out: unknown."""
    starts: tuple[int, ...] = ()
    """First forwarded token of each sample; left out: 0."""
    attention_mask: Any = None
    """[B, S] true at tokens, false at padding; None: padding is at the end of each row."""
    padding_policy: PaddingPolicy = "arange"
    """Which experts padding rows get: `arange`, `first`, or `unknown` (the model routes them itself)."""

    def __post_init__(self) -> None:
        for name in ("lengths", "routes", "starts"):
            given = getattr(self, name)
            if given and len(given) != len(self.samples):
                raise ScheduleError(f"{name} names {len(given)} samples, the micro-batch has {len(self.samples)}")
        if self.padding_policy == "spread":
            raise ScheduleError("padding_policy 'spread' needs the loads of all ranks; use 'arange' or 'unknown' here")
        tokens = int(self.token_BS.sum())
        if tokens != sum(self.lengths):
            raise ScheduleError(
                f"lengths add up to {sum(self.lengths)} tokens, the attention mask shows {tokens}; give the number of "
                "tokens that are forwarded"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the batch."""
        rows, columns = np.shape(self.input_ids)
        return rows, columns

    @property
    def token_BS(self) -> np.ndarray:
        """[B, S] bool, where tokens are."""
        if self.attention_mask is not None:
            return np.asarray(self.attention_mask).astype(bool)
        rows, columns = self.shape
        if rows == len(self.lengths):
            return np.arange(columns)[None, :] < np.asarray(self.lengths)[:, None]
        return (np.arange(rows * columns) < sum(self.lengths)).reshape(rows, columns)

    @property
    def num_padding(self) -> int:
        """Padding tokens that are forwarded and dispatched."""
        return self.token_BS.size - sum(self.lengths)

    def pieces(self, *, micro_step: int, rank: int) -> list[Piece]:
        """The samples' token ranges, as a schedule lists them."""
        starts = self.starts or (0,) * len(self.samples)
        ranges = zip(self.samples, starts, self.lengths, strict=True)
        return [Piece(sample, start, start + length, micro_step, rank) for sample, start, length in ranges if length]


def routes_from(batch: MicroBatch, *, model: ModelShape) -> np.ndarray:
    """Lay out the recorded routes of a micro-batch as its router will see the tokens.

    Returns: [L, T, K] int64 ids, T = B x S; -1 where a route is unknown
    """
    ids_TLK = np.full((batch.token_BS.size, model.layers, model.top_k), -1, dtype=np.int64)
    is_token_T = batch.token_BS.reshape(-1)
    known = [_sample_rows(batch, index, model) for index in range(len(batch.samples))]
    if known:
        ids_TLK[is_token_T] = np.concatenate(known)
    ids_TLK[~is_token_T] = _padding_rows(batch, model)
    return ids_TLK.transpose(1, 0, 2)


def schedule_from(batches: Sequence[Sequence[MicroBatch]], *, stage: Stage = "update") -> Schedule:
    """Describe a trainer's own micro-batches as a schedule.

    Args:
        batches: batches[m][r] is forwarded by rank r in micro-step m
    """
    ranks = {len(by_rank) for by_rank in batches}
    if len(ranks) != 1:
        raise ScheduleError(f"micro-steps have batches for {sorted(ranks)} ranks; give one of every rank in each")
    pieces = [
        piece
        for m, by_rank in enumerate(batches)
        for r, batch in enumerate(by_rank)
        for piece in batch.pieces(micro_step=m, rank=r)
    ]
    policies = {batch.padding_policy for by_rank in batches for batch in by_rank}
    if len(policies) != 1:
        raise ScheduleError(f"micro-batches pad in different ways, {sorted(policies)}; use one padding_policy")
    padding_MR = np.array([[batch.num_padding for batch in by_rank] for by_rank in batches])
    return Schedule.of(
        pieces,
        ranks=ranks.pop(),
        stage=stage,
        micro_steps=len(batches),
        padding_MR=padding_MR,
        padding_policy=policies.pop(),
    )


def _sample_rows(batch: MicroBatch, index: int, model: ModelShape) -> np.ndarray:
    """[T, L, K] ids of one sample's forwarded tokens."""
    start = batch.starts[index] if batch.starts else 0
    rows_TLK = np.full((batch.lengths[index], model.layers, model.top_k), -1, dtype=np.int64)
    routes = batch.routes[index] if batch.routes else None
    if routes is None:
        return rows_TLK
    if routes.ids_TLK.shape[1:] != rows_TLK.shape[1:]:
        raise RoutesError(
            f"sample {routes.name!r}: routes have layers and choices {routes.ids_TLK.shape[1:]}, {model.name!r} has "
            f"{rows_TLK.shape[1:]}"
        )
    routes.check_ids(model.experts)
    there_TLK = int64_array("ids_TLK", routes.ids_TLK[start : start + len(rows_TLK)], ndim=3, error=RoutesError)
    rows_TLK[: len(there_TLK)] = there_TLK
    if routes.known_TL is not None:
        rows_TLK[: len(there_TLK)][~routes.known_TL[start : start + len(rows_TLK)]] = -1
    return rows_TLK


def _padding_rows(batch: MicroBatch, model: ModelShape) -> np.ndarray:
    """[P, L, K] ids of the padding tokens, as `loads.filling` counts them."""
    shape = (batch.num_padding, model.layers, model.top_k)
    if batch.padding_policy == "unknown":
        return np.full(shape, -1)
    if batch.padding_policy == "first":
        return np.broadcast_to(np.arange(model.top_k), shape)
    place_PL = np.arange(batch.num_padding)[:, None] * model.hidden_layers + np.array(model.layer_numbers)
    return (place_PL[:, :, None] * model.top_k + np.arange(model.top_k)) % model.experts
