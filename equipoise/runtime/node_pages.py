"""Every rank of a node makes pages, and maps those of all the others.

Knows ranks and descriptors. Does not know what lies in the pages.

Steps of `share_pages`, called by every rank of the group at the same time:
1. Each rank checks that there is room for its whole node; if one finds none, all raise the same error.
2. Each rank makes its pages; again all raise if one could not.
3. Rank by rank, each hands its descriptors over a Unix socket in the abstract namespace, the others of its node map
   the pages and close the descriptors.

Invariants (asserted by the tests):
1. What a rank writes to its pages, the ranks of its node read, and no other rank.
2. After step 3 no socket, name or descriptor is left.
"""

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from equipoise.core.errors import TransferError
from equipoise.runtime.memory import exchange_outcomes
from equipoise.runtime.pages import Pager, Pages, Span

_MOST = 200
"""Descriptors in one message; Linux allows 253."""


class NodePages(NamedTuple):
    """What a rank has of its node's pages."""

    own: list[Pages]
    """To be mapped again or released by the caller."""
    spans: dict[int, list[Span]]
    """By rank of the node, this one included: its pages one by one."""


def share_pages(
    sizes: Sequence[int], *, pager: Pager, group: Any, node_R: Sequence[int], timeout_s: float
) -> NodePages:
    """Make pages of these sizes and map those of the node. Every rank of `group` must call this.

    Args:
        sizes: bytes of each piece, whole granules, the same on every rank
        group: the EP group; carries a few bytes about who made what
        node_R: node of each rank of the group
        timeout_s: longest wait for another rank
    """
    rank = dist.get_rank(group)
    peers = [r for r, node in enumerate(node_R) if node == node_R[rank]]
    failure, own = "", []
    try:
        pager.check(sum(sizes), sharers=len(peers))
    except TransferError as error:
        failure = str(error)
    exchange_outcomes(("", failure), group)
    try:
        for size in sizes:
            own.append(pager.make(size))
    except TransferError as error:
        failure = str(error)
    with closing(_Listener()) as listener, _released_on_error(own):
        outcomes = exchange_outcomes((listener.address, failure), group)
        spans = {rank: [pager.map([one]) for one in own]}
        for source in peers:
            if source == rank:
                listener.hand_out(own, times=len(peers) - 1, timeout_s=timeout_s)
            else:
                spans[source] = _fetch(outcomes[source][0], sizes, pager=pager, source=source, timeout_s=timeout_s)
    return NodePages(own, {peer: spans[peer] for peer in peers})


@contextmanager
def _released_on_error(own: Sequence[Pages]) -> Iterator[None]:
    try:
        yield
    except TransferError:
        for pages in own:
            pages.release()
        raise


class _Listener:
    """Where the other ranks of the node come for descriptors."""

    def __init__(self) -> None:
        self.address = f"\0equipoise-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(128)

    def hand_out(self, own: Sequence[Pages], *, times: int, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        for _ in range(times):
            try:
                connection, _ = self._socket.accept()
                with connection:
                    # An accepted socket has no bound of its own.
                    connection.settimeout(timeout_s)
                    for start in range(0, len(own), _MOST):
                        _send(connection, own[start : start + _MOST])
            except OSError as error:
                raise TransferError(
                    f"shared pages: {times} ranks of this node should have fetched them within {timeout_s:g} s each, "
                    f"not all did ({error}); see the other ranks' logs"
                ) from error

    def close(self) -> None:
        self._socket.close()


def _send(connection: socket.socket, pages: Sequence[Pages]) -> None:
    with ExitStack() as exported:
        descriptors: list[int] = []
        for one in pages:
            descriptors.append(one.export())
            exported.callback(os.close, descriptors[-1])
        socket.send_fds(connection, [b"f"], descriptors)
        # The next message may only follow once this one is taken, or descriptors of both would come as one.
        if not connection.recv(1):
            raise ConnectionError("a rank ended before it took them")


def _fetch(address: str, sizes: Sequence[int], *, pager: Pager, source: int, timeout_s: float) -> list[Span]:
    spans: list[Span] = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
            while len(spans) < len(sizes):
                spans += _take(connection, sizes[len(spans) :][:_MOST], pager)
        except OSError as error:
            raise TransferError(
                f"shared pages: rank {source} of this node could not be reached ({error}); "
                "ranks of one node must share a network namespace"
            ) from error
    return spans


def _take(connection: socket.socket, sizes: Sequence[int], pager: Pager) -> list[Span]:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, len(sizes))
    try:
        if len(descriptors) != len(sizes):
            raise TransferError(
                f"shared pages: {len(descriptors)} descriptors came instead of {len(sizes)}; another rank of this "
                "node ended, or the limit on open files is reached: raise it with `ulimit -n`"
            )
        spans = []
        for descriptor, size in zip(descriptors, sizes, strict=True):
            pages = pager.open(descriptor, size)
            try:
                spans.append(pager.map([pages]))
            finally:
                pages.release()
        connection.send(b"k")
        return spans
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
