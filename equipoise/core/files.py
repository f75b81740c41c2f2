"""Files: written completely or not at all, and `.npz` archives read without unpickling."""

import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from equipoise.core.errors import EquipoiseError

NPZ_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, SyntaxError, MemoryError)
"""What a damaged `.npz` raises besides ValueError and OSError: in its directory, its data or an array's header."""


@contextmanager
def whole_file(path: str | Path, *, error: type[EquipoiseError] = EquipoiseError) -> Iterator[Path]:
    """Yield a draft to write to, which replaces `path` when the block ends without an error.

    A link keeps its target, and what is no regular file, such as /dev/null, is written to directly.

    Args:
        path: the file to write
        error: what to raise if it cannot be written; it names the file, not its draft
    """
    target = Path(path).resolve()
    is_plain = target.is_file() or not target.exists()
    # The suffix stays, because writers may depend on it.
    draft = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}") if is_plain else target
    try:
        yield draft
        if is_plain:
            draft.replace(target)
    except OSError as cause:
        if cause.filename not in (None, str(draft)):
            # The error concerns another file, such as one that is read meanwhile.
            raise
        raise error(f"{path} cannot be written: {cause.strerror or cause}") from cause
    finally:
        if is_plain:
            draft.unlink(missing_ok=True)


def narrow(array: np.ndarray) -> np.ndarray:
    """Return an integer array in its narrowest dtype, unsigned if no entry is negative; any other array as it is."""
    if array.dtype.kind not in "iu":
        return array
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    return array.astype(np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high)))


def read_npz(
    path: str | Path, *, wanted: str, error: type[Exception], older: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Read every array of an `.npz`, without unpickling, and check its `format` entry.

    Args:
        path: the file
        wanted: the `format` it must name
        error: what to raise otherwise
        older: formats that are no longer read, and why
    """
    try:
        # Opened here, because numpy leaves a file open that turns out to be no archive.
        with Path(path).open("rb") as source:
            file = np.load(source, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise error(f"{path} is a bare .npy array; expected a {wanted} file (.npz)")
            with file:
                arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as cause:
        raise error(f"no file at {path}") from cause
    except (*NPZ_ERRORS, ValueError, OSError, EOFError, KeyError, RuntimeError) as cause:
        if isinstance(cause, error):
            raise
        # numpy takes any file that is no array for a pickle, and advises to load it unsafely.
        why = "it is another kind of file" if "unsafely" in str(cause) else str(cause)
        raise error(f"{path} cannot be read as a {wanted} file (.npz): {why}") from cause
    found = str(arrays.get("format", "nothing"))
    if found != wanted:
        hint = f"; {older[found]}" if older and found in older else ""
        raise error(f"{path} says its format is {found!r}, expected {wanted!r}{hint}")
    return arrays
