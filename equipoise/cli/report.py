"""Show a result on the terminal, and write it as one HTML page that works offline.

    equipoise report result.json -o report.html
    equipoise report result.json --trace trace.json --doctor doctor.json

Takes what `analyze -o` or `simulate -o` wrote, or the folder of a training run. `--trace` writes the timeline as a
Chrome trace, which ui.perfetto.dev opens beside one of torch.profiler. Computes nothing: `equipoise.report` does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.options import ForceFlag, JsonFlag, Results, refuse_existing
from equipoise.cli.output import print_json, screen, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.report import Page


def report(
    result: Annotated[
        Path, typer.Argument(help="A result (.json) of analyze or simulate, or a run's folder.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the page to this HTML file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline to this file, as a Chrome trace.")] = None,
    doctor: Annotated[
        Path | None, typer.Option(help="What `equipoise doctor --json` printed about the routes.")
    ] = None,
    measured: Annotated[Path | None, typer.Option(help="What `python -m benchmarks.validate -o` wrote.")] = None,
    title: Annotated[str | None, typer.Option(help="What the page is called; the file's name if left out.")] = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a result, and write its page and its trace."""
    from equipoise.report import Beside, build_page, chrome_trace, write_page

    refuse_existing(out, trace, force=force, read=(result, doctor, measured))
    page = build_page(result, title=title, beside=Beside(doctor=doctor, measured=measured))
    events = None if trace is None else chrome_trace(page.document)
    written = []
    if out is not None:
        size = write_page(page, out)
        written.append(f"Written: {out} ({size / 1e6:.1f} MB); open it in a browser, no network needed")
    if trace is not None:
        write_json(events, trace)
        written.append(f"Written: {trace}; open it in ui.perfetto.dev or chrome://tracing")
    console = screen(as_json=as_json)
    show(page, console)
    for place, line in enumerate(written):
        console.print(line if place else f"\n{line}", soft_wrap=True)
    if as_json:
        print_json(_document(page, out=out, trace=trace))


def show(page: "Page", console: "Console") -> None:
    """Print a page's summary."""
    from rich.text import Text

    from equipoise.report import summarise

    for place, block in enumerate(summarise(page, width=max(40, console.width - 1))):
        console.print(Text(("\n" if place else "") + block.heading, style="bold"))
        for line in block.lines:
            console.print(Text(line), soft_wrap=True)


def publish(result: Any, show: Callable[["Console"], None], *, title: str, results: Results) -> None:
    """Bring a result of another verb out: its files where asked for, then what `show` prints, then the JSON line.

    Files come first: a reader of our output, such as head, may go before the last line.
    """
    from equipoise.report import write_report

    written = []
    if results.out is not None:
        write_json(result.to_dict(), results.out, indent=1)
        written.append(f"Written: {results.out}")
    if results.report is not None:
        write_report(result, results.report, title=title)
        written.append(f"Written: {results.report}; open it in a browser, no network needed")
    console = screen(as_json=results.as_json)
    show(console)
    for line in written:
        console.print(line, soft_wrap=True)
    if results.as_json:
        print_json(result.to_dict())


def _document(page: "Page", *, out: Path | None, trace: Path | None) -> dict[str, Any]:
    """The summary for programs; the figures themselves are in the result."""
    return {
        "kind": page.kind,
        "answer": page.answer,
        "figures": {f.label: f.value for f in page.figures},
        "charts": [chart.name for chart in page.charts],
        "missing": [part.title for part in page.missing],
        "report": None if out is None else str(out),
        "trace": None if trace is None else str(trace),
    }
