"""Descriptors change hands within a bound, and none is left open."""

import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from equipoise.core import TransferError
from equipoise.transfer import pages
from equipoise.transfer.pages import FdServer, fetch_fds


@pytest.fixture
def server():
    """A server, and the promise that no descriptor is left when it has closed."""
    before = open_files()
    server = FdServer()
    yield server
    server.close()
    assert open_files() == before


def open_files():
    # Else what earlier tests left to the collector may be closed in the middle of one.
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def file_with(content):
    """An export of an anonymous file with this content."""

    def export():
        descriptor = os.memfd_create("test")
        os.write(descriptor, content)
        return descriptor

    return export


@pytest.mark.parametrize("count", [1, pages.MOST_FDS, 2 * pages.MOST_FDS + 3])
def test_descriptors_come_in_order_whatever_their_number(server, count):
    exports = [file_with(b"%d" % number) for number in range(count)]
    clerk = threading.Thread(target=server.serve, args=(exports,), kwargs={"times": 2, "timeout_s": 20})
    clerk.start()
    for _ in range(2):
        seen = []
        fetch_fds(server.address, count, lambda fd, seen=seen: seen.append(os.pread(fd, 9, 0)), source=0, timeout_s=20)
        assert seen == [b"%d" % number for number in range(count)]
    clerk.join()


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "stays away"])
def test_a_process_that_takes_nothing_ends_the_hand_out_within_the_bound(server, comes):
    with socket.socket(socket.AF_UNIX) as silent:
        if comes:
            silent.connect(server.address)
        begin = time.monotonic()
        with pytest.raises(TransferError, match=r"fetched it within 0\.2 s each, not all did"):
            server.serve([file_with(b"")], times=1, timeout_s=0.2)
        assert time.monotonic() - begin < 30.0


def test_a_process_that_ends_before_it_takes_anything_is_told(server):
    with socket.socket(socket.AF_UNIX) as gone:
        gone.connect(server.address)
    with pytest.raises(TransferError, match="not all did"):
        server.serve([file_with(b"")], times=1, timeout_s=5.0)


def test_a_process_that_ends_before_it_has_mapped_what_it_took_is_told(server):
    with ThreadPoolExecutor(1) as clerk:
        served = clerk.submit(server.serve, [file_with(b"")], times=1, timeout_s=20)
        with socket.socket(socket.AF_UNIX) as taker:
            taker.connect(server.address)
            _, descriptors, _, _ = socket.recv_fds(taker, 1, 1)
            os.close(descriptors[0])
        with pytest.raises(TransferError, match=r"not all did .*a rank ended before it received them"):
            served.result(60)


def test_nobody_at_the_counter_is_told_within_the_bound(server):
    with pytest.raises(TransferError, match=r"rank 3 of this node did not hand it over within 0\.2 s"):
        fetch_fds(server.address, 1, lambda fd: None, source=3, timeout_s=0.2)


def test_a_server_that_gives_up_is_named_and_not_the_network():
    server = FdServer()
    clerk = threading.Timer(0.2, server.close)
    clerk.start()
    with pytest.raises(TransferError, match="rank 3 of this node ended or gave up before it handed it over"):
        fetch_fds(server.address, 1, lambda fd: None, source=3, timeout_s=20)
    with pytest.raises(TransferError, match=r"rank 3 of this node has no open socket for it .* network namespace"):
        fetch_fds(server.address, 1, lambda fd: None, source=3, timeout_s=20)
    clerk.join()


def test_too_few_descriptors_name_the_limit(server):
    clerk = threading.Thread(target=serve_one, args=(server,))
    clerk.start()
    with pytest.raises(TransferError, match=r"1 descriptors came instead of 2.*ulimit -n"):
        fetch_fds(server.address, 2, lambda fd: None, source=0, timeout_s=20)
    clerk.join()


def serve_one(server):
    with pytest.raises(TransferError, match="not all did"):
        server.serve([file_with(b"")], times=1, timeout_s=20)
