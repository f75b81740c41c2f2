"""Ctrl-C reaches every process of a terminal; one of them decides what it means, and its children are deaf to it.

Knows signals. Does not know what the processes do.

Invariants (asserted by the tests):
1. A process started in `deaf_children` does not hear Ctrl-C, not even while it imports; its starter does afterwards.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deaf_children() -> Iterator[None]:
    """Start processes in a `with` block that ignore Ctrl-C.

    Outside the main thread, which alone may say what a signal does, they hear it like any other process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
