"""Prove that balanced training learns what static training learns: a small stack trained both ways on local ranks.

equipoise parity
equipoise parity --ranks 4 --nodes 2 --slots 2 --steps 50 --dispatch two_level --json
equipoise parity --matrix --ranks 4
equipoise parity --device cuda

The matrix goes through 1, 2, 4 and 8 ranks, up to `--ranks`, 0 to 2 slots, and one and two nodes, a line each (some
minutes). Starts the ranks itself and needs torch: on the CPU in fp32, or sharing one CUDA device in bf16. Exit code 0:
every measure is within its limit, 1: one is not, or nothing moved. What is measured and the limits:
`equipoise/parity/verdict.py`.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from equipoise.cli.options import JsonFlag, require_torch
from equipoise.cli.output import print_json, progress, screen

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.parity.case import ParityCase
    from equipoise.parity.verdict import Measure, Verdict


def parity(
    ranks: Annotated[
        int | None, typer.Option(min=1, max=8, help="Local ranks of the EP group, 4 by default; the most of a matrix.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Declared nodes, 1 by default; replicas stay inside each.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=0, max=4, help="Replica slots per rank, 1 by default; 0 for placement alone.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Windows, each ended by an AdamW step.")] = 9,
    dispatch: Annotated[
        Literal["direct", "two_level"], typer.Option(help="One copy per expert, or one per node.")
    ] = "direct",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="CPU in fp32, or one CUDA device in bf16.")] = "cpu",
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Instead: 1 rank to --ranks (8), 1 and 2 nodes, 0 to 2 slots.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a small stack static and balanced, and compare."""
    require_torch("parity")
    _refuse_missing(device)
    from equipoise.parity import verdict as verdicts
    from equipoise.parity.case import ParityCase, all_sizes

    given: dict[str, Any] = {"steps": steps, "dispatch": dispatch, "device": device}
    if matrix:
        _check_matrix(nodes=nodes, slots=slots)
        cases = all_sizes(ParityCase(**given), most=ranks or 8)
    else:
        cases = [ParityCase(**given, **_sizes(ranks=ranks, nodes=nodes, slots=slots))]
    console, found = screen(as_json=as_json), []
    for number, case in enumerate(cases):
        with progress(f"windows, {_words(case)} ({number + 1} of {len(cases)})") as tell:
            found.append(verdicts.check_parity(case, progress=tell))
        (show_line if matrix else show)(found[-1], console)
    if as_json:
        documents = [document(verdict) for verdict in found]
        print_json({"cases": documents} if matrix else documents[0])
    raise typer.Exit(0 if all(verdict.is_good for verdict in found) else 1)


def _sizes(*, ranks: int | None, nodes: int | None, slots: int | None) -> dict[str, Any]:
    """The sizes of one case, those left out by default."""
    from equipoise.core import TopologyError

    ranks, nodes = 4 if ranks is None else ranks, nodes or 1
    if ranks % nodes:
        raise TopologyError(f"--ranks {ranks} do not divide into --nodes {nodes}; give every node as many ranks")
    return {"ranks": ranks, "nodes": nodes, "slots": 1 if slots is None else slots}


def _check_matrix(**given: int | None) -> None:
    """Refuse sizes that a matrix goes through by itself."""
    from equipoise.core import TopologyError

    for name, value in given.items():
        if value is not None:
            raise TopologyError(f"--matrix goes through {name} by itself; leave out --{name} {value}, or --matrix")


def _words(case: "ParityCase") -> str:
    return f"ranks {case.ranks}, nodes {case.nodes}, slots {case.slots}"


def show_line(verdict: "Verdict", console: "Console") -> None:
    """Print one case of a matrix: its sizes, and what does not hold."""
    case = verdict.case
    bad = [measure.name for measure in verdict.measures if not measure.is_good]
    word = "good" if verdict.is_good else f"FINDING: {', '.join(bad) or 'nothing moved'}"
    sizes = f"{_words(case)}, steps {case.steps}, {case.dispatch}"
    console.print(f"{sizes}: {word} ({verdict.displaced} displaced, {verdict.pulls} pulls)", soft_wrap=True)


def show(verdict: "Verdict", console: "Console") -> None:
    """Print the measures as a table, and the verdict in words."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    case = verdict.case
    title = f"{_words(case)}, layers {case.layers}, steps {case.steps}, {case.device}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    for column in ("measure", "static", "balanced", "difference", "limit", "verdict"):
        table.add_column(column, justify="left" if column in ("measure", "verdict") else "right", no_wrap=True)
    for measure in verdict.measures:
        table.add_row(*_row(measure))
    console.print(table)
    console.print(
        f"moved: {verdict.displaced} experts displaced, {verdict.replicas} replicas, {verdict.pulls} pulls",
        soft_wrap=True,
    )
    if not verdict.has_moved:
        console.print("nothing moved, so the run shows nothing: use more ranks, slots or steps", soft_wrap=True)
    console.print("parity holds" if verdict.is_good else "parity does not hold")


def document(verdict: "Verdict") -> dict[str, Any]:
    """The verdict as one JSON document."""
    case = verdict.case
    return {
        "ranks": case.ranks,
        "nodes": case.nodes,
        "slots": case.slots,
        "steps": case.steps,
        "dispatch": case.dispatch,
        "device": case.device,
        "displaced": verdict.displaced,
        "replicas": verdict.replicas,
        "pulls": verdict.pulls,
        "is_good": verdict.is_good,
        "measures": [
            {
                "name": measure.name,
                "static": _finite(measure.static),
                "balanced": _finite(measure.balanced),
                "difference": _finite(measure.difference),
                "limit": measure.limit,
                "is_good": measure.is_good,
            }
            for measure in verdict.measures
        ],
    }


def _row(measure: "Measure") -> tuple[str, ...]:
    shown = ["" if value is None else f"{value:.4g}" for value in (measure.static, measure.balanced)]
    limit = "exact" if measure.limit == 0 else f"{measure.limit:g}"
    return measure.name, *shown, f"{measure.difference:.3g}", limit, "good" if measure.is_good else "FINDING"


def _finite(value: float | None) -> float | None:
    """JSON has no infinity and no NaN: a run that diverged shows null, and is not good."""
    from math import isfinite

    return value if value is not None and isfinite(value) else None


def _refuse_missing(device: str) -> None:
    import torch

    from equipoise.core import AdapterError

    if device == "cuda" and not torch.cuda.is_available():
        raise AdapterError("--device cuda: torch finds no CUDA device here; leave it out to train on the CPU")
