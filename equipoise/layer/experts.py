"""`BalancedExperts`: the routed experts of one MoE layer under expert parallelism, computed where the plan says.

Steps of a forward pass. Adapters may call the last three one by one; `VisitRows` carries their state:
1. `enter`: add the home weights to the autograd graph, best before the layer's attention.
2. `send`: use the dispatch that the window prepared, or exchange counts and make it. Copy tokens into rows, send rows
   to the ranks that compute them, and order them by slot. Ranks of a node read each other's tokens instead (`mapped`).
3. `compute`: apply the experts (`expert_block`). If the plan cuts rows into waves, rows travel in this stage, those of
   one wave while another computes (`waves`).
4. `receive`: send rows back, or read them where they are, and combine them into tokens.

Every rank builds the same autograd graph and communicates in the same order, whatever its tokens and replicas.
Placement changes no bit of outputs and input gradients; replicas change none of outputs in the deterministic mode.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.core.errors import InfeasiblePlanError, RoutesError, TopologyError
from equipoise.core.plan import Plan, Visit
from equipoise.layer.dispatch import (
    Dispatch,
    FilledRows,
    SourceSplit,
    WaveCuts,
    WindowDispatches,
    assign_slots,
    build_dispatch,
    exchange_counts,
    prepare_dispatch,
    sort_rows,
    with_relay,
)
from equipoise.layer.expert_block import BlockOptions, apply_experts, expert_block
from equipoise.layer.mapped import combine_mapped, fetch_rows
from equipoise.layer.ops import (
    CombineOrder,
    all_to_all,
    combine_rows,
    enter_home,
    exchange_rows,
    order_columns,
    reorder_rows,
    spread_rows,
    sum_rows,
)
from equipoise.layer.relay import DirectDispatch, NodeRanks, Swap, send_by_relay
from equipoise.layer.waves import exchange_gates, waved_block
from equipoise.transfer.engine import LayerTransfers
from equipoise.transfer.mapped_rows import MappedRows
from equipoise.transfer.node import ExpertWeights, SlotTensors

DETERMINISTIC_PAD = 96
"""Rows that groups are filled up to. Products in fp32 on CPU give a row other bits where a block of rows is not full;
blocks differ with the processor's instructions and the experts' shape, and 96 fills those of AVX-512 and of AVX2."""
SIZES = (1, 2, 3, 5, 9, 17, 33)
"""Group sizes that `check_row_bits` tries, in multiples of the padding."""


class Window:
    """One plan as one rank executes it. Shared by all layers of the rank."""

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        transfers: LayerTransfers,
        dispatches: WindowDispatches | None = None,
        mapped: MappedRows | None = None,
        filled: Mapping[tuple[int, int], FilledRows] | None = None,
    ) -> None:
        """Take a plan into execution.

        Args:
            rank: this process's rank in the EP group
            transfers: moves the experts of this plan
            dispatches: of all entries, on every rank or on none; None: layers make them, exchanging counts
            mapped: through which prepared rows are read; None: they are exchanged by the group's collectives
            filled: by (micro-step, layer index), tokens whose experts the window chose
        """
        if plan.persistent:
            raise InfeasiblePlanError(
                f"policy {plan.policy!r} keeps replicas for the whole window; a balancer executes plans whose "
                "replicas live for one micro-step"
            )
        self.plan, self.rank, self.transfers = plan, rank, transfers
        self.dispatches, self.mapped, self.filled = dispatches, mapped, filled or {}
        self.nodes = NodeRanks(tuple(plan.cluster.node_R), rank)
        shape_ML = (plan.loads.num_micro_steps, plan.loads.num_layers)
        self.arrived_ML: np.ndarray = np.full(shape_ML, -1, dtype=np.int64)
        """[M, L] rows that arrived at this rank; -1 where its layer has not run."""
        self.sent_bytes: Counter[str] = Counter()
        """Tokens sent by this rank in forward: `direct` and, where they go in two levels, `two_level`; `across` and
        `inside` nodes. Outputs and gradients return row by row either way, and are not counted."""
        self.counted: dict[int, Tensor] = {}
        """By layer, [E] rows of this rank where layers make dispatches: what came, whatever the plan knew."""
        self._splits: dict[tuple[int, int, str], SourceSplit] = {}

    def count(self, visit: Visit, ids_TK: Tensor) -> None:
        """Count the rows of one layer on the device, without waiting; a layer that is recomputed is counted once."""
        if self.plan.itinerary is None or self.arrived_ML[visit.micro_step, visit.layer] >= 0:
            return
        if visit.layer not in self.counted:
            self.counted[visit.layer] = ids_TK.new_zeros(self.plan.loads.num_experts, dtype=torch.int64)
        ids_N = ids_TK.reshape(-1).long()
        self.counted[visit.layer].index_add_(0, ids_N.clamp(min=0), (ids_N >= 0).long())

    def note_rows(self, visit: Visit, dispatch: Dispatch, *, row_bytes: int) -> None:
        """Count the rows and bytes of one layer; a recomputed layer counts its bytes again."""
        self.arrived_ML[visit.micro_step, visit.layer] = sum(dispatch.receive_R)
        sent = [("direct", dispatch.send_R)]
        if dispatch.relay is not None:
            sent += [("two_level", dispatch.relay.copies_R), ("two_level", dispatch.relay.inner_send_R)]
        node_R, far = self.nodes.node_R, dispatch.mapped.far if dispatch.mapped is not None else None
        if far is not None and far.passed_R:
            near_R = [rows - away for rows, away in zip(dispatch.send_R, far.returning_R, strict=True)]
            sent += [("two_level", rows_R) for rows_R in (far.copies_R, near_R, far.passed_R)]
        for name, rows_R in sent:
            others = [(rows_R[r], node) for r, node in enumerate(node_R) if r != self.rank]
            inside = sum(rows for rows, node in others if node == node_R[self.rank])
            self.sent_bytes[f"{name} inside"] += row_bytes * inside
            self.sent_bytes[f"{name} across"] += row_bytes * (sum(rows for rows, _ in others) - inside)

    def cuts(self, visit: Visit, *, device: str) -> WaveCuts | None:
        """Where the waves of one entry begin; None where all rows travel at once."""
        if self.plan.waves == 1:
            return None
        return WaveCuts.of(self.plan, visit.micro_step, visit.layer, rank=self.rank, device=device)

    def split(self, micro_step: int, layer: int, *, device: str) -> SourceSplit:
        """This rank's split at one entry, where the ids are; read from the plan once."""
        key = (micro_step, layer, device)
        if key not in self._splits:
            self._splits[key] = SourceSplit.of(self.plan, micro_step, layer, source=self.rank, device=device)
        return self._splits[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions(BlockOptions):
    """How a layer computes; the same for all layers of a model."""

    combine_order: CombineOrder = "top_k"
    """`top_k`: transformers and this package; `expert`: Megatron."""
    gates: Literal["combine", "activation", "caller"] = "combine"
    """Where gates multiply: an expert's output, as it is combined; or, between its two products, the activation, as in
    Megatron, and the combine is a plain sum. `caller`: so it is, and whoever calls the stages multiplies outputs by the
    gates that came with their rows, before `receive`."""
    has_gaps: bool = False
    """Whether an id of -1 beside others means that a token has fewer than K experts; else it is refused."""
    is_deterministic: bool = False
    """Pad groups so that an output's bits do not depend on replicas; refused where that does not suffice."""
    dispatch: Literal["direct", "two_level"] = "direct"
    """`direct` sends a token once for each of its experts; `two_level` once to each node, and then inside it."""
    is_checked: bool = False
    """Exchange counts also where a dispatch is prepared, and compare."""


class VisitRows(NamedTuple):
    """The rows of one visit, as one stage of a layer hands them to the next."""

    visit: Visit
    window: Window
    home: ExpertWeights
    """This rank's home weights, as they entered the graph."""
    dispatch: Dispatch
    rows_PD: Tensor
    """[buffer rows, D] what the experts get and, once they have computed, what they give; with waves [N, D], in sending
    order."""
    gates: Tensor
    """[T, K] of this rank's tokens; where they multiply the activation [buffer rows], of the rows."""


class BalancedExperts(nn.Module):
    """The routed experts of one layer that have their home on this rank, and the rows of all."""

    def __init__(
        self, home: ExpertWeights, *, layer: int, group: dist.ProcessGroup, options: LayerOptions | None = None
    ) -> None:
        """Keep this rank's home experts as parameters.

        Args:
            home: [home_slots, ...] weights, in slot order; `SlotTensors` stay as they are and are no parameters
            layer: the layer's index in plans
            group: the expert-parallel group
        """
        super().__init__()
        self.options = options or LayerOptions()
        self.layer, self.group = layer, group
        # Groups are filled to a multiple of this many rows.
        self.pad = DETERMINISTIC_PAD if self.options.is_deterministic else 1
        self.window: Window | None = None
        for name, tensor in zip(("gate_up", "down", "gate_up_bias", "down_bias"), home, strict=True):
            if isinstance(tensor, SlotTensors):
                setattr(self, name, tensor)
            else:
                self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
        device = None if home.gate_up_SFD.is_meta else home.gate_up_SFD.device
        self.register_buffer("mismatches", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        is_apart = isinstance(home.gate_up_SFD, SlotTensors)
        if is_apart and (self.options.products == "grouped" or self.options.is_deterministic):
            raise TopologyError(
                f"layer index {layer}: experts kept one tensor per slot are computed one by one, without padding; use "
                "products='loop' and is_deterministic=False"
            )
        _, hidden, width = home.down_SDF.shape
        step = 16 // home.down_SDF.element_size()
        if self.options.products == "grouped" and (width % step or hidden % step):
            raise TopologyError(
                f"layer index {layer}: grouped products need hidden and expert width in multiples of {step} for "
                f"{home.down_SDF.dtype}, got {hidden} and {width}; use products='loop'"
            )
        if self.options.gates == "activation" and home.down_bias_SD is not None:
            raise TopologyError(
                f"layer index {layer}: gates='activation' with a bias of the second product is not supported; train "
                "without that bias, or use gates='combine'"
            )
        if self.options.is_deterministic and not home.gate_up_SFD.is_meta:
            check_row_bits(home, pad=self.pad, options=self.options)

    @property
    def home(self) -> ExpertWeights:
        """The parameters, slot by slot."""
        return ExpertWeights(self.gate_up, self.down, self.gate_up_bias, self.down_bias)

    def begin(self, window: Window) -> None:
        """Follow `window`'s plan from now on."""
        if self.gate_up.shape[0] != window.plan.home_slots:
            raise InfeasiblePlanError(
                f"layer index {self.layer}: {self.gate_up.shape[0]} home experts, but the plan has "
                f"{window.plan.home_slots} home slots per rank; plan for this model and EP size"
            )
        self.window = window

    def enter(self, visit: Visit) -> ExpertWeights:
        """Let the home weights into the graph; call before the layer's attention and give the result to `forward`."""
        return enter_home(self.home, self._window_of(visit).transfers, visit)

    def forward(
        self,
        hidden_TD: Tensor,
        ids_TK: Tensor,
        gates_TK: Tensor,
        visit: Visit,
        *,
        home: ExpertWeights | None = None,
        prepared: Dispatch | None = None,
    ) -> Tensor:
        """Apply the routed experts; all ranks of the EP group must call, also without tokens.

        Args:
            hidden_TD: [T, D] hidden states of this rank's tokens
            ids_TK: [T, K] the experts they use, replayed or freshly routed
            gates_TK: [T, K] their weights
            visit: of the forward, captured outside any checkpointed function
            home: what `enter` returned; entered here if left out
            prepared: this entry's dispatch, made ahead for `ids_TK`; left out, the window's own, and where it has none
                the dispatch is made here, with an exchange of counts

        Returns: [T, D]
        """
        sent = self.send(hidden_TD, ids_TK, gates_TK, visit, home=home, prepared=prepared)
        return self.receive(self.compute(sent))

    def send(
        self,
        hidden_TD: Tensor,
        ids_TK: Tensor,
        gates_TK: Tensor,
        visit: Visit,
        *,
        home: ExpertWeights | None = None,
        prepared: Dispatch | None = None,
    ) -> VisitRows:
        """Send tokens, as rows, to the ranks that compute them: the first stage of `forward`, with its arguments."""
        # Step 1: home weights.
        window = self._window_of(visit)
        home = home or self.enter(visit)
        # Step 2: where each row goes.
        if prepared is None and window.dispatches is not None:
            prepared = window.dispatches.upload(visit.micro_step, visit.layer, device=str(ids_TK.device))
        # Whoever gives the dispatch's own ids has filled, ordered and compared them.
        if prepared is None or ids_TK is not prepared.ids_TK:
            filled = window.filled.get((visit.micro_step, visit.layer))
            ids_TK = ids_TK if filled is None else filled.put(ids_TK)
            ids_TK, gates_TK = order_columns(ids_TK, gates_TK, order=self.options.combine_order)
        if prepared is not None:
            self._check_prepared(prepared, ids_TK, visit)
        dispatch = prepared or self._make_dispatch(ids_TK, visit)
        window.note_rows(visit, dispatch, row_bytes=hidden_TD.shape[1] * hidden_TD.element_size())
        # Step 3: tokens, as rows, to the ranks that compute them, slot by slot.
        send_R, receive_R = dispatch.send_R, dispatch.receive_R
        if dispatch.mapped is not None and window.mapped is not None:
            rows_PD = fetch_rows(hidden_TD, dispatch.mapped, window.mapped, layer=self.layer)
        elif dispatch.waves:
            rows_PD = spread_rows(hidden_TD, token_N=dispatch.token_N, index_TK=dispatch.index_TK)
        else:
            if dispatch.relay is None:
                rows_ND = spread_rows(hidden_TD, token_N=dispatch.token_N, index_TK=dispatch.index_TK)
                received_ND = exchange_rows(rows_ND, send_R=send_R, receive_R=receive_R, group=self.group)
            else:
                direct = DirectDispatch(dispatch.index_TK, send_R, receive_R)
                received_ND = send_by_relay(hidden_TD, dispatch.relay, direct=direct, group=self.group)
            rows_PD = reorder_rows(received_ND, there_P=dispatch.source_P, back_N=dispatch.place_N)
        sent = VisitRows(visit, window, home, dispatch, rows_PD, gates_TK)
        if self.options.gates == "combine":
            return sent
        # Gates follow their rows, one number each.
        gates_N1 = reorder_rows(gates_TK.reshape(-1, 1), there_P=dispatch.row_N, back_N=dispatch.index_TK.reshape(-1))
        if dispatch.waves:
            return sent._replace(gates=exchange_gates(gates_N1, dispatch, group=self.group).squeeze(1))
        received_N1 = exchange_rows(gates_N1, send_R=send_R, receive_R=receive_R, group=self.group)
        gates_P1 = reorder_rows(received_N1, there_P=dispatch.source_P, back_N=dispatch.place_N)
        return sent._replace(gates=gates_P1.squeeze(1))

    def compute(self, sent: VisitRows) -> VisitRows:
        """Apply each slot's expert to its rows: the second stage of `forward`; rows travel here only in waves."""
        gates_P = sent.gates if self.options.gates == "activation" else None
        transfers, visit = sent.window.transfers, sent.visit
        if sent.dispatch.waves:
            out_ND = waved_block(
                sent.rows_PD,
                sent.home,
                dispatch=sent.dispatch,
                group=self.group,
                transfers=transfers,
                visit=visit,
                options=self.options,
                gates_P=gates_P,
            )
            return sent._replace(rows_PD=out_ND)
        out_PD = expert_block(
            sent.rows_PD,
            sent.home,
            groups=sent.dispatch.groups,
            transfers=transfers,
            visit=visit,
            options=self.options,
            gates_N=gates_P,
        )
        return sent._replace(rows_PD=out_PD)

    def receive(self, computed: VisitRows) -> Tensor:
        """Return rows to their sources and combine them into tokens, [T, D]: the last stage of `forward`."""
        dispatch, mapped = computed.dispatch, computed.window.mapped
        gates_TK = computed.gates if self.options.gates == "combine" else None
        if dispatch.mapped is not None and mapped is not None:
            return combine_mapped(computed.rows_PD, gates_TK, dispatch.mapped, mapped, layer=self.layer)
        returned_ND = computed.rows_PD
        if not dispatch.waves:
            out_ND = reorder_rows(returned_ND, there_P=dispatch.place_N, back_N=dispatch.source_P)
            returned_ND = exchange_rows(out_ND, send_R=dispatch.receive_R, receive_R=dispatch.send_R, group=self.group)
        if gates_TK is None:
            return sum_rows(returned_ND, token_N=dispatch.token_N, index_TK=dispatch.index_TK)
        return combine_rows(returned_ND, gates_TK, index_TK=dispatch.index_TK)

    def prepare(
        self,
        ids_TK: Tensor,
        micro_step: int,
        *,
        plan: Plan | None = None,
        swap: Swap | None = None,
        is_mapped: bool = False,
    ) -> Dispatch:
        """Make the dispatch of one micro-step ahead of its visit, on the ids' device.

        Args:
            plan: to follow, if not the window's
            swap: exchanges integers with the other ranks, for a dispatch in two levels; without it the dispatch is
                direct, and nothing is communicated
            is_mapped: for ranks that map the memory of their nodes
        """
        plan = plan or self._window_of(Visit(micro_step, "forward", self.layer)).plan
        ids_TK, _ = order_columns(ids_TK, ids_TK, order=self.options.combine_order)
        swap = swap if self.options.dispatch == "two_level" else None
        entry = (micro_step, self.layer)
        rank = self.group.rank()
        return prepare_dispatch(
            ids_TK,
            plan,
            entry,
            rank=rank,
            pad=self.pad,
            swap=swap,
            is_mapped=is_mapped,
            has_gaps=self.options.has_gaps,
        )

    def check_matched(self) -> None:
        """Raise if any row since the last check did not follow its prepared route; call before the optimizer runs."""
        mismatches = int(self.mismatches)
        self.mismatches.zero_()
        if mismatches:
            raise RoutesError(
                f"layer index {self.layer}: {mismatches} rows were routed otherwise than prepared; drop this step's "
                "gradients and replay the recorded routes, or run without prepared dispatch"
            )

    def _make_dispatch(self, ids_TK: Tensor, visit: Visit) -> Dispatch:
        """Make the dispatch of a visit with an exchange of counts. Every rank must call this."""
        window = self._window_of(visit)
        plan, split = window.plan, window.split(visit.micro_step, visit.layer, device=str(ids_TK.device))
        slots_TK = assign_slots(ids_TK, split, has_gaps=self.options.has_gaps)
        window.count(visit, ids_TK)
        cuts = window.cuts(visit, device=str(ids_TK.device)) if self.options.dispatch == "direct" else None
        send = sort_rows(slots_TK, num_ranks=self.group.size(), width=plan.home_slots + plan.slots, cuts=cuts)
        receive_RS = exchange_counts(send.count_RS, self.group)
        dispatch = build_dispatch(send, receive_RS, home_slots=plan.home_slots, pad=self.pad, cuts=cuts)
        if self.options.dispatch == "direct":
            return dispatch
        return with_relay(dispatch, nodes=window.nodes, swap=partial(all_to_all, group=self.group))

    def _check_prepared(self, prepared: Dispatch, ids_TK: Tensor, visit: Visit) -> None:
        """Count rows whose expert is not the prepared one; in checked mode compare with exchanged counts."""
        if prepared.ids_TK is None or prepared.ids_TK.shape != ids_TK.shape:
            given = None if prepared.ids_TK is None else list(prepared.ids_TK.shape)
            raise RoutesError(
                f"layer index {self.layer}: {list(ids_TK.shape)} ids came to a dispatch prepared for {given}; prepare "
                "it for this micro-step's tokens"
            )
        # On the device, without waiting: `check_matched` reads the sum.
        if ids_TK is not prepared.ids_TK:
            self.mismatches += (ids_TK != prepared.ids_TK).sum()
        if self.options.is_checked and not prepared.is_same(self._make_dispatch(ids_TK, visit)):
            raise RoutesError(
                f"layer index {self.layer}, micro-step {visit.micro_step}: the prepared dispatch is not the one that "
                "exchanged counts give; some rank replays other routes than the plan counted"
            )

    def _window_of(self, visit: Visit) -> Window:
        if visit.layer != self.layer:
            raise InfeasiblePlanError(f"layer index {self.layer} was given the visit of layer index {visit.layer}")
        if self.window is None:
            raise InfeasiblePlanError(f"layer index {self.layer} has no plan yet; call begin(window) first")
        return self.window


def check_row_bits(weights: ExpertWeights, *, pad: int, options: BlockOptions, seed: int = 0) -> None:
    """Raise if a row's output depends on its group, for groups filled to a multiple of `pad` rows.

    The deterministic mode promises that replicas do not change an output. That holds where a padded group's size and
    place do not change a row's products. This tries it on the model's own shapes; it proves nothing about others.

    Args:
        weights: home weights of one layer; the first expert is used
    """
    one = weights.map(lambda tensor: tensor.detach()[:1])
    total = pad * sum(SIZES)
    make = torch.Generator().manual_seed(seed)
    rows_ND = torch.randn((total, one.down_SDF.shape[1]), generator=make).to(one.down_SDF)

    def outputs(lengths: list[int]) -> Tensor:
        """The same expert in as many slots as there are groups."""
        slots = one.map(lambda tensor: tensor.expand(len(lengths), *tensor.shape[1:]).contiguous())
        end_S = torch.tensor(lengths, device=rows_ND.device).cumsum(0).to(torch.int32)
        return apply_experts(rows_ND, slots, end_S, options)[0]

    differing = (outputs([total]) != outputs([pad * size for size in SIZES])).any(dim=1).nonzero().flatten()
    if len(differing):
        raise TopologyError(
            f"the deterministic mode cannot be kept on {rows_ND.device} in {rows_ND.dtype} for hidden "
            f"{rows_ND.shape[1]} and expert width {one.down_SDF.shape[2]}: {len(differing)} of {total} rows have other "
            f"bits in smaller groups; turn the mode off or pad to more than {pad} rows"
        )
