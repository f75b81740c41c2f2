"""Local ranks: results in order, the failed one named, no process left; they ignore Ctrl-C, their starter does not."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from equipoise.core import TopologyError, TransferError
from equipoise.launch import RankOptions, Torchrun, ignored_interrupts, nccl_environment, run_ranks, temporary_folder
from tests.pool import preloaded_context

HEARS = "import signal; print(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)"


def child_hears() -> str:
    return subprocess.run([sys.executable, "-c", HEARS], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt this process, as in a terminal; processes that share tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_child_ignores_ctrl_c_and_its_starter_does_not_afterwards(interruptible):
    with ignored_interrupts():
        assert child_hears() == "False"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert child_hears() == "True"


def test_the_starter_does_not_ignore_ctrl_c_after_an_error(interruptible):
    with pytest.raises(ValueError, match="no such program"), ignored_interrupts():
        raise ValueError("no such program")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_start_children_too(interruptible):
    heard = []

    def start() -> None:
        with ignored_interrupts():
            heard.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert heard == [signal.default_int_handler]


def rank_squared(group, fail_at):
    if group.rank() == fail_at:
        raise ValueError("no square today")
    return group.rank() ** 2


def die_of_another(group):
    """Rank 0 dies because of rank 1, which raises."""
    if group.rank() == 0:
        os._exit(1)
    raise ValueError("it was me")


def count_up(group, most, *, show):
    for number in range(most):
        show(number, most)
    return group.rank()


def test_what_rank_0_shows_arrives_in_order_before_the_results():
    shown = []
    assert run_ranks(count_up, 2, 3, show=lambda *value: shown.append(value)) == [0, 1]
    assert shown == [(0, 3), (1, 3), (2, 3)]


def test_ranks_answer_in_order_and_report_what_failed():
    assert run_ranks(rank_squared, 2, None) == [0, 1]
    with pytest.raises(TransferError, match=r"(?s)rank 1 failed:.*ValueError: no square today"):
        run_ranks(rank_squared, 2, 1, context=preloaded_context())


def be_killed_or_abort(group):
    """Rank 1 is killed, and torch ends rank 0, as where NCCL joined them."""
    os.kill(os.getpid(), signal.SIGKILL if group.rank() else signal.SIGABRT)


def test_of_a_rank_that_was_killed_and_one_that_torch_aborted_for_it_the_first_is_named():
    with pytest.raises(TransferError, match="rank 1 died of SIGKILL"):
        run_ranks(be_killed_or_abort, 2, context=preloaded_context())


def test_of_a_rank_that_failed_and_one_that_died_of_it_the_first_is_named():
    with pytest.raises(TransferError, match=r"(?s)rank 1 failed:.*ValueError: it was me"):
        run_ranks(die_of_another, 2, context=preloaded_context())


def sleep(group, seconds):
    """Rank 1 is late."""
    if group.rank() == 1:
        time.sleep(seconds)


def test_a_rank_that_is_late_is_named_and_ended():
    begin, before = time.monotonic(), set(multiprocessing.active_children())
    with pytest.raises(TransferError, match=r"ranks \[1\] gave no result within 20 s"):
        run_ranks(sleep, 2, 300, limit_s=20.0, context=preloaded_context())
    assert time.monotonic() - begin < 60
    assert set(multiprocessing.active_children()) <= before, "a process outlives the call"


def refuse(group):
    if group.rank() == 1:
        raise TopologyError("two ranks are one too many")
    group.barrier().wait()


def test_an_error_of_ours_is_raised_as_it_is():
    with pytest.raises(TopologyError, match="two ranks are one too many"):
        run_ranks(refuse, 2, options=RankOptions(timeout_s=60.0), context=preloaded_context())


def test_under_torchrun_another_number_of_ranks_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TopologyError, match="2 ranks were asked for, but torchrun started 3; make them equal"):
        run_ranks(rank_squared, 2, None)


def test_ranks_that_share_a_gpu_are_different_hosts_to_nccl(monkeypatch):
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert nccl_environment(Torchrun(5, 8, 5, 8), devices=8) == {}
    found = [nccl_environment(Torchrun(rank, 4, rank, 4), devices=2) for rank in range(4)]
    assert len({one["NCCL_HOSTID"] for one in found}) == 4
    assert all(one["NCCL_SOCKET_IFNAME"] == "lo" for one in found)
    # Ranks of several machines reach each other by the network; what the user has set stays.
    assert set(nccl_environment(Torchrun(5, 8, 1, 4), devices=1)) == {"NCCL_HOSTID"}
    monkeypatch.setenv("NCCL_HOSTID", "here")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    given = nccl_environment(Torchrun(1, 4, 1, 4), devices=1)
    assert given == {"NCCL_HOSTID": "here-1", "NCCL_SOCKET_IFNAME": "eth0"}


def stand_still(group):
    """Rank 1 sleeps while rank 0 waits for it."""
    import torch.distributed as dist

    if group.rank() == 1:
        time.sleep(300)
    dist.barrier(group)


def test_a_rank_that_stands_still_is_named_in_one_line_with_the_place_where_others_waited():
    with pytest.raises(TransferError) as error:
        run_ranks(stand_still, 2, options=RankOptions(timeout_s=10.0), context=preloaded_context())
    words = str(error.value)
    assert words.startswith("rank 1 stood still for longer than the time-out; rank 0 waited in vain in ")
    assert "test_launch.stand_still" in words
    assert "\n" not in words


def under_torchrun(rank, port, pipe):
    """A rank as torchrun starts it; says how it ended."""
    places = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        run_ranks(stand_still, 2, options=RankOptions(timeout_s=10.0))
    except TransferError as error:
        pipe.send(str(error))


def test_under_torchrun_the_ranks_that_waited_name_the_one_that_stood_still_in_one_line():
    import torch.distributed as dist

    # As torchrun does it: its own process keeps the store.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = preloaded_context()
    ours, theirs = context.Pipe()
    processes = [context.Process(target=under_torchrun, args=(rank, store.port, theirs)) for rank in range(2)]
    for process in processes:
        process.start()
    theirs.close()
    try:
        assert ours.poll(120), "the waiting rank says something"
        words = ours.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert words.startswith("rank 1 stood still for longer than the time-out; rank 0 waited in vain in ")
    assert "test_launch.stand_still" in words and "\n" not in words


def test_the_next_start_removes_the_folder_of_a_run_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = Path("/proc/self/ns/pid").stat().st_ino
    ours = [f"equipoise-{here}-{pid}-abc" for pid in (ended.pid, os.getpid())]
    names = [*ours, f"equipoise-{here + 1}-{ended.pid}-abc", "equipoise-other", "mine"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "store").touch()
    with temporary_folder() as folder:
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names[1:], folder.name])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


KILLED_AT_STDIN = """
import os, sys, threading, time
from pathlib import Path
from equipoise.cli import main

def die():
    while not any(path.stat().st_size for path in Path(os.environ["TMPDIR"]).rglob("stdin.jsonl")):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)

threading.Thread(target=die).start()
main(["doctor", "-"])
"""


def test_what_a_killed_verb_has_copied_from_standard_input_is_removed_by_the_next(tmp_path, monkeypatch):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.Popen([sys.executable, "-c", KILLED_AT_STDIN], env=environment, stdin=subprocess.PIPE)
    # More than a pipe and the file's buffer hold, so that some of it is in the file; the end does not come.
    with contextlib.suppress(BrokenPipeError):
        killed.stdin.write(b"{}\n" * 1_000_000)
    assert killed.wait(60) == -signal.SIGKILL
    killed.stdin = None
    assert [path.name for path in tmp_path.rglob("stdin.jsonl")] == ["stdin.jsonl"]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with temporary_folder():
        assert not list(tmp_path.rglob("stdin.jsonl"))
