"""Reading checkpoints: the newest whole one, by name; what is damaged or of another run is refused by name."""

import json

import pytest
import torch

from equipoise.core import TrainingError
from equipoise.rl.checkpoint import FORMAT, Checkpoints, newest_checkpoint, trained_steps, write_torch
from equipoise.rl.layout import Layout

FACTS = {"seed": 0, "ranks": 2}
SECOND = Layout(rank=1, ranks=2, world=None, ep_group=None, owner_group=None)


@pytest.fixture
def folder(tmp_path):
    """Two whole checkpoints, and one that was not finished."""
    for step in (2, 10):
        path = tmp_path / f"step-{step:06d}"
        path.mkdir()
        (path / "meta.json").write_text(json.dumps({"format": FORMAT, "step": step, **FACTS}))
        write_torch(path / "rank-00001.pt", {"optimizer": {"w": step}, "random": torch.get_rng_state()})
    (tmp_path / ".step-000012.partial").mkdir()
    (tmp_path / "step-000011").mkdir()
    return tmp_path


def load(folder, **facts):
    checkpoints = Checkpoints(folder, SECOND, facts=FACTS | facts, keep=2)
    return checkpoints.load(checkpoints.newest())


def test_the_newest_whole_checkpoint_is_read(folder):
    newest = newest_checkpoint(folder)
    assert newest.name == "step-000010" and trained_steps(newest) == 10
    state = load(folder)
    assert state.step == 10 and state.optimizer == {"w": 10} and state.reference is None
    assert newest_checkpoint(folder / "absent") is None


def test_one_of_another_run_is_refused_by_name(folder):
    with pytest.raises(TrainingError, match=r"step-000010: seed is 0, this run has 3"):
        load(folder, seed=3)


@pytest.mark.parametrize("file", ["meta.json", "rank-00001.pt"])
@pytest.mark.parametrize("content", [b"{", b"", None], ids=["broken", "empty", "gone"])
def test_one_that_is_damaged_is_refused_by_name(folder, file, content):
    path = folder / "step-000010" / file
    path.unlink() if content is None else path.write_bytes(content)
    if file == "meta.json" and content is None:
        assert load(folder).step == 2, "without its facts it is no checkpoint"
        return
    with pytest.raises(TrainingError) as error:
        load(folder)
    words = str(error.value)
    assert words.startswith(f"checkpoint {path.parent} is damaged (") and "\n" not in words
    assert words.endswith("remove its folder to go on from the one before")
