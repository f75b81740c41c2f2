"""How a benchmark hands out its results: a table for people, then one JSON document as the last line.

Knows git, the machine and the versions in use. Does not know what was measured.

The JSON document
    benchmark    name
    commit       of the code that ran, "-dirty" behind it where tracked files differ from the commit
    machine      processor and cores
    versions     of Python and of the packages asked for
    rows         the table, one object per row
    limits       each limit that was set: name, value, limit, and whether it holds
"""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "numba")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A promise that the benchmark checks."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the value keeps both ends."""
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)


def publish(
    benchmark: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    limits: Sequence[Limit] = (),
    note: str = "",
    packages: Sequence[str] = PACKAGES,
    commit: str | None = None,
) -> int:
    """Print the table and the JSON line, and return the exit code: 0, or 1 where a limit does not hold.

    Args:
        commit: of the source, where it is exported and git cannot tell
    """
    document = {
        "benchmark": benchmark,
        "commit": commit or read_commit(),
        "machine": read_machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "rows": [dict(row) for row in rows],
        "limits": [{**asdict(limit), "holds": limit.holds} for limit in limits],
    }
    print(f"{benchmark}: {document['machine']}")
    print(format_table(rows))
    for limit in limits:
        print(say_limit(limit))
    if note:
        print(note)
    print(json.dumps(document))
    return 0 if all(limit.holds for limit in limits) else 1


def say_limit(limit: Limit) -> str:
    """One line: whether it holds, its value and its bounds."""
    bounds = [f"{word} {end:g}" for word, end in (("at least", limit.at_least), ("at most", limit.at_most)) if end]
    return f"{'holds' if limit.holds else 'FAILS'}: {limit.name} is {limit.value:.6g}, {' and '.join(bounds)}"


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows under their keys, numbers to the right."""
    if not rows:
        return "(no rows)"
    cells = [list(rows[0]), *([_format_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_text = [isinstance(value, str) for value in rows[0].values()]
    lines = []
    for line in cells:
        aligned = (c.ljust(w) if t else c.rjust(w) for c, w, t in zip(line, widths, is_text, strict=True))
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def read_commit() -> str:
    """The commit that is checked out; a result without one is worth nothing, so its absence is an error."""
    commit = _git("rev-parse", "HEAD")
    return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit


def read_machine() -> str:
    """Processor and cores of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
