"""Derive the hardware profile of one device from the measured profile of another, by published figures.

    python -m benchmarks.derive_profile h100 -o equipoise/cost/profiles/h100.json
    python -m benchmarks.derive_profile a100 -o equipoise/cost/profiles/a100.json
    python -m benchmarks.derive_profile b200 -o equipoise/cost/profiles/b200.json

Knows the file and the roofline; measures nothing. Published figures come from
`equipoise/core/presets/clusters`; what the file holds, from `equipoise/cost/profile.py`.

Invariants (asserted by the tests):
1. A derived cell is the measured one times the ratio of the two devices' floors (operations or bytes, the larger).
2. Devices with the same figures have the same tables.
3. A link that takes more of a device's memory bandwidth slows more.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from equipoise.cost.profile import write_profile

ROOT = Path(__file__).resolve().parents[1]
PROFILES = ROOT / "equipoise" / "cost" / "profiles"
BF16_BYTES = 2


def published_figures(name: str) -> dict[str, int]:
    """Read the device and link figures of a cluster preset."""
    return dict(_read_preset(name)["figures"])


def _read_preset(name: str) -> Any:
    return json.loads((ROOT / "equipoise" / "core" / "presets" / "clusters" / f"{name}.json").read_text())


def floor_s(rows: int, slots: int, *, shape: tuple[int, int], figures: dict[str, int]) -> float:
    """Seconds that the forward of one cell takes at least, by operations or by bytes moved.

    Backward does each of both twice more, so the ratio of two devices' floors holds for the update too.
    """
    hidden, width = shape
    flops = 6 * hidden * width * rows
    # Weights once; per row the input, the inner pair written and read, their product likewise, the output.
    moved = BF16_BYTES * (3 * hidden * width * slots + rows * (2 * hidden + 6 * width))
    return max(flops / figures["flops"], moved / figures["memory_bytes_per_s"])


def derive(measured: dict[str, Any], *, base: str, target: str) -> dict[str, Any]:
    """Return the profile of preset `target` from one measured on preset `base`.

    Args:
        measured: content of a measured profile
        base: cluster preset of the device it was measured on
        target: cluster preset of the device to derive
    """
    if measured["kind"] != "measured":
        raise ValueError(f"the base profile is {measured['kind']!r}; derive from a measured one")
    old, new = published_figures(base), published_figures(target)
    said = f"derived from the profile measured on {measured['device']}"
    flops = new["flops"] / old["flops"]
    memory = new["memory_bytes_per_s"] / old["memory_bytes_per_s"]
    return {
        **measured,
        "device": _read_preset(target)["device"],
        "kind": "derived",
        "made_by": f"python -m benchmarks.derive_profile {target}",
        "compute": [_derive_compute(part, old=old, new=new, said=said) for part in measured["compute"]],
        "attention": {
            "forward_flops_per_s": round(measured["attention"]["forward_flops_per_s"] * flops),
            "backward_flops_per_s": round(measured["attention"]["backward_flops_per_s"] * flops),
            "source": f"{said}: times {flops:.4f}, the ratio of the published dense bf16 rates",
        },
        "pull": {
            **measured["pull"],
            "host_bytes_per_s": new["host_bytes_per_s"],
            "peer_bytes_per_s": new["nvlink_bytes_per_s"],
            "source": f"rates are the figures of the cluster preset {target}; fixed parts {said}, unchanged",
        },
        **{key: _derive_by_memory(measured[key], memory, said) for key in ("rows", "add", "exchange")},
        "beside": _derive_beside(measured, new, memory, said),
    }


def _derive_beside(measured: dict[str, Any], new: dict[str, int], memory: float, said: str) -> dict[str, Any]:
    """Scale slowdowns by the share of the device's memory bandwidth that each path takes."""
    links = {"host": new["host_bytes_per_s"], "peer": new["nvlink_bytes_per_s"]}
    ratios = {path: rate / measured["pull"][f"{path}_bytes_per_s"] / memory for path, rate in links.items()}
    slowdowns = {
        f"{path}_slowdown_permille": round(measured["beside"][f"{path}_slowdown_permille"] * ratio)
        for path, ratio in ratios.items()
    }
    said_ratios = ", ".join(f"{path} {ratio:.4f}" for path, ratio in ratios.items())
    return {
        **slowdowns,
        "source": f"{said}: times {said_ratios}, the ratio of link rate over published memory bandwidth",
    }


def _derive_by_memory(part: dict[str, Any], ratio: float, said: str) -> dict[str, Any]:
    """Scale every rate of a section that device memory bounds."""
    rates = {key: round(rate * ratio) for key, rate in part.items() if key != "source"}
    return {**rates, "source": f"{said}: times {ratio:.4f}, the ratio of the published memory bandwidths"}


def _derive_compute(part: dict[str, Any], *, old: dict[str, int], new: dict[str, int], said: str) -> dict[str, Any]:
    shape = (part["hidden"], part["expert_width"])

    def scaled(ns: int | None, rows: int, slots: int) -> int | None:
        floors = [floor_s(rows, slots, shape=shape, figures=figures) for figures in (new, old)]
        return None if ns is None else round(ns * floors[0] / floors[1])

    def scaled_table(table: list[list[int | None]]) -> list[list[int | None]]:
        return [
            [scaled(ns, rows, slots) for rows, ns in zip(part["rows"], line, strict=True)]
            for slots, line in zip(part["slots"], table, strict=True)
        ]

    return {
        **part,
        **{key: scaled_table(table) for key, table in part.items() if key.endswith("_ns")},
        "source": f"{said}: each cell times the ratio of the two devices' floors, the larger of operations over "
        f"{new['flops']} per s (there {old['flops']}) and bytes over {new['memory_bytes_per_s']} per s "
        f"(there {old['memory_bytes_per_s']}); cells bound by launches are overestimated; spread is the measured one",
    }


def main() -> None:
    """Derive, write the file, print it as the last line."""
    parser = argparse.ArgumentParser(description="Derive one device's profile from another's.")
    parser.add_argument("target", help="cluster preset of the device to derive, such as h100")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--base", default="h200", help="cluster preset and profile that was measured")
    given = parser.parse_args()
    measured = json.loads((PROFILES / f"{given.base}.json").read_text())
    profile = derive(measured, base=given.base, target=given.target)
    write_profile(profile, given.output)
    print(json.dumps(profile))


if __name__ == "__main__":
    main()
