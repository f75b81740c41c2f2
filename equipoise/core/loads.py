"""`LoadMatrix`: rows per micro-step, layer, source rank and expert of one window. The planner's only input.

Loads include padding rows (they are dispatched); their part stands beside them in `padding_MLRE`.
Knows nothing of routes, schedules or seconds. Skew is defined in `equipoise.loads.skew`, and only there.

File (`save`, `load`): an uncompressed or compressed `.npz` without pickled objects, holding
    format          "equipoise-loads-1"
    load_MLRE       any unsigned integer dtype
    stage           "recompute" or "update"
    padding_MLRE, coverage_MLR, layer_numbers_L   where the matrix has them

Invariants (asserted by the tests):
1. Loads are int64, not negative; padding is never more than the load it is part of.
2. Coverage is a share from 0 to 1.
3. `load(save(x)) == x`; a file with pickled objects is refused.
"""

import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from equipoise.core.errors import LoadsError
from equipoise.core.files import whole_file
from equipoise.core.value import Value, as_array, frozen_array, int64_array

Stage = Literal["recompute", "update"]
FORMAT = "equipoise-loads-1"

NPZ_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, SyntaxError, MemoryError)
"""What else a damaged `.npz` can raise: its directory, its compressed data, its extra fields, an array's header."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadMatrix(Value):
    """Rows of one window of one EP group."""

    load_MLRE: np.ndarray
    """[M, L, R, E] rows at source rank r for expert e; any integer dtype, kept as int64."""
    _: KW_ONLY
    stage: Stage = "update"
    padding_MLRE: np.ndarray | None = None
    """[M, L, R, E] the part of the load that is padding; None: no row is."""
    coverage_MLR: np.ndarray | None = None
    """[M, L, R] share of the tokens whose route is known, 0 to 1; None: all are."""
    layer_numbers_L: np.ndarray | None = None
    """[L] global layer numbers, ascending; None: 0..L-1."""

    def __post_init__(self) -> None:
        load = int64_array("load_MLRE", self.load_MLRE, ndim=4, error=LoadsError)
        object.__setattr__(self, "load_MLRE", load)
        if 0 in load.shape:
            raise LoadsError(f"load_MLRE has shape {load.shape}; every axis needs at least one entry")
        _refuse_negative("load_MLRE", load)
        if self.stage not in get_args(Stage):
            raise LoadsError(f"stage is {self.stage!r}; it must be one of {', '.join(get_args(Stage))}")
        if self.padding_MLRE is not None:
            object.__setattr__(self, "padding_MLRE", self._checked_padding())
        if self.coverage_MLR is not None:
            object.__setattr__(self, "coverage_MLR", self._checked_coverage())
        if self.layer_numbers_L is not None:
            object.__setattr__(self, "layer_numbers_L", self._checked_numbers())

    def _checked_padding(self) -> np.ndarray:
        padding = int64_array("padding_MLRE", self.padding_MLRE, ndim=4, error=LoadsError)
        if padding.shape != self.load_MLRE.shape:
            raise LoadsError(f"padding_MLRE has shape {padding.shape}, load_MLRE has {self.load_MLRE.shape}")
        _refuse_negative("padding_MLRE", padding)
        over = np.argwhere(padding > self.load_MLRE)
        if len(over):
            place = tuple(int(i) for i in over[0])
            raise LoadsError(
                f"padding_MLRE{list(place)} is {int(padding[place])}, more than the load it is part of, "
                f"{int(self.load_MLRE[place])}; loads include padding"
            )
        return padding

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

    def _checked_numbers(self) -> np.ndarray:
        numbers = int64_array("layer_numbers_L", self.layer_numbers_L, ndim=1, error=LoadsError)
        if len(numbers) != self.num_layers or np.any(np.diff(numbers) <= 0):
            raise LoadsError(f"layer_numbers_L must be {self.num_layers} ascending numbers, got {numbers.tolist()}")
        return numbers

    @property
    def num_micro_steps(self) -> int:
        """M."""
        return int(self.load_MLRE.shape[0])

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.load_MLRE.shape[1])

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.load_MLRE.shape[2])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.load_MLRE.shape[3])

    def total_MLE(self) -> np.ndarray:
        """[M, L, E] rows of each expert, over all source ranks."""
        total: np.ndarray = self.load_MLRE.sum(axis=2)
        return total

    def without_padding(self) -> "LoadMatrix":
        """Return the loads of real tokens alone."""
        if self.padding_MLRE is None:
            return self
        return self._like(self.load_MLRE - self.padding_MLRE, padding_MLRE=None)

    def micro_steps(self, start: int, stop: int) -> "LoadMatrix":
        """Return micro-steps `start..stop-1` as a matrix of their own."""
        cut = slice(start, stop)
        padding, coverage = self.padding_MLRE, self.coverage_MLR
        return self._like(
            self.load_MLRE[cut],
            padding_MLRE=None if padding is None else padding[cut],
            coverage_MLR=None if coverage is None else coverage[cut],
        )

    def split_groups(self, ep: int) -> tuple["LoadMatrix", ...]:
        """Cut a matrix over all training ranks into one per EP group of `ep` consecutive ranks."""
        if ep < 1 or self.num_ranks % ep:
            raise LoadsError(f"{self.num_ranks} ranks do not divide into EP groups of {ep}")
        groups = []
        for start in range(0, self.num_ranks, ep):
            cut = slice(start, start + ep)
            padding, coverage = self.padding_MLRE, self.coverage_MLR
            groups.append(
                self._like(
                    self.load_MLRE[:, :, cut],
                    padding_MLRE=None if padding is None else padding[:, :, cut],
                    coverage_MLR=None if coverage is None else coverage[:, :, cut],
                )
            )
        return tuple(groups)

    def _like(self, load_MLRE: np.ndarray, **changed: Any) -> "LoadMatrix":
        kept: dict[str, Any] = {
            "stage": self.stage,
            "padding_MLRE": self.padding_MLRE,
            "coverage_MLR": self.coverage_MLR,
            "layer_numbers_L": self.layer_numbers_L,
        }
        return LoadMatrix(load_MLRE, **{**kept, **changed})

    def save(self, path: str | Path) -> None:
        """Write the matrix to a compressed `.npz` file; integers in the narrowest unsigned dtype."""
        arrays: dict[str, Any] = {
            "format": np.array(FORMAT),
            "stage": np.array(self.stage),
            "load_MLRE": narrow(self.load_MLRE),
        }
        if self.padding_MLRE is not None:
            arrays["padding_MLRE"] = narrow(self.padding_MLRE)
        for name in ("coverage_MLR", "layer_numbers_L"):
            if getattr(self, name) is not None:
                arrays[name] = getattr(self, name)
        with whole_file(path, error=LoadsError) as draft, draft.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "LoadMatrix":
        """Read a file made by `save`. Pickled content is refused."""
        arrays = read_npz(path, wanted=FORMAT, error=LoadsError)
        known = {"format", "load_MLRE", "stage", "padding_MLRE", "coverage_MLR", "layer_numbers_L"}
        unknown = sorted(set(arrays) - known)
        if unknown or "load_MLRE" not in arrays or "stage" not in arrays:
            raise LoadsError(f"{path}: expected arrays {sorted(known)}, found {sorted(arrays)}")
        options = {name: arrays[name] for name in ("padding_MLRE", "coverage_MLR", "layer_numbers_L") if name in arrays}
        return cls(arrays["load_MLRE"], stage=str(arrays["stage"]), **options)  # type: ignore[arg-type]  # checked there


def narrow(array: np.ndarray) -> np.ndarray:
    """Return a non-negative integer array in its narrowest unsigned dtype."""
    top = int(array.max()) if array.size else 0
    return array.astype(np.min_scalar_type(top))


def read_npz(
    path: str | Path, *, wanted: str, error: type[Exception], older: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Read every array of an `.npz` without pickling and check its `format` entry.

    Args:
        older: formats that are no longer read, and why
    """
    try:
        # Opened here, because numpy leaves a file open that turns out to be no archive.
        with Path(path).open("rb") as source:
            file = np.load(source, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise error(f"{path} is a bare .npy array; expected a {wanted} file (.npz)")
            with file:
                arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as cause:
        raise error(f"no file at {path}") from cause
    except (*NPZ_ERRORS, ValueError, OSError, EOFError, KeyError, RuntimeError) as cause:
        if isinstance(cause, error):
            raise
        raise error(f"{path} cannot be read as a {wanted} file (.npz): {_reason(cause)}") from cause
    found = str(arrays.get("format", "nothing"))
    if found != wanted:
        hint = f"; {older[found]}" if older and found in older else ""
        raise error(f"{path} says its format is {found!r}, expected {wanted!r}{hint}")
    return arrays


def _reason(cause: Exception) -> str:
    # numpy takes any file that is no array for a pickle, and advises to load it unsafely.
    return "it is another kind of file" if "unsafely" in str(cause) else str(cause)


def _refuse_negative(name: str, array: np.ndarray) -> None:
    if array.min() < 0:
        place = tuple(int(i) for i in np.argwhere(array < 0)[0])
        raise LoadsError(f"{name}{list(place)} is {int(array[place])}; rows cannot be negative")
