"""Compiled exchanges: the links that all ranks wait for in one all-to-all, given the rows that travel (`links.py`).

What crosses nodes is every row, straight to the rank that computes it; or, where engines send a token once per node, a
token goes to the rank with its source's place in that node, which hands it on to every rank there that computes rows of
it, once to each (DeepEP). How many tokens have rows in a node, or at a rank, is then taken by chance (`tokens_to`).

Integers only. Knows rows, ranks and nodes. Does not know seconds.

Invariants (asserted by the tests):
1. Sending tokens once per node never sends more across than sending every row, and more rows never fewer tokens.
2. Pairs of experts chosen together never raise what crosses.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.links import RECEIVED_ACROSS, RECEIVED_INSIDE, SENT_ACROSS, SENT_INSIDE, Nodes


@compiled
def kept_permille(node_E: np.ndarray, nodes: int, pair_EE: np.ndarray, top_k: int) -> np.ndarray:
    """[N] thousandths of a node's rows that cross into it where engines send a token once per node.

    From the tokens S1 that chose each expert of the node and S2 that chose each pair, at most S1 - 2 S2 / k tokens came
    (exact where a token chose one or all k experts there, and for top-2); without pairs, S1: every row crosses.
    """
    kept_N = np.full(nodes, 1000)
    if len(pair_EE) == 0 or top_k < 2:
        return kept_N
    for node in range(nodes):
        single, double = np.int64(0), np.int64(0)
        for e in range(len(node_E)):
            if node_E[e] != node:
                continue
            single += pair_EE[e, e]
            for f in range(e + 1, len(node_E)):
                if node_E[f] == node:
                    double += pair_EE[e, f]
        if single > 0:
            kept_N[node] = max(np.int64(1), 1000 - 2000 * double // (top_k * single))
    return kept_N


@compiled
def tokens_to(rows: int, sent: int, top_k: int) -> int:
    """Tokens of a source with `sent` rows in all that have any of its `rows` rows for a node.

    By chance: each of a token's `top_k` choices falls there with the same share, independently. Shares are in 2^-20.
    """
    if rows <= 0:
        return 0
    one = np.int64(2**20)
    missed, choice = one, one - rows * one // sent
    for _ in range(top_k):
        missed = missed * choice // one
    tokens = (sent + top_k - 1) // top_k
    return min(rows, max(1, int((tokens * (one - missed) + one - 1) // one)))


class Busiest(NamedTuple):
    """The links that all wait for, in rows; tokens count as one."""

    inside: int
    """The busiest one inside nodes."""
    across: int
    """The busiest one across nodes."""
    all_inside: int
    """On all links inside nodes together."""
    all_across: int


@compiled
def busiest(
    link_R4: np.ndarray, to_RN: np.ndarray, row_R: np.ndarray, nodes: Nodes, keep_permille_N: np.ndarray, top_k: int
) -> Busiest:
    """Find the busiest links, sending or receiving.

    Args:
        link_R4: [R, 4] rows, columns as in `links.py`
        to_RN: [R, N] rows of each source for each node, if tokens are handed on inside; else empty
        row_R: [R] rows at each source
        nodes: which rank is where
        keep_permille_N: [N] thousandths of the rows into a node that cross at most, by pairs; all without them
        top_k: experts a token chooses
    """
    if len(to_RN) > 0:
        return _busiest_by_relay(link_R4, to_RN, row_R, nodes, keep_permille_N, top_k)
    # A rank receives what its node keeps; what it sends is thinned by the mean of all nodes.
    mean_keep = keep_permille_N.sum() // len(keep_permille_N)
    across, all_across = np.int64(0), np.int64(0)
    for r in range(len(link_R4)):
        received = link_R4[r, RECEIVED_ACROSS] * keep_permille_N[nodes.node_R[r]] // 1000
        across = max(across, max(link_R4[r, SENT_ACROSS] * mean_keep // 1000, received))
        all_across += received
    inside = max(link_R4[:, SENT_INSIDE].max(), link_R4[:, RECEIVED_INSIDE].max())
    return Busiest(inside, int(across), int(link_R4[:, SENT_INSIDE].sum()), int(all_across))


@compiled
def _busiest_by_relay(
    link_R4: np.ndarray, to_RN: np.ndarray, row_R: np.ndarray, nodes: Nodes, keep_permille_N: np.ndarray, top_k: int
) -> Busiest:
    """Tokens cross to the rank that has their source's place in each node; it hands them on, once to each rank."""
    _, by_node_R, start_N = nodes
    # Tokens sent and received across, rows to be handed on, and those of them that stay.
    relay_R4 = np.zeros((len(link_R4), 4), dtype=np.int64)
    for home in range(len(start_N) - 1):
        for place in range(start_N[home + 1] - start_N[home]):
            source = by_node_R[start_N[home] + place]
            for node in range(len(start_N) - 1):
                if node != home:
                    rows = to_RN[source, node]
                    tokens = min(tokens_to(rows, row_R[source], top_k), (rows * keep_permille_N[node] + 999) // 1000)
                    relay = by_node_R[start_N[node] + place % (start_N[node + 1] - start_N[node])]
                    relay_R4[source, 0] += tokens
                    relay_R4[relay, 1] += tokens
                    relay_R4[relay, 2] += rows
    inside, all_inside = np.int64(0), np.int64(0)
    for node in range(len(start_N) - 1):
        here = by_node_R[start_N[node] : start_N[node + 1]]
        far, rows, tokens = np.int64(0), np.int64(0), np.int64(0)
        for r in here:
            far += link_R4[r, RECEIVED_ACROSS]
        for r in here:
            # What a relay computes itself stays there: its share, in 2^-20, of what all hand on.
            relay_R4[r, 3] = relay_R4[r, 2] * ((link_R4[r, RECEIVED_ACROSS] << 20) // max(np.int64(1), far)) >> 20
            arrived = link_R4[r, RECEIVED_INSIDE] + link_R4[r, RECEIVED_ACROSS] - relay_R4[r, 3]
            came = tokens_to(arrived, row_R.sum() - row_R[r], top_k)
            inside = max(inside, came)
            rows += arrived
            tokens += came
        # As many rows leave the ranks of the node as arrive at them, and make as many tokens; in 2^-20.
        share = (tokens << 20) // max(np.int64(1), rows)
        for r in here:
            inside = max(inside, (link_R4[r, SENT_INSIDE] + relay_R4[r, 2] - relay_R4[r, 3]) * share >> 20)
        all_inside += tokens
    across = max(relay_R4[:, 0].max(), relay_R4[:, 1].max())
    return Busiest(int(inside), across, int(all_inside), int(relay_R4[:, 0].sum()))
