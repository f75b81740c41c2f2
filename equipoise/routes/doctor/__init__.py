"""The doctor: proves that recorded routes are right, or says what is wrong, where, and what to do.

    diagnosis.py   diagnose: every check over a dump, one sample at a time
    reading.py     Reading: a recording prepared for the checks; Check and Finding
    checks.py      rows, layers, padding, ids, turns, weight versions
    stale.py       rows of another sample
    prompt.py      prompt rows of a server that never forwarded the prompt
    agreement.py   two recordings of the same tokens
    markers.py     planted markers that prove a trainer's slicing, and our own

To add a check: write a `Check`, add it to `CHECKS` in `diagnosis.py`, a row to `docs/doctor.md`, and a case to the
tests that breaks exactly that thing in good data of every format.
"""

from equipoise.routes.doctor.diagnosis import Diagnosis, diagnose
from equipoise.routes.doctor.markers import Delivery, Markers, plant_markers, prove_slicing
from equipoise.routes.doctor.reading import Finding, Verdict

__all__ = ["diagnose", "Diagnosis", "Finding", "Verdict", "plant_markers", "prove_slicing", "Markers", "Delivery"]
