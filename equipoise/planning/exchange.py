"""`OwnGroup`: a gloo group that nothing but planning uses, so that it can talk from a thread while training computes.

Knows torch.distributed. Does not know what it carries: objects travel pickled, between processes of one training job.

Invariants (asserted by the tests):
1. `close` ends an exchange that other ranks do not join, at once.
2. `swap` is the all-to-all of the training's own group, zero rows included.
"""

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from equipoise.core.errors import TransferError
from equipoise.runtime.connection import connect, leave

_POLL_S = 0.002


class OwnGroup:
    """The ranks of a group, connected once more."""

    def __init__(self, group: Any, *, timeout_s: float) -> None:
        """Connect. Every rank of `group` must call this.

        Args:
            group: the ranks to connect; able to move CPU tensors
            timeout_s: bound on connecting and on every exchange
        """
        self.rank, self.size, self.timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self._is_closing = threading.Event()
        self._gloo = connect(group, timeout_s=timeout_s)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Every rank of the group must call this."""
        with self._named_errors():
            return self._gather(value)

    def swap(self, rows_NX: torch.Tensor, send_R: list[int], receive_R: list[int]) -> torch.Tensor:
        """Send rows to every rank and return theirs, source by source. Every rank of the group must call this."""
        received_NX = rows_NX.new_empty((sum(receive_R), *rows_NX.shape[1:]))
        with self._named_errors():
            self._finish(self._gloo.alltoall_base(received_NX, rows_NX.contiguous(), receive_R, send_R))
        return received_NX

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except TransferError:
            raise
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank}: planning could not exchange with the other {self.size - 1} ranks within "
                f"{self.timeout_s:g} s; look for a rank that ended or did not announce this window: {error}"
            ) from error

    def _gather(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._finish(self._gloo.allgather(lengths, torch.tensor([mine.numel()])))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._finish(self._gloo.allgather(parts, padded))
        return [pickle.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]

    def _finish(self, work: Any) -> None:
        while not work.is_completed():
            if self._is_closing.wait(_POLL_S):
                # What other ranks never join is left behind.
                leave(self._gloo, [work])
                raise TransferError(f"rank {self.rank}: closed while it waited for other ranks to announce a window")
        work.wait()

    def close(self) -> None:
        """End an exchange that waits for other ranks, and take part in none any more."""
        self._is_closing.set()
