"""The native store: routes of many samples in one file that is appended to, mapped, and checked by checksums.

One file, suffix `.eqr`, little-endian, every block a multiple of 8 bytes: a file header, one record per sample in the
order they were appended, and an end mark, written when the writer closes. There is no index: readers walk the record
headers and skip the payloads. One writer at a time.

File header
    magic         8 bytes   "EQROUTES"
    version       uint32    1
    text_bytes    uint32    length of the text
    reserved      uint32    0
    crc32         uint32    of all the bytes before it and of the text
    text          JSON, ASCII, filled with spaces to a multiple of 8 bytes:
        model          every figure of the ModelShape, by field name
        layer_numbers  global number of each entry of the L axis
        dtype          of the ids: "|u1", "<u2" or "<u4", the smallest that holds every expert
        chunk_bytes    bytes that share one checksum, a multiple of 8

Record of a sample
    magic         8 bytes   "EQSAMPLE"
    index         uint64    0, 1, 2, ...
    rows          uint64    T
    tokens        uint64    num_tokens
    flags         uint32    1: known bits follow, 2: padding bits follow, 4: token ids follow
    text_bytes    uint32    length of the text
    chunks        uint32    number of chunk checksums
    crc32         uint32    of all the bytes before it in this record, of the text, and of the chunk checksums
    text          JSON as above: name, and segments as [start, stop, weight version] each
    checksums     uint32 each, crc32 of each chunk of each part, filled with zeros to a multiple of 8 bytes
    ids           [T, L, K] C order; entries of unknown rows are 0
    known bits    [T, L] one bit each, highest bit first, where flagged
    padding bits  [T] likewise, where flagged
    token ids     [tokens] int64, where flagged
    Each of these four parts is filled with zeros to a multiple of 8 bytes and cut into chunks of its own.

End mark
    magic         8 bytes   "EQSTOEND"
    samples       uint64    number of records
    reserved      uint32    0
    crc32         uint32    of all the bytes before it in the end mark

Writing and the face of the format are here, the bytes in `_store_layout.py`, reading in `_store_map.py`.
Does not know what is done with the routes.

Invariants (asserted by the tests):
1. What is written is read back equal, masks, padding, segments and token ids included.
2. A file cut off at any byte is refused, naming the sample; `recover=True` reads every sample that is whole.
3. Any flipped bit is refused, at the latest when its sample is first read; `verify="all"` finds it on opening.
4. A writer that is killed leaves every sample appended before readable; a writer left by an error leaves no end mark.
5. Reading maps the file: ids are never copied, and a sample costs memory only while it is held.
6. Appending to a store of another model or other layers is refused and leaves the file as it was.
"""

import json
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, cast, overload

import numpy as np

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment, TopologyError
from equipoise.core.routes import id_dtype
from equipoise.core.value import require_int
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source

# The bytes of the native store: packing and parsing its three kinds of blocks. The spec is in `store.py`.


VERSION = 1
FILE_MAGIC, SAMPLE_MAGIC, END_MAGIC = b"EQROUTES", b"EQSAMPLE", b"EQSTOEND"
FILE_HEAD = struct.Struct("<8sIIII")
SAMPLE_HEAD = struct.Struct("<8sQQQIIII")
END_MARK = struct.Struct("<8sQII")
HAS_KNOWN, HAS_PADDING, HAS_TOKENS = 1, 2, 4
ALIGN = 8
ZEROS = bytes(ALIGN)
CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHead:
    """What all samples of a store share."""

    model: ModelShape
    layer_numbers: tuple[int, ...]
    chunk_bytes: int

    @property
    def dtype(self) -> np.dtype:
        """Little-endian dtype of the ids."""
        return id_dtype(self.model.experts).newbyteorder("<")

    @property
    def route_shape(self) -> tuple[int, int]:
        """(L, K) of every sample."""
        return len(self.layer_numbers), self.model.top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one sample lies in the file, and what its header says."""

    index: int
    name: str
    num_rows: int
    num_tokens: int
    flags: int
    segments: tuple[Segment, ...]
    offset: int
    """Where the record begins."""
    start: int
    """Where its payload begins."""
    part_bytes: tuple[int, ...]
    """Bytes of ids, known bits, padding bits and token ids, without the zeros that align them; 0 where absent."""
    checksums: tuple[int, ...]
    """crc32 of each chunk of each part, in file order."""

    @property
    def stop(self) -> int:
        """Where its payload ends."""
        return self.start + sum(map(aligned, self.part_bytes))

    def part_starts(self) -> Iterator[int]:
        """Offset of each part."""
        offset = self.start
        for size in self.part_bytes:
            yield offset
            offset += aligned(size)


def aligned(size: int) -> int:
    """The size with the zeros that follow it."""
    return -(-size // ALIGN) * ALIGN


def part_sizes(head: StoreHead, *, rows: int, tokens: int, flags: int) -> tuple[int, ...]:
    """Bytes of the four parts of a sample's payload."""
    layers, top_k = head.route_shape
    return (
        rows * layers * top_k * head.dtype.itemsize,
        -(-rows * layers // 8) if flags & HAS_KNOWN else 0,
        -(-rows // 8) if flags & HAS_PADDING else 0,
        tokens * 8 if flags & HAS_TOKENS else 0,
    )


def num_chunks(sizes: Sequence[int], chunk_bytes: int) -> int:
    """Checksums of a payload: parts are cut into chunks one by one."""
    return sum(-(-aligned(size) // chunk_bytes) for size in sizes)


def payload(sample: SampleRoutes, head: StoreHead) -> tuple[int, list[memoryview]]:
    """Flags and the four parts of a checked sample, in file order, absent ones empty."""
    known, padding, tokens = sample.known_TL, sample.padding_T, sample.tokens_T
    flags = (known is not None) * HAS_KNOWN + (padding is not None) * HAS_PADDING + (tokens is not None) * HAS_TOKENS
    ids = sample.ids_TLK if known is None else np.where(known[:, :, None], sample.ids_TLK, 0)
    arrays = [np.ascontiguousarray(ids, dtype=head.dtype)]
    arrays += [np.packbits(np.empty(0, bool) if mask is None else mask.ravel()) for mask in (known, padding)]
    arrays.append(np.empty(0, "<i8") if tokens is None else np.ascontiguousarray(tokens, dtype="<i8"))
    # A view of bytes, since a memoryview cannot cast a shape with a zero in it.
    return flags, [array.reshape(-1).view(np.uint8).data for array in arrays]


def chunk_checksums(parts: Sequence[memoryview], chunk_bytes: int) -> list[int]:
    """crc32 of each chunk of each part, the aligning zeros of the last chunk included."""
    checksums = []
    for part in parts:
        starts = range(0, len(part), chunk_bytes)
        found = [zlib.crc32(part[a : a + chunk_bytes]) for a in starts]
        if found:
            found[-1] = zlib.crc32(ZEROS[: aligned(len(part)) - len(part)], found[-1])
        checksums += found
    return checksums


def pack_file_head(head: StoreHead) -> bytes:
    """The block that opens a store."""
    text = _pack_json(
        {
            "model": head.model.figures(),
            "layer_numbers": list(head.layer_numbers),
            "dtype": head.dtype.str,
            "chunk_bytes": head.chunk_bytes,
        }
    )
    fixed = FILE_HEAD.pack(FILE_MAGIC, VERSION, len(text), 0, 0)[: -CRC.size]
    return fixed + CRC.pack(zlib.crc32(text, zlib.crc32(fixed))) + text


def pack_sample_head(sample: SampleRoutes, index: int, *, flags: int, checksums: Sequence[int]) -> bytes:
    """The block ahead of a sample's payload."""
    segments = [[s.start, s.stop, s.weight_version] for s in sample.segments]
    text = _pack_json({"name": sample.name, "segments": segments})
    table = np.array(checksums, dtype="<u4").tobytes()
    table += ZEROS[: aligned(len(table)) - len(table)]
    fixed = SAMPLE_HEAD.pack(
        SAMPLE_MAGIC, index, sample.num_rows, sample.num_tokens, flags, len(text), len(checksums), 0
    )[: -CRC.size]
    return fixed + CRC.pack(zlib.crc32(table, zlib.crc32(text, zlib.crc32(fixed)))) + text + table


def pack_end_mark(count: int) -> bytes:
    """The block that closes a store of `count` samples."""
    fixed = END_MARK.pack(END_MAGIC, count, 0, 0)[: -CRC.size]
    return fixed + CRC.pack(zlib.crc32(fixed))


def parse_file_head(view: memoryview, name: str) -> tuple[StoreHead, int]:
    """The head of the store called `name`, and the offset after it."""
    if len(view) < FILE_HEAD.size or bytes(view[: len(FILE_MAGIC)]) != FILE_MAGIC:
        raise RoutesError(f"{name} is not a native store: it does not begin with {FILE_MAGIC.decode()}")
    _, version, text_bytes, _, checksum = FILE_HEAD.unpack_from(view)
    if version != VERSION:
        raise RoutesError(f"{name} is a native store of version {version}; this reader knows version {VERSION}")
    stop = FILE_HEAD.size + text_bytes
    text = view[FILE_HEAD.size : stop]
    if stop > len(view) or zlib.crc32(text, zlib.crc32(view[: FILE_HEAD.size - CRC.size])) != checksum:
        raise RoutesError(f"{name}: the store's header is damaged or cut off; no sample can be read")
    content = _parse_json(text, f"{name}: the store's header")
    try:
        model = ModelShape.from_figures(content["model"])
        numbers = tuple(require_int("layer number", n, low=0, error=RoutesError) for n in content["layer_numbers"])
        chunk = require_int("chunk_bytes", content["chunk_bytes"], low=ALIGN, error=RoutesError)
        head = StoreHead(model=model, layer_numbers=numbers, chunk_bytes=chunk)
        if content["dtype"] != head.dtype.str or chunk % ALIGN:
            raise RoutesError(f"dtype {content['dtype']!r} or chunk_bytes {chunk} is not what {head.dtype.str} needs")
    except (KeyError, TypeError, RoutesError, TopologyError) as error:
        raise RoutesError(f"{name}: the store's header does not make sense: {error}") from error
    return head, stop


def parse_end_mark(view: memoryview, offset: int) -> int | None:
    """Samples of a store whose end mark, and nothing else, stands at `offset`; None if it does not."""
    if len(view) - offset != END_MARK.size:
        return None
    magic, count, zero, checksum = END_MARK.unpack_from(view, offset)
    is_whole = zlib.crc32(view[offset : offset + END_MARK.size - CRC.size]) == checksum
    return int(count) if is_whole and magic == END_MAGIC and zero == 0 else None


def parse_entry(view: memoryview, offset: int, index: int, *, head: StoreHead) -> Entry:
    """The sample whose header stands at `offset`, checked against its checksum and the end of the file."""
    fixed_stop = offset + SAMPLE_HEAD.size
    if fixed_stop > len(view):
        raise RoutesError(f"its header is cut off at byte {len(view)}")
    fields = SAMPLE_HEAD.unpack_from(view, offset)
    magic, found_index, rows, tokens, flags, text_bytes, chunks, checksum = fields
    text_stop = fixed_stop + text_bytes
    start = text_stop + aligned(chunks * CRC.size)
    if magic != SAMPLE_MAGIC or start > len(view):
        raise RoutesError(f"its header at byte {offset} is damaged or cut off")
    if zlib.crc32(view[fixed_stop:start], zlib.crc32(view[offset : fixed_stop - CRC.size])) != checksum:
        raise RoutesError(f"its header at byte {offset} is damaged: wrong checksum")
    content = _parse_json(view[fixed_stop:text_stop], "its header")
    sizes = part_sizes(head, rows=rows, tokens=tokens, flags=flags)
    if found_index != index or flags > 7 or chunks != num_chunks(sizes, head.chunk_bytes):
        raise RoutesError(f"its header says sample {found_index}, flags {flags}, {chunks} chunks: records are mixed up")
    name, segments = _named_segments(content)
    entry = Entry(
        index=index,
        name=name,
        num_rows=rows,
        num_tokens=tokens,
        flags=flags,
        segments=segments,
        offset=offset,
        start=start,
        part_bytes=sizes,
        checksums=tuple(np.frombuffer(view, "<u4", count=chunks, offset=text_stop).tolist()),
    )
    if entry.stop > len(view):
        raise RoutesError(f"{name!r} is cut off: it ends at byte {entry.stop}, the file at byte {len(view)}")
    return entry


def check_payload(view: memoryview, entry: Entry, chunk_bytes: int) -> None:
    """Raise unless every chunk of the sample's payload has its checksum."""
    checksums = iter(entry.checksums)
    for start, size in zip(entry.part_starts(), entry.part_bytes, strict=True):
        stop = start + aligned(size)
        for a in range(start, stop, chunk_bytes):
            b = min(a + chunk_bytes, stop)
            if zlib.crc32(view[a:b]) != next(checksums):
                raise RoutesError(f"bytes {a}..{b} are damaged: wrong checksum")


def unpack_sample(view: memoryview, entry: Entry, head: StoreHead) -> SampleRoutes:
    """The sample at `entry`, its ids mapped, not copied."""
    layers, top_k = head.route_shape
    rows = entry.num_rows
    ids_at, known_at, padding_at, tokens_at = entry.part_starts()
    ids = np.frombuffer(view, head.dtype, count=rows * layers * top_k, offset=ids_at)
    known = _unpack_bits(view, known_at, rows * layers) if entry.flags & HAS_KNOWN else None
    padding = _unpack_bits(view, padding_at, rows) if entry.flags & HAS_PADDING else None
    tokens = np.frombuffer(view, "<i8", count=entry.num_tokens, offset=tokens_at) if entry.flags & HAS_TOKENS else None
    return SampleRoutes(
        name=entry.name,
        ids_TLK=ids.reshape(rows, layers, top_k),
        num_tokens=entry.num_tokens,
        known_TL=None if known is None else known.reshape(rows, layers),
        padding_T=padding,
        segments=entry.segments,
        tokens_T=tokens,
    )


def _unpack_bits(view: memoryview, offset: int, count: int) -> np.ndarray:
    packed = np.frombuffer(view, np.uint8, count=-(-count // 8), offset=offset)
    return np.unpackbits(packed, count=count).view(np.bool_)


def _named_segments(content: Mapping[str, Any]) -> tuple[str, tuple[Segment, ...]]:
    name, segments = content.get("name"), content.get("segments")
    if not isinstance(name, str) or not isinstance(segments, list):
        raise RoutesError("its header has no name or no segments")
    found = []
    for segment in segments:
        if not isinstance(segment, list) or len(segment) != 3 or not isinstance(segment[2], str):
            raise RoutesError(f"{name!r}: segment {segment!r} is not [start, stop, weight version]")
        start, stop = (require_int(f"{name!r}: segment edge", n, low=0, error=RoutesError) for n in segment[:2])
        found.append(Segment(start=start, stop=stop, weight_version=segment[2]))
    return name, tuple(found)


def _pack_json(content: Any) -> bytes:
    """ASCII JSON, spaces behind it up to a multiple of 8 bytes."""
    text = json.dumps(content, separators=(",", ":")).encode("ascii")
    return text.ljust(aligned(len(text)))


def _parse_json(text: memoryview, place: str) -> dict[str, Any]:
    try:
        content = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise RoutesError(f"{place} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RoutesError(f"{place} must hold an object, got {type(content).__name__}")
    return content


# Reading a native store: mapping its file, walking its headers, making samples. The spec is in `store.py`.


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A mapped store, as far as its headers are whole."""

    path: Path
    view: memoryview
    head: StoreHead
    entries: tuple[Entry, ...]
    end: int
    """Offset behind the last whole sample."""
    problem: str
    """What stands behind the last whole sample instead of an end mark; empty where the store is complete."""


class StoredSamples(Sequence[SampleRoutes]):
    """The samples of a mapped store, made when asked for, each checked the first time."""

    __slots__ = ("_checked", "_entries", "_stored")

    def __init__(self, stored: Stored, entries: Sequence[Entry] | None = None) -> None:
        self._stored = stored
        self._entries = stored.entries if entries is None else tuple(entries)
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> SampleRoutes: ...
    @overload
    def __getitem__(self, index: slice) -> "StoredSamples": ...
    def __getitem__(self, index: int | slice) -> "SampleRoutes | StoredSamples":
        if isinstance(index, slice):
            return StoredSamples(self._stored, self._entries[index])
        entry = self._entries[index]
        if entry.index not in self._checked:
            self.check(entry)
        return unpack_sample(self._stored.view, entry, self._stored.head)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    def check(self, entry: Entry) -> None:
        """Raise, naming the sample, unless its payload is whole and fits the model."""
        stored = self._stored
        place = f"{stored.path}: sample {entry.index} {entry.name!r}"
        try:
            check_payload(stored.view, entry, stored.head.chunk_bytes)
            sample = unpack_sample(stored.view, entry, stored.head)
            # A right checksum does not make another program's ids right.
            Routes.of([sample], model=stored.head.model, layer_numbers=stored.head.layer_numbers)
        except RoutesError as error:
            raise RoutesError(f"{place}: {error}") from error
        self._checked.add(entry.index)


def walk(path: Path) -> Stored:
    """Map a file and read every header in it, up to the first that is not whole."""
    view = _map(path)
    head, offset = parse_file_head(view, str(path))
    entries: list[Entry] = []
    problem = ""
    while (count := parse_end_mark(view, offset)) is None:
        try:
            if offset == len(view):
                raise RoutesError("the file ends without an end mark, so a sample may be missing here")
            entries.append(parse_entry(view, offset, len(entries), head=head))
        except RoutesError as error:
            after = f"after {entries[-1].name!r}" if entries else "the first"
            problem = f"{path}: sample {len(entries)} ({after}): {error}"
            break
        offset = entries[-1].stop
    if count is not None and count != len(entries):
        problem = f"{path}: sample {len(entries)}: the end mark counts {count} samples"
    return Stored(path=path, view=view, head=head, entries=tuple(entries), end=offset, problem=problem)


def accept(stored: Stored, *, recover: bool) -> Stored:
    """The store itself where it is complete; with `recover`, what is whole of it; else an error."""
    if not stored.problem:
        return stored
    if not recover:
        raise RoutesError(
            f"{stored.problem}. Was the file truncated, or the writer killed or still at work? "
            f"recover=True reads the {len(stored.entries)} samples before it"
        )
    entries = list(stored.entries)
    end = stored.end
    # After a power cut the last headers may have reached the disk before their payloads.
    while entries and not _has_whole_payload(stored, entries[-1]):
        end = entries.pop().offset
    logger.warning("%s; recovered the %d samples before it", stored.problem, len(entries))
    return replace(stored, entries=tuple(entries), end=end, problem="")


def _has_whole_payload(stored: Stored, entry: Entry) -> bool:
    try:
        check_payload(stored.view, entry, stored.head.chunk_bytes)
    except RoutesError:
        return False
    return True


def _map(path: Path) -> memoryview:
    """The bytes of a file, read from disk only where they are touched."""
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise RoutesError(f"{path} is empty; a native store begins with a header")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise RoutesError(f"{path} cannot be read: {error}") from error


SUFFIX = ".eqr"
CHUNK_BYTES = 4 * 2**20

Verify = Literal["headers", "all"]
"""What opening a store checks: `headers`, each payload then when it is first read; or `all` of it at once."""


class StoreWriter:
    """Appends samples to a store, creating it where it does not exist. Use as a context manager.

    Each sample is handed to the system before `append` returns, so a killed process loses none; `sync=True` also
    waits for the disk, so that a power cut loses none. The end mark is written only when the `with` block ends well.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        model: ModelShape,
        layer_numbers: Sequence[int] | None = None,
        sync: bool = False,
        recover: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Open or create the store at `path`.

        Args:
            path: where it is, or will be
            model: whose experts the ids are; must be that of an existing store
            layer_numbers: global number of each entry of the L axis; all MoE layers of the model by default
            sync: wait for the disk after each sample
            recover: drop what a killed writer left behind the last whole sample, instead of refusing it
            chunk_bytes: bytes that share one checksum; an existing store keeps its own
        """
        self.path = Path(path)
        numbers = tuple(model.layer_numbers if layer_numbers is None else layer_numbers)
        # Step 1: check model and layers before the file is touched.
        Routes(model=model, samples=(), layer_numbers=numbers)
        chunk = require_int("chunk_bytes", chunk_bytes, low=ALIGN, high=2**30, error=RoutesError)
        if chunk % ALIGN:
            raise RoutesError(f"chunk_bytes is {chunk}; it must be a multiple of {ALIGN}")
        self._head = StoreHead(model=model, layer_numbers=numbers, chunk_bytes=chunk)
        self._sync = sync
        # Step 2: go behind the last whole sample of an existing store, or write the header of a new one.
        self._count, self._end = 0, 0
        is_new = not self.path.exists() or not self.path.stat().st_size
        if not is_new:
            self._continue(recover=recover)
        self._file = self._open("wb" if is_new else "r+b")
        if is_new:
            self._put([pack_file_head(self._head)])

    def __len__(self) -> int:
        """Samples in the store."""
        return self._count

    def append(self, sample: SampleRoutes) -> None:
        """Check one sample against the model and write it."""
        head = self._head
        (fitted,) = Routes.of([sample], model=head.model, layer_numbers=head.layer_numbers).samples
        flags, parts = payload(fitted, head)
        checksums = chunk_checksums(parts, head.chunk_bytes)
        blocks: list[bytes | memoryview] = [pack_sample_head(fitted, self._count, flags=flags, checksums=checksums)]
        for part in parts:
            blocks += [part, ZEROS[: aligned(len(part)) - len(part)]]
        self._put(blocks)
        self._count += 1

    def close(self) -> None:
        """Write the end mark and close the file."""
        if not self._file.closed:
            self._put([pack_end_mark(self._count)])
            self._file.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()

    def _open(self, mode: str) -> IO[bytes]:
        try:
            return cast(IO[bytes], self.path.open(mode))
        except OSError as error:
            raise RoutesError(f"{self.path} cannot be written: {error}") from error

    def _continue(self, *, recover: bool) -> None:
        """Go behind the last whole sample of the existing store, or raise if it is another model's."""
        stored = walk(self.path)
        head = stored.head
        if _figures(head) != _figures(self._head):
            raise RoutesError(
                f"{self.path} holds routes of {head.model.name!r}, layers {head.layer_numbers}; samples of "
                f"{self._head.model.name!r}, layers {self._head.layer_numbers}, need a store of their own"
            )
        stored = accept(stored, recover=recover)
        self._head = head
        self._count, self._end = len(stored.entries), stored.end

    def _put(self, blocks: Sequence[bytes | memoryview]) -> None:
        """Write blocks behind the last whole one, so that a failed write is overwritten by the next."""
        self._file.seek(self._end)
        self._file.truncate()
        for block in blocks:
            self._file.write(block)
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())
        self._end = self._file.tell()


def _figures(head: StoreHead) -> dict[str, Any]:
    """What two stores must share for one to take the other's samples; names and sources may differ."""
    figures = {**head.model.figures(), "layers of the store": head.layer_numbers}
    return {name: value for name, value in figures.items() if name not in ("name", "source")}


def open_store(path: str | Path, *, verify: Verify = "headers", recover: bool = False) -> Routes:
    """Map a store; its samples are read when asked for.

    Args:
        path: the store; it must not be cut while it is mapped
        verify: "headers" checks each payload when it is first read, "all" every one now
        recover: read the whole samples of a store that is cut off or whose writer did not finish
    """
    if verify not in ("headers", "all"):
        raise RoutesError(f"verify is {verify!r}; it must be 'headers' or 'all'")
    stored = accept(walk(Path(path)), recover=recover)
    samples = StoredSamples(stored)
    if verify == "all":
        for entry in stored.entries:
            samples.check(entry)
    return Routes(model=stored.head.model, samples=samples, layer_numbers=stored.head.layer_numbers)


def matches(source: Source) -> bool:
    """Whether the source is a file that begins as a native store does."""
    if source.path is None or not source.path.is_file():
        return False
    with source.path.open("rb") as file:
        return file.read(len(FILE_MAGIC)) == FILE_MAGIC


def read(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Yield each sample as recordings, one per segment, unknown rows as -1."""
    if source.path is None:
        raise RoutesError(f"{source.name}: a native store is a file; give its path")
    routes = open_store(source.path)
    if (routes.model.experts, routes.model.top_k) != (model.experts, model.top_k):
        raise RoutesError(
            f"{source.name} holds routes of {routes.model.name!r} ({routes.model.experts} experts, "
            f"top-{routes.model.top_k}), not of {model.name!r} ({model.experts} experts, top-{model.top_k}); "
            "name the model that made them, or none"
        )
    for sample in routes:
        yield from _recordings(sample, routes.layer_numbers)


def write(routes: Routes, path: Path) -> None:
    """Write all samples to a new store."""
    with StoreWriter(path, model=routes.model, layer_numbers=routes.layer_numbers) as writer:
        for sample in routes:
            writer.append(sample)


def _recordings(sample: SampleRoutes, layer_numbers: tuple[int, ...]) -> Iterator[Recording]:
    rows, padding, tokens = sample.ids_TLK, sample.padding_T, sample.tokens_T
    if sample.known_TL is not None and not sample.known_TL.all():
        # A signed dtype one size up holds every id and -1.
        signed = np.promote_types(rows.dtype, np.int8)
        rows = np.where(sample.known_TL[:, :, None], rows.astype(signed), signed.type(-1))
    # Token t is the t-th row that is not padding.
    real_T = np.ones(len(rows), dtype=np.int64) if padding is None else (~padding).astype(np.int64)
    token_at = np.concatenate([[0], np.cumsum(real_T)])
    spans = [(s.start, s.stop, s.weight_version) for s in sample.segments] or [(0, len(rows), "")]
    for number, (start, stop, version) in enumerate(spans, start=1):
        seen = sample.num_tokens if number == len(spans) else int(token_at[stop])
        yield Recording(
            name=sample.name,
            rows=rows[start:stop],
            start=int(token_at[start]),
            num_tokens=seen,
            tokens=None if tokens is None else tokens[:seen],
            padding=None if padding is None else padding[start:stop],
            layer_numbers=layer_numbers,
            weight_version=version,
        )


FORMATS = (
    Format(
        name="equipoise",
        summary="native store, one checksummed file of samples that is mapped, not loaded",
        suffixes=(SUFFIX,),
        matches=matches,
        read=read,
        write=write,
    ),
)
