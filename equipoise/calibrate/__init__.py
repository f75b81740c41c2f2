"""Measuring a device: from the GPU at hand to a hardware profile, and back again to check one. Needs torch.

    run.py        calibrate: everything that is measured, in order; a profile compared with the device again;
                  calibrate_ranks: the same on ranks that work side by side, and what needs several of them
    bench.py      how anything is timed, and the sizes that are measured
    between.py    measurements between ranks: rows by mapped memory, and the steps that order them
    moving.py     experts that move between ranks, and what planning costs
    measures.py   expert tables, rows moved inside a device, attention, pulls, gradient adds, window edges

What a profile is and how it is used is defined in `cost`; the measured code is that of `layer`.
"""

from equipoise.calibrate.bench import Grid
from equipoise.calibrate.run import calibrate, calibrate_ranks

__all__ = ["Grid", "calibrate", "calibrate_ranks"]
