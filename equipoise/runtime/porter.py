"""`Porter`: a thread that does one job after the other, in the order given, beside the layers.

On a device its work runs in a lane of its own, each job after a mark in the layers' work. Every wait inside a job is
bounded by the watchdog, so a job ends or fails; whoever waits for one needs no bound of its own.

Knows jobs. Does not know what they do.

Invariants (asserted by the tests):
1. Jobs run one at a time, in order, each after its mark.
2. After a job has failed no other begins, and everyone who waits for one gets its error.
3. Once closed it does nothing more; a job that hangs is told to give up, on all ranks of the node.
"""

import threading
from collections import deque
from collections.abc import Callable

import torch

from equipoise.core.errors import TransferError
from equipoise.runtime.node import NodeMemory
from equipoise.runtime.streams import REACHED, Lane, Mark
from equipoise.runtime.watchdog import Transfer

Job = Callable[[], None]

_JOIN_S = 1.0
"""How long closing waits for a job before it is told to give up, and for the thread after that."""


class Porter:
    """The thread, and how far it has come."""

    def __init__(self, node: NodeMemory) -> None:
        """Start the thread, with nothing to do."""
        self._node, self._lane = node, Lane(node.device)
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Job, Mark]] = deque()
        self._given = self._done = 0
        self._is_busy = self._is_closed = False
        self._failure: TransferError | None = None
        self._thread = threading.Thread(target=self._run, name="equipoise-porter", daemon=True)
        self._thread.start()

    def give(self, job: Job, *, after: Mark = REACHED) -> int:
        """Have a job done once all given before it are, and return its number."""
        with self._changed:
            self._jobs.append((job, after))
            self._given += 1
            self._changed.notify_all()
            return self._given

    def wait(self, number: int | None = None) -> None:
        """Wait until a job is done, all that were given if none is named, or raise what ended the porter's work."""
        with self._changed:
            wanted = self._given if number is None else number
            self._changed.wait_for(lambda: self._done >= wanted or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def is_done(self, number: int) -> bool:
        """Whether a job is done."""
        return self._done >= number

    def close(self) -> None:
        """Drop what has not begun and end the thread. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
            is_idle = self._changed.wait_for(lambda: not self._is_busy, _JOIN_S)
        if not is_idle:
            self._node.watchdog.abort("closed while experts were on their way between owners and homes")
        self._thread.join(_JOIN_S)
        # An error refers to the calls it went through, and they to shared memory.
        self._failure = None

    def _run(self) -> None:
        while (item := self._take()) is not None:
            job, after = item
            try:
                self._node.watchdog.wait(after.is_reached, Transfer("fence", path=self._node.direct_path))
                with torch.no_grad(), self._lane.work():
                    job()
            except Exception as error:  # noqa: BLE001  # kept for whoever waits; a thread has nobody to raise to
                self._fail(error)
            del item, job
            with self._changed:
                self._is_busy = False
                self._done += self._failure is None
                self._changed.notify_all()

    def _take(self) -> tuple[Job, Mark] | None:
        """Wait for the next job; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (bool(self._jobs) and self._failure is None))
            if self._is_closed:
                return None
            self._is_busy = True
            return self._jobs.popleft()

    def _fail(self, error: Exception) -> None:
        words = f"publish or collect failed: {error!r}"
        self._failure = error if isinstance(error, TransferError) else self._node.watchdog.abort(words)
