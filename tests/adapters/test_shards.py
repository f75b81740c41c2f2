"""Cutting and gathering experts on ranks."""

import pytest
import torch

from equipoise.adapters.transformers import give_back, lend
from tests.adapters import shard_work


@pytest.mark.dist(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
def test_gathering_what_was_cut_gives_the_same_bytes(pool, dtype):
    full = torch.arange(8 * 3 * 5).view(8, 3, 5).to(dtype)
    full[3] = -full[3]
    for rank, (own, everywhere, at_two) in enumerate(pool.run(shard_work.cut_and_gather, 4, full)):
        assert torch.equal(own, full[2 * rank : 2 * rank + 2])
        assert everywhere.dtype == dtype
        assert torch.equal(everywhere, full)
        assert (at_two is None) == (rank != 2)
        assert at_two is None or torch.equal(at_two, full)


def test_a_parameter_that_lends_its_experts_stays_the_same_object_without_memory():
    parameter = torch.nn.Parameter(torch.arange(6.0).view(3, 2))
    other_name = parameter
    lend(parameter)
    assert parameter.untyped_storage().nbytes() == 0
    give_back(parameter, torch.ones(3, 2))
    assert other_name is parameter
    assert torch.equal(other_name.detach(), torch.ones(3, 2))
    assert parameter.requires_grad
