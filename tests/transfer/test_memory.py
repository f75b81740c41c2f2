"""Shared memory: what is refused, what is shared, and that nothing is left after closing, failing or being killed."""

import gc
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from equipoise.core import TransferError
from equipoise.transfer import pages
from equipoise.transfer.pages import SharedMemory, available_bytes, check_room, reserve, share_memory
from tests.transfer.own_ranks import KILLED, run_ranks

BIG = 2**28
"""256 MiB: far above what other processes of a test run share or free meanwhile."""


def held():
    """Mappings of ours, and open descriptors that are files of ours or Unix sockets."""
    gc.collect()
    maps = sum("memfd:equipoise" in line for line in Path("/proc/self/maps").read_text().splitlines())
    # Connections of gloo are TCP; when they close, another thread of its does that.
    unix = {f"socket:[{line.split()[6]}]" for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    return maps, sum("memfd:" in link or link in unix for link in open_files())


def open_files():
    """What this process has open; a thread may close some of it meanwhile."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    return found


def is_back(before, *, wait_s=20):
    """Whether no more is held than before; a thread that was told to end lets go as soon as it gets a core."""
    end = time.monotonic() + wait_s
    while any(now > then for now, then in zip(held(), before, strict=True)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def shared_bytes():
    """All shared memory of the machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


def shared_once_below(limit, *, wait_s=60):
    """All shared memory, as soon as it is below the limit: on a busy machine a killed process takes its time to go."""
    end = time.monotonic() + wait_s
    while shared_bytes() >= limit and time.monotonic() < end:
        time.sleep(0.1)
    return shared_bytes()


def test_a_view_outlives_close_and_nothing_outlives_the_view():
    before = held()
    descriptor = reserve(2**20)
    shared = SharedMemory(descriptor, 2**20)
    os.close(descriptor)
    view = shared.view(4096, (4, 5), torch.float32)
    view.fill_(3.0)
    shared.close()
    shared.close()
    assert view.sum() == 60 and held() == (before[0] + 1, before[1] + 1)
    del view
    assert held() == before
    with pytest.raises(TransferError, match="is closed; open it again"):
        shared.view(0, (1,), torch.int64)


def test_two_mappings_see_the_same_bytes():
    descriptor = reserve(4096)
    one, two = SharedMemory(descriptor, 4096), SharedMemory(descriptor, 4096)
    os.close(descriptor)
    one.view(64, (3,), torch.int64).copy_(torch.tensor([5, 6, 7]))
    assert two.view(64, (3,), torch.int64).tolist() == [5, 6, 7]
    assert two.view(0, (0, 4), torch.float32).shape == (0, 4)


def test_more_than_there_is_is_refused_before_allocation():
    before = held()
    with pytest.raises(TransferError, match=r"are needed on this node, [\d,]+ are available; raise the container"):
        reserve(2**60)
    assert held() == before


def test_a_reservation_that_fails_is_named_and_closed(monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    before = held()
    monkeypatch.setattr(pages.os, "posix_fallocate", no_space)
    with pytest.raises(TransferError, match=r"4,096 bytes could not be reserved \(No space left"):
        reserve(4096)
    assert held() == before


def test_the_locked_memory_limit_is_checked(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr(pages, "_may_lock_anything", lambda: False)
    check_room(65536, available=2**30, is_locked=True)
    check_room(65537, available=2**30, is_locked=False)
    with pytest.raises(TransferError, match=r"65,537 bytes must be locked.*is 65,536; raise it with `ulimit -l"):
        check_room(65537, available=2**30, is_locked=True)


def test_a_control_group_limits_what_is_available(monkeypatch):
    texts = {"/sys/fs/cgroup/memory.max": "1000\n", "/sys/fs/cgroup/memory.current": "400\n"}
    real = Path.read_text
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in texts)
    monkeypatch.setattr(Path, "read_text", lambda path: texts.get(str(path)) or real(path))
    assert available_bytes() == 600
    texts["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_bytes() > 2**20


def share_by_node(group, node_R, num_bytes, is_locked=False):
    """Each rank writes its number; every rank tells what it sees, and what is left at the end."""
    import torch.distributed as dist

    before = held()
    try:
        shared = share_memory(num_bytes, group=group, node_R=node_R, timeout_s=20, is_locked=is_locked)
    except TransferError as error:
        return str(error), is_back(before)
    words = shared.view(0, (len(node_R),), torch.int64)
    words[group.rank()] = group.rank() + 1
    dist.barrier(group)
    seen = words.tolist()
    assert held() == (before[0] + 1, before[1] + 1), "more is open than the mapping and its descriptor"
    del words
    shared.close()
    return seen, is_back(before)


@pytest.mark.dist(4)
@pytest.mark.parametrize("node_R", [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 3)], ids=str)
def test_ranks_share_with_their_node_only(pool, node_R):
    for rank, (seen, is_clean) in enumerate(pool.run(share_by_node, 4, node_R, 4096)):
        assert seen == [r + 1 if node_R[r] == node_R[rank] else 0 for r in range(4)]
        assert is_clean, "mappings or descriptors are left"


@pytest.mark.dist(4)
def test_locked_memory_is_shared_too(pool):
    results = pool.run(share_by_node, 4, (0, 0, 0, 0), 4096, True)
    assert all(seen == [1, 2, 3, 4] for seen, _ in results)


@pytest.mark.dist(4)
def test_a_node_that_cannot_fails_every_rank_alike(pool):
    results = pool.run(share_by_node, 4, (0, 0, 1, 1), 2**60)
    assert all("rank 0: shared memory: 1,152,921,504,606,846,976 bytes" in words for words, _ in results)
    assert all(is_clean for _, is_clean in results), "mappings or descriptors are left after the error"


def hold_and_die(group, survivor):
    """All ranks hold a large piece; all but the survivor are killed; it tells how much is shared then and after."""
    import torch.distributed as dist

    shared = share_memory(BIG, group=group, node_R=(0, 0, 0), timeout_s=20)
    dist.barrier(group)
    with_all = shared_bytes()
    if group.rank() != survivor:
        os.kill(os.getpid(), signal.SIGKILL)
    shared.close()
    return with_all - shared_once_below(with_all - BIG // 2), held()[0]


@pytest.mark.parametrize("survivor", [0, 2])
def test_killed_holders_leave_nothing(survivor):
    names = shared_names()
    results = run_ranks(hold_and_die, 3, survivor)
    freed, mappings = results.pop(survivor)
    assert results == [KILLED, KILLED]
    assert freed > BIG // 2 and mappings == 0, f"{freed:,} bytes were freed of {BIG:,}"
    # Other processes of the machine may have names there for a moment.
    end = time.monotonic() + 20
    while not shared_names() <= names and time.monotonic() < end:
        time.sleep(0.1)
    assert shared_names() <= names, "a name is left in /dev/shm"


def shared_names():
    return set(os.listdir("/dev/shm"))  # noqa: PTH208


def all_die(group):
    import torch.distributed as dist

    share_memory(BIG, group=group, node_R=(0, 0), timeout_s=20)
    dist.barrier(group)
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_when_all_are_killed():
    before = shared_bytes()
    assert run_ranks(all_die, 2) == [KILLED, KILLED]
    assert shared_once_below(before + BIG // 2) < before + BIG // 2
