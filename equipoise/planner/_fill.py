"""Compiled `fill` and `settle`: replicas and their rows in one (micro-step, layer); `reference.py` specifies them.

A holder table names what ranks compute beyond their homes: `rep_expert_RS` (-1: free slot) and `rep_rows_RS`.

Integers only; ties by index. Knows rows. Does not know seconds.
"""

import numpy as np

from equipoise.core.compiled import compiled

SLACK_UNIT = 64
"""Parts of what the busiest rank has above the bound, in which slack is given."""


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

    Writes them into `rep_expert_RS` and `rep_rows_RS`, whose width is the number of slots. See `reference.fill`.
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
        settle(load_R, quota_E, home_E, widest_R, rep_expert_RS, rep_rows_RS, bound)
        _drop_idle(rep_expert_RS, rep_rows_RS)
    top = np.int64(0)
    for r in range(ranks):
        top = max(top, load_R[r])
    return top


@compiled
def _drop_idle(rep_expert_RS: np.ndarray, rep_rows_RS: np.ndarray) -> None:
    """Free the slots of replicas that settling left without a row: nothing is pulled for them."""
    for r in range(len(rep_expert_RS)):
        for j in range(rep_expert_RS.shape[1]):
            if rep_rows_RS[r, j] == 0:
                rep_expert_RS[r, j] = -1


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
def settle(
    load_R: np.ndarray,
    quota_E: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
    cap: int,
) -> None:
    """Shift rows between holders until no chain of shifts lowers the busiest rank. See `reference.settle`."""
    ranks = len(rep_expert_RS)
    from_R = np.empty(ranks, dtype=np.int64)
    via_R = np.empty(ranks, dtype=np.int64)
    queue = np.empty(ranks, dtype=np.int64)
    while True:
        top = 0
        for r in range(ranks):
            if load_R[r] > load_R[top]:
                top = r
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
