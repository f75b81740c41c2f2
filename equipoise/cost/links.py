"""Rows on links in one (micro-step, layer), compiled: how many rows each link carries, and which link is busiest.

1. `link_rows` adds up the rows if everything goes to the experts' homes.
2. `reroute` moves the rows of one replicated expert from the links to its home to those to its holders; `reroute_near`
   and `finish_near` do so faster where all holders are in the home's node. Rows split exactly as `core.split` says, but
   only their sums per link are kept: the planner counts links for every set of replicas that it tries.
3. `busiest` finds the links that all ranks wait for. Every row crosses nodes on its own; or, where engines send a token
   once per node (DeepEP), a token goes to the rank with its source's place in that node, which hands it on to every
   rank there that computes rows of it. How many tokens have rows in a node is then taken by chance (`tokens_to`).

Invariants (asserted by the tests):
1. Rows on the links equal those of the split that `core.split` makes.
2. Sending tokens once per node never sends more across than sending every row, and more rows never fewer tokens.
3. Pairs of experts chosen together never raise what crosses.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core import split
from equipoise.core.compiled import compiled, compiled_copies
from equipoise.core.split import Nodes

SENT_INSIDE, RECEIVED_INSIDE, SENT_ACROSS, RECEIVED_ACROSS = range(4)
"""Columns of a link table, rows each."""


# The rule of `core.split`, compiled.
nodes_of, fill_shares, fill_levels, *_, rows_between = compiled_copies(
    split.nodes_of,
    split.fill_shares,
    split.fill_levels,
    split.shares,
    split._pair,
    split._pair_by_node,
    split._add_evenly,
    split._add_local_first,
    split._add_in_proportion,
    split.add_split,
    split.rows_between,
)


class Holders(NamedTuple):
    """Who computes what in one (micro-step, layer)."""

    home_E: np.ndarray
    nodes: Nodes
    rep_expert_RS: np.ndarray
    rep_rows_RS: np.ndarray


class LinkRows(NamedTuple):
    """What one (micro-step, layer) sends if every row goes to its expert's home."""

    total_E: np.ndarray
    node_NE: np.ndarray
    """[N, E] rows by source node."""
    row_R: np.ndarray
    """[R] rows at each source."""
    link_R4: np.ndarray
    """[R, 4] rows sent inside, received inside, sent across, received across nodes."""
    to_RN: np.ndarray
    """[R, N] rows of each source for each node, its own included; empty where every row crosses on its own."""


@compiled
def link_rows(
    load_RE: np.ndarray, home_E: np.ndarray, node_R: np.ndarray, node_mask_NE: np.ndarray, forwards: bool
) -> LinkRows:
    """Add up rows by link; `node_mask_NE` is -1 where an expert's home is in the node, else 0 (see `home_nodes`).

    `forwards`: a token crosses to each node once and is handed on there, so rows are added up by node, too.
    """
    ranks, experts = load_RE.shape
    node_NE = np.zeros((len(node_mask_NE), experts), dtype=np.int64)
    row_R = np.zeros(ranks, dtype=np.int64)
    link_R4 = np.zeros((ranks, 4), dtype=np.int64)
    for s in range(ranks):
        load_E, mask_E, sum_E = load_RE[s], node_mask_NE[node_R[s]], node_NE[node_R[s]]
        row, inside = np.int64(0), np.int64(0)
        for e in range(experts):
            sum_E[e] += load_E[e]
            row += load_E[e]
            inside += load_E[e] & mask_E[e]
        row_R[s] = row
        link_R4[s, SENT_INSIDE] = inside
        link_R4[s, SENT_ACROSS] = row - inside
    total_E = node_NE.sum(axis=0)
    to_RN = np.zeros((ranks if forwards else 0, len(node_mask_NE)), dtype=np.int64)
    for s in range(len(to_RN)):
        for e in range(experts):
            to_RN[s, node_R[home_E[e]]] += load_RE[s, e]
    for e in range(experts):
        home = home_E[e]
        near, own = node_NE[node_R[home], e], load_RE[home, e]
        link_R4[home, SENT_INSIDE] -= own
        link_R4[home, RECEIVED_INSIDE] += near - own
        link_R4[home, RECEIVED_ACROSS] += total_E[e] - near
    return LinkRows(total_E, node_NE, row_R, link_R4, to_RN)


@compiled
def home_nodes(home_E: np.ndarray, node_R: np.ndarray) -> np.ndarray:
    """[N, E] -1 (all bits) where the expert's home is in the node, else 0."""
    mask_NE = np.zeros((node_R.max() + 1, len(home_E)), dtype=np.int64)
    for e in range(len(home_E)):
        mask_NE[node_R[home_E[e]], e] = -1
    return mask_NE


@compiled
def reroute(
    link_R4: np.ndarray,
    to_RN: np.ndarray,
    load_RE: np.ndarray,
    base: LinkRows,
    holders: Holders,
    expert: int,
    home_rows: int,
    in_proportion: bool,
    scratch_3R: np.ndarray,
) -> None:
    """Take a replicated expert's rows off the links to its home, and put them on those to its holders."""
    home, node_R = holders.home_E[expert], holders.nodes.node_R
    room_R, left_R = scratch_3R[0], scratch_3R[1]
    _take_off(link_R4, load_RE, base, holders, expert)
    for r in range(len(node_R)):
        left_R[r], room_R[r] = load_RE[r, expert], _room(holders, expert, home_rows, r)
        if r != home:
            link_R4[r, SENT_INSIDE if node_R[r] == node_R[home] else SENT_ACROSS] -= left_R[r]
        if len(to_RN) > 0:
            to_RN[r, node_R[home]] -= left_R[r]
    if in_proportion:
        _split_in_proportion(link_R4, to_RN, left_R, room_R, node_R, scratch_3R[2])
    else:
        _split_local_first(link_R4, to_RN, left_R, room_R, holders.nodes)


@compiled
def reroute_near(
    link_R4: np.ndarray,
    load_RE: np.ndarray,
    base: LinkRows,
    holders: Holders,
    expert: int,
    home_rows: int,
    part_3X: np.ndarray,
) -> None:
    """Begin `reroute` where all holders are in the home's node: who is outside sends across as before.

    Args:
        part_3X: [3, X] filled by `_split_in_node` for `finish_near`, which follows once this is done for all experts
    """
    nodes = holders.nodes
    node = nodes.node_R[holders.home_E[expert]]
    _take_off(link_R4, load_RE, base, holders, expert)
    _split_in_node(load_RE, holders, expert, home_rows, node, part_3X)
    for i in range(nodes.start_N[node + 1] - nodes.start_N[node]):
        link_R4[nodes.by_node_R[nodes.start_N[node] + i], RECEIVED_ACROSS] += part_3X[1, i]


@compiled
def _split_in_node(
    load_RE: np.ndarray, holders: Holders, expert: int, home_rows: int, node: int, part_3X: np.ndarray
) -> None:
    """Fill [3, X] for the ranks of a node that has all holders: rows each computes; those from other nodes; scratch.

    Rows from other nodes are those of splitting local first.
    """
    nodes = holders.nodes
    start = nodes.start_N[node]
    count = nodes.start_N[node + 1] - start
    quota_X, far_X, room_X = part_3X
    rows = np.int64(0)
    for i in range(count):
        r = nodes.by_node_R[start + i]
        quota_X[i] = _room(holders, expert, home_rows, r)
        own = min(load_RE[r, expert], quota_X[i])
        room_X[i] = quota_X[i] - own
        rows += load_RE[r, expert] - own
    fill_shares(rows, room_X, far_X, count)
    for i in range(count):
        far_X[i] = room_X[i] - far_X[i]


@compiled
def finish_near(
    link_R4: np.ndarray,
    load_RE: np.ndarray,
    holders: Holders,
    expert: int,
    node: int,
    part_3X: np.ndarray,
    is_dealt: bool,
) -> None:
    """Deal rows from other nodes evenly where `is_dealt`, then those of the node: step 4 of `core.split`."""
    home, nodes = holders.home_E[expert], holders.nodes
    start = nodes.start_N[node]
    count = nodes.start_N[node + 1] - start
    quota_X, far_X, level_X = part_3X
    rows = np.int64(0)
    for i in range(count):
        r = nodes.by_node_R[start + i]
        rows += far_X[i]
        link_R4[r, RECEIVED_ACROSS] -= far_X[i]
        level_X[i] = link_R4[r, RECEIVED_ACROSS]
    share_X = far_X
    if is_dealt:
        fill_levels(rows, quota_X, level_X, share_X, count)
    for i in range(count):
        r = nodes.by_node_R[start + i]
        load = load_RE[r, expert]
        own = min(load, quota_X[i] - share_X[i])
        link_R4[r, SENT_INSIDE] += load - own if r == home else -own
        link_R4[r, RECEIVED_INSIDE] += quota_X[i] - share_X[i] - own
        link_R4[r, RECEIVED_ACROSS] += share_X[i]


@compiled
def even_out(
    link_R4: np.ndarray, load_RE: np.ndarray, holders: Holders, expert: int, home_rows: int, part_3X: np.ndarray
) -> None:
    """Deal a rerouted expert's rows from other nodes evenly, where its holders share a node that is not its home's."""
    nodes = holders.nodes
    node = _common_node(holders, expert, home_rows)
    if node < 0:
        return
    _split_in_node(load_RE, holders, expert, home_rows, node, part_3X)
    for i in range(nodes.start_N[node + 1] - nodes.start_N[node]):
        # Off the links inside with what local first gave them; `finish_near` puts them back.
        r = nodes.by_node_R[nodes.start_N[node] + i]
        own = min(load_RE[r, expert], part_3X[0, i])
        link_R4[r, SENT_INSIDE] += own
        link_R4[r, RECEIVED_INSIDE] -= part_3X[0, i] - part_3X[1, i] - own
    finish_near(link_R4, load_RE, holders, expert, node, part_3X, True)


@compiled
def _common_node(holders: Holders, expert: int, home_rows: int) -> int:
    """The node of all holders that have rows, where there are several; -1 where there is none such."""
    node_R, home = holders.nodes.node_R, holders.home_E[expert]
    node, count = (node_R[home], 1) if home_rows > 0 else (-1, 0)
    for r in range(len(node_R)):
        for j in range(holders.rep_expert_RS.shape[1]):
            if holders.rep_expert_RS[r, j] == expert and holders.rep_rows_RS[r, j] > 0:
                if node >= 0 and node_R[r] != node:
                    return -1
                node = node_R[r]
                count += 1
    return node if count > 1 else -1


@compiled
def _take_off(link_R4: np.ndarray, load_RE: np.ndarray, base: LinkRows, holders: Holders, expert: int) -> None:
    """Take an expert's rows off the links into its home."""
    home = holders.home_E[expert]
    near = base.node_NE[holders.nodes.node_R[home], expert]
    link_R4[home, RECEIVED_INSIDE] -= near - load_RE[home, expert]
    link_R4[home, RECEIVED_ACROSS] -= base.total_E[expert] - near


@compiled
def _room(holders: Holders, expert: int, home_rows: int, rank: int) -> int:
    """Rows of an expert that a rank computes."""
    room = home_rows if rank == holders.home_E[expert] else np.int64(0)
    for j in range(holders.rep_expert_RS.shape[1]):
        if holders.rep_expert_RS[rank, j] == expert:
            room += holders.rep_rows_RS[rank, j]
    return room


@compiled
def _split_in_proportion(
    link_R4: np.ndarray,
    to_RN: np.ndarray,
    load_R: np.ndarray,
    room_R: np.ndarray,
    node_R: np.ndarray,
    share_R: np.ndarray,
) -> None:
    """Every source splits its rows over the holders as their room is; see `core.split`."""
    ranks = len(room_R)
    for s in range(ranks):
        fill_shares(load_R[s], room_R, share_R, ranks)
        for r in range(ranks):
            room_R[r] -= share_R[r]
            if len(to_RN) > 0:
                to_RN[s, node_R[r]] += share_R[r]
            if r != s:
                near = node_R[r] == node_R[s]
                link_R4[s, SENT_INSIDE if near else SENT_ACROSS] += share_R[r]
                link_R4[r, RECEIVED_INSIDE if near else RECEIVED_ACROSS] += share_R[r]


@compiled
def _split_local_first(
    link_R4: np.ndarray, to_RN: np.ndarray, left_R: np.ndarray, room_R: np.ndarray, nodes: Nodes
) -> None:
    """Own rank first, then own node in proportion, then the rest; see `core.split`."""
    own_R = np.minimum(left_R, room_R)
    for s in range(len(to_RN)):
        to_RN[s, nodes.node_R[s]] += left_R[s]
    left_R -= own_R
    room_R -= own_R
    for node in range(len(nodes.start_N) - 1):
        here = nodes.by_node_R[nodes.start_N[node] : nodes.start_N[node + 1]]
        rows = min(left_R[here].sum(), room_R[here].sum())
        for side_R, column in ((left_R, SENT_INSIDE), (room_R, RECEIVED_INSIDE)):
            share_X = np.zeros(len(here), dtype=np.int64)
            fill_shares(rows, side_R[here], share_X, len(here))
            for i in range(len(here)):
                side_R[here[i]] -= share_X[i]
                link_R4[here[i], column] += share_X[i]
    for r in range(len(left_R)):
        link_R4[r, SENT_ACROSS] += left_R[r]
        link_R4[r, RECEIVED_ACROSS] += room_R[r]
    if len(to_RN) > 0:
        _add_far(to_RN, left_R, room_R, nodes)


@compiled
def _add_far(to_RN: np.ndarray, left_R: np.ndarray, room_R: np.ndarray, nodes: Nodes) -> None:
    """Move what is left at each source from its own node to those of the holders, node by node; spends `room_R`."""
    share_R = np.zeros_like(room_R)
    for node in range(len(nodes.start_N) - 1):
        here = nodes.by_node_R[nodes.start_N[node] : nodes.start_N[node + 1]]
        fill_shares(left_R[here].sum(), room_R, share_R, len(room_R))
        room_R -= share_R
        holder = 0
        for s in here:
            left = left_R[s]
            to_RN[s, node] -= left
            while left > 0:
                rows = min(left, share_R[holder])
                to_RN[s, nodes.node_R[holder]] += rows
                share_R[holder] -= rows
                left -= rows
                holder += share_R[holder] == 0


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


@compiled
def tokens_between(rows_RR: np.ndarray, node_R: np.ndarray, top_k: int) -> np.ndarray:
    """[R, R] tokens from rank to rank, given rows from source to holder.

    A token goes once to each rank of its own node that computes rows of it; to another node once, to the rank with its
    source's place, which hands it on likewise.
    """
    _, by_node_R, start_N = nodes_of(node_R)
    moved_RR = np.zeros_like(rows_RR)
    for home in range(len(start_N) - 1):
        for place in range(start_N[home + 1] - start_N[home]):
            source = by_node_R[start_N[home] + place]
            sent = rows_RR[source].sum()
            for node in range(len(start_N) - 1):
                here = by_node_R[start_N[node] : start_N[node + 1]]
                relay = source if node == home else here[place % len(here)]
                if node != home:
                    moved_RR[source, relay] += tokens_to(rows_RR[source][here].sum(), sent, top_k)
                for r in here:
                    if r != relay:
                        moved_RR[relay, r] += tokens_to(rows_RR[source, r], sent, top_k)
    return moved_RR
