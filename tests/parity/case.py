"""`ParityCase`: the sizes of a parity run, and the tokens and routes of its windows, the same on every rank.

Knows shapes and a seed. Does not know torch.

Routes are skewed and differ by window, so that plans differ too: experts have Dirichlet popularity, and the popular
ones sit side by side, as the worst case for contiguous expert parallelism.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from equipoise.core import Cluster, ModelShape, Stage

VARIETY = 3
"""Windows of different loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """What is trained, and how long."""

    ranks: int = 4
    slots: int = 1
    steps: int = 9
    """Windows, each ended by an optimizer step; `VARIETY` different ones take turns."""
    nodes: int = 1
    """Declared nodes; replicas stay inside each."""
    home_slots: int = 4
    """Experts each rank owns."""
    layers: int = 3
    micro_steps: int = 2
    tokens: int = 32
    """Most tokens of a rank in a micro-step."""
    top_k: int = 2
    hidden: int = 32
    width: int = 24
    profile: str = ""
    """File of a hardware profile. With one, windows are planned by seconds, and each update follows a recompute window
    whose replicas may cross nodes; without one, rows are levelled whatever that costs, in updates alone."""
    dispatch: Literal["direct", "two_level"] = "direct"
    """How tokens get to their experts, see `runtime.experts.LayerOptions`."""
    gates: Literal["combine", "activation"] = "combine"
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the stack trains: on the CPU in fp32, or on one CUDA device that all ranks share, in bf16."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """What moves CUDA tensors; by NCCL each rank of the one device is another host."""
    seed: int = 0

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self.ranks * self.home_slots

    @property
    def cluster(self) -> Cluster:
        """The declared cluster; its figures matter only with a profile."""
        layout = {"nodes": self.nodes, "ranks_per_node": -(-self.ranks // self.nodes), "ep": self.ranks}
        return Cluster.preset("h200", profile=self.profile, **layout)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Windows of one step."""
        return ("recompute", "update") if self.profile else ("update",)

    @property
    def model(self) -> ModelShape:
        """The shape of the stack."""
        return ModelShape.preset(
            "qwen3-30b-a3b",
            experts=self.experts,
            layers=self.layers,
            top_k=self.top_k,
            hidden=self.hidden,
            expert_width=self.width,
        )

    def routes(self, window: int, rank: int) -> list[list[np.ndarray]]:
        """[m][l] the [T, K] ids of a rank's tokens; T differs by rank and micro-step."""
        shared = np.random.default_rng([self.seed, window])
        share_LE = shared.dirichlet(np.full(self.experts, 0.5), size=self.layers) + 1e-3
        share_LE = -np.sort(-share_LE, axis=1)
        own = np.random.default_rng([self.seed, window, rank])
        routes = []
        for _ in range(self.micro_steps):
            tokens = int(own.integers(self.tokens // 2, self.tokens + 1))
            routes.append([self._draw(own, share_E / share_E.sum(), tokens) for share_E in share_LE])
        return routes

    def _draw(self, rng: np.random.Generator, share_E: np.ndarray, tokens: int) -> np.ndarray:
        rows = [rng.choice(self.experts, self.top_k, replace=False, p=share_E) for _ in range(tokens)]
        return np.array(rows, dtype=np.int64).reshape(tokens, self.top_k)


def all_sizes(case: ParityCase, *, most: int = 8) -> list[ParityCase]:
    """The same case on 1, 2, 4 and 8 ranks, up to `most`, from 4 on also as two nodes, with 0, 1 and 2 slots."""
    places = [(1, 1), (2, 1), (4, 1), (4, 2), (8, 1), (8, 2)]
    cases = [replace(case, ranks=ranks, nodes=nodes, slots=slots) for ranks, nodes in places for slots in (0, 1, 2)]
    return [one for one in cases if one.ranks <= most]
