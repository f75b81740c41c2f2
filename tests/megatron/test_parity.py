"""Balanced experts in Megatron-Core against the unmodified model: the same bits, with replicas as near to float64."""

import os
from collections import Counter
from dataclasses import replace

import pytest

from tests.megatron.layouts import LAYOUTS

# Every layout in fp32 and every third in bf16, for time; `make megatron-versions` runs all of both.
NARROW = list(LAYOUTS) if os.environ.get("MEGATRON_LAYOUTS") == "all" else list(LAYOUTS)[::3]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "fp32") for name in LAYOUTS), *((name, "bf16") for name in NARROW)]
)
def test_placement_gives_the_same_bits_and_replicas_the_same_precision(megatron_pool, name, dtype):
    ranks = megatron_pool.call("compare", replace(LAYOUTS[name], dtype=dtype))
    for rank in ranks:
        assert rank["differences"] == [], "losses, norms, weights, master weights and moments of three steps"
        assert rank["moved"] == [False] * 3, "parameters, main_grad, DDP's buffers and the optimizer's shards stay"
        # Plans that move nothing would prove nothing.
        assert rank["displaced"] > 0 and rank["replicas"] > 0
        assert rank["on demand"] == [0] * 4
        assert rank["as planned"] == [True] * 4
    ours, plain = (total([rank[which] for rank in ranks]) for which in ("errors", "plain errors"))
    # Root-mean-square errors of a layer's experts. Those of a single expert that got few rows are a handful of
    # roundings, and differ by up to 12 % either way.
    assert {key: ours[key] / plain[key] for key in plain if ours[key] > 1.1**2 * plain[key]} == {}


def total(ranks):
    """Squared errors by layer and product, summed over experts and ranks."""
    sums = Counter()
    for errors in ranks:
        for (layer, _, product), error in errors.items():
            sums[layer, product] += error
    return sums
