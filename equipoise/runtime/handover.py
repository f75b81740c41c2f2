"""Open files handed from one process of a node to others, over a Unix socket in the abstract namespace.

Knows sockets and descriptors. Does not know what the files hold, nor ranks.

A `Counter` is where others come; `take` fetches. Descriptors go in messages of at most `MOST`, each taken before the
next is sent, or descriptors of two messages would come as one.

Invariants (asserted by the tests):
1. Every wait is bounded; a peer that ends in between is a `TransferError` on the other side.
2. Whoever receives descriptors closes them; those sent are closed by the counter. No name is left.
"""

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from equipoise.core.errors import TransferError

MOST = 200
"""Descriptors in one message; Linux allows 253."""

Export = Callable[[], int]
"""Makes a descriptor that the counter closes."""


class Counter:
    """Where other processes of the node come for descriptors."""

    def __init__(self) -> None:
        self.address = f"\0equipoise-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(128)

    def hand_out(self, exports: Sequence[Export], *, times: int, timeout_s: float) -> None:
        """Serve so many processes, each with all descriptors."""
        self._socket.settimeout(timeout_s)
        for _ in range(times):
            try:
                connection, _ = self._socket.accept()
                with connection:
                    # An accepted socket has no bound of its own.
                    connection.settimeout(timeout_s)
                    for start in range(0, len(exports), MOST):
                        _send(connection, exports[start : start + MOST])
            except OSError as error:
                raise TransferError(
                    f"shared memory: {times} ranks of this node should have fetched it within {timeout_s:g} s each, "
                    f"not all did ({error}); see the other ranks' logs"
                ) from error

    def close(self) -> None:
        """Leave; closing twice is allowed."""
        self._socket.close()


def take(address: str, count: int, use: Callable[[int], None], *, source: int, timeout_s: float) -> None:
    """Fetch so many descriptors from a counter and use them one by one; each is closed afterwards.

    Args:
        source: rank that stands at the counter, for words
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
            for start in range(0, count, MOST):
                _take(connection, min(MOST, count - start), use)
        except OSError as error:
            raise TransferError(
                f"shared memory: rank {source} of this node could not be reached ({error}); "
                "ranks of one node must share a network namespace"
            ) from error


def _send(connection: socket.socket, exports: Sequence[Export]) -> None:
    with ExitStack() as exported:
        descriptors: list[int] = []
        for export in exports:
            descriptors.append(export())
            exported.callback(os.close, descriptors[-1])
        socket.send_fds(connection, [b"f"], descriptors)
        if not connection.recv(1):
            raise ConnectionError("a rank ended before it took them")


def _take(connection: socket.socket, count: int, use: Callable[[int], None]) -> None:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, count)
    try:
        if len(descriptors) != count:
            raise TransferError(
                f"shared memory: {len(descriptors)} descriptors came instead of {count}; another rank of this node "
                "ended, or the limit on open files is reached: raise it with `ulimit -n`"
            )
        for descriptor in descriptors:
            use(descriptor)
        connection.send(b"k")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
