"""`Schedule`: which sample and token range is forwarded by which source rank in which micro-step of one window.

A schedule is one *window*: the recompute stage, or one mini-batch of the update. A step is a tuple of schedules.
Pieces keep the order in which a trainer packs them: within a (micro-step, rank) they are concatenated as listed,
which is what context- and sequence-parallel slicing cut. Builders live in `equipoise.loads.packing`.

Knows nothing of routes: sample numbers index whatever `Routes` or `RouteCounts` it is used with.

Invariants (asserted by the tests):
1. Every piece names an existing micro-step and rank and a token range that is not empty.
2. Within one window no token of a sample is forwarded twice.
3. Padding tokens per (micro-step, rank) are kept apart from the pieces.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from equipoise.core.errors import ScheduleError
from equipoise.core.loads import Stage
from equipoise.core.value import Value, int64_array, require_int

PaddingPolicy = Literal["spread", "arange", "first", "unknown"]
"""Which experts padding rows choose: `spread` the least loaded distinct ones (the plan chooses), `arange` distinct
ids running through all experts (slime), `first` ids 0..k-1 (NeMo-RL), `unknown` (routed natively)."""

LastTokenPolicy = Literal["drop", "spread", "unknown"]
"""The last token of a sample has no route: `drop` it (forward T-1 tokens), `spread` it over the least loaded
experts (the plan chooses), or leave it `unknown` (routed natively)."""


MOST_ENTRIES = 2**24
"""Micro-steps times ranks of one window; more is damage, and must not become the size of an array."""


class Piece(NamedTuple):
    """Tokens `[start, stop)` of one sample, forwarded by `rank` in `micro_step`."""

    sample: int
    start: int
    stop: int
    micro_step: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule(Value):
    """The micro-steps of one window."""

    stage: Stage
    micro_steps: int
    ranks: int
    """Source ranks: those of one EP group, or all training ranks (see `LoadMatrix.split_groups`)."""
    pieces: np.ndarray
    """[P, 5] int64 rows of `Piece`."""
    padding_MR: np.ndarray
    """[M, R] padding tokens that are forwarded and dispatched."""
    padding_policy: PaddingPolicy = "spread"
    last_token: LastTokenPolicy = "drop"

    def __post_init__(self) -> None:
        for name in ("micro_steps", "ranks"):
            object.__setattr__(self, name, require_int(name, getattr(self, name), low=1, error=ScheduleError))
        for name, allowed in (
            ("stage", Stage),
            ("padding_policy", PaddingPolicy),
            ("last_token", LastTokenPolicy),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise ScheduleError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(allowed))}"
                )
        pieces = int64_array("pieces", self.pieces, ndim=2, error=ScheduleError)
        if pieces.shape[1] != len(Piece._fields):
            raise ScheduleError(f"pieces must have columns {Piece._fields}, got shape {pieces.shape}")
        object.__setattr__(self, "pieces", pieces)
        padding = int64_array("padding_MR", self.padding_MR, ndim=2, error=ScheduleError)
        if padding.shape != (self.micro_steps, self.ranks) or padding.min() < 0:
            raise ScheduleError(
                f"padding_MR must be non-negative of shape {(self.micro_steps, self.ranks)}, got shape {padding.shape}"
            )
        object.__setattr__(self, "padding_MR", padding)
        self._check_pieces()

    def _check_pieces(self) -> None:
        if not len(self.pieces):
            return
        sample, start, stop, micro_step, rank = self.pieces.T
        bad = (sample < 0) | (start < 0) | (stop <= start)
        bad |= (micro_step < 0) | (micro_step >= self.micro_steps) | (rank < 0) | (rank >= self.ranks)
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            raise ScheduleError(
                f"piece {first} is {Piece(*self.pieces[first].tolist())}; micro-steps are 0..{self.micro_steps - 1}, "
                f"ranks 0..{self.ranks - 1}, and a token range must not be empty"
            )
        order = np.lexsort((start, sample))
        same = np.diff(sample[order]) == 0
        overlap = same & (start[order][1:] < stop[order][:-1])
        if overlap.any():
            at = int(np.flatnonzero(overlap)[0])
            a, b = (Piece(*self.pieces[order[i]].tolist()) for i in (at, at + 1))
            raise ScheduleError(
                f"tokens of sample {a.sample} are forwarded twice in one window: {a} and {b}; "
                "give recompute and each mini-batch a schedule of their own"
            )

    @classmethod
    def of(
        cls,
        pieces: Iterable[Sequence[int]],
        *,
        ranks: int,
        stage: Stage = "update",
        micro_steps: int | None = None,
        padding_MR: np.ndarray | None = None,
        padding_policy: PaddingPolicy = "spread",
        last_token: LastTokenPolicy = "drop",
    ) -> "Schedule":
        """Build a schedule from an explicit list of pieces, such as a trainer's own micro-batches.

        Args:
            pieces: (sample, start, stop, micro_step, rank) each
            ranks: number of source ranks
            stage: "recompute" or "update"
            micro_steps: number of micro-steps; by default the last one named, plus one
            padding_MR: [M, R] padding tokens; none by default
            padding_policy: which experts padding rows choose
            last_token: what happens to a sample's last token, which has no route
        """
        table = _table(list(pieces))
        if micro_steps is None:
            micro_steps = int(table[:, 3].max()) + 1 if len(table) else 1
        require_int("ranks", ranks, low=1, error=ScheduleError)
        require_int("micro_steps", micro_steps, low=1, error=ScheduleError)
        if ranks * micro_steps > MOST_ENTRIES:
            raise ScheduleError(
                f"ranks is {ranks}, micro_steps is {micro_steps}; their product must be at most {MOST_ENTRIES}"
            )
        if padding_MR is None:
            padding_MR = np.zeros((micro_steps, ranks), dtype=np.int64)
        return cls(
            stage=stage,
            micro_steps=micro_steps,
            ranks=ranks,
            pieces=table,
            padding_MR=padding_MR,
            padding_policy=padding_policy,
            last_token=last_token,
        )

    @property
    def num_tokens_MR(self) -> np.ndarray:
        """[M, R] tokens forwarded, padding not included."""
        tokens = np.zeros((self.micro_steps, self.ranks), dtype=np.int64)
        if len(self.pieces):
            np.add.at(tokens, (self.pieces[:, 3], self.pieces[:, 4]), self.pieces[:, 2] - self.pieces[:, 1])
        return tokens


def _table(pieces: list[Sequence[int]]) -> np.ndarray:
    """[P, 5] int64 of an explicit list, or an error naming the first piece that is no five whole numbers."""
    for index, piece in enumerate(pieces):
        if not isinstance(piece, Sequence | np.ndarray) or len(piece) != len(Piece._fields):
            raise ScheduleError(f"piece {index} is {piece}; a piece has the fields {', '.join(Piece._fields)}")
    if not pieces:
        return np.empty((0, len(Piece._fields)), dtype=np.int64)
    return int64_array("pieces", [tuple(piece) for piece in pieces], ndim=2, error=ScheduleError)
