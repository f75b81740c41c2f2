"""Reading a native store: mapping its file, walking its headers, making samples. The spec is in `store.py`.

Knows files and maps. Does not know how a store is written, nor what is done with its samples.
"""

import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from equipoise.core import Routes, RoutesError, SampleRoutes
from equipoise.routes import _store_layout as layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A mapped store, as far as its headers are whole."""

    path: Path
    view: memoryview
    head: layout.StoreHead
    entries: tuple[layout.Entry, ...]
    end: int
    """Offset behind the last whole sample."""
    problem: str
    """What stands behind the last whole sample instead of an end mark; empty where the store is complete."""


class StoredSamples(Sequence[SampleRoutes]):
    """The samples of a mapped store, made when asked for, each checked the first time."""

    __slots__ = ("_checked", "_entries", "_stored")

    def __init__(self, stored: Stored, entries: Sequence[layout.Entry] | None = None) -> None:
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
        return layout.unpack_sample(self._stored.view, entry, self._stored.head)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    def check(self, entry: layout.Entry) -> None:
        """Raise, naming the sample, unless its payload is whole and fits the model."""
        stored = self._stored
        place = f"{stored.path}: sample {entry.index} {entry.name!r}"
        try:
            layout.check_payload(stored.view, entry, stored.head.chunk_bytes)
            sample = layout.unpack_sample(stored.view, entry, stored.head)
            # A right checksum does not make another program's ids right.
            Routes.of([sample], model=stored.head.model, layer_numbers=stored.head.layer_numbers)
        except RoutesError as error:
            raise RoutesError(f"{place}: {error}") from error
        self._checked.add(entry.index)


def walk(path: Path) -> Stored:
    """Map a file and read every header in it, up to the first that is not whole."""
    view = _map(path)
    head, offset = layout.parse_file_head(view, str(path))
    entries: list[layout.Entry] = []
    problem = ""
    while (count := layout.parse_end_mark(view, offset)) is None:
        try:
            if offset == len(view):
                raise RoutesError("the file ends without an end mark, so a sample may be missing here")
            entries.append(layout.parse_entry(view, offset, len(entries), head=head))
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


def _has_whole_payload(stored: Stored, entry: layout.Entry) -> bool:
    try:
        layout.check_payload(stored.view, entry, stored.head.chunk_bytes)
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
