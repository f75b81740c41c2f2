"""Files that are written whole or not at all: a full disk or an interrupt leaves what was there before.

Knows files. Does not know what is in them.

Invariants (asserted by the tests):
1. A block that ends well leaves its file and nothing else; one that does not leaves what was there before.
2. What the system refuses is one error that names the file, not its draft.
3. A link keeps pointing where it did, and what is no plain file, such as /dev/null, is written to and not replaced.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from equipoise.core.errors import EquipoiseError


@contextmanager
def whole_file(path: str | Path, *, error: type[EquipoiseError] = EquipoiseError) -> Iterator[Path]:
    """Yield a draft to write to, which takes the place of `path` when the block ends well.

    Args:
        path: the file to write
        error: what to raise where it cannot be written
    """
    target = Path(path).resolve()
    is_plain = target.is_file() or not target.exists()
    # Writers may look at the suffix.
    draft = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}") if is_plain else target
    try:
        yield draft
        if is_plain:
            draft.replace(target)
    except OSError as cause:
        if cause.filename not in (None, str(draft)):
            # Another file's fault, such as one that is read meanwhile.
            raise
        raise error(f"{path} cannot be written: {cause.strerror or cause}") from cause
    finally:
        if is_plain:
            draft.unlink(missing_ok=True)
