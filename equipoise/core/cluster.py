"""A described cluster: nodes, ranks, the expert-parallel group, and the figures of its device and links.

Published hardware figures are data files in `presets/clusters`, each figure with its source.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from equipoise.core.errors import TopologyError
from equipoise.core.model import ModelShape
from equipoise.core.value import Value, require_int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster(Value):
    """One EP group's view of the machines it runs on. Bandwidths are per rank and direction."""

    name: str
    nodes: int
    """Fast-interconnect (NVLink) domains of the whole cluster."""
    ranks_per_node: int
    ep: int
    """Ranks of one expert-parallel group, the R axis of every array."""
    node_R: tuple[int, ...]
    """Node of each EP rank. Example: (0, 0, 1, 1); strided layouts such as (0, 1, 0, 1) are allowed."""
    memory_bytes: int
    """Device memory of one rank."""
    flops: int
    """Dense bf16 floating-point operations per second of one rank, published peak."""
    memory_bytes_per_s: int
    nvlink_bytes_per_s: int
    network_bytes_per_s: int
    host_bytes_per_s: int
    """Pinned host memory to device."""
    device: str = ""
    profile: str = ""
    """Measured prices: the name of a profile of the package, or the file that `equipoise calibrate` wrote. The profile
    with the name of the cluster if left out."""
    sources: tuple[tuple[str, str], ...] = ()
    """(figure, its source)."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "ep", *_FIGURES):
            value = require_int(f"cluster {self.name!r}: {name}", getattr(self, name), low=1, error=TopologyError)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "profile", self.profile or self.name)
        label = f"cluster {self.name!r}: an entry of node_R"
        node_R = tuple(require_int(label, n, low=0, error=TopologyError) for n in self.node_R)
        object.__setattr__(self, "node_R", node_R)
        if len(node_R) != self.ep:
            raise TopologyError(
                f"cluster {self.name!r}: node_R names {len(node_R)} ranks, the EP group has {self.ep}; "
                "give one node per rank"
            )
        if set(node_R) != set(range(len(set(node_R)))):
            raise TopologyError(
                f"cluster {self.name!r}: node_R must number its nodes 0, 1, 2, ... without gaps, got {node_R}"
            )
        if max(node_R) >= self.nodes:
            raise TopologyError(f"cluster {self.name!r}: node_R names node {max(node_R)}; there are {self.nodes} nodes")

    @property
    def num_ep_nodes(self) -> int:
        """Nodes that the EP group touches, the N axis."""
        return max(self.node_R) + 1

    @property
    def node_array_R(self) -> np.ndarray:
        """`node_R` as an int64 array."""
        return np.array(self.node_R, dtype=np.int64)

    @property
    def ranks_N(self) -> np.ndarray:
        """EP ranks in each node."""
        return np.bincount(self.node_array_R, minlength=self.num_ep_nodes).astype(np.int64)

    def home_slots(self, model: ModelShape) -> int:
        """Return the experts each rank owns, or raise if the experts of `model` do not divide."""
        if model.experts % self.ep:
            lower = [n for n in range(1, self.ep + 1) if model.experts % n == 0]
            raise TopologyError(
                f"{model.experts} experts of {model.name!r} do not divide by {self.ep} ranks; "
                f"use an EP size that divides them, for example {lower[-1]}"
            )
        return model.experts // self.ep

    @classmethod
    def preset(
        cls,
        name: str,
        /,
        *,
        nodes: int | None = None,
        ranks_per_node: int | None = None,
        ep: int | None = None,
        node_R: Sequence[int] | None = None,
        **figures: Any,
    ) -> "Cluster":
        """Build a cluster of a published device.

        Args:
            name: "h100", "h200", "a100" or "b200"
            nodes: machines; 1 unless `node_R` or `ep` says more
            ranks_per_node: 8 by default
            ep: size of the EP group; all ranks by default
            node_R: node of each EP rank, if ranks are not laid out node by node
            figures: any device or link figure to override, and `profile`, a file that `equipoise calibrate` wrote
        """
        known = preset_names()
        if name.lower() not in known:
            raise TopologyError(f"no cluster preset {name!r}; known: {', '.join(known)}")
        path = resources.files("equipoise.core") / "presets" / "clusters" / f"{name.lower()}.json"
        data = json.loads(path.read_text())
        unknown = sorted(set(figures) - set(_FIGURES) - {"device", "profile"})
        if unknown:
            raise TopologyError(f"cluster has no figure {unknown[0]!r}; known: {', '.join(_FIGURES)}")
        per_node, count = _layout(nodes, ranks_per_node, ep, node_R)
        size = ep if ep is not None else (len(node_R) if node_R is not None else count * per_node)
        size = require_int("ep", size, low=1, high=MOST_RANKS, error=TopologyError)
        if node_R is None and size > count * per_node:
            raise TopologyError(
                f"ep is {size}, more than the {count * per_node} ranks of {count} node{'s' if count > 1 else ''}; "
                f"give {-(-size // per_node)} nodes, or leave nodes out"
            )
        return cls(
            name=name.lower(),
            nodes=count,
            ranks_per_node=per_node,
            ep=size,
            node_R=tuple(node_R) if node_R is not None else tuple(r // per_node for r in range(size)),
            sources=tuple(sorted(data["sources"].items())),
            **{"device": data["device"], **data["figures"], **figures},
        )

    def with_ep(self, ep: int) -> "Cluster":
        """Return the same hardware with an EP group of `ep` ranks laid out node by node, nodes added as needed."""
        size = require_int("ep", ep, low=1, high=MOST_RANKS, error=TopologyError)
        nodes = max(self.nodes, -(-size // self.ranks_per_node))
        return replace(self, ep=size, nodes=nodes, node_R=tuple(r // self.ranks_per_node for r in range(size)))


MOST_RANKS = 2**16
"""Most ranks of an EP group; a layout lists them one by one, and no model has as many experts."""
_FIGURES = (
    "memory_bytes",
    "flops",
    "memory_bytes_per_s",
    "nvlink_bytes_per_s",
    "network_bytes_per_s",
    "host_bytes_per_s",
)


def preset_names() -> list[str]:
    """Return the names of all cluster presets, sorted."""
    folder = resources.files("equipoise.core") / "presets" / "clusters"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def presets_like(device: str) -> list[str]:
    """Return the presets whose name is part of a device's, as "h200" of "NVIDIA H200"."""
    return [name for name in preset_names() if name.upper() in device.upper()]


def _layout(
    nodes: int | None, ranks_per_node: int | None, ep: int | None, node_R: Sequence[int] | None
) -> tuple[int, int]:
    """Return ranks per node and number of nodes, from those of the four that were given."""
    if node_R is not None:
        if not len(node_R):
            raise TopologyError("node_R is empty; give the node of each EP rank")
        found = [require_int("an entry of node_R", n, low=0, error=TopologyError) for n in node_R]
        per_node = max(map(found.count, set(found))) if ranks_per_node is None else ranks_per_node
        return per_node, max(found) + 1 if nodes is None else nodes
    per_node = require_int(
        "ranks_per_node", 8 if ranks_per_node is None else ranks_per_node, low=1, error=TopologyError
    )
    if ep is not None:
        require_int("ep", ep, low=1, error=TopologyError)
    if nodes is None:
        nodes = 1 if ep is None else -(-ep // per_node)
    return per_node, require_int("nodes", nodes, low=1, error=TopologyError)
