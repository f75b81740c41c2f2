"""A hardware profile under which moving the experts of a small stack pays, so that the gate opens by itself.

The H200's figures, scaled: experts compute 1,000 times as long, and already for 64 times fewer rows; calls have a
hundredth of their fixed cost; the network has a two-hundredth of its rate, so that rows that cross nodes matter, too.
"""

import json
from importlib import resources
from pathlib import Path

from equipoise.cost.profile import write_profile


def write_slow_profile(folder: Path) -> str:
    """Write the profile into `folder` and return its path."""
    data = json.loads((resources.files("equipoise.cost") / "profiles" / "h200.json").read_text())
    data |= {"kind": "derived", "device": "NVIDIA H200, slowed down"}
    for table in data["compute"]:
        table["rows"] = [rows // 64 for rows in table["rows"]]
        for name in ("forward_ns", "update_ns"):
            table[name] = [[None if cell is None else 1000 * cell for cell in line] for line in table[name]]
    for section, names in {"pull": ("host_fixed_ns", "peer_fixed_ns"), "all_to_all": ("fixed_ns",)}.items():
        data[section] |= {name: data[section][name] // 100 for name in names}
    data["all_to_all"]["across_share"] = 0.004
    path = folder / "slow.json"
    write_profile(data, path)
    return str(path)
