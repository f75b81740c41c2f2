"""Prove that recorded routes are right, or say what is wrong with them.

    equipoise doctor rollouts.jsonl --model qwen3-30b-a3b
    equipoise doctor --self-check --model mixtral-8x7b
    equipoise doctor rollouts.jsonl --model qwen3-30b-a3b --second trainer.eqr --json

Prints a table: check, verdict, share, first place, what to do (`docs/doctor.md` explains each check).
Exit code 0: good, 1: findings, 2: the dump or the model cannot be opened at all.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.options import FormatOption, JsonFlag, ModelOption, find_model, refuse_counted
from equipoise.cli.output import print_json, progress, screen, show_diagnosis
from equipoise.core import RoutesError

if TYPE_CHECKING:
    from equipoise.routes.doctor import Diagnosis
    from equipoise.routes.interpret import Recording

_MARKED_LENGTHS = (7, 64, 33, 1, 120)
"""Tokens of the samples that the self-check slices: none divides by every width, one is a single token."""
_SCHEDULED_LENGTHS = (48, 96, 144)
"""Tokens of the samples that it schedules: multiples of every 2 * cp * sp below."""
_SCHEDULED_WIDTHS = ((2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (3, 4))
"""(cp, sp) of each schedule."""


def doctor(
    dump: Annotated[Path | None, typer.Argument(help="A rollout dump: file or folder in any format.")] = None,
    model: ModelOption = None,
    form: FormatOption = None,
    second: Annotated[Path | None, typer.Option(help="Another recording of the same tokens, to compare with.")] = None,
    second_form: Annotated[str | None, typer.Option("--second-format", help="Format of the second recording.")] = None,
    min_agreement: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of equal routes below which a layer is a finding.")
    ] = 0.8,
    self_check: Annotated[bool, typer.Option("--self-check", help="Prove the slicing with planted markers.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check recorded routes, or how they are sliced."""
    from equipoise.routes import diagnose, stream_recordings

    if second is None and second_form is not None:
        raise RoutesError(f"--second-format {second_form} says how --second is read; name that recording as well")
    if self_check:
        # A user would take `good` for the verdict on the dump.
        if given := dump or second:
            raise RoutesError(f"--self-check looks at no dump; leave out {given}, or --self-check to check it")
        diagnosis = check_slicing(model or "qwen3-30b-a3b")
    elif dump is None:
        raise RoutesError("no dump named; give a file or folder of recorded routes, or --self-check")
    else:
        refuse_counted(dump)
        shape = find_model(model, dump=dump, form=form)
        recordings = _show_progress(stream_recordings(dump, model=shape, format=form))
        partner = None if second is None else stream_recordings(second, model=shape, format=second_form)
        diagnosis = diagnose(recordings, model=shape, second=partner, min_agreement=min_agreement)
    show_diagnosis(diagnosis, screen(as_json=as_json))
    if as_json:
        print_json(diagnosis.as_json())
    raise typer.Exit(0 if diagnosis.ok else 1)


def check_slicing(model: str) -> "Diagnosis":
    """Send planted markers of a model, a preset or a HF config.json, through the built-in slicing and our schedules."""
    import numpy as np

    from equipoise.loads.packing import TokenPolicy, schedule_samples, slice_context, slice_sequence
    from equipoise.routes.doctor import Diagnosis, plant_markers
    from equipoise.routes.doctor.markers import check_schedule, self_check
    from equipoise.routes.registry import resolve_model

    shape = resolve_model(model)
    findings = [*self_check(plant_markers(_MARKED_LENGTHS, model=shape))]
    markers = plant_markers(_SCHEDULED_LENGTHS, model=shape)
    whole = schedule_samples(
        np.array(_SCHEDULED_LENGTHS),
        ranks=1,
        samples_per_micro_step=len(_SCHEDULED_LENGTHS),
        policy=TokenPolicy(last_token="unknown"),
    )
    for cp, sp in _SCHEDULED_WIDTHS:
        findings.append(check_schedule(slice_sequence(slice_context(whole, cp), sp), markers, cp=cp, sp=sp))
    return Diagnosis(findings=tuple(findings), num_samples=len(_MARKED_LENGTHS), num_rows=sum(_MARKED_LENGTHS))


def _show_progress(recordings: "Iterable[Recording]") -> "Iterator[Recording]":
    with progress("checking") as show:
        for done, recording in enumerate(recordings, start=1):
            yield recording
            show(done, 0)
