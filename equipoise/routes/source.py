"""`Source`: a dump to read (a file, a folder, a pattern, or an object in memory), and values as integer arrays.

Files are opened by suffix: `.json`, `.jsonl`, `.npy`, `.npz`, `.txt`, `.pt`, `.pkl`; with pyarrow `.parquet`, `.arrow`
and `.feather`; the text ones also packed, as `.gz` or, with zstandard, `.zst`. Of a folder, the files of one suffix are
read, the one with most bytes; others are named in a warning and skipped. A folder of folders is read with all of them.
Whatever is wrong with a container becomes a `RoutesError` that names the file and the place; no other error is raised.

No code in a file is run. Pickles (`.pt`, `.pkl`) give tensors, numpy arrays and plain values, the fields of a
TensorDict, and the batch of a DataProto; of any other class the name is read, which the error says.

A record is one response or sample. A list of them, such as the answers to a batched request, gives its items. The
record of a log, `{"request": ..., "response": ...}`, gives the response with its request; either may have a `body`.
"""

import gzip
import io
import json
import logging
import math
import os
import pickle
import re
import struct
import sys
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import RoutesError
from equipoise.core.value import holds_bool

SUFFIXES = (".json", ".jsonl", ".npy", ".npz", ".pt", ".pkl", ".txt", ".parquet", ".arrow", ".feather")
_WHOLE_FILE = (".json", ".npy", ".npz", ".pt", ".pkl")
_TABLES = (".parquet", ".arrow", ".feather")
_PACKED = (".gz", ".zst")
_COMPANIONS = ("config.json", "dataset_info.json", "dataset_dict.json", "state.json")
"""Files that Hugging Face writes beside shards and weights."""
_ANSWER = frozenset(("choices", "meta_info", "routed_experts", "rollout_routed_experts"))
"""Fields of a record that is a response or a sample itself, not the record of a log."""
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
            found = tuple(sorted(file for file in Path(path.anchor or ".").glob(pattern) if file.is_file()))
            if not found:
                raise RoutesError(
                    f"no dump at {path}; give a file, a folder, or a quoted pattern such as 'out/*.jsonl'"
                )
            return cls(name=str(path), files=_alike(found, where=str(path)))
        if not os.access(path, os.R_OK):
            raise RoutesError(f"{path} may not be read; check its permissions")
        files: tuple[Path, ...] = ()
        if path.is_dir():
            files = _alike(tuple(sorted(path.iterdir())), where=str(path))
            files = files or _alike(tuple(sorted(path.rglob("*"))), where=str(path))
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
            # Files of several folders may have equal names, and equal places would make their samples one.
            above = Path(os.path.commonpath([file.parent for file in self.files])) if self.files else Path()
            for file in self.files:
                for place, record in Source.of(file).records():
                    yield f"{file.relative_to(above)} {place}".strip(), record
            return
        for place, record in self._containers():
            yield from _answers(place, record)

    def _containers(self) -> Iterator[tuple[str, Any]]:
        """Yield (place, record) as the file or the object holds them."""
        if self.path is None or self.content is not None:
            yield from _items(self.content)
        elif self.suffix in (".jsonl", ".txt"):
            yield from _lines(self.path, parse=self.suffix == ".jsonl")
        elif self.suffix in _TABLES:
            yield from _rows(self.path)
        else:
            yield from _items(_load(self.path, self.suffix))

    def first(self) -> Any:
        """Return the first record, which identifies a format; None if there is none or the container is broken."""
        return next(iter(self.firsts(1)), None)

    def firsts(self, count: int = _LOOKED) -> list[Any]:
        """Return the first few records, one of which identifies a format; of a broken container, those before it."""
        found: list[Any] = []
        with suppress(RoutesError):
            for _, record in islice(self.records(), count):
                found.append(record)
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


def _answers(place: str, record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the responses that a record holds: the items of a batch, the response of a log's record, or itself."""
    if isinstance(record, list) and record and all(isinstance(item, dict) for item in record):
        for at, item in enumerate(record):
            yield from _answers(f"{place} item {at}", item)
        return
    response = _body(record.get("response")) if isinstance(record, dict) and _ANSWER.isdisjoint(record) else None
    if isinstance(response, Mapping):
        yield place, {**response, "request": _body(record.get("request"))}
    elif isinstance(response, list):
        yield from _answers(place, response)
    else:
        yield place, record


def _body(message: Any) -> Any:
    """Return what a logged request or response says: its `body`, parsed if it is JSON text."""
    if isinstance(message, str) and message.lstrip()[:1] in ("{", "["):
        try:
            message = json.loads(message)
        except (ValueError, RecursionError):
            return None
    return _body(message["body"]) if isinstance(message, Mapping) and "body" in message else message


def _suffix(path: Path) -> str:
    """Return the suffix of what a file holds: `.jsonl` of `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in _PACKED else (suffixes or [""])[-1]


def _alike(files: tuple[Path, ...], *, where: str) -> tuple[Path, ...]:
    """Return the files of the suffix with most bytes among those that are read; name the others in a warning.

    Routes are bulky: a single shard is larger than all notes and settings beside it.
    """
    read = [file for file in files if file.is_file() and _suffix(file) in SUFFIXES and not file.name.startswith(".")]
    read = [file for file in read if file.name not in _COMPANIONS]
    sizes: Counter[str] = Counter()
    for file in read:
        sizes[_suffix(file)] += file.stat().st_size
    alike = tuple(file for file in read if _suffix(file) == max(sizes, key=lambda suffix: sizes[suffix]))
    known = {*alike, *(parent for file in alike for parent in file.parents)}
    strays = [file.name for file in files if file not in known]
    if alike and strays:
        named = ", ".join(strays[:5]) + (", ..." if len(strays) > 5 else "")
        _log.warning("%s: %d of %d entries are not read: %s", where, len(strays), len(files), named)
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
        frames = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
        opened = io.BufferedReader(frames)
    return opened


def _unpacking_errors() -> tuple[type[Exception], ...]:
    """Return what says that packed bytes are damaged; zstandard is imported by who opens such a file, if at all."""
    zstandard: Any = sys.modules.get("zstandard")
    return EOFError, gzip.BadGzipFile, zlib.error, *((zstandard.ZstdError,) if zstandard else ())


def _lines(path: Path, *, parse: bool) -> Iterator[tuple[str, Any]]:
    try:
        with _open_text(path) as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield _line(path, f"line {number}", raw, parse=parse)
    except _unpacking_errors() as error:
        raise RoutesError(f"{path} cannot be unpacked: {error}") from error


def _line(path: Path, place: str, raw: bytes, *, parse: bool) -> tuple[str, Any]:
    try:
        text = raw.decode("utf-8")
        record = json.loads(text) if parse else text.strip()
    except (ValueError, RecursionError) as error:
        raise RoutesError(f"{path}: {place} is not {'JSON' if parse else 'UTF-8 text'}: {error}") from error
    return place, record


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a table as dicts; arrow has a stream form, which `datasets` writes, and a file form."""
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
            with path.open("rb") as file:
                is_file_form = file.read(6) == b"ARROW1"
            source = pyarrow.memory_map(str(path))
            if is_file_form:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(at) for at in range(reader.num_record_batches))
            else:
                batches = pyarrow.ipc.open_stream(source)
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
        return load_torch(path) if _is_torch_file(path) else load_pickle(path)
    except _DAMAGE as error:
        raise RoutesError(f"{path} cannot be read as {suffix}: {str(error) or type(error).__name__}") from error


def _load_json(path: Path) -> Any:
    try:
        with _open_text(path) as file:
            return json.loads(file.read())
    except _unpacking_errors() as error:
        raise RoutesError(f"it cannot be unpacked: {error}") from error
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


def _is_torch_file(path: Path) -> bool:
    """Whether `torch.save` wrote a file: a zip archive, or before torch 1.6 a pickle that begins with a number."""
    with path.open("rb") as file:
        start = file.read(15)
    return start.startswith((b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."))


def load_torch(file: Path | io.BytesIO) -> Any:
    """Read tensors, plain values and numpy arrays from a file that `torch.save` wrote, without running its code.

    torch's weights-only reader refuses pickled objects other than tensors, but slime's dumps hold numpy arrays. Stub
    classes take the place of the names a pickled array refers to, keep what the file says, and build the array from its
    bytes: numpy's own unpickling trusts the file, and a damaged dtype would make an array that fails where it is used.
    A TensorDict becomes a dict of its tensors.
    """
    _require_torch()
    stubs: list[Any] = [(stub, f"{module}.{name}") for (module, name), stub in _NUMPY_STUBS.items()]
    stubs += [(stub, f"tensordict.{name}") for name, stub in _TENSORDICT_STUBS.items()]
    stubs += [(_no_bytes, "builtins.bytes"), (_no_bytes, "__builtin__.bytes"), (_encode, "_codecs.encode")]
    stubs += [(_DataProtoStub, "verl.protocol.DataProto")]
    try:
        try:
            loaded = _load_allowing(file, stubs)
        except pickle.UnpicklingError as error:
            if "NJT" not in str(error):
                raise
            # torch allows its jagged tensors once these are imported, which takes seconds.
            import torch._dynamo
            import torch.nested  # noqa: F401

            loaded = _load_allowing(file, stubs)
        return _unwrapped(loaded)
    except pickle.UnpicklingError as error:
        # torch's own message advises, at length, to trust the file.
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise RoutesError(_refusal(named[1] if named else "")) from error


def _refusal(name: str) -> str:
    """Say that a file holds a pickled object of this name, and how to save what is read."""
    what = f"holds a pickled {name}" if name else "is damaged or holds pickled objects"
    return (
        f"it {what}; only tensors, arrays and plain values are read, others could run code: save a TensorDict or "
        "DataProto as torch.save({key: batch[key] for key in ('routed_experts', 'attention_mask', 'input_ids')}), "
        "responses as JSON, one per line"
    )


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise RoutesError("it needs torch to be read; pip install 'equipoise[torch]', or save it as .npz") from error


def _load_allowing(file: Path | io.BytesIO, stubs: list[Any]) -> Any:
    """Load a file with these names allowed, and of those that this process allows only torch's own.

    Frameworks allow numpy's classes and their own for the whole process; numpy's would be taken instead of the stubs.
    """
    from torch import load, serialization

    if isinstance(file, io.BytesIO):
        file.seek(0)
    before = serialization.get_safe_globals()
    own = [one for one in before if getattr(one, "__module__", "").split(".")[0] == "torch"]
    serialization.clear_safe_globals()
    serialization.add_safe_globals([*own, *stubs])
    try:
        return load(file, map_location="cpu", weights_only=True)
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def load_pickle(path: Path) -> Any:
    """Read plain values, numpy arrays, tensors and the batch of a DataProto from a pickle, without running its code."""
    with path.open("rb") as file:
        return _unwrapped(_Unpickler(file).load())


class _Unpickler(pickle.Unpickler):
    """Gives stubs in place of everything that a pickle names, so that none of it is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what takes the place of a name; a class without a stub becomes one that only holds its name."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            _require_torch()
            from torch._utils import _rebuild_tensor_v2

            return _rebuild_tensor_v2
        return _PICKLE_STUBS.get((module, name)) or type("_Unread", (_UnreadStub,), {"name": f"{module}.{name}"})


def _load_storage(raw: bytes) -> Any:
    """Replaces `_load_from_bytes`, which would unpickle."""
    from torch import load

    return load(io.BytesIO(raw), map_location="cpu", weights_only=True)


class _UnreadStub:
    """Replaces an object of a class that is not read; it may be part of what nobody looks at."""

    name = ""

    def __new__(cls, *_: Any, **__: Any) -> "_UnreadStub":
        """Take any arguments, as the class may."""
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "_UnreadStub":
        """Give itself for what a call would give."""
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Take an item, as a pickled list does."""


class _DataProtoStub:
    """Replaces verl's `DataProto`; of its state, the bytes of a `torch.save`d TensorDict are read."""

    batch: Any = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or not state or not isinstance(state[0], bytes):
            raise RoutesError(_refusal("verl.protocol.DataProto without a batch of torch's"))
        self.batch = load_torch(io.BytesIO(state[0]))


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
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def plain(self) -> np.ndarray:
        """Return the array if it holds numbers; what nobody reads, such as texts beside routes, is not asked."""
        if self.state is None:
            raise RoutesError("a numpy array in it has no content")
        _, shape, dtype, is_fortran, raw = self.state
        if not isinstance(dtype, _DtypeStub) or not isinstance(raw, bytes):
            raise RoutesError("a numpy array in it holds objects; only numbers are read")
        plain = dtype.plain()
        if math.prod(shape) * plain.itemsize != len(raw):
            raise RoutesError(f"a numpy array in it has {len(raw)} bytes, not those of shape {shape} of {plain}")
        return np.ndarray(shape, plain, raw, order="F" if is_fortran else "C")


def _make_array(*_: Any) -> _ArrayStub:
    """Replaces `_reconstruct`, which makes an array to be filled by `__setstate__`."""
    return _ArrayStub()


def _make_number(dtype: Any, raw: Any) -> Any:
    """Replaces `scalar`."""
    return np.ndarray((), dtype.plain(), raw)[()]


def _no_bytes() -> bytes:
    """Replaces `bytes`, which the content of an empty array names."""
    return b""


def _encode(text: Any, encoding: Any) -> bytes:
    """Replaces `encode`, by which old pickle protocols write bytes."""
    return str(text).encode("latin1" if encoding == "latin1" else "utf-8")


def _make_tensordict(_: Any, state: Any) -> Any:
    """Replaces `_make_td`: a dict of the tensors of a TensorDict; its other data are left out."""
    fields = state.get("_tensordict", {})
    return {key: value for key, value in fields.items() if is_tensor(value) or isinstance(value, dict)}


def _make_consolidated(metadata: Any, storage: Any) -> Any:
    """Replaces the function that cuts one storage into the tensors of a consolidated TensorDict."""
    import torch

    parts: dict[str, Any] = {}
    for key, (dtype_name, shape, start, stop, *_) in metadata["leaves"].items():
        dtype = getattr(torch, str(dtype_name).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise RoutesError(f"field {key!r} of a TensorDict in it has no dtype of torch's: {dtype_name!r}")
        parts[key] = storage[start:stop].view(dtype)[: math.prod(shape)].view(*shape)
    # A jagged tensor is kept in parts, whose keys have these marks in front.
    values, offsets = "<NJT_VALUES>", "<NJT_OFFSETS>"
    for key in [key.removeprefix(values) for key in parts if key.startswith(values)]:
        parts[key] = torch.nested.nested_tensor_from_jagged(parts[values + key], offsets=parts[offsets + key])
    return {key: part for key, part in parts.items() if not key.startswith("<NJT")}


# numpy 2 moved `core` to `_core`; a file may have been written with either.
_NUMPY_STUBS: dict[tuple[str, str], Any] = {
    **{
        (f"numpy.{module}.multiarray", name): make
        for make, name in ((_make_array, "_reconstruct"), (_make_number, "scalar"))
        for module in ("_core", "core")
    },
    ("numpy", "ndarray"): _ArrayStub,
    ("numpy", "dtype"): _DtypeStub,
    **{("numpy.dtypes", type(np.dtype(code)).__name__): _DtypeStub for code in "?bBhHiIlLqQefd"},
}
_PICKLE_STUBS: dict[tuple[str, str], Any] = _NUMPY_STUBS | {
    ("verl.protocol", "DataProto"): _DataProtoStub,
    ("collections", "OrderedDict"): dict,
    ("_codecs", "encode"): _encode,
    ("torch.storage", "_load_from_bytes"): _load_storage,
}
_TENSORDICT_STUBS: dict[str, Any] = {
    "_reductions._make_td": _make_tensordict,
    "_reductions._rebuild_tensordict_files_consolidated": _make_consolidated,
    **dict.fromkeys(("_td.TensorDict", "tensorclass.NonTensorData", "tensorclass.NonTensorStack"), _UnreadStub),
}


def _unwrapped(value: Any) -> Any:
    """Return the same content with arrays and batches in place of their stubs."""
    if isinstance(value, _DataProtoStub):
        return value.batch
    if isinstance(value, _UnreadStub | type):
        raise RoutesError(_refusal(getattr(value, "name", type(value).__name__)))
    if isinstance(value, _ArrayStub):
        return value.plain()
    if isinstance(value, dict):
        return {key: _unwrapped(item) for key, item in value.items()}
    # Long lists of plain values, such as token ids, stay as they are.
    if isinstance(value, list | tuple) and not set(map(type, value)) <= {int, float, bool, str, bytes, type(None)}:
        return [_unwrapped(item) for item in value]
    return value
