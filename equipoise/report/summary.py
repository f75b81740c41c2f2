"""The page's facts as text, for a terminal on a login node: the answer, key figures, captions, tables.

Draws what `page.py` holds and computes nothing; knows no terminal, only lines of text.

Invariants (asserted by the tests):
1. Everything the page says in words stands in the summary: answer, conditions, figures, each caption and note.
2. Lines are at most as wide as asked for, except for single words that are wider.
"""

import textwrap
from dataclasses import dataclass

from equipoise.report.page import Cell, Chart, Page, Table
from equipoise.report.words import digits

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
    """Aligned columns: numbers to the right, words to the left; cut at the width."""
    cells = [list(table.columns), *([_cell(c) for c in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    right = [any(isinstance(row[i], int | float) for row in table.rows) for i in range(len(widths))]
    lines = []
    for row in cells:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        lines.append("  " + "  ".join(padded).rstrip()[: width - 2])
    return tuple(lines)


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    return digits(value) if isinstance(value, float) else str(value)
