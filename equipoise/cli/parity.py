"""Prove that balanced training learns what static training learns: a small stack trained both ways on local ranks.

equipoise parity
equipoise parity --ranks 4 --nodes 2 --slots 2 --steps 50 --dispatch two_level --json
equipoise parity --matrix

The last one goes through 1, 2, 4 and 8 ranks, 0 to 2 slots, and one and two nodes, a line each (some minutes).
Starts the ranks itself, on CPU, and needs torch. Exit code 0: every measure is within its limit, 1: one is not, or
nothing moved. What is measured and the limits: `equipoise/parity/verdict.py`.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equipoise.cli.options import JsonFlag
from equipoise.cli.output import print_json, screen

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.parity.verdict import Measure, Verdict


class Dispatch(StrEnum):
    """How tokens get to their experts."""

    direct = "direct"
    two_level = "two_level"


def parity(
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Local ranks of the EP group.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Declared nodes; replicas stay inside each.")] = 1,
    slots: Annotated[int, typer.Option(min=0, max=4, help="Replica slots per rank; 0 for placement alone.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Windows, each ended by an AdamW step.")] = 9,
    dispatch: Annotated[Dispatch, typer.Option(help="One copy per expert, or one per node.")] = Dispatch.direct,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Instead: 1 to 8 ranks, 1 and 2 nodes, 0 to 2 slots.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a small stack static and balanced, and compare."""
    from equipoise.core import TopologyError

    _require_torch()
    if ranks % nodes:
        raise TopologyError(f"--ranks {ranks} do not divide into --nodes {nodes}; give every node as many ranks")
    from equipoise.parity import verdict as verdicts
    from equipoise.parity.case import ParityCase, all_sizes

    case = ParityCase(ranks=ranks, nodes=nodes, slots=slots, steps=steps, dispatch=dispatch.value)
    console, found = screen(as_json=as_json), []
    for one in all_sizes(case) if matrix else [case]:
        found.append(verdicts.check_parity(one))
        (show_line if matrix else show)(found[-1], console)
    if as_json:
        documents = [document(verdict) for verdict in found]
        print_json({"cases": documents} if matrix else documents[0])
    raise typer.Exit(0 if all(verdict.is_good for verdict in found) else 1)


def show_line(verdict: "Verdict", console: "Console") -> None:
    """Print one case of a matrix: its sizes, and what does not hold."""
    case = verdict.case
    bad = [measure.name for measure in verdict.measures if not measure.is_good]
    word = "good" if verdict.is_good else f"FINDING: {', '.join(bad) or 'nothing moved'}"
    sizes = f"ranks {case.ranks}, nodes {case.nodes}, slots {case.slots}, steps {case.steps}, {case.dispatch}"
    console.print(f"{sizes}: {word} ({verdict.displaced} displaced, {verdict.pulls} pulls)", soft_wrap=True)


def show(verdict: "Verdict", console: "Console") -> None:
    """Print the measures as a table, and the verdict in words."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    case = verdict.case
    title = f"ranks {case.ranks}, nodes {case.nodes}, slots {case.slots}, layers {case.layers}, steps {case.steps}"
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


def _require_torch() -> None:
    from equipoise.core import AdapterError

    try:
        import torch  # noqa: F401  # asked for here, so that the words are ours
    except ModuleNotFoundError as error:
        raise AdapterError(
            "equipoise parity trains a small stack and needs torch, which is not installed; "
            "run: pip install 'equipoise[torch]'"
        ) from error
