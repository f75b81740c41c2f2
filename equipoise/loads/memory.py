"""The bytes that a rank holds at every visit of a layer, known before the step: the one memory model.

`analyze`, `simulate`, the planner's and the packer's limits, the training forecast and a balancer's events all ask it.
It counts the tensors of this package's balanced layer at the worst moment of a visit, forward or backward. Weights,
their accumulated gradients, the optimizer, attention, norms and logits are not part of it.

Names of what a rank has at a visit, in bytes: R received rows of D hidden entries, RF the same of F expert width, N the
rows of its own tokens, T these tokens. What is alive:
    kept        from forward to backward: R + 2 RF (input, gate and up) and the combine's input, which is R where rows
                are read in place and N where they are exchanged; index tables
    send        N and 2 R: rows to send, as received, by slot; where rows are read in place, R
    compute     2 R + 3 RF: input, gate and up, activation, output
    receive     R and output R, reordered R, and N that came back; where rows are read in place, R and output R
    combine     backward: what is kept, and as much again of the combine's input as its gradient
    experts     backward: 3 R + 6 RF (input, gate and up, activation; the gradients of output, activation, gate and up,
                input), then the gradients of the layer's home experts and replicas, which are added to others or sent
With recomputed activations a layer keeps T until the micro-step's backward is over, and runs forward once more in it.
In the log-prob pass nothing is kept. To that come the tokens themselves, replica slots with their mailboxes and boxes,
and the page of mapped rows.

Every figure is exact for these tensors. The allocator's own rounding and fragmentation come on top.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from equipoise.core import LoadMatrix, ModelShape, Stage
from equipoise.core.options import DISPATCH_BYTES, Activations, balance_bytes, replica_bytes, row_page_bytes
from equipoise.core.plan import Plan
from equipoise.core.value import Value
from equipoise.loads.skew import rank_loads

GIB = 2**30
FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowRows(Value):
    """What the ranks of a window receive and send, and what experts they hold."""

    stage: Stage
    received_MLR: np.ndarray
    """[M, L, R] rows, padding included."""
    sent_MLR: np.ndarray
    """[M, L, R] rows of each rank's own tokens."""
    home_slots: int
    replicas_MLR: np.ndarray | int = 0
    """[M, L, R] replicas that each rank computes."""
    is_mapped: bool = False
    """Whether ranks read rows where they are, instead of exchanging them."""
    fixed_bytes: tuple[int, int] = (0, 0)
    """Of replica slots with mailboxes and boxes, and of the page of mapped rows."""

    @classmethod
    def of(cls, plan: Plan, *, depth: int = 1) -> "WindowRows":
        """Read them from a plan.

        Args:
            depth: visits that pulls run ahead, where the plan itself has no itinerary
        """
        table, shape_MLR, model = plan.replica_table, plan.rank_load_MLR.shape, plan.model
        replicas_XR = np.zeros((shape_MLR[0] * shape_MLR[1], shape_MLR[2]), dtype=np.int64)
        is_mapped, fixed = False, (0, 0)
        # `balanced` is what no plan can do: it levels rows at no cost, and nothing is held for that.
        holds_replicas = plan.policy != "balanced"
        if holds_replicas:
            np.add.at(replicas_XR, (table.entry_P, table.rank_P), 1)
        if plan.persistent:
            # Replicas that stay are in every layer.
            fixed = (holds_replicas * plan.slots * shape_MLR[1] * replica_bytes(model, plan.loads.stage), 0)
        elif plan.slots or bool(plan.displaced_LE.any()):
            depth = depth if plan.itinerary is None else plan.itinerary.depth
            moving = balance_bytes(model, cluster=plan.cluster, slots=plan.slots, stage=plan.loads.stage, depth=depth)
            is_mapped = plan.cluster.num_ep_nodes == 1 and plan.cluster.ep > 1
            fixed = (moving, row_page_bytes(plan) if is_mapped else 0)
        return cls(
            stage=plan.loads.stage,
            received_MLR=plan.rank_load_MLR,
            sent_MLR=plan.loads.load_MLRE.sum(axis=3),
            home_slots=plan.home_slots,
            replicas_MLR=replicas_XR.reshape(shape_MLR),
            is_mapped=is_mapped,
            fixed_bytes=fixed,
        )

    @classmethod
    def at_owners(cls, loads: LoadMatrix, *, ep: int | None = None) -> "WindowRows":
        """Count them for contiguous expert parallelism; among another number of ranks all send alike."""
        received_MLR = rank_loads(loads, ep=ep)
        ranks = received_MLR.shape[2]
        if ranks == loads.num_ranks:
            sent_MLR = loads.load_MLRE.sum(axis=3)
        else:
            sent_MLR = np.broadcast_to(-(-received_MLR.sum(axis=2, keepdims=True) // ranks), received_MLR.shape)
        return cls(
            stage=loads.stage, received_MLR=received_MLR, sent_MLR=sent_MLR, home_slots=loads.num_experts // ranks
        )

    def scaled(self, times: int) -> "WindowRows":
        """Return the same with `times` as many rows everywhere."""
        return replace(self, received_MLR=self.received_MLR * times, sent_MLR=self.sent_MLR * times)

    def levelled(self) -> "WindowRows":
        """Return the same where every rank receives the mean: the least that any plan reaches."""
        mean_ML1 = -(-self.received_MLR.sum(axis=2, keepdims=True) // self.received_MLR.shape[2])
        return replace(self, received_MLR=np.broadcast_to(mean_ML1, self.received_MLR.shape))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowMemory(Value):
    """Bytes by part of every (micro-step, layer, rank), at the worse of its forward and its backward visit."""

    activations_MLR: np.ndarray
    """What other visits keep for their backward: earlier layers, and micro-steps in flight."""
    rows_MLR: np.ndarray
    """What the visit itself holds of rows, tokens and their gradients."""
    tables_MLR: np.ndarray
    """Index tables of the visit's dispatch."""
    gradients_MLR: np.ndarray
    """Gradients of the layer's experts, before they are added to those of other micro-steps or sent home."""
    slots_bytes: int
    """Replica slots, mailboxes, and boxes for experts whose homes change: the same at every visit."""
    page_bytes: int
    """Rows that ranks of one node read in place: the same at every visit."""

    @property
    def total_MLR(self) -> np.ndarray:
        """[M, L, R] all bytes."""
        parts = (self.activations_MLR, self.rows_MLR, self.tables_MLR, self.gradients_MLR)
        return np.sum(parts, axis=0) + (self.slots_bytes + self.page_bytes)

    @property
    def peak_R(self) -> np.ndarray:
        """[R] most bytes of each rank."""
        return self.total_MLR.max(axis=(0, 1))

    def place(self, rank: int | None = None) -> tuple[int, int, int]:
        """Return where the peak of a rank is, or of the fullest one: (micro-step, layer index, rank)."""
        total_MLR = self.total_MLR
        total_MLR = total_MLR if rank is None else np.where(np.arange(total_MLR.shape[2]) == rank, total_MLR, -1)
        micro_step, layer, at = (int(i) for i in np.unravel_index(int(total_MLR.argmax()), total_MLR.shape))
        return micro_step, layer, at

    def parts(self, place: tuple[int, int, int]) -> dict[str, int]:
        """Return the bytes by part at one (micro-step, layer index, rank)."""
        names = ("activations", "rows", "tables", "gradients")
        found = {name: int(getattr(self, f"{name}_MLR")[place]) for name in names}
        return {**found, "slots": self.slots_bytes, "page": self.page_bytes}


def plan_memory(
    plan: Plan, *, activations: Activations = "kept", visits_V3: np.ndarray | None = None, depth: int = 1
) -> WindowMemory:
    """Forecast the memory of every visit under a plan of any policy.

    Args:
        plan: of one window
        activations: kept for the backward pass, or recomputed
        visits_V3: [V, 3] (micro-step, phase, layer) in execution order, as `build_itinerary` has them; None: the
            plan's own, or a forward and a backward pass per micro-step
        depth: visits that pulls run ahead, where the plan itself has no itinerary
    """
    itinerary = plan.itinerary
    if visits_V3 is None and itinerary is not None:
        visits_V3 = np.stack([itinerary.micro_step_V, itinerary.phase_V, itinerary.layer_V], axis=1)
    rows = WindowRows.of(plan, depth=depth)
    return window_memory(rows, plan.model, activations=activations, visits_V3=visits_V3)


def window_memory(
    rows: WindowRows, model: ModelShape, *, activations: Activations = "kept", visits_V3: np.ndarray | None = None
) -> WindowMemory:
    """Forecast the memory of every visit from what ranks send and receive; arguments as in `plan_memory`."""
    visits_V3 = _plain_visits(rows) if visits_V3 is None else visits_V3
    is_kept, tables_MLR = activations == "kept", _tables(rows)
    # Step 1: what a visit leaves until its backward.
    if rows.stage == "recompute":
        left_MLR = np.zeros_like(rows.received_MLR)
    else:
        left_MLR = _saved(rows, model) + tables_MLR if is_kept else _token_bytes(rows, model)
    # Step 2: what the visits before one have left, in execution order. A backward visit's own part is in step 3.
    micro_step_V, phase_V, layer_V = visits_V3.T
    left_VR = left_MLR[micro_step_V, layer_V]
    is_backward_V1 = (phase_V == BACKWARD)[:, None]
    # Torch lets go of the inputs of checkpoints once the backward pass of their micro-step is over.
    freed_VR = left_VR if is_kept else left_MLR.sum(axis=1)[micro_step_V] * (layer_V == 0)[:, None]
    change_VR = np.where(is_backward_V1, -freed_VR, left_VR)
    others_2MLR = np.zeros((2, *rows.received_MLR.shape), dtype=np.int64)
    others_2MLR[phase_V, micro_step_V, layer_V] = np.cumsum(change_VR, axis=0) - change_VR - is_backward_V1 * left_VR
    # Step 3: the worst moment of each visit.
    moments = _moments(rows, model, is_kept=is_kept)
    parts_3QMLR = np.stack([np.stack([others_2MLR[m.phase], m.rows_MLR, m.gradients_MLR]) for m in moments], axis=1)
    worst_11MLR = parts_3QMLR.sum(axis=0).argmax(axis=0)[None, None]
    others_MLR, rows_MLR, gradients_MLR = np.take_along_axis(parts_3QMLR, worst_11MLR, axis=1)[:, 0]
    slots_bytes, page_bytes = rows.fixed_bytes
    return WindowMemory(
        activations_MLR=others_MLR,
        rows_MLR=rows_MLR,
        tables_MLR=tables_MLR,
        gradients_MLR=gradients_MLR,
        slots_bytes=slots_bytes,
        page_bytes=page_bytes,
    )


class _Moment(NamedTuple):
    """What one moment of a visit holds besides what other visits have left."""

    phase: int
    rows_MLR: np.ndarray
    gradients_MLR: np.ndarray


def _moments(rows: WindowRows, model: ModelShape, *, is_kept: bool) -> list[_Moment]:
    """Return the moments of the module's docstring."""
    received, wide, sent = _sizes(rows, model)
    tokens, none_MLR = _token_bytes(rows, model), np.zeros_like(rows.received_MLR)
    is_update = rows.stage == "update"
    # Among several ranks rows exist as they are sent, as received and by slot; alone they are not sent.
    copies = 1 if rows.received_MLR.shape[2] > 1 else 0
    send = received if rows.is_mapped else sent + (1 + copies) * received
    receive = 2 * received if rows.is_mapped else 3 * received + copies * sent

    def forward(phase: int, *, is_saved: bool, more: np.ndarray) -> list[_Moment]:
        held = (send + tokens, 2 * received + 3 * wide + tokens, receive + is_saved * 2 * wide + 2 * tokens)
        return [_Moment(phase, one + more, none_MLR) for one in held]

    found = forward(FORWARD, is_saved=is_kept and is_update, more=none_MLR)
    if not is_update:
        return found
    combine = _saved(rows, model) + (received if rows.is_mapped else sent) + tokens
    gradients_MLR = none_MLR + (rows.home_slots + np.asarray(rows.replicas_MLR)) * model.expert_bytes
    # A layer that recomputes has its input until the end of its backward.
    more = none_MLR if is_kept else tokens
    found += [
        _Moment(BACKWARD, combine + more, none_MLR),
        _Moment(BACKWARD, 3 * received + 6 * wide + tokens + more, gradients_MLR),
    ]
    return found if is_kept else found + forward(BACKWARD, is_saved=True, more=tokens)


def _plain_visits(rows: WindowRows) -> np.ndarray:
    """[V, 3] a forward and a backward pass per micro-step; forward passes alone where nothing is updated."""
    micro_steps, layers, _ = rows.received_MLR.shape
    forward = [(FORWARD, layer) for layer in range(layers)]
    backward = [] if rows.stage == "recompute" else [(BACKWARD, layer) for layer in reversed(range(layers))]
    visits = [(m, *visit) for m in range(micro_steps) for visit in forward + backward]
    return np.array(visits, dtype=np.int64).reshape(-1, 3)


def _sizes(rows: WindowRows, model: ModelShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """R, RF and N of the module's docstring."""
    hidden, width = model.row_bytes, model.expert_width * model.weight_bytes
    return rows.received_MLR * hidden, rows.received_MLR * width, rows.sent_MLR * hidden


def _token_bytes(rows: WindowRows, model: ModelShape) -> np.ndarray:
    """[M, L, R] bytes of the ranks' own tokens: T of the module's docstring."""
    return -(-rows.sent_MLR // model.top_k) * model.row_bytes


def _tables(rows: WindowRows) -> np.ndarray:
    sent_bytes, received_bytes = DISPATCH_BYTES["mapped" if rows.is_mapped else "exchanged"]
    # Kept on the host as int32, used as int64.
    return 2 * (sent_bytes * rows.sent_MLR + received_bytes * rows.received_MLR)


def _saved(rows: WindowRows, model: ModelShape) -> np.ndarray:
    """What a forward visit saves of rows for its backward."""
    received, wide, sent = _sizes(rows, model)
    return received + 2 * wide + (received if rows.is_mapped else sent)
