"""Count the rows that one rank sends in a window, from the routes it replays, and join the rows of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import LoadMatrix, LoadsError, RoutesError
from equipoise.core.window import Stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRows:
    """One rank's part of a window's loads."""

    load_MLE: np.ndarray
    """[M, L, E] rows this rank sends to each expert."""
    coverage_ML: np.ndarray | None = None
    """[M, L] share of this rank's tokens whose route is known; None: all are."""
    stage: Stage = "update"
    has_ids: bool = False
    """Whether they were counted from the ids that will be replayed, which this rank keeps."""

    def __post_init__(self) -> None:
        if np.ndim(self.load_MLE) != 3 or 0 in np.shape(self.load_MLE):
            raise LoadsError(f"load_MLE has shape {np.shape(self.load_MLE)}; give rows by micro-step, layer and expert")


WindowRoutes = Sequence[Sequence[Any]] | RankRows
"""routes[m][l] are the [T, K] expert ids that a rank replays in micro-step m and layer index l, -1 where unknown; they
are read until the window ends, so leave them unchanged. Or rows that were counted elsewhere."""


def count_rows(routes: WindowRoutes, *, experts: int, stage: Stage = "update") -> RankRows:
    """Count the routes that this rank will replay.

    Args:
        routes: ids by micro-step and layer, -1 where unknown; counted rows are returned as they are
        experts: routed experts of the model, E
        stage: recompute or update
    """
    if isinstance(routes, RankRows):
        return routes
    count = [[_count(ids, m, layer, experts=experts) for layer, ids in enumerate(by)] for m, by in enumerate(routes)]
    if len({len(by) for by in count}) != 1:
        raise RoutesError(f"routes have {[len(by) for by in count]} layers by micro-step; give every layer in each")
    coverage_ML = np.array([[share for _, share in by] for by in count])
    return RankRows(
        load_MLE=np.array([[rows_E for rows_E, _ in by] for by in count]),
        coverage_ML=None if (coverage_ML == 1).all() else coverage_ML,
        stage=stage,
        has_ids=True,
    )


def _count(ids: Any, micro_step: int, layer: int, *, experts: int) -> tuple[np.ndarray, float]:
    """[E] rows of the known tokens of one entry, and their share of its tokens."""
    ids_TK = np.asarray(ids)
    if ids_TK.ndim != 2 or ids_TK.dtype.kind not in "iu":
        raise RoutesError(
            f"micro-step {micro_step}, layer index {layer}: ids have shape {ids_TK.shape} and dtype {ids_TK.dtype}; "
            "give [T, K] integers"
        )
    if ids_TK.size and (ids_TK.min() < -1 or ids_TK.max() >= experts):
        bad = int(ids_TK.min() if ids_TK.min() < -1 else ids_TK.max())
        raise RoutesError(
            f"micro-step {micro_step}, layer index {layer}: expert {bad} does not exist; ids are 0..{experts - 1}, "
            "or -1 where the route is unknown"
        )
    known_T: np.ndarray = np.all(ids_TK >= 0, axis=1)
    rows_E = np.bincount(ids_TK[known_T].reshape(-1).astype(np.int64), minlength=experts)
    return rows_E, float(known_T.mean()) if len(known_T) else 1.0


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
