"""Experts that change nodes by NCCL: ranks of one GPU, each another host, in declared nodes; bits, memory, faults."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from equipoise.core import TransferError
from equipoise.core.options import TransferOptions, balance_bytes
from equipoise.core.plan import Visit
from equipoise.transfer.edges import Relocator
from equipoise.transfer.node import ExpertWeights, NodeMemory
from tests.layer.cases import cluster_of
from tests.transfer.own_ranks import KILLED, run_ranks
from tests.transfer.play import Rank, play_windows
from tests.transfer.test_engine_gpu import BF16, check_training
from tests.transfer.test_faults import shorten
from tests.transfer.test_host_store import complete
from tests.transfer.windows import LAYOUTS, random_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NCCL = "cpu:gloo,cuda:nccl"
SEVERAL = ["2 as two nodes", "4 as two nodes", "4 strided", "8 as two nodes"]


@pytest.mark.dist(8)
@pytest.mark.parametrize("layout", SEVERAL)
def test_windows_have_every_bit(nccl_pool, layout):
    node_R, sizes = LAYOUTS[layout], {"slots": 1, "micro_steps": 2, "layers": 3}
    plans = [random_plan(node_R, seed=w, fewest=0, **sizes) for w in range(2)]
    plans += [
        random_plan(node_R, seed=5, fewest=1, stage=stage, cross_node=True, **sizes)
        for stage in ("recompute", "update")
    ]
    results = nccl_pool.run(play_windows, len(node_R), plans, {"kind": BF16}, timeout_s=200.0)
    assert {moved["transport"] for moved in results} == {"nccl"}
    assert sum(moved["bytes"].get("p2p", 0) for moved in results) > 0
    assert sum(moved["bytes"].get("host", 0) for moved in results) > 0, "no expert was pulled across nodes"


@pytest.mark.dist(8)
def test_boxes_bound_what_is_under_way(nccl_pool):
    # 16 home slots need several rounds through the landing.
    plans = [random_plan(LAYOUTS["4 as two nodes"], seed=6, home_slots=16)]
    results = nccl_pool.run(play_windows, 4, plans, {"kind": BF16}, timeout_s=200.0)
    assert {moved["transport"] for moved in results} == {"nccl"}


@pytest.mark.dist(8)
@pytest.mark.parametrize("asked", ["auto", "gloo"])
def test_a_completed_store_holds_every_expert_of_the_model_on_every_node(nccl_pool, asked):
    plan = random_plan(LAYOUTS["4 as two nodes"], seed=7, slots=1, fewest=1)
    for _, transport in nccl_pool.run(complete, 4, plan, BF16, {"transport": asked}, timeout_s=200.0):
        assert transport == ("nccl" if asked == "auto" else "gloo")


@pytest.mark.dist(8)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("slots", [0, 2], ids=["placement alone", "replicas"])
def test_training_in_bf16_is_static_training(nccl_pool, slots, ranks):
    if ranks == 2 and slots:
        pytest.skip("a node of one rank has no peer to pull from")
    check_training(nccl_pool, slots, "peer", ranks=ranks)


def allocated(group, shapes):
    """Bytes of torch for moving experts, what the layout says they are, the landing's device, and all that is extra."""
    homes = [ExpertWeights(*(torch.nn.Parameter(torch.zeros(s, **BF16)) for s in shapes)) for _ in range(2)]
    options = TransferOptions(slots=1, buffers="separate")
    # Connections first: NCCL's messages of one number are torch's.
    NodeMemory(homes, group=group, node_R=(0, 1), options=options).close()
    owned = sum(tensor.nbytes for layer in homes for tensor in layer.tensors())
    before = torch.cuda.memory_allocated() - owned
    node = NodeMemory(homes, group=group, node_R=(0, 1), options=options)
    taken, layout = torch.cuda.memory_allocated() - before, node.layout
    where = {tensor.device.type for tensor in node.landings[torch.bfloat16].tensors()}
    node.close()
    return taken, layout.replica_bytes + layout.landing_bytes, where, layout.extra_bytes


@pytest.mark.dist(8)
def test_the_landing_is_memory_of_the_device_and_counted(nccl_pool):
    shapes = (4, 256, 128), (4, 128, 128)
    for taken, forecast, where, extra in nccl_pool.run(allocated, 2, shapes):
        assert where == {"cuda"} and forecast <= taken <= forecast + 16 * 512
        assert extra == forecast_of(shapes)


def forecast_of(shapes):
    """What `analyze` and a training run's forecast count for the same experts."""
    from equipoise.core import ModelShape

    (home_slots, _, hidden), (_, _, width) = shapes
    model = ModelShape.preset("qwen3-30b-a3b", experts=2 * home_slots, hidden=hidden, expert_width=width)
    return balance_bytes(model, cluster=cluster_of(2, nodes=2), slots=1, stage="update")


class AbsentRelocator(Relocator):
    """Does not come to the second layer: sleeps, or ends its process."""

    def relocate(self, kind, layer, moves, tensors):
        if layer == 1:
            dist.barrier(self.group)
            if self.group.rank() == 1 and self.how == "killed":
                # Others are inside the exchange by now.
                time.sleep(1.0)
                os.kill(os.getpid(), signal.SIGKILL)
            shorten(self.player)
            if self.group.rank() == 1:
                time.sleep(20.0)
        super().relocate(kind, layer, moves, tensors)


def absent(group, plan, how):
    """Rank 1 does not come to an exchange; what the others say, after how long, and whether their device goes on."""
    player, begin, words = Rank(group, plan, kind=BF16), time.monotonic(), ""
    relocator = player.engine._edges._relocator
    relocator.__class__, relocator.group, relocator.how, relocator.player = AbsentRelocator, group, how, player
    try:
        player.engine.open_window(plan)
        player.engine.wait_for(Visit(0, "forward", 1))
    except TransferError as error:
        words = str(error)
    seconds = time.monotonic() - begin
    # Hangs where a kernel of NCCL still waits for the other rank.
    torch.cuda.synchronize()
    total = float(torch.ones(1000, device="cuda").sum())
    transport = player.engine.transport
    player.engine.close()
    return words, seconds, total, transport


@pytest.mark.parametrize("how", ["killed", "asleep"])
@pytest.mark.parametrize("layout", ["2 as two nodes", "4 as two nodes"])
def test_a_rank_that_does_not_come_ends_the_others_and_their_streams(layout, how):
    plan = random_plan(LAYOUTS[layout], seed=1)
    results = run_ranks(absent, len(LAYOUTS[layout]), plan, how, timeout_s=150.0, backend=NCCL)
    if how == "killed":
        assert results.pop(1) == KILLED
    else:
        results.pop(1)
    for words, seconds, total, transport in results:
        assert transport == "nccl" and total == 1000.0
        assert "gone" in words or "did not finish within" in words, words
        assert seconds < 60.0, f"{seconds:.1f} s until: {words}"
    if how == "asleep":
        assert "over p2p did not finish within 2 s" in results[0][0], results[0]


def refused(group):
    """What is said where all ranks call themselves the same host."""
    os.environ["NCCL_HOSTID"] = "one host"
    homes = [ExpertWeights(*(torch.nn.Parameter(torch.zeros(2, 8, 8, **BF16)) for _ in range(2)))]
    try:
        NodeMemory(homes, group=group, node_R=(0, 1), options=TransferOptions(transport="nccl"))
    except TransferError as error:
        return str(error)
    return "nothing was said"


def test_ranks_that_are_one_gpu_to_nccl_are_refused_with_a_clear_word():
    for words in run_ranks(refused, 2):
        assert "ranks 0 and 1 share the GPU" in words and "another NCCL_HOSTID" in words, words
