"""Count the rows that one rank sends in a window, from the routes it replays, and join the rows of all ranks.

A free token is one that reaches no loss, such as the last of a sample, or padding. Where its route is unknown it is
given the least loaded experts instead of those that the router chooses (`loads.filling`). These follow from the rows of
all ranks, so `count_rows` only counts free tokens, `join_rows` adds their rows, and `fill_rows` names this rank's ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import LoadMatrix, LoadsError, RoutesError
from equipoise.core.value import require_int
from equipoise.core.window import Stage
from equipoise.layer.dispatch import FilledRows
from equipoise.loads.filling import spread_ids, spread_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRows:
    """One rank's part of a window's loads."""

    load_MLE: np.ndarray
    """[M, L, E] rows this rank sends to each expert."""
    coverage_ML: np.ndarray | None = None
    """[M, L] share of this rank's tokens whose route is known, or that are filled; None: all are."""
    free_ML: np.ndarray | None = None
    """[M, L] tokens of this rank to be filled: free, and without a route; None: none is."""
    stage: Stage = "update"
    has_gaps: bool = False
    """Whether some tokens have fewer than K experts."""
    has_ids: bool = False
    """Whether they were counted from the ids that will be replayed, which this rank keeps."""

    @classmethod
    def unknown(cls, micro_steps: int, *, layers: int, experts: int, stage: Stage = "update") -> "RankRows":
        """Return the rows of a window of which nothing is recorded."""
        require_int("micro_steps", micro_steps, low=1, error=LoadsError)
        load_MLE = np.zeros((micro_steps, layers, experts), dtype=np.int64)
        return cls(load_MLE=load_MLE, coverage_ML=np.zeros((micro_steps, layers)), stage=stage)

    def __post_init__(self) -> None:
        if np.ndim(self.load_MLE) != 3 or 0 in np.shape(self.load_MLE):
            raise LoadsError(f"load_MLE has shape {np.shape(self.load_MLE)}; give rows by micro-step, layer and expert")


WindowRoutes = Sequence[Sequence[Any]] | RankRows
"""routes[m][l] are the [T, K] expert ids that a rank replays in micro-step m and layer index l, -1 where unknown; they
are read until the window ends, so leave them unchanged. Or rows that were counted elsewhere."""

FreeTokens = Sequence[Any]
"""free[m] is a [T] bool mask of micro-step m's tokens: those that reach no loss."""


def count_rows(
    routes: WindowRoutes,
    *,
    experts: int,
    stage: Stage = "update",
    allow_gaps: bool = False,
    free: FreeTokens | None = None,
) -> RankRows:
    """Count the routes that this rank will replay.

    Args:
        routes: ids by micro-step and layer, -1 where unknown; counted rows are returned as they are
        experts: routed experts of the model, E
        stage: recompute or update
        allow_gaps: -1 beside other ids of a token means that it has fewer experts, not that its route is unknown
        free: which tokens reach no loss, to be filled where their route is unknown
    """
    if isinstance(routes, RankRows):
        if free is not None:
            raise RoutesError("free tokens were given with counted rows; give the routes themselves, -1 where unknown")
        return routes
    if len({len(by_layer) for by_layer in routes}) != 1:
        lengths = [len(by_layer) for by_layer in routes]
        raise RoutesError(f"routes have {lengths} layers by micro-step; give every layer in each")
    shape_ML = (len(routes), len(routes[0]))
    if free is not None and len(free) != len(routes):
        raise RoutesError(
            f"free tokens were given for {len(free)} micro-steps, routes for {len(routes)}; give a mask each"
        )
    load_MLE, coverage_ML = np.zeros((*shape_ML, experts), dtype=np.int64), np.ones(shape_ML)
    free_ML: np.ndarray = np.zeros(shape_ML, dtype=np.int64)
    has_gaps = False
    for m, layer in np.ndindex(shape_ML):
        ids_TK = np.asarray(routes[m][layer])
        entry = f"micro-step {m}, layer index {layer}"
        if ids_TK.ndim != 2 or ids_TK.dtype.kind not in "iu":
            raise RoutesError(f"{entry}: ids have shape {ids_TK.shape} and dtype {ids_TK.dtype}; give [T, K] integers")
        if ids_TK.size and (ids_TK.min() < -1 or ids_TK.max() >= experts):
            bad = int(ids_TK.min() if ids_TK.min() < -1 else ids_TK.max())
            raise RoutesError(
                f"{entry}: expert {bad} does not exist; ids are 0..{experts - 1}, or -1 where the route is unknown"
            )
        is_row_TK = ids_TK >= 0
        known_T: np.ndarray = (np.any if allow_gaps else np.all)(is_row_TK, axis=1)
        has_gaps |= bool((known_T[:, None] & ~is_row_TK).any())
        rows_N = ids_TK[known_T[:, None] & is_row_TK]
        load_MLE[m, layer] = np.bincount(rows_N.astype(np.int64), minlength=experts)
        if free is not None:
            filled_T = _filled_tokens(ids_TK, free[m], entry=entry, allow_gaps=allow_gaps)
            free_ML[m, layer] = len(filled_T)
            known_T[filled_T] = True
        if len(known_T):
            coverage_ML[m, layer] = known_T.mean()
    return RankRows(
        load_MLE=load_MLE,
        coverage_ML=None if (coverage_ML == 1).all() else coverage_ML,
        free_ML=free_ML if free_ML.any() else None,
        stage=stage,
        has_gaps=has_gaps,
        has_ids=True,
    )


def _filled_tokens(ids_TK: np.ndarray, is_free_T: Any, *, entry: str = "", allow_gaps: bool = False) -> np.ndarray:
    """[F] free tokens of one entry whose route is unknown."""
    is_free_T = np.asarray(is_free_T)
    if is_free_T.dtype != np.bool_ or is_free_T.shape != ids_TK.shape[:1]:
        raise RoutesError(
            f"{entry}: free tokens have shape {is_free_T.shape} and dtype {is_free_T.dtype}; give a mask of "
            f"{len(ids_TK)} bools, one per row of its ids"
        )
    free_F = np.flatnonzero(is_free_T)
    return free_F[(np.all if allow_gaps else np.any)(ids_TK[free_F] < 0, axis=1)]


def join_rows(rows_R: Sequence[RankRows], *, layer_numbers: Sequence[int], top_k: int) -> LoadMatrix:
    """Put the rows of all ranks together, in rank order, with those of filled tokens."""
    facts_R = [(*rows.load_MLE.shape, rows.stage) for rows in rows_R]
    for rank, facts in enumerate(facts_R):
        if facts != facts_R[0]:
            names = "micro-steps, layers, experts and stage"
            raise LoadsError(
                f"rank {rank} has {names} {facts}, rank 0 has {facts_R[0]}; all ranks of an EP group must announce the "
                "same window"
            )
    coverage_MLR = None
    if any(rows.coverage_ML is not None for rows in rows_R):
        full_ML = np.ones(rows_R[0].load_MLE.shape[:2])
        coverage_MLR = np.stack([full_ML if rows.coverage_ML is None else rows.coverage_ML for rows in rows_R], axis=2)
    load_MLRE = np.stack([rows.load_MLE for rows in rows_R], axis=2)
    filled_MLR = None
    if any(rows.free_ML is not None for rows in rows_R):
        free_MLR = _free_tokens(rows_R)
        filled_MLR = free_MLR * top_k
        for m in np.flatnonzero(free_MLR.any(axis=(1, 2))):
            load_MLRE[m] += spread_rows(load_MLRE[m].sum(axis=1), free_MLR[m], top_k)
    return LoadMatrix(
        load_MLRE,
        stage=rows_R[0].stage,
        coverage_MLR=coverage_MLR,
        filled_MLR=filled_MLR,
        layer_numbers_L=np.array(layer_numbers),
    )


def learn_unknown(before_LE: np.ndarray | None, counted_LE: np.ndarray, *, known: RankRows) -> np.ndarray | None:
    """Return the rows per micro-step whose routes a rank does not know ahead: half as before, half as in a window.

    Args:
        before_LE: [L, E] what was expected so far; None: nothing yet
        counted_LE: [L, E] rows that this rank sent in the window
        known: those it knew ahead; a window that was all known, or filled, changes nothing
    """
    if known.coverage_ML is None:
        return before_LE
    new_LE = np.maximum(counted_LE - known.load_MLE.sum(axis=0), 0) // len(known.load_MLE)
    if not new_LE.any():
        return before_LE
    return new_LE if before_LE is None else (before_LE + new_LE) // 2


def join_forecasts(before_RLE: Sequence[np.ndarray | None]) -> LoadMatrix | None:
    """Put together what ranks expect of routes that nobody knows; None before any rank has seen such rows."""
    found = [before_LE for before_LE in before_RLE if before_LE is not None]
    if not found:
        return None
    none_LE = np.zeros_like(found[0])
    return LoadMatrix(np.stack([none_LE if one is None else one for one in before_RLE], axis=1)[None])


def fill_rows(
    rows_R: Sequence[RankRows], routes: WindowRoutes, free: FreeTokens | None, *, rank: int, top_k: int
) -> dict[tuple[int, int], FilledRows]:
    """Name the experts of this rank's filled tokens, as `join_rows` counts them, by (micro-step, layer index)."""
    own = rows_R[rank]
    if own.free_ML is None or free is None or isinstance(routes, RankRows):
        return {}
    free_MLR, found = _free_tokens(rows_R), dict[tuple[int, int], FilledRows]()
    for m in np.flatnonzero(own.free_ML.any(axis=1)).tolist():
        load_LE = np.sum([rows.load_MLE[m] for rows in rows_R], axis=0)
        for layer, ids_FK in enumerate(spread_ids(load_LE, free_MLR[m], top_k, rank=rank)):
            if len(ids_FK):
                ids_TK = np.asarray(routes[m][layer])
                tokens_F = _filled_tokens(ids_TK, free[m], allow_gaps=own.has_gaps)
                found[m, layer] = FilledRows.of(tokens_F, ids_FK, num_tokens=len(ids_TK))
    return found


def _free_tokens(rows_R: Sequence[RankRows]) -> np.ndarray:
    """[M, L, R] tokens to be filled."""
    none_ML = np.zeros(rows_R[0].load_MLE.shape[:2], dtype=np.int64)
    return np.stack([none_ML if rows.free_ML is None else rows.free_ML for rows in rows_R], axis=2)
