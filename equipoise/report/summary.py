"""A page as plain text, for a terminal on a login node, and its timelines as a Chrome trace."""

import math
import textwrap
from dataclasses import dataclass
from typing import Any

from equipoise.core import EquipoiseError
from equipoise.core.value import plural
from equipoise.report import replay
from equipoise.report.charts import LANES, check_lanes
from equipoise.report.page import Cell, Chart, Page, Table, num_bytes
from equipoise.sim.summary import table as text_table

MAX_ROWS = 12
"""A table longer than this is for the page and its CSV, not for a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A heading and its lines."""

    heading: str
    lines: tuple[str, ...]


def summarise(page: Page, *, width: int = 80) -> tuple[Block, ...]:
    """Return the page as blocks of text, at most `width` letters wide."""

    def wrap(*texts: str) -> list[str]:
        lines = (textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) for text in texts)
        return [line for found in lines for line in found]

    head = (*wrap(page.answer), "", *wrap(*page.conditions))
    figures = tuple((f.label, f.value, f.text) for f in page.figures)
    blocks = [
        Block(heading=f"{page.title}: {page.kind}", lines=head),
        Block(heading="Key figures", lines=_table_lines(Table(columns=("", "", ""), rows=figures), width)[1:]),
    ]
    for section in page.sections:
        lines = wrap(section.caption, section.note if isinstance(section, Chart) else "")
        if len(section.data.rows) <= MAX_ROWS:
            lines += ["", *_table_lines(section.data, width)]
        blocks.append(Block(heading=section.title, lines=tuple(lines)))
    if page.missing:
        missing = wrap(*(f"{m.title}. {m.text} {m.command}" for m in page.missing))
        blocks.append(Block(heading="Not in this result", lines=tuple(missing)))
    return tuple(blocks)


def as_text(blocks: tuple[Block, ...]) -> str:
    """Join all blocks to one text."""
    return "\n\n".join("\n".join((block.heading, *block.lines)) for block in blocks) + "\n"


def _table_lines(table: Table, width: int) -> tuple[str, ...]:
    """Align columns, numbers to the right and text to the left; columns that do not fit are left to the page."""
    columns = [_cell_texts(name, [row[i] for row in table.rows]) for i, name in enumerate(table.columns)]
    kept, room = [], width - 2
    for i, (texts, _) in enumerate(columns):
        room -= max(map(len, texts)) + (2 if i else 0)
        if room < 0:
            break
        kept.append(i)
    left = [place for place, i in enumerate(kept) if not columns[i][1]]
    lines = text_table(list(zip(*(columns[i][0] for i in kept), strict=True)), left=left)
    left_out = len(columns) - len(kept)
    return (*lines, *([f"  ({plural(left_out, 'more column')} on the page)"] if left_out else []))


def _cell_texts(name: str, cells: list[Cell]) -> tuple[list[str], bool]:
    """Return header and cells of a column, with the same decimals in every row, and whether they are numbers."""
    if name == "bytes":
        cells = [num_bytes(cell) if isinstance(cell, int | float) else cell for cell in cells]
    numbers = [abs(cell) for cell in cells if isinstance(cell, float) and cell]
    decimals = max(0, min(9, 2 - math.floor(math.log10(max(numbers))))) if numbers else 0
    texts = [name]
    for cell in cells:
        texts.append("" if cell is None else f"{cell:.{decimals}f}" if isinstance(cell, float) else str(cell))
    return texts, any(isinstance(cell, int | float) for cell in cells)


def chrome_trace(document: dict[str, Any]) -> dict[str, Any]:
    """Return the trace of every timeline in the document of a simulation or of a rank replay, for Perfetto.

    Trace Event Format, the JSON object form that torch.profiler writes too: `traceEvents` has complete events ("ph":
    "X") with name, cat, pid, tid, ts and dur in microseconds; metadata events ("ph": "M") name processes and threads.
    A process is a rank of one timeline (a policy's), a thread one lane.
    """
    if document.get("benchmark") == replay.FORMAT:
        timelines = {f"measured, {name}": found for name, found in replay.replay_timelines(document).items()}
    else:
        policies = document.get("policies", ())
        timelines = {f"simulated, {p['policy']}": p["timeline"] for p in policies if p["timeline"]}
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
        for rank in sorted({event["rank"] for event in found}):
            pid = place * width + rank
            named = [
                ("process_name", 0, {"name": f"{name}, rank {rank}"}),
                ("process_sort_index", 0, {"sort_index": pid}),
            ]
            named += [("thread_name", tid, {"name": lane}) for tid, lane in enumerate(LANES)]
            events += [{"ph": "M", "name": n, "pid": pid, "tid": tid, "ts": 0, "args": args} for n, tid, args in named]
        events += [
            {
                "ph": "X",
                "cat": event["lane"],
                "name": event["name"],
                "pid": place * width + event["rank"],
                "tid": LANES.index(event["lane"]),
                "ts": event["start_s"] * 1e6,
                "dur": (event["end_s"] - event["start_s"]) * 1e6,
                "args": {"rank": event["rank"]},
            }
            for event in found
        ]
    return {"displayTimeUnit": "ms", "traceName": "equipoise", "traceEvents": events}
