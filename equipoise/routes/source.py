"""`Source`: a dump on its way in. A file, a folder, or an object already in memory; and values on their way to arrays.

It opens files by suffix, without ever unpickling: `.json`, `.jsonl`, `.npy`, `.npz`, `.txt`, `.pt` (`_torch_file.py`).
Readers ask it for records; whatever is wrong with the container becomes a `RoutesError` that names the file and place.

Knows containers and array types. Does not know what routes look like in them.

Invariants (asserted by the tests):
1. A damaged or foreign file raises `RoutesError`, never an error of another kind, and runs no code.
2. `opened()` reads a whole-file container once, however many formats look at it.
3. Nothing but integers becomes an integer array: floats, bools, ragged lists and numbers beyond int64 are refused.
"""

import json
import math
import os
import pickle
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import RoutesError
from equipoise.core.value import holds_bool

# Torch files (`.pt`), read without running code: tensors, plain values, and the numpy arrays that slime's dumps hold.
#
# torch's weights-only reader refuses every pickled object that is not a tensor. A pickled numpy array names four
# things:
# what makes an array, what makes a number, the array type and the dtype. Here stand-ins answer to those names, keep
# what
# the file says, and make the array from its bytes themselves: numpy's own unpickling trusts the file, and a damaged
# dtype
# would make an array that breaks where it is used.
#
# Invariants (asserted by the tests):
# 1. An array or number of bools, integers or floats is read as it was written; any other kind is refused.
# 2. Bytes, shape and dtype must agree exactly.
# 3. Any other pickled object is refused, and nothing in the file is run.


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


SUFFIXES = (".json", ".jsonl", ".npy", ".npz", ".pt", ".txt")
_WHOLE_FILE = (".json", ".npy", ".npz", ".pt")

# What json, numpy, zipfile and torch are known to raise on damaged bytes; the fuzz tests hold this list.
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    OSError,
    EOFError,
    SyntaxError,
    MemoryError,
    RuntimeError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, slots=True)
class Source:
    """One dump: `path` is set for files and folders, `content` for objects and for files already read."""

    name: str
    """What messages call it."""
    path: Path | None = None
    content: Any = None

    @classmethod
    def of(cls, dump: Any) -> "Source":
        """Wrap a path or an object. A str is always a path; wrap text in a list to pass it as content."""
        if isinstance(dump, cls):
            return dump
        if isinstance(dump, str | Path):
            path = Path(dump)
            if not _exists(path):
                raise RoutesError(f"no dump at {path}")
            if not os.access(path, os.R_OK):
                raise RoutesError(f"{path} may not be read; check its permissions")
            return cls(name=str(path), path=path)
        return cls(name=f"<{type(dump).__name__}>", content=dump)

    @property
    def suffix(self) -> str:
        """Lower-case suffix of the file, "/" for a folder, "" for an object."""
        if self.path is None:
            return ""
        return "/" if self.path.is_dir() else self.path.suffix.lower()

    def opened(self) -> "Source":
        """Return this source with a whole-file container read, so that each format need not read it again."""
        if self.path is None or self.content is not None or self.suffix not in _WHOLE_FILE:
            return self
        return replace(self, content=_load(self.path, self.suffix))

    def records(self) -> Iterator[tuple[str, Any]]:
        """Yield (place, record): lines of a `.jsonl` or `.txt`, files of a folder, else the one content.

        A top-level JSON list, and a list or tuple object, is taken apart; a dict, an array or a tensor is one record.
        """
        if self.path is None or self.content is not None:
            yield from _take_apart("", self.content)
        elif self.path.is_dir():
            for file in sorted(p for p in self.path.iterdir() if p.suffix.lower() in SUFFIXES):
                for place, record in Source.of(file).records():
                    yield f"{file.name} {place}".strip(), record
        elif self.suffix in (".jsonl", ".txt"):
            yield from _lines(self.path, parse=self.suffix == ".jsonl")
        else:
            yield from _take_apart("", _load(self.path, self.suffix))

    def peek(self, count: int = 1) -> list[tuple[str, Any]]:
        """The first `count` records: what a format looks at to recognise its own."""
        return list(islice(self.records(), count))

    def first(self) -> Any:
        """The first record, or None where there is none or the container is broken: enough to recognise a form."""
        try:
            found = self.peek()
        except RoutesError:
            return None
        return found[0][1] if found else None

    def nonempty_records(self) -> Iterator[tuple[str, Any]]:
        """`records()`, or an error if there is none."""
        records = self.records()
        first = next(records, None)
        if first is None:
            raise RoutesError(f"{self.name} holds no record")
        yield from chain([first], records)


def plain_array(value: Any) -> np.ndarray | None:
    """Return an array, a tensor or a nested list as a numpy array; None where it is none of these."""
    if isinstance(value, np.ndarray):
        return value
    if is_tensor(value):
        if getattr(value, "is_nested", False):
            return None
        try:
            return np.asarray(value.detach().cpu().numpy())
        except (TypeError, RuntimeError):
            return None
    if not isinstance(value, list | tuple):
        return None
    try:
        return np.asarray([plain_array(item) if is_tensor(item) else item for item in value])
    except (ValueError, TypeError, OverflowError):
        return None


def integer_array(what: str, value: Any, *, ndim: int) -> np.ndarray:
    """Return `value` as an integer array of `ndim` axes, or raise `RoutesError` that begins with `what`."""
    array = plain_array(value)
    if array is None:
        raise RoutesError(f"{what}: expected an integer array of {ndim} axes, got a {type(value).__name__}")
    if array.size == 0 and array.dtype.kind == "f" and isinstance(value, list | tuple):
        array = array.astype(np.int64)  # numpy gives an empty list the dtype float
    if array.dtype.kind not in "iu" or array.ndim != ndim:
        raise RoutesError(f"{what}: expected an integer array of {ndim} axes, got {array.dtype} of shape {array.shape}")
    if holds_bool(value):
        raise RoutesError(f"{what}: expected integers, got a list with true or false in it")
    return array


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor; does not import torch."""
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def write_torch(content: Any, path: Path) -> None:
    """Write `content`, its numpy arrays turned into tensors, as a file that loads with weights only."""
    try:
        import torch
    except ImportError as error:
        raise RoutesError(f"{path.suffix} needs torch to be written; pip install 'equipoise[torch]'") from error

    def with_tensors(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.array(value))
        if isinstance(value, dict):
            return {key: with_tensors(item) for key, item in value.items()}
        return [with_tensors(item) for item in value] if isinstance(value, list) else value

    with path.open("wb") as file:
        torch.save(with_tensors(content), file)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise RoutesError(f"no dump at {str(path)[:99]!r}: {error.strerror}; to pass text, put it in a list") from error


def _take_apart(place: str, content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, list | tuple):
        for i, item in enumerate(content):
            yield f"{place} record {i}".strip(), item
    else:
        yield place or "record 0", content


def _lines(path: Path, *, parse: bool) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            place = f"line {number}"
            try:
                text = raw.decode("utf-8")
                record = json.loads(text) if parse else text.strip()
            except (ValueError, RecursionError) as error:
                raise RoutesError(f"{path}: {place} is not {'JSON' if parse else 'UTF-8 text'}: {error}") from error
            yield place, record


def _load(path: Path, suffix: str) -> Any:
    """Read one whole file by its suffix."""
    if suffix not in _WHOLE_FILE:
        if suffix == ".eqr":
            raise RoutesError(
                f"{path} is named like a native store (.eqr) but is not read as one: it is empty or cut, or another "
                "form was named"
            )
        raise RoutesError(
            f"{path} has suffix {suffix!r}; known: .eqr, {', '.join(SUFFIXES)}, or a folder of such files"
        )
    try:
        if suffix == ".json":
            return _load_json(path)
        if suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        if suffix == ".npz":
            return _load_npz(path)
        return load_torch(path)
    except _DAMAGE as error:
        raise RoutesError(f"{path} cannot be read as {suffix}: {str(error) or type(error).__name__}") from error


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise RoutesError("it holds several JSON values; one per line makes a .jsonl: rename it") from error
        raise


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    # np.load tells formats apart by their first bytes, so a .npy renamed to .npz would come back as an array.
    if not zipfile.is_zipfile(path):
        raise RoutesError("it is not a zip archive")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
