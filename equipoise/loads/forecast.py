"""Forecast memory: the rows a rank receives at worst, their bytes, whether they fit, and what to do if not.

Received rows are exact (they are counted); bytes are a formula. Weights, optimizer state and attention are not part of
it: the limit is what a rank has left for received rows.

Bytes of one received row while its layer computes (D hidden, F expert width, b bytes of a value):
    recompute   (2 D + 3 F) b    input D, gate and up 2 F, activation F, output D
    update      (3 D + 6 F) b    the backward pass: input D, gate and up 2 F, activation F, and the gradients of
                                 output D, activation F, gate and up 2 F, input D
If activations are kept for the backward pass instead of recomputed (`kept`), every other layer of the micro-step
adds (D + 3 F) b per row it received. Padding rows are received, so they count.

Fixes, cheapest first, each with the peak that would remain; only fixes that suffice are offered:
    balance                  reduce the busiest rank to the mean; no token leaves its micro-step
    smaller micro-step       cut every micro-step into n, so that each holds 1/n of the rows
    recomputed activations   keep one layer at a time; the forward pass runs once more
    larger EP                as many tokens per rank, fewer experts: frees weights, but the skew is higher
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from equipoise.core import LoadMatrix, LoadsError, ModelShape, Stage
from equipoise.loads.skew import rank_loads

GIB = 2**30
Activations = Literal["recomputed", "kept"]
"""What happens to a layer's activations between forward and backward."""


class Place(NamedTuple):
    """Where in a step: window, its stage, micro-step, global layer number, rank."""

    window: int
    stage: Stage
    micro_step: int
    layer: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One change that makes a step fit."""

    name: str
    message: str
    peak_bytes: int
    """What the busiest rank would then need, minus freed memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """The most memory that received rows of a step need on one rank."""

    peak_rows: int
    peak_bytes: int
    place: Place
    rows_R: tuple[int, ...]
    """Most rows each rank receives at once."""
    bytes_R: tuple[int, ...]
    """Most bytes each rank needs at once."""
    activations: Activations
    """What the bytes count of the activations between forward and backward."""
    limit_bytes: int | None
    """None: no limit was given."""
    fixes: tuple[Fix, ...]
    """Cheapest first; empty if the step fits or no fix suffices."""

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit; None without a limit."""
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        return {
            "unit": "rows",
            "peak_rows": self.peak_rows,
            "peak_bytes": self.peak_bytes,
            "place": self.place._asdict(),
            "rank_peak_rows": list(self.rows_R),
            "rank_peak_bytes": list(self.bytes_R),
            "activations": self.activations,
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "fixes": [{"name": f.name, "words": f.message, "peak_bytes": f.peak_bytes} for f in self.fixes],
        }


def forecast_memory(
    windows: Sequence[LoadMatrix],
    model: ModelShape,
    *,
    ep: int | None = None,
    limit_gib: float | None = None,
    activations: Activations = "kept",
) -> MemoryForecast:
    """Forecast the memory received rows need over all windows of a step.

    Args:
        windows: loads of the step
        model: row sizes
        ep: ranks that receive, owners contiguous; the source ranks by default
        limit_gib: memory a rank has left for received rows, GiB
        activations: kept for the backward pass, or recomputed
    """
    if not windows:
        raise LoadsError("no windows were given; a forecast needs the loads of at least one")
    if limit_gib is not None and not 0 < limit_gib < 2**20:
        raise LoadsError(f"the memory limit is {limit_gib} GiB; it must be above 0")
    limit = None if limit_gib is None else int(limit_gib * GIB)
    rows = [rank_loads(window, ep=ep) for window in windows]
    needs = [received_bytes_MLR(r, w.stage, model, activations) for r, w in zip(rows, windows, strict=True)]
    worst = max(range(len(needs)), key=lambda w: (int(needs[w].max()), -w))
    m, layer, rank = (int(i) for i in np.unravel_index(int(needs[worst].argmax()), needs[worst].shape))
    peak = int(needs[worst][m, layer, rank])
    numbers = windows[worst].layer_numbers_L
    fixes: tuple[Fix, ...] = ()
    if limit is not None and peak > limit:
        candidates = _fixes(windows, model, needs=needs, peak=peak, limit=limit, activations=activations)
        # Of several larger EP groups only the smallest that suffices is worth naming.
        enough = [fix for fix in candidates if fix.peak_bytes <= limit]
        fixes = tuple({fix.name: fix for fix in reversed(enough)}.values())[::-1]
    return MemoryForecast(
        peak_rows=int(rows[worst][m, layer, rank]),
        peak_bytes=peak,
        place=Place(worst, windows[worst].stage, m, layer if numbers is None else int(numbers[layer]), rank),
        rows_R=tuple(np.max([r.max(axis=(0, 1)) for r in rows], axis=0).tolist()),
        bytes_R=tuple(np.max([n.max(axis=(0, 1)) for n in needs], axis=0).tolist()),
        activations=activations,
        limit_bytes=limit,
        fixes=fixes,
    )


def row_bytes(stage: Stage, model: ModelShape) -> int:
    """Bytes one received row needs while its layer computes."""
    hidden, width = (2, 3) if stage == "recompute" else (3, 6)
    return (hidden * model.hidden + width * model.expert_width) * model.weight_bytes


def received_bytes_MLR(
    rows_MLR: np.ndarray, stage: Stage, model: ModelShape, activations: Activations, *, in_flight: int = 1
) -> np.ndarray:
    """Compute the bytes that received rows need while their layer computes, those kept for backward included.

    Args:
        rows_MLR: [M, L, R] received rows
        stage: recompute or update
        model: row sizes
        activations: kept for the backward pass, or recomputed
        in_flight: micro-steps that have run forward and not yet backward, this one included, as in a pipeline

    Returns:
        [M, L, R] bytes
    """
    need = rows_MLR * row_bytes(stage, model)
    if activations == "kept" and stage == "update":
        kept = (model.hidden + 3 * model.expert_width) * model.weight_bytes
        step_MR = np.cumsum(rows_MLR.sum(axis=1), axis=0)
        held_MR = step_MR.copy()
        held_MR[in_flight:] -= step_MR[:-in_flight]
        need = need + kept * (held_MR[:, None] - rows_MLR)
    return np.asarray(need)


def _fixes(
    windows: Sequence[LoadMatrix],
    model: ModelShape,
    *,
    needs: Sequence[np.ndarray],
    peak: int,
    limit: int,
    activations: Activations,
) -> list[Fix]:
    level = max(int(np.ceil(n.mean(axis=2).max())) for n in needs)
    parts = -(-peak // limit)
    found = [
        Fix(name="balance", message="balance the experts: no token leaves its micro-step", peak_bytes=level),
        Fix(
            name="smaller micro-step",
            message=f"cut every micro-step into {parts}, so that fewer tokens are forwarded at once",
            peak_bytes=-(-peak // parts),
        ),
    ]
    now = needs[0].shape[2]
    if activations == "kept":
        recomputed = [received_bytes_MLR(rank_loads(w, ep=now), w.stage, model, "recomputed") for w in windows]
        found.append(
            Fix(
                name="recomputed activations",
                message="recompute activations in the backward pass: the forward pass runs once more",
                peak_bytes=max(int(need.max()) for need in recomputed),
            )
        )
    for wider in (now * 2**i for i in range(1, 7)):
        if model.experts % wider == 0 and all(w.num_experts == model.experts for w in windows):
            found.append(_wider(windows, model, now=now, wider=wider, activations=activations))
    return found


def _wider(windows: Sequence[LoadMatrix], model: ModelShape, *, now: int, wider: int, activations: Activations) -> Fix:
    """Compute the peak of `wider` ranks, each with as many tokens as now: rows grow with the ranks, weights shrink."""
    rows = [rank_loads(w, ep=wider) * (wider // now) for w in windows]
    peak = max(
        int(received_bytes_MLR(r, w.stage, model, activations).max()) for r, w in zip(rows, windows, strict=True)
    )
    freed = windows[0].num_layers * model.expert_bytes * (model.experts // now - model.experts // wider)
    message = f"spread the experts over EP {wider}: frees {freed / GIB:.1f} GiB of weights, taken off here"
    return Fix(name="larger EP", message=message, peak_bytes=max(0, peak - freed))
