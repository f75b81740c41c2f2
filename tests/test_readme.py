"""What the README promises is true: its commands, its code, its tree, its length.

Its results are held by `tests/benchmarks/test_summary.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

from equipoise.core import Cluster, ModelShape
from equipoise.core.options import balance_bytes

ROOT = Path(__file__).parent.parent
LINES = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def blocks(language):
    """The fenced code blocks of one language ("": none named), as texts."""
    found, current, wanted = [], None, False
    for line in LINES:
        if not line.startswith("```"):
            if current is not None:
                current.append(line)
        elif current is None:
            current, wanted = [], line == f"```{language}"
        else:
            if wanted:
                found.append("\n".join(current) + "\n")
            current = None
    return found


def test_the_two_commands_come_first():
    first = next(n for n, line in enumerate(LINES, start=1) if line.startswith("make demo"))
    assert first < 25
    assert blocks("bash")[0].startswith("make demo") and "make test" in blocks("bash")[0]


def test_the_first_screen_names_the_speed_ups_of_the_table():
    rows = [[cell.strip(" *") for cell in line.split("|")] for line in LINES if line.startswith("|")]
    head = next(row for row in rows if "EPLB oracle" in row)
    table = rows[rows.index(head) + 2 :]
    ours = [float(row[head.index("Equipoise")]) for row in table[: [len(r) for r in table].index(5)]]
    assert f"**Measured: {min(ours):.2f} to {max(ours):.2f} times as fast**" in "\n".join(LINES[:12])


def test_it_is_short():
    assert len(LINES) <= 150


def test_the_python_block_runs_and_explains_a_decision(tmp_path):
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Micro-step 0, layer index 0" in done.stdout
    assert (tmp_path / "plan.npz").exists()


def test_the_memory_of_one_slot_is_what_it_says():
    shape, cluster = ModelShape.preset("qwen3-30b-a3b"), Cluster.preset("h200", ep=8)
    taken = balance_bytes(shape, cluster=cluster, slots=1, stage="update")
    share = taken / (shape.layers * cluster.home_slots(shape) * shape.expert_bytes)
    words = f"takes {taken / 2**20:.0f} MiB per GPU in updates of Qwen3-30B-A3B, {share:.1%} of its experts at EP8"
    assert words in " ".join(line.strip() for line in LINES)


def test_the_loop_calls_what_there_is():
    from equipoise.adapters.transformers import Installed
    from equipoise.balancer import Balancer

    (loop,) = [block for block in blocks("text") if "balancer.window" in block]
    handle, balancer = (set(re.findall(rf"\b{name}\.(\w+)\(", loop)) for name in ("handle", "balancer"))
    assert handle == {"micro_step"} <= set(dir(Installed))
    assert balancer == {"window"} <= set(dir(Balancer))


def test_the_tree_names_every_room_and_nothing_else():
    (tree,) = [block for block in blocks("") if block.startswith("equipoise/\n")]
    rooms = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    assert rooms == {path.parent.name for path in (ROOT / "equipoise").glob("*/__init__.py")}
    for folder in re.findall(r"^(\w+)/", tree, re.MULTILINE):
        assert (ROOT / folder).is_dir()


def test_every_link_leads_to_a_file():
    for target in re.findall(r"\]\(([^)#:]+)\)", "\n".join(LINES)):
        assert (ROOT / target).exists(), target


def test_the_index_of_the_documentation_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages


def test_links_of_the_documentation_lead_to_files():
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_verb_shown_exists():
    from equipoise.cli.app import VERBS

    shown = set(re.findall(r"^equipoise (\w+)", "\n".join(blocks("bash")), re.MULTILINE))
    assert shown and shown <= {verb.__name__ for verb in VERBS}
