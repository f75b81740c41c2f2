"""Results to text and to one HTML file that works offline.

    page.py        what a page holds (answer, figures, charts, tables), and figures as people read them
    charts.py      one function per chart, from plain arrays
    source.py      which result makes which page; to add one, write its maker and add it to `MAKERS`
    analysis.py, simulation.py, run.py, comparison.py, replay.py
                   the pages of an analysis, a simulation, a training run, compared modes, a rank replay
    render.py      the HTML file, with the colours of light and dark
    templates/     HTML, CSS and JavaScript of the page, and the definitions of its terms
    live.py        a run while it goes on, from what it appends to its folder
    serve.py       its page, for this machine alone
    summary.py     the same as text, and timelines as a Chrome trace

Every figure is taken from a result document, whose skew is that of `loads.skew`.
"""

from pathlib import Path

from equipoise.report.page import Page
from equipoise.report.render import render, write_page
from equipoise.report.source import Document, Result, build_page
from equipoise.report.summary import as_text, chrome_trace, summarise


def write_report(
    result: Result,
    path: str | Path,
    *,
    title: str | None = None,
    doctor: Path | Document | None = None,
    measured: Path | Document | None = None,
) -> Page:
    """Write the page of a result as one HTML file that works offline.

    Args:
        result: an `Analysis` or `Simulation`, its JSON document, the path of a file with one, or a run's folder
        path: the HTML file
        title: what the page is called; the file's name by default
        doctor: what `equipoise doctor --json` printed about its routes
        measured: what `python -m benchmarks.validate` wrote: how far predictions are from what was measured
    """
    page = build_page(result, title=title, doctor=doctor, measured=measured)
    write_page(page, Path(path))
    return page


__all__ = [
    "write_report",
    "Page",
    "build_page",
    "render",
    "write_page",
    "summarise",
    "as_text",
    "chrome_trace",
]
