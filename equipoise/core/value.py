"""What all value types share: equality by content, read-only arrays, and checks of integers and types.

A float, a bool, a NaN or a number outside int64 never becomes an integer silently.
"""

import dataclasses
from typing import Any, get_args

import numpy as np

from equipoise.core.errors import EquipoiseError

INT64_MAX = 2**63 - 1


class Value:
    """Base of frozen dataclasses that hold arrays: equal if types and all fields are, arrays element by element."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields if f.compare)

    __hash__ = None  # type: ignore[assignment]  # arrays have no stable hash


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) != isinstance(b, np.ndarray):
        return False
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def frozen_array(array: np.ndarray) -> np.ndarray:
    """Return a view of `array` that cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def int64_array(name: str, array: Any, *, ndim: int, error: type[EquipoiseError], low: int | None = None) -> np.ndarray:
    """Return `array` as a contiguous read-only int64 array, or raise `error` naming what is wrong.

    Args:
        name: of the array in messages, with its shape letters
        array: anything numpy can turn into an integer array
        ndim: the number of axes it must have
        error: the error to raise
        low: the least value allowed
    """
    given = as_array(name, array, error=error)
    if given.dtype.kind not in "iu":
        raise error(f"{name} must hold integers, got dtype {given.dtype}; convert it with .astype(np.int64)")
    if holds_bool(array):
        raise error(f"{name} must hold integers, got a list with a bool in it; write 0 or 1 if that is meant")
    if given.ndim != ndim:
        raise error(f"{name} must have {ndim} axes, got shape {given.shape}")
    if given.dtype == np.uint64 and given.size and int(given.max()) > INT64_MAX:
        raise error(f"{name} holds {int(given.max())}, above the limit of int64, {INT64_MAX}")
    if low is not None and given.size and given.min() < low:
        place = tuple(int(i) for i in np.argwhere(given < low)[0])
        raise error(f"{name}{list(place)} is {int(given[place])}; it must be at least {low}")
    return frozen_array(np.ascontiguousarray(given, dtype=np.int64))


def as_array(name: str, value: Any, *, error: type[EquipoiseError]) -> np.ndarray:
    """Return `value` as an array, or raise `error` if its lists differ in length."""
    try:
        return np.asarray(value)
    except ValueError as cause:
        raise error(f"{name} cannot be made an array: {cause}") from cause


def holds_bool(value: Any) -> bool:
    """Whether nested lists hold a bool among their numbers: numpy silently makes integers of [False, 0]."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "b"
    if not isinstance(value, list | tuple):
        return False
    kinds = set(map(type, value))
    if bool in kinds or np.bool_ in kinds:
        return True
    return not kinds <= {int} and any(map(holds_bool, value))


def require_int(name: str, value: Any, *, low: int, high: int | None = None, error: type[EquipoiseError]) -> int:
    """Return `value` as a plain int in [low, high], or raise `error` naming name, value and limit."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise error(f"{name} must be a whole number, got {value!r} of type {type(value).__name__}")
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise error(f"{name} is {number}; it must be {limit}")
    return number


def require_choice(name: str, value: Any, choices: Any, *, error: type[EquipoiseError]) -> None:
    """Raise `error`, naming the value and all choices, unless it is one of a `Literal`'s."""
    if value not in get_args(choices):
        raise error(f"{name} is {value!r}; it must be one of {', '.join(get_args(choices))}")


def require_kind(name: str, value: Any, *kinds: type, error: type[EquipoiseError]) -> None:
    """Raise `error`, naming the given and the accepted types, unless a value is of one of the kinds."""
    if not isinstance(value, kinds):
        wanted = " or a ".join(kind.__name__ for kind in kinds)
        raise error(f"{name} is a {type(value).__name__}; it must be a {wanted}")


STAGE_WORDS = {"recompute": "log-prob", "update": "update"}
"""What people read for a stage: to users of Megatron, recompute is activation recomputation."""


def plural(number: int, noun: str) -> str:
    """`1 slot`, `2 slots`, `4,096 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def numbered(place_P: np.ndarray) -> np.ndarray:
    """Return [P] how many earlier entries of `place_P` equal each."""
    order_P = np.argsort(place_P, kind="stable")
    sorted_P, number_P = place_P[order_P], np.zeros(len(place_P), dtype=np.int64)
    number_P[order_P] = np.arange(len(place_P)) - np.searchsorted(sorted_P, sorted_P)
    return number_P
