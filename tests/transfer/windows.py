"""Random windows for runtime tests: plans with any homes and replicas, and experts whose every number is known.

Cheap to import, because workers do; the planner is imported only where a plan is made, in the test process.
"""

from dataclasses import replace

import numpy as np
import torch

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import PATHS, Bytes, Plan, ReplicaTable, Seconds
from equipoise.transfer.node import ExpertWeights

HIDDEN, WIDTH = 8, 4
LAYOUTS = {
    "1 rank": (0,),
    "2 as one node": (0, 0),
    "2 as two nodes": (0, 1),
    "4 as one node": (0, 0, 0, 0),
    "4 as two nodes": (0, 0, 1, 1),
    "4 strided": (0, 1, 0, 1),
    "8 as one node": (0,) * 8,
    "8 as two nodes": (0, 0, 0, 0, 1, 1, 1, 1),
    "8 strided": (0, 1, 0, 1, 0, 1, 0, 1),
}


def random_plan(
    node_R,
    *,
    seed,
    layers=3,
    micro_steps=2,
    home_slots=2,
    slots=0,
    fewest=0,
    stage="update",
    depth=1,
    order="plain",
    cross_node=False,
):
    """A plan with random homes and `fewest` to `slots` random replicas on each rank, inside nodes or from any."""
    from equipoise.core.options import PlanOptions
    from equipoise.planner.assemble import build_itinerary

    rng = np.random.default_rng(seed)
    ranks, experts = len(node_R), len(node_R) * home_slots
    place_LE = np.stack([rng.permutation(experts) for _ in range(layers)])
    home_LE = place_LE // home_slots
    load = rng.integers(10, 50, size=(micro_steps, layers, ranks, experts))
    reach_R = (0,) * ranks if cross_node else node_R
    table = random_replicas(rng, home_LE, reach_R, micro_steps=micro_steps, counts=range(fewest, slots + 1))
    if cross_node:
        table = by_host_where_far(table, home_LE, node_R)
    needs_ML = (np.diff(table.start_ML) > 0).reshape(micro_steps, layers)
    options = PlanOptions(depth=depth, order=order, pipeline_stages=2 if order == "1f1b" else 1)
    zeros_ML = np.zeros((micro_steps, layers), dtype=np.int64)
    return Plan(
        loads=LoadMatrix(load, stage=stage),
        cluster=Cluster.preset("h200", node_R=node_R),
        model=ModelShape.preset(
            "qwen3-30b-a3b", experts=experts, layers=layers, hidden=HIDDEN, expert_width=WIDTH, top_k=2
        ),
        policy="random",
        objective="skew",
        slots=slots,
        cross_node=cross_node,
        home_LE=home_LE,
        home_slot_LE=place_LE % home_slots,
        replica_table=table,
        ns_ML=zeros_ML,
        closed_ns_ML=zeros_ML,
        seconds=Seconds(),
        bytes=Bytes(),
        static_seconds=0.0,
        itinerary=build_itinerary(stage, needs_ML, options),
    )


def random_replicas(rng, home_LE, node_R, *, micro_steps, counts):
    """A replica table with one of `counts` replicas on every rank, of experts whose home is elsewhere in its node."""
    layers, node_R = len(home_LE), np.array(node_R)
    start, experts, ranks = [0], [], []
    for entry in range(micro_steps * layers):
        home_E = home_LE[entry % layers]
        for rank in rng.permutation(len(node_R)):
            near = np.flatnonzero((node_R[home_E] == node_R[rank]) & (home_E != rank))
            chosen = rng.permutation(near)[: rng.choice(counts)]
            experts += chosen.tolist()
            ranks += [int(rank)] * len(chosen)
        start.append(len(experts))
    return ReplicaTable(
        start_ML=np.array(start, dtype=np.int64),
        expert_P=np.array(experts, dtype=np.int64),
        rank_P=np.array(ranks, dtype=np.int64),
        rows_P=np.ones(len(experts), dtype=np.int64),
        path_P2=rng.integers(0, 2, size=(len(experts), 2)),
    )


def by_host_where_far(table, home_LE, node_R):
    """The same replicas, those of other nodes by the host path."""
    node_R = np.array(node_R)
    home_P = home_LE[table.entry_P % len(home_LE), table.expert_P]
    far_P = node_R[home_P] != node_R[table.rank_P]
    return replace(table, path_P2=np.where(far_P[:, None], PATHS.index("host"), table.path_P2))


def all_experts(experts, layers, seed, *, has_bias=False):
    """Per layer, [E, ...] tensors of random numbers; equal on every rank that asks with the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(experts, *shape, generator=generator)

    def one():
        biases = (numbers(2 * WIDTH), numbers(HIDDEN)) if has_bias else ()
        return ExpertWeights(numbers(2 * WIDTH, HIDDEN), numbers(HIDDEN, WIDTH), *biases)

    return [one() for _ in range(layers)]


def owned_parameters(everything, rank, home_slots):
    """This rank's share of `all_experts`, as parameters."""
    mine = slice(rank * home_slots, (rank + 1) * home_slots)
    return [
        ExpertWeights(*(None if t is None else torch.nn.Parameter(t[mine].clone()) for t in layer))
        for layer in everything
    ]


def experts_at(plan, layer, rank):
    """Expert in each home slot of a rank."""
    slots = np.empty(plan.home_slots, dtype=np.int64)
    mine = np.flatnonzero(plan.home_LE[layer] == rank)
    slots[plan.home_slot_LE[layer][mine]] = mine
    return slots.tolist()


def assert_same_bits(got, wanted, words):
    """Fail unless both hold the same tensors, bit for bit."""
    for name, a, b in zip(got._fields, got, wanted, strict=True):
        assert (a is None) == (b is None), f"{words}: {name} is there only once"
        assert a is None or torch.equal(a, b), f"{words}: {name} differs"


def take(everything, experts):
    """The given experts, in this order, out of [E, ...] tensors."""
    return ExpertWeights(*(None if t is None else t[list(experts)] for t in everything))


def no_transfers(plan, home):
    """The engine of a disabled balancer, in a window of `plan`."""
    from equipoise.transfer.engine import NoTransfers

    transfers = NoTransfers([home])
    transfers.open_window(plan)
    return transfers
