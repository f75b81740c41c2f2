"""Seconds: the only room that turns rows and bytes into time.

    profile.py   hardware profiles: JSON files with a source for each figure
    model.py     CostModel: compute, all-to-all, transfers, window edges, in whole nanoseconds
    links.py     rows on links, and which link is busiest, compiled; the split itself is `core.split`
    kernels.py   the price of one (micro-step, layer), compiled, for the planner's inner loops
    window.py    prices of whole windows by the same kernels: entries, ranks, visits, edges
    waves.py     prices of layers whose exchanges run beside the experts
    work.py      what every rank does in a window under one decision
    clock.py     a window run visit by visit: the one predictor of its seconds
    profiles/    h200 (measured by equipoise calibrate), h100, a100 and b200 (derived by benchmarks/derive_profile.py)

To add a device: measure it with `equipoise calibrate -o <name>.json`, put the file into `profiles/`, and
add its link figures to `core/presets/clusters`.
"""

from equipoise.cost.model import CostModel
from equipoise.cost.profile import Profile, profile_names

__all__ = ["CostModel", "Profile", "profile_names"]
