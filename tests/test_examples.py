"""Every example runs as it says, and stays short."""

import re
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
    # Run by itself, by torchrun, or named in a trainer's flags.
    commands = (f"python examples/{path.name}", f"torchrun --nproc-per-node=4 examples/{path.name}", f" {path.stem}.")
    assert any(command in text for command in commands)


def test_the_readme_links_every_example():
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in EXAMPLES if f"(examples/{path.name})" not in readme] == []


def test_the_balanced_layer_opens_the_gate_where_that_pays():
    done = subprocess.run(
        [sys.executable, "examples/balanced_layer.py"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    form = r"window (\d): the gate (.*): (\d+) replicas pulled, (\d+) homes displaced; predicted (\d+) us, .* (\d+) us"
    lines = [re.fullmatch(form, line).groups() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["0", "1", "2", "3"]
    assert [line[1] for line in lines] == ["opened by itself"] * 3 + ["stayed closed"]
    assert all(int(line[2]) > 0 and int(line[4]) < int(line[5]) for line in lines[:3])
    assert lines[3][2:4] == ("0", "0") and lines[3][4] == lines[3][5]
