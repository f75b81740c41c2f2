"""Predict the seconds of one window's expert layers: as they are, and if every rank were level, by the cost model.

Knows loads and prices. Decides nothing about where experts go: that is `trial.py`, with the planner.

How a window is priced, per (micro-step, layer), every expert at its owner:
1. now: compute of the busiest rank, and the all-to-all of the busiest link (`cost`).
2. level: the same rows at the same sources, dealt out to the experts in turn, so that ranks differ by one row at most;
   priced by the same kernel, so compute is that of the mean rank with all its experts busy.
3. balanced: the smaller of now and level, part by part, because doing nothing is always a choice.
A step with several EP groups takes its slowest group, window by window.

Invariants (asserted by the tests):
1. Lost is never negative, and zero where the loads are level.
2. Seconds are additive over micro-steps and windows; stages are priced apart.
3. `now` of a group is the planner's `static_seconds` of the same loads.
4. Where sources are not the ranks of the EP group, compute is still priced and the all-to-all is not: None, never 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import Seconds
from equipoise.cost import CostModel
from equipoise.cost.kernels import COMPUTE, EXCHANGE
from equipoise.cost.ranks import level_slots
from equipoise.planner.pricing import price_window

NS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted seconds of a window, a stage or a step, in expert layers alone."""

    now: Seconds
    """Every expert at its owner."""
    balanced: Seconds
    """If every rank were level, at no cost."""
    planned: Seconds | None = None
    """With a plan, every cost charged; None where none was made."""
    has_all_to_all: bool = True
    """Whether source ranks are known, so that the all-to-all is priced."""

    @property
    def lost_seconds(self) -> float:
        """What perfect balance would give back."""
        return self.now.total - self.balanced.total

    @property
    def saved_seconds(self) -> float:
        """What the plan gives back; 0 without one."""
        return 0.0 if self.planned is None else self.now.total - self.planned.total

    def share(self, seconds: float) -> float:
        """Seconds as a share of what is taken now."""
        return seconds / self.now.total if self.now.total else 0.0

    def __add__(self, other: "Prediction") -> "Prediction":
        both_planned = self.planned is not None and other.planned is not None
        return Prediction(
            now=add_seconds([self.now, other.now]),
            balanced=add_seconds([self.balanced, other.balanced]),
            planned=add_seconds([p for p in (self.planned, other.planned) if p]) if both_planned else None,
            has_all_to_all=self.has_all_to_all and other.has_all_to_all,
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON; a part that is not priced is null."""
        return {
            "now": self._parts(self.now),
            "balanced": self._parts(self.balanced),
            "planned": None if self.planned is None else self._parts(self.planned),
            "lost": {"seconds": self.lost_seconds, "share": self.share(self.lost_seconds)},
            "saved": None
            if self.planned is None
            else {"seconds": self.saved_seconds, "share": self.share(self.saved_seconds)},
        }

    def _parts(self, seconds: Seconds) -> dict[str, float | None]:
        return {
            "compute": seconds.compute,
            "all_to_all": seconds.all_to_all if self.has_all_to_all else None,
            "transfers": transfer_seconds(seconds),
            "total": seconds.total,
        }


def transfer_seconds(seconds: Seconds) -> float:
    """Seconds for moving experts that nothing hides: pull, return, publish, collect."""
    return seconds.pull + seconds.return_ + seconds.publish + seconds.collect


def add_seconds(parts: Iterable[Seconds]) -> Seconds:
    """Add up seconds, part by part."""
    found = list(parts)
    return Seconds(**{f.name: sum(getattr(s, f.name) for s in found) for f in fields(Seconds)})


def slowest(groups: Iterable[Seconds]) -> Seconds:
    """Return the seconds of the slowest group, which the others wait for; the first of equals."""
    return max(groups, key=lambda seconds: seconds.total)


def predict(groups: Sequence[LoadMatrix], *, cluster: Cluster, model: ModelShape) -> Prediction:
    """Predict one window.

    Args:
        groups: the window's loads, one matrix per EP group; sources that are not the group's ranks leave compute alone
        cluster: the EP group and its links
        model: the expert's shape
    """
    has_all_to_all = all(loads.num_ranks == cluster.ep for loads in groups)
    now, balanced = [], []
    for loads in groups:
        cost = CostModel.of(cluster, model, stage=loads.stage)
        load_MLRE = loads.load_MLRE if has_all_to_all else _gather_sources(loads.load_MLRE, cluster.ep)
        busy_ML = level_slots(load_MLRE.sum(axis=2), cluster.ep) * cluster.ep
        now_ML2, level_ML2 = _price(load_MLRE, cost), _price(deal_out(load_MLRE, busy_ML), cost)
        now.append(_seconds(now_ML2, has_all_to_all))
        balanced.append(_seconds(np.minimum(now_ML2, level_ML2), has_all_to_all))
    return Prediction(now=slowest(now), balanced=slowest(balanced), has_all_to_all=has_all_to_all)


def deal_out(load_MLRE: np.ndarray, busy_ML: np.ndarray | None = None) -> np.ndarray:
    """[M, L, R, E] the same rows at the same sources, dealt to ranks and their experts in turn, like cards.

    Args:
        load_MLRE: [M, L, R, E] rows
        busy_ML: [M, L] to how many experts, equally many of each rank; to all by default
    """
    ranks, experts = load_MLRE.shape[2:]
    busy_ML = np.full(load_MLRE.shape[:2], experts) if busy_ML is None else np.maximum(busy_ML, 1)
    busy_ML11, turn_E = busy_ML[:, :, None, None], np.arange(experts)
    end_MLR1 = np.cumsum(load_MLRE.sum(axis=3), axis=2)[..., None]
    start_MLR1 = end_MLR1 - load_MLRE.sum(axis=3)[..., None]
    # Row i of an entry has turn i modulo the busy experts; so many rows of start..end-1 have each turn.
    ahead_MLRE = busy_ML11 - 1 - turn_E
    dealt_MLRE = (end_MLR1 + ahead_MLRE) // busy_ML11 - (start_MLR1 + ahead_MLRE) // busy_ML11
    level_MLRE = np.empty_like(dealt_MLRE)
    level_MLRE[..., turn_E % ranks * (experts // ranks) + turn_E // ranks] = dealt_MLRE * (turn_E < busy_ML11)
    return level_MLRE


def _gather_sources(load_MLRE: np.ndarray, ranks: int) -> np.ndarray:
    """[M, L, R, E] all rows at the first source: who computes them does not depend on where they come from."""
    micro_steps, layers, _, experts = load_MLRE.shape
    gathered = np.zeros((micro_steps, layers, ranks, experts), dtype=np.int64)
    gathered[:, :, 0] = load_MLRE.sum(axis=2)
    return gathered


def _price(load_MLRE: np.ndarray, cost: CostModel) -> np.ndarray:
    """[M, L, 2] nanoseconds of compute and all-to-all, every expert at its owner."""
    micro_steps, layers, ranks, experts = load_MLRE.shape
    none_MLRS = np.zeros((micro_steps, layers, ranks, 0), dtype=np.int64)
    line_MLC = price_window(
        load_MLRE,
        np.tile(np.arange(experts) // (experts // ranks), (layers, 1)),
        rep_expert_MLRS=none_MLRS,
        rep_rows_MLRS=none_MLRS,
        node_R=cost.cluster.node_array_R,
        tables=cost.tables(experts // ranks),
    )
    return line_MLC[..., [COMPUTE, EXCHANGE]]


def _seconds(ns_ML2: np.ndarray, has_all_to_all: bool) -> Seconds:
    compute_ns, exchange_ns = (int(part) for part in ns_ML2.sum(axis=(0, 1)))
    return Seconds(compute=compute_ns * NS, all_to_all=exchange_ns * NS if has_all_to_all else 0.0)
