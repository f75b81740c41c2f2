"""Killed, interrupted, out of disk: in every stage the run ends with a word, and resumed it has the same bits."""

import errno
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from equipoise.core import TrainingError, TransferError
from equipoise.launch import end_with_parent
from equipoise.rl.config import change
from equipoise.rl.train import Places, launch, run
from tests.pool import preloaded_context
from tests.rl import work
from tests.rl.test_run import lines_of, newest_weights

STAGES = ("sync", "rollout", "reward", "recompute", "update", "checkpoint")
CONFIG = work.small(steps=2, warmup={"steps": 2}, balance={"mode": "static"})


class Fault(NamedTuple):
    """What happens to whom, in which stage of step 1."""

    kind: str
    stage: str
    starter: int
    """Process id of whoever presses Ctrl-C."""


def faulty(config, ranks, show, places, fault):
    """A run that meets its fault."""
    torch.set_num_threads(1)

    def watch(event):
        show(event)
        if event.kind != "stage" or (event.values["step"], event.values["name"]) != (1, fault.stage):
            return
        if fault.kind == "kill" and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stand still" and ranks.rank == 1:
            time.sleep(300)
        if fault.kind == "interrupt" and ranks.rank == 0:
            os.kill(fault.starter, signal.SIGINT)
            time.sleep(30)

    return run(config, ranks, watch, places)


@pytest.fixture
def left(pool):
    """Ranks that a launch has left behind, beside the pool's own."""
    return lambda: [
        one for one in multiprocessing.active_children() if one not in [process for process, _ in pool._workers]
    ]


@pytest.fixture(scope="module")
def whole(pool, tmp_path_factory):
    """The same run, uninterrupted."""
    out = tmp_path_factory.mktemp("whole")
    pool.run(work.train_run, 2, CONFIG, out)
    return out


def assert_resumes_to(whole, out, pool, config=CONFIG):
    pool.run(work.resume_run, 2, config, out)
    assert lines_of(out) == lines_of(whole)
    assert work.same_weights(newest_weights(out), newest_weights(whole))
    assert not list((out / "checkpoints").glob(".*")), "no partial checkpoint is left"


@pytest.fixture
def interruptible():
    """Let SIGINT interrupt this process, as in a terminal; processes that share tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.dist(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_killed_in_any_stage_ends_the_run_and_it_resumes_to_the_same_bits(pool, tmp_path, whole, left, stage):
    fault, told = Fault("kill", stage, os.getpid()), []
    with pytest.raises(TransferError, match="rank 1 died of SIGKILL; resume from the last checkpoint"):
        launch(
            faulty,
            CONFIG,
            Places(out=tmp_path),
            fault,
            show=lambda _: told.append(time.monotonic()),
            context=preloaded_context(),
        )
    assert time.monotonic() - told[-1] < 30, "a death is noticed, not waited out"
    assert not left()
    assert_resumes_to(whole, tmp_path, pool)


@pytest.mark.dist(2)
def test_a_rank_that_stands_still_ends_the_run_in_one_line_that_names_it_and_the_stage(tmp_path, left):
    config, fault = change(CONFIG, timeout_s=15.0), Fault("stand still", "update", os.getpid())
    with pytest.raises(TransferError) as error:
        launch(faulty, config, Places(out=tmp_path), fault, context=preloaded_context())
    words = str(error.value)
    assert words.startswith("rank 1 stood still for longer than the time-out; rank 0 waited in vain in ")
    assert "; resume from the last checkpoint; the run was in stage update of step 1" in words
    assert "\n" not in words
    assert not left()


@pytest.mark.dist(2)
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_in_any_stage_ends_the_run_and_it_resumes_to_the_same_bits(
    pool, tmp_path, whole, left, stage, interruptible
):
    fault = Fault("interrupt", stage, os.getpid())
    with pytest.raises(KeyboardInterrupt):
        launch(faulty, CONFIG, Places(out=tmp_path), fault, context=preloaded_context())
    assert not left()
    assert_resumes_to(whole, tmp_path, pool)


@pytest.mark.slow
@pytest.mark.dist(2)
def test_a_rank_killed_while_experts_are_displaced_leaves_nothing_that_resuming_could_see(pool, tmp_path, left):
    config = change(CONFIG, balance={"mode": "equipoise"})
    whole, out = tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    out.mkdir()
    pool.run(work.train_run, 2, config, whole)
    with pytest.raises(TransferError, match="rank 1 died of SIGKILL"):
        launch(faulty, config, Places(out=out), Fault("kill", "update", os.getpid()), context=preloaded_context())
    assert not left()
    assert_resumes_to(whole, out, pool, config)
    assert sum(line["replicas"] + line["displaced"] for line in lines_of(out)) > 0


def fails(config, ranks, show, kind):
    """One rank fails, the other waits for it."""
    if ranks.rank == 1 and kind == "refuses":
        raise TrainingError("the moon is not full")
    if ranks.rank == 1 and kind == "breaks":
        raise ZeroDivisionError("by accident")
    if ranks.rank == 1 and kind == "leaves":
        os._exit(3)
    torch.distributed.barrier(group=ranks.world)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("refuses", TrainingError, "the moon is not full"),
        ("breaks", TransferError, r"rank 1 failed:(.|\n)*ZeroDivisionError: by accident"),
        ("leaves", TransferError, "rank 1 died with exit code 3"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_words(kind, error, words):
    with pytest.raises(error, match=words):
        launch(fails, CONFIG, kind, context=preloaded_context())


def test_a_rank_whose_starter_is_gone_ends(monkeypatch):
    done = []
    starter = SimpleNamespace(join=lambda: done.append("the starter is gone"))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: starter)
    monkeypatch.setattr(os, "_exit", lambda code: done.append(code))
    end_with_parent()
    assert done == ["the starter is gone", 1]


def test_ranks_are_started_deaf_to_ctrl_c_and_the_starter_is_not(interruptible):
    heard = []

    class Rank:
        """A rank that is interrupted while it is started."""

        def __init__(self, **_):
            pass

        def start(self):
            heard.append(signal.getsignal(signal.SIGINT))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(fails, CONFIG, "refuses", context=SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Rank))
    assert heard == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.dist(2)
@pytest.mark.parametrize("how", ["no space", "file limit"])
def test_a_full_disk_leaves_the_previous_checkpoint_valid(pool, tmp_path, whole, how):
    said = pool.run(work.disk_full, 2, CONFIG, tmp_path, how)
    assert said[0] == said[1], "every rank is told"
    name, words = said[0]
    reason = os.strerror(errno.ENOSPC) if how == "no space" else os.strerror(errno.EFBIG)
    assert name == "TrainingError" and f"step-000002 could not be written: rank 1: {reason}" in words
    assert "step-000001 is still valid, resume from it" in words
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000001"]
    assert_resumes_to(whole, tmp_path, pool)


@pytest.mark.dist(2)
def test_only_the_newest_checkpoints_are_kept(pool, tmp_path):
    pool.run(work.train_run, 2, change(CONFIG, checkpoint={"keep": 1}), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
