"""`CostModel`: the one place that turns rows and bytes into time, in whole nanoseconds.

Built from a cluster, a model shape and a hardware profile for one stage. `tables` hands the same figures to compiled
kernels (`kernels.py`), so planner, baselines and simulator all price alike.

What is priced, per (micro-step, layer):
- compute: the busiest rank, from the measured tables over rows and non-empty slots (which hold the effects of small
  and of uneven groups), and putting its received rows slot by slot and back; `update` is forward + backward,
  `recompute` forward only. Expert shapes that were not measured scale with their FLOPs from the two nearest that were,
  the nearer counting more, because both limits (arithmetic, reading weights) grow with hidden x width.
- all-to-all: 2 exchanges forward, 2 more backward; each takes the busiest link, inside nodes and across them at once.
  Every row crosses nodes on its own (`sends="rows"`), or a token once per node, as the chance that it has experts there
  goes, to be handed on inside (`sends="tokens"`). Co-activation counts, where given, can only lower either.
- pull: what bringing replicas needs beyond the window it can hide in: one visit's attention, shared experts and mean
  expert compute for each visit of depth; and what it slows the experts of the ranks that pull.
- return: replica gradients, in the weights' dtype as autograd makes them, beyond the attention backward that they hide
  behind, plus adding each of them to the home's own, one after another; to another node at the rate of its links.
Per layer and window: publish and collect of displaced experts, by the layer's busiest link, at the rate that was
measured or that the transport is assumed to reach, and with the ranks' agreement where it was measured. They run beside
the layers, from the window's start on and after a layer's last turn; what nothing hides, and what they slow, is in
`clock.py`. Per window: the exchange of counted rows and prepared dispatches, where measured, as a part of planning.

Invariants (asserted by the tests):
1. Time never falls with more rows, nor, up to FAR_ROWS, with more non-empty slots.
2. Nothing is free: no rows take no time, one row takes some.
3. Kernels and the plain functions here agree to the nanosecond.
"""

from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape, Stage
from equipoise.core.plan import Sends, Transport
from equipoise.core.value import Value
from equipoise.cost.profile import ComputeTable, Profile, monotone

GRADIENT_BYTES = 4
"""Bytes of one collected gradient entry: fp32, as trainers that accumulate apart from the weights keep it."""
CONTEXT_TOKENS = 4096
"""Assumed sequence length for the cost of attention scores, where loads do not say."""
FAR_ROWS = 2**26
"""Rows of a rank, hundreds of times a table's last, up to which more slots never take less time."""
GLOO_BYTES_PER_S = 1_400_000_000
"""Assumed rate of experts between nodes by gloo: what one core receives (a single run, one machine)."""
COUNT_BYTES = 8
"""Bytes of one counted number of rows."""
PICO = 10**12
Rows = TypeVar("Rows", int, np.ndarray)
"""One number of rows, or an array of them."""


class Tables(NamedTuple):
    """All figures a kernel needs, in integers."""

    rows_X: np.ndarray
    compute_ns_SX: np.ndarray
    """[S + 1, X] by number of non-empty slots, 0 included."""
    exchanges: int
    exchange_fixed_ns: int
    inside_ps: int
    """Picoseconds of one row over NVLink."""
    across_ps: int
    """Picoseconds of one row over the network."""
    host_ns: int
    """One expert from the host store."""
    peer_ns: int
    """One expert from a peer."""
    host_fixed_ns: int
    peer_fixed_ns: int
    host_slow_permille: int
    """How much longer a rank's experts take for a pull from the host beside them, in thousandths of the pull."""
    peer_slow_permille: int
    phases: int
    """Pulls per micro-step: 1 forward only, 2 with backward."""
    return_ns: int
    """One gradient to its home; 0 where none returns."""
    far_return_ns: int
    """One gradient to a home in another node."""
    add_ns: int
    """Adding it to the home's own."""
    window_ps: int
    """Forward window of one visit per token: attention and shared experts."""
    backward_window_ps: int
    depth: int
    """Visits ahead that pulls start; 0 in the first visit of a window, which has none before it."""
    top_k: int
    forwards: int
    """1 where a token crosses to each node once and is handed on there to its ranks; 0 where every row crosses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostModel(Value):
    """Prices of one stage on one cluster for one model."""

    cluster: Cluster
    model: ModelShape
    profile: Profile
    stage: Stage
    depth: int = 1
    sends: Sends = "rows"
    transport: Transport = "auto"
    forward_alone: "CostModel" = field(init=False, repr=False, compare=False)
    """The same without backward."""
    _nearest: tuple[ComputeTable, ...] = field(init=False, repr=False)
    """The two measured tables whose expert shapes are nearest, or the one that is the model's own."""
    _tables: dict[int, Tables] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Tables made so far, by `max_slots`: one window asks for the same ones a dozen times."""
    _grids: list[np.ndarray] = field(init=False, repr=False, compare=False, default_factory=list)
    """The largest grid of `compute_ns_SX` made so far; smaller ones are its beginning."""

    def __post_init__(self) -> None:
        alone = self if self.stage == "recompute" else replace(self, stage="recompute")
        object.__setattr__(self, "forward_alone", alone)
        near = sorted(self.profile.tables, key=lambda table: (self._distance(table), table.row_flops))[:2]
        object.__setattr__(self, "_nearest", tuple(near[:1] if self._distance(near[0]) == 0 else near))

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        model: ModelShape,
        *,
        stage: Stage = "update",
        profile: Profile | None = None,
        depth: int = 1,
        sends: Sends = "rows",
        transport: Transport = "auto",
    ) -> "CostModel":
        """Build the cost model of a cluster with its own profile, or with a given one."""
        used = Profile.read(cluster.profile) if profile is None else profile
        return cls(
            cluster=cluster, model=model, profile=used, stage=stage, depth=depth, sends=sends, transport=transport
        )

    def _distance(self, table: ComputeTable) -> int:
        """How far a measured expert shape is from the model's: thousandths by which both lengths differ."""
        pairs = ((table.hidden, self.model.hidden), (table.expert_width, self.model.expert_width))
        more, less = (prod(choose(pair) for pair in pairs) for choose in (max, min))
        return 1000 * more // less - 1000

    def compute_ns_SX(self, max_slots: int) -> np.ndarray:
        """[max_slots + 1, X + 2] nanoseconds at `rows_X`, per number of non-empty slots."""
        if self._grids and len(self._grids[-1]) > max_slots:
            return self._grids[-1][: max_slots + 1]
        near = self._nearest
        grids = [self._scaled_ns_SX(table, max_slots) for table in near]
        if len(near) == 2:
            first, second = (self._distance(table) for table in near)
            grids = [(grids[0] * second + grids[1] * first) // (first + second)]
        # No row, no time; the first breakpoint's time holds for fewer rows, since weights are read all the same.
        # Lines that are prolonged beyond measured slots or rows can cross, so the whole grid is made monotone again.
        self._grids.append(monotone(self._prolonged(grids[0])) + self.ordering_ns(self.rows_X))
        return self._grids[-1]

    def _prolonged(self, ns_SX: np.ndarray) -> np.ndarray:
        """The same lines up to FAR_ROWS, by their last slope."""
        *_, before, last, far = self.rows_X.tolist()
        rise_S = ns_SX[:, -1] - ns_SX[:, -2]
        return np.column_stack([ns_SX, ns_SX[:, -1] + rise_S * (far - last) // (last - before)])

    def _scaled_ns_SX(self, table: ComputeTable, max_slots: int) -> np.ndarray:
        """[max_slots + 1, X + 1] a measured table for the model's shape, at the rows of the nearest one."""
        raw = table.update_ns_SX if self.stage == "update" else table.forward_ns_SX
        scaled = raw * self.model.row_flops // table.row_flops
        grid = np.zeros((max_slots + 1, len(table.rows_X) + 1), dtype=np.int64)
        for slots in range(max_slots + 1):
            grid[slots, 1:] = _between(table.slots_S, scaled, slots)
        own_X, wanted_X = np.concatenate([[0], table.rows_X]), self.rows_X[:-1]
        if np.array_equal(own_X, wanted_X):
            return grid
        return np.array([[interpolate(own_X, line_X, int(rows)) for rows in wanted_X] for line_X in grid])

    def ordering_ns(self, rows: np.ndarray) -> np.ndarray:
        """Nanoseconds of putting received rows slot by slot and back."""
        profile, is_update = self.profile, self.stage == "update"
        rate = profile.received_update_bytes_per_s if is_update else profile.received_forward_bytes_per_s
        return rows * (self.model.row_bytes * PICO // rate) // 1000

    def sending_ns(self, rows: Rows) -> Rows:
        """Nanoseconds of spreading a rank's own tokens to `rows` rows and combining them; the same under every plan."""
        profile, is_update = self.profile, self.stage == "update"
        rate = profile.sent_update_bytes_per_s if is_update else profile.sent_forward_bytes_per_s
        return rows * self.model.row_bytes * 10**9 // rate

    @property
    def rows_X(self) -> np.ndarray:
        """[X + 2] row counts of the compute table, 0 first, FAR_ROWS last."""
        return np.concatenate([[0], self._nearest[0].rows_X, [FAR_ROWS]])

    def compute_ns(self, rows: int, slots: int) -> int:
        """Nanoseconds of one rank's experts: `rows` rows in `slots` non-empty slots."""
        tables = self.tables(slots)
        return interpolate(tables.rows_X, tables.compute_ns_SX[slots], rows)

    def exchange_ns(self, inside_rows: int, across_rows: int) -> int:
        """All exchanges of one (micro-step, layer), given the rows of the busiest link inside and across nodes."""
        t = self.tables(1)
        busiest_ps = max(inside_rows * t.inside_ps, across_rows * t.across_ps)
        return t.exchanges * (t.exchange_fixed_ns + busiest_ps // 1000)

    def edge_ns(self, *, inside_experts: int, across_experts: int, edge: str) -> int:
        """Publish or collect, given the experts over the busiest link inside and across nodes."""
        fixed = self.edge_fixed_ns if inside_experts or across_experts else 0
        return max(self._link_ns(inside_experts, across_experts, edge)) + fixed

    def edge_slow_ns(self, *, inside_experts: int, across_experts: int, edge: str) -> int:
        """How much longer the compute beside a publish or collect takes.

        What stays in the node passes through staging memory at a peer's rate. What leaves it is charged like pulls from
        the host, which is how gloo moves it; what NCCL slows was not measured.
        """
        inside, across = self._link_ns(inside_experts, across_experts, edge)
        return (inside * self.profile.peer_slowdown_permille + across * self.profile.host_slowdown_permille) // 1000

    def _link_ns(self, inside_experts: int, across_experts: int, edge: str) -> tuple[int, int]:
        """Nanoseconds of an edge's experts over the links inside nodes, and across them."""
        size = self.edge_bytes(edge)
        is_weights = size == self.model.expert_bytes
        staged = self.profile.weight_bytes_per_s if is_weights else self.profile.gradient_bytes_per_s
        # The link and the staging buffer are passed in pieces, one after the other: the slower one counts.
        inside = inside_experts * size * 10**9 // min(self.profile.peer_bytes_per_s, staged)
        return inside, across_experts * size * 10**9 // self.relocation_bytes_per_s

    @property
    def relocation_bytes_per_s(self) -> int:
        """Rate of experts between nodes: as measured, or else what the transport is assumed to reach."""
        if self.profile.relocation_bytes_per_s:
            return self.profile.relocation_bytes_per_s
        network = self.cluster.network_bytes_per_s * self.profile.across_permille // 1000
        return min(network, GLOO_BYTES_PER_S) if self.transport == "gloo" else network

    @property
    def edge_fixed_ns(self) -> int:
        """Publish or collect of a layer without its experts' bytes; without a measurement, the start of one copy."""
        return self.profile.edge_fixed_ns or self.profile.peer_fixed_ns

    def refresh_ns(self, experts: int) -> int:
        """Nanoseconds of writing experts to the host store; free where the profile does not know."""
        rate = self.profile.refresh_bytes_per_s
        return experts * self.model.expert_bytes * 10**9 // rate if rate else 0

    def foresight_ns(self, loads: LoadMatrix) -> int:
        """Nanoseconds of the exchange of a window's counted rows and of making its dispatches, beside the planning.

        Free where the profile does not know.
        """
        profile, ns = self.profile, 0
        if profile.counts_bytes_per_s:
            num_bytes = COUNT_BYTES * loads.load_MLRE.size
            ns += profile.counts_fixed_ns + num_bytes * 10**9 // profile.counts_bytes_per_s
        if profile.prepared_rows_per_s:
            most = int(loads.load_MLRE.sum(axis=(0, 1, 3)).max())
            ns += most * 10**9 // profile.prepared_rows_per_s
        return ns

    def edge_bytes(self, edge: str) -> int:
        """Bytes one displaced expert moves at an edge: weights out; gradients home, or weights where none were made."""
        if edge == "collect" and self.stage == "update":
            return self.model.expert_params * GRADIENT_BYTES
        return self.model.expert_bytes

    def add_ns(self, size: int) -> int:
        """Nanoseconds of adding one gradient of `size` bytes to another: two reads and one write."""
        return 3 * size * 10**9 // self.profile.add_bytes_per_s

    @property
    def crossing_permille(self) -> int:
        """Thousandths of one more row for another node by which more crosses, if choices are even.

        A token that has another expert in the node crosses all the same.
        """
        if self.sends == "rows":
            return 1000
        nodes, others = self.cluster.num_ep_nodes, self.model.top_k - 1
        return max(1, 1000 * (nodes - 1) ** others // nodes**others)

    @property
    def attention_flops(self) -> int:
        """Forward operations per token that a pull can hide behind: attention and shared experts of one layer."""
        model = self.model
        scores = 2 * model.attention_width * CONTEXT_TOKENS // 2
        return 2 * model.attention_params + scores + model.shared_experts * model.row_flops

    def tables(self, max_slots: int) -> Tables:
        """Everything as integers for the kernels; `max_slots` is the most non-empty slots a rank can have."""
        if max_slots in self._tables:
            return self._tables[max_slots]
        cluster, model, profile = self.cluster, self.model, self.profile
        update = self.stage == "update"
        inside_bytes_per_s = cluster.nvlink_bytes_per_s * profile.inside_permille // 1000
        across_bytes_per_s = cluster.network_bytes_per_s * profile.across_permille // 1000
        peer = min(profile.peer_bytes_per_s, cluster.nvlink_bytes_per_s)
        host = min(profile.host_bytes_per_s, cluster.host_bytes_per_s)
        tables = self._tables[max_slots] = Tables(
            rows_X=self.rows_X,
            compute_ns_SX=self.compute_ns_SX(max_slots),
            exchanges=4 if update else 2,
            exchange_fixed_ns=profile.exchange_fixed_ns,
            inside_ps=model.row_bytes * PICO // inside_bytes_per_s,
            across_ps=model.row_bytes * PICO // across_bytes_per_s,
            host_ns=model.expert_bytes * 10**9 // host,
            peer_ns=model.expert_bytes * 10**9 // peer,
            host_fixed_ns=profile.host_fixed_ns,
            peer_fixed_ns=profile.peer_fixed_ns,
            host_slow_permille=profile.host_slowdown_permille,
            peer_slow_permille=profile.peer_slowdown_permille,
            phases=2 if update else 1,
            return_ns=model.expert_bytes * 10**9 // peer if update else 0,
            far_return_ns=model.expert_bytes * 10**9 // self.relocation_bytes_per_s if update else 0,
            add_ns=self.add_ns(model.expert_bytes) if update else 0,
            window_ps=self.attention_flops * PICO // profile.attention_forward_flops_per_s,
            backward_window_ps=2 * self.attention_flops * PICO // profile.attention_backward_flops_per_s,
            depth=self.depth,
            top_k=model.top_k,
            forwards=int(self.sends == "tokens"),
        )
        return tables


def interpolate(rows_X: np.ndarray, ns_X: np.ndarray, rows: int) -> int:
    """Monotone integer interpolation: flat below the first measured point, straight between, last slope beyond."""
    if rows <= 0:
        return 0
    if rows <= rows_X[1]:
        return int(ns_X[1])
    i = int(np.searchsorted(rows_X, rows, side="left"))
    i = min(i, len(rows_X) - 1)
    low, high = int(rows_X[i - 1]), int(rows_X[i])
    rise = int(ns_X[i]) - int(ns_X[i - 1])
    return int(ns_X[i - 1]) + rise * (rows - low) // (high - low)


def _between(slots_S: np.ndarray, ns_SX: np.ndarray, slots: int) -> np.ndarray:
    """[X] the table's line for any number of non-empty slots: straight between lines, last slope beyond."""
    if slots <= slots_S[0]:
        return ns_SX[0]
    i = min(int(np.searchsorted(slots_S, slots, side="left")), len(slots_S) - 1)
    low, high = int(slots_S[i - 1]), int(slots_S[i])
    rise = ns_SX[i] - ns_SX[i - 1]
    return ns_SX[i - 1] + rise * (slots - low) // (high - low)
