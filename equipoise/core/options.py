"""Options: how windows are planned, how transfers run, and both together for a balancer; and the memory this takes.

The one dial users turn is `slots`. Options are frozen and checked when they are made. They are passed on as objects: a
`BalancerOptions` is a `PlanOptions` and a `TransferOptions`. Importing this module imports neither numba nor torch.
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np

from equipoise.core.cluster import Cluster
from equipoise.core.errors import InfeasiblePlanError, TransferError
from equipoise.core.model import ModelShape
from equipoise.core.plan import MOST_WAVES, Objective, Plan, Sends, Transport
from equipoise.core.value import Value, frozen_array, require_choice, require_int
from equipoise.core.window import Stage

Order = Literal["plain", "recompute", "1f1b"]
"""Execution order of the update stage: every forward, then every backward of a micro-step (`plain`); the same with the
forward repeated inside backward (`recompute`); or pipelined, one forward, one backward (`1f1b`)."""
Activations = Literal["recomputed", "kept"]
"""What happens to a layer's activations between forward and backward."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How to plan."""

    gate: bool = True
    """Use replicas only in micro-steps and layers where they pay; the skew objective opens the gate."""
    max_displaced: int | None = None
    """Most experts per layer whose home may leave the owner; 0 keeps homes at owners, None sets no limit."""
    cross_node: bool = False
    """Take replicas from any node where that pays: needs a host store that holds every expert."""
    sends: Sends = "tokens"
    """What the trainer's dispatcher sends to other nodes: a token once per node (DeepEP, HybridEP), or every row
    (Megatron's alltoall). Every verb and function has this default; a balancer plans for rows, as its layers send."""
    transport: Transport = "auto"
    """What moves experts between nodes, for their price where a profile has none; a balancer plans with its own."""
    memory_bytes: int | None = None
    """Bytes per rank for replicas, instead of `slots`: weights and, in updates, gradients on their way home."""
    limit_bytes: int | None = None
    """Most bytes of a rank at any visit of a layer, as `loads.plan_memory` forecasts them: what is left after weights,
    gradients and optimizer. Where the plan asked for exceeds it, rows are levelled at any cost, and with fewer slots;
    where every plan does, planning raises. None sets no limit."""
    activations: Activations | None = None
    """What the limit counts of activations; None: as `order` says, kept unless it is `recompute`."""
    waves: int | Literal["auto"] = 1
    """Into how many waves every rank's rows are cut, so that the experts of one compute while the rows of another are
    exchanged; only where all rows travel by collectives. "auto": the planner takes the fastest of 1 to 4 by the prices
    of the cost model. Simulated and tested on CPUs; this has never run on a GPU."""
    effort: int = 1
    """Search effort: 2 looks about twice as long for better homes."""
    workers: int = 1
    """Threads that share out the layers; the plan does not depend on it."""
    depth: int = 1
    """Visits ahead that pulls may start; depth + 1 buffers are needed."""
    order: Order = "plain"
    pipeline_stage: int = 0
    pipeline_stages: int = 1
    chunk_layers: tuple[int, ...] = ()
    """MoE layers of each model chunk of an interleaved pipeline, in layer order; empty: one chunk has all of them."""
    chunk_group: int | None = None
    """Micro-steps that pass a chunk before the next chunk runs; None: as many as there are stages, as in Megatron."""

    def __post_init__(self) -> None:
        for name in ("gate", "cross_node"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise InfeasiblePlanError(f"PlanOptions.{name} is {getattr(self, name)!r}; it must be True or False")
        lowest = {"effort": 1, "workers": 1, "depth": 1, "pipeline_stage": 0, "pipeline_stages": 1}
        optional = {"max_displaced": 0, "memory_bytes": 0, "limit_bytes": 1, "chunk_group": 1}
        given = {name: low for name, low in optional.items() if getattr(self, name) is not None}
        for name, low in {**lowest, **given}.items():
            value = require_int(f"PlanOptions.{name}", getattr(self, name), low=low, error=InfeasiblePlanError)
            object.__setattr__(self, name, value)
        if isinstance(self.waves, str):
            if self.waves != "auto":
                raise InfeasiblePlanError(
                    f"PlanOptions.waves is {self.waves!r}; it must be a whole number from 1 to {MOST_WAVES}, or 'auto'"
                )
        else:
            waves = require_int("PlanOptions.waves", self.waves, low=1, high=MOST_WAVES, error=InfeasiblePlanError)
            object.__setattr__(self, "waves", waves)
        if self.pipeline_stage >= self.pipeline_stages:
            raise InfeasiblePlanError(
                f"PlanOptions.pipeline_stage is {self.pipeline_stage}; there are {self.pipeline_stages} stages from 0"
            )
        for number in self.chunk_layers:
            require_int("PlanOptions.chunk_layers", number, low=0, error=InfeasiblePlanError)
        if len(self.chunk_layers) > 1 and self.order != "1f1b":
            raise InfeasiblePlanError(
                f"PlanOptions.chunk_layers has {len(self.chunk_layers)} chunks; only order='1f1b' interleaves them, "
                f"not {self.order!r}"
            )
        require_choice("PlanOptions.order", self.order, Order, error=InfeasiblePlanError)
        require_choice("PlanOptions.sends", self.sends, Sends, error=InfeasiblePlanError)
        require_choice("PlanOptions.transport", self.transport, Transport, error=InfeasiblePlanError)
        if self.activations is not None:
            require_choice("PlanOptions.activations", self.activations, Activations, error=InfeasiblePlanError)

    def slots_within(self, model: ModelShape, slots: int | None, *, stage: Stage) -> int:
        """Return the replica slots per rank: `slots`, or as many as `memory_bytes` holds in depth + 1 buffers."""
        if self.memory_bytes is None:
            wanted = 1 if slots is None else slots
            return require_int("slots", wanted, low=0, error=InfeasiblePlanError)
        if slots is not None:
            raise InfeasiblePlanError(
                f"give slots or PlanOptions.memory_bytes, not both (slots={slots}, memory_bytes={self.memory_bytes})"
            )
        return self.memory_bytes // ((self.depth + 1) * replica_bytes(model, stage))


ForcedPath = Literal["plan", "peer", "host"]
Buffers = Literal["auto", "separate", "arena"]
CopyMethod = Literal["auto", "plain", "kernel", "parallel"]
RowPath = Literal["auto", "mapped", "collective"]
GradDtype = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """How much memory transfers may use, and how long they may take."""

    slots: int = 1
    """Replica slots per rank; 0 for placement alone."""
    depth: int = 1
    """Visits that pulls may run ahead; there are depth + 1 replica buffers."""
    budget_bytes: int | None = None
    """Most bytes per rank for replica buffers, mailboxes, outbox and landing together; None sets no limit."""
    store_bytes: int | None = None
    """Most bytes of host memory per node for the host store, which holds all routed experts; None sets no limit."""
    timeout_s: float = 60.0
    """Bound on every single wait of a transfer."""
    grad_dtype: GradDtype | None = None
    """Of accumulated gradients; None: as the weights. Example: `float32` for Megatron's `main_grad` of bf16 weights."""
    is_locked: bool = False
    """Keep the shared pages in memory."""
    path: ForcedPath = "plan"
    """How pulls travel: as the plan says, or all of them by one path."""
    buffers: Buffers = "auto"
    """`arena`: home and replica slots of a layer are one tensor, and one grouped product covers both; `auto`: an arena
    where experts are on a CUDA device."""
    is_checked: bool = False
    """Keep a checksum of every expert in the host store, and compare it before a pull."""
    copies: CopyMethod = "auto"
    """How a visit's replicas are copied inside a node; `auto`: on a CUDA device by one kernel, or by copy engines side
    by side where the node's experts are on several devices."""
    transport: Transport = "auto"
    """What moves experts between nodes."""
    rows: RowPath = "auto"
    """How rows with a prepared dispatch reach the ranks that compute them. `mapped`: these ranks read them where they
    are, in memory that a node's ranks map, and exchange only what crosses nodes; `collective`: by all-to-all; `auto`:
    mapped where a node has several ranks of the group, on GPUs only where the group is one node."""

    def __post_init__(self) -> None:
        require_int("slots", self.slots, low=0, error=TransferError)
        require_int("depth", self.depth, low=1, error=TransferError)
        if not self.timeout_s > 0:
            raise TransferError(f"timeout_s is {self.timeout_s}; it must be above 0")
        require_choice("path", self.path, ForcedPath, error=TransferError)
        require_choice("buffers", self.buffers, Buffers, error=TransferError)
        require_choice("copies", self.copies, CopyMethod, error=TransferError)
        require_choice("transport", self.transport, Transport, error=TransferError)
        require_choice("rows", self.rows, RowPath, error=TransferError)
        if self.grad_dtype is not None:
            require_choice("grad_dtype", self.grad_dtype, GradDtype, error=TransferError)


@dataclass(frozen=True, kw_only=True)
class BalancerOptions(PlanOptions, TransferOptions):
    """What a balancer needs to know beyond the model and the cluster."""

    objective: Objective = "seconds"
    """`seconds` charges every cost and may decide to do nothing; `skew` levels rows whatever it costs."""
    is_prepared: bool = True
    """Make every dispatch of a window ahead where all routes are known. False where other routes may be replayed than
    those submitted: each layer then sorts its rows, exchanges counts, and follows the actual routes."""
    prepared_bytes: int = 8 << 30
    """Most bytes of host memory per rank for the dispatches of one window; beyond it layers exchange counts."""
    adapts: bool = False
    """Compare what windows promise with what they take, and plan less, or nothing, while that does not pay
    (`planning.course`). Measured time then decides about plans, so that two runs need not have the same bits."""
    planning_timeout_s: float = 300.0
    """Bound on planning one window and on every exchange of it; the first one may have to compile the planner."""

    def __post_init__(self) -> None:
        PlanOptions.__post_init__(self)
        TransferOptions.__post_init__(self)
        if self.adapts and self.objective == "skew":
            raise InfeasiblePlanError(
                "BalancerOptions.adapts is True with objective 'skew': the one plans less where that does not pay, the "
                "other levels rows whatever it costs; use objective 'seconds'"
            )
        if self.memory_bytes is not None:
            raise InfeasiblePlanError(
                f"BalancerOptions.memory_bytes is {self.memory_bytes}; a balancer allocates its slots once, so give "
                "slots, and budget_bytes as a limit on what they take"
            )


def replica_bytes(model: ModelShape, stage: Stage) -> int:
    """Return the bytes of one replica slot in one buffer: weights, and in updates the gradient that returns home."""
    return model.expert_bytes * (2 if stage == "update" else 1)


def edge_boxes(*, home_slots: int, slots: int, nodes: int) -> int:
    """Return how many experts a rank's outbox holds while homes change, and its landing, if there are other nodes."""
    return min(home_slots, 4 * max(slots, 1) // min(nodes, 2))


def balance_bytes(model: ModelShape, *, cluster: Cluster, slots: int, stage: Stage, depth: int = 1) -> int:
    """Return the bytes of one rank for moving experts: replica buffers and mailboxes, outbox and landing.

    Gradients have the weights' dtype here; mailboxes and boxes of float32 ones take twice as much.
    """
    nodes = cluster.num_ep_nodes
    boxes = min(nodes, 2) * edge_boxes(home_slots=cluster.home_slots(model), slots=slots, nodes=nodes)
    return slots * (depth + 1) * replica_bytes(model, stage) + boxes * model.expert_bytes


def row_page_bytes(plan: Plan) -> int:
    """Return the bytes of the page in which a rank shows its rows to its node; 0 where no node has several ranks."""
    if int(plan.cluster.ranks_N.max()) == 1:
        return 0
    model, limits = plan.model, RowLimits.of(plan).grown()
    return RowOffsets.of(limits, ranks=plan.cluster.ep, row_bytes=model.row_bytes, top_k=model.top_k).end


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """How many tokens and rows a rank may have in one visit of a layer, the largest over all ranks."""

    tokens: int
    """Of the rank, and of other nodes."""
    sent: int
    """Rows of these tokens: those of the rank are tokens times top-k."""
    computed: int
    """Rows that a rank computes, padding included, and those that return to it from other nodes."""

    @classmethod
    def of(cls, plan: Plan, *, pad: int = 1, is_relayed: bool = False) -> "RowLimits":
        """The sizes that a plan knows; the same on every rank. What crosses nodes is bounded, not counted.

        Args:
            is_relayed: tokens cross nodes in two levels
        """
        sent = int(plan.loads.load_MLRE.sum(axis=3).max(initial=0))
        tokens, received = -(-sent // plan.model.top_k), int(plan.rank_load_MLR.max(initial=0))
        computed = received + (plan.home_slots + plan.slots) * (pad - 1)
        sizes = np.bincount(plan.cluster.node_R).tolist()
        if len(sizes) == 1:
            return cls(tokens=tokens, sent=sent, computed=computed)
        # A relay may get all tokens of the sources that it serves; else a rank gets a token for each row it computes.
        served = max(sum(-(-other // own) for other in sizes) - 1 for own in sizes)
        arriving = (served * tokens, served * sent) if is_relayed else (received, received)
        return cls(tokens=tokens + arriving[0], sent=sent + arriving[1], computed=computed + sent)

    def grown(self) -> "RowLimits":
        """Return a little more, so that windows of growing size do not allocate every time."""
        return RowLimits(**{f.name: getattr(self, f.name) * 9 // 8 for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capacities(Value):
    """Exact sizes of what ranks receive, for engines that allocate buffers before a step runs.

    Without foresight these are guessed from profiles: too small drops or repeats work, too large is memory unused.
    """

    rows_MLR: np.ndarray
    """[M, L, R] rows that each rank receives, those of each of its slots filled to a multiple of the alignment."""
    own_MLR: np.ndarray
    """[M, L, R] rows of each rank's own tokens: what engines multiply by a factor to size its buffer."""
    row_bytes: int

    @classmethod
    def of(cls, plan: Plan, *, align: int = 1) -> "Capacities":
        """Read them from a plan that knows every route; `policy="static"` gives those of training without a balancer.

        Args:
            align: engines fill each expert's rows to a multiple of this; 256 for Megatron's fused grouped products
        """
        require_int("align", align, low=1, error=InfeasiblePlanError)
        if plan.estimated_share:
            raise InfeasiblePlanError(
                f"{plan.estimated_share:.1%} of the plan's rows are estimated; exact capacities need every route: give "
                "loads that were counted from complete recordings"
            )
        table, total_MLE = plan.replica_table, plan.loads.total_MLE()
        micro_steps, layers, experts = total_MLE.shape
        home_XE, home_E = total_MLE.reshape(-1, experts).copy(), np.tile(plan.home_LE, (micro_steps, 1))
        np.subtract.at(home_XE, (table.entry_P, table.expert_P), table.rows_P)
        rows_XR = np.zeros((micro_steps * layers, plan.cluster.ep), dtype=np.int64)
        entry_X = np.arange(len(rows_XR))[:, None]
        np.add.at(rows_XR, (entry_X, home_E), -(-home_XE // align) * align)
        np.add.at(rows_XR, (table.entry_P, table.rank_P), -(-table.rows_P // align) * align)
        rows_MLR = frozen_array(rows_XR.reshape(micro_steps, layers, -1))
        own_MLR = frozen_array(plan.loads.load_MLRE.sum(axis=3))
        return cls(rows_MLR=rows_MLR, own_MLR=own_MLR, row_bytes=plan.model.row_bytes)

    @property
    def bytes_MLR(self) -> np.ndarray:
        """[M, L, R] bytes of the hidden states that each rank receives."""
        bytes_MLR: np.ndarray = self.rows_MLR * self.row_bytes
        return bytes_MLR

    def rank_factor(self) -> float:
        """Return the least factor of a rank's own rows that holds every rank's rows, in steps of a millionth.

        That is `moe_expert_rank_capacity_factor` of Megatron-Core 0.18 and 0.19 (HybridEP, NCCL EP).
        """
        return _least_factor(self.rows_MLR, self.own_MLR)

    def stash_factor(self, *, in_flight: int = 1, page_rows: int = 64) -> float:
        """Return the least factor for buffers that keep the rows of all layers until backward, page by page.

        That is `moe_paged_stash_buffer_size_factor_cuda` of Megatron-Core 0.18 and 0.19, if the iteration in which it
        sizes its buffers has as many tokens as this window.

        Args:
            in_flight: micro-steps whose backward is still to come; a pipeline's stages minus the rank's own
            page_rows: `moe_paged_stash_page_size`
        """
        in_flight = min(require_int("in_flight", in_flight, low=1, error=InfeasiblePlanError), len(self.rows_MLR))
        require_int("page_rows", page_rows, low=1, error=InfeasiblePlanError)
        pages_MR = (-(-self.rows_MLR // page_rows) * page_rows).sum(axis=1)
        sums = [
            np.lib.stride_tricks.sliding_window_view(rows_MR, in_flight, axis=0).sum(axis=-1)
            for rows_MR in (pages_MR, self.own_MLR.sum(axis=1))
        ]
        return _least_factor(sums[0].max(axis=0), sums[1].max(axis=0))


def _least_factor(rows_X: np.ndarray, own_X: np.ndarray) -> float:
    """The least millionth with int(own * factor) >= rows everywhere."""
    impossible = np.argwhere((own_X == 0) & (rows_X > 0))
    if len(impossible):
        place = ", ".join(map(str, impossible[0]))
        raise InfeasiblePlanError(
            f"entry [{place}] receives {int(rows_X[tuple(impossible[0])])} rows but has no tokens of its own, so no "
            "factor of its own rows is enough: give every rank tokens in every micro-step"
        )
    is_used = own_X > 0
    if not is_used.any():
        return 0.0
    millionths = int(np.ceil((rows_X[is_used] / own_X[is_used]).max() * 1e6))
    # The quotient is rounded: one millionth too few is put right as engines would compute it.
    while (np.floor(own_X * (millionths / 1e6)) < rows_X).any():
        millionths += 1
    return millionths / 1e6


class RowOffsets(NamedTuple):
    """Where the parts of a page begin, in bytes; the same on all ranks."""

    words: int
    tokens: int
    order: int
    gates: int
    rows: int
    dots: int
    end: int

    @classmethod
    def of(cls, limits: RowLimits, *, ranks: int, row_bytes: int, top_k: int) -> "RowOffsets":
        """Put parts one behind the other, each on a cache line of its own; a gate takes up to 8 bytes."""
        sizes = (
            8 * ranks,
            limits.tokens * row_bytes,
            4 * limits.sent,
            8 * limits.tokens * top_k,
            limits.computed * row_bytes,
            8 * limits.computed,
        )
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + aligned(size))
        return cls(*ends)


DISPATCH_BYTES = {"exchanged": (12, 8), "mapped": (20, 12), "mapped beyond a node": (24, 20)}
"""A packed dispatch's bytes for each row sent (its token, place and id) and each received (its place and source); where
rows are mapped also its order and where it is computed, and where it is fetched from; in a group of several nodes at
most one more entry for each row sent, and two for each received."""


def aligned(num_bytes: int) -> int:
    """Round up to whole cache lines of 64 bytes."""
    return -(-num_bytes // 64) * 64
