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
    text          JSON, ASCII, padded with spaces to a multiple of 8 bytes:
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
    checksums     uint32 each, crc32 of each chunk of each part, padded with zeros to a multiple of 8 bytes
    ids           [T, L, K] C order; entries of unknown rows are 0
    known bits    [T, L] one bit each, highest bit first, if flagged
    padding bits  [T] likewise, if flagged
    token ids     [tokens] int64, if flagged
    Each of these four parts is padded with zeros to a multiple of 8 bytes and cut into its own chunks.

End mark
    magic         8 bytes   "EQSTOEND"
    samples       uint64    number of records
    reserved      uint32    0
    crc32         uint32    of all the bytes before it in the end mark

Promises:
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, cast, overload

import numpy as np

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment, TopologyError
from equipoise.core.routes import id_dtype
from equipoise.core.value import require_int
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source

SUFFIX = ".eqr"
CHUNK_BYTES = 4 * 2**20
VERSION = 1
FILE_MAGIC, SAMPLE_MAGIC, END_MAGIC = b"EQROUTES", b"EQSAMPLE", b"EQSTOEND"
# The fixed fields of each block, up to its checksum.
FILE_HEAD = struct.Struct("<8sIII")
SAMPLE_HEAD = struct.Struct("<8sQQQIII")
END_MARK = struct.Struct("<8sQI")
CRC = struct.Struct("<I")
HAS_KNOWN, HAS_PADDING, HAS_TOKENS = 1, 2, 4
ALIGN = 8

Verify = Literal["headers", "all"]
"""What opening a store checks: `headers` (each payload is then checked when it is first read), or `all` of it."""

logger = logging.getLogger(__name__)


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
    def figures(self) -> dict[str, Any]:
        """What two stores must share to hold the same kind of samples; names and sources may differ."""
        figures = {**self.model.figures(), "layers of the store": self.layer_numbers}
        return {name: value for name, value in figures.items() if name not in ("name", "source")}

    def part_bytes(self, *, rows: int, tokens: int, flags: int) -> tuple[int, int, int, int]:
        """Return the bytes of ids, known bits, padding bits and token ids, without alignment; 0 if absent."""
        layers = len(self.layer_numbers)
        return (
            rows * layers * self.model.top_k * self.dtype.itemsize,
            -(-rows * layers // 8) if flags & HAS_KNOWN else 0,
            -(-rows // 8) if flags & HAS_PADDING else 0,
            tokens * 8 if flags & HAS_TOKENS else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """Where one sample is in the file, and what its header says."""

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
    checksums: tuple[int, ...]
    """crc32 of each chunk of each part, in file order."""

    @property
    def stop(self) -> int:
        """Where its payload ends."""
        return self.start + sum(map(aligned, self.part_bytes))

    @property
    def part_starts(self) -> list[int]:
        """Offset of each part."""
        return list(accumulate(map(aligned, self.part_bytes[:-1]), initial=self.start))


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedStore:
    """A mapped store, up to its last whole header."""

    path: Path
    view: memoryview
    head: StoreHead
    found: tuple[StoredSample, ...]
    end: int
    """Offset after the last whole sample."""
    problem: str
    """What follows the last whole sample instead of an end mark; empty if the store is complete."""


def aligned(size: int) -> int:
    """Return the size with its padding."""
    return -(-size // ALIGN) * ALIGN


def _pack_block(fixed: bytes, body: bytes = b"") -> bytes:
    """Return a block: its fixed fields, the crc32 of the whole block, its body."""
    return fixed + CRC.pack(zlib.crc32(body, zlib.crc32(fixed))) + body


def _is_whole(view: memoryview, start: int, fixed: struct.Struct, stop: int) -> bool:
    """Whether the block `[start, stop)` with these fixed fields has its checksum."""
    at = start + fixed.size
    return CRC.unpack_from(view, at) == (zlib.crc32(view[at + CRC.size : stop], zlib.crc32(view[start:at])),)


def _pack_json(content: Any) -> bytes:
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


class StoreWriter:
    """Appends samples to a store, creating it if it does not exist. Use as a context manager.

    Each sample is passed to the operating system before `append` returns, so a killed process loses none; `sync=True`
    also waits for the disk, so that a power cut loses none. Only a `with` block without an error writes the end mark.
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
            path: an existing or a new file
            model: whose experts the ids are; must be that of an existing store
            layer_numbers: global number of each entry of the L axis; all MoE layers of the model by default
            sync: wait for the disk after each sample
            recover: drop what a killed writer left after the last whole sample, instead of refusing the store
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
        # Step 2: find the end of the last whole sample of an existing store of the same model and layers.
        self._count, self._end = 0, 0
        is_new = not self.path.exists() or not self.path.stat().st_size
        if not is_new:
            stored = map_store(self.path)
            if stored.head.figures != self._head.figures:
                raise RoutesError(
                    f"{self.path} holds routes of {stored.head.model.name!r}, layers {stored.head.layer_numbers}; "
                    f"samples of {model.name!r}, layers {numbers}, need a store of their own"
                )
            stored = _accept(stored, recover=recover)
            self._head, self._count, self._end = stored.head, len(stored.found), stored.end
        # Step 3: open the file, and write the header of a new one.
        try:
            self._file = cast(IO[bytes], self.path.open("wb" if is_new else "r+b"))
        except OSError as error:
            raise RoutesError(f"{self.path} cannot be written: {error}") from error
        if is_new:
            text = {"model": model.figures(), "layer_numbers": list(numbers)}
            body = _pack_json({**text, "dtype": self._head.dtype.str, "chunk_bytes": chunk})
            self._put([_pack_block(FILE_HEAD.pack(FILE_MAGIC, VERSION, len(body), 0), body)])

    def __len__(self) -> int:
        """Samples in the store."""
        return self._count

    def append(self, sample: SampleRoutes) -> None:
        """Check one sample against the model and write it."""
        head = self._head
        (fitted,) = Routes.of([sample], model=head.model, layer_numbers=head.layer_numbers).samples
        # Step 1: the four parts as bytes, absent ones empty.
        known, padding, tokens = fitted.known_TL, fitted.padding_T, fitted.tokens_T
        flags = (
            HAS_KNOWN * (known is not None) + HAS_PADDING * (padding is not None) + HAS_TOKENS * (tokens is not None)
        )
        ids = fitted.ids_TLK if known is None else np.where(known[:, :, None], fitted.ids_TLK, 0)
        arrays = [np.ascontiguousarray(ids, dtype=head.dtype)]
        arrays += [np.packbits(np.empty(0, bool) if mask is None else mask.ravel()) for mask in (known, padding)]
        arrays.append(np.empty(0, "<i8") if tokens is None else np.ascontiguousarray(tokens, dtype="<i8"))
        # Step 2: a checksum of each chunk, the padding of the last chunk included.
        parts: list[bytes | memoryview] = []
        checksums: list[int] = []
        for array in arrays:
            # A view of bytes, since a memoryview cannot cast a shape with a zero in it.
            raw = array.reshape(-1).view(np.uint8).data
            filler = bytes(aligned(len(raw)) - len(raw))
            crcs = [zlib.crc32(raw[a : a + head.chunk_bytes]) for a in range(0, len(raw), head.chunk_bytes)]
            checksums += crcs[:-1] + [zlib.crc32(filler, crc) for crc in crcs[-1:]]
            parts += [raw, filler]
        # Step 3: the header, and everything in one go.
        segments = [[s.start, s.stop, s.weight_version] for s in fitted.segments]
        text = _pack_json({"name": fitted.name, "segments": segments})
        table = np.array(checksums, dtype="<u4").tobytes()
        counts = (self._count, fitted.num_rows, fitted.num_tokens, flags, len(text), len(checksums))
        body = text + table.ljust(aligned(len(table)), b"\0")
        self._put([_pack_block(SAMPLE_HEAD.pack(SAMPLE_MAGIC, *counts), body), *parts])
        self._count += 1

    def close(self) -> None:
        """Write the end mark and close the file."""
        if not self._file.closed:
            self._put([_pack_block(END_MARK.pack(END_MAGIC, self._count, 0))])
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

    def _put(self, blocks: Sequence[bytes | memoryview]) -> None:
        """Write blocks after the last whole one, so that the next write replaces a failed one."""
        self._file.seek(self._end)
        self._file.truncate()
        for block in blocks:
            self._file.write(block)
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())
        self._end = self._file.tell()


class StoredSamples(Sequence[SampleRoutes]):
    """The samples of a mapped store, made when they are accessed; each is checked the first time."""

    __slots__ = ("_checked", "_found", "_stored")

    def __init__(self, stored: MappedStore, found: Sequence[StoredSample] | None = None) -> None:
        self._stored = stored
        self._found = stored.found if found is None else tuple(found)
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, index: int) -> SampleRoutes: ...
    @overload
    def __getitem__(self, index: slice) -> "StoredSamples": ...
    def __getitem__(self, index: int | slice) -> "SampleRoutes | StoredSamples":
        if isinstance(index, slice):
            return StoredSamples(self._stored, self._found[index])
        found = self._found[index]
        if found.index not in self._checked:
            self.check(found)
        return self._unpack(found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    def check(self, found: StoredSample) -> None:
        """Raise, naming the sample, unless its payload is whole and fits the model."""
        head = self._stored.head
        try:
            _check_payload(self._stored, found)
            # A right checksum does not make the ids of another program right.
            Routes.of([self._unpack(found)], model=head.model, layer_numbers=head.layer_numbers)
        except RoutesError as error:
            raise RoutesError(f"{self._stored.path}: sample {found.index} {found.name!r}: {error}") from error
        self._checked.add(found.index)

    def _unpack(self, found: StoredSample) -> SampleRoutes:
        """Make the sample; its ids and tokens are mapped, not copied."""
        view, head, rows = self._stored.view, self._stored.head, found.num_rows
        layers, top_k = len(head.layer_numbers), head.model.top_k
        ids_at, known_at, padding_at, tokens_at = found.part_starts

        def bits(offset: int, *shape: int) -> np.ndarray:
            count = int(np.prod(shape))
            packed = np.frombuffer(view, np.uint8, count=-(-count // 8), offset=offset)
            return np.unpackbits(packed, count=count).view(np.bool_).reshape(shape)

        has_tokens = found.flags & HAS_TOKENS
        return SampleRoutes(
            name=found.name,
            ids_TLK=np.frombuffer(view, head.dtype, count=rows * layers * top_k, offset=ids_at).reshape(
                rows, layers, top_k
            ),
            num_tokens=found.num_tokens,
            known_TL=bits(known_at, rows, layers) if found.flags & HAS_KNOWN else None,
            padding_T=bits(padding_at, rows) if found.flags & HAS_PADDING else None,
            segments=found.segments,
            tokens_T=np.frombuffer(view, "<i8", count=found.num_tokens, offset=tokens_at) if has_tokens else None,
        )


def open_store(path: str | Path, *, verify: Verify = "headers", recover: bool = False) -> Routes:
    """Map a store; its samples are read when they are accessed.

    Args:
        path: the store; it must not be truncated while it is mapped
        verify: "headers" checks each payload when it is first read, "all" every one now
        recover: read the whole samples of a store that is cut off or whose writer did not finish
    """
    if verify not in ("headers", "all"):
        raise RoutesError(f"verify is {verify!r}; it must be 'headers' or 'all'")
    stored = _accept(map_store(Path(path)), recover=recover)
    samples = StoredSamples(stored)
    if verify == "all":
        for found in stored.found:
            samples.check(found)
    return Routes(model=stored.head.model, samples=samples, layer_numbers=stored.head.layer_numbers)


def map_store(path: Path) -> MappedStore:
    """Map a file and read every header in it, up to the first that is not whole."""
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise RoutesError(f"{path} is empty; a native store begins with a header")
            view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise RoutesError(f"{path} cannot be read: {error}") from error
    head, offset = _parse_file_head(view, str(path))
    found: list[StoredSample] = []
    problem = ""
    while (count := _parse_end_mark(view, offset)) is None:
        try:
            if offset == len(view):
                raise RoutesError("the file ends without an end mark, so a sample may be missing here")
            found.append(_parse_sample(view, offset, len(found), head=head))
        except RoutesError as error:
            after = f"after {found[-1].name!r}" if found else "the first"
            problem = f"{path}: sample {len(found)} ({after}): {error}"
            break
        offset = found[-1].stop
    if count is not None and count != len(found):
        problem = f"{path}: sample {len(found)}: the end mark counts {count} samples"
    return MappedStore(path=path, view=view, head=head, found=tuple(found), end=offset, problem=problem)


def _parse_file_head(view: memoryview, name: str) -> tuple[StoreHead, int]:
    """Return the head of the store `name`, and the offset after it."""
    start = FILE_HEAD.size + CRC.size
    if len(view) < start or bytes(view[: len(FILE_MAGIC)]) != FILE_MAGIC:
        raise RoutesError(f"{name} is not a native store: it does not begin with {FILE_MAGIC.decode()}")
    _, version, text_bytes, _ = FILE_HEAD.unpack_from(view)
    if version != VERSION:
        raise RoutesError(f"{name} is a native store of version {version}; this reader knows version {VERSION}")
    stop = start + text_bytes
    if stop > len(view) or not _is_whole(view, 0, FILE_HEAD, stop):
        raise RoutesError(f"{name}: the store's header is damaged or cut off; no sample can be read")
    content = _parse_json(view[start:stop], f"{name}: the store's header")
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


def _parse_end_mark(view: memoryview, offset: int) -> int | None:
    """Return the number of samples if exactly an end mark remains at `offset`, else None."""
    if len(view) - offset != END_MARK.size + CRC.size:
        return None
    magic, count, zero = END_MARK.unpack_from(view, offset)
    return int(count) if magic == END_MAGIC and zero == 0 and _is_whole(view, offset, END_MARK, len(view)) else None


def _parse_sample(view: memoryview, offset: int, index: int, *, head: StoreHead) -> StoredSample:
    """Read the header of a sample at `offset`, and check it against its checksum and the end of the file."""
    text_start = offset + SAMPLE_HEAD.size + CRC.size
    if text_start > len(view):
        raise RoutesError(f"its header is cut off at byte {len(view)}")
    magic, found_index, rows, tokens, flags, text_bytes, chunks = SAMPLE_HEAD.unpack_from(view, offset)
    text_stop = text_start + text_bytes
    start = text_stop + aligned(chunks * CRC.size)
    if magic != SAMPLE_MAGIC or start > len(view):
        raise RoutesError(f"its header at byte {offset} is damaged or cut off")
    if not _is_whole(view, offset, SAMPLE_HEAD, start):
        raise RoutesError(f"its header at byte {offset} is damaged: wrong checksum")
    sizes = head.part_bytes(rows=rows, tokens=tokens, flags=flags)
    if found_index != index or flags > 7 or chunks != sum(-(-aligned(size) // head.chunk_bytes) for size in sizes):
        raise RoutesError(f"its header says sample {found_index}, flags {flags}, {chunks} chunks: records are mixed up")
    content = _parse_json(view[text_start:text_stop], "its header")
    name, listed = content.get("name"), content.get("segments")
    if not isinstance(name, str) or not isinstance(listed, list):
        raise RoutesError("its header has no name or no segments")
    segments = []
    for segment in listed:
        if not isinstance(segment, list) or len(segment) != 3 or not isinstance(segment[2], str):
            raise RoutesError(f"{name!r}: segment {segment!r} is not [start, stop, weight version]")
        a, b = (require_int(f"{name!r}: segment edge", n, low=0, error=RoutesError) for n in segment[:2])
        segments.append(Segment(start=a, stop=b, weight_version=segment[2]))
    found = StoredSample(
        index=index,
        name=name,
        num_rows=rows,
        num_tokens=tokens,
        flags=flags,
        segments=tuple(segments),
        offset=offset,
        start=start,
        part_bytes=sizes,
        checksums=tuple(np.frombuffer(view, "<u4", count=chunks, offset=text_stop).tolist()),
    )
    if found.stop > len(view):
        raise RoutesError(f"{name!r} is cut off: it ends at byte {found.stop}, the file at byte {len(view)}")
    return found


def _check_payload(stored: MappedStore, found: StoredSample) -> None:
    """Raise unless every chunk of the sample's payload has its checksum."""
    checksums = iter(found.checksums)
    for start, size in zip(found.part_starts, found.part_bytes, strict=True):
        stop = start + aligned(size)
        for a in range(start, stop, stored.head.chunk_bytes):
            b = min(a + stored.head.chunk_bytes, stop)
            if zlib.crc32(stored.view[a:b]) != next(checksums):
                raise RoutesError(f"bytes {a}..{b} are damaged: wrong checksum")


def _accept(stored: MappedStore, *, recover: bool) -> MappedStore:
    """Return a complete store; with `recover`, the whole samples of an incomplete one; else raise."""
    if not stored.problem:
        return stored
    if not recover:
        raise RoutesError(
            f"{stored.problem}. Was the file truncated, or the writer killed or still at work? "
            f"recover=True reads the {len(stored.found)} samples before it"
        )
    found, end = list(stored.found), stored.end
    # After a power cut the last headers may have reached the disk before their payloads.
    while found:
        try:
            _check_payload(stored, found[-1])
            break
        except RoutesError:
            end = found.pop().offset
    logger.warning("%s; recovered the %d samples before it", stored.problem, len(found))
    return replace(stored, found=tuple(found), end=end, problem="")


def path_of(source: Source) -> Path:
    """Return the path of a source that should be a store, or raise if it is an object in memory."""
    if source.path is None:
        raise RoutesError(f"{source.name}: a native store is a file; give its path")
    return source.path


def matches(source: Source) -> bool:
    """Whether the source is a file that begins as a native store does."""
    if source.path is None or not source.path.is_file():
        return False
    with source.path.open("rb") as file:
        return file.read(len(FILE_MAGIC)) == FILE_MAGIC


def read(source: Source, model: ModelShape) -> Iterator[Recording]:
    """Yield each sample as recordings, one per segment, unknown rows as -1."""
    routes = open_store(path_of(source))
    if (routes.model.experts, routes.model.top_k) != (model.experts, model.top_k):
        raise RoutesError(
            f"{source.name} holds routes of {routes.model.name!r} ({routes.model.experts} experts, "
            f"top-{routes.model.top_k}), not of {model.name!r} ({model.experts} experts, top-{model.top_k}); "
            "name the model that made them, or none"
        )
    for sample in routes:
        rows, padding, tokens = sample.ids_TLK, sample.padding_T, sample.tokens_T
        if sample.known_TL is not None and not sample.known_TL.all():
            # A signed dtype one size up holds every id and -1.
            signed = np.promote_types(rows.dtype, np.int8)
            rows = np.where(sample.known_TL[:, :, None], rows.astype(signed), signed.type(-1))
        # Token t is the t-th row that is not padding.
        real_T = np.ones(len(rows), dtype=np.int64) if padding is None else (~padding).astype(np.int64)
        token_at = np.concatenate([[0], np.cumsum(real_T)])
        segments = sample.segments or (Segment(start=0, stop=len(rows)),)
        for number, segment in enumerate(segments, start=1):
            cut = slice(segment.start, segment.stop)
            seen = sample.num_tokens if number == len(segments) else int(token_at[segment.stop])
            yield Recording(
                name=sample.name,
                rows=rows[cut],
                start=int(token_at[segment.start]),
                num_tokens=seen,
                tokens=None if tokens is None else tokens[:seen],
                padding=None if padding is None else padding[cut],
                layer_numbers=routes.layer_numbers,
                weight_version=segment.weight_version,
            )


def write(routes: Routes, path: Path) -> None:
    """Write all samples to a new store."""
    with StoreWriter(path, model=routes.model, layer_numbers=routes.layer_numbers) as writer:
        for sample in routes:
            writer.append(sample)


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
