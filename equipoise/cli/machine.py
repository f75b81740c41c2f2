"""What a step runs on, as options that verbs share: a device preset, its prices, its nodes and links.

Knows presets and profiles. Does not know loads.

Invariants (asserted by the tests):
1. What is given stands in the cluster; what is left out is the preset's.
2. A profile names its device: without --cluster its preset is taken, and another one's is refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

if TYPE_CHECKING:
    from equipoise.core import Cluster

DEFAULT = "h100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device, its nodes and its links."""

    SECTION: ClassVar[str] = "The machine"
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", help=f"Device preset: h100, h200, a100 or b200; {DEFAULT}, or the profile's, if left out."
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Prices of your own GPU: the file that `equipoise calibrate -o` wrote."),
    ] = None
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of a node: GPUs that NVLink joins.")] = 8
    network_gbit: Annotated[
        float | None, typer.Option(help="Network of one GPU, one direction, in Gb/s; the preset's if left out.")
    ] = None
    nvlink_gbyte: Annotated[
        float | None, typer.Option(help="NVLink of one GPU, one direction, in GB/s; the preset's if left out.")
    ] = None

    def describe(self, *, ep: int, nodes: int | None = None) -> "Cluster":
        """Build the cluster of an EP group, or raise with what is wrong about the options."""
        from equipoise.core import Cluster, TopologyError
        from equipoise.core.value import require_int

        require_int("--ranks-per-node", self.ranks_per_node, low=1, error=TopologyError)
        figures: dict[str, Any] = {}
        for option, figure, unit in (
            ("network_gbit", "network_bytes_per_s", 10**9 / 8),
            ("nvlink_gbyte", "nvlink_bytes_per_s", 10**9),
        ):
            rate = getattr(self, option)
            if rate is not None:
                figures[figure] = _whole_rate(f"--{option.replace('_', '-')}", rate, unit)
        name = self.cluster or DEFAULT
        if self.profile is not None:
            name = _preset_of(self.profile, self.cluster)
            figures["profile"] = str(self.profile.resolve())
        return Cluster.preset(name, nodes=nodes, ranks_per_node=self.ranks_per_node, ep=ep, **figures)


def _whole_rate(option: str, rate: float, unit: float) -> int:
    """Bytes per second of a rate on the command line."""
    from equipoise.core import TopologyError

    if not 0.001 <= rate <= 10**6:
        raise TopologyError(f"{option} is {rate:g}; it must be from 0.001 to 1000000")
    return round(rate * unit)


def _preset_of(profile: Path, named: str | None) -> str:
    """The preset with the links of a profile's device: the one that is named, or that is named like the device."""
    from equipoise.core import TopologyError
    from equipoise.core.cluster import preset_names, presets_like
    from equipoise.cost import Profile

    device = Profile.read(profile).device
    fitting = presets_like(device)
    if named is None and not fitting:
        raise TopologyError(
            f"profile {profile} is of {device!r}, and no preset is named like it; name the one whose links and memory "
            f"it has: --cluster {', '.join(preset_names())}"
        )
    if named is not None and fitting and named.lower() not in fitting:
        raise TopologyError(
            f"profile {profile} is of {device!r}, --cluster is {named!r}; give {fitting[-1]!r}, or leave --cluster out"
        )
    return named or fitting[-1]
