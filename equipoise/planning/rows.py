"""Count the rows that one rank sends in a window, from the routes it replays, and join the rows of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import LoadMatrix, LoadsError, RoutesError
from equipoise.core.value import require_int
from equipoise.core.window import Stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRows:
    """One rank's part of a window's loads."""

    load_MLE: np.ndarray
    """[M, L, E] rows this rank sends to each expert."""
    coverage_ML: np.ndarray | None = None
    """[M, L] share of this rank's tokens whose route is known; None: all are."""
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


def count_rows(routes: WindowRoutes, *, experts: int, stage: Stage = "update", allow_gaps: bool = False) -> RankRows:
    """Count the routes that this rank will replay.

    Args:
        routes: ids by micro-step and layer, -1 where unknown; counted rows are returned as they are
        experts: routed experts of the model, E
        stage: recompute or update
        allow_gaps: -1 beside other ids of a token means that it has fewer experts, not that its route is unknown
    """
    if isinstance(routes, RankRows):
        return routes
    if len({len(by_layer) for by_layer in routes}) != 1:
        lengths = [len(by_layer) for by_layer in routes]
        raise RoutesError(f"routes have {lengths} layers by micro-step; give every layer in each")
    shape_ML = (len(routes), len(routes[0]))
    load_MLE, coverage_ML = np.zeros((*shape_ML, experts), dtype=np.int64), np.ones(shape_ML)
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
        if len(known_T):
            coverage_ML[m, layer] = known_T.mean()
    return RankRows(
        load_MLE=load_MLE,
        coverage_ML=None if (coverage_ML == 1).all() else coverage_ML,
        stage=stage,
        has_gaps=has_gaps,
        has_ids=True,
    )


def join_rows(rows_R: Sequence[RankRows], *, layer_numbers: Sequence[int]) -> LoadMatrix:
    """Put the rows of all ranks together, in rank order."""
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
    return LoadMatrix(
        np.stack([rows.load_MLE for rows in rows_R], axis=2),
        stage=rows_R[0].stage,
        coverage_MLR=coverage_MLR,
        layer_numbers_L=np.array(layer_numbers),
    )


def learn_unknown(before_LE: np.ndarray | None, counted_LE: np.ndarray, *, known: RankRows) -> np.ndarray | None:
    """Return the rows per micro-step whose routes a rank does not know ahead: half as before, half as in a window.

    Args:
        before_LE: [L, E] what was expected so far; None: nothing yet
        counted_LE: [L, E] rows that this rank sent in the window
        known: those it knew ahead; a window that was all known changes nothing
    """
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
