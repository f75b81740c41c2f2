"""Show a result on the terminal, and write it as one HTML page that works offline.

    equipoise report result.json -o report.html
    equipoise report result.json --trace trace.json --doctor doctor.json
    equipoise report out/train -o run.html

Reads what `analyze -o` or `simulate -o` wrote, or the folder of a training run. `--trace` writes the timeline as a
Chrome trace, which ui.perfetto.dev opens beside one of torch.profiler.
"""

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.options import ForceFlag, JsonFlag, refuse_existing
from equipoise.cli.output import print_json, screen, show_page, write_json


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
    title: Annotated[str | None, typer.Option(help="Title of the page; the file's name if left out.")] = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a result, and write its page and its trace."""
    from equipoise.report import build_page, chrome_trace, write_page

    refuse_existing(out, trace, force=force, read=(result, doctor, measured))
    page = build_page(result, title=title, doctor=doctor, measured=measured)
    # Make both before writing one: a result without a timeline has no trace.
    events = None if trace is None else chrome_trace(page.document)
    written = []
    if out is not None:
        size = write_page(page, out)
        written.append(f"Written: {out} ({size / 1e6:.1f} MB); open it in a browser, no network needed")
    if trace is not None:
        write_json(events, trace)
        written.append(f"Written: {trace}; open it in ui.perfetto.dev or chrome://tracing")
    console = screen(as_json=as_json)
    show_page(page, console)
    for i, line in enumerate(written):
        console.print(line if i else f"\n{line}", soft_wrap=True)
    if as_json:
        # The figures themselves are in the result.
        document = {
            "kind": page.kind,
            "answer": page.answer,
            "figures": {figure.label: figure.value for figure in page.figures},
            "charts": [chart.name for chart in page.charts],
            "missing": [part.title for part in page.missing],
            "report": None if out is None else str(out),
            "trace": None if trace is None else str(trace),
        }
        print_json(document)
