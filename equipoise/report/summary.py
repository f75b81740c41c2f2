"""The page's facts as text, for a terminal on a login node: the answer, key figures, captions, tables.

Draws what `page.py` holds and computes nothing; knows no terminal, only lines of text.

Invariants (asserted by the tests):
1. Everything the page says in words stands in the summary: answer, conditions, figures, each caption and note.
2. Lines are at most as wide as asked for, except for single words that are wider.
"""

import math
import textwrap
from dataclasses import dataclass

from equipoise.report.page import Cell, Chart, Page, Table
from equipoise.report.words import num_bytes, plural

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
