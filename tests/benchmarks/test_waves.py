"""The benchmark of waves: what the busiest links carry in parts."""

from dataclasses import replace

import numpy as np

import equipoise as eq
from benchmarks.waves import busiest_links, experts_of_slots
from equipoise.layer.dispatch import physical_slots


def made():
    rng = np.random.default_rng(3)
    loads = eq.LoadMatrix(rng.zipf(1.6, size=(2, 4, 4, 16)).clip(max=400) * 20)
    cluster = eq.Cluster.preset("h200", nodes=2, ranks_per_node=2)
    model = eq.ModelShape.preset("qwen3-30b-a3b", experts=16, layers=4)
    return eq.plan(loads, cluster=cluster, model=model, slots=1, objective="skew")


def test_experts_are_in_the_slots_that_layers_give_them():
    plan = made()
    width = plan.home_slots + plan.slots
    for layer in range(4):
        held_RS, slot_ER = experts_of_slots(plan, 1, layer), physical_slots(plan, 1, layer)
        for expert, rank in np.argwhere(slot_ER >= 0):
            assert held_RS[rank, slot_ER[expert, rank] % width] == expert
        assert (held_RS >= 0).sum() == (slot_ER >= 0).sum()


def test_parts_carry_what_the_whole_carries_and_no_less_on_their_busiest_links():
    plan = made()
    assert busiest_links(plan) == 1.0
    for waves in (2, 4):
        assert 1.0 <= busiest_links(replace(plan, waves=waves)) < 2.0
