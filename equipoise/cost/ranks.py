"""What every rank does in a window, entry by entry: rows, busy slots, busiest links, and nanoseconds of each visit.

The planner needs only the busiest rank of an entry (`kernels.price`); whoever replays a window needs all of them. Both
use the same kernels, so both see the same rows and the same seconds.

Knows rows, holders and prices. Does not know plans or time of day.

Invariants (asserted by the tests):
1. The busiest rank's nanoseconds and those of the exchanges are the price line of `kernels.price`.
2. Sending tokens once per node never sends more across than sending every row.
3. Forward and backward of a rank's experts add up to the nanoseconds of both.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.kernels import compute_ns, settle
from equipoise.cost.links import Busiest, Holders, busiest, home_nodes, nodes_of, traffic
from equipoise.cost.model import CostModel, Tables


class Edges(NamedTuple):
    """What the layers of a window have to carry, in nanoseconds."""

    ns_2L: np.ndarray
    """[2, L] publish and collect of each layer."""
    slow_2L: np.ndarray
    """[2, L] how much longer each makes the compute beside it."""

    @classmethod
    def none(cls, layers: int) -> "Edges":
        """Nothing moves."""
        return cls(np.zeros((2, layers), dtype=np.int64), np.zeros((2, layers), dtype=np.int64))


class RankRows(NamedTuple):
    """What the ranks of one layer do, micro-step by micro-step."""

    rows_MR: np.ndarray
    busy_MR: np.ndarray
    """[M, R] slots that have rows."""
    inside_M: np.ndarray
    """[M] rows of the busiest link inside nodes."""
    across_M: np.ndarray


@compiled
def rank_rows(
    load_MRE: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    rep_expert_MRS: np.ndarray,
    rep_rows_MRS: np.ndarray,
    keep_permille_N: np.ndarray,
    persistent: bool,
    top_k: int,
    forwards: bool,
) -> RankRows:
    """Settle every micro-step of one layer; arguments as in `kernels.price`, with M in front.

    `forwards`: a token crosses to each node once and is handed on over the links inside, once to each rank.
    """
    micro_steps, ranks = load_MRE.shape[:2]
    rows_MR = np.zeros((micro_steps, ranks), dtype=np.int64)
    busy_MR = np.zeros((micro_steps, ranks), dtype=np.int64)
    inside_M = np.zeros(micro_steps, dtype=np.int64)
    across_M = np.zeros(micro_steps, dtype=np.int64)
    mask_NE, nodes = home_nodes(home_E, node_R), nodes_of(node_R)
    for m in range(micro_steps):
        base = traffic(load_MRE[m], home_E, node_R, mask_NE, forwards)
        holders = Holders(home_E, nodes, rep_expert_MRS[m], rep_rows_MRS[m])
        settled = settle(load_MRE[m], base, holders, persistent)
        rows_MR[m] = settled.rows_R
        busy_MR[m] = settled.busy_R
        found = busiest(settled.link_R4, settled.to_RN, base.row_R, nodes, keep_permille_N, top_k)
        inside_M[m], across_M[m] = found.inside, found.across
    return RankRows(rows_MR, busy_MR, inside_M, across_M)


def level_rows(
    load_MRE: np.ndarray, node_R: np.ndarray, *, top_k: int, forwards: bool, keep_permille: int = 1000
) -> RankRows:
    """What the ranks do if all compute the mean and every source sends everyone the same: the policy `balanced`.

    Experts that have rows are spread evenly, too; the others' weights need not be read. Of the rows into a node at most
    `keep_permille` thousandths cross.
    """
    ranks = load_MRE.shape[1]
    row_MR, busy_M1 = load_MRE.sum(axis=2), level_slots(load_MRE.sum(axis=1), ranks)[:, None]
    mean_M1 = -(-row_MR.sum(axis=1, keepdims=True) // ranks)
    links_M = level_links(row_MR, node_R, top_k, forwards, keep_permille=keep_permille)
    return RankRows(
        rows_MR=np.broadcast_to(mean_M1, row_MR.shape).copy(),
        busy_MR=np.broadcast_to(busy_M1, row_MR.shape).copy(),
        inside_M=np.array([links.inside for links in links_M]),
        across_M=np.array([links.across for links in links_M]),
    )


def level_links(
    row_MR: np.ndarray, node_R: np.ndarray, top_k: int, forwards: bool, *, keep_permille: int = 1000
) -> list[Busiest]:
    """The busiest links of each micro-step if every source sends everyone the same."""
    ranks, ranks_N, nodes = len(node_R), np.bincount(node_R), nodes_of(node_R)
    near_R, keep_N = ranks_N[node_R], np.full(len(ranks_N), keep_permille)
    found = []
    for row_R in row_MR:
        node_N = np.bincount(node_R, weights=row_R).astype(np.int64)
        link_R4 = np.stack(
            [
                row_R * (near_R - 1) // ranks,
                (node_N[node_R] - row_R) // ranks,
                row_R * (ranks - near_R) // ranks,
                (row_R.sum() - node_N[node_R]) // ranks,
            ],
            axis=1,
        )
        to_RN = row_R[:, None] * ranks_N // ranks if forwards else np.zeros((0, len(ranks_N)), dtype=np.int64)
        found.append(busiest(link_R4, to_RN, np.ascontiguousarray(row_R), nodes, keep_N, top_k))
    return found


def level_slots(load_XE: np.ndarray, ranks: int) -> np.ndarray:
    """[X] slots with rows on each of `ranks` ranks, if the experts that have rows are spread evenly."""
    slots_X: np.ndarray = -(-(load_XE > 0).sum(axis=-1) // ranks)
    return slots_X


class VisitNs(NamedTuple):
    """Nanoseconds of every rank's part in every visit, exchanges left out."""

    forward_MLR: np.ndarray
    """Experts."""
    backward_MLR: np.ndarray
    """Experts, zero in recompute."""
    attention_MLR: np.ndarray
    """Attention and shared experts, and spreading the rank's own tokens to rows and combining them, forward."""
    attention_backward_MLR: np.ndarray


def visit_ns(cost: CostModel, *, rows_MLR: np.ndarray, busy_MLR: np.ndarray, sent_MLR: np.ndarray) -> VisitNs:
    """Cut each (micro-step, layer) into its visits; backward is what both together take beyond forward.

    Args:
        cost: prices of the window's stage
        rows_MLR: [M, L, R] rows each rank computes
        busy_MLR: [M, L, R] its slots that have rows
        sent_MLR: [M, L, R] rows of its own tokens
    """
    forward, shape = cost.forward_alone, rows_MLR.shape
    flat = rows_MLR.reshape(-1, shape[2]), busy_MLR.reshape(-1, shape[2])
    most, tables = int(busy_MLR.max(initial=1)), cost.tables(1)
    forward_MLR, both_MLR = (compute_ns_of(one.tables(most), *flat).reshape(shape) for one in (forward, cost))
    token_MLR = -(-sent_MLR // cost.model.top_k)
    spread_MLR, spread_both_MLR = (one.sending_ns(sent_MLR) for one in (forward, cost))
    back_MLR = token_MLR * tables.backward_window_ps // 1000 + np.maximum(0, spread_both_MLR - spread_MLR)
    return VisitNs(
        forward_MLR=forward_MLR,
        backward_MLR=np.maximum(0, both_MLR - forward_MLR),
        attention_MLR=token_MLR * tables.window_ps // 1000 + spread_MLR,
        attention_backward_MLR=back_MLR * (cost.stage == "update"),
    )


@compiled
def compute_ns_of(tables: Tables, rows_MR: np.ndarray, busy_MR: np.ndarray) -> np.ndarray:
    """[M, R] nanoseconds of every rank's experts."""
    ns_MR = np.zeros(rows_MR.shape, dtype=np.int64)
    for m in range(rows_MR.shape[0]):
        for r in range(rows_MR.shape[1]):
            ns_MR[m, r] = compute_ns(tables, rows_MR[m, r], busy_MR[m, r])
    return ns_MR
