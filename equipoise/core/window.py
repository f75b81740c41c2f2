"""One window: `Schedule`, which rank forwards which tokens in which micro-step; `LoadMatrix`, the rows that result.

A window is the recompute stage, or one mini-batch of the update; a step is a tuple of windows. Schedules are built in
`equipoise.loads.packing`. Loads are the planner's only input; skew is defined in `equipoise.loads.skew`.

File of a LoadMatrix (`save`, `load`): an `.npz` without pickled objects, holding
    format          "equipoise-loads-1"
    load_MLRE       any unsigned integer dtype
    stage           "recompute" or "update"
    padding_MLRE, coverage_MLR, filled_MLR, layer_numbers_L   if the matrix has them
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from equipoise.core.errors import LoadsError, ScheduleError
from equipoise.core.files import narrow, read_npz, whole_file
from equipoise.core.value import Value, as_array, frozen_array, int64_array, require_choice, require_int

Stage = Literal["recompute", "update"]
LOADS_FORMAT = "equipoise-loads-1"
OPTIONAL = ("padding_MLRE", "coverage_MLR", "filled_MLR", "layer_numbers_L")

PaddingPolicy = Literal["spread", "arange", "first", "unknown"]
"""Which experts padding rows choose: `spread` the least loaded distinct ones (the plan chooses), `arange` distinct
ids running through all experts (slime), `first` ids 0..k-1 (NeMo-RL), `unknown` (routed natively)."""

LastTokenPolicy = Literal["drop", "spread", "unknown"]
"""The last token of a sample has no route: `drop` it (forward T-1 tokens), `spread` it over the least loaded
experts (the plan chooses), or leave it `unknown` (routed natively)."""


MOST_ENTRIES = 2**24
"""Most micro-steps times ranks of one window; more is damage, and must not become the size of an array."""
MOST_ROWS = 2**62
"""Most rows of one window: all sums of them then fit int64, which does not say when it overflows."""


class Piece(NamedTuple):
    """Tokens `[start, stop)` of one sample, forwarded by `rank` in `micro_step`."""

    sample: int
    start: int
    stop: int
    micro_step: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule(Value):
    """The micro-steps of one window. No token of a sample is forwarded twice in it."""

    stage: Stage
    micro_steps: int
    ranks: int
    """Source ranks: those of one EP group, or all training ranks (see `LoadMatrix.split_groups`)."""
    pieces: np.ndarray
    """[P, 5] int64 rows of `Piece`, in the order in which a trainer packs them: within a (micro-step, rank) pieces are
    concatenated as listed, which is what context- and sequence-parallel slicing cut. Samples are indices into the
    `Routes` or `RouteCounts` it is used with."""
    padding_MR: np.ndarray
    """[M, R] padding tokens that are forwarded and dispatched."""
    padding_policy: PaddingPolicy = "spread"
    last_token: LastTokenPolicy = "drop"

    def __post_init__(self) -> None:
        for name in ("micro_steps", "ranks"):
            object.__setattr__(self, name, require_int(name, getattr(self, name), low=1, error=ScheduleError))
        require_choice("stage", self.stage, Stage, error=ScheduleError)
        require_choice("padding_policy", self.padding_policy, PaddingPolicy, error=ScheduleError)
        require_choice("last_token", self.last_token, LastTokenPolicy, error=ScheduleError)
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
    """Return [P, 5] int64 of an explicit list, or raise naming the first piece that is not five integers."""
    for index, piece in enumerate(pieces):
        is_row = isinstance(piece, Sequence | np.ndarray) and len(piece) == len(Piece._fields)
        if not is_row or not all(isinstance(n, int | np.integer) for n in piece):
            fields = ", ".join(Piece._fields)
            raise ScheduleError(f"piece {index} is {piece!r}; a piece has the fields {fields}, all of them integers")
    if not pieces:
        return np.empty((0, len(Piece._fields)), dtype=np.int64)
    return int64_array("pieces", [tuple(piece) for piece in pieces], ndim=2, error=ScheduleError)


@dataclass(frozen=True, slots=True, eq=False)
class LoadMatrix(Value):
    """Rows of one window of one EP group, padding rows included: they are dispatched."""

    load_MLRE: np.ndarray
    """[M, L, R, E] rows at source rank r for expert e, not negative; any integer dtype, kept as int64."""
    _: KW_ONLY
    stage: Stage = "update"
    padding_MLRE: np.ndarray | None = None
    """[M, L, R, E] the part of the load that is padding; None: no row is."""
    coverage_MLR: np.ndarray | None = None
    """[M, L, R] share of the tokens whose experts are known, 0 to 1; None: all are."""
    filled_MLR: np.ndarray | None = None
    """[M, L, R] the part of the load whose experts no route says: rows of last and padding tokens that were given the
    least loaded experts; None: no row was."""
    layer_numbers_L: np.ndarray | None = None
    """[L] global layer numbers, ascending; None: 0..L-1."""
    num_micro_steps: int = field(init=False, repr=False, compare=False)
    """M."""
    num_layers: int = field(init=False, repr=False, compare=False)
    """L."""
    num_ranks: int = field(init=False, repr=False, compare=False)
    """R."""
    num_experts: int = field(init=False, repr=False, compare=False)
    """E."""

    def __post_init__(self) -> None:
        load = int64_array("load_MLRE", self.load_MLRE, ndim=4, low=0, error=LoadsError)
        object.__setattr__(self, "load_MLRE", load)
        if 0 in load.shape:
            raise LoadsError(f"load_MLRE has shape {load.shape}; every axis needs at least one entry")
        for name, size in zip(("micro_steps", "layers", "ranks", "experts"), load.shape, strict=True):
            object.__setattr__(self, f"num_{name}", size)
        if int(load.max()) > MOST_ROWS // load.size and (total := float(load.sum(dtype=np.float64))) > MOST_ROWS:
            raise LoadsError(
                f"load_MLRE adds up to {total:.2e} rows, and at most 2^62 ({MOST_ROWS:.2e}) can be added up exactly; "
                f"its largest entry is {int(load.max())}: give rows, not bytes or hashes"
            )
        require_choice("stage", self.stage, Stage, error=LoadsError)
        if self.padding_MLRE is not None:
            object.__setattr__(self, "padding_MLRE", self._checked_part("padding_MLRE", load))
        if self.coverage_MLR is not None:
            object.__setattr__(self, "coverage_MLR", self._checked_coverage())
        if self.filled_MLR is not None:
            object.__setattr__(self, "filled_MLR", self._checked_part("filled_MLR", load.sum(axis=3)))
        if self.layer_numbers_L is not None:
            numbers = int64_array("layer_numbers_L", self.layer_numbers_L, ndim=1, error=LoadsError)
            if len(numbers) != self.num_layers or np.any(np.diff(numbers) <= 0):
                raise LoadsError(f"layer_numbers_L must be {self.num_layers} ascending numbers, got {numbers.tolist()}")
            object.__setattr__(self, "layer_numbers_L", numbers)

    def _checked_part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """Return a field that counts some of the rows of `whole`."""
        part = int64_array(name, getattr(self, name), ndim=whole.ndim, low=0, error=LoadsError)
        if part.shape != whole.shape:
            raise LoadsError(f"{name} has shape {part.shape}, expected {whole.shape} of load_MLRE")
        over = np.argwhere(part > whole)
        if len(over):
            place = tuple(int(i) for i in over[0])
            raise LoadsError(
                f"{name}{list(place)} is {int(part[place])}, more than the load it is part of, {int(whole[place])}; "
                "loads include these rows"
            )
        return part

    def _checked_coverage(self) -> np.ndarray:
        given = as_array("coverage_MLR", self.coverage_MLR, error=LoadsError)
        if given.dtype.kind not in "fiu":
            raise LoadsError(f"coverage_MLR must be shares from 0 to 1, got dtype {given.dtype}")
        coverage = given.astype(np.float64)
        if coverage.shape != self.load_MLRE.shape[:3]:
            raise LoadsError(f"coverage_MLR has shape {coverage.shape}, expected {self.load_MLRE.shape[:3]}")
        if not bool(np.all((coverage >= 0) & (coverage <= 1))):
            raise LoadsError("coverage_MLR must be shares from 0 to 1, without NaN")
        return frozen_array(coverage)

    @property
    def num_filled(self) -> int:
        """Rows that were given the least loaded experts, in all micro-steps, layers and ranks."""
        return 0 if self.filled_MLR is None else int(self.filled_MLR.sum())

    def total_MLE(self) -> np.ndarray:
        """Return [M, L, E] rows of each expert, over all source ranks."""
        return self.load_MLRE.sum(axis=2)

    def without_padding(self) -> "LoadMatrix":
        """Return the loads of real tokens alone, without saying which of their rows were filled."""
        if self.padding_MLRE is None:
            return self
        return replace(self, load_MLRE=self.load_MLRE - self.padding_MLRE, padding_MLRE=None, filled_MLR=None)

    def micro_steps(self, start: int, stop: int) -> "LoadMatrix":
        """Return micro-steps `start..stop-1` as a separate matrix."""
        return self._cut(np.s_[start:stop])

    def split_groups(self, ep: int) -> tuple["LoadMatrix", ...]:
        """Cut a matrix over all training ranks into one per EP group of `ep` consecutive ranks."""
        if ep < 1 or self.num_ranks % ep:
            raise LoadsError(f"{self.num_ranks} ranks do not divide into EP groups of {ep}")
        return tuple(self._cut(np.s_[:, :, start : start + ep]) for start in range(0, self.num_ranks, ep))

    def _cut(self, cut: Any) -> "LoadMatrix":
        kept = {name: getattr(self, name) for name in ("padding_MLRE", "coverage_MLR", "filled_MLR")}
        parts = {name: array[cut] for name, array in kept.items() if array is not None}
        return replace(self, load_MLRE=self.load_MLRE[cut], **parts)

    def save(self, path: str | Path) -> None:
        """Write the matrix to a compressed `.npz` file; integers in the narrowest unsigned dtype."""
        arrays: dict[str, Any] = {"format": np.array(LOADS_FORMAT), **self.to_arrays()}
        with whole_file(path, error=LoadsError) as draft, draft.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "LoadMatrix":
        """Read a file written by `save`. Pickled content is refused."""
        arrays = read_npz(path, wanted=LOADS_FORMAT, error=LoadsError)
        known = {"format", "load_MLRE", "stage", *OPTIONAL}
        if (set(arrays) ^ known) - set(OPTIONAL):
            raise LoadsError(f"{path}: expected arrays {sorted(known)}, found {sorted(arrays)}")
        return cls.from_arrays(arrays)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return stage and arrays as a file holds them: integers in their narrowest dtype, absent ones left out."""
        arrays = {name: getattr(self, name) for name in ("load_MLRE", *OPTIONAL)}
        return {"stage": np.array(self.stage)} | {n: narrow(array) for n, array in arrays.items() if array is not None}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "LoadMatrix":
        """Build a matrix from what `to_arrays` returned; other arrays are ignored."""
        options: dict[str, Any] = {name: arrays[name] for name in OPTIONAL if name in arrays}
        return cls(arrays["load_MLRE"], stage=str(arrays["stage"]), **options)  # type: ignore[arg-type]  # checked there
