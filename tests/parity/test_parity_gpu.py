"""Parity in bf16 with all ranks on one CUDA device, by gloo and by NCCL, planner and balancer included."""

import pytest
import torch

from tests.parity.case import ParityCase
from tests.parity.profile import write_slow_profile
from tests.parity.verdict import check_parity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_by_seconds_everything_that_pays_learns_the_same(tmp_path, backend):
    sizes = {"ranks": 4, "nodes": 2, "slots": 2, "layers": 2, "tokens": 32, "width": 8}
    way = {"profile": write_slow_profile(tmp_path), "device": "cuda", "backend": backend}
    verdict = check_parity(ParityCase(**sizes, steps=3, **way))
    assert verdict.has_moved and verdict.displaced > 0
    assert [measure for measure in verdict.measures if not measure.is_good] == []


@pytest.mark.parametrize(
    ("backend", "ranks", "nodes", "slots"),
    [
        *(("gloo", *sizes) for sizes in [(2, 1, 1), (4, 2, 0), (4, 2, 2)]),
        *(("nccl", *sizes) for sizes in [(2, 1, 1), (2, 2, 0), (4, 2, 2), (8, 2, 1)]),
    ],
)
def test_balanced_training_learns_what_static_training_learns(backend, ranks, nodes, slots):
    verdict = check_parity(ParityCase(ranks=ranks, nodes=nodes, slots=slots, steps=4, device="cuda", backend=backend))
    assert verdict.has_moved
    assert [measure for measure in verdict.measures if not measure.is_good] == []
