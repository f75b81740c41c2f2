"""`Plan`: where every expert computes during one window and what it costs, checked; `Itinerary`; `Explanation`.

One plan per window and EP group. It keeps one source of truth (homes, and the list of replicas with their rows) and
derives the rest: quotas, splits, rank loads. Entries are keyed by (micro-step, layer), never by call order.

A plan that breaks one of these cannot be constructed:
1. Every expert has one home slot per layer, and each rank has as many homes as it owns experts. (In a *persistent*
   plan, whose replicas stay for the whole window as EPLB's do, homes and replicas must fit in home + replica slots.)
2. A rank holds at most `slots` replicas in any (micro-step, layer), never of an expert whose home it is, never twice.
3. Replicas stay in the home's node unless `cross_node`.
4. Every replica takes at least one row, and the replicas of an expert take no more than its load; the home takes the
   rest, so quotas sum to the planned load (`loads`, with estimated rows where routes are unknown), in whole rows.
5. The itinerary, where there is one, visits every (micro-step, layer) once forward and, in an update, once backward.
6. No publish or collect takes negative time.
7. There are 1 to 8 waves.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Literal, NamedTuple, get_args

import numpy as np

from equipoise.core.cluster import Cluster
from equipoise.core.errors import InfeasiblePlanError
from equipoise.core.model import ModelShape
from equipoise.core.split import BLIND, Cuts, cut_rows, shares, split_rows
from equipoise.core.value import Value, frozen_array, int64_array, numbered, plural, require_int
from equipoise.core.window import LoadMatrix

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Path = Literal["peer", "host"]
PATHS: tuple[Path, ...] = get_args(Path)


MOST_WAVES = 8
"""Most waves of a layer."""


class Visit(NamedTuple):
    """One layer in one micro-step and phase. Under activation recomputation `backward` includes the second forward."""

    micro_step: int
    phase: Phase
    layer: int


class Pull(NamedTuple):
    """One expert to copy to a replica slot ahead of a visit."""

    expert: int
    source: int
    """Home rank of the expert."""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Itinerary(Value):
    """Visits of one window in execution order, with their buffers; one for all ranks of the EP group.

    Replica weights are in `depth + 1` buffers shared by all layers, assigned ahead like registers:
    1. Every (micro-step, layer) is visited exactly once per phase, backward never before forward.
    2. Between a pull into a buffer and the visit that uses it, no other visit uses that buffer.
    3. A pull may start only after the visit that last used its buffer, and at most `depth` visits ahead.
    4. A resident visit uses the buffer that its own forward visit filled, untouched in between.
    """

    depth: int
    """How many visits ahead pulls may start; there are depth + 1 buffers."""
    micro_step_V: np.ndarray
    phase_V: np.ndarray
    """[V] index into PHASES."""
    layer_V: np.ndarray
    pulls_V: np.ndarray
    """[V] bool, whether any rank needs replicas at this visit."""
    buffer_V: np.ndarray
    """[V] buffer of the visit; 0 and without meaning if `pulls_V` is False."""
    ready_from_V: np.ndarray
    """[V] first visit during which the pulls may run: the buffer is free and the visit at most `depth` ahead."""
    resident_V: np.ndarray
    """[V] bool, replicas are still in the buffer from the forward visit: nothing to pull."""

    def __post_init__(self) -> None:
        names = ("micro_step_V", "phase_V", "layer_V", "buffer_V", "ready_from_V")
        for name in names:
            object.__setattr__(self, name, int64_array(name, getattr(self, name), ndim=1, error=InfeasiblePlanError))
        for name in (*names, "pulls_V", "resident_V"):
            if getattr(self, name).shape != self.micro_step_V.shape:
                raise InfeasiblePlanError(f"itinerary: {name} has a different length than micro_step_V")
        depth = require_int("itinerary: depth", self.depth, low=1, error=InfeasiblePlanError)
        object.__setattr__(self, "depth", depth)
        if len(self) and int(self.buffer_V.max()) > self.depth:
            raise InfeasiblePlanError(f"itinerary: buffer {int(self.buffer_V.max())} of {self.depth + 1} buffers")
        for name in ("pulls_V", "resident_V"):
            if getattr(self, name).dtype != np.bool_:
                raise InfeasiblePlanError(f"itinerary: {name} must be bool, got dtype {getattr(self, name).dtype}")
            object.__setattr__(self, name, frozen_array(getattr(self, name)))
        if any(len(self) and int(getattr(self, name).min()) < 0 for name in names):
            raise InfeasiblePlanError("itinerary: micro-steps, phases, layers, buffers and visits count from 0")

    def __len__(self) -> int:
        return len(self.micro_step_V)

    def visits(self) -> list[Visit]:
        """Return all visits in execution order."""
        columns = (self.micro_step_V.tolist(), self.phase_V.tolist(), self.layer_V.tolist())
        return [Visit(micro_step, PHASES[phase], layer) for micro_step, phase, layer in zip(*columns, strict=True)]


Objective = Literal["seconds", "skew"]
Transport = Literal["auto", "nccl", "gloo"]
"""What moves experts between nodes: NCCL from device to device, or gloo through the CPU. `auto`: NCCL where the group
has several nodes and moves its CUDA tensors by NCCL itself; a plan that is made without a group assumes that."""
Sends = Literal["rows", "tokens"]
"""What crosses nodes in an all-to-all: every row (Megatron's alltoall dispatcher), or a token once per node, which then
forwards it internally (DeepEP)."""


class Replica(NamedTuple):
    """A copy of `expert` in a replica slot of `rank`."""

    expert: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Predicted seconds of one window, by part. Transfers count only as far as nothing hides them."""

    compute: float = 0.0
    """Busiest rank's expert compute, summed over micro-steps and layers."""
    all_to_all: float = 0.0
    pull: float = 0.0
    """Exposed part of pulling replica weights."""
    return_: float = 0.0
    """Exposed part of returning replica gradients, and adding them."""
    publish: float = 0.0
    """Exposed part of sending weights from owner to home, layer by layer from the window's start on."""
    collect: float = 0.0
    """Exposed part of sending gradients or weights from home to owner, each layer after its last visit."""
    planning: float = 0.0
    """Planning on the critical path; zero if the load is known ahead."""

    @property
    def total(self) -> float:
        """All parts together."""
        return sum((self.compute, self.all_to_all, self.pull, self.return_, self.publish, self.collect, self.planning))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes that one window moves, all ranks together, by path."""

    peer: int = 0
    """Replica weights and gradients inside nodes, GPU to GPU."""
    host: int = 0
    """Replica weights from the host store."""
    edge_inside: int = 0
    """Publish and collect inside nodes."""
    edge_across: int = 0
    """Publish and collect across nodes, and gradients that return across them."""
    all_to_all_inside: int = 0
    all_to_all_across: int = 0

    @property
    def experts(self) -> int:
        """Weights and gradients of experts: what the plan moves besides rows."""
        return self.peer + self.host + self.edge_inside + self.edge_across

    @property
    def total(self) -> int:
        """Everything, rows of the all-to-all included."""
        return self.experts + self.all_to_all_inside + self.all_to_all_across


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaTable(Value):
    """All replicas of a window, sorted by (micro-step, layer), then in the order of planning."""

    start_ML: np.ndarray
    """[M * L + 1] where each (micro-step, layer)'s replicas begin; entry m * L + l."""
    expert_P: np.ndarray
    rank_P: np.ndarray
    rows_P: np.ndarray
    """[P] rows the replica takes."""
    path_P2: np.ndarray
    """[P, 2] index into PATHS for the forward and the backward pull."""

    def __post_init__(self) -> None:
        for name in ("start_ML", "expert_P", "rank_P", "rows_P"):
            object.__setattr__(self, name, int64_array(name, getattr(self, name), ndim=1, error=InfeasiblePlanError))
        paths = int64_array("path_P2", self.path_P2, ndim=2, error=InfeasiblePlanError)
        object.__setattr__(self, "path_P2", paths)
        lengths = {len(self.expert_P), len(self.rank_P), len(self.rows_P), len(paths)}
        if lengths != {int(self.start_ML[-1])} or self.start_ML[0] != 0 or np.any(np.diff(self.start_ML) < 0):
            raise InfeasiblePlanError("replica table: offsets must ascend from 0 to the number of replicas")
        if paths.shape[1] != 2:
            raise InfeasiblePlanError(f"path_P2 has shape {paths.shape}; each replica needs a path per phase, two")
        if paths.size and (paths.min() < 0 or paths.max() >= len(PATHS)):
            raise InfeasiblePlanError(f"replica table: paths are 0..{len(PATHS) - 1}, got {int(paths.max())}")

    @classmethod
    def empty(cls, entries: int) -> "ReplicaTable":
        """Return a table for `entries` (micro-step, layer) pairs without a replica."""
        none = np.zeros(0, dtype=np.int64)
        return cls(
            start_ML=np.zeros(entries + 1, dtype=np.int64),
            expert_P=none,
            rank_P=none,
            rows_P=none,
            path_P2=np.zeros((0, 2), dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.expert_P)

    @property
    def entry_P(self) -> np.ndarray:
        """[P] the (micro-step, layer) entry, m * L + l, of each replica."""
        return np.repeat(np.arange(len(self.start_ML) - 1), np.diff(self.start_ML))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan(Value):
    """A checked plan of one window of one EP group."""

    loads: LoadMatrix
    """The planned loads; with partial coverage, unknown rows are estimated (see `estimated_share`)."""
    cluster: Cluster
    model: ModelShape
    policy: str
    objective: Objective
    slots: int
    """Replica slots per rank."""
    home_LE: np.ndarray
    """[L, E] home rank of each expert. Example: home_LE[3, 17] == 5: expert 17 of layer 3 computes on rank 5."""
    home_slot_LE: np.ndarray
    """[L, E] slot of each expert on its home rank."""
    replica_table: ReplicaTable
    ns_ML: np.ndarray
    """[M, L] predicted nanoseconds with this plan in one wave: compute, all-to-all, exposed transfers."""
    closed_ns_ML: np.ndarray
    """[M, L] the same without replicas, on the same homes: what the gate compared with."""
    seconds: Seconds
    bytes: Bytes
    static_seconds: float
    """Predicted seconds of the same window under contiguous expert parallelism, in one wave."""
    edge_ns_2L: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))
    """[2, L] nanoseconds of publish and of collect of each layer, hidden or not; all 0 if left out."""
    edge_slow_2L: np.ndarray = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))
    """[2, L] nanoseconds by which each of them slows concurrent compute; all 0 if left out."""
    itinerary: Itinerary | None = None
    """None for baselines that are not executed."""
    estimated_share: float = 0.0
    """Share of the planned rows that were estimated because their routes are unknown."""
    cross_node: bool = False
    persistent: bool = False
    waves: int = 1
    """Into how many waves every rank's rows are cut, so that one wave computes while another is exchanged."""
    home_slots: int = field(init=False, compare=False)
    """Experts each rank owns, and so home slots each rank has."""
    rank_load_MLR: np.ndarray = field(init=False, compare=False)
    """[M, L, R] rows each rank computes."""

    def __post_init__(self) -> None:
        slots = require_int("slots", self.slots, low=0, error=InfeasiblePlanError)
        waves = require_int("waves", self.waves, low=1, high=MOST_WAVES, error=InfeasiblePlanError)
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "waves", waves)
        shape_ML = (self.loads.num_micro_steps, self.loads.num_layers)
        for name in ("home_LE", "home_slot_LE", "ns_ML", "closed_ns_ML"):
            array = int64_array(name, getattr(self, name), ndim=2, error=InfeasiblePlanError)
            wanted = shape_ML if name.endswith("_ML") else (shape_ML[1], self.loads.num_experts)
            if array.shape != wanted:
                raise InfeasiblePlanError(f"{name} has shape {array.shape}, expected {wanted}")
            object.__setattr__(self, name, array)
        for name in ("edge_ns_2L", "edge_slow_2L"):
            given = getattr(self, name) if np.size(getattr(self, name)) else np.zeros((2, shape_ML[1]), dtype=np.int64)
            edges = int64_array(name, given, ndim=2, error=InfeasiblePlanError)
            if edges.shape != (2, shape_ML[1]):
                raise InfeasiblePlanError(f"{name} has shape {edges.shape}, expected {(2, shape_ML[1])}")
            if edges.min() < 0:
                raise InfeasiblePlanError(f"{name} holds {int(edges.min())}; no transfer takes negative time")
            object.__setattr__(self, name, edges)
        if self.loads.num_ranks != self.cluster.ep:
            raise InfeasiblePlanError(f"loads have {self.loads.num_ranks} ranks, the EP group {self.cluster.ep}")
        if (self.loads.num_layers, self.loads.num_experts) != (self.model.layers, self.model.experts):
            raise InfeasiblePlanError(
                f"loads have {self.loads.num_layers} layers of {self.loads.num_experts} experts, "
                f"{self.model.name!r} has {self.model.layers} of {self.model.experts}; they must be equal"
            )
        if len(self.replica_table.start_ML) != shape_ML[0] * shape_ML[1] + 1:
            raise InfeasiblePlanError("replica table does not cover every micro-step and layer exactly once")
        object.__setattr__(self, "home_slots", self.cluster.home_slots(self.model))
        self._check_homes()
        total_MLE = self.loads.total_MLE()
        self._check_replicas(total_MLE)
        self._check_itinerary()
        object.__setattr__(self, "rank_load_MLR", frozen_array(self._rank_load(total_MLE)))

    @property
    def owner_E(self) -> np.ndarray:
        """[E] owner rank of each expert."""
        owner_E: np.ndarray = np.arange(self.loads.num_experts) // self.home_slots
        return owner_E

    @property
    def displaced_LE(self) -> np.ndarray:
        """[L, E] bool, True if an expert's home is not its owner."""
        away_LE: np.ndarray = self.home_LE != self.owner_E[None, :]
        return away_LE

    @property
    def saved_seconds(self) -> float:
        """Predicted seconds saved against contiguous expert parallelism; negative if the plan loses."""
        return self.static_seconds - self.seconds.total

    def _check_homes(self) -> None:
        ranks = self.cluster.ep
        width = self.home_slots + (self.slots if self.persistent else 0)
        if self.home_LE.min() < 0 or self.home_LE.max() >= ranks:
            raise InfeasiblePlanError(f"home_LE must name ranks 0..{ranks - 1}")
        if self.home_slot_LE.min() < 0 or self.home_slot_LE.max() >= width:
            raise InfeasiblePlanError(f"home_slot_LE must name slots 0..{width - 1}")
        place = np.sort(self.home_LE * width + self.home_slot_LE, axis=1)
        clash = np.argwhere(np.diff(place, axis=1) == 0)
        if len(clash):
            layer, at = (int(i) for i in clash[0])
            rank, slot = divmod(int(place[layer, at]), width)
            raise InfeasiblePlanError(f"layer index {layer}: two experts have their home in slot {slot} of rank {rank}")
        # Distinct slots within the home width already force exactly `home_slots` homes per rank.

    def _check_replicas(self, total_MLE: np.ndarray) -> None:
        table, ranks, experts = self.replica_table, self.cluster.ep, self.loads.num_experts
        if not len(table):
            return
        entry_P = table.entry_P
        if table.expert_P.min() < 0 or table.expert_P.max() >= experts:
            raise InfeasiblePlanError(f"replicas must name experts 0..{experts - 1}")
        strangers = table.rank_P[(table.rank_P < 0) | (table.rank_P >= ranks)]
        if len(strangers):
            raise InfeasiblePlanError(f"a replica names rank {int(strangers[0])}; ranks are 0..{ranks - 1}")
        home_P = self.home_LE[entry_P % self.loads.num_layers, table.expert_P]
        node_R = self.cluster.node_array_R
        if not self.cross_node:
            self._refuse(node_R[table.rank_P] != node_R[home_P], "leaves its home's node; allow cross-node replicas")
        self._refuse(table.rank_P == home_P, "is on the rank of its own home")
        self._refuse(table.rows_P < 1, "takes no row; leave it out")
        holder = (entry_P * experts + table.expert_P) * ranks + table.rank_P
        if len(np.unique(holder)) != len(holder):
            raise InfeasiblePlanError("a replica is listed twice in one micro-step and layer")
        taken = np.bincount(
            entry_P * experts + table.expert_P, weights=table.rows_P.astype(np.float64), minlength=total_MLE.size
        )
        over = np.flatnonzero(taken > total_MLE.reshape(-1))
        if len(over):
            entry, expert = divmod(int(over[0]), experts)
            raise InfeasiblePlanError(f"{self._place(entry)}: replicas of expert {expert} take more rows than it has")
        self._check_slots(entry_P)

    def _check_slots(self, entry_P: np.ndarray) -> None:
        ranks, layers = self.cluster.ep, self.loads.num_layers
        used = np.bincount(entry_P * ranks + self.replica_table.rank_P, minlength=(entry_P.max() + 1) * ranks)
        limit: np.ndarray | int = self.slots
        if self.persistent:
            homes_LR = np.stack([np.bincount(row, minlength=ranks) for row in self.home_LE])
            room_LR = self.home_slots + self.slots - homes_LR
            limit = room_LR[np.arange(len(used) // ranks) % layers].reshape(-1)
        over = np.flatnonzero(used > limit)
        if len(over):
            entry, rank = divmod(int(over[0]), ranks)
            raise InfeasiblePlanError(
                f"{self._place(entry)}: rank {rank} holds {int(used[over[0]])} replicas; "
                f"slots={self.slots} allows fewer"
            )

    def _check_itinerary(self) -> None:
        if self.itinerary is None:
            return
        micro_steps, layers = self.loads.num_micro_steps, self.loads.num_layers
        phases = 2 if self.loads.stage == "update" else 1
        visited = (self.itinerary.phase_V * micro_steps + self.itinerary.micro_step_V) * layers + self.itinerary.layer_V
        if not np.array_equal(np.sort(visited), np.arange(micro_steps * layers * phases)):
            raise InfeasiblePlanError("itinerary: every micro-step and layer must be visited exactly once per phase")

    def _refuse(self, bad_P: np.ndarray, why: str) -> None:
        if bad_P.any():
            at = int(np.flatnonzero(bad_P)[0])
            table = self.replica_table
            raise InfeasiblePlanError(
                f"{self._place(int(table.entry_P[at]))}: the replica of expert {int(table.expert_P[at])} "
                f"on rank {int(table.rank_P[at])} {why}"
            )

    def _place(self, entry: int) -> str:
        micro_step, layer = divmod(entry, self.loads.num_layers)
        return f"micro-step {micro_step}, layer index {layer}"

    def _rank_load(self, total_MLE: np.ndarray) -> np.ndarray:
        micro_steps, layers, _ = total_MLE.shape
        load_MLR = np.zeros((micro_steps, layers, self.cluster.ep), dtype=np.int64)
        for layer in range(layers):
            one_hot_ER = self.home_LE[layer][:, None] == np.arange(self.cluster.ep)[None, :]
            load_MLR[:, layer] = total_MLE[:, layer] @ one_hot_ER.astype(np.int64)
        table = self.replica_table
        if len(table):
            entry_P = table.entry_P
            home_P = self.home_LE[entry_P % layers, table.expert_P]
            flat = load_MLR.reshape(-1)
            np.add.at(flat, entry_P * self.cluster.ep + table.rank_P, table.rows_P)
            np.subtract.at(flat, entry_P * self.cluster.ep + home_P, table.rows_P)
        return load_MLR

    def _entry(self, micro_step: int, layer: int) -> slice:
        is_whole = all(isinstance(index, int | np.integer) for index in (micro_step, layer))
        if not (is_whole and 0 <= micro_step < self.loads.num_micro_steps and 0 <= layer < self.loads.num_layers):
            raise InfeasiblePlanError(
                f"the plan has micro-steps 0..{self.loads.num_micro_steps - 1} and layer indices "
                f"0..{self.loads.num_layers - 1}, not ({micro_step!r}, {layer!r})"
            )
        start = micro_step * self.loads.num_layers + layer
        return slice(int(self.replica_table.start_ML[start]), int(self.replica_table.start_ML[start + 1]))

    def replicas(self, micro_step: int, layer: int) -> tuple[Replica, ...]:
        """Return the replicas of one micro-step of one layer, as (expert, rank)."""
        cut = self._entry(micro_step, layer)
        table = self.replica_table
        return tuple(map(Replica, table.expert_P[cut].tolist(), table.rank_P[cut].tolist()))

    def quota_ER(self, micro_step: int, layer: int, *, known_E: np.ndarray | None = None) -> np.ndarray:
        """Return [E, R] rows each holder takes of each expert.

        Quotas sum over ranks to the planned rows (`loads`). Where some routes are unknown, these include the estimated
        rows; `known_E` asks for the known ones alone.

        Args:
            known_E: [E] rows of each expert to divide instead, in the same proportions and at most as many as planned:
                `given.total_MLE()[micro_step, layer]` of the loads that were given to `plan`
        """
        cut, table = self._entry(micro_step, layer), self.replica_table
        experts, home_E, expert_P = np.arange(self.loads.num_experts), self.home_LE[layer], table.expert_P[cut]
        quota_ER = np.zeros((len(experts), self.cluster.ep), dtype=np.int64)
        quota_ER[experts, home_E] = self.loads.load_MLRE[micro_step, layer].sum(axis=0)
        np.subtract.at(quota_ER, (expert_P, home_E[expert_P]), table.rows_P[cut])
        quota_ER[expert_P, table.rank_P[cut]] += table.rows_P[cut]
        if known_E is None:
            return quota_ER
        known = int64_array("known_E", known_E, ndim=1, low=0, error=InfeasiblePlanError)
        if known.shape != (len(quota_ER),) or (known > quota_ER.sum(axis=1)).any():
            raise InfeasiblePlanError(
                f"known_E must give each of the {len(quota_ER)} experts at most its planned rows, got {known.tolist()}"
            )
        return np.stack([shares(int(rows), quota_R) for rows, quota_R in zip(known, quota_ER, strict=True)])

    def split_RER(self, micro_step: int, layer: int) -> np.ndarray:
        """Return [R source, E, R holder] rows by source: own rank first, then own node, then the rest.

        Policies in `split.BLIND` split every source's rows in proportion to the quotas.
        """
        quota, load_RE = self.quota_ER(micro_step, layer), self.loads.load_MLRE[micro_step, layer]
        return split_rows(load_RE, quota, node_R=np.array(self.cluster.node_R), in_proportion=self.policy in BLIND)

    def pulls(self, visit: int, rank: int) -> tuple[Pull, ...]:
        """Return what `rank` pulls ahead of the visit at position `visit` of the itinerary."""
        if self.itinerary is None:
            raise InfeasiblePlanError(f"a plan of policy {self.policy!r} is not executed and has no itinerary")
        if self.itinerary.resident_V[visit]:
            return ()
        layer = int(self.itinerary.layer_V[visit])
        cut = self._entry(int(self.itinerary.micro_step_V[visit]), layer)
        table, phase = self.replica_table, int(self.itinerary.phase_V[visit])
        mine = [p for p in range(cut.start, cut.stop) if table.rank_P[p] == rank]
        return tuple(
            Pull(int(e), int(self.home_LE[layer, e]), PATHS[int(table.path_P2[p, phase])])
            for p in mine
            for e in (table.expert_P[p],)
        )

    def explain(self, micro_step: int, layer: int) -> "Explanation":
        """Explain what was decided for one micro-step of one layer, and what binds; `str()` of it is a table."""
        return explain(self, micro_step, layer)

    def save(self, path: str | FilePath) -> None:
        """Write the plan to an `.npz` file (format: `core.plan_file`)."""
        from equipoise.core.plan_file import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str | FilePath) -> "Plan":
        """Read a plan written by `save` and check it again. Pickled content is refused."""
        from equipoise.core.plan_file import load_plan

        return load_plan(path)

    def digest(self) -> str:
        """Return a SHA-256 over every decision; equal on every rank and CPU for equal input."""
        table = self.replica_table
        arrays = (self.home_LE, self.home_slot_LE, table.start_ML, table.expert_P, table.rank_P, table.rows_P)
        hasher = hashlib.sha256()
        for array in (*arrays, table.path_P2, self.ns_ML, self.closed_ns_ML, self.edge_ns_2L, self.edge_slow_2L):
            hasher.update(np.ascontiguousarray(array).tobytes())
        if self.itinerary is not None:
            for array in (self.itinerary.buffer_V, self.itinerary.ready_from_V, self.itinerary.resident_V):
                hasher.update(np.ascontiguousarray(array).tobytes())
        if self.waves > 1:
            # Plans without waves keep the digest that they have in files of results.
            hasher.update(self.waves.to_bytes(8, "little"))
        return hasher.hexdigest()


def wave_cuts(plan: Plan, micro_step: int, layer: int) -> Cuts:
    """Return where the waves of each rank begin: each has as many of the rank's planned rows, in slot order."""
    if plan.persistent:
        raise InfeasiblePlanError(
            f"the plan of policy {plan.policy!r} keeps replicas for the whole window and is not executed, so its slots "
            "are not cut into waves; plan with policy 'equipoise'"
        )
    plan._entry(micro_step, layer)
    return cut_rows(slot_rows(plan, micro_step * plan.loads.num_layers + layer, 1)[0], plan.waves)


def slot_rows(plan: Plan, first: int, count: int) -> np.ndarray:
    """Return [X, R, S] planned rows of every rank's local slots: home slots, then replicas in the plan's order.

    Args:
        plan: of any policy; replicas that stay for the window are behind all slots that homes may have
        first: entry, micro-step * L + layer, where X begins
        count: how many entries there are
    """
    layers, ranks, table = plan.loads.num_layers, plan.cluster.ep, plan.replica_table
    start_X = table.start_ML[first : first + count + 1]
    cut, entry_P = slice(int(start_X[0]), int(start_X[-1])), np.repeat(np.arange(count), np.diff(start_X))
    expert_P, rank_P, rows_P = table.expert_P[cut], table.rank_P[cut], table.rows_P[cut]
    home_XE = plan.loads.load_MLRE.reshape(-1, ranks, plan.loads.num_experts)[first : first + count].sum(axis=1)
    np.subtract.at(home_XE, (entry_P, expert_P), rows_P)
    layer_X, entry_X1 = np.arange(first, first + count) % layers, np.arange(count)[:, None]
    width = plan.home_slots + plan.slots
    # Replicas that stay may be in all slots that homes leave free; here they have slots of their own.
    behind, last = (width, 2 * width) if plan.persistent else (plan.home_slots, width)
    rows_XRS = np.zeros((count, ranks, last), dtype=np.int64)
    rows_XRS[entry_X1, plan.home_LE[layer_X], plan.home_slot_LE[layer_X]] = home_XE
    rows_XRS[entry_P, rank_P, behind + numbered(entry_P * ranks + rank_P)] = rows_P
    return rows_XRS


Binds = Literal["nothing", "node", "gate", "slots", "homes"]
"""What keeps an entry from being more level, the first that holds: `nothing`, no rank has more than the rounded mean;
`node`, the busiest rank is at the mean of its node; `gate`, there is no replica although slots are free, because
replicas would cost more than they save; `slots`, every rank of the node that could take more rows has its slots full;
`homes`, slots are free but the busiest rank has no home expert left to share, or none worth a replica."""
Gate = Literal["open", "closed", "not needed", "no slots"]

_BINDS_TEXT: dict[Binds, str] = {
    "nothing": "level to the row",
    "node": "the fullest node's mean; only homes or replicas across nodes could do more",
    "gate": "replicas would cost more than they save",
    "slots": "every rank that could take more rows has its replica slots full",
    "homes": "slots are free, but the busiest rank has no home expert left whose rows are worth a replica",
}


class ReplicaRows(NamedTuple):
    """One replica and the rows it takes."""

    expert: int
    home: int
    rank: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explanation(Value):
    """One (micro-step, layer) of a plan, rank by rank, and what keeps it from being more level; `str()` is a table."""

    title: str
    static_R: np.ndarray
    """[R] rows of each rank with every expert at its owner."""
    home_R: np.ndarray
    """[R] the same at the plan's homes, without replicas."""
    plan_R: np.ndarray
    """[R] the same as planned."""
    node_R: np.ndarray
    replicas: tuple[ReplicaRows, ...]
    bound: int
    """Rows of the busiest rank that no split inside nodes can improve on with these homes."""
    closed_ns: int
    """Predicted nanoseconds without replicas."""
    ns: int
    """Predicted nanoseconds as planned."""
    gate: Gate
    binds: Binds
    estimated_share: float

    def __str__(self) -> str:
        return self.to_text(width=100)

    def to_text(self, *, width: int) -> str:
        """Return the table for a terminal of so many columns; in a narrow one replicas have lines of their own."""
        lines = [self.title, "", f"{'':<24}{'busiest':>9}{'mean':>9}{'skew':>8}"]
        mean = float(self.plan_R.mean())
        for label, busiest in (
            ("experts at their owners", int(self.static_R.max())),
            ("homes, without replicas", int(self.home_R.max())),
            ("planned", int(self.plan_R.max())),
            ("bound of these homes", self.bound),
        ):
            lines.append(f"{label:<24}{busiest:>9}{mean:>9.1f}{busiest / mean if mean else 1.0:>8.4f}")
        planned, closed, saved = (ns / 1e6 for ns in (self.ns, self.closed_ns, self.closed_ns - self.ns))
        seconds = f"{planned:.3f} ms as planned, {closed:.3f} ms without replicas: {saved:.3f} ms saved."
        lines += ["", f"Replicas: {len(self.replicas)}; gate {self.gate}. {seconds}"]
        lines += [f"What binds: {self.binds} ({_BINDS_TEXT[self.binds]})."]
        if self.estimated_share > 0:
            lines += [f"{self.estimated_share:.1%} of the window's rows are estimated: their routes are unknown."]
        is_narrow = width < 80
        names = f"{'rank':>4}{'node':>6}{'at owners':>11}{'at homes':>10}{'planned':>9}"
        lines += ["", names if is_narrow else f"{names}  replicas"]
        for rank, node in enumerate(self.node_R):
            own = (replica for replica in self.replicas if replica.rank == rank)
            held = [f"expert {r.expert} of rank {r.home}: {r.rows} rows" for r in own]
            figures = f"{rank:>4}{node:>6}{self.static_R[rank]:>11}{self.home_R[rank]:>10}{self.plan_R[rank]:>9}"
            if is_narrow:
                lines += [figures, *(f"{'':>10}{one}" for one in held)]
            else:
                lines.append(f"{figures}  {'; '.join(held)}".rstrip())
        return "\n".join(lines)


def explain(plan: Plan, micro_step: int, layer: int) -> Explanation:
    """Explain one (micro-step, layer) of a plan; `layer` is its index in the window."""
    replicas = plan.replicas(micro_step, layer)
    load_E = plan.loads.total_MLE()[micro_step, layer]
    ranks, node_R, home_E = plan.cluster.ep, plan.cluster.node_array_R, plan.home_LE[layer]
    quota_ER = plan.quota_ER(micro_step, layer)
    home_R, plan_R = _by_rank(load_E, home_E, ranks), plan.rank_load_MLR[micro_step, layer]
    domain_R = np.zeros_like(node_R) if plan.cross_node else node_R
    bound = max(-(-int(home_R[domain_R == n].sum()) // int((domain_R == n).sum())) for n in set(domain_R.tolist()))
    held_R = np.bincount(np.array([r.rank for r in replicas], dtype=np.int64), minlength=ranks)
    free_R = plan.home_slots + plan.slots - np.bincount(home_E, minlength=ranks) - held_R
    gate: Gate = "closed" if plan.slots else "no slots"
    if replicas:
        gate = "open"
    elif home_R.max() <= bound:
        gate = "not needed"
    numbers = plan.loads.layer_numbers_L
    number = layer if numbers is None else int(numbers[layer])
    return Explanation(
        title=(
            f"Micro-step {micro_step}, layer index {layer} (layer {number}) of {plan.model.name}, {plan.loads.stage}: "
            f"{ranks} ranks on {plural(plan.cluster.num_ep_nodes, 'node')}, replica slots per rank: {plan.slots}"
        ),
        static_R=_by_rank(load_E, plan.owner_E, ranks),
        home_R=home_R,
        plan_R=plan_R,
        node_R=node_R,
        replicas=tuple(ReplicaRows(e, int(home_E[e]), r, int(quota_ER[e, r])) for e, r in replicas),
        bound=bound,
        closed_ns=int(plan.closed_ns_ML[micro_step, layer]),
        ns=int(plan.ns_ML[micro_step, layer]),
        gate=gate,
        binds=_binds(plan_R, free_R, domain_R, bound, used=bool(replicas)),
        estimated_share=plan.estimated_share,
    )


def _by_rank(load_E: np.ndarray, rank_E: np.ndarray, ranks: int) -> np.ndarray:
    rows_R = np.zeros(ranks, dtype=np.int64)
    np.add.at(rows_R, rank_E, load_E)
    return rows_R


def _binds(plan_R: np.ndarray, free_R: np.ndarray, domain_R: np.ndarray, bound: int, *, used: bool) -> Binds:
    busiest = int(plan_R.argmax())
    if plan_R[busiest] <= -(-int(plan_R.sum()) // len(plan_R)):
        return "nothing"
    if plan_R[busiest] <= bound:
        return "node"
    takers_R = (domain_R == domain_R[busiest]) & (plan_R < bound)
    if not (free_R[takers_R] > 0).any():
        return "slots"
    return "homes" if used else "gate"
