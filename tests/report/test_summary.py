"""The terminal says what the page says."""

import pytest

from equipoise.report import as_text, build_page, summarise
from equipoise.report.summary import MAX_ROWS
from tests.report.documents import simulation, small_analysis


@pytest.fixture(scope="module")
def page():
    return build_page(simulation(layers=8, ranks=64, experts=128), title="a step")


def squeezed(text):
    return " ".join(text.split())


def test_everything_the_page_says_in_words_stands_in_the_summary(page):
    text = squeezed(as_text(summarise(page)))
    for words in (page.answer, page.kind, *page.conditions, *(s.caption for s in page.sections)):
        assert squeezed(words) in text
    for figure in page.figures:
        assert squeezed(f"{figure.label} {figure.value} {figure.text}") in text
    for part in page.missing:
        assert squeezed(part.command) in text


def test_notes_of_binning_stand_there_too():
    page = build_page(simulation(layers=94, ranks=64, experts=128), title="x")
    assert "Cut to keep the page small" in as_text(summarise(page))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_are_as_wide_as_asked_for(page, width):
    for block in summarise(page, width=width):
        for line in block.lines:
            assert len(line) <= width or " " not in line.strip()


def test_short_tables_are_aligned_and_long_ones_are_left_to_the_page(page):
    blocks = {block.heading: block for block in summarise(page, width=120)}
    header, *rows, left_out = [line for line in blocks["Policies by cost part"].lines if line.startswith("  ")]
    assert "compute" in header and len(rows) == 4
    assert "more columns on the page" in left_out
    end = header.index("compute, s") + len("compute, s")
    assert all(row[end - 1].isdigit() and row[end] == " " for row in rows)
    assert len(blocks["Load of each rank in each micro-step"].lines) < MAX_ROWS


def test_bytes_are_written_in_their_units():
    blocks = {block.heading: block for block in summarise(build_page(small_analysis(), title="x"))}
    lines = [line.split() for line in blocks["Memory per rank"].lines if line.startswith("  ")]
    assert lines[0][-1] == "bytes" and len(lines) > 2
    assert all(line[-1] in ("GiB", "MiB", "KiB") for line in lines[1:])
