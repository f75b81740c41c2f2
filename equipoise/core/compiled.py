"""`compiled`: the one place that compiles kernels of integers and arrays.

Importing this module imports no numba; decorating does. No `fastmath`, no `parallel`: results are the same everywhere.
Machine code is kept on disk where a folder for it can be written: beside the package, or in the user's cache. With
`NUMBA_DISABLE_JIT=1` in the environment every kernel runs as the plain Python it is written in, to step through it.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any


def compiled(function: Callable[..., Any]) -> Any:
    """Compile `function` when it is first called; it runs without the interpreter's lock."""
    import numba

    try:
        kernel = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        # numba refuses to cache where it finds no writable folder (a read-only install without a home).
        return numba.njit(nogil=True)(function)
    cache = getattr(kernel, "_cache", None)
    if cache is not None and hasattr(cache, "_cache_file"):
        # numba looks at the time of one file alone: machine code would outlive a change to a kernel that it calls, and
        # an index that names a renamed type could not be read. With all sources in the version it compiles again.
        cache._cache_file._version = f"{numba.__version__} {_sources()}"
    return kernel


@functools.cache
def _sources() -> str:
    """Digest of all files that have kernels."""
    texts = [file.read_bytes() for file in sorted(Path(__file__).parents[1].rglob("*.py"))]
    # `core.split` is compiled by `cost.links`, not by itself.
    kernels = [text for text in texts if b"core.compiled import" in text]
    split = Path(__file__).with_name("split.py").read_bytes()
    return hashlib.sha256(b"".join([*kernels, split])).hexdigest()


def compiled_copies(*functions: Any) -> list[Any]:
    """Compile copies of functions of one module that call each other, and leave the plain ones as they are.

    For a rule that also runs in processes that must not import numba. All functions that are called must be given.
    """
    names = dict(functions[0].__globals__)
    for function in functions:
        names[function.__name__] = compiled(FunctionType(function.__code__, names, function.__name__))
    return [names[function.__name__] for function in functions]
