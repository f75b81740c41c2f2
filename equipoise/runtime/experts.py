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

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.core.errors import InfeasiblePlanError, RoutesError, TopologyError
from equipoise.core.itinerary import Visit
from equipoise.runtime.activation import Activation
from equipoise.runtime.assign import assign_slots
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.combine import CombineOrder, combine_rows, order_columns
from equipoise.runtime.dispatch import Dispatch, build_dispatch, exchange_counts, sort_rows
from equipoise.runtime.exchange import all_to_all, exchange_rows
from equipoise.runtime.expert_block import BlockOptions, Products, expert_block
from equipoise.runtime.home import enter_home
from equipoise.runtime.prepared import PreparedDispatch, prepare_entry, with_relay
from equipoise.runtime.reorder import reorder_rows
from equipoise.runtime.row_bits import check_row_bits
from equipoise.runtime.spread import spread_rows
from equipoise.runtime.two_level import DirectWay, send_by_relay
from equipoise.runtime.window import Window

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
