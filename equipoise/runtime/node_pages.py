"""Every rank of a node makes pages, and maps those of all the others.

Knows ranks and descriptors. Does not know what lies in the pages.

Steps of `share_pages`, called by every rank of the group at the same time:
1. Each rank checks that there is room for its whole node; if one finds none, all raise the same error.
2. Each rank makes its pages; again all raise if one could not.
3. Rank by rank, each hands its descriptors over (`handover`), the others of its node map the pages.

Invariants (asserted by the tests):
1. What a rank writes to its pages, the ranks of its node read, and no other rank.
2. After step 3 no socket, name or descriptor is left.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from equipoise.core.errors import TransferError
from equipoise.runtime.handover import Counter, take
from equipoise.runtime.memory import exchange_outcomes
from equipoise.runtime.pages import Pager, Pages, Span


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
    with closing(Counter()) as counter, _released_on_error(own):
        outcomes = exchange_outcomes((counter.address, failure), group)
        spans = {rank: [pager.map([one]) for one in own]}
        for source in peers:
            if source == rank:
                counter.hand_out([one.export for one in own], times=len(peers) - 1, timeout_s=timeout_s)
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


def _fetch(address: str, sizes: Sequence[int], *, pager: Pager, source: int, timeout_s: float) -> list[Span]:
    spans: list[Span] = []

    def map_next(descriptor: int) -> None:
        pages = pager.open(descriptor, sizes[len(spans)])
        try:
            spans.append(pager.map([pages]))
        finally:
            pages.release()

    take(address, len(sizes), map_next, source=source, timeout_s=timeout_s)
    return spans
