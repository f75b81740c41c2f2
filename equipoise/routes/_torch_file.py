"""Torch files (`.pt`), read without running code: tensors, plain values, and the numpy arrays that slime's dumps hold.

torch's weights-only reader refuses every pickled object that is not a tensor. A pickled numpy array names four things:
what makes an array, what makes a number, the array type and the dtype. Here stand-ins answer to those names, keep what
the file says, and make the array from its bytes themselves: numpy's own unpickling trusts the file, and a damaged dtype
would make an array that breaks where it is used.

Knows pickled arrays. Does not know what is in them.

Invariants (asserted by the tests):
1. An array or number of bools, integers or floats is read as it was written; any other kind is refused.
2. Bytes, shape and dtype must agree exactly.
3. Any other pickled object is refused, and nothing in the file is run.
"""

import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import RoutesError

_CODE = re.compile("b1|[iu][1248]|f[248]")
_PLAIN = {int, float, bool, str, bytes, type(None)}


def load_torch(path: Path) -> Any:
    """Read a file that `torch.save` made; what else torch raises on damaged content is the caller's to name."""
    try:
        import torch
    except ImportError as error:
        raise RoutesError("it needs torch to be read; pip install 'equipoise[torch]', or save it as .npz") from error
    try:
        with torch.serialization.safe_globals(_stand_ins()):
            return _unwrapped(torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        # torch's own advice, a page of it, is to trust the file.
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds a pickled {named[1]}" if named else "is damaged or holds pickled objects"
        raise RoutesError(
            f"it {what}; only tensors, arrays and plain values are read, others could run code"
        ) from error


class _Dtype:
    """Stands for `numpy.dtype`."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def plain(self) -> np.dtype:
        """The dtype, if it is one of bools, integers or floats."""
        if not isinstance(self.code, str) or not _CODE.fullmatch(self.code) or self.order not in ("<", ">", "|", "="):
            raise RoutesError(f"an array of dtype {self.code!r} is not read; bools, integers and floats are")
        return np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]  # checked above


class _Array:
    """Stands for `numpy.ndarray`."""

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise RoutesError("a numpy array in it holds objects; only numbers are read")
        plain = dtype.plain()
        if math.prod(shape) * plain.itemsize != len(raw):
            raise RoutesError(f"a numpy array in it has {len(raw)} bytes, not those of shape {shape} of {plain}")
        self.array = np.ndarray(shape, plain, raw, order="F" if is_fortran else "C")


def _make_array(*_: Any) -> _Array:
    """Stands for `_reconstruct`: an array yet to be filled."""
    return _Array()


def _make_number(dtype: Any, raw: Any) -> Any:
    """Stands for `scalar`."""
    plain = dtype.plain()
    return np.ndarray((), plain, raw)[()]


def _no_bytes() -> bytes:
    """Stands for `bytes`, which the content of an empty array names."""
    return b""


def _stand_ins() -> list[Any]:
    # numpy 2 moved `core` to `_core`; a file may come from either.
    made = [
        (make, f"numpy.{room}.multiarray.{name}")
        for make, name in ((_make_array, "_reconstruct"), (_make_number, "scalar"))
        for room in ("_core", "core")
    ]
    dtypes = [f"dtypes.{type(np.dtype(code)).__name__}" for code in "?bBhHiIlLqQefd"]
    types = [(_Array, "numpy.ndarray"), *((_Dtype, f"numpy.{name}") for name in ("dtype", *dtypes))]
    return [*made, *types, (_no_bytes, "builtins.bytes"), (_no_bytes, "__builtin__.bytes")]


def _unwrapped(value: Any) -> Any:
    """The same content with arrays for their stand-ins."""
    if isinstance(value, _Array):
        if value.array is None:
            raise RoutesError("a numpy array in it has no content")
        return value.array
    if isinstance(value, dict):
        return {key: _unwrapped(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not set(map(type, value)) <= _PLAIN:
        return [_unwrapped(item) for item in value]
    return value
