"""The gradient norm: one number, whatever the placement."""

import numpy as np
import pytest
import torch

from equipoise.core import TransferError
from equipoise.layer.checkpoint import expert_squared_norms, gradient_norm
from equipoise.transfer.node import ExpertWeights
from tests.transfer.windows import all_experts, experts_at, random_plan, take


def norms(group, plans, seed):
    """The norm at the owners, and at the homes of each plan."""
    rank, plan = group.rank(), plans[0]
    layers, experts = plan.home_LE.shape
    everything = all_experts(experts, layers, seed, has_bias=True)
    owned = range(rank * plan.home_slots, (rank + 1) * plan.home_slots)
    found = [gradient_norm([take(e, owned) for e in everything], group=group)]
    for placed in plans:
        at_homes = [take(everything[layer], experts_at(placed, layer, rank)) for layer in range(layers)]
        place_LE = placed.home_LE * placed.home_slots + placed.home_slot_LE
        found.append(gradient_norm(at_homes, group=group, place_LE=place_LE))
    found.append(gradient_norm([take(e, owned) for e in everything], group=group, other_squared=found[0] ** 2))
    return found


@pytest.mark.dist(8)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_norm_has_the_same_bits_for_any_placement(pool, ranks):
    plans = [random_plan((0,) * ranks, seed=s, home_slots=8 // ranks * 2) for s in range(6)]
    results = pool.run(norms, ranks, plans, 3)
    assert len({norm for found in results for norm in found[:-1]}) == 1
    everything = all_experts(16, 3, 3, has_bias=True)
    plain = torch.cat([t.double().reshape(-1) for layer in everything for t in layer]).norm().item()
    assert results[0][0] == pytest.approx(plain, rel=1e-12)
    assert results[0][-1] == pytest.approx(np.sqrt(2) * plain, rel=1e-12)


def one_norm(group, seed, home_slots):
    everything = all_experts(8, 2, seed)
    owned = range(group.rank() * home_slots, (group.rank() + 1) * home_slots)
    return gradient_norm([take(e, owned) for e in everything], group=group)


@pytest.mark.dist(8)
def test_the_norm_has_the_same_bits_for_any_number_of_ranks(pool):
    found = {norm for ranks in (2, 4, 8) for norm in pool.run(one_norm, ranks, 5, 8 // ranks)}
    assert len(found) == 1


def test_squared_norms_are_taken_expert_by_expert():
    gate_up = torch.tensor([[[1.0, 2.0]], [[0.0, 3.0]]])
    down = torch.tensor([[[4.0]], [[1e-30]]])
    assert expert_squared_norms(ExpertWeights(gate_up, down)).tolist() == pytest.approx([21.0, 9.0], rel=0)
    huge = ExpertWeights(torch.full((1, 1, 2), 3e38), torch.zeros(1, 1, 1))
    assert torch.isfinite(expert_squared_norms(huge)).all(), "squares must not overflow float32"


def test_no_layer_is_refused():
    with pytest.raises(TransferError, match="at least one layer"):
        gradient_norm([], group=None)
