"""Checkpoints: the newest whole one is read, a damaged one or one of another run refused; one run at a time."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from equipoise.core import TrainingError
from equipoise.launch import Ranks
from equipoise.rl.checkpoint import FORMAT, Checkpoints, hold, newest_checkpoint, trained_steps

FACTS = {"seed": 0}
SECOND = Ranks(rank=1, size=2, world=None, ep_group=None, owner_group=None)


@pytest.fixture
def folder(tmp_path):
    """Two whole checkpoints of two ranks, and one that was not finished."""
    for step in (2, 10):
        path = tmp_path / f"step-{step:06d}"
        path.mkdir()
        (path / "meta.json").write_text(json.dumps({"format": FORMAT, "step": step, "ranks": 2, **FACTS}))
        own = {f"random.{rank}": torch.full((3,), rank) for rank in range(2)}
        dcp.save({"w": torch.full((2, 2), float(step)), "other": torch.ones(1), **own}, checkpoint_id=path / "state")
    (tmp_path / ".step-000012.partial").mkdir()
    (tmp_path / "step-000011").mkdir()
    return tmp_path


def load(folder, *, ranks=SECOND, **facts):
    checkpoints = Checkpoints(folder, ranks, facts=FACTS | facts, keep=2)
    return checkpoints.load(checkpoints.newest(), needs=lambda name: name == "w")


def test_the_newest_whole_checkpoint_is_read(folder):
    newest = newest_checkpoint(folder)
    assert newest.name == "step-000010" and trained_steps(newest) == 10
    step, tensors = load(folder)
    assert step == 10 and tensors.keys() == {"w", "random.1"}
    assert tensors["w"].eq(10).all() and tensors["random.1"].eq(1).all()
    assert newest_checkpoint(folder / "absent") is None


def test_another_number_of_ranks_reads_no_random_state(folder):
    third = Ranks(rank=1, size=3, world=None, ep_group=None, owner_group=None)
    assert load(folder, ranks=third)[1].keys() == {"w"}


def test_one_of_another_run_is_refused_by_name(folder):
    with pytest.raises(TrainingError, match=r"step-000010: seed is 0, this run has 3"):
        load(folder, seed=3)


@pytest.mark.parametrize("file", ["meta.json", "state/.metadata", "state/__0_0.distcp"])
@pytest.mark.parametrize("content", [b"{", b"", None], ids=["broken", "empty", "gone"])
def test_one_that_is_damaged_is_refused_by_name(folder, file, content):
    path = folder / "step-000010" / file
    path.unlink() if content is None else path.write_bytes(content)
    if file == "meta.json" and content is None:
        assert load(folder)[0] == 2, "without its facts it is no checkpoint"
        return
    with pytest.raises(TrainingError) as error:
        load(folder)
    words = str(error.value)
    assert words.startswith(f"checkpoint {folder / 'step-000010'} is damaged (") and "\n" not in words
    assert words.endswith("remove its folder to resume from the one before")


HOLDER = """
import sys, time
from pathlib import Path
from equipoise.rl.checkpoint import hold

with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_is_held_is_refused_until_it_is_let_go(tmp_path):
    folder = tmp_path / "deep" / "run"
    with hold(folder):
        words = "run is in use by a run that has not ended; wait for it, or give another folder"
        with pytest.raises(TrainingError, match=words), hold(folder):
            pass
        with hold(tmp_path / "other"):
            pass
    with hold(folder):
        assert not list(folder.iterdir()), "a lock leaves nothing"


def test_a_killed_holder_leaves_no_lock(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TrainingError, match="in use"), hold(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with hold(tmp_path):
        pass


def test_a_place_that_is_no_folder_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    words = r"file/run cannot be made or opened \(Not a directory\)"
    with pytest.raises(TrainingError, match=words), hold(tmp_path / "file" / "run"):
        pass
