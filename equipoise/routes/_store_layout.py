"""The bytes of the native store: packing and parsing its three kinds of blocks. The spec is in `store.py`.

Knows offsets, checksums and what a damaged byte is called. Does not know files, maps or who asks.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RoutesError, SampleRoutes, Segment, TopologyError
from equipoise.core.routes import id_dtype
from equipoise.core.value import require_int

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
