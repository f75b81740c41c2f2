"""Measuring a device: from the GPU at hand to a hardware profile, and back again to check one.

    run.py        calibrate: what is measured, in order, and by whom
    grid.py       the sizes visited, and how rows are cut into uneven groups
    bench.py      how anything is timed
    experts.py    the expert tables; moves.py rows on the move; attention.py attention
    copies.py     pulls by path, pulls beside compute, gradient adds, window edges
    check.py      a profile against the device again
    progress.py   how far it is

Needs torch. What a profile is and how it is used is `cost`'s business; the measured code is `runtime`'s own.
"""

from equipoise.calibrate.bench import Grid
from equipoise.calibrate.run import calibrate

__all__ = ["Grid", "calibrate"]
