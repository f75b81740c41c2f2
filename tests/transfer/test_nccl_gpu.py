"""Experts between nodes by NCCL: 2, 4 and 8 ranks on one GPU, each as another host, have the bits that gloo gives."""

import os
import signal
import time

import pytest
import torch

from equipoise.core import TransferError
from equipoise.core.plan import Visit
from equipoise.transfer.edges import Relocator
from tests.layer.cases import static_plan
from tests.layer.stack import Run
from tests.transfer.own_ranks import KILLED, run_ranks
from tests.transfer.play import Rank, play_windows
from tests.transfer.test_engine_gpu import BF16, planned, same_gradients
from tests.transfer.training import run_both
from tests.transfer.windows import LAYOUTS, random_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def play_by_nccl(group, plans, options):
    """Play whole windows, every bit checked; return what was moved."""
    played = play_windows(group, plans, options)
    return played["bytes"], played["pulls"]


@pytest.mark.parametrize("layout", ["2 as two nodes", "4 as two nodes", "4 strided", "8 as two nodes"])
@pytest.mark.parametrize("home_slots", [2, 9], ids=["one round", "many rounds"])
def test_windows_have_the_bits_and_bytes_that_gloo_gives(layout, home_slots):
    node_R = LAYOUTS[layout]
    given = {"home_slots": home_slots, "slots": 1, "fewest": 1, "layers": 3}
    plans = [random_plan(node_R, seed=w, **given) for w in range(2)]
    plans.append(random_plan(node_R, seed=5, stage="recompute", cross_node=True, **given))
    options = {"kind": BF16, "transfer": {"grad_dtype": "float32"} if home_slots == 9 else {}}
    by_nccl, by_gloo = (
        run_ranks(play_by_nccl, len(node_R), plans, options, is_nccl=is_nccl) for is_nccl in (True, False)
    )
    assert by_nccl == by_gloo and any(moved["p2p"] for moved, _ in by_nccl)


@pytest.mark.parametrize("slots", [0, 1], ids=["placement alone", "replicas"])
def test_training_by_nccl_is_training_by_gloo(slots):
    plan, routing = planned(41, slots)
    given = (plan, static_plan(routing, nodes=2), routing, Run(seed=2, **BF16))
    by_nccl, by_gloo = (run_ranks(run_both, 4, *given, is_nccl=is_nccl) for is_nccl in (True, False))
    for (static, moved, _), (_, other, _) in zip(by_nccl, by_gloo, strict=True):
        assert all(map(torch.equal, static.outputs, moved.outputs))
        assert all(map(torch.equal, moved.outputs, other.outputs)) and same_gradients(moved, other)
        assert slots or same_gradients(static, moved)


class KillingRelocator(Relocator):
    """Ends its process when it would send experts of the second layer."""

    def _stage(self, whole, staged, tensors):
        if whole.layer == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._stage(whole, staged, tensors)


def lose_a_rank(group, plan):
    """Rank 1 is killed while others exchange with it: what they are told, and when."""
    rank, begin = Rank(group, plan, kind=BF16, timeout_s=10.0), time.monotonic()
    assert rank.engine._node._link is not None, "the group has NCCL, and nothing uses it"
    if group.rank() == 1:
        rank.engine._edges._relocator.__class__ = KillingRelocator
    try:
        rank.engine.open_window(plan)
        rank.engine.wait_for(Visit(0, "forward", 1))
    except TransferError as error:
        return str(error), time.monotonic() - begin
    finally:
        rank.engine.close()
    return "nothing was noticed", 0.0


@pytest.mark.parametrize("layout", ["2 as two nodes", "4 as two nodes", "8 as two nodes"])
def test_a_killed_rank_ends_the_others_within_the_bound(layout):
    results = run_ranks(lose_a_rank, len(LAYOUTS[layout]), random_plan(LAYOUTS[layout], seed=6), is_nccl=True)
    assert results.pop(1) == KILLED
    for words, seconds in results:
        assert "gone" in words or "did not finish within 10 s" in words, words
        assert seconds < 40, f"{seconds:.1f} s until: {words}"


def landing_of(group, plan):
    """Where arrivals from other nodes land, how much that takes, and what the layout says."""
    rank = Rank(group, plan, kind=BF16)
    landing, layout = rank.engine._node._landing_N, rank.engine._node.layout
    found = landing.device.type, landing.nbytes, layout.landing_bytes
    rank.engine.close()
    return found


def test_arrivals_land_on_the_device_in_memory_that_is_counted():
    plan = random_plan((0, 1), seed=1, home_slots=8, slots=1)
    for device, taken, forecast in run_ranks(landing_of, 2, plan, is_nccl=True):
        assert device == "cuda" and taken == forecast > 0
