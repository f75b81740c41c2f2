"""What a page can be made of, and how it is recognised: a result object, its JSON document, a file, a run's folder.

    an object with `to_dict()`          Analysis, Simulation
    a document, or a file that holds one  by its field `format`
    a folder                             of a training run, by its metrics.jsonl

Knows which maker makes which page. A result that cannot be understood is refused before anything is written.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from equipoise.core import EquipoiseError
from equipoise.report import analysis, simulation
from equipoise.report.doctor import NO_VERDICT, doctor_listing
from equipoise.report.page import Page

Document = dict[str, Any]


class HasDocument(Protocol):
    """A result that can say itself as a JSON document."""

    def to_dict(self) -> Document:
        """The document."""


Result = HasDocument | Document | Path | str
MAKERS: dict[str, Callable[..., Page]] = {
    analysis.FORMAT: analysis.analysis_page,
    simulation.FORMAT: simulation.simulation_page,
}
"""Who makes the page of a document, by its format."""


def build_page(result: Result, *, title: str | None = None, doctor: Path | Document | None = None) -> Page:
    """Make the page of a result.

    Args:
        result: a result, its document, or the path of a file or a run's folder
        title: what the page is called; the file's name by default
        doctor: what the doctor says of its routes: the JSON it printed, or the path of a file with it
    """
    document, name = read_document(result)
    maker = MAKERS.get(str(document.get("format")))
    if maker is None:
        known = ", ".join(MAKERS)
        raise EquipoiseError(f"{name} has format {document.get('format')!r}; a page can be made of {known}")
    try:
        page = maker(document, title=title or name)
    except KeyError as error:
        raise EquipoiseError(
            f"{name} says it is {document['format']} but has no field {error}; write it again with this version"
        ) from error
    if doctor is None:
        return replace(page, missing=(*page.missing, NO_VERDICT))
    diagnosis, where = read_document(doctor)
    return replace(page, sections=(*page.sections, doctor_listing(diagnosis, name=where)))


def read_document(result: Result) -> tuple[Document, str]:
    """Return the JSON document of a result and what to call it."""
    if isinstance(result, dict):
        return result, "this result"
    if isinstance(result, str | Path):
        path = Path(result)
        return _read_file(path), path.name
    return result.to_dict(), "this result"


def _read_file(path: Path) -> Document:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EquipoiseError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise EquipoiseError(f"{path} is not JSON ({error}); give what `-o result.json` of a verb wrote") from error
    if not isinstance(document, dict):
        raise EquipoiseError(f"{path} holds a JSON {type(document).__name__}, not a result")
    return document
