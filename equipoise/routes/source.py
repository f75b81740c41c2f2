"""`Source`: a dump on its way in. A file, a folder, or an object already in memory.

It opens files by suffix, without ever unpickling: `.json`, `.jsonl`, `.npy`, `.npz`, `.pt` (weights only), `.txt`.
Readers ask it for records; whatever is wrong with the container becomes a `RoutesError` that names the file and place.

Knows containers. Does not know what routes look like in them.
"""

import json
import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import RoutesError

SUFFIXES = (".json", ".jsonl", ".npy", ".npz", ".pt", ".txt")


@dataclass(frozen=True, slots=True)
class Source:
    """One dump: `path` is set for files and folders, `content` for objects."""

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
            if not path.exists():
                raise RoutesError(f"no dump at {path}")
            return cls(name=str(path), path=path)
        return cls(name=f"<{type(dump).__name__}>", content=dump)

    @property
    def suffix(self) -> str:
        """Lower-case suffix of the file, "/" for a folder, "" for an object."""
        if self.path is None:
            return ""
        return "/" if self.path.is_dir() else self.path.suffix.lower()

    def records(self) -> Iterator[tuple[str, Any]]:
        """Yield (place, record): lines of a `.jsonl` or `.txt`, files of a folder, else the one content.

        A top-level JSON list, and a list or tuple object, is taken apart; a dict, an array or a tensor is one record.
        """
        if self.path is None:
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

    def nonempty_records(self) -> Iterator[tuple[str, Any]]:
        """`records()`, or an error if there is none."""
        records = self.records()
        first = next(records, None)
        if first is None:
            raise RoutesError(f"{self.name} holds no record")
        yield from chain([first], records)


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
                yield place, json.loads(text) if parse else text.strip()
            except (ValueError, RecursionError) as error:
                raise RoutesError(f"{path}: {place} is not {'JSON' if parse else 'UTF-8 text'}: {error}") from error


def _load(path: Path, suffix: str) -> Any:
    """Read one whole file by its suffix."""
    try:
        if suffix == ".json":
            return json.loads(path.read_bytes())
        if suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        if suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        if suffix == ".pt":
            return _load_torch(path)
    except (ValueError, OSError, EOFError, KeyError, RecursionError, zipfile.BadZipFile, NotImplementedError) as error:
        raise RoutesError(f"{path} cannot be read as {suffix}: {error}") from error
    raise RoutesError(f"{path} has suffix {suffix!r}; known: {', '.join(SUFFIXES)}, or a folder of such files")


def _load_torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise RoutesError(
            f"{path} needs torch to be read; pip install 'equipoise[torch]', or save it as .npz"
        ) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise RoutesError(f"{path} cannot be read as a weights-only torch file: {error}") from error
