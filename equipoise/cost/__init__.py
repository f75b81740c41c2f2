"""Seconds: the only room that turns rows and bytes into time.

    profile.py   hardware profiles: JSON files with a source for each figure
    model.py     CostModel: compute, all-to-all, transfers, window edges, in whole nanoseconds
    kernels.py   the same arithmetic, compiled, for the planner's inner loops; links.py counts the rows that it prices,
                 exchange.py finds the links that all wait for
    edges.py     publish and collect: what of them nothing hides
    ranks.py     what every rank of an entry does, by the same kernels; between.py, the rows from rank to rank
    reference.py what the kernels compute, in plain words
    profiles/    h200 (measured by equipoise calibrate), h100, a100 and b200 (derived by benchmarks/derive_profile.py)

To add a device: measure it with `equipoise calibrate -o <name>.json`, put the file into `profiles/`, and
add its link figures to `core/presets/clusters`.
"""

from equipoise.cost.model import CostModel
from equipoise.cost.profile import Profile, profile_names

__all__ = ["CostModel", "Profile", "profile_names"]
