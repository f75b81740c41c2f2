"""Forecast the memory of a step without a plan: what the fullest rank needs, where, whether it fits, and what to do.

Rows are counted, every expert at its owner; bytes are those of `memory`, the one memory model. Weights, optimizer state
and attention are not part of it: the limit is what a rank has left.

Fixes, cheapest first, each with the peak that would remain; only fixes that suffice are offered:
    balance                  reduce the busiest rank to the mean; no token leaves its micro-step
    smaller micro-step       cut every micro-step into n, so that each holds 1/n of the rows
    recomputed activations   keep one layer at a time; the forward pass runs once more
    larger EP                as many tokens per rank, fewer experts: frees weights, but the skew is higher
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from equipoise.core import LoadMatrix, LoadsError, ModelShape, Stage
from equipoise.core.options import Activations
from equipoise.loads.memory import GIB, WindowMemory, WindowRows, window_memory


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
    """The most memory that one rank needs in a step for rows, and for what the experts make of them."""

    peak_rows: int
    peak_bytes: int
    parts: dict[str, int]
    """Bytes of the peak by part, see `WindowMemory`."""
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
            "parts": self.parts,
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
    """Forecast the memory of all windows of a step, every expert at its owner.

    Args:
        windows: loads of the step
        model: row sizes
        ep: ranks that receive, owners contiguous; the source ranks by default
        limit_gib: memory a rank has left after weights, gradients and optimizer, GiB
        activations: kept for the backward pass, or recomputed
    """
    if not windows:
        raise LoadsError("no windows were given; a forecast needs the loads of at least one")
    limit = limit_in_bytes(limit_gib)
    rows = [WindowRows.at_owners(window, ep=ep) for window in windows]
    memories = [window_memory(r, model, activations=activations) for r in rows]
    worst = max(range(len(memories)), key=lambda w: (int(memories[w].peak_R.max()), -w))
    memory, window = memories[worst], windows[worst]
    place = micro_step, layer, rank = memory.place()
    peak, numbers = int(memory.total_MLR[place]), window.layer_numbers_L
    fixes: tuple[Fix, ...] = ()
    if limit is not None and peak > limit:
        candidates = [
            Fix(
                name="balance",
                message="balance the experts: no token leaves its micro-step",
                peak_bytes=_peak([r.levelled() for r in rows], model, activations),
            ),
            *find_fixes(memory, limit=limit, rows=rows, model=model, activations=activations),
            *wider_groups(windows, model, now=rows[0].received_MLR.shape[2], activations=activations),
        ]
        # Of several larger EP groups only the smallest that suffices is worth naming.
        enough = [fix for fix in candidates if fix.peak_bytes <= limit]
        fixes = tuple({fix.name: fix for fix in reversed(enough)}.values())[::-1]
    return MemoryForecast(
        peak_rows=int(rows[worst].received_MLR[place]),
        peak_bytes=peak,
        parts=memory.parts(place),
        place=Place(worst, window.stage, micro_step, layer if numbers is None else int(numbers[layer]), rank),
        rows_R=tuple(np.max([r.received_MLR.max(axis=(0, 1)) for r in rows], axis=0).tolist()),
        bytes_R=tuple(np.max([m.peak_R for m in memories], axis=0).tolist()),
        activations=activations,
        limit_bytes=limit,
        fixes=fixes,
    )


def limit_in_bytes(limit_gib: float | None) -> int | None:
    """Return a limit given in GiB; None stays none."""
    if limit_gib is not None and not 0 < limit_gib < 2**20:
        raise LoadsError(f"the memory limit is {limit_gib} GiB; it must be above 0")
    return None if limit_gib is None else int(limit_gib * GIB)


def say_need(memory: WindowMemory, *, limit: int, model: ModelShape, fixes: Sequence[Fix]) -> str:
    """Return where a window needs most, its parts, the limit, and the cheapest fix."""
    place = memory.place()
    parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in memory.parts(place).items() if size)
    enough = [fix for fix in fixes if fix.peak_bytes <= limit]
    remedy = "no smaller micro-step, recomputation or larger EP is enough alone"
    if enough:
        remedy = f"cheapest remedy: {enough[0].message} ({enough[0].peak_bytes / GIB:.3g} GiB)"
    return (
        f"micro-step {place[0]}, layer {model.layer_numbers[place[1]]}: rank {place[2]} needs "
        f"{int(memory.total_MLR[place]) / GIB:.3g} GiB ({parts}), the limit is {limit / GIB:.3g} GiB; {remedy}"
    )


def find_fixes(
    memory: WindowMemory, *, limit: int, rows: Sequence[WindowRows], model: ModelShape, activations: Activations
) -> list[Fix]:
    """Return what changes no expert's place: smaller micro-steps, and recomputed activations where they are kept.

    Args:
        memory: of the window with the peak
        limit: bytes
        rows: of every window that is to fit
    """
    place = memory.place()
    parts = memory.parts(place)
    scaled = parts["activations"] + parts["rows"] + parts["tables"] + parts["page"]
    fixed, found = int(memory.total_MLR[place]) - scaled, []
    if fixed < limit:
        cuts = -(-scaled // (limit - fixed))
        message = (
            f"cut every micro-step into {cuts} (a token budget of 1/{cuts}), so that fewer tokens are forwarded at once"
        )
        found.append(Fix(name="smaller micro-step", message=message, peak_bytes=fixed + -(-scaled // cuts)))
    if activations == "kept":
        found.append(
            Fix(
                name="recomputed activations",
                message="recompute activations in the backward pass: the forward pass runs once more",
                peak_bytes=_peak(rows, model, "recomputed"),
            )
        )
    return found


def wider_groups(windows: Sequence[LoadMatrix], model: ModelShape, *, now: int, activations: Activations) -> list[Fix]:
    """Forecast larger EP groups of ranks with as many tokens as now: rows grow with the ranks, weights shrink."""
    found = []
    for wider in (now * 2**i for i in range(1, 7)):
        if model.experts % wider == 0 and all(w.num_experts == model.experts for w in windows):
            rows = [WindowRows.at_owners(window, ep=wider).scaled(wider // now) for window in windows]
            freed = windows[0].num_layers * model.expert_bytes * (model.experts // now - model.experts // wider)
            message = f"spread the experts over EP {wider}: frees {freed / GIB:.1f} GiB of weights, taken off here"
            left = max(0, _peak(rows, model, activations) - freed)
            found.append(Fix(name="larger EP", message=message, peak_bytes=left))
    return found


def _peak(rows: Sequence[WindowRows], model: ModelShape, activations: Activations) -> int:
    return max(int(window_memory(each, model, activations=activations).peak_R.max()) for each in rows)
