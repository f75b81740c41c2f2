"""The doctor: proves that recorded routes are right, or says what is wrong, where, and what to do.

    diagnosis.py   diagnose: every check over a dump, one sample at a time
    finding.py     Finding, and Check, the face of a check
    reading.py     Reading: a recording with what every check needs
    checks.py      rows, layers, padding
    turns.py       what spans the turns of a sample: missing rows, contradictions, weight versions
    ids.py         the ids: distinct, in range, not wrapped, not physical
    stale.py       rows of another sample
    agreement.py   two recordings of the same tokens
    markers.py     planted markers: known rows that prove a trainer's slicing
    slicing.py     our own slicing, proven with them

To add a check: write a `Check` beside its kin, add it to `CHECKS` in `diagnosis.py`, a row to `docs/doctor.md`, and a
case to the tests that breaks exactly that thing in good data of every form.
"""

from equipoise.routes.doctor.diagnosis import Diagnosis, diagnose
from equipoise.routes.doctor.markers import Delivery, Markers, plant, prove_slicing
from equipoise.routes.doctor.reading import Finding, Verdict

__all__ = ["diagnose", "Diagnosis", "Finding", "Verdict", "plant", "prove_slicing", "Markers", "Delivery"]
