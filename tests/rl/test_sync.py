"""Weight sync: the copy holds the owners' bits, and a damaged, stale or misplaced expert is named."""

import pytest
import torch

from equipoise.core import TransferError
from equipoise.rl.sync import check_copy, tensor_hash
from tests.rl import work
from tests.rl.test_model import FAMILIES


@pytest.mark.dist(2)
@pytest.mark.parametrize("mode", ["off", "static", "equipoise"])
def test_the_copy_has_the_bits_of_the_learner_in_every_mode(pool, mode):
    for copied, whole, version in pool.run(work.synced, 2, work.small(balance={"mode": mode})):
        assert work.same_weights(copied, whole)
        assert len(version) == 64


@pytest.mark.dist(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_copy_has_the_bits_of_the_learner_in_every_family(pool, family):
    config = work.small(model={"family": family}, balance={"mode": "static"})
    results = pool.run(work.synced, 2, config)
    assert results[0][2] == results[1][2], "all ranks give the weights the same name"
    assert all(work.same_weights(copied, whole) for copied, whole, _ in results)


def test_a_part_that_is_not_its_owners_is_named():
    weights = {"experts": torch.arange(12.0).view(4, 3), "gate": torch.ones(2)}
    hashes = [{("experts", 2 * rank, 2): tensor_hash(weights["experts"][2 * rank : 2 * rank + 2])} for rank in range(2)]
    hashes[0][("gate", 0, 0)] = tensor_hash(weights["gate"])
    check_copy(weights, hashes)
    swapped = {**weights, "experts": weights["experts"][[0, 1, 3, 2]]}
    with pytest.raises(TransferError, match=r"experts 2..3 of `experts` in the rollout copy is not what rank 1 owns"):
        check_copy(swapped, hashes)
    stale = {**weights, "gate": weights["gate"] + 1}
    with pytest.raises(TransferError, match="`gate` in the rollout copy is not what rank 0 owns"):
        check_copy(stale, hashes)


def test_a_hash_sees_one_bit_in_any_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.zeros(5, dtype=dtype)
        other = tensor.clone()
        other[3] = 1
        assert tensor_hash(tensor) == tensor_hash(tensor.clone()) != tensor_hash(other)
