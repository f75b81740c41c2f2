"""The way of experts between nodes by NCCL, with gloo in NCCL's place: order, bounds, and what is refused.

What only a GPU can show is in `test_nccl_gpu.py`.
"""

import os
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from equipoise.core import TransferError
from equipoise.core.options import TransferOptions
from equipoise.transfer.nccl import NcclGroup, choose_transport
from tests.balancer.work import balancer_of
from tests.parity.case import ParityCase
from tests.parity.stack import SmallStack
from tests.transfer.own_ranks import run_ranks
from tests.transfer.play import play_windows
from tests.transfer.test_faults import late_for_an_exchange
from tests.transfer.windows import LAYOUTS, random_plan

HANDLING = "TORCH_NCCL_BLOCKING_WAIT"


class Batch:
    """Works of gloo as the one work of a batch, which may be asked whether it is finished."""

    def __init__(self, works):
        self.errors = []
        self.thread = threading.Thread(target=self.run, args=(works,), daemon=True)
        self.thread.start()

    def run(self, works):
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self.errors.append(error)

    def is_completed(self):
        return not self.thread.is_alive()

    def wait(self):
        assert self.is_completed(), "nobody may wait without a bound"
        for error in self.errors:
            raise error


class GlooAsNccl:
    """Takes the calls of torch's ProcessGroupNCCL, in the order in which they are allowed."""

    Options = SimpleNamespace
    ended = ()
    """How the groups of this process ended."""

    def __init__(self, store, rank, size, options):
        assert os.environ[HANDLING] == "1", "torch's watchdog would end the process"
        self.gloo, self.batch = dist.ProcessGroupGloo(store, rank, size, options._timeout), None

    def allreduce(self, tensors):
        return Batch([self.gloo.allreduce(tensors, dist.AllreduceOptions())])

    def _start_coalescing(self):
        assert self.batch is None
        self.batch = []

    def send(self, tensors, peer, tag):
        self.batch.append(self.gloo.send(tensors, peer, tag))

    def recv(self, tensors, peer, tag):
        self.batch.append(self.gloo.recv(tensors, peer, tag))

    def _end_coalescing(self):
        works, self.batch = self.batch, None
        return Batch(works)

    def abort(self):
        GlooAsNccl.ended += ("aborted",)

    def shutdown(self):
        GlooAsNccl.ended += ("shut down",)


def by_nccl(group, function, *args):
    """Call a function where experts change nodes by NCCL; its result, and how NCCL's groups ended."""
    GlooAsNccl.ended, before = (), os.environ.get(HANDLING)
    chosen = mock.patch("equipoise.transfer.node.choose_transport", lambda *asked, **given: "nccl")
    with chosen, mock.patch.object(dist, "ProcessGroupNCCL", GlooAsNccl, create=True):
        result = function(group, *args)
    assert os.environ.get(HANDLING) == before
    return result, GlooAsNccl.ended


@pytest.mark.dist(4)
def test_windows_have_every_bit(pool):
    node_R, sizes = LAYOUTS["4 strided"], {"slots": 1, "micro_steps": 2, "layers": 2, "home_slots": 4}
    plans = [random_plan(node_R, seed=2, **sizes)]
    plans.append(random_plan(node_R, seed=5, fewest=1, stage="recompute", cross_node=True, **sizes))
    results = pool.run(by_nccl, 4, play_windows, plans, {})
    assert [(moved["transport"], ended) for moved, ended in results] == [("nccl", ("shut down",))] * 4
    assert all(moved["bytes"]["p2p"] > 0 and moved["is_clean"] for moved, _ in results)


def planned_with(group, case):
    """What a balancer's plans price as the way of experts between nodes."""
    with balancer_of(SmallStack(case, group), case, group) as balancer:
        return balancer._planner._options.transport


@pytest.mark.dist(2)
def test_a_balancer_plans_with_what_it_uses(pool):
    case = ParityCase(ranks=2, nodes=2, layers=1, tokens=8)
    assert pool.run(planned_with, 2, case) == ["gloo"] * 2
    assert pool.run(by_nccl, 2, planned_with, case) == [("nccl", ("shut down",))] * 2


def test_an_exchange_that_never_finishes_is_aborted_within_the_bound():
    results = run_ranks(by_nccl, 2, late_for_an_exchange, random_plan((0, 1), seed=1))
    for rank, (words, _) in enumerate(results):
        assert f"rank {rank}: publish " in words and "over p2p did not finish within 2 s" in words, words
    # Unlike gloo, NCCL would end the late one's exchange, too.
    assert results[0][1] == ("aborted",)


def test_a_broken_connection_is_aborted_once_and_not_used_again():
    breaks = mock.Mock(side_effect=RuntimeError("NCCL error: remote process exited"))
    nccl, connection = mock.Mock(), object.__new__(NcclGroup)
    nccl._end_coalescing.return_value = SimpleNamespace(is_completed=lambda: True, wait=breaks)
    connection.rank, connection._nccl, connection._is_aborted = 0, nccl, False
    with pytest.raises(RuntimeError, match="remote process exited"):
        connection.exchange([], lambda is_ready: is_ready())
    with pytest.raises(TransferError, match="takes part in no exchange any more"):
        connection.exchange([], lambda is_ready: is_ready())
    connection.close()
    assert (nccl.abort.call_count, nccl.shutdown.call_count) == (1, 0)


def choose(group, asked, device, nodes, hosts, gpus):
    """What is chosen, or what is said, on a rank that calls itself one of `hosts` and has one of `gpus`."""
    rank, there = group.rank(), {"NCCL_HOSTID": hosts[group.rank()]}
    gpu = mock.patch.object(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=gpus[rank]))
    built = mock.patch.object(dist, "is_nccl_available", lambda: True)
    with gpu, built, mock.patch.dict(os.environ, there):
        try:
            return choose_transport(asked, group=group, device=torch.device(device), nodes=nodes)
        except TransferError as error:
            return str(error)


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("asked", "device", "hosts", "gpus", "wanted"),
    [
        ("auto", "cpu", "aa", "xx", "gloo"),
        ("auto", "cuda", "ab", "xy", "gloo"),
        ("gloo", "cuda", "ab", "xy", "gloo"),
        ("nccl", "cuda", "ab", "xx", "nccl"),
        ("nccl", "cuda", "aa", "xy", "nccl"),
        (
            "nccl",
            "cuda",
            "aa",
            "xx",
            "ranks 0 and 1 share the GPU x, which NCCL joins only as ranks of different",
        ),
        ("nccl", "cpu", "ab", "xy", "rank 0: transport is 'nccl', but the experts are on cpu; use transport='auto' or"),
    ],
)
def test_the_transport_is_what_the_group_can_do_or_refused_on_every_rank(pool, asked, device, hosts, gpus, wanted):
    for found in pool.run(choose, 2, asked, device, 2, hosts, gpus):
        assert wanted in found


def test_an_unknown_transport_is_refused():
    with pytest.raises(TransferError, match=r"transport.*'ucx'"):
        TransferOptions(transport="ucx")
