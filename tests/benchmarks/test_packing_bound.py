"""The exact optimum of small batches, compared with every packing and every home tried one by one."""

from itertools import combinations

import numpy as np
import pytest

from benchmarks.packing_bound import exact_crossing


@pytest.mark.parametrize("seed", range(4))
def test_exact_crossing_is_the_best_of_all_divisions_and_homes(seed: int) -> None:
    rows_BLE = np.random.default_rng(seed).integers(0, 9, size=(6, 2, 4))
    kept = []
    for first in combinations(range(6), 3):
        is_first_B = np.isin(np.arange(6), first)
        by_layer = []
        for layer in range(2):
            homes = (np.isin(np.arange(4), chosen) for chosen in combinations(range(4), 2))
            stays = (is_first_B[:, None] == is_home_E for is_home_E in homes)
            by_layer.append(max(int(rows_BLE[:, layer][stay].sum()) for stay in stays))
        kept.append(sum(by_layer))
    share = 1 - np.array(kept) / rows_BLE.sum()
    assert exact_crossing(rows_BLE) == pytest.approx((share.mean(), share.min()))
