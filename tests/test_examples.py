"""Every example runs as it says, and stays short."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples():
    assert "balanced_layer.py" in [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_names_its_command(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert f"python examples/{path.name}" in text


def test_the_balanced_layer_moves_experts_in_every_window():
    done = subprocess.run(
        [sys.executable, "examples/balanced_layer.py"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["window 0", "window 1", "window 2"]
    assert all(not line.endswith(" 0 replicas pulled") for line in lines)
