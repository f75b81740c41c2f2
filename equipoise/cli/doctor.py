"""Prove that recorded routes are right, and say what is wrong with them.

    equipoise doctor rollout.jsonl --model qwen3-30b-a3b
    equipoise doctor rollout.jsonl --model qwen3-30b-a3b --second trainer.npz --json
    equipoise doctor --self-check --model mixtral-8x7b

Prints a table: check, verdict, share, first place, what to do (`docs/doctor.md` explains each check).
Exit code 0: good, 1: findings, 2: the dump or the model cannot be opened at all.
Knows arguments and printing. Every judgement is made in `equipoise.routes`.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.options import FormatOption, JsonFlag, ModelOption, find_model
from equipoise.cli.output import print_json, progress, screen

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.core import ModelShape
    from equipoise.routes.doctor import Diagnosis, Finding
    from equipoise.routes.interpret import Recording

_COLOR = {"good": "green", "finding": "bold red", "skipped": "dim"}
_MARKED_LENGTHS = (7, 64, 33, 1, 120)
"""Samples of the self-check: none divides by every width, one is a single token."""
_SCHEDULED_LENGTHS = (48, 96, 144)
"""Samples of the schedule check: multiples of every 2 * cp * sp it runs."""
_SCHEDULED_WIDTHS = ((2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (3, 4))


def doctor(
    dump: Annotated[Path | None, typer.Argument(help="A rollout dump: file or folder in any form.")] = None,
    model: ModelOption = None,
    form: FormatOption = None,
    second: Annotated[Path | None, typer.Option(help="Another recording of the same tokens, to compare with.")] = None,
    second_form: Annotated[str | None, typer.Option("--second-format", help="Form of the second recording.")] = None,
    min_agreement: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of equal routes under which a layer is a finding.")
    ] = 0.8,
    self_check: Annotated[bool, typer.Option("--self-check", help="Prove the slicing with planted markers.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check recorded routes, or how they are sliced."""
    from equipoise.cli.options import refuse_counted
    from equipoise.core import RoutesError
    from equipoise.routes import diagnose, stream_recordings

    if second is None and second_form is not None:
        raise RoutesError(f"--second-format {second_form} says how --second is read; name that recording as well")
    if self_check:
        _refuse_dumps(dump, second)
        diagnosis = check_slicing(model or "qwen3-30b-a3b")
    elif dump is None:
        raise RoutesError("no dump named; give a file or folder of recorded routes, or --self-check")
    else:
        refuse_counted(dump)
        shape = find_model(model, dump=dump, form=form)
        recordings = _counted(stream_recordings(dump, model=shape, format=form))
        partner = None if second is None else stream_recordings(second, model=shape, format=second_form)
        diagnosis = diagnose(recordings, model=shape, second=partner, min_agreement=min_agreement)
    show(diagnosis, screen(as_json=as_json))
    if as_json:
        print_json(diagnosis.as_json())
    raise typer.Exit(0 if diagnosis.ok else 1)


def _refuse_dumps(*dumps: Path | None) -> None:
    """Raise if a dump is named where none is looked at: `good` would be taken for a word on it."""
    from equipoise.core import RoutesError

    for dump in dumps:
        if dump is not None:
            raise RoutesError(f"--self-check looks at no dump; leave out {dump}, or --self-check to check it")


def check_slicing(model: str) -> "Diagnosis":
    """Push planted markers through the built-in slicing and through our schedules.

    Args:
        model: preset name or path of a HF config.json
    """
    from equipoise.routes.doctor import Diagnosis, plant
    from equipoise.routes.doctor.markers import self_check
    from equipoise.routes.registry import resolve_model

    shape = resolve_model(model)
    findings = (*self_check(plant(_MARKED_LENGTHS, model=shape)), *_check_schedules(shape))
    return Diagnosis(findings=findings, num_samples=len(_MARKED_LENGTHS), num_rows=sum(_MARKED_LENGTHS))


def show(diagnosis: "Diagnosis", console: "Console") -> None:
    """Print a diagnosis as a table; columns that would be empty are left out."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    title = f"{diagnosis.num_samples:,} samples, {diagnosis.num_rows:,} rows"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    columns = {
        "check": [Text(finding.check) for finding in diagnosis.findings],
        "verdict": [Text(finding.verdict, style=_COLOR[finding.verdict]) for finding in diagnosis.findings],
        "share": [Text(_share(finding)) for finding in diagnosis.findings],
        "first place": [Text(finding.first_place) for finding in diagnosis.findings],
        "what to do": [Text(f.advice) if f.advice else Text(f.detail, style="dim") for f in diagnosis.findings],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name in shown:
        table.add_column(name, overflow="fold", no_wrap=name in ("check", "verdict"))
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    for finding in diagnosis.findings:
        if finding.rate_L:
            rates = " ".join(f"{rate:.3f}" for rate in finding.rate_L)
            console.print(f"{finding.check} by layer: {rates}")
    fired = diagnosis.fired
    console.print("good" if diagnosis.ok else f"{len(fired)} finding{'s'[: len(fired) > 1]}: {', '.join(fired)}")


def _share(finding: "Finding") -> str:
    """'3.1% of rows', and never 0 % of something that happened."""
    if not finding.total:
        return ""
    number = "<0.1%" if 0 < finding.share < 0.001 else f"{finding.share:.1%}"
    return f"{number} of {finding.unit}"


def _check_schedules(model: "ModelShape") -> "Iterator[Finding]":
    import numpy as np

    from equipoise.loads.packing import TokenPolicy, schedule_samples, slice_context, slice_sequence
    from equipoise.routes.doctor import plant
    from equipoise.routes.doctor.markers import check_schedule

    markers = plant(_SCHEDULED_LENGTHS, model=model)
    whole = schedule_samples(
        np.array(_SCHEDULED_LENGTHS),
        ranks=1,
        samples_per_micro_step=len(_SCHEDULED_LENGTHS),
        policy=TokenPolicy(last_token="unknown"),
    )
    for cp, sp in _SCHEDULED_WIDTHS:
        yield check_schedule(slice_sequence(slice_context(whole, cp), sp), markers, cp=cp, sp=sp)


def _counted(recordings: "Iterable[Recording]") -> "Iterator[Recording]":
    """Pass recordings on and show how many there were."""
    with progress("checking") as report:
        for done, recording in enumerate(recordings, start=1):
            yield recording
            report(done, 0)
