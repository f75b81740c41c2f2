"""Prices of whole windows: entry by entry, rank by rank, and at the window's edges.

    price_window, price_level    one price line per (micro-step, layer), as the planner sees it
    rank_work, level_work        what every rank does, as the clock replays it; visit_ns cuts it into visits
    edge_links, price_edges      publish and collect of each layer, by its busiest link
    row_prices, mean_visit_ns    what one more row costs, and what a mean visit hides, while homes are searched for

All use the kernels of `kernels.py`, so a plan, its baselines and its replay see the same rows and the same prices.

Invariants (asserted by the tests):
1. The busiest rank's nanoseconds and those of the exchanges are the price line of `kernels.price`.
2. Sending tokens once per node never sends more across than sending every row.
3. Forward and backward of a rank's experts add up to the nanoseconds of both.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core import LoadMatrix
from equipoise.core.compiled import compiled
from equipoise.cost.kernels import ACROSS, COLUMNS, COMPUTE, EXCHANGE, INSIDE, compute_ns, count_links, price_work
from equipoise.cost.links import Busiest, Holders, busiest, home_nodes, kept_permille, link_rows, nodes_of
from equipoise.cost.model import CostModel, Tables, interpolate


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


class ExpertLinks(NamedTuple):
    """Experts over the links at a window's edge, where each layer travels by itself."""

    inside_L: np.ndarray
    """[L] over the busiest link inside nodes."""
    across_L: np.ndarray
    all_inside: int
    """Over all links, of all layers."""
    all_across: int


def edge_links(holds_LER: np.ndarray, node_R: np.ndarray) -> ExpertLinks:
    """Count the copies of experts that are not on their owner, per link.

    Args:
        holds_LER: [L, E, R] bool, which rank has a copy
        node_R: [R] node of each rank
    """
    layers, experts, ranks = holds_LER.shape
    owner_E = np.arange(experts) // (experts // ranks)
    away_LER = holds_LER & (owner_E[:, None] != np.arange(ranks))
    is_inside_ER = node_R[owner_E][:, None] == node_R
    busiest_2, all_2 = [], []
    for chosen_LER in (away_LER & is_inside_ER, away_LER & ~is_inside_ER):
        sent_LR = chosen_LER.reshape(layers, ranks, -1).sum(axis=2)
        busiest_2.append(np.maximum(sent_LR.max(axis=1), chosen_LER.sum(axis=1).max(axis=1)))
        all_2.append(int(sent_LR.sum()))
    return ExpertLinks(*busiest_2, *all_2)


def price_edges(cost: CostModel, publish: ExpertLinks, collect: ExpertLinks) -> Edges:
    """Price both edges of each layer, by its busiest link."""
    ns, slow = [], []
    for edge, links in (("publish", publish), ("collect", collect)):
        pairs = zip(links.inside_L.tolist(), links.across_L.tolist(), strict=True)
        given = [{"inside_experts": near, "across_experts": far, "edge": edge} for near, far in pairs]
        ns.append([cost.edge_ns(**one) for one in given])
        slow.append([cost.edge_slow_ns(**one) for one in given])
    return Edges(np.array(ns), np.array(slow))


def price_window(
    cost: CostModel,
    loads: LoadMatrix,
    home_LE: np.ndarray,
    rep_expert_MLRS: np.ndarray | None = None,
    rep_rows_MLRS: np.ndarray | None = None,
    *,
    in_proportion: bool = False,
) -> np.ndarray:
    """[M, L, COLUMNS] price lines of homes, and of replicas that stay for the window: no entry pulls or returns.

    Args:
        cost: prices of the window's stage
        loads: rows of the window
        home_LE: [L, E] home rank of each expert
        rep_expert_MLRS: [M, L, R, S] expert of each replica slot, -1 where empty; none by default
        rep_rows_MLRS: [M, L, R, S] its rows
        in_proportion: rows split as quotas are, not local first
    """
    ranks, node_R = cost.cluster.ep, cost.cluster.node_array_R
    none_MLRS = np.zeros((loads.num_micro_steps, loads.num_layers, ranks, 0), dtype=np.int64)
    replicas = [none_MLRS if array is None else array for array in (rep_expert_MLRS, rep_rows_MLRS)]
    # The most non-empty slots that any rank can have here.
    most = max(int(np.bincount(home_E, minlength=ranks).max()) for home_E in home_LE) + replicas[0].shape[-1]
    tables = cost.tables(most)
    # Copies, because a read-only array would compile the kernels a second time.
    lines = []
    for layer, home_E in enumerate(home_LE):
        arrays = (np.array(a[:, layer]) for a in (loads.load_MLRE, *replicas))
        lines.append(_price_layer(*arrays, np.array(home_E), node_R, tables, in_proportion))
    return np.stack(lines, axis=1)


@compiled
def _price_layer(
    load_MRE: np.ndarray,
    rep_expert_MRS: np.ndarray,
    rep_rows_MRS: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    tables: Tables,
    in_proportion: bool,
) -> np.ndarray:
    line_MC = np.zeros((len(load_MRE), COLUMNS), dtype=np.int64)
    none_EE = np.zeros((0, 0), dtype=np.int64)
    keep_permille_N = kept_permille(node_R[home_E], node_R.max() + 1, none_EE, tables.top_k)
    mask_NE, nodes = home_nodes(home_E, node_R), nodes_of(node_R)
    for m in range(len(load_MRE)):
        base = link_rows(load_MRE[m], home_E, node_R, mask_NE, tables.forwards == 1)
        holders = Holders(home_E, nodes, rep_expert_MRS[m], rep_rows_MRS[m])
        work = count_links(load_MRE[m], base, holders, in_proportion)
        price_work(work, base, holders, keep_permille_N, tables, True, line_MC[m])
    return line_MC


def price_level(cost: CostModel, loads: LoadMatrix) -> np.ndarray:
    """[M, L, COLUMNS] price lines if every rank computed the mean and every source sent everyone the same."""
    ranks = cost.cluster.ep
    ns_SX = cost.compute_ns_SX(cost.cluster.home_slots(cost.model))
    slots_ML = level_slots(loads.total_MLE(), ranks)
    row_MLR = loads.load_MLRE.sum(axis=3)
    flat = row_MLR.reshape(-1, ranks), cost.cluster.node_array_R, cost.model.top_k, cost.sends == "tokens"
    line_MLC = np.zeros((*row_MLR.shape[:2], COLUMNS), dtype=np.int64)
    for at, links in zip(np.ndindex(*row_MLR.shape[:2]), level_links(*flat), strict=True):
        mean = -(-int(row_MLR[at].sum()) // ranks)
        line_MLC[at][COMPUTE] = interpolate(cost.rows_X, ns_SX[slots_ML[at]], mean)
        line_MLC[at][EXCHANGE] = cost.exchange_ns(links.inside, links.across)
        line_MLC[at][[INSIDE, ACROSS]] = links.all_inside, links.all_across
    return line_MLC


class RankWork(NamedTuple):
    """What the ranks of one layer do, micro-step by micro-step."""

    rows_MR: np.ndarray
    busy_MR: np.ndarray
    """[M, R] slots that have rows."""
    inside_M: np.ndarray
    """[M] rows of the busiest link inside nodes."""
    across_M: np.ndarray
    wave_inside_M: np.ndarray
    """[M] the same of one of so many level waves; a token that crosses in several is sent in each of them."""
    wave_across_M: np.ndarray


@compiled
def rank_work(
    load_MRE: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    rep_expert_MRS: np.ndarray,
    rep_rows_MRS: np.ndarray,
    keep_permille_N: np.ndarray,
    in_proportion: bool,
    top_k: int,
    forwards: bool,
    waves: int = 1,
) -> RankWork:
    """Settle every micro-step of one layer; arguments as in `kernels.price`, with M in front.

    `in_proportion`: rows split as quotas are, not local first.
    `forwards`: a token crosses to each node once and is handed on over the links inside, once to each rank.
    `waves`: how many there are.
    """
    micro_steps, ranks = load_MRE.shape[:2]
    rows_MR = np.zeros((micro_steps, ranks), dtype=np.int64)
    busy_MR = np.zeros((micro_steps, ranks), dtype=np.int64)
    inside_M = np.zeros(micro_steps, dtype=np.int64)
    across_M = np.zeros(micro_steps, dtype=np.int64)
    wave_inside_M = np.zeros(micro_steps, dtype=np.int64)
    wave_across_M = np.zeros(micro_steps, dtype=np.int64)
    mask_NE, nodes = home_nodes(home_E, node_R), nodes_of(node_R)
    for m in range(micro_steps):
        base = link_rows(load_MRE[m], home_E, node_R, mask_NE, forwards)
        holders = Holders(home_E, nodes, rep_expert_MRS[m], rep_rows_MRS[m])
        work = count_links(load_MRE[m], base, holders, in_proportion)
        rows_MR[m] = work.rows_R
        busy_MR[m] = work.busy_R
        found = busiest(work.link_R4, work.to_RN, base.row_R, nodes, keep_permille_N, top_k)
        inside_M[m], across_M[m] = found.inside, found.across
        if waves > 1:
            link_R4, to_RN = -(-work.link_R4 // waves), -(-work.to_RN // waves)
            found = busiest(link_R4, to_RN, base.row_R, nodes, _kept_in_wave(keep_permille_N, waves), top_k)
        wave_inside_M[m], wave_across_M[m] = found.inside, found.across
    return RankWork(rows_MR, busy_MR, inside_M, across_M, wave_inside_M, wave_across_M)


@compiled
def _kept_in_wave(keep_permille_N: np.ndarray, waves: int) -> np.ndarray:
    """Of a token's pairs of experts in a node, one in `waves` is in one wave, and saves a row there."""
    return 1000 - (1000 - keep_permille_N) // waves


def level_work(
    load_MRE: np.ndarray, node_R: np.ndarray, *, top_k: int, forwards: bool, keep_permille: int = 1000, waves: int = 1
) -> RankWork:
    """What the ranks do if all compute the mean and every source sends everyone the same: the policy `balanced`.

    Experts that have rows are spread evenly, too; the others' weights need not be read. Of the rows into a node at most
    `keep_permille` thousandths cross.
    """
    ranks = load_MRE.shape[1]
    row_MR, busy_M1 = load_MRE.sum(axis=2), level_slots(load_MRE.sum(axis=1), ranks)[:, None]
    mean_M1 = -(-row_MR.sum(axis=1, keepdims=True) // ranks)
    links_M, wave_links_M = (
        level_links(row_MR, node_R, top_k, forwards, keep_permille=keep_permille, waves=count) for count in (1, waves)
    )
    return RankWork(
        rows_MR=np.broadcast_to(mean_M1, row_MR.shape).copy(),
        busy_MR=np.broadcast_to(busy_M1, row_MR.shape).copy(),
        inside_M=np.array([links.inside for links in links_M]),
        across_M=np.array([links.across for links in links_M]),
        wave_inside_M=np.array([links.inside for links in wave_links_M]),
        wave_across_M=np.array([links.across for links in wave_links_M]),
    )


def level_links(
    row_MR: np.ndarray, node_R: np.ndarray, top_k: int, forwards: bool, *, keep_permille: int = 1000, waves: int = 1
) -> list[Busiest]:
    """The busiest links of each micro-step if every source sends everyone the same, in one of `waves` waves."""
    ranks, ranks_N, nodes = len(node_R), np.bincount(node_R), nodes_of(node_R)
    near_R, keep_N = ranks_N[node_R], _kept_in_wave(np.full(len(ranks_N), keep_permille), waves)
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
        link_R4, to_RN = -(-link_R4 // waves), -(-to_RN // waves)
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


class RowPrices(NamedTuple):
    """What one more row costs, in picoseconds."""

    compute_ps: int
    """On a mean rank."""
    crossing_ps: int
    """On a link across nodes, in all exchanges."""
    slope_ps: int
    """On the busiest rank: compute, and getting there, across nodes for all but 1/N of the rows."""
    min_rows: int
    """The least rows that pay for one more non-empty slot."""


def row_prices(cost: CostModel, mean_rows: int) -> RowPrices:
    """Price one more row, where a mean rank has `mean_rows` in each (micro-step, layer)."""
    homes, nodes = cost.cluster.home_slots(cost.model), cost.cluster.num_ep_nodes
    tables = cost.tables(1)
    across_ps = tables.across_ps * cost.crossing_permille // 1000
    at_mean = cost.compute_ns(mean_rows, homes)
    compute_ps = max(1, (cost.compute_ns(2 * mean_rows, homes) - at_mean) * 1000 // mean_rows)
    slope_ps = compute_ps + tables.exchanges * max(tables.inside_ps, across_ps * (nodes - 1)) // nodes
    slot_ns = cost.compute_ns(mean_rows, homes + 1) - at_mean
    return RowPrices(
        compute_ps=compute_ps,
        crossing_ps=tables.exchanges * across_ps,
        slope_ps=slope_ps,
        min_rows=max(1, slot_ns * 1000 // slope_ps),
    )


def mean_visit_ns(cost: CostModel, mean_rows: int) -> np.ndarray:
    """[2] nanoseconds of a mean visit, exchanges left out, that hides a publish, and that hides a collect."""
    mean_111 = np.full((1, 1, 1), mean_rows)
    busy_111 = np.full_like(mean_111, cost.cluster.home_slots(cost.model))
    visit = visit_ns(cost, rows_MLR=mean_111, busy_MLR=busy_111, sent_MLR=mean_111)
    forward = int(visit.forward_MLR[0, 0, 0] + visit.attention_MLR[0, 0, 0])
    backward = int(visit.backward_MLR[0, 0, 0] + visit.attention_backward_MLR[0, 0, 0])
    return np.array([forward, backward if cost.stage == "update" else forward])
