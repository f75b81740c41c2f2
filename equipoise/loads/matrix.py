"""Count a schedule's loads: rows per micro-step, layer, source rank and expert.

What is counted, per (micro-step, layer, rank):
1. Rows of the pieces' tokens whose routes are known, and padding rows recorded with them.
2. Last tokens without a route, if the schedule forwards them: spread over the least loaded experts, or unknown.
3. The schedule's own padding tokens, by its padding policy (`filling.py`), after all real rows.
Coverage is the share of forwarded tokens, padding included, whose experts are known; 1 for a rank without tokens.

Routes and their histograms give the same loads if whole samples are forwarded; any other range of a histogram is an
error, never an estimate. `count_step` reads every sample once, whatever the number of windows.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.core import (
    LoadMatrix,
    ModelShape,
    Piece,
    RouteCounts,
    Routes,
    RoutesError,
    SampleRoutes,
    Schedule,
    ScheduleError,
)
from equipoise.core.value import require_int, require_kind
from equipoise.loads.count import Progress, RangeCount, count_range
from equipoise.loads.filling import arange_rows, first_rows, spread_rows


def count_loads(
    routes: Routes | RouteCounts, schedule: Schedule, *, ep: int | None = None, progress: Progress | None = None
) -> LoadMatrix:
    """Count the loads of one window.

    Args:
        routes: recorded routes, or their histograms if every piece is a whole sample
        schedule: the window
        ep: ranks of an EP group, over whose total rows without a route are spread; all ranks by default
        progress: called after each sample
    """
    return count_step(routes, (schedule,), ep=ep, progress=progress)[0]


def count_step(
    routes: Routes | RouteCounts,
    schedules: Sequence[Schedule],
    *,
    ep: int | None = None,
    progress: Progress | None = None,
) -> tuple[LoadMatrix, ...]:
    """Count the loads of every window of a step in one pass over the routes; arguments as in `count_loads`."""
    require_kind("routes", routes, Routes, RouteCounts, error=RoutesError)
    for schedule in schedules:
        require_kind("schedule", schedule, Schedule, error=ScheduleError)
    if ep is not None:
        require_int("ep", ep, low=1, error=ScheduleError)
    windows = [_Window(routes, schedule) for schedule in schedules]
    pieces_B = _pieces_by_sample(schedules, len(routes))
    for b, pieces in pieces_B.items():
        sample: SampleRoutes | _CountedSample
        sample = _CountedSample(routes, b) if isinstance(routes, RouteCounts) else routes.samples[b]
        # Windows of one step mostly forward the same ranges, so each is counted once.
        found: dict[tuple[int, int], RangeCount] = {}
        for window, piece in pieces:
            span = (piece.start, piece.stop)
            if span not in found:
                found[span] = _count_piece(sample, piece, routes.model)
            windows[window].add(sample, piece, found[span])
        if progress is not None:
            progress(b + 1, len(routes))
    return tuple(window.finish(ep) for window in windows)


class _CountedSample:
    """One sample of which only the histogram was kept."""

    __slots__ = ("_range", "name", "num_tokens", "unknown_last")

    def __init__(self, counts: RouteCounts, b: int) -> None:
        zero_LE = np.zeros_like(counts.count_BLE[b])
        self.name = counts.names[b]
        self.num_tokens = int(counts.tokens_B[b])
        unknown_L = zero_LE[:, 0] if counts.unknown_BL is None else counts.unknown_BL[b]
        # A token that every layer lacks is taken to be the last one, which engines never record.
        self.unknown_last = bool(unknown_L.min(initial=1) > 0)
        self._range = RangeCount(
            count_LE=counts.count_BLE[b],
            padding_LE=zero_LE if counts.padding_BLE is None else counts.padding_BLE[b],
            unknown_L=unknown_L,
        )

    def count(self, piece: Piece) -> RangeCount:
        """Count the whole sample, or all of it but a last token without a route."""
        kept = self._range
        if (piece.start, piece.stop) == (0, self.num_tokens):
            return kept
        if (piece.start, piece.stop) == (0, self.num_tokens - 1) and self.unknown_last:
            return RangeCount(count_LE=kept.count_LE, padding_LE=kept.padding_LE, unknown_L=kept.unknown_L - 1)
        least = self.num_tokens - 1 if self.unknown_last else self.num_tokens
        raise ScheduleError(
            f"sample {self.name!r}: the schedule forwards tokens {piece.start}..{piece.stop}, but only its histogram "
            f"was kept, which holds tokens 0..{least} together; forward whole samples or count from the routes"
        )


def _pieces_by_sample(schedules: Sequence[Schedule], samples: int) -> dict[int, list[tuple[int, Piece]]]:
    """Return (window, piece) of every forwarded sample, samples ascending so that a store is read in order."""
    found: dict[int, list[tuple[int, Piece]]] = {}
    for window, schedule in enumerate(schedules):
        for piece in map(Piece._make, schedule.pieces.tolist()):
            if piece.sample >= samples:
                raise ScheduleError(f"{piece} names a sample that does not exist; there are samples 0..{samples - 1}")
            found.setdefault(piece.sample, []).append((window, piece))
    return dict(sorted(found.items()))


def _count_piece(sample: SampleRoutes | _CountedSample, piece: Piece, model: ModelShape) -> RangeCount:
    if piece.stop > sample.num_tokens:
        raise ScheduleError(
            f"{piece} names token {piece.stop - 1} of sample {sample.name!r}, "
            f"which has tokens 0..{sample.num_tokens - 1}"
        )
    if isinstance(sample, _CountedSample):
        return sample.count(piece)
    return count_range(sample, piece.start, piece.stop, model.experts)


def _lacks_last(sample: SampleRoutes | _CountedSample) -> bool:
    """Whether no layer has a route for the sample's last token."""
    if isinstance(sample, _CountedSample):
        return sample.unknown_last
    token_rows = np.arange(sample.num_rows) if sample.padding_T is None else np.flatnonzero(~sample.padding_T)
    if len(token_rows) < sample.num_tokens:
        return True
    return sample.known_TL is not None and not sample.known_TL[token_rows[sample.num_tokens - 1]].any()


class _Window:
    """The loads of one window while they are counted."""

    def __init__(self, routes: Routes | RouteCounts, schedule: Schedule) -> None:
        self.schedule = schedule
        self.model = routes.model
        self.layer_numbers = routes.layer_numbers
        layers = len(routes.layer_numbers)
        shape = (schedule.micro_steps, layers, schedule.ranks)
        self.load_MLRE = np.zeros((*shape, self.model.experts), dtype=np.int64)
        self.padding_MLRE: np.ndarray | None = None
        self.unknown_MLR = np.zeros(shape, dtype=np.int64)
        self.filled_MLR = np.zeros(shape, dtype=np.int64)
        self.last_MR = np.zeros((schedule.micro_steps, schedule.ranks), dtype=np.int64)

    def add(self, sample: SampleRoutes | _CountedSample, piece: Piece, found: RangeCount) -> None:
        m, r = piece.micro_step, piece.rank
        self.load_MLRE[m, :, r] += found.count_LE
        self.unknown_MLR[m, :, r] += found.unknown_L
        if found.padding_LE.any():
            self._padding()[m, :, r] += found.padding_LE
            self.load_MLRE[m, :, r] += found.padding_LE
        if piece.stop < sample.num_tokens or not _lacks_last(sample):
            return
        if self.schedule.last_token == "drop":
            raise ScheduleError(
                f"sample {sample.name!r}: {piece} forwards its last token, which has no route, though the schedule "
                f"says last_token='drop'; forward {sample.num_tokens - 1} tokens, or say 'spread' or 'unknown'"
            )
        if self.schedule.last_token == "spread":
            self.last_MR[m, r] += 1
            self.unknown_MLR[m, :, r] -= 1

    def _padding(self) -> np.ndarray:
        if self.padding_MLRE is None:
            self.padding_MLRE = np.zeros_like(self.load_MLRE)
        return self.padding_MLRE

    def finish(self, ep: int | None) -> LoadMatrix:
        """Add the rows that have no route, and build the matrix."""
        size = ep or self.schedule.ranks
        if size < 1 or self.schedule.ranks % size:
            raise ScheduleError(f"{self.schedule.ranks} ranks do not divide into EP groups of {size}")
        groups = [slice(start, start + size) for start in range(0, self.schedule.ranks, size)]
        for m, cut in ((m, cut) for m in range(self.schedule.micro_steps) for cut in groups):
            if self.last_MR[m, cut].any():
                self.load_MLRE[m, :, cut] += self._spread_rows(m, cut, self.last_MR[m, cut])
            if self.schedule.padding_MR[m, cut].any():
                self._pad(m, cut, self.schedule.padding_MR[m, cut])
        forwarded_MLR = (self.schedule.num_tokens_MR + self.schedule.padding_MR)[:, None, :]
        coverage_MLR = np.where(forwarded_MLR > 0, 1 - self.unknown_MLR / np.maximum(forwarded_MLR, 1), 1.0)
        return LoadMatrix(
            self.load_MLRE,
            stage=self.schedule.stage,
            padding_MLRE=self.padding_MLRE,
            coverage_MLR=coverage_MLR,
            filled_MLR=self.filled_MLR if self.filled_MLR.any() else None,
            layer_numbers_L=np.array(self.layer_numbers),
        )

    def _spread_rows(self, m: int, cut: slice, tokens_R: np.ndarray) -> np.ndarray:
        self.filled_MLR[m, :, cut] += tokens_R * self.model.top_k
        return spread_rows(self.load_MLRE[m, :, cut].sum(axis=1), tokens_R, self.model.top_k)

    def _pad(self, m: int, cut: slice, tokens_R: np.ndarray) -> None:
        policy, model = self.schedule.padding_policy, self.model
        if policy == "unknown":
            self.unknown_MLR[m, :, cut] += tokens_R
            return
        if policy == "spread":
            rows = self._spread_rows(m, cut, tokens_R)
        elif policy == "arange":
            rows = arange_rows(model, self.layer_numbers, tokens_R)
        else:
            rows = first_rows(model.experts, tokens_R, model.top_k)
        self._padding()[m, :, cut] += rows
        self.load_MLRE[m, :, cut] += rows
