"""Estimate the seconds a step loses to uneven experts, and the ceiling if every rank were equally loaded.

A model, not a measurement: expert GEMMs only, at a stated share of the device's published peak; no dispatch, no
attention, no overlap. It says how much is at stake before anything is measured.

    seconds of a rank   = rows x row_flops x passes / (flops x efficiency)
    passes              = 1 in recompute (forward), 3 in update (forward, and a backward of twice its work)
    seconds of a stage  = sum over (micro-step, layer) of its busiest rank, because all ranks wait for it
    ceiling             = the same with the mean rank in place of the busiest
    lost                = seconds - ceiling

Invariants (asserted by the tests):
1. Lost is zero exactly when every (micro-step, layer) is level, and never negative.
2. Seconds are additive over micro-steps and windows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import LoadsError, Stage

EFFICIENCY = 0.5
"""Share of peak a grouped GEMM reaches: Qwen3-30B-A3B experts at 32k rows run 0.64 ms on an H200, 0.49 of its peak."""
PASSES: dict[Stage, int] = {"recompute": 1, "update": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTime:
    """Seconds of expert compute in one stage, or in a whole step."""

    seconds: float
    """With the loads as they are."""
    ceiling_seconds: float
    """If every rank carried the mean."""

    @property
    def lost_seconds(self) -> float:
        """What perfect balance would give back."""
        return self.seconds - self.ceiling_seconds

    @property
    def lost_share(self) -> float:
        """Lost seconds as a share of the seconds."""
        return self.lost_seconds / self.seconds if self.seconds else 0.0

    def __add__(self, other: "LostTime") -> "LostTime":
        return LostTime(
            seconds=self.seconds + other.seconds, ceiling_seconds=self.ceiling_seconds + other.ceiling_seconds
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "seconds": self.seconds,
            "ceiling_seconds": self.ceiling_seconds,
            "lost_seconds": self.lost_seconds,
            "lost_share": self.lost_share,
        }


def estimate_lost(
    rank_load_MLR: np.ndarray, *, stage: Stage, row_flops: int, flops: int, efficiency: float = EFFICIENCY
) -> LostTime:
    """Estimate the seconds of one window.

    Args:
        rank_load_MLR: [M, L, R] rows each rank receives
        stage: "recompute" or "update"
        row_flops: floating-point operations of one row in the forward pass
        flops: published peak of one rank, operations per second
        efficiency: share of the peak that is reached
    """
    if not 0 < efficiency <= 1:
        raise LoadsError(f"efficiency is {efficiency}; it must be a share above 0, at most 1")
    row_seconds = row_flops * PASSES[stage] / (flops * efficiency)
    return LostTime(
        seconds=float(rank_load_MLR.max(axis=2).sum() * row_seconds),
        ceiling_seconds=float(rank_load_MLR.mean(axis=2).sum() * row_seconds),
    )
