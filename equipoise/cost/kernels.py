"""Prices of one (micro-step, layer), compiled: the arithmetic of `model.py` for the planner's inner loops.

Integers only. A holder table names what each rank computes beyond its homes: `rep_expert_RS` (-1: empty slot) and
`rep_rows_RS`. Rows split over holders exactly as `core.split` does: local first, or in proportion.

Invariants (asserted by the tests):
1. `compute_ns` equals `CostModel.compute_ns`; exchanged rows equal those of `core.split`.
2. Without replicas nothing is charged for pulls or returns.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.links import (
    RECEIVED_ACROSS,
    SENT_ACROSS,
    Holders,
    LinkRows,
    busiest,
    even_out,
    finish_near,
    home_nodes,
    link_rows,
    nodes_of,
    reroute,
    reroute_near,
)
from equipoise.cost.model import Tables

COMPUTE, EXCHANGE, PULL, RETURN = range(4)
"""Columns of a price line, nanoseconds each."""
INSIDE, ACROSS, HOST_PULLS, PEER_PULLS = range(4, 8)
"""Further columns: rows exchanged inside and across nodes, replicas pulled by path, all ranks together."""
COLUMNS = 8


class EntryWork(NamedTuple):
    """What every rank does in one (micro-step, layer)."""

    rows_R: np.ndarray
    """[R] rows it computes."""
    busy_R: np.ndarray
    """[R] its slots that have rows."""
    link_R4: np.ndarray
    """[R, 4] rows on its links, columns as in `links.py`."""
    to_RN: np.ndarray
    """[R, N] rows it sends to each node, where tokens are handed on inside; else empty."""


@compiled
def compute_ns(tables: Tables, rows: int, slots: int) -> int:
    """Nanoseconds of `rows` rows in `slots` non-empty slots."""
    if rows <= 0:
        return np.int64(0)
    rows_X, ns_X = tables.rows_X, tables.compute_ns_SX[slots]
    if rows <= rows_X[1]:
        return ns_X[1]
    last = len(rows_X) - 1
    i = 2
    while i < last and rows_X[i] < rows:
        i += 1
    rise, span, past = ns_X[i] - ns_X[i - 1], rows_X[i] - rows_X[i - 1], rows - rows_X[i - 1]
    if past <= span:
        return ns_X[i - 1] + rise * past // span
    # Far beyond the table the product of all rows with the rise is more than int64 holds: whole spans first.
    return ns_X[i - 1] + past // span * rise + past % span * rise // span


@compiled
def price(
    load_RE: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
    keep_permille_N: np.ndarray,
    tables: Tables,
    persistent: bool,
    line: np.ndarray,
) -> int:
    """Price one (micro-step, layer) and return its nanoseconds; the parts go into `line` (see the columns above).

    Args:
        load_RE: [R, E] rows by source
        keep_permille_N: [N] thousandths of the rows into a node that cross at most; see `links.kept_permille`
        persistent: replicas stay for the whole window, so nothing is pulled or returned here; rows split in proportion
    """
    base = link_rows(load_RE, home_E, node_R, home_nodes(home_E, node_R), tables.forwards == 1)
    holders = Holders(home_E, nodes_of(node_R), rep_expert_RS, rep_rows_RS)
    return price_holders(load_RE, base, holders, keep_permille_N, tables, persistent, line)


@compiled
def price_holders(
    load_RE: np.ndarray,
    base: LinkRows,
    holders: Holders,
    keep_permille_N: np.ndarray,
    tables: Tables,
    persistent: bool,
    line: np.ndarray,
) -> int:
    """`price` for rows already added up by link, which several holder tables on the same homes share."""
    work = count_links(load_RE, base, holders, persistent)
    return price_work(work, base, holders, keep_permille_N, tables, persistent, line)


@compiled
def price_work(
    work: EntryWork,
    base: LinkRows,
    holders: Holders,
    keep_permille_N: np.ndarray,
    tables: Tables,
    persistent: bool,
    line: np.ndarray,
) -> int:
    """`price_holders` where the work of every rank is known already."""
    home_E, nodes, rep_expert_RS, rep_rows_RS = holders
    line[:] = 0
    compute_R = np.zeros(len(work.rows_R), dtype=np.int64)
    for r in range(len(compute_R)):
        compute_R[r] = compute_ns(tables, work.rows_R[r], work.busy_R[r])
    line[COMPUTE] = compute_R.max()
    links = busiest(work.link_R4, work.to_RN, base.row_R, nodes, keep_permille_N, tables.top_k)
    line[INSIDE], line[ACROSS] = links.all_inside, links.all_across
    busiest_ps = max(links.inside * tables.inside_ps, links.across * tables.across_ps)
    line[EXCHANGE] = tables.exchanges * (tables.exchange_fixed_ns + busiest_ps // 1000)
    if not persistent and rep_expert_RS.shape[1] > 0:
        windows = windows_ns(base.row_R, len(home_E), tables)
        _transfers(home_E, nodes.node_R, rep_expert_RS, rep_rows_RS, compute_R, windows, tables, line)
    return line[COMPUTE] + line[EXCHANGE] + line[PULL] + line[RETURN]


@compiled
def count_links(load_RE: np.ndarray, base: LinkRows, holders: Holders, in_proportion: bool) -> EntryWork:
    """Count what every rank computes, and the rows on its links, once replicas have taken their rows."""
    home_E, nodes, rep_expert_RS, rep_rows_RS = holders
    ranks, slots = rep_expert_RS.shape
    node_R = nodes.node_R
    quota_E = base.total_E.copy()
    far_E = np.zeros(len(home_E), dtype=np.bool_)
    link_R4, to_RN = base.link_R4.copy(), base.to_RN.copy()
    scratch_3R = np.zeros((3, ranks), dtype=np.int64)
    rows_R, busy_R = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    for r in range(ranks):
        for j in range(slots):
            if rep_rows_RS[r, j] > 0:
                e = rep_expert_RS[r, j]
                quota_E[e] -= rep_rows_RS[r, j]
                rows_R[r] += rep_rows_RS[r, j]
                busy_R[r] += 1
                far_E[e] |= node_R[r] != node_R[home_E[e]]
    most = ranks if len(nodes.start_N) == 2 else (nodes.start_N[1:] - nodes.start_N[:-1]).max()
    part_E3X = np.empty((len(home_E) if slots > 0 and not in_proportion else 0, 3, most), dtype=np.int64)
    for e in range(len(home_E)):
        if quota_E[e] > 0:
            rows_R[home_E[e]] += quota_E[e]
            busy_R[home_E[e]] += 1
        if quota_E[e] < base.total_E[e]:
            if far_E[e] or in_proportion:
                reroute(link_R4, to_RN, load_RE, base, holders, e, quota_E[e], in_proportion, scratch_3R)
            else:
                reroute_near(link_R4, load_RE, base, holders, e, quota_E[e], part_E3X[e])
    is_dealt = link_R4[:, RECEIVED_ACROSS].max() > link_R4[:, SENT_ACROSS].max()
    for e in range(len(part_E3X)):
        if quota_E[e] < base.total_E[e]:
            if not far_E[e]:
                finish_near(link_R4, load_RE, holders, e, node_R[home_E[e]], part_E3X[e], is_dealt)
            elif is_dealt and quota_E[e] == 0:
                even_out(link_R4, load_RE, holders, e, quota_E[e], part_E3X[e])
    return EntryWork(rows_R, busy_R, link_R4, to_RN)


@compiled
def windows_ns(row_R: np.ndarray, experts: int, tables: Tables) -> tuple[int, int, int]:
    """What pulls can hide behind, forward and backward, and what returns can.

    Pulls have attention of the fullest source and mean expert compute, `depth` times; those of a window's first visit
    (depth 0) have its own attention alone, and backward is never first. A return starts when the experts' backward
    has ended, and has the attention's backward alone.
    """
    ranks = len(row_R)
    tokens = (row_R.max() + tables.top_k - 1) // tables.top_k
    mean_rows = (row_R.sum() + ranks - 1) // ranks
    mean = compute_ns(tables, mean_rows, min(experts // ranks, len(tables.compute_ns_SX) - 1))
    # Forward is about a third of forward + backward.
    own, compute = tokens * tables.window_ps // 1000, mean // 3 if tables.phases == 2 else mean
    attention = tokens * tables.backward_window_ps // 1000
    forward = own if tables.depth == 0 else tables.depth * (own + compute)
    return forward, max(1, tables.depth) * (attention + mean * 2 // 3), attention


@compiled
def _transfers(
    home_E: np.ndarray,
    node_R: np.ndarray,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
    compute_R: np.ndarray,
    windows: tuple[int, int, int],
    tables: Tables,
    line: np.ndarray,
) -> None:
    """Exposed pulls and returns of one (micro-step, layer), and by how much pulls make the slowest rank slower."""
    ranks = len(node_R)
    forward_ns, backward_ns, attention_ns = windows
    in_R = np.zeros(ranks, dtype=np.int64)
    out_R = np.zeros(ranks, dtype=np.int64)
    far_R = np.zeros(ranks, dtype=np.int64)
    sent_ns_R, got_ns_R = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    for r in range(ranks):
        for j in range(rep_expert_RS.shape[1]):
            e = rep_expert_RS[r, j]
            if e >= 0 and rep_rows_RS[r, j] > 0:
                in_R[r] += 1
                out_R[home_E[e]] += 1
                is_far = node_R[home_E[e]] != node_R[r]
                far_R[r] += is_far
                back_ns = tables.far_return_ns if is_far else tables.return_ns
                sent_ns_R[r] += back_ns
                got_ns_R[home_E[e]] += back_ns
    late_forward, late_backward, return_ns, most_out = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    slowest = np.int64(0)
    for r in range(ranks):
        slowed = compute_R[r]
        if in_R[r] > 0:
            # From a peer, unless only the host store of the node has the weights.
            by_host, by_peer = far_R[r], in_R[r] - far_R[r]
            line[HOST_PULLS] += tables.phases * by_host
            line[PEER_PULLS] += tables.phases * by_peer
            took = pull_ns(by_host, by_peer, tables)
            late_forward = max(late_forward, took - forward_ns)
            if tables.phases == 2:
                late_backward = max(late_backward, took - backward_ns)
            slowed += tables.phases * slow_ns(by_host, by_peer, tables)
        slowest = max(slowest, slowed)
        # A home serves its pulls one after another, too.
        late_forward = max(late_forward, out_R[r] * tables.peer_ns - forward_ns)
        return_ns, most_out = max(return_ns, max(sent_ns_R[r], got_ns_R[r])), max(most_out, out_R[r])
    line[PULL] = late_forward + late_backward + slowest - line[COMPUTE]
    if tables.phases == 2 and most_out > 0:
        # A home adds returned gradients to its own one after another, once attention's backward is over.
        line[RETURN] = max(np.int64(0), return_ns - attention_ns) + most_out * tables.add_ns


@compiled
def slow_ns(by_host: int, by_peer: int, tables: Tables) -> int:
    """Nanoseconds by which a rank's pulls make the compute beside them longer."""
    host, peer = pull_ns(by_host, 0, tables), pull_ns(0, by_peer, tables)
    return (host * tables.host_slow_permille + peer * tables.peer_slow_permille) // 1000


@compiled
def pull_ns(by_host: int, by_peer: int, tables: Tables) -> int:
    """Nanoseconds until all pulls of one rank are there; the two paths run side by side."""
    host = by_host * tables.host_ns + (tables.host_fixed_ns if by_host else 0)
    peer = by_peer * tables.peer_ns + (tables.peer_fixed_ns if by_peer else 0)
    return max(host, peer)
