"""The example of a loop of one's own runs as it says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check_lines(done):
    """Three windows, in each of which replicas were pulled and every row was replayed."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["window 0", "window 1", "window 2"]
    for number, line in enumerate(lines):
        assert ", 0 replicas pulled" not in line
        rows = 512 * (number + 1)
        assert line.endswith(f"{rows} of {rows} rows replayed so far")


def test_the_loop_replays_every_row_and_moves_experts_in_every_window():
    command = [sys.executable, "examples/transformers_loop.py"]
    check_lines(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600))
