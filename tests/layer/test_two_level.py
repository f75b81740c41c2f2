"""Two-level dispatch: the same rows and bits as the direct one, and each token across to a node once."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from equipoise.layer.experts import LayerOptions
from equipoise.layer.ops import add_columns, all_to_all
from equipoise.layer.relay import DirectDispatch, NodeRanks, make_relay, send_by_relay
from tests.layer.cases import random_plan, random_routing
from tests.layer.stack import MODES, Run, run_stack
from tests.layer.test_experts import EVERYTHING, same_bits

NODES = {
    "2 x 2": (0, 0, 1, 1),
    "strided": (0, 1, 0, 1),
    "one node": (0, 0, 0, 0),
    "uneven": (0, 1, 1, 1),
    "a node each": (0, 1, 2, 3),
    "2 x 4": (0, 0, 0, 0, 1, 1, 1, 1),
}


def both_dispatches(group, node_R, seed, silent):
    """Random rows by both dispatches: whether all bits agree, and what crossed nodes."""
    rank, nodes = group.rank(), NodeRanks(node_R, group.rank())
    here, rng = node_R[rank], np.random.default_rng([seed, rank])
    tokens = 0 if rank in silent else int(rng.integers(1, 9))
    target_TK = np.array([rng.choice(len(node_R), 3, replace=True) for _ in range(tokens)], dtype=np.int64)
    order_N = np.argsort(target_TK.reshape(-1), kind="stable")
    token_N, index_TK = torch.from_numpy(order_N // 3), torch.from_numpy(np.argsort(order_N).reshape(-1, 3))
    send_R = np.bincount(target_TK.reshape(-1), minlength=len(node_R)).tolist()
    ones_R = [1] * len(node_R)
    receive_R = all_to_all(torch.tensor(send_R), ones_R, ones_R, group).tolist()
    relay = make_relay(
        token_N, send_R=send_R, receive_R=receive_R, nodes=nodes, swap=functools.partial(all_to_all, group=group)
    )
    hidden_TD = torch.from_numpy(rng.standard_normal((tokens, 4), dtype=np.float32)).requires_grad_()
    got_ND = send_by_relay(hidden_TD, relay, direct=DirectDispatch(index_TK, send_R, receive_R), group=group)
    wanted_ND = all_to_all(hidden_TD.detach()[token_N], send_R, receive_R, group)
    assert torch.equal(got_ND, wanted_ND)
    grad_ND = torch.rand(wanted_ND.shape, generator=torch.Generator().manual_seed(rank))
    got_ND.backward(grad_ND)
    wanted_TD = add_columns(all_to_all(grad_ND, receive_R, send_R, group), index_TK)
    assert torch.equal(hidden_TD.grad, wanted_TD)
    across = [(t, node_R[r]) for t, targets in enumerate(target_TK) for r in targets if node_R[r] != here]
    crossing = sum(n for r, n in enumerate(relay.copies_R) if node_R[r] != here)
    assert crossing == len(set(across)), "each token crosses to a node once"
    assert not any(n for r, n in enumerate(relay.inner_send_R) if node_R[r] != here), "level 2 stays in the node"
    return len(across), crossing


@pytest.mark.dist(8)
@pytest.mark.parametrize("silent", [(), (1, 2), tuple(range(8))], ids=["tokens", "silent sources", "no token at all"])
@pytest.mark.parametrize("node_R", NODES.values(), ids=NODES)
def test_rows_and_gradients_have_the_bits_of_the_direct_dispatch(pool, node_R, silent):
    results = [pool.run(both_dispatches, len(node_R), node_R, seed, silent) for seed in range(2)]
    direct, two_level = (sum(column) for column in zip(*(pair for run in results for pair in run), strict=True))
    if len(silent) < 3 and len(set(node_R)) == 2:
        assert two_level < direct, "a case in which no token shares a dispatch shows nothing"


@pytest.mark.dist(8)
@pytest.mark.parametrize(("ranks", "mode"), [*((4, mode) for mode in MODES), (8, MODES[0])])
def test_a_trained_stack_has_the_same_bits_in_two_levels(pool, ranks, mode):
    routing = random_routing(16, ranks=ranks, silent=(1,))
    plan = random_plan(routing, 3, slots=1, nodes=2)
    assert len(plan.replica_table), "a case without a replica shows nothing"
    direct, two_level = (
        pool.run(run_stack, ranks, plan, routing, Run(options=LayerOptions(dispatch=dispatch), mode=mode))
        for dispatch in ("direct", "two_level")
    )
    same_bits(two_level, direct, names=EVERYTHING)


@pytest.mark.dist(4)
@pytest.mark.parametrize("case", ["zero rows received", "zero tokens at a source", "zero tokens anywhere"])
def test_awkward_cases_in_two_levels(pool, case):
    from tests.layer.test_experts import crossed_case

    routing, plan = crossed_case(case)
    plan = dataclasses.replace(
        plan, cluster=dataclasses.replace(plan.cluster, node_R=(0, 0, 1, 1), nodes=2), cross_node=True
    )
    runs = [Run(options=LayerOptions(dispatch=d, is_deterministic=True)) for d in ("direct", "two_level")]
    direct, two_level = (pool.run(run_stack, 4, plan, routing, run) for run in runs)
    same_bits(two_level, direct, names=EVERYTHING)
