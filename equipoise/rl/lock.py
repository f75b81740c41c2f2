"""`hold`: a folder has one run at a time.

The lock is the system's and lies on the folder itself: it ends with the process that holds it, however that ends, and
leaves nothing behind.

Knows folders. Does not know what is in them.

Invariants (asserted by the tests):
1. A folder that is held is refused by name; one whose holder has ended, or was killed, is not.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from equipoise.core.errors import TrainingError

_LOG = logging.getLogger(__name__)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a folder in a `with` block, made where it is not there; raise if another run does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be made or opened ({error.strerror}); give another folder") from error
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrainingError(
            f"{folder} is in use by a run that has not ended; wait for it, or give another folder"
        ) from None
    except OSError as error:
        # Some network file systems lock no folders. The lock guards against a slip; a run can do without.
        _LOG.warning("%s cannot be locked (%s): start no second run in it", folder, error.strerror)
