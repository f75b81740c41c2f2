"""The specification of a micro plan: replicas and their rows in one (micro-step, layer). Second part of `reference.py`.

`fill` is the alias-table method (Walker, Vose). The *bound* is the least the busiest rank can have: the fullest node's
mean, rounded up. The emptiest rank of a node takes rows of *one* expert of the fullest rank until it reaches the bound;
a donor that falls below the bound may receive later. So a rank seldom needs more than one foreign expert, and the
result is exact whenever the donor has an expert as large as the receiver's deficit.

`rebalance_rows` repairs what is left. Rows of an expert can shift between its holders, so holders form a graph; as
long as a path leads from the busiest rank to one with at least two rows less, rows are shifted along it. At the end no
split of these replicas has a lower busiest rank.

Plain, never optimised; `planner/replicas.py` does the same compiled, bit for bit. Ties by index.
"""

from collections import deque

import numpy as np

from equipoise.planner.replicas import SLACK_UNIT
from tests.cost.reference import quotas


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

    Args:
        load_E: [E] rows
        home_E: [E] home of each expert
        homes_RH: [R, H] the same by rank
        domain_DR: [D, R] the node of each rank; where replicas may cross nodes, then 0 for all: nodes are filled first,
            so that few cross
        min_rows: least rows that a replica is worth
        slack: how much of what the busiest rank has above the bound needs no replica, in 64ths
        rep_expert_RS: [R, S] written: the expert of each replica slot, -1 where it stays free
        rep_rows_RS: [R, S] written: its rows
    """
    rep_expert_RS[:], rep_rows_RS[:] = -1, 0
    if rep_expert_RS.shape[1] > 0:
        load_R = load_E[homes_RH].sum(axis=1)
        widest_R = domain_DR[-1]
        bound = node_bound(load_R, widest_R)
        cap = bound + (int(load_R.max()) - bound) * slack // SLACK_UNIT
        for members in (np.flatnonzero(domain_R == n) for domain_R in domain_DR for n in range(domain_R.max() + 1)):
            while _fill_one(load_E, home_E, members, cap, min_rows, rep_expert_RS, rep_rows_RS):
                pass
        rebalance_rows(load_E, home_E, widest_R, rep_expert_RS, rep_rows_RS, bound)
        rep_expert_RS[rep_rows_RS == 0] = -1
    return int(quotas(load_E, home_E, rep_expert_RS, rep_rows_RS).sum(axis=0).max())


def node_bound(load_R: np.ndarray, node_R: np.ndarray) -> int:
    """The least rows of the busiest rank that replicas inside nodes can reach: the fullest node's mean, rounded up."""
    return max(-(-int(load_R[node_R == n].sum()) // int((node_R == n).sum())) for n in range(node_R.max() + 1))


def _fill_one(
    load_E: np.ndarray,
    home_E: np.ndarray,
    members: np.ndarray,
    cap: int,
    min_rows: int,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
) -> bool:
    """Place one more replica in the node of ranks `members`; False where nothing is left to do."""
    quota_ER = quotas(load_E, home_E, rep_expert_RS, rep_rows_RS)
    load_R = quota_ER.sum(axis=0)
    above = int((load_R[members] > cap).sum())
    open_ranks = [r for r in members if (rep_expert_RS[r] < 0).any()]
    if not above or not open_ranks:
        return False
    donor, receiver = max(members, key=lambda r: load_R[r]), min(open_ranks, key=lambda r: load_R[r])
    if donor == receiver:
        return False
    want = cap - int(load_R[receiver])
    if above == 1:
        # The last donor gives no more than it has too much.
        want = min(want, int(load_R[donor]) - cap)
    rest_E = quota_ER[:, donor]
    given = [e for e in np.flatnonzero(home_E == donor) if rest_E[e] > 0 and e not in rep_expert_RS[receiver]]
    enough = [e for e in given if rest_E[e] >= want]
    # The smallest that suffices, else the largest.
    chosen = min(enough, key=lambda e: rest_E[e]) if enough else max(given, key=lambda e: rest_E[e], default=-1)
    if chosen < 0 or min(want, rest_E[chosen]) < min_rows:
        return False
    slot = int((rep_expert_RS[receiver] >= 0).sum())
    rep_expert_RS[receiver, slot], rep_rows_RS[receiver, slot] = chosen, min(want, rest_E[chosen])
    return True


def rebalance_rows(
    load_E: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
    cap: int,
) -> None:
    """Shift rows between holders until no chain of shifts lowers the busiest rank; changes `rep_rows_RS`."""
    while True:
        quota_ER = quotas(load_E, home_E, rep_expert_RS, rep_rows_RS)
        load_R = quota_ER.sum(axis=0)
        top = int(load_R.argmax())
        chain = _chain(top, load_R, quota_ER, _holders(home_E, rep_expert_RS), node_R) if load_R[top] > cap else []
        if not chain:
            return
        goal = chain[-1][1]
        rows = min(int(load_R[top] - load_R[goal]) // 2, *(int(quota_ER[e, a]) for a, _, e in chain))
        for a, b, e in chain:
            rep_rows_RS[a][rep_expert_RS[a] == e] -= rows
            rep_rows_RS[b][rep_expert_RS[b] == e] += rows


def _holders(home_E: np.ndarray, rep_expert_RS: np.ndarray) -> np.ndarray:
    """[E, R] bool, which ranks hold which experts."""
    ranks = np.arange(len(rep_expert_RS))
    holds_ER = home_E[:, None] == ranks[None, :]
    for rank, slot in np.argwhere(rep_expert_RS >= 0):
        holds_ER[rep_expert_RS[rank, slot], rank] = True
    return holds_ER


def _chain(
    top: int, load_R: np.ndarray, quota_ER: np.ndarray, holds_ER: np.ndarray, node_R: np.ndarray
) -> list[tuple[int, int, int]]:
    """The shortest way down from rank `top`, as shifts (from, to, expert); empty if there is none.

    Breadth first, ranks in order; between two ranks the lowest expert that the first has rows of and the second holds.
    """
    came_by: dict[int, tuple[int, int, int] | None] = {top: None}
    queue = deque([top])
    while queue:
        a = queue.popleft()
        for b in np.flatnonzero(node_R == node_R[top]).tolist():
            shared = np.flatnonzero((quota_ER[:, a] > 0) & holds_ER[:, b])
            if b in came_by or not len(shared):
                continue
            came_by[b] = (a, b, int(shared[0]))
            queue.append(b)
            if load_R[b] < load_R[top] - 1:
                return _backtrack(b, came_by)
    return []


def _backtrack(goal: int, came_by: dict[int, tuple[int, int, int] | None]) -> list[tuple[int, int, int]]:
    chain: list[tuple[int, int, int]] = []
    step = came_by[goal]
    while step is not None:
        chain.insert(0, step)
        step = came_by[step[0]]
    return chain
