"""Windows from what is given: joined and cut without losing anything."""

from dataclasses import replace

import numpy as np

from equipoise.core import LoadMatrix
from equipoise.sim.windows import joined, layers_of
from tests.sim.steps import MODEL, skewed_loads


def padded() -> LoadMatrix:
    """Loads with padding, coverage and layer numbers."""
    loads = skewed_loads(2, micro_steps=2)
    return LoadMatrix(
        loads.load_MLRE,
        padding_MLRE=loads.load_MLRE // 10,
        coverage_MLR=np.full(loads.load_MLRE.shape[:3], 0.75),
        layer_numbers_L=np.array([1, 2, 5, 7]),
    )


def test_joined_windows_hold_all_micro_steps_in_order():
    first, second = padded(), skewed_loads(5, micro_steps=3)
    both = joined([first, second], "recompute")
    assert both.stage == "recompute"
    assert np.array_equal(both.load_MLRE, np.concatenate([first.load_MLRE, second.load_MLRE]))
    assert np.array_equal(both.padding_MLRE[:2], first.padding_MLRE)
    assert not both.padding_MLRE[2:].any()
    assert both.coverage_MLR[:2].tolist() == first.coverage_MLR.tolist()
    assert (both.coverage_MLR[2:] == 1).all()


def test_layers_keep_what_belongs_to_them():
    some = layers_of(padded(), slice(1, 3))
    assert some.layer_numbers_L.tolist() == [2, 5]
    assert np.array_equal(some.load_MLRE, padded().load_MLRE[:, 1:3])
    assert some.padding_MLRE.shape == some.load_MLRE.shape
    assert some.coverage_MLR.shape == some.load_MLRE.shape[:3]
    filled = replace(skewed_loads(), filled_MLR=skewed_loads().load_MLRE[..., 0])
    assert np.array_equal(layers_of(filled, slice(1, 3)).filled_MLR, filled.filled_MLR[:, 1:3])
    assert joined([filled, skewed_loads()], "update").num_filled == filled.num_filled > 0
    assert layers_of(skewed_loads(), slice(0, MODEL.layers)) == skewed_loads()
