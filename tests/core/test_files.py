"""Files are written whole or not at all."""

import errno
from pathlib import Path

import numpy as np
import pytest

from equipoise.core import EquipoiseError, LoadMatrix, LoadsError
from equipoise.core.files import whole_file
from tests.core.plans import plan_of


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_block_that_ends_well_leaves_its_file_and_nothing_else(tmp_path):
    target = tmp_path / "result"
    for text in ("first", "second"):
        with whole_file(target) as draft:
            draft.write_text(text)
            assert not target.exists() or target.read_text() == "first"
        assert (names(tmp_path), target.read_text()) == (["result"], text)


@pytest.mark.parametrize("failure", [ValueError("broken"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_a_block_that_fails_leaves_what_was_there_before(tmp_path, failure):
    target = tmp_path / "result"
    target.write_text("precious")
    wanted = LoadsError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(wanted) as raised, whole_file(target, error=LoadsError) as draft:
        draft.write_text("half of")
        raise failure
    assert (names(tmp_path), target.read_text()) == (["result"], "precious")
    if isinstance(failure, OSError):
        assert str(raised.value) == f"{target} cannot be written: No space left"


def test_an_error_names_the_file_and_another_files_error_passes(tmp_path):
    place = tmp_path / "absent" / "result"
    with pytest.raises(EquipoiseError, match="absent/result cannot be written: No such file"), whole_file(place) as at:
        at.write_text("x")
    with pytest.raises(FileNotFoundError, match="source"), whole_file(tmp_path / "result"):
        (tmp_path / "source").read_text()
    assert names(tmp_path) == []


def test_links_and_devices_keep_being_what_they_are(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with whole_file(link) as draft:
        draft.write_text("new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")
    with whole_file("/dev/null") as draft:
        draft.write_text("gone")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("kind", ["loads", "plan"])
def test_loads_and_plans_are_written_whole(tmp_path, monkeypatch, kind):
    made = LoadMatrix(np.ones((1, 1, 2, 2), dtype=np.int64)) if kind == "loads" else plan_of()
    target = tmp_path / "result.npz"
    made.save(target)
    before = target.read_bytes()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numpy.lib.format.write_array", refuse)
    with pytest.raises(EquipoiseError, match=r"result\.npz cannot be written: No space left on device"):
        made.save(target)
    assert (names(tmp_path), target.read_bytes()) == (["result.npz"], before)
