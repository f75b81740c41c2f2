"""`DeviceLink` on a library of our own in place of NCCL: what is sent, what is waited for, and how it ends."""

import ctypes
import threading
import time
from collections import defaultdict, deque

import pytest
import torch

from equipoise.core import TransferError
from equipoise.transfer import waits
from equipoise.transfer.waits import DeviceLink, Message, load_nccl

CPU = torch.device("cpu")


class Wire:
    """What is on its way between the ranks of one communicator."""

    def __init__(self):
        self.lock, self.sent, self.lost = threading.Lock(), defaultdict(deque), set()


class FakeNccl:
    """One rank's NCCL, for memory of this process: an exchange is in progress until all of it has arrived."""

    def __init__(self, wire, rank):
        self.wire, self.rank, self.calls, self.waiting, self.error = wire, rank, [], deque(), 0

    def ncclGetUniqueId(self, unique):
        return 0

    def ncclCommInitRankConfig(self, comm, size, unique, rank, config):
        found = config._obj
        assert (found.size, found.magic, found.version, found.is_blocking) == (24, 0xCAFEBEEF, 21400, 0)
        assert rank == self.rank and bytes(unique.bytes) == b"n" * 128
        comm._obj.value = 1 + rank
        return 7

    def ncclGroupStart(self):
        return 0

    def ncclSend(self, data, count, kind, peer, comm, stream):
        with self.wire.lock:
            self.wire.sent[self.rank, peer].append(ctypes.string_at(data.value, count.value))
        return 0

    def ncclRecv(self, data, count, kind, peer, comm, stream):
        self.waiting.append((data.value, count.value, peer))
        return 0

    def ncclGroupEnd(self):
        return 7

    def ncclCommGetAsyncError(self, comm, state):
        with self.wire.lock:
            while self.waiting and self.wire.sent[self.waiting[0][2], self.rank]:
                data, count, peer = self.waiting.popleft()
                found = self.wire.sent[peer, self.rank].popleft()
                assert len(found) == count, "both sides list the same messages"
                ctypes.memmove(data, found, count)
            is_lost = any(peer in self.wire.lost for _, _, peer in self.waiting)
        state._obj.value = self.error or (6 if is_lost else 7 if self.waiting else 0)
        return 0

    def __getattr__(self, name):
        if name not in ("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"):
            raise AttributeError(name)
        return lambda comm: self.calls.append(name[8:]) or 0


def link(wire, rank, size=2):
    return DeviceLink(rank=rank, size=size, device=CPU, name=b"n" * 128, library=FakeNccl(wire, rank))


def bounded(is_ready, seconds=5.0):
    end = time.monotonic() + seconds
    while not is_ready():
        if time.monotonic() > end:
            raise TransferError("too late")
        time.sleep(0.001)


def test_messages_reach_their_peers_in_order_and_the_end_is_in_order():
    wire, got = Wire(), {}

    def run(rank):
        mine, peers = link(wire, rank, 3), [peer for peer in range(3) if peer != rank]
        bounded(mine.is_settled)
        out = {peer: [torch.full((4,), 100.0 * rank + 10 * peer + n) for n in range(2)] for peer in peers}
        into = {peer: [torch.zeros(4) for _ in range(2)] for peer in peers}
        messages = [Message(t, peer, True) for peer in peers for t in out[peer]]
        mine.exchange([*messages, *(Message(t, peer, False) for peer in peers for t in into[peer])], bounded)
        got[rank] = {peer: [float(t[3]) for t in into[peer]] for peer in peers}
        mine.close()
        mine.close()
        assert mine._library.calls == ["Finalize", "Destroy"]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {r: {p: [100.0 * p + 10 * r + n for n in range(2)] for p in range(3) if p != r} for r in range(3)}


@pytest.mark.parametrize("how", ["late", "lost", "broken"])
def test_a_peer_that_does_not_send_ends_in_an_error_and_an_abort(how):
    wire = Wire()
    mine = link(wire, 0)
    bounded(mine.is_settled)
    if how == "lost":
        threading.Timer(0.05, wire.lost.add, (1,)).start()
    if how == "broken":
        mine._library.error = 2
    words = {"late": "too late", "lost": "failed with a lost rank", "broken": "failed with a system error"}[how]
    with pytest.raises(RuntimeError, match=words):
        mine.exchange([Message(torch.zeros(3), 1, False)], lambda is_ready: bounded(is_ready, 0.3))
    mine.abort()
    mine.close()
    assert mine._library.calls == ["Abort"]
    with pytest.raises(RuntimeError, match="was aborted"):
        mine.exchange([Message(torch.zeros(3), 1, False)], bounded)


def test_closing_while_a_peer_is_lost_aborts_within_a_moment():
    mine = link(Wire(), 0)
    mine._library.error = 6
    begin = time.monotonic()
    mine.close()
    assert mine._library.calls == ["Finalize", "Abort"] and time.monotonic() - begin < 5


def test_a_machine_without_nccl_is_told(monkeypatch):
    monkeypatch.setattr(waits.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"no {name}")))
    with pytest.raises(TransferError, match=r"NCCL is not there \(no libnccl.so.2\); use a group with gloo"):
        load_nccl()
