"""The price of one (micro-step, layer) in plain words: what `kernels.py` computes, the same to the nanosecond.

Never optimised. It builds the whole split with `split_reference` and reads every figure off it:
1. compute: the busiest rank, by its rows and its non-empty slots;
2. exchange: rows over the busiest link, sent or received, inside nodes and across them;
3. pull: how much later than its window a rank has its replicas, forward and backward, or a home has served them, and
   how much longer the slowest rank computes beside its pulls;
4. return: how much later than the backward window gradients are home and added up, and adding that sum to the home's.
"""

import numpy as np

from equipoise.cost.kernels import ACROSS, COMPUTE, EXCHANGE, HOST_PULLS, INSIDE, PEER_PULLS, PULL, RETURN
from equipoise.cost.model import Tables, interpolate
from tests.core.split_reference import split_in_proportion, split_rows


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
    """Price one (micro-step, layer) and return its nanoseconds; the parts go into `line`. See `kernels.price`."""
    quota_ER = quotas(load_RE.sum(axis=0), home_E, rep_expert_RS, rep_rows_RS)
    line[:] = 0
    busy = zip(quota_ER.sum(axis=0), (quota_ER > 0).sum(axis=0), strict=True)
    compute = [interpolate(tables.rows_X, tables.compute_ns_SX[slots], int(rows)) for rows, slots in busy]
    line[COMPUTE] = max(compute)
    local_RER = split_rows(load_RE, quota_ER, node_R=node_R)
    split_RER = split_in_proportion(load_RE, quota_ER) if persistent else local_RER
    exchange(split_RER, node_R, keep_permille_N, tables, line)
    if not persistent:
        held = [(int(rep_expert_RS[r, j]), int(r)) for r, j in np.argwhere(rep_rows_RS > 0)]
        transfers(held, home_E, node_R, compute, windows_ns(load_RE, tables), tables, line)
    return int(line[COMPUTE] + line[EXCHANGE] + line[PULL] + line[RETURN])


def quotas(load_E: np.ndarray, home_E: np.ndarray, rep_expert_RS: np.ndarray, rep_rows_RS: np.ndarray) -> np.ndarray:
    """[E, R] rows each holder takes: replicas what their slots say, the home the rest."""
    experts, ranks = len(load_E), len(rep_expert_RS)
    quota_ER = np.zeros((experts, ranks), dtype=np.int64)
    quota_ER[np.arange(experts), home_E] = load_E
    for rank in range(ranks):
        for expert, rows in zip(rep_expert_RS[rank], rep_rows_RS[rank], strict=True):
            if expert >= 0:
                quota_ER[expert, rank] += rows
                quota_ER[expert, home_E[expert]] -= rows
    return quota_ER


def exchange(
    split_RER: np.ndarray, node_R: np.ndarray, keep_permille_N: np.ndarray, tables: Tables, line: np.ndarray
) -> None:
    """Rows over the busiest link, and what all exchanges of them take."""
    same_RR = node_R[:, None] == node_R[None, :]
    inside_RR = split_RER.sum(axis=1) * (same_RR & ~np.eye(len(node_R), dtype=np.bool_))
    across_RR = split_RER.sum(axis=1) * ~same_RR
    if tables.forwards:
        # A token crosses once to each node, to its source's relay there, which hands it on once to each rank.
        row_R = split_RER.sum(axis=(1, 2))
        tokens_RR, handed_RR = by_relay(across_RR, row_R, node_R, keep_permille_N, tables.top_k)
        received_R, sent_R = tokens_RR.sum(axis=0), tokens_RR.sum(axis=1)
        # What a relay computes itself stays there: its share of what all relays of the node hand on.
        handed_R, far_R = handed_RR.sum(axis=1), across_RR.sum(axis=0)
        far_N = np.bincount(node_R, weights=far_R).astype(np.int64)
        stays_R = handed_R * ((far_R << 20) // np.maximum(1, far_N[node_R])) >> 20
        rows_R = inside_RR.sum(axis=0) + far_R - stays_R
        left_R = inside_RR.sum(axis=1) + handed_R - stays_R
        others_R = row_R.sum() - row_R
        pairs = zip(rows_R.tolist(), others_R.tolist(), strict=True)
        arrived_R = np.array([tokens_to(rows, sent, tables.top_k) for rows, sent in pairs])
        for node in range(node_R.max() + 1):
            here_R = node_R == node
            share = (int(arrived_R[here_R].sum()) << 20) // max(1, int(rows_R[here_R].sum()))
            left_R[here_R] = left_R[here_R] * share >> 20
    else:
        # A rank receives what its node keeps, and what it sends is thinned by the mean of all nodes.
        sent_R = across_RR.sum(axis=1) * (keep_permille_N.sum() // len(keep_permille_N)) // 1000
        received_R = across_RR.sum(axis=0) * keep_permille_N[node_R] // 1000
        arrived_R, left_R = inside_RR.sum(axis=0), inside_RR.sum(axis=1)
    line[INSIDE], line[ACROSS] = arrived_R.sum(), received_R.sum()
    inside, across = max(arrived_R.max(), left_R.max()), max(sent_R.max(), received_R.max())
    busiest_ps = max(inside * tables.inside_ps, across * tables.across_ps)
    line[EXCHANGE] = tables.exchanges * (tables.exchange_fixed_ns + busiest_ps // 1000)


def by_relay(
    across_RR: np.ndarray, row_R: np.ndarray, node_R: np.ndarray, keep_permille_N: np.ndarray, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """([R source, R relay] tokens that cross, [R relay, R holder] rows handed on). See `exchange.busiest`."""
    tokens_RR, handed_RR = np.zeros_like(across_RR), np.zeros_like(across_RR)
    members = [np.flatnonzero(node_R == node).tolist() for node in range(node_R.max() + 1)]
    for source in range(len(node_R)):
        place = members[node_R[source]].index(source)
        for node, there in enumerate(members):
            if node != node_R[source]:
                relay, rows = there[place % len(there)], int(across_RR[source, there].sum())
                at_most = -(-rows * int(keep_permille_N[node]) // 1000)
                tokens_RR[source, relay] += min(at_most, tokens_to(rows, int(row_R[source]), top_k))
                handed_RR[relay, there] += across_RR[source, there]
    return tokens_RR, handed_RR


def tokens_to(rows: int, sent: int, top_k: int) -> int:
    """Tokens that have any of `rows` of a source's `sent` rows. See `exchange.tokens_to`."""
    if rows == 0:
        return 0
    one, tokens = 2**20, -(-sent // top_k)
    missed, choice = one, one - rows * one // sent
    for _ in range(top_k):
        missed = missed * choice // one
    return min(rows, max(1, -(-tokens * (one - missed) // one)))


def windows_ns(load_RE: np.ndarray, tables: Tables) -> tuple[int, int, int]:
    """What pulls can hide behind, forward and backward, and what returns can. See `kernels.windows_ns`."""
    ranks, experts = load_RE.shape
    tokens = -(-int(load_RE.sum(axis=1).max()) // tables.top_k)
    mean_rows = -(-int(load_RE.sum()) // ranks)
    mean = interpolate(tables.rows_X, tables.compute_ns_SX[experts // ranks], mean_rows)
    # Forward is about a third of forward + backward.
    own, compute = tokens * tables.window_ps // 1000, mean // 3 if tables.phases == 2 else mean
    attention = tokens * tables.backward_window_ps // 1000
    # A window's first visit, of depth 0, has its own attention alone; backward is never first.
    forward = tables.depth * (own + compute) if tables.depth else own
    return forward, max(1, tables.depth) * (attention + mean * 2 // 3), attention


def transfers(
    replicas: list[tuple[int, int]],
    home_E: np.ndarray,
    node_R: np.ndarray,
    compute: list[int],
    windows: tuple[int, int, int],
    tables: Tables,
    line: np.ndarray,
) -> None:
    """Exposed pulls and returns of the replicas, given as (expert, rank), and what pulls slow."""
    ranks, slowed = range(len(node_R)), compute.copy()
    into = [sum(rank == r for _, rank in replicas) for r in ranks]
    out = [sum(home_E[e] == r for e, _ in replicas) for r in ranks]
    far = [sum(rank == r and node_R[home_E[e]] != node_R[r] for e, rank in replicas) for r in ranks]
    for phase in range(tables.phases):
        window = windows[phase]
        # Experts of another node come from the host store, all others from a peer.
        line[HOST_PULLS] += sum(far)
        line[PEER_PULLS] += len(replicas) - sum(far)
        late = [pull_ns(far[r], into[r] - far[r], tables) - window for r in ranks if into[r]]
        if phase == 0:
            # A home serves its pulls one after another, too.
            late += [served * tables.peer_ns - window for served in out]
        line[PULL] += max(0, *late) if late else 0
        slowed = [slowed[r] + slow_ns(far[r], into[r] - far[r], tables) for r in ranks]
    line[PULL] += max(slowed) - max(compute)
    if tables.phases == 2 and replicas:
        took = {
            (e, r): tables.far_return_ns if node_R[home_E[e]] != node_R[r] else tables.return_ns for e, r in replicas
        }
        sent = [sum(ns for (_, rank), ns in took.items() if rank == r) for r in ranks]
        arrived = [sum(ns for (e, _), ns in took.items() if home_E[e] == r) for r in ranks]
        line[RETURN] = max(0, max(*sent, *arrived) - windows[2]) + max(out) * tables.add_ns


def slow_ns(by_host: int, by_peer: int, tables: Tables) -> int:
    """Nanoseconds by which a rank's pulls make the compute beside them longer."""
    host = pull_ns(by_host, 0, tables) * tables.host_slow_permille
    return (host + pull_ns(0, by_peer, tables) * tables.peer_slow_permille) // 1000


def pull_ns(by_host: int, by_peer: int, tables: Tables) -> int:
    """Nanoseconds until all pulls of one rank are there; the two paths run side by side."""
    host = tables.host_fixed_ns + by_host * tables.host_ns if by_host else 0
    peer = tables.peer_fixed_ns + by_peer * tables.peer_ns if by_peer else 0
    return max(host, peer)


def kept_permille(node_E: np.ndarray, nodes: int, pair_EE: np.ndarray, top_k: int) -> np.ndarray:
    """[N] thousandths of a node's rows that cross into it. See `exchange.kept_permille`."""
    kept_N = np.full(nodes, 1000)
    if len(pair_EE) == 0 or top_k < 2:
        return kept_N
    for node in range(nodes):
        here_EE = pair_EE[np.ix_(node_E == node, node_E == node)]
        single, double = int(np.trace(here_EE)), int(np.triu(here_EE, k=1).sum())
        if single:
            kept_N[node] = max(1, 1000 - 2000 * double // (top_k * single))
    return kept_N
