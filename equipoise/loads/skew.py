"""Skew: busiest rank over mean rank, in rows, of one layer in one micro-step. The one definition of imbalance.

A rank's load is the rows it *receives*: those of the experts that have their home on it, from all source ranks.
Without a placement the homes are the owners, contiguous as in static expert parallelism: expert e on rank
e // (experts / ranks).
1. `rank_loads` sums rows over source ranks and over the experts of each rank: `rank_load_MLR`.
2. `skew_ML` divides the busiest rank by the mean rank, per (micro-step, layer). Nothing is averaged before that: two
   opposite micro-steps of skew s have mean skew s, not 1. An idle (micro-step, layer) has skew 1.
3. `skew` describes the distribution of these ratios: mean, p50, p95, max, of all, per layer and per micro-step; with
   padding (what is dispatched) and without it (what the tokens chose).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import LoadMatrix, LoadsError, Stage
from equipoise.core.value import Value, int64_array, require_int, require_kind


@dataclass(frozen=True, slots=True, eq=False)
class Distribution(Value):
    """Skew of every (micro-step, layer), and figures of all of them."""

    skew_ML: np.ndarray
    """[M, L] busiest rank over mean rank."""

    @property
    def mean(self) -> float:
        """Mean over all micro-steps and layers."""
        return float(self.skew_ML.mean())

    @property
    def p50(self) -> float:
        """Median."""
        return float(np.percentile(self.skew_ML, 50))

    @property
    def p95(self) -> float:
        """95th percentile."""
        return float(np.percentile(self.skew_ML, 95))

    @property
    def max(self) -> float:
        """Worst (micro-step, layer)."""
        return float(self.skew_ML.max())

    @property
    def worst(self) -> tuple[int, int]:
        """(micro-step, layer index) of the worst skew."""
        m, layer = np.unravel_index(int(self.skew_ML.argmax()), self.skew_ML.shape)
        return int(m), int(layer)

    def layers(self) -> list["Distribution"]:
        """One distribution per layer, over its micro-steps."""
        return [Distribution(self.skew_ML[:, layer : layer + 1]) for layer in range(self.skew_ML.shape[1])]

    def micro_steps(self) -> list["Distribution"]:
        """One distribution per micro-step, over its layers."""
        return [Distribution(self.skew_ML[m : m + 1]) for m in range(self.skew_ML.shape[0])]

    def to_dict(self) -> dict[str, float]:
        """The four figures, for JSON."""
        return {name: round(getattr(self, name), 4) for name in ("mean", "p50", "p95", "max")}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SkewSummary(Value):
    """Skew of one stage at one width of expert parallelism, counted in rows."""

    ranks: int
    """Width of expert parallelism."""
    stage: Stage | None
    """None: bare rank loads were given."""
    dispatched: Distribution
    """With padding rows: what ranks receive."""
    without_padding: Distribution
    """Rows of real tokens alone."""

    @property
    def mean(self) -> float:
        """Mean skew of what is dispatched."""
        return self.dispatched.mean

    @property
    def p50(self) -> float:
        """Median skew of what is dispatched."""
        return self.dispatched.p50

    @property
    def p95(self) -> float:
        """95th percentile of the skew of what is dispatched."""
        return self.dispatched.p95

    @property
    def max(self) -> float:
        """Worst skew of what is dispatched."""
        return self.dispatched.max

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON; `layers` and `micro_steps` are of what is dispatched."""
        return {
            "unit": "rows",
            "ranks": self.ranks,
            "stage": self.stage,
            **self.dispatched.to_dict(),
            "without_padding": self.without_padding.to_dict(),
            "layers": [d.to_dict() for d in self.dispatched.layers()],
            "micro_steps": [d.to_dict() for d in self.dispatched.micro_steps()],
        }


def skew(
    loads: LoadMatrix | Sequence[LoadMatrix] | np.ndarray, *, ep: int | None = None, home_LE: np.ndarray | None = None
) -> SkewSummary:
    """Summarise skew.

    Args:
        loads: one window, several windows of one stage, or `rank_load_MLR` of any placement
        ep: ranks that receive; the source ranks by default
        home_LE: [L, E] home rank of each expert; contiguous owners by default
    """
    if isinstance(loads, np.ndarray):
        if ep is not None or home_LE is not None:
            raise LoadsError("rank_load_MLR already says who receives; leave ep and home_LE out")
        ratios = Distribution(skew_ML(loads))
        return SkewSummary(ranks=loads.shape[2], stage=None, dispatched=ratios, without_padding=ratios)
    require_kind("loads", loads, LoadMatrix, Sequence, np.ndarray, error=LoadsError)
    windows = [loads] if isinstance(loads, LoadMatrix) else list(loads)
    for window in windows:
        require_kind("a window of loads", window, LoadMatrix, error=LoadsError)
    stages = sorted({window.stage for window in windows})
    if len(stages) != 1:
        raise LoadsError(
            f"windows of {len(stages)} stages ({', '.join(stages) or 'none'}) given; skew is of one stage at a time, "
            "or recomputation would count twice"
        )
    with_padding = [rank_loads(w, ep=ep, home_LE=home_LE) for w in windows]
    without = [rank_loads(w.without_padding(), ep=ep, home_LE=home_LE) for w in windows]
    return SkewSummary(
        ranks=with_padding[0].shape[2],
        stage=windows[0].stage,
        dispatched=Distribution(np.concatenate([skew_ML(x) for x in with_padding])),
        without_padding=Distribution(np.concatenate([skew_ML(x) for x in without])),
    )


def rank_loads(loads: LoadMatrix, *, ep: int | None = None, home_LE: np.ndarray | None = None) -> np.ndarray:
    """Sum the rows each rank receives.

    Args:
        loads: one window
        ep: ranks that receive, whatever the number of source ranks; the source ranks by default
        home_LE: [L, E] home rank of each expert; contiguous owners by default

    Returns:
        [M, L, R] rows.
    """
    ranks = require_int("ep", loads.num_ranks if ep is None else ep, low=1, error=LoadsError)
    total_MLE = loads.total_MLE()
    if home_LE is None:
        if loads.num_experts % ranks:
            raise LoadsError(
                f"{loads.num_experts} experts do not divide by {ranks} ranks; use an EP size that divides them"
            )
        owned = loads.num_experts // ranks
        return np.asarray(total_MLE.reshape(*total_MLE.shape[:2], ranks, owned).sum(axis=3))
    home = int64_array("home_LE", home_LE, ndim=2, error=LoadsError)
    if home.shape != total_MLE.shape[1:] or home.min() < 0 or home.max() >= ranks:
        raise LoadsError(
            f"home_LE must name ranks 0..{ranks - 1} in shape {total_MLE.shape[1:]}, got {home.min()}..{home.max()} "
            f"in shape {home.shape}"
        )
    at_LER = (home[:, :, None] == np.arange(ranks)).astype(np.int64)
    return np.asarray(np.einsum("mle,ler->mlr", total_MLE, at_LER))


def skew_ML(rank_load_MLR: np.ndarray) -> np.ndarray:
    """Return [M, L] busiest rank over mean rank; 1 if no rank has a row."""
    load = int64_array("rank_load_MLR", rank_load_MLR, ndim=3, error=LoadsError)
    if 0 in load.shape or load.min() < 0:
        raise LoadsError(f"rank_load_MLR must be non-negative with no empty axis, got shape {load.shape}")
    total_ML = load.sum(axis=2)
    busiest_ML = load.max(axis=2) * load.shape[2]
    return np.where(total_ML > 0, busiest_ML / np.maximum(total_ML, 1), 1.0)
