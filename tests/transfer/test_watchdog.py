"""Bounded waits: time-outs, peers that gave up, peers that are gone."""

import subprocess
import sys
import time

import numpy as np
import pytest

from equipoise.core import TransferError
from equipoise.transfer.waits import ABORTED, MESSAGE_BYTES, PID, START, TAGS, Transfer, Watchdog, identity, is_gone

PULL = Transfer("pull", layer=3, expert=17, path="shm", peer=1)


def watchdogs(ranks=2, timeout_s=0.2):
    cells = {rank: np.zeros(TAGS, dtype=np.int64) for rank in range(ranks)}
    messages = {rank: np.zeros(MESSAGE_BYTES, dtype=np.uint8) for rank in range(ranks)}
    dogs = [Watchdog(cells, messages, rank=rank, timeout_s=timeout_s) for rank in range(ranks)]
    return cells, dogs


def test_a_wait_that_never_ends_names_everything():
    cells, (one, _) = watchdogs()
    begin = time.monotonic()
    wanted = r"rank 0: pull of expert 17 in layer index 3 with rank 1 over shm did not finish within 0.2 s"
    with pytest.raises(TransferError, match=wanted):
        one.wait(lambda: False, PULL)
    assert 0.2 <= time.monotonic() - begin < 20
    assert cells[0][ABORTED] == 1


def test_a_machine_that_may_reorder_stores_is_refused(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(TransferError, match=r"this machine is 'aarch64'.*only x86_64 and amd64 keep"):
        watchdogs()


def test_a_wait_returns_the_seconds_it_took():
    _, (one, _) = watchdogs(timeout_s=60)
    end = time.monotonic() + 0.05
    assert 0.04 < one.wait(lambda: time.monotonic() > end, PULL) < 20
    # The shortest of several: a busy machine may take the core away in between.
    assert min(one.wait(lambda: True, PULL) for _ in range(20)) < 0.01


def test_who_gave_up_is_quoted_to_all():
    _, (one, two) = watchdogs(timeout_s=10)
    error = one.abort("return of expert 4 over shm failed")
    assert str(error) == "rank 0: return of expert 4 over shm failed"
    one.abort("a later reason")
    wanted = "rank 1: pull of expert 17 .* ended because rank 0: return of expert 4 over shm failed"
    with pytest.raises(TransferError, match=wanted):
        two.wait(lambda: False, PULL)
    with pytest.raises(TransferError, match=r"^rank 0: return of expert 4"):
        one.check(PULL)


def test_a_message_longer_than_its_room_is_cut():
    _, (one, two) = watchdogs()
    one.abort("x" * 5000)
    with pytest.raises(TransferError) as raised:
        two.check(PULL)
    assert 900 < len(str(raised.value)) < 1300


def test_a_message_cut_inside_a_character_is_still_told():
    cells, (one, two) = watchdogs()
    for odd in ("", "x"):
        one.abort(odd + "\N{LATIN SMALL LETTER E WITH ACUTE}" * 5000)
        with pytest.raises(TransferError, match="ended because rank 0: "):
            two.check(PULL)
        cells[0][ABORTED] = 0


def test_a_peer_that_is_gone_ends_the_wait_long_before_the_bound():
    cells, (one, _) = watchdogs(timeout_s=60)
    # Left uncollected on purpose: a killed rank is a zombie until its launcher looks.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        start = int(open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[19])  # noqa: SIM115, PTH123
        cells[1][PID], cells[1][START] = child.pid, start
        one.watch_peers()
        assert not is_gone(child.pid, start) and is_gone(child.pid, start + 1)
        child.kill()
        begin = time.monotonic()
        with pytest.raises(TransferError, match=rf"cannot finish: rank 1 \(process {child.pid}\) is gone"):
            one.wait(lambda: False, PULL)
        assert time.monotonic() - begin < 30
    finally:
        child.kill()
        child.wait()
    assert is_gone(child.pid, start)


def test_a_peer_that_gave_up_and_ended_is_quoted_not_called_gone(monkeypatch):
    _, (one, two) = watchdogs(timeout_s=60)
    one.watch_peers()

    def ends_now(pid, start):
        two.abort("return of expert 4 over shm failed")
        return True

    monkeypatch.setattr("equipoise.transfer.waits.is_gone", ends_now)
    with pytest.raises(TransferError, match="ended because rank 1: return of expert 4 over shm failed"):
        one.wait(lambda: False, PULL)


def test_a_peer_that_cannot_be_seen_is_not_watched():
    cells, (one, _) = watchdogs(timeout_s=0.2)
    cells[1][PID], cells[1][START] = 2**22 + 1, 1
    one.watch_peers()
    with pytest.raises(TransferError, match="did not finish within"):
        one.wait(lambda: False, PULL)


def test_a_closed_watchdog_still_gives_an_error_to_raise():
    cells, (one, _) = watchdogs()
    one.close()
    assert "rank 0: too late" in str(one.abort("too late"))
    assert cells[0][ABORTED] == 0 and cells[0][PID] == identity()[0]
