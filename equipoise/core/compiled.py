"""`compiled`: the one way to compile a kernel of integers and arrays.

Importing this module imports no numba; decorating does. No `fastmath`, no `parallel`: results are the same everywhere.

Invariants (asserted by the tests):
1. Machine code is kept on disk where a folder for it can be written: beside the package, or in the user's cache.
2. Where none can be written (a read-only install without a home), kernels still run, compiled in each process.
"""

from collections.abc import Callable
from typing import Any


def compiled(function: Callable[..., Any]) -> Any:
    """Compile `function` when it is first called; it runs without the interpreter's lock."""
    import numba

    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        # numba refuses to cache where it finds no writable folder.
        return numba.njit(nogil=True)(function)
