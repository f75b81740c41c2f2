"""Watch a training run while it goes on, in the terminal and on a page of this machine.

    equipoise watch out/train
    equipoise watch out/train --once --json

Shows skew before and after, seconds saved and exposed, coverage, the memory that the next window needs, and warnings.
Only reads the run's folder; ends with the run, or with Ctrl-C. For another machine's run, forward the port:
ssh -L 8000:127.0.0.1:PORT HOST, and open http://127.0.0.1:8000/.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from equipoise.cli.options import JsonFlag
from equipoise.cli.output import build_list, build_table, print_json, screen

if TYPE_CHECKING:
    from equipoise.report.live import LiveReader, LiveRun
    from equipoise.report.serve import WatchServer

EVERY_S = 1.0
"""Seconds between two looks at the run's folder, as often as the page asks."""


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of the run: `equipoise train -o FOLDER`.", show_default=False)],
    port: Annotated[int, typer.Option(help="Port of the page on 127.0.0.1; 0 takes a free one.")] = 0,
    once: Annotated[bool, typer.Option("--once", help="Print what is known now, and end.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Watch a training run live."""
    from equipoise.report.live import LiveReader
    from equipoise.report.serve import serving

    reader, console = LiveReader(run), screen(as_json=as_json)
    seen = reader.read()
    if once or as_json or seen.is_ended:
        console.print(view(seen))
        if as_json:
            print_json(seen.to_dict())
        return
    with serving(port) as server:
        console.print(f"page: {server.address} (this machine only); Ctrl-C ends the watching, not the run")
        _follow(reader, seen, server, console)
        server.tell_last()


def _follow(reader: "LiveReader", seen: "LiveRun", server: "WatchServer", console: Console) -> None:
    """Show the run on the console and on the page until it ends."""
    with Live(view(seen), console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        server.show(seen.to_dict())
        while not seen.is_ended:
            time.sleep(EVERY_S)
            before, seen = seen, reader.read()
            server.show(seen.to_dict())
            if live is None:
                _print_new(before, seen, console)
            else:
                live.update(view(seen), refresh=True)


def view(seen: "LiveRun") -> RenderableType:
    """Lay out what is known of a run."""
    parts: list[RenderableType] = [Text(f"{seen.name}: {seen.kind}", style="bold"), Text(f"{seen.state}: {seen.doing}")]
    if seen.figures:
        parts.append(build_list({f.label: f"{f.value}  ({f.text})" for f in seen.figures}))
        lines = {name: line for chart in seen.charts for name, line in chart.lines.items()}
        rows = [
            [str(step), *("-" if line[at] is None else f"{line[at]:.3f}" for line in lines.values())]
            for at, step in enumerate(seen.steps)
        ]
        parts.append(build_table(["step", *lines], rows[-5:], num_text=0, has_rule=False))
    parts += [Text(f"warning: {words}", style="yellow") for words in seen.warnings]
    parts += [Text(words, style="dim") for words in seen.notes]
    return Group(*parts)


def _print_new(before: "LiveRun", seen: "LiveRun", console: Console) -> None:
    """Print a line for new steps, new warnings and the end, where no terminal redraws itself."""
    if seen.steps and seen.steps[-1:] != before.steps[-1:]:
        console.print("; ".join(f"{f.label.lower()} {f.value}" for f in seen.figures), soft_wrap=True)
    for words in seen.warnings:
        if words not in before.warnings:
            console.print(f"warning: {words}", soft_wrap=True)
    if seen.state != before.state:
        console.print(f"{seen.state}: {seen.doing}", soft_wrap=True)
