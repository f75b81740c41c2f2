"""Cutting and gathering experts on ranks."""

import pytest
import torch

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
