"""Points and lanes in the work of a device: what must be finished before something else may begin or be announced.

On a CUDA device these are events and streams. On the CPU work is finished when a call returns, so every point is
reached at once and there is only one lane: callers are written once for both.

Knows streams, events and one thread. Does not know experts, versions or who waits for whom.

Invariants (asserted by the tests):
1. A mark is reached only when all work that its stream held when it was made is finished.
2. Work of a lane begins only after the mark that was given, and never holds up the calling thread.
3. What an `Announcer` is given is said in order, each after its mark.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Mark:
    """A point in a stream's work."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        """Without an event there is nothing to wait for."""
        self._event = event

    @classmethod
    def now(cls, device: torch.device) -> "Mark":
        """Where the current stream of the calling thread stands."""
        if device.type == "cpu":
            return REACHED
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def is_reached(self) -> bool:
        """Whether the work before it is finished."""
        return self._event is None or self._event.query()

    def hold_up(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Have a stream, the current one if none is given, wait here; the calling thread goes on."""
        if self._event is not None:
            (stream or torch.cuda.current_stream(device)).wait_event(self._event)

    def block(self) -> None:
        """Hold up the calling thread until it is reached."""
        if self._event is not None:
            self._event.synchronize()


REACHED = Mark()
"""The mark of work that is finished."""


class Lane:
    """Work beside the layers': a stream of its own on a CUDA device, the calling thread on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def work(self, *, after: Mark = REACHED) -> Iterator[None]:
        """Let what is called inside run in this lane, once `after` is reached."""
        if self._stream is None:
            yield
            return
        after.hold_up(self._device, self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """Where this lane stands."""
        if self._stream is None:
            return REACHED
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)


class Standstill:
    """How long the current stream takes from one point to another; on the CPU the caller's clock says that."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begin = device, self._point(device)
        self._end: torch.cuda.Event | None = None

    def end(self) -> None:
        """Say that this is the second point."""
        self._end = self._point(self._device)

    def is_over(self) -> bool:
        """Whether the second point is reached; at once on the CPU."""
        return self._begin is None or (self._end is not None and self._end.query())

    def seconds(self) -> float:
        """Seconds between the two points; waits for the second."""
        if self._begin is None or self._end is None:
            return 0.0
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3

    @staticmethod
    def _point(device: torch.device) -> torch.cuda.Event | None:
        if device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event


class Announcer:
    """Says things to other processes once the device has done what they announce; at once on the CPU."""

    def __init__(self, device: torch.device) -> None:
        """Start the thread that waits for marks, where there is a device."""
        self._queue: queue.SimpleQueue[tuple[Mark, Callable[[], None]] | None] | None = None
        self._asked = self._said = 0
        self.failure: Exception | None = None
        if device.type == "cuda":
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._queue,), name="equipoise-announcer", daemon=True).start()

    def after(self, mark: Mark, say: Callable[[], None]) -> None:
        """Call `say` once `mark` is reached, in the order of these calls."""
        if self._queue is None:
            say()
        else:
            self._asked += 1
            self._queue.put((mark, say))

    def is_done(self) -> bool:
        """Whether everything has been said, or something failed."""
        return self._said == self._asked or self.failure is not None

    def close(self) -> None:
        """End the thread once it has said what it was given. Closing twice is allowed."""
        if self._queue is not None:
            self._queue.put(None)

    def _run(self, waiting: "queue.SimpleQueue[tuple[Mark, Callable[[], None]] | None]") -> None:
        while (item := waiting.get()) is not None:
            mark, say = item
            try:
                mark.block()
                say()
            except Exception as error:  # noqa: BLE001  # kept for whoever waits; a thread has nobody to raise to
                self.failure = error
                return
            self._said += 1
