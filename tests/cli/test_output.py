"""What standard output refuses: a reader that has gone, a full disk."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.cli.output import guarded

VERB = [sys.executable, "-c", "from equipoise.cli import main; main()", "convert", "--formats"]


FULL = Path("/dev/full")
# What is refused is noticed when it is written, or when it leaves a buffer.
buffering = pytest.mark.parametrize(
    "environment", [os.environ | {"PYTHONUNBUFFERED": value} for value in ("", "1")], ids=["buffered", "unbuffered"]
)


@buffering
def test_a_reader_that_has_gone_is_no_error(environment):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(VERB, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@buffering
@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line_and_exit_code_2(environment):
    with FULL.open("w") as full:
        done = subprocess.run(VERB, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr == "equipoise: standard output cannot be written: No space left on device\n"


def test_another_pipe_that_broke_is_not_taken_for_a_reader():
    def verb() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        guarded(verb)()
