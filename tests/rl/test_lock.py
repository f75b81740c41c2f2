"""A folder has one run at a time, and none once its holder has ended, however it ended."""

import subprocess
import sys

import pytest

from equipoise.core import TrainingError
from equipoise.rl.checkpoint import hold

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
