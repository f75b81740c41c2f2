"""The page's facts as text, for a terminal on a login node: the answer, key figures, captions, tables.

Draws what `page.py` holds and computes nothing; knows no terminal, only lines of text.

Invariants (asserted by the tests):
1. Everything the page says in words stands in the summary: answer, conditions, figures, each caption and note.
2. Lines are at most as wide as asked for, except for single words that are wider.
"""

import math
import textwrap
from dataclasses import dataclass
from typing import Any

from equipoise.core import EquipoiseError
from equipoise.report import replay
from equipoise.report.charts import LANES, check_lanes
from equipoise.report.page import Cell, Chart, Page, Table, num_bytes, plural

# Timelines of a result, simulated or measured, as a Chrome trace, which Perfetto opens beside one of torch.profiler.
#
# The format (Trace Event Format, the JSON object form that torch.profiler writes too): `traceEvents` with complete
# events ("ph": "X") that have name, cat, pid, tid, ts and dur in microseconds; metadata events ("ph": "M") name
# processes
# and threads. Here a process is a rank of one timeline (a policy's), a thread one lane.
#
# Invariants (asserted by the tests):
# 1. Every event of the result is one complete event, at the same microsecond.
# 2. Ranks of different timelines are different processes, in the order of the result; their names say whether the
#    timeline is simulated or measured.
# 3. A bar in an unknown lane is refused by its name.


US = 1e6


def chrome_trace(document: dict[str, Any]) -> dict[str, Any]:
    """The trace of every timeline in the document of a simulation or of a rank replay."""
    timelines = _timelines(document)
    if not timelines:
        raise EquipoiseError(
            "this result has no timeline, so there is no trace to write; make one with: "
            "equipoise simulate ROUTES_OR_LOADS -o result.json"
        )
    try:
        for name, found in timelines.items():
            check_lanes(found, of=name)
    except ValueError as error:
        raise EquipoiseError(f"{error}; write the result again with this version") from error
    width = 1 + max(event["rank"] for found in timelines.values() for event in found)
    events: list[dict[str, Any]] = []
    for place, (name, found) in enumerate(timelines.items()):
        events += _names(name, sorted({event["rank"] for event in found}), first_pid=place * width)
        events += [_complete(event, first_pid=place * width) for event in found]
    return {"displayTimeUnit": "ms", "traceName": "equipoise", "traceEvents": events}


def _timelines(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Events by the name of their timeline; empty where the result has none."""
    if document.get("benchmark") == replay.FORMAT:
        return {f"measured, {name}": events for name, events in replay.replay_timelines(document).items()}
    policies = document.get("policies", ())
    return {f"simulated, {policy['policy']}": policy["timeline"] for policy in policies if policy["timeline"]}


def _names(timeline: str, ranks: list[int], *, first_pid: int) -> list[dict[str, Any]]:
    """Names of the processes and threads of one timeline."""
    named: list[dict[str, Any]] = []
    for rank in ranks:
        pid = first_pid + rank
        named.append(_metadata("process_name", pid, 0, {"name": f"{timeline}, rank {rank}"}))
        named.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        named += [_metadata("thread_name", pid, tid, {"name": lane}) for tid, lane in enumerate(LANES)]
    return named


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _complete(event: dict[str, Any], *, first_pid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": event["lane"],
        "name": event["name"],
        "pid": first_pid + event["rank"],
        "tid": LANES.index(event["lane"]),
        "ts": event["start_s"] * US,
        "dur": (event["end_s"] - event["start_s"]) * US,
        "args": {"rank": event["rank"]},
    }


MAX_ROWS = 12
"""A table longer than this is for the page and its CSV, not for a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A heading and its lines."""

    heading: str
    lines: tuple[str, ...]


def summarise(page: Page, *, width: int = 80) -> tuple[Block, ...]:
    """The page as blocks of text, at most `width` letters wide."""
    words = (*_wrap(page.answer, width), "", *(line for c in page.conditions for line in _wrap(c, width)))
    blocks = [Block(heading=f"{page.title}: {page.kind}", lines=words)]
    figures = tuple((f.label, f.value, f.words) for f in page.figures)
    blocks.append(
        Block(heading="Key figures", lines=_table_lines(Table(columns=("", "", ""), rows=figures), width)[1:])
    )
    for section in page.sections:
        note = section.note if isinstance(section, Chart) else ""
        lines = [line for text in (section.caption, note) for line in _wrap(text, width)]
        if len(section.data.rows) <= MAX_ROWS:
            lines += ["", *_table_lines(section.data, width)]
        blocks.append(Block(heading=section.title, lines=tuple(lines)))
    if page.missing:
        missing = [line for m in page.missing for line in _wrap(f"{m.title}. {m.words} {m.command}", width)]
        blocks.append(Block(heading="Not in this result", lines=tuple(missing)))
    return tuple(blocks)


def as_text(blocks: tuple[Block, ...]) -> str:
    """All blocks as one text."""
    return "\n\n".join("\n".join((block.heading, *block.lines)) for block in blocks) + "\n"


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _table_lines(table: Table, width: int) -> tuple[str, ...]:
    """Aligned columns, numbers to the right and words to the left; columns that do not fit are left to the page."""
    shown = [_column([row[i] for row in table.rows], name) for i, name in enumerate(table.columns)]
    room = width - 2
    kept = [column for i, column in enumerate(shown) if sum(len(c[0]) + 2 for c in shown[: i + 1]) - 2 <= room]
    lines = [("  " + "  ".join(cells)).rstrip() for cells in zip(*kept, strict=True)]
    left_out = len(shown) - len(kept)
    return (*lines, *([f"  ({plural(left_out, 'more column')} on the page)"] if left_out else []))


def _column(cells: list[Cell], name: str) -> list[str]:
    """A column's header and cells, all equally wide, with as many decimals in every row; bytes in their units."""
    if name == "bytes":
        cells = [num_bytes(cell) if isinstance(cell, int | float) else cell for cell in cells]
    numbers = [abs(cell) for cell in cells if isinstance(cell, float) and cell]
    decimals = max(0, min(9, 2 - math.floor(math.log10(max(numbers))))) if numbers else 0
    texts = [name, *(_text(cell, decimals) for cell in cells)]
    widest = max(len(text) for text in texts)
    is_number = any(isinstance(cell, int | float) for cell in cells)
    return [text.rjust(widest) if is_number else text.ljust(widest) for text in texts]


def _text(value: Cell, decimals: int) -> str:
    if value is None:
        return ""
    return f"{value:.{decimals}f}" if isinstance(value, float) else str(value)
