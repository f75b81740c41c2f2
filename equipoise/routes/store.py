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

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, cast

import numpy as np

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes
from equipoise.core.value import require_int
from equipoise.routes import _store_layout as layout
from equipoise.routes._store_map import StoredSamples, accept, walk
from equipoise.routes.format import Format
from equipoise.routes.recording import Recording
from equipoise.routes.source import Source

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
        chunk = require_int("chunk_bytes", chunk_bytes, low=layout.ALIGN, high=2**30, error=RoutesError)
        if chunk % layout.ALIGN:
            raise RoutesError(f"chunk_bytes is {chunk}; it must be a multiple of {layout.ALIGN}")
        self._head = layout.StoreHead(model=model, layer_numbers=numbers, chunk_bytes=chunk)
        self._sync = sync
        # Step 2: go behind the last whole sample of an existing store, or write the header of a new one.
        self._count, self._end = 0, 0
        is_new = not self.path.exists() or not self.path.stat().st_size
        if not is_new:
            self._continue(recover=recover)
        self._file = self._open("wb" if is_new else "r+b")
        if is_new:
            self._put([layout.pack_file_head(self._head)])

    def __len__(self) -> int:
        """Samples in the store."""
        return self._count

    def append(self, sample: SampleRoutes) -> None:
        """Check one sample against the model and write it."""
        head = self._head
        (fitted,) = Routes.of([sample], model=head.model, layer_numbers=head.layer_numbers).samples
        flags, parts = layout.payload(fitted, head)
        checksums = layout.chunk_checksums(parts, head.chunk_bytes)
        blocks: list[bytes | memoryview] = [
            layout.pack_sample_head(fitted, self._count, flags=flags, checksums=checksums)
        ]
        for part in parts:
            blocks += [part, layout.ZEROS[: layout.aligned(len(part)) - len(part)]]
        self._put(blocks)
        self._count += 1

    def close(self) -> None:
        """Write the end mark and close the file."""
        if not self._file.closed:
            self._put([layout.pack_end_mark(self._count)])
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


def _figures(head: layout.StoreHead) -> dict[str, Any]:
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
        return file.read(len(layout.FILE_MAGIC)) == layout.FILE_MAGIC


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
