"""The doctor's verdict on a page: what `equipoise doctor DUMP --json` printed, as a table.

Reads the document of `Diagnosis.as_json()`: ok, num_samples, num_rows, findings (check, verdict, share, unit, ...).
"""

from typing import Any

from equipoise.core import EquipoiseError
from equipoise.report.page import Listing, Missing, Table
from equipoise.report.words import percent, plural

NO_VERDICT = Missing(
    title="The doctor's verdict",
    words="Whether the routes are right was not handed in:",
    command="equipoise doctor ROUTES --json > doctor.json; equipoise report RESULT --doctor doctor.json",
)


def doctor_listing(diagnosis: dict[str, Any], *, name: str = "the diagnosis") -> Listing:
    """A table of every check's outcome."""
    if not {"ok", "findings", "num_samples"} <= set(diagnosis):
        raise EquipoiseError(f"{name} is no diagnosis; give what `equipoise doctor DUMP --json` printed")
    findings = diagnosis["findings"]
    fired = [f["check"] for f in findings if f["verdict"] == "finding"]
    verdict = "No check found anything" if not fired else f"{len(fired)} of {len(findings)} checks found something"
    seen = f"in {plural(diagnosis['num_samples'], 'sample')}, {plural(diagnosis['num_rows'], 'row')}"
    rows = [(f["check"], f["verdict"], _share(f), f["first_place"], f["advice"] or f["detail"]) for f in findings]
    return Listing(
        name="doctor",
        title="The doctor's verdict on the routes",
        caption=f"{verdict} {seen}{': ' + ', '.join(fired) if fired else ''}.",
        data=Table(columns=("check", "verdict", "share", "first place", "what to do"), rows=tuple(rows)),
        terms=("row", "coverage"),
    )


def _share(finding: dict[str, Any]) -> str:
    return f"{percent(finding['share'])} of {finding['unit']}" if finding["total"] else ""
