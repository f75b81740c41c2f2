"""What a page can be made of, and how it is recognised: a result object, its JSON document, a file, a run's folder.

    an object with `to_dict()`          Analysis, Simulation, a comparison of training modes
    a document, or a file with one      by its field `format`
    a folder                            of a training run, by its metrics.jsonl, or of a comparison.json

A result that cannot be understood is refused before anything is written; an assertion of ours that fails is a defect of
ours, and is not blamed on the result.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from equipoise.core import EquipoiseError
from equipoise.core.value import plural
from equipoise.report import analysis, comparison, replay, run, simulation
from equipoise.report.page import Chart, Listing, Missing, Page, Table, percent
from equipoise.report.replay import NOT_MEASURED, validation_chart
from equipoise.sim.result import FORMAT as SIMULATION_FORMAT

Document = dict[str, Any]
NO_VERDICT = Missing(
    title="The doctor's verdict",
    text="Whether the routes are right was not given:",
    command="equipoise doctor ROUTES --json > doctor.json; equipoise report RESULT --doctor doctor.json",
)


class HasDocument(Protocol):
    """A result that can say itself as a JSON document."""

    def to_dict(self) -> Document:
        """Return the document."""


Result = HasDocument | Document | Path | str
MAKERS: dict[str, Callable[..., Page]] = {
    analysis.FORMAT: analysis.analysis_page,
    SIMULATION_FORMAT: simulation.simulation_page,
    run.FORMAT: run.run_page,
    comparison.FORMAT: comparison.comparison_page,
    comparison.DEMO_FORMAT: comparison.demo_page,
    replay.FORMAT: replay.replay_page,
}
"""Who makes the page of a document, by its format or the benchmark that wrote it."""


def build_page(
    result: Result,
    *,
    title: str | None = None,
    doctor: Path | Document | None = None,
    measured: Path | Document | None = None,
) -> Page:
    """Make the page of a result; arguments as in `equipoise.report.write_report`."""
    document, name = read_document(result)
    # Results of benchmarks say which benchmark made them.
    form = document.get("format", document.get("benchmark"))
    maker = MAKERS.get(str(form))
    if maker is None:
        raise EquipoiseError(f"{name} has format {form!r}; a page can be made of {', '.join(MAKERS)}")
    try:
        page = maker(document, title=title or name)
    except KeyError as error:
        raise EquipoiseError(
            f"{name} says it is {form} but has no field {error}; write it again with this version"
        ) from error
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise EquipoiseError(
            f"{name} says it is {form} but a field of it is not what it should be ({error}); write it again with this "
            "version"
        ) from error
    # What was given beside the result, or the command that makes it.
    missing, given = list(page.missing), list[Chart | Listing]()
    if measured is None:
        missing.append(NOT_MEASURED)
    else:
        given.append(validation_chart(*read_document(measured)))
    if doctor is None:
        missing.append(NO_VERDICT)
    else:
        given.append(doctor_listing(*read_document(doctor)))
    # What was asked for is not folded.
    first, rest = page.open_and_folded
    sections = (*first, *given, *rest)
    return replace(page, sections=sections, missing=tuple(missing), num_open=page.num_open + len(given))


def doctor_listing(diagnosis: Document, name: str = "the diagnosis") -> Listing:
    """List the outcome of every check, from what `equipoise doctor DUMP --json` printed (`Diagnosis.as_json()`)."""
    if not {"ok", "findings", "num_samples"} <= set(diagnosis):
        raise EquipoiseError(f"{name} is no diagnosis; give what `equipoise doctor DUMP --json` printed")
    findings = diagnosis["findings"]
    fired = [f["check"] for f in findings if f["verdict"] == "finding"]
    verdict = "No check found anything" if not fired else f"{len(fired)} of {len(findings)} checks found something"
    seen = f"in {plural(diagnosis['num_samples'], 'sample')}, {plural(diagnosis['num_rows'], 'row')}"
    rows = []
    for f in findings:
        share = f"{percent(f['share'])} of {f['unit']}" if f["total"] else ""
        rows.append((f["check"], f["verdict"], share, f["first_place"], f["advice"] or f["detail"]))
    return Listing(
        name="doctor",
        title="The doctor's verdict on the routes",
        caption=f"{verdict} {seen}{': ' + ', '.join(fired) if fired else ''}.",
        data=Table(columns=("check", "verdict", "share", "first place", "what to do"), rows=tuple(rows)),
        terms=("row", "coverage"),
    )


def read_document(result: Result) -> tuple[Document, str]:
    """Return the JSON document of a result and what to call it."""
    if isinstance(result, dict):
        return result, "this result"
    if isinstance(result, str | Path):
        path = Path(result)
        compared = path / "comparison.json"
        if compared.is_file() and not (path / "metrics.jsonl").exists():
            return _read_file(compared), path.resolve().name
        return run.read_run(path) if path.is_dir() else _read_file(path), path.resolve().name
    if not callable(getattr(result, "to_dict", None)):
        raise EquipoiseError(
            f"a page cannot be made of {result!r:.80}; give an Analysis or a Simulation, its JSON document, the path "
            "of a file with one, or a training run's folder"
        )
    return result.to_dict(), "this result"


def _read_file(path: Path) -> Document:
    def refuse_constant(name: str) -> Any:
        # NaN and infinity, which Python's reader takes and no page can hold.
        raise ValueError(f"it holds {name}, which is no JSON number")

    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise EquipoiseError(f"{path} is not JSON ({error}); give what `-o result.json` of a verb wrote") from error
    if not isinstance(document, dict):
        raise EquipoiseError(f"{path} holds a JSON {type(document).__name__}, not a result")
    return document
