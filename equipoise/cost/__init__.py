"""Seconds: the only room that turns rows and bytes into time.

    profile.py   hardware profiles: JSON files with a source for each figure
    model.py     CostModel: compute, all-to-all, transfers, window edges, in whole nanoseconds
    kernels.py   the same arithmetic, compiled, for the planner's inner loops
    profiles/    h200 (measured), h100 and a100 (derived), made by benchmarks/profile_gpu.py

To add a device: measure it with `python benchmarks/profile_gpu.py -o profiles/<name>.json` and add its link figures to
`core/presets/clusters`.
"""

from equipoise.cost.model import CostModel
from equipoise.cost.profile import Profile, profile_names

__all__ = ["CostModel", "Profile", "profile_names"]
