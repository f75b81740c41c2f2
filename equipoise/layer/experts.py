"""`BalancedExperts`: the routed experts of one MoE layer under expert parallelism, as a plan says.

Knows the order of the ops and nothing of what they do inside. Does not know routers, attention or frameworks.

Steps of a forward:
1. Home weights enter (`home`), best before the layer's attention: `enter`.
2. Rows get slots (`assign`) and their way (`dispatch`); where the window has it made ahead, there is nothing to do.
3. Tokens spread into rows (`spread`), rows travel (`exchange`; or both in `two_level`) and are put slot by slot
   (`reorder`).
4. Experts compute (`expert_block`); rows travel back and combine into tokens (`combine`).

Invariants (asserted by the tests):
1. Every rank builds the same autograd graph and communicates in the same order, whatever its tokens and replicas.
2. With homes displaced, outputs and input gradients are bit-equal to static expert parallelism of the same size.
3. In the deterministic mode that also holds for outputs with replicas.
4. Plain, under both kinds of activation checkpointing and over several micro-steps, results are the same bits.
5. So they are with dispatches made ahead or in the layer, direct or in two levels.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.core.errors import InfeasiblePlanError, RoutesError, TopologyError
from equipoise.core.plan import Plan, Visit
from equipoise.layer.dispatch import (
    Dispatch,
    PreparedDispatch,
    SourceSplit,
    Uploader,
    Ways,
    assign_slots,
    build_dispatch,
    exchange_counts,
    prepare_entry,
    slots_per_rank,
    sort_rows,
    with_relay,
)
from equipoise.layer.expert_block import Activation, BlockOptions, Products, apply_experts, expert_block
from equipoise.layer.ops import (
    CombineOrder,
    all_to_all,
    combine_rows,
    enter_home,
    exchange_rows,
    order_columns,
    reorder_rows,
    spread_rows,
)
from equipoise.layer.relay import DirectWay, Nodes, send_by_relay
from equipoise.transfer.bank import ExpertWeights, ReplicaBank

# `Traffic`: the rows that reached one rank in a window, entry by entry, and the bytes it sent for them.
#
# A token sent is counted on its way there, in forward; outputs and gradients come back row by row either way.
#
# Invariants (asserted by the tests):
# 1. Where all routes are the planned ones, `arrived_ML` is the plan's load of this rank.
# 2. In two levels, `two_level across` is never more than `direct across`.


class Traffic:
    """What the layers of one rank sent and received in one window."""

    def __init__(self, shape_ML: tuple[int, int], nodes: Nodes) -> None:
        others = [rank for rank in range(len(nodes.node_R)) if rank != nodes.rank]
        self._tiers = {
            "across": [rank for rank in others if not nodes.is_near(rank)],
            "inside": [rank for rank in others if nodes.is_near(rank)],
        }
        self.arrived_ML: np.ndarray = np.full(shape_ML, -1, dtype=np.int64)
        """[M, L] rows that arrived at this rank; -1 where its layer has not run."""
        self.bytes: Counter[str] = Counter()
        """Sent by this rank: `direct` and, where rows go in two levels, `two_level`; `across` and `inside` nodes."""

    def note(self, micro_step: int, layer: int, way: Dispatch, *, row_bytes: int) -> None:
        """Count one layer's rows; a recomputed layer counts its bytes again."""
        self.arrived_ML[micro_step, layer] = sum(way.receive_R)
        self._add("direct", way.send_R, row_bytes)
        if way.relay is not None:
            self._add("two_level", way.relay.copies_R, row_bytes)
            self._add("two_level", way.relay.inner_send_R, row_bytes)

    def _add(self, name: str, sent_R: list[int], row_bytes: int) -> None:
        for tier, ranks in self._tiers.items():
            self.bytes[f"{name} {tier}"] += row_bytes * sum(sent_R[rank] for rank in ranks)


# `Window`: one plan as one rank executes it, entry by entry, keyed by (micro-step, layer).


class Window:
    """What the layers of one rank need of a plan. Shared by all of them."""

    def __init__(self, plan: Plan, *, rank: int, bank: ReplicaBank, ways: Ways | None = None) -> None:
        """Take a plan into execution.

        Args:
            rank: this process's rank in the EP group
            bank: moves the replicas of this plan
            ways: the dispatches of all entries, on every rank or on none; None: layers make them, exchanging counts
        """
        if plan.persistent:
            raise InfeasiblePlanError(
                f"policy {plan.policy!r} keeps replicas for the whole window; the runtime executes plans whose "
                "replicas live for one micro-step"
            )
        self.plan, self.rank, self.bank = plan, rank, bank
        self.width = slots_per_rank(plan)
        self.nodes = Nodes(tuple(plan.cluster.node_R), rank)
        self.traffic = Traffic((plan.loads.num_micro_steps, plan.loads.num_layers), self.nodes)
        self._uploader = None if ways is None else Uploader(ways, plan)
        self._splits: dict[tuple[int, int, str], SourceSplit] = {}

    def split(self, micro_step: int, layer: int, *, device: str) -> SourceSplit:
        """This rank's split at one entry, where the ids are; read from the plan once."""
        key = (micro_step, layer, device)
        if key not in self._splits:
            self._splits[key] = SourceSplit.of(self.plan, micro_step, layer, source=self.rank, device=device)
        return self._splits[key]

    def prepared(self, micro_step: int, layer: int, *, device: str) -> PreparedDispatch | None:
        """One entry's dispatch where the layer computes, if dispatches are made ahead."""
        return None if self._uploader is None else self._uploader.bring((micro_step, layer), device=device)


# The start-up check of the deterministic mode: does this machine give a row the same bits in every group?
#
# The mode promises that replicas do not change an output. That holds where a padded group's size and place do not
# change
# a row's products. This file tries it on the model's own shapes and refuses the mode where it fails. It proves nothing
# about sizes it did not try.
#
# Invariant (asserted by the tests): a backend whose bits depend on the group's size is refused.


SIZES = (1, 2, 3, 5, 9, 17, 33)
"""Group sizes tried, in multiples of the padding."""


def check_row_bits(weights: ExpertWeights, *, pad: int, options: BlockOptions, seed: int = 0) -> None:
    """Raise if a row's output depends on its group, for groups filled to a multiple of `pad` rows.

    Args:
        weights: home weights of one layer; the first expert is used
    """
    one = ExpertWeights(*(None if tensor is None else tensor.detach()[:1] for tensor in weights))
    total = pad * sum(SIZES)
    make = torch.Generator().manual_seed(seed)
    rows_ND = torch.randn((total, one.down_SDF.shape[1]), generator=make).to(one.down_SDF)
    together_ND = _outputs(rows_ND, one, [total], options)
    apart_ND = _outputs(rows_ND, one, [pad * size for size in SIZES], options)
    differing = (together_ND != apart_ND).any(dim=1).nonzero().flatten()
    if len(differing):
        raise TopologyError(
            f"the deterministic mode cannot be kept on {rows_ND.device} in {rows_ND.dtype} for hidden "
            f"{rows_ND.shape[1]} and expert width {one.down_SDF.shape[2]}: {len(differing)} of {total} rows have other "
            f"bits in smaller groups; turn the mode off or pad to more than {pad} rows"
        )


def _outputs(rows_ND: Tensor, one: ExpertWeights, lengths: list[int], options: BlockOptions) -> Tensor:
    """The same expert in as many slots as there are groups."""
    slots = ExpertWeights(*(None if t is None else t.expand(len(lengths), *t.shape[1:]).contiguous() for t in one))
    end_S = torch.tensor(lengths, device=rows_ND.device).cumsum(0).to(torch.int32)
    return apply_experts(rows_ND, slots, end_S, options)[0]


DETERMINISTIC_PAD = 96
"""Rows that groups are filled up to. Products in fp32 on CPU give a row other bits where a block of rows is not full;
blocks differ with the processor's instructions and the experts' shape, and 96 fills those of AVX-512 and of AVX2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """How a layer computes; the same for all layers of a model."""

    activation: Activation = "swiglu"
    combine_order: CombineOrder = "top_k"
    """`top_k`: transformers and this package; `expert`: Megatron."""
    is_deterministic: bool = False
    """Pad groups so that an output's bits do not depend on replicas; refused where that does not suffice."""
    products: Products = "grouped"
    dispatch: Literal["direct", "two_level"] = "direct"
    """`direct` sends a token once for each of its experts; `two_level` once to each node, and then inside it."""
    is_checked: bool = False
    """Exchange counts also where a dispatch is prepared, and compare."""

    @property
    def pad(self) -> int:
        """Groups are filled to a multiple of this many rows."""
        return DETERMINISTIC_PAD if self.is_deterministic else 1

    @property
    def block(self) -> BlockOptions:
        """The part that concerns the experts' products."""
        return BlockOptions(activation=self.activation, products=self.products)


class BalancedExperts(nn.Module):
    """The routed experts of one layer that have their home on this rank, and the rows of all."""

    def __init__(
        self, home: ExpertWeights, *, layer: int, group: dist.ProcessGroup, options: LayerOptions | None = None
    ) -> None:
        """Keep this rank's home experts as parameters.

        Args:
            home: [home_slots, ...] weights, in slot order
            layer: the layer's index in plans
            group: the expert-parallel group
        """
        super().__init__()
        self.options = options or LayerOptions()
        self.layer, self.group = layer, group
        self.window: Window | None = None
        for name, tensor in zip(("gate_up", "down", "gate_up_bias", "down_bias"), home, strict=True):
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor))
        device = None if home.gate_up_SFD.is_meta else home.gate_up_SFD.device
        self.register_buffer("mismatches", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        _check_strides(home, layer=layer, products=self.options.products)
        if self.options.is_deterministic and not home.gate_up_SFD.is_meta:
            check_row_bits(home, pad=self.options.pad, options=self.options.block)

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
        return enter_home(self.home, self._window_of(visit).bank, visit)

    def forward(
        self,
        hidden_TD: Tensor,
        ids_TK: Tensor,
        gates_TK: Tensor,
        visit: Visit,
        *,
        home: ExpertWeights | None = None,
        prepared: PreparedDispatch | None = None,
    ) -> Tensor:
        """Apply the routed experts; all ranks of the EP group must call, also without tokens.

        Args:
            hidden_TD: [T, D] hidden states of this rank's tokens
            ids_TK: [T, K] the experts they use, replayed or freshly routed
            gates_TK: [T, K] their weights
            visit: the layer's turn, captured outside any checkpointed function
            home: what `enter` returned; entered here if left out
            prepared: this entry's dispatch, made ahead for `ids_TK`; left out, the window's own, and where it has none
                the dispatch is made here, with an exchange of counts

        Returns: [T, D]
        """
        window = self._window_of(visit)
        home = home or self.enter(visit)
        ids_TK, gates_TK = order_columns(ids_TK, gates_TK, order=self.options.combine_order)
        way = self._way(ids_TK, visit, prepared)
        window.traffic.note(*entry_of(visit), way, row_bytes=hidden_TD.shape[1] * hidden_TD.element_size())
        received_ND = self._send(hidden_TD, way)
        buffer_PD = reorder_rows(received_ND, there_P=way.source_P, back_N=way.place_N)
        out_PD = expert_block(
            buffer_PD, home, groups=way.groups, bank=window.bank, visit=visit, options=self.options.block
        )
        out_ND = reorder_rows(out_PD, there_P=way.place_N, back_N=way.source_P)
        returned_ND = exchange_rows(out_ND, send_R=way.receive_R, receive_R=way.send_R, group=self.group)
        return combine_rows(returned_ND, gates_TK, index_TK=way.index_TK)

    def prepare(self, ids_TK: Tensor, micro_step: int) -> PreparedDispatch:
        """Make a direct dispatch of one micro-step ahead of its turn, on the ids' device, without communication."""
        window = self._window_of(Visit(micro_step, "forward", self.layer))
        ids_TK, _ = order_columns(ids_TK, ids_TK, order=self.options.combine_order)
        return prepare_entry(ids_TK, window.plan, (micro_step, self.layer), rank=window.rank, pad=self.options.pad)

    def check_matched(self) -> None:
        """Raise if any row since the last check did not follow its prepared route; call before the optimizer runs."""
        mismatches = int(self.mismatches)
        self.mismatches.zero_()
        if mismatches:
            raise RoutesError(
                f"layer index {self.layer}: {mismatches} rows were routed otherwise than prepared; drop this step's "
                "gradients and replay the recorded routes, or run without prepared dispatch"
            )

    def _way(self, ids_TK: Tensor, visit: Visit, given: PreparedDispatch | None) -> Dispatch:
        """The way of the rows: given, made ahead by the window, or made here."""
        prepared = given or self._window_of(visit).prepared(*entry_of(visit), device=str(ids_TK.device))
        return self._dispatch(ids_TK, visit) if prepared is None else self._matched(prepared, ids_TK, visit)

    def _dispatch(self, ids_TK: Tensor, visit: Visit) -> Dispatch:
        window = self._window_of(visit)
        slots_TK = assign_slots(ids_TK, window.split(*entry_of(visit), device=str(ids_TK.device)))
        send = sort_rows(slots_TK, num_ranks=self.group.size(), width=window.width)
        receive_RS = exchange_counts(send.count_RS, self.group)
        way = build_dispatch(send, receive_RS, home_slots=window.plan.home_slots, pad=self.options.pad)
        if self.options.dispatch == "direct":
            return way
        return with_relay(way, nodes=window.nodes, swap=partial(all_to_all, group=self.group))

    def _send(self, hidden_TD: Tensor, way: Dispatch) -> Tensor:
        """Bring tokens, as rows, to the ranks that compute them."""
        if way.relay is None:
            rows_ND = spread_rows(hidden_TD, token_N=way.token_N, index_TK=way.index_TK)
            return exchange_rows(rows_ND, send_R=way.send_R, receive_R=way.receive_R, group=self.group)
        direct = DirectWay(way.index_TK, way.send_R, way.receive_R)
        return send_by_relay(hidden_TD, way.relay, direct=direct, group=self.group)

    def _matched(self, prepared: PreparedDispatch, ids_TK: Tensor, visit: Visit) -> Dispatch:
        if prepared.ids_TK.shape != ids_TK.shape:
            raise RoutesError(
                f"layer index {self.layer}: {list(ids_TK.shape)} ids came to a dispatch prepared for "
                f"{list(prepared.ids_TK.shape)}; prepare it for this micro-step's tokens"
            )
        self.mismatches += prepared.count_mismatches(ids_TK)
        if self.options.is_checked and not prepared.dispatch.is_same_way(self._dispatch(ids_TK, visit)):
            raise RoutesError(
                f"layer index {self.layer}, micro-step {visit.micro_step}: the prepared dispatch is not the one that "
                "exchanged counts give; some rank replays other routes than the plan counted"
            )
        return prepared.dispatch

    def _window_of(self, visit: Visit) -> Window:
        if visit.layer != self.layer:
            raise InfeasiblePlanError(f"layer index {self.layer} was given the visit of layer index {visit.layer}")
        if self.window is None:
            raise InfeasiblePlanError(f"layer index {self.layer} has no plan yet; call begin(window) first")
        return self.window


def entry_of(visit: Visit) -> tuple[int, int]:
    """The (micro-step, layer) of a visit, by which windows keep what belongs to it."""
    return visit.micro_step, visit.layer


def _check_strides(home: ExpertWeights, *, layer: int, products: Products) -> None:
    width, hidden = home.down_SDF.shape[2], home.down_SDF.shape[1]
    step = 16 // home.down_SDF.element_size()
    if products == "grouped" and (width % step or hidden % step):
        raise TopologyError(
            f"layer index {layer}: grouped products need hidden and expert width in multiples of {step} for "
            f"{home.down_SDF.dtype}, got {hidden} and {width}; use products='loop'"
        )
