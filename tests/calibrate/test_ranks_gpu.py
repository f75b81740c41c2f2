"""Calibration on ranks that share one GPU."""

import json

import pytest
import torch

from equipoise.calibrate import Grid, calibrate_ranks
from equipoise.calibrate.bench import AttentionShape
from equipoise.cost import Profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 1), (4, 2)])
def test_ranks_of_one_gpu_measure_a_profile_together(ranks, nodes):
    grid = Grid(
        shapes=((256, 128),),
        slots=(1, 4),
        rows=(256, 1024),
        attention=(AttentionShape(hidden=256, heads=4, kv_heads=2, width=64),),
        tokens=(256,),
        moved_rows=(1024,),
        copies=4,
    )
    rates = {"nvlink_bytes_per_s": 450 * 10**9, "network_bytes_per_s": 50 * 10**9}
    found = calibrate_ranks(grid, ranks=ranks, nodes=nodes, **rates, runs=3, commit="c" * 40)
    profile = Profile.from_json(json.dumps(found), name="shared")
    assert (profile.kind, found["ranks"]["count"]) == ("measured", ranks)
    assert 0 < profile.exchange_fixed_ns < 10**7
    assert 10**9 < profile.received_forward_bytes_per_s < 10**13
    if nodes > 1:
        assert found["exchange"]["across_source"].endswith("to a rank of another node, by nccl")
        assert 10**6 < profile.relocation_bytes_per_s < 10**12
