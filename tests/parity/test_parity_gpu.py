"""Parity in bf16 with all ranks on one CUDA device, planner and balancer included."""

import pytest
import torch

from tests.parity.case import ParityCase
from tests.parity.verdict import check_parity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("ranks", "nodes", "slots"), [(2, 1, 1), (4, 2, 0), (4, 2, 2)])
def test_balanced_training_learns_what_static_training_learns(ranks, nodes, slots):
    verdict = check_parity(ParityCase(ranks=ranks, nodes=nodes, slots=slots, steps=4, device="cuda"))
    assert verdict.has_moved
    assert [measure for measure in verdict.measures if not measure.is_good] == []
