"""`Source`: a dump to read (a file, a folder, a pattern, or an object in memory), and values as integer arrays.

Files are opened by suffix, never unpickled: `.json`, `.jsonl`, `.npy`, `.npz`, `.txt`, `.pt`; with pyarrow `.parquet`
and `.arrow`; the text ones also packed, as `.gz` or, with zstandard, `.zst`. Of a folder, the files of its commonest
suffix are read; others are named in a warning and skipped. Whatever is wrong with a container becomes a `RoutesError`
that names the file and the place; no other error is raised, and no code is run.
"""

import gzip
import json
import logging
import math
import os
import pickle
import re
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import RoutesError
from equipoise.core.value import holds_bool

SUFFIXES = (".json", ".jsonl", ".npy", ".npz", ".pt", ".txt", ".parquet", ".arrow")
_WHOLE_FILE = (".json", ".npy", ".npz", ".pt")
_TABLES = (".parquet", ".arrow")
_PACKED = (".gz", ".zst")
_LOOKED = 8
"""Records that may come before the first one with routes, such as aborted requests."""

_log = logging.getLogger(__name__)

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
    """How messages refer to it."""
    path: Path | None = None
    content: Any = None
    files: tuple[Path, ...] = ()
    """Of a folder or a pattern, in order."""

    @classmethod
    def of(cls, dump: Any) -> "Source":
        """Wrap a path or an object. A str is always a path; wrap text in a list to pass it as content."""
        if isinstance(dump, cls):
            return dump
        if not isinstance(dump, str | Path):
            return cls(name=f"<{type(dump).__name__}>", content=dump)
        path = Path(dump)
        try:
            exists = path.exists()
        except OSError as error:
            raise RoutesError(
                f"no dump at {str(path)[:99]!r}: {error.strerror}; to pass text, put it in a list"
            ) from error
        if not exists:
            pattern = str(path.relative_to(path.anchor))
            files = tuple(sorted(file for file in Path(path.anchor or ".").glob(pattern) if file.is_file()))
            if not files:
                raise RoutesError(f"no dump at {path}")
            return cls(name=str(path), files=_alike(files, where=str(path)))
        if not os.access(path, os.R_OK):
            raise RoutesError(f"{path} may not be read; check its permissions")
        files = _alike(tuple(sorted(path.iterdir())), where=str(path)) if path.is_dir() else ()
        return cls(name=str(path), path=path, files=files)

    @property
    def suffix(self) -> str:
        """Lower-case suffix of the file, what it is packed in left out; "/" for several files, "" for an object."""
        if self.path is None and not self.files:
            return ""
        return "/" if self.path is None or self.path.is_dir() else _suffix(self.path)

    def opened(self) -> "Source":
        """Return this source with a whole-file container read, so that each format need not read it again."""
        if self.path is None or self.content is not None or self.suffix not in _WHOLE_FILE:
            return self
        return replace(self, content=_load(self.path, self.suffix))

    def records(self) -> Iterator[tuple[str, Any]]:
        """Yield (place, record): lines of a `.jsonl` or `.txt`, files of a folder, else the one content.

        A top-level JSON list, and a list or tuple object, yields its items; a dict, an array or a tensor is one record.
        """
        if self.suffix == "/":
            for file in self.files:
                for place, record in Source.of(file).records():
                    yield f"{file.name} {place}".strip(), record
        elif self.path is None or self.content is not None:
            yield from _items(self.content)
        elif self.suffix in (".jsonl", ".txt"):
            yield from _lines(self.path, parse=self.suffix == ".jsonl")
        elif self.suffix in _TABLES:
            yield from _rows(self.path)
        else:
            yield from _items(_load(self.path, self.suffix))

    def peek(self, count: int = 1) -> list[tuple[str, Any]]:
        """Return the first `count` records."""
        return list(islice(self.records(), count))

    def first(self) -> Any:
        """Return the first record, which identifies a format; None if there is none or the container is broken."""
        try:
            found = self.peek()
        except RoutesError:
            return None
        return found[0][1] if found else None

    def firsts(self) -> list[Any]:
        """Return the first few records, one of which identifies a format; of a broken container, those before it."""
        found: list[Any] = []
        try:
            for _, record in islice(self.records(), _LOOKED):
                found.append(record)
        except RoutesError:
            return found
        return found

    def nonempty_records(self) -> Iterator[tuple[str, Any]]:
        """Yield `records()`, or raise if there is none."""
        records = self.records()
        first = next(records, None)
        if first is None:
            raise RoutesError(f"{self.name} holds no record")
        yield from chain([first], records)


def plain_array(value: Any) -> np.ndarray | None:
    """Return an array, a tensor or a nested list as a numpy array; None if it is none of these."""
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
    """Return `value` as an integer array of `ndim` axes, or raise `RoutesError` that begins with `what`.

    Floats, bools, ragged lists and numbers beyond int64 are refused.
    """
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


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    items = content if isinstance(content, list | tuple) else [content]
    for i, item in enumerate(items):
        yield f"record {i}", item


def _suffix(path: Path) -> str:
    """Return the suffix of what a file holds: `.jsonl` of `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in _PACKED else (suffixes or [""])[-1]


def _alike(files: tuple[Path, ...], *, where: str) -> tuple[Path, ...]:
    """Return the files of the commonest suffix that is read; name the others in a warning."""
    read = [file for file in files if file.is_file() and _suffix(file) in SUFFIXES and not file.name.startswith(".")]
    counts = Counter(_suffix(file) for file in read)
    alike = tuple(file for file in read if counts[_suffix(file)] == max(counts.values()))
    strays = [file.name for file in files if file not in alike]
    if alike and strays:
        _log.warning("%s: %d of %d entries are not read: %s", where, len(strays), len(files), ", ".join(strays[:5]))
    return alike


def _open_text(path: Path) -> Any:
    """Open a file of lines, unpacked."""
    packed = path.suffix.lower()
    opened: Any = path.open("rb") if packed not in _PACKED else None
    if packed == ".gz":
        opened = gzip.open(path, "rb")  # noqa: SIM115  # the caller closes it
    if packed == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise RoutesError(f"{path} needs zstandard to be read; pip install zstandard, or unpack it") from error
        opened = zstandard.open(path, "rb")
    return opened


def _lines(path: Path, *, parse: bool) -> Iterator[tuple[str, Any]]:
    try:
        with _open_text(path) as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield from _line(path, f"line {number}", raw, parse=parse)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RoutesError(f"{path} cannot be unpacked: {error}") from error


def _line(path: Path, place: str, raw: bytes, *, parse: bool) -> Iterator[tuple[str, Any]]:
    try:
        text = raw.decode("utf-8")
        record = json.loads(text) if parse else text.strip()
    except (ValueError, RecursionError) as error:
        raise RoutesError(f"{path}: {place} is not {'JSON' if parse else 'UTF-8 text'}: {error}") from error
    # A batched request is answered by a list of responses.
    if isinstance(record, list) and record and all(isinstance(item, dict) for item in record):
        yield from ((f"{place} item {at}", item) for at, item in enumerate(record))
    else:
        yield place, record


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a parquet or arrow file as dicts."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise RoutesError(
            f"{path} needs pyarrow to be read; pip install pyarrow, or write it as .jsonl (dataset.to_json)"
        ) from error
    try:
        if path.suffix.lower() == ".parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        else:
            batches = pyarrow.ipc.open_stream(path.open("rb"))
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"row {number}", row) for number, row in enumerate(rows))
    except (pyarrow.ArrowException, OSError) as error:
        raise RoutesError(f"{path} cannot be read as {path.suffix}: {error}") from error


def _load(path: Path, suffix: str) -> Any:
    """Read one whole file by its suffix."""
    if suffix == ".eqr":
        raise RoutesError(
            f"{path} is named like a native store (.eqr) but is not read as one: it is empty or cut, or another format "
            "was named"
        )
    if suffix not in _WHOLE_FILE:
        raise RoutesError(
            f"{path} has suffix {suffix!r}; known: .eqr, {', '.join(SUFFIXES)}, the text ones also as .gz and .zst, or "
            "a folder of such files"
        )
    if path.suffix.lower() in _PACKED and suffix != ".json":
        raise RoutesError(f"{path} is a packed {suffix} file; unpack it")
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
        with _open_text(path) as file:
            return json.loads(file.read())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise RoutesError("it holds several JSON values; one per line makes a .jsonl: rename it") from error
        raise


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    # np.load identifies files by their first bytes and would read a .npy renamed to .npz as an array.
    if not zipfile.is_zipfile(path):
        raise RoutesError("it is not a zip archive")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def load_torch(path: Path) -> Any:
    """Read tensors, plain values and numpy arrays from a file that `torch.save` wrote, without running its code.

    torch's weights-only reader refuses pickled objects other than tensors, but slime's dumps hold numpy arrays. Stub
    classes take the place of the names a pickled array refers to, keep what the file says, and build the array from its
    bytes: numpy's own unpickling trusts the file, and a damaged dtype would make an array that fails where it is used.
    """
    try:
        import torch
    except ImportError as error:
        raise RoutesError("it needs torch to be read; pip install 'equipoise[torch]', or save it as .npz") from error
    # numpy 2 moved `core` to `_core`; a file may have been written with either.
    stubs: list[Any] = [
        (make, f"numpy.{module}.multiarray.{name}")
        for make, name in ((_make_array, "_reconstruct"), (_make_number, "scalar"))
        for module in ("_core", "core")
    ]
    dtypes = [f"dtypes.{type(np.dtype(code)).__name__}" for code in "?bBhHiIlLqQefd"]
    stubs += [(_ArrayStub, "numpy.ndarray"), *((_DtypeStub, f"numpy.{name}") for name in ("dtype", *dtypes))]
    stubs += [(_no_bytes, "builtins.bytes"), (_no_bytes, "__builtin__.bytes")]
    try:
        try:
            loaded = _load_allowing(path, stubs)
        except pickle.UnpicklingError as error:
            if "NJT" not in str(error):
                raise
            # torch allows its jagged tensors once these are imported, which takes seconds.
            import torch._dynamo
            import torch.nested  # noqa: F401

            loaded = _load_allowing(path, stubs)
        return _unwrapped(loaded)
    except pickle.UnpicklingError as error:
        # torch's own message advises, at length, to trust the file.
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds a pickled {named[1]}" if named else "is damaged or holds pickled objects"
        raise RoutesError(
            f"it {what}; only tensors, arrays and plain values are read, others could run code: save a TensorDict or "
            "DataProto as torch.save({key: batch[key] for key in ('routed_experts', 'attention_mask', 'input_ids')})"
        ) from error


def _load_allowing(path: Path, stubs: list[Any]) -> Any:
    """Load a file with these names allowed, and of those that this process allows only torch's own.

    Frameworks allow numpy's classes and their own for the whole process; numpy's would be taken instead of the stubs.
    """
    from torch import load, serialization

    before = serialization.get_safe_globals()
    own = [one for one in before if getattr(one, "__module__", "").split(".")[0] == "torch"]
    serialization.clear_safe_globals()
    serialization.add_safe_globals([*own, *stubs])
    try:
        return load(path, map_location="cpu", weights_only=True)
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


class _DtypeStub:
    """Replaces `numpy.dtype`."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def plain(self) -> np.dtype:
        """Return the dtype if it is one of bools, integers or floats."""
        is_plain = isinstance(self.code, str) and re.fullmatch("b1|[iu][1248]|f[248]", self.code)
        if not is_plain or self.order not in ("<", ">", "|", "="):
            raise RoutesError(f"an array of dtype {self.code!r} is not read; bools, integers and floats are")
        return np.dtype(self.code).newbyteorder(self.order)


class _ArrayStub:
    """Replaces `numpy.ndarray`."""

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        if not isinstance(dtype, _DtypeStub) or not isinstance(raw, bytes):
            raise RoutesError("a numpy array in it holds objects; only numbers are read")
        plain = dtype.plain()
        if math.prod(shape) * plain.itemsize != len(raw):
            raise RoutesError(f"a numpy array in it has {len(raw)} bytes, not those of shape {shape} of {plain}")
        self.array = np.ndarray(shape, plain, raw, order="F" if is_fortran else "C")


def _make_array(*_: Any) -> _ArrayStub:
    """Replaces `_reconstruct`, which makes an array to be filled by `__setstate__`."""
    return _ArrayStub()


def _make_number(dtype: Any, raw: Any) -> Any:
    """Replaces `scalar`."""
    return np.ndarray((), dtype.plain(), raw)[()]


def _no_bytes() -> bytes:
    """Replaces `bytes`, which the content of an empty array names."""
    return b""


def _unwrapped(value: Any) -> Any:
    """Return the same content with arrays in place of their stubs."""
    if isinstance(value, _ArrayStub):
        if value.array is None:
            raise RoutesError("a numpy array in it has no content")
        return value.array
    if isinstance(value, dict):
        return {key: _unwrapped(item) for key, item in value.items()}
    # Long lists of plain values, such as token ids, stay as they are.
    if isinstance(value, list | tuple) and not set(map(type, value)) <= {int, float, bool, str, bytes, type(None)}:
        return [_unwrapped(item) for item in value]
    return value
