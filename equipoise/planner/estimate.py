"""Partial knowledge: loads whose routes are partly unknown, completed from what the window does know.

Steps, per layer and source rank:
1. Where a share c of a micro-step's tokens is known (c > 0), its rows are scaled by 1 / c.
2. Where nothing is known (c = 0), the mean of the known micro-steps of that layer and source stands in, or of the
   layer's other sources, or nothing.

Integers after the shares are read in millionths, so every rank estimates alike.

Invariants (asserted by the tests):
1. Full coverage changes nothing.
2. Known rows never shrink.
"""

import numpy as np

from equipoise.core import LoadMatrix

MILLION = 10**6


def complete(loads: LoadMatrix) -> tuple[LoadMatrix, float]:
    """Return loads with unknown rows estimated, and the share of all rows that is an estimate."""
    if loads.coverage_MLR is None or bool(np.all(loads.coverage_MLR == 1.0)):
        return loads, 0.0
    known_MLR = np.round(loads.coverage_MLR * MILLION).astype(np.int64)
    full = loads.load_MLRE * MILLION // np.maximum(known_MLR, 1)[..., None]
    full = np.where(known_MLR[..., None] == 0, loads.load_MLRE, np.maximum(full, loads.load_MLRE))
    seen_MLR = known_MLR > 0
    count_LR = seen_MLR.sum(axis=0)
    mean_LRE = (full * seen_MLR[..., None]).sum(axis=0) // np.maximum(count_LR, 1)[..., None]
    layer_LE = mean_LRE.sum(axis=1) // np.maximum((count_LR > 0).sum(axis=1), 1)[:, None]
    stand_in_LRE = np.where((count_LR > 0)[..., None], mean_LRE, layer_LE[:, None, :])
    full = np.where(seen_MLR[..., None], full, np.maximum(stand_in_LRE[None], full))
    total = int(full.sum())
    share = (total - int(loads.load_MLRE.sum())) / total if total else 0.0
    completed = LoadMatrix(
        full, stage=loads.stage, padding_MLRE=loads.padding_MLRE, layer_numbers_L=loads.layer_numbers_L
    )
    return completed, share
