"""Replicas of one layer: who computes which rows in each micro-step, given homes.

1. `evaluate` prices every micro-step without replicas, then with those that level ranks, then with trades, and keeps
   what is cheapest.
2. `fill` levels the ranks of a node like an alias table: it brings the emptiest rank up to the bound from one expert of
   the fullest. `rebalance_rows` then shifts rows between holders until no chain of shifts lowers the busiest rank.
3. `trade_across` and `trade_inside` let ranks exchange rows, so that less crosses nodes, or more evenly.

A table of holders names what ranks compute beyond their homes: `rep_expert_RS` (-1: free slot) and `rep_rows_RS`.
Integers only; ties by index. `tests/planner/reference.py`, `fill_reference.py` and `trade_reference.py` specify these
kernels in plain Python.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.kernels import COLUMNS, PULL, RETURN, EntryWork, count_links, price_holders, price_work
from equipoise.cost.links import (
    RECEIVED_ACROSS,
    SENT_ACROSS,
    Holders,
    LinkRows,
    home_nodes,
    kept_permille,
    link_rows,
    nodes_of,
)
from equipoise.cost.model import Tables

SLACK_UNIT = 64
"""Parts of what the busiest rank has above the bound, in which slack is given."""
SLACKS = (0, 4, 8, 16, 24, 32, 48)
"""How much of that excess may stay, as tried one after another: less level, fewer replicas."""
CHEAP = 32
"""Pulls and returns that cost no more than this fraction of an entry (one in 32) are not worth saving."""


class LayerProblem(NamedTuple):
    """What every layer of a window shares."""

    node_R: np.ndarray
    domain_DR: np.ndarray
    """[D, R] what replicas stay in: the node of each rank; then, where they may cross nodes, 0 for all."""
    trades_across: int
    """1: where replicas may cross nodes, they are also traded for what then does not cross."""
    slots: int
    min_rows: int
    by_skew: int
    """1: minimise the busiest rank's rows; 0: minimise nanoseconds."""
    gated: int
    """1: replicas only where they pay."""
    is_warm: int
    """1: the search starts from an earlier window's homes."""
    budget: int
    """Most experts of a layer that may be displaced."""
    patience: int
    """Swaps without improvement before `level` stops."""
    max_checks: int
    """Swaps `polish` may look at."""
    near_checks: int
    """Swaps `near` may look at."""
    near_steps: int
    """Micro-steps that `near` looks at, evenly spaced, where a window has more."""
    row_weight: int
    """Price of one more row to compute at every rank of the fullest node, in 1/1024 rows of the busiest rank."""
    link_weight: int
    """Price of one more row on the busiest link across nodes, in the same."""
    cost_inside: int
    """Price of displacing one expert inside its node, in 1/1024 rows of the busiest rank."""
    cost_across: int
    layers: int
    """Layers of the window, behind which edges hide."""
    edge_ns_22: np.ndarray
    """[2, 2] publish and collect of one expert over one link, inside a node and across."""
    edge_fixed_ns: int
    """What an edge takes beyond that."""
    crossing_ns: int
    """Bringing one expert to the host store of another node when its layer is published, over one link."""
    hides_2: np.ndarray
    """[2] what another layer's mean visit hides of a publish, and of a collect, in nanoseconds."""
    edge_slow_22: np.ndarray
    """[2, 2] how much longer publish and collect of one expert make the compute beside them, inside and across."""


class LayerPlan(NamedTuple):
    """What one layer's planning decided."""

    home_E: np.ndarray
    rep_expert_MRS: np.ndarray
    """[M, R, S] expert of each replica slot; -1: empty."""
    rep_rows_MRS: np.ndarray
    line_MC: np.ndarray
    """[M, COLUMNS] price line of each micro-step, as chosen."""
    closed_MC: np.ndarray
    """[M, COLUMNS] the same homes without replicas."""


@compiled
def fill(
    load_E: np.ndarray,
    home_E: np.ndarray,
    homes_RH: np.ndarray,
    domain_DR: np.ndarray,
    min_rows: int,
    slack: int,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
) -> int:
    """Choose replicas and their rows for one (micro-step, layer); return the rows of the busiest rank.

    Writes them into `rep_expert_RS` and `rep_rows_RS`, whose width is the number of slots. See `fill_reference.fill`.
    """
    ranks, slots = rep_expert_RS.shape
    quota_E = load_E.copy()
    load_R = np.zeros(ranks, dtype=np.int64)
    for r in range(ranks):
        for i in range(homes_RH.shape[1]):
            load_R[r] += load_E[homes_RH[r, i]]
    rep_expert_RS[:] = -1
    rep_rows_RS[:] = 0
    if slots > 0:
        widest_R = domain_DR[-1]
        bound = node_bound(load_R, widest_R)
        cap = bound + (load_R.max() - bound) * slack // SLACK_UNIT
        for domain_R in domain_DR:
            for node in range(domain_R.max() + 1):
                _fill_node(load_R, quota_E, homes_RH, domain_R, node, cap, min_rows, rep_expert_RS, rep_rows_RS)
        rebalance_rows(load_R, quota_E, home_E, widest_R, rep_expert_RS, rep_rows_RS, bound)
        # Rebalancing can leave a replica without a row: nothing is pulled for it.
        for r in range(ranks):
            for j in range(slots):
                if rep_rows_RS[r, j] == 0:
                    rep_expert_RS[r, j] = -1
    return load_R.max()


@compiled
def node_bound(load_R: np.ndarray, node_R: np.ndarray) -> int:
    """The least rows of the busiest rank that replicas inside nodes can reach: the fullest node's mean, rounded up."""
    total_N = np.zeros(node_R.max() + 1, dtype=np.int64)
    ranks_N = np.zeros(node_R.max() + 1, dtype=np.int64)
    for r in range(len(node_R)):
        total_N[node_R[r]] += load_R[r]
        ranks_N[node_R[r]] += 1
    bound = np.int64(0)
    for node in range(len(total_N)):
        bound = max(bound, (total_N[node] + ranks_N[node] - 1) // ranks_N[node])
    return bound


@compiled
def _fill_node(
    load_R: np.ndarray,
    quota_E: np.ndarray,
    homes_RH: np.ndarray,
    node_R: np.ndarray,
    node: int,
    cap: int,
    min_rows: int,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
) -> None:
    """Bring the emptiest rank up to `cap` from one expert of the fullest, until nobody is above `cap`."""
    ranks, slots = rep_expert_RS.shape
    used_R = np.zeros(ranks, dtype=np.int64)
    for r in range(ranks):
        for j in range(slots):
            used_R[r] += rep_expert_RS[r, j] >= 0
    members = np.flatnonzero(node_R == node)
    while True:
        donor, receiver, above = -1, -1, 0
        for r in members:
            if donor < 0 or load_R[r] > load_R[donor]:
                donor = r
            if used_R[r] < slots and (receiver < 0 or load_R[r] < load_R[receiver]):
                receiver = r
            if load_R[r] > cap:
                above += 1
        if above == 0 or receiver < 0 or receiver == donor:
            return
        want = cap - load_R[receiver]
        if above == 1:
            want = min(want, load_R[donor] - cap)
        expert = _pick(quota_E, homes_RH, donor, want, rep_expert_RS, receiver)
        if expert < 0 or min(want, quota_E[expert]) < min_rows:
            return
        rows = min(want, quota_E[expert])
        quota_E[expert] -= rows
        load_R[donor] -= rows
        load_R[receiver] += rows
        rep_expert_RS[receiver, used_R[receiver]] = expert
        rep_rows_RS[receiver, used_R[receiver]] = rows
        used_R[receiver] += 1


@compiled
def _pick(
    quota_E: np.ndarray, homes_RH: np.ndarray, donor: int, want: int, rep_expert_RS: np.ndarray, receiver: int
) -> int:
    """The donor's smallest home expert with at least `want` rows left, else its largest; never one already held."""
    enough, largest = -1, -1
    for i in range(homes_RH.shape[1]):
        e = homes_RH[donor, i]
        is_held = False
        for j in range(rep_expert_RS.shape[1]):
            is_held |= rep_expert_RS[receiver, j] == e
        if quota_E[e] <= 0 or is_held:
            continue
        if largest < 0 or quota_E[e] > quota_E[largest]:
            largest = e
        if quota_E[e] >= want and (enough < 0 or quota_E[e] < quota_E[enough]):
            enough = e
    return enough if enough >= 0 else largest


@compiled
def rebalance_rows(
    load_R: np.ndarray,
    quota_E: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
    cap: int,
) -> None:
    """Shift rows between holders until no chain of shifts lowers the busiest rank."""
    ranks = len(rep_expert_RS)
    from_R = np.empty(ranks, dtype=np.int64)
    via_R = np.empty(ranks, dtype=np.int64)
    queue = np.empty(ranks, dtype=np.int64)
    while True:
        top = load_R.argmax()
        if load_R[top] <= cap:
            return
        # Breadth first from the busiest rank along holders that share an expert.
        from_R[:] = -1
        from_R[top] = top
        queue[0] = top
        head, tail, goal = 0, 1, -1
        while head < tail and goal < 0:
            a = queue[head]
            head += 1
            for b in range(ranks):
                if from_R[b] >= 0 or node_R[b] != node_R[top]:
                    continue
                shared = _shared(a, b, quota_E, home_E, rep_expert_RS, rep_rows_RS)
                if shared < 0:
                    continue
                from_R[b] = a
                via_R[b] = shared
                queue[tail] = b
                tail += 1
                if load_R[b] < load_R[top] - 1:
                    goal = b
                    break
        if goal < 0:
            return
        rows = (load_R[top] - load_R[goal]) // 2
        b = goal
        while b != top:
            rows = min(rows, _held(from_R[b], via_R[b], quota_E, home_E, rep_expert_RS, rep_rows_RS))
            b = from_R[b]
        b = goal
        while b != top:
            a, e = from_R[b], via_R[b]
            _shift(a, e, -rows, quota_E, home_E, rep_expert_RS, rep_rows_RS)
            _shift(b, e, rows, quota_E, home_E, rep_expert_RS, rep_rows_RS)
            b = a
        load_R[top] -= rows
        load_R[goal] += rows


@compiled
def _held(
    rank: int, e: int, quota_E: np.ndarray, home_E: np.ndarray, rep_expert_RS: np.ndarray, rep_rows_RS: np.ndarray
) -> int:
    """Rows of expert e that `rank` computes; -1 if it does not hold it."""
    if home_E[e] == rank:
        return quota_E[e]
    for j in range(rep_expert_RS.shape[1]):
        if rep_expert_RS[rank, j] == e:
            return rep_rows_RS[rank, j]
    return -1


@compiled
def _shift(
    rank: int,
    e: int,
    rows: int,
    quota_E: np.ndarray,
    home_E: np.ndarray,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
) -> None:
    if home_E[e] == rank:
        quota_E[e] += rows
        return
    for j in range(rep_expert_RS.shape[1]):
        if rep_expert_RS[rank, j] == e:
            rep_rows_RS[rank, j] += rows


@compiled
def _shared(
    a: int, b: int, quota_E: np.ndarray, home_E: np.ndarray, rep_expert_RS: np.ndarray, rep_rows_RS: np.ndarray
) -> int:
    """The lowest expert that `a` computes rows of and `b` holds too; -1 if there is none."""
    found = -1
    for j in range(rep_expert_RS.shape[1]):
        e = rep_expert_RS[a, j]
        given = e >= 0 and rep_rows_RS[a, j] > 0
        if given and _held(b, e, quota_E, home_E, rep_expert_RS, rep_rows_RS) >= 0 and (found < 0 or e < found):
            found = e
        e = rep_expert_RS[b, j]
        if e >= 0 and _held(a, e, quota_E, home_E, rep_expert_RS, rep_rows_RS) > 0 and (found < 0 or e < found):
            found = e
    return found


class Taken(NamedTuple):
    """What replicas have taken up, and left."""

    free_R: np.ndarray
    """[R] replica slots that are left."""
    is_split_E: np.ndarray
    """[E] whether an expert has a replica."""


@compiled
def trade_across(
    load_RE: np.ndarray, base: LinkRows, holders: Holders, homes_RH: np.ndarray, link_R4: np.ndarray, min_rows: int
) -> bool:
    """Let ranks of two nodes compute rows of their own node for each other. See `trade_reference.trade_across`.

    Args:
        link_R4: [R, 4] rows on each rank's links, as `count_links` counts them with these holders
    """
    node_R, node_NE, taken = holders.nodes.node_R, base.node_NE, _taken(holders)
    received_R, sent_R = link_R4[:, RECEIVED_ACROSS].copy(), link_R4[:, SENT_ACROSS].copy()
    # For each node, its sources' most rows of one expert at home on each rank.
    most_NR = np.empty((len(node_NE), len(node_R)), dtype=np.int64)
    for r in range(len(node_R)):
        _find_most(most_NR, r, node_NE, taken, homes_RH)
    is_changed = False
    while True:
        receiver, sender = received_R.argmax(), sent_R.argmax()
        is_sent = sent_R[sender] > received_R[receiver]
        rank = sender if is_sent else receiver
        p, q, gone = _best_trade(load_RE, node_NE, node_R, homes_RH, taken, most_NR, rank, is_sent, min_rows)
        if p < 0:
            return is_changed
        back = _expert_of_most(node_NE[node_R[q]], taken, homes_RH[p])
        rows = min(node_NE[node_R[p], gone], node_NE[node_R[q], back])
        _put(holders, taken, p, gone, rows)
        _put(holders, taken, q, back, rows)
        received_R[p] -= rows
        received_R[q] -= rows
        for r in range(len(node_R)):
            if node_R[r] == node_R[p]:
                sent_R[r] -= _part(load_RE[r, gone], rows, node_NE[node_R[r], gone])
            elif node_R[r] == node_R[q]:
                sent_R[r] -= _part(load_RE[r, back], rows, node_NE[node_R[r], back])
        _find_most(most_NR, p, node_NE, taken, homes_RH)
        _find_most(most_NR, q, node_NE, taken, homes_RH)
        is_changed = True


@compiled
def _best_trade(
    load_RE: np.ndarray,
    node_NE: np.ndarray,
    node_R: np.ndarray,
    homes_RH: np.ndarray,
    taken: Taken,
    most_NR: np.ndarray,
    rank: int,
    is_sent: bool,
    min_rows: int,
) -> tuple[int, int, int]:
    """The trade that takes most off what a rank sends, or receives: a rank of its node, one of another, its expert.

    -1, -1, -1 if none takes any.
    """
    node, partner_N = node_R[rank], np.full(len(node_NE), -1)
    for r in range(len(node_R)):
        if node_R[r] == node and taken.free_R[r] > 0 and (is_sent or r == rank):
            for b in range(len(partner_N)):
                if partner_N[b] < 0 or most_NR[b, r] > most_NR[b, partner_N[b]]:
                    partner_N[b] = r
    best, p, q, expert = np.int64(0), -1, -1, -1
    for r in range(len(node_R)):
        partner = partner_N[node_R[r]]
        if node_R[r] == node or partner < 0 or taken.free_R[r] == 0:
            continue
        for e in homes_RH[r]:
            rows = min(node_NE[node, e], most_NR[node_R[r], partner])
            if taken.is_split_E[e] or rows < min_rows:
                continue
            less = _part(load_RE[rank, e], rows, node_NE[node, e]) if is_sent else rows
            if less > best:
                best, p, q, expert = less, partner, r, e
    return p, q, expert


@compiled
def _part(chosen: int, rows: int, whole: int) -> int:
    """`chosen` times `rows` over `whole`, in 64 bits; see `trade_reference.part`."""
    shift = 0
    while (whole >> shift) >= 2**31:
        shift += 1
    return chosen * (rows >> shift) // (whole >> shift)


@compiled
def _find_most(most_NR: np.ndarray, rank: int, node_NE: np.ndarray, taken: Taken, homes_RH: np.ndarray) -> None:
    """Fill a rank's column: the most rows that each node has of one of its experts without a replica; 0 if none."""
    for node in range(len(node_NE)):
        most_NR[node, rank] = _most(node_NE[node], taken, homes_RH[rank])


@compiled
def trade_inside(base: LinkRows, holders: Holders, homes_RH: np.ndarray, link_R4: np.ndarray, min_rows: int) -> bool:
    """Let ranks of a node exchange rows from other nodes for rows of their own. See `trade_reference.trade_inside`.

    Args:
        link_R4: [R, 4] rows on each rank's links, as `count_links` counts them with these holders
    """
    cap = link_R4[:, SENT_ACROSS].max()
    if link_R4[:, RECEIVED_ACROSS].max() <= cap:
        return False
    far_R = link_R4[:, RECEIVED_ACROSS].copy()
    nodes, taken = holders.nodes, _taken(holders)
    near_E, far_E = np.empty_like(base.total_E), np.empty_like(base.total_E)
    for e in range(len(near_E)):
        near_E[e] = base.node_NE[nodes.node_R[holders.home_E[e]], e]
        far_E[e] = base.total_E[e] - near_E[e]
    is_changed = False
    for node in range(len(nodes.start_N) - 1):
        members = nodes.by_node_R[nodes.start_N[node] : nodes.start_N[node + 1]]
        level = max(cap, (far_R[members].sum() + len(members) - 1) // len(members))
        while True:
            giver, taker, rows = _best_pair(far_R, near_E, far_E, level, members, taken, homes_RH)
            if rows < min_rows:
                break
            gone = _least_enough(far_E, taken, homes_RH[giver], rows)
            back = _least_enough(near_E, taken, homes_RH[taker], rows)
            _put(holders, taken, taker, gone, rows)
            _put(holders, taken, giver, back, rows)
            far_R[giver] -= rows
            far_R[taker] += rows
            is_changed = True
    return is_changed


@compiled
def _best_pair(
    far_R: np.ndarray,
    near_E: np.ndarray,
    far_E: np.ndarray,
    level: int,
    members: np.ndarray,
    taken: Taken,
    homes_RH: np.ndarray,
) -> tuple[int, int, int]:
    """The rank furthest above the level, the one that can trade most rows with it, and how many; -1, -1, 0 if none."""
    giver, taker, rows = -1, -1, 0
    for r in members:
        if taken.free_R[r] > 0 and far_R[r] > level and (giver < 0 or far_R[r] > far_R[giver]):
            giver = r
    if giver < 0:
        return giver, taker, rows
    most = min(far_R[giver] - level, _most(far_E, taken, homes_RH[giver]))
    for r in members:
        if taken.free_R[r] > 0 and far_R[r] < level:
            possible = min(most, min(level - far_R[r], _most(near_E, taken, homes_RH[r])))
            if possible > rows:
                taker, rows = r, int(possible)
    return giver, taker, rows


@compiled
def _taken(holders: Holders) -> Taken:
    ranks, slots = holders.rep_expert_RS.shape
    taken = Taken(np.full(ranks, slots), np.zeros(len(holders.home_E), dtype=np.bool_))
    for r in range(ranks):
        for j in range(slots):
            e = holders.rep_expert_RS[r, j]
            if e >= 0:
                taken.free_R[r] -= 1
                taken.is_split_E[e] = True
    return taken


@compiled
def _put(holders: Holders, taken: Taken, rank: int, expert: int, rows: int) -> None:
    """Give a rank a replica in its first free slot."""
    slot = 0
    while holders.rep_expert_RS[rank, slot] >= 0:
        slot += 1
    holders.rep_expert_RS[rank, slot], holders.rep_rows_RS[rank, slot] = expert, rows
    taken.free_R[rank] -= 1
    taken.is_split_E[expert] = True


@compiled
def _expert_of_most(rows_E: np.ndarray, taken: Taken, homes_H: np.ndarray) -> int:
    """The expert without a replica that has the most rows, the first of equals; -1 if there is none."""
    most = -1
    for e in homes_H:
        if not taken.is_split_E[e] and (most < 0 or rows_E[e] > rows_E[most]):
            most = e
    return most


@compiled
def _most(rows_E: np.ndarray, taken: Taken, homes_H: np.ndarray) -> int:
    """The most rows of one expert without a replica; 0 if there is none."""
    expert = _expert_of_most(rows_E, taken, homes_H)
    return int(rows_E[expert]) if expert >= 0 else 0


@compiled
def _least_enough(rows_E: np.ndarray, taken: Taken, homes_H: np.ndarray, want: int) -> int:
    """The expert without a replica whose rows just suffice, the first of equals; -1 if there is none."""
    enough = -1
    for e in homes_H:
        if not taken.is_split_E[e] and rows_E[e] >= want and (enough < 0 or rows_E[e] < rows_E[enough]):
            enough = e
    return enough


@compiled
def homes_by_rank(home_E: np.ndarray, ranks: int) -> np.ndarray:
    """[R, H] the experts whose home each rank is, ascending; all ranks are the home of equally many."""
    return np.argsort(home_E, kind="mergesort").reshape(ranks, -1)


class MicroPlan(NamedTuple):
    """One (micro-step, layer), and the replicas that are tried for it."""

    load_RE: np.ndarray
    base: LinkRows
    homes_RH: np.ndarray
    keep_permille_N: np.ndarray
    trial: Holders
    """Replicas that are tried, written again and again."""
    line: np.ndarray
    """[COLUMNS] their price line."""


class Kept(NamedTuple):
    """The best replicas so far: views into the plan of the layer."""

    expert_RS: np.ndarray
    rows_RS: np.ndarray
    line: np.ndarray


@compiled
def evaluate(
    load_MRE: np.ndarray, home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, tables: Tables
) -> LayerPlan:
    """Replicas and prices of every micro-step for given homes; the gate decides entry by micro."""
    micro_steps, ranks = load_MRE.shape[:2]
    homes_RH = homes_by_rank(home_E, ranks)
    node_E, forwards = problem.node_R[home_E], tables.forwards == 1
    keep_permille_N = kept_permille(node_E, problem.node_R.max() + 1, pair_EE, tables.top_k)
    expert_MRS = np.full((micro_steps, ranks, problem.slots), -1)
    rows_MRS = np.zeros((micro_steps, ranks, problem.slots), dtype=np.int64)
    line_MC = np.zeros((micro_steps, COLUMNS), dtype=np.int64)
    closed_MC = np.zeros((micro_steps, COLUMNS), dtype=np.int64)
    none_R0 = np.zeros((ranks, 0), dtype=np.int64)
    line = np.zeros(COLUMNS, dtype=np.int64)
    mask_NE, nodes = home_nodes(home_E, problem.node_R), nodes_of(problem.node_R)
    alone = Holders(home_E, nodes, none_R0, none_R0)
    trial = Holders(home_E, nodes, expert_MRS[0].copy(), rows_MRS[0].copy())
    for m in range(micro_steps):
        base = link_rows(load_MRE[m], home_E, problem.node_R, mask_NE, forwards)
        price_holders(load_MRE[m], base, alone, keep_permille_N, tables, False, closed_MC[m])
        line_MC[m] = closed_MC[m]
        if problem.slots > 0:
            micro = MicroPlan(load_MRE[m], base, homes_RH, keep_permille_N, trial, line)
            kept = Kept(expert_MRS[m], rows_MRS[m], line_MC[m])
            link_R4 = _level_ranks(micro, kept, problem, tables)
            if not problem.by_skew and len(mask_NE) > 1:
                _trade(micro, kept, link_R4, problem, tables)
    return LayerPlan(home_E, expert_MRS, rows_MRS, line_MC, closed_MC)


@compiled
def _level_ranks(micro: MicroPlan, kept: Kept, problem: LayerProblem, tables: Tables) -> np.ndarray:
    """Keep the replicas that level ranks, where they pay or the gate is open; returns [R, 4] rows on the links then."""
    base, trial = micro.base, micro.trial
    best, link_R4 = _total(kept.line) if problem.gated else base.total_E.sum(), base.link_R4
    for turn in range(2 * len(problem.domain_DR) - 1):
        # Nodes; nodes and then what they cannot level; all ranks at once, where levelling nodes would take their slots.
        domain_DR = problem.domain_DR[turn // 2 : min(turn, 1) + 1]
        for slack in SLACKS:
            replicas = trial.rep_expert_RS, trial.rep_rows_RS
            top = fill(base.total_E, trial.home_E, micro.homes_RH, domain_DR, problem.min_rows, slack, *replicas)
            if trial.rep_expert_RS.max() < 0:
                break
            work = _price(micro, tables)
            value = _total(micro.line) if problem.gated else top
            if value < best:
                best, link_R4 = value, work.link_R4
                _keep(micro, kept)
            if not problem.gated or micro.line[PULL] + micro.line[RETURN] <= _total(micro.line) // CHEAP:
                break
    return link_R4


@compiled
def _trade(micro: MicroPlan, kept: Kept, link_R4: np.ndarray, problem: LayerProblem, tables: Tables) -> None:
    """Keep trades across nodes, then those inside, each if it is cheaper."""
    base, trial = micro.base, micro.trial
    if problem.trades_across:
        trial.rep_expert_RS[:], trial.rep_rows_RS[:] = kept.expert_RS, kept.rows_RS
        if problem.slots > 1:
            _fill_but_one(micro, problem)
        start_R4 = count_links(micro.load_RE, base, trial, False).link_R4
        if trade_across(micro.load_RE, base, trial, micro.homes_RH, start_R4, problem.min_rows):
            work = _price(micro, tables)
            if _total(micro.line) < _total(kept.line):
                link_R4 = work.link_R4
                _keep(micro, kept)
    # Where tokens are handed on, the rank that computes does not receive from other nodes.
    trial.rep_expert_RS[:], trial.rep_rows_RS[:] = kept.expert_RS, kept.rows_RS
    if not tables.forwards and trade_inside(base, trial, micro.homes_RH, link_R4, problem.min_rows):
        _price(micro, tables)
        if _total(micro.line) < _total(kept.line):
            _keep(micro, kept)


@compiled
def _fill_but_one(micro: MicroPlan, problem: LayerProblem) -> None:
    """Level the ranks of each node again with one slot less, so that each has one left for trades."""
    trial, total_E = micro.trial, micro.base.total_E
    ranks, slots = trial.rep_expert_RS.shape
    expert_RS, rows_RS = np.full((ranks, slots - 1), -1), np.zeros((ranks, slots - 1), dtype=np.int64)
    domain_DR = problem.domain_DR[:1]
    fill(total_E, trial.home_E, micro.homes_RH, domain_DR, problem.min_rows, 0, expert_RS, rows_RS)
    trial.rep_expert_RS[:, -1], trial.rep_rows_RS[:, -1] = -1, 0
    trial.rep_expert_RS[:, :-1], trial.rep_rows_RS[:, :-1] = expert_RS, rows_RS


@compiled
def _price(micro: MicroPlan, tables: Tables) -> EntryWork:
    """Fill the price line of the replicas that are tried; returns what every rank does."""
    work = count_links(micro.load_RE, micro.base, micro.trial, False)
    price_work(work, micro.base, micro.trial, micro.keep_permille_N, tables, False, micro.line)
    return work


@compiled
def _keep(micro: MicroPlan, kept: Kept) -> None:
    kept.expert_RS[:], kept.rows_RS[:], kept.line[:] = micro.trial.rep_expert_RS, micro.trial.rep_rows_RS, micro.line


@compiled
def _total(line: np.ndarray) -> int:
    """Nanoseconds of a price line."""
    return int(line[: RETURN + 1].sum())
