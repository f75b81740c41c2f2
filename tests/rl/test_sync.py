"""Weight sync: the copy holds the owners' bits, and a damaged, stale or misplaced expert is named."""

import pytest
import torch

from equipoise.rl.learner import Part, find_difference, owned_fingerprints
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
    config = work.small(model={"family": family})
    results = pool.run(work.synced, 2, config)
    assert results[0][2] == results[1][2], "all ranks give the weights the same name"
    assert all(work.same_weights(copied, whole) for copied, whole, _ in results)


@pytest.mark.dist(4)
@pytest.mark.parametrize("groups", [{"ranks_per_node": 2}, {"ep": 2}], ids=["two nodes", "two EP groups"])
def test_every_node_and_every_group_has_a_store_of_all_experts(pool, groups):
    results = pool.run(work.synced, 4, work.small(ranks=4, **groups))
    assert len({version for _, _, version in results}) == 1
    for copied, _, _ in results:
        assert work.same_weights(copied, results[0][1])


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("harm", "copy_of", "experts", "owner"),
    [("swapped", 0, [1], 0), ("stale", 0, [5], 1), ("damaged", 0, [2], 0), ("copied", 1, [7], 1)],
)
def test_an_expert_that_is_not_its_owners_stops_every_rank_by_name(pool, harm, copy_of, experts, owner):
    said = pool.run(work.harmed_sync, 2, work.small(), harm)
    assert (
        said[0]
        == said[1]
        == (
            f"weight sync: the rollout copy of rank {copy_of} has experts {experts} of "
            f"`model.layers.0.mlp.experts.gate_up_proj` that are not those rank {owner} owns; stop and resume from "
            "the last checkpoint"
        )
    )


def test_a_part_that_is_not_its_owners_is_named():
    weights = {"experts": torch.arange(12.0).view(4, 3), "gate": torch.ones(2)}
    held = [owned_fingerprints({Part("experts", 2 * rank, 2): weights["experts"][2 * rank :][:2]}) for rank in range(2)]
    held[0] |= owned_fingerprints({Part("gate"): weights["gate"]})
    assert not find_difference(weights, held)
    swapped = {**weights, "experts": weights["experts"][[0, 1, 3, 2]]}
    assert find_difference(swapped, held) == "experts [2, 3] of `experts` that are not those rank 1 owns"
    stale = {**weights, "gate": weights["gate"] + 1}
    assert find_difference(stale, held) == "a `gate` that is not that of rank 0"
