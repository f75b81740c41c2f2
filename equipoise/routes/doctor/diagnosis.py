"""`diagnose`: run every check over a dump's recordings, one sample at a time, and say what is wrong and what to do.

1. Take one sample's recordings (its turns) from the stream; a reader's error becomes the finding `decode`.
2. Prepare each once (`reading.py`) and pass it to every check (`checks.py`, `stale.py`, `prompt.py`).
3. Given a second recording of the same tokens, compare sample by sample (`agreement.py`).
4. Collect the findings. `docs/doctor.md` explains each check.

Bad data never raises, and nothing is kept of a sample but counts and digests.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from equipoise.core import ModelShape, Routes, RoutesError
from equipoise.core.value import require_kind
from equipoise.routes.doctor.agreement import MIN_AGREEMENT, Agreement
from equipoise.routes.doctor.checks import (
    DenseLayers,
    DistinctIds,
    EqualRows,
    IdCauses,
    LayerAxis,
    MissingRows,
    Padding,
    RowsTokens,
    TopK,
    TurnConflicts,
    Versions,
    ZeroLayers,
)
from equipoise.routes.doctor.prompt import PromptRows
from equipoise.routes.doctor.reading import Check, CheckCounts, Finding, judge, read_samples
from equipoise.routes.doctor.stale import StaleRows
from equipoise.routes.interpret import Recording

CHECKS: tuple[type[Check], ...] = (
    RowsTokens,
    LayerAxis,
    TopK,
    ZeroLayers,
    DenseLayers,
    MissingRows,
    TurnConflicts,
    EqualRows,
    DistinctIds,
    IdCauses,
    StaleRows,
    PromptRows,
    Padding,
    Versions,
)
"""In the order in which to look for a cause: shape, layers, rows, ids, samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Every check's outcome for one dump."""

    findings: tuple[Finding, ...]
    num_samples: int = 0
    num_rows: int = 0

    @property
    def ok(self) -> bool:
        """Whether no check found anything."""
        return not self.fired

    @property
    def fired(self) -> tuple[str, ...]:
        """Names of the checks that found something."""
        return tuple(f.check for f in self.findings if f.verdict == "finding")

    def __getitem__(self, check: str) -> Finding:
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise KeyError(f"no check {check!r}; known: {', '.join(f.check for f in self.findings)}")

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON values."""
        rows = [{**asdict(f), "share": f.share, "rate_L": list(f.rate_L)} for f in self.findings]
        return {"ok": self.ok, "num_samples": self.num_samples, "num_rows": self.num_rows, "findings": rows}


def diagnose(
    recordings: Iterable[Recording],
    *,
    model: ModelShape,
    second: Iterable[Recording] | None = None,
    min_agreement: float = MIN_AGREEMENT,
) -> Diagnosis:
    """Run every check over the recordings of one dump.

    Args:
        recordings: as a format's reader yields them, turns of a sample next to each other
        model: whose routes they should be
        second: another recording of the same tokens, in the same order, to compare with
        min_agreement: share of equal routes under which a layer is a finding
    """
    require_kind("model", model, ModelShape, error=RoutesError)
    _check_stream("recordings", recordings)
    if second is not None:
        _check_stream("second", second)
    decode, checks, agreement = _Decode(), [check(model) for check in CHECKS], Agreement(min_agreement)
    partners = None if second is None else read_samples(decode.guard(second, of="the second recording"), model=model)
    num_samples = num_rows = 0
    for turns in read_samples(decode.guard(recordings), model=model):
        num_samples += 1
        num_rows += sum(turn.num_rows for turn in turns)
        for turn in turns:
            for check in checks:
                check.look(turn)
        if partners is not None:
            agreement.compare(turns, next(partners, None))
    for extra in partners or ():
        agreement.add_unpaired(extra)
    findings = [decode.finding(), *(f for check in checks for f in check.findings()), *agreement.findings()]
    return Diagnosis(findings=tuple(findings), num_samples=num_samples, num_rows=num_rows)


def _check_stream(name: str, value: object) -> None:
    """Raise for a dump or its routes: mapped routes hide what is wrong with a recording."""
    if not isinstance(value, Iterable) or isinstance(value, str | Routes):
        raise RoutesError(
            f"{name} is a {type(value).__name__}; it must be what equipoise.routes.stream_recordings(dump, model=) "
            "yields"
        )


class _Decode:
    """Turns a reader's error into a finding."""

    def __init__(self) -> None:
        self.counts = CheckCounts()

    def guard(self, recordings: Iterable[Recording], *, of: str = "") -> Iterator[Recording]:
        """Yield recordings until the reader raises, and keep its message."""
        try:
            for recording in recordings:
                self.counts.total += 1
                yield recording
        except RoutesError as error:
            self.counts.add(1, 1, partial(str, f"{of}: {error}" if of else error))

    def finding(self) -> Finding:
        """Report the decoding; a dump without a recording is a finding too."""
        if not self.counts.total:
            self.counts.add(1, 1, lambda: "the dump holds no recording")
        advice = "the dump cannot be read past this place; write it again, or name its format with --format"
        return judge("decode", self.counts, unit="recordings", advice=advice)
