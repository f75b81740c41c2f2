"""The experts' two products over home and replica slots, forward beside backward.

Where home and replica weights are separate tensors, each product is two grouped calls; where they are joined in an
arena, one call covers both, and only the weight gradients are two. Replica weights are no autograd input: forward and
backward each ask for their own visit, because a buffer may hold something else in between; the backward hands in their
gradients. The op saves the same number of tensors on every rank, whatever its rows: a rank that saved less would leave
recomputation with early stop at another place than the others, and hang them.

`grouped_mm` wants strides of whole 16 bytes and contiguous operands; a call without rows or slots is left out.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from equipoise.core.errors import TopologyError
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Groups
from equipoise.layer.ops import fused_for
from equipoise.transfer.engine import LayerTransfers
from equipoise.transfer.node import ExpertWeights

Activation = Literal["swiglu", "gpt_oss"]
"""`swiglu`: gate is the first half, up the second; silu(gate) * up. (Qwen3, DeepSeek, GLM, Mixtral, OLMoE)
`gpt_oss`: gate and up alternate; both are clamped at 7, gate from above only, then (up + 1) * gate * sigmoid(1.702 *
gate). (gpt-oss, as in transformers' `GptOssExperts`)"""

LIMIT = 7.0
SLOPE = 1.702


def activate(pre_NF: Tensor, activation: Activation) -> Tensor:
    """Apply the activation.

    Args:
        pre_NF: [N, 2F] output of the gate_up product

    Returns: [N, F]
    """
    if activation == "swiglu":
        fused = fused_for(pre_NF)
        if fused is not None:
            return fused.swiglu(pre_NF)
        gate_NF, up_NF = pre_NF.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate_NF) * up_NF
    gate_NF, up_NF = pre_NF[:, ::2].clamp(max=LIMIT), pre_NF[:, 1::2].clamp(-LIMIT, LIMIT)
    return (up_NF + 1) * (gate_NF * torch.sigmoid(gate_NF * SLOPE))


def activate_backward(grad_NF: Tensor, pre_NF: Tensor, activation: Activation) -> Tensor:
    """Return the gradient of `activate` in its input.

    Args:
        grad_NF: [N, F] gradient of the activation's output
        pre_NF: [N, 2F] the activation's input

    Returns: [N, 2F]
    """
    if activation == "swiglu":
        fused = fused_for(grad_NF, pre_NF)
        if fused is not None:
            return fused.swiglu_backward(grad_NF, pre_NF)
        return _swiglu_backward(grad_NF, pre_NF, torch.nn.functional.silu(pre_NF.chunk(2, dim=-1)[0]))
    return _gpt_oss_backward(grad_NF, pre_NF)


def _swiglu_backward(grad_NF: Tensor, pre_NF: Tensor, silu_NF: Tensor) -> Tensor:
    """Return the gradient of swiglu in its input, given silu of its gate."""
    gate_NF, up_NF = pre_NF.chunk(2, dim=-1)
    grad_pre_NF = torch.empty_like(pre_NF)
    grad_gate_NF, grad_up_NF = grad_pre_NF.chunk(2, dim=-1)
    # The same operations as in autograd, so that a framework that uses autograd gets the same bits.
    torch.ops.aten.silu_backward.grad_input(grad_NF * up_NF, gate_NF, grad_input=grad_gate_NF)
    torch.mul(grad_NF, silu_NF, out=grad_up_NF)
    return grad_pre_NF


def _gpt_oss_backward(grad_NF: Tensor, pre_NF: Tensor) -> Tensor:
    raw_gate_NF, raw_up_NF = pre_NF[:, ::2], pre_NF[:, 1::2]
    gate_NF, up_NF = raw_gate_NF.clamp(max=LIMIT), raw_up_NF.clamp(-LIMIT, LIMIT)
    sigmoid_NF = torch.sigmoid(gate_NF * SLOPE)
    grad_gate_NF = grad_NF * (up_NF + 1) * sigmoid_NF * (1 + SLOPE * gate_NF * (1 - sigmoid_NF))
    grad_up_NF = grad_NF * gate_NF * sigmoid_NF
    # Where a clamp binds, nothing passes it.
    grad_gate_NF = grad_gate_NF.where(raw_gate_NF <= LIMIT, 0)
    grad_up_NF = grad_up_NF.where(raw_up_NF.abs() <= LIMIT, 0)
    return torch.stack([grad_gate_NF, grad_up_NF], dim=-1).flatten(-2)


def gated_backward(
    grad_NF: Tensor, pre_NF: Tensor, gates_N: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradient of a gated activation in its input, its output again, and the gradient of the gates.

    Args:
        grad_NF: [N, F] gradient of the output
        pre_NF: [N, 2F] the activation's input
        gates_N: [N] that multiply the activation; None: none do
    """
    # Plain swiglu computes silu once, for its output and for its gradient.
    silu_NF = None
    if activation == "swiglu" and fused_for(grad_NF, pre_NF) is None:
        gate_NF, up_NF = pre_NF.chunk(2, dim=-1)
        silu_NF = torch.nn.functional.silu(gate_NF)
    act_NF = activate(pre_NF, activation) if silu_NF is None else silu_NF * up_NF
    grad_gates_N = None
    if gates_N is not None:
        wide_NF = grad_NF.to(torch.promote_types(act_NF.dtype, gates_N.dtype))
        grad_gates_N = (wide_NF * act_NF).sum(dim=1).to(gates_N.dtype)
        grad_NF = (wide_NF * gates_N[:, None]).to(act_NF.dtype)
        act_NF = (act_NF * gates_N[:, None]).to(act_NF.dtype)
    if silu_NF is None:
        return activate_backward(grad_NF, pre_NF, activation), act_NF, grad_gates_N
    return _swiglu_backward(grad_NF, pre_NF, silu_NF), act_NF, grad_gates_N


Products = Literal["grouped", "loop"]
_TRACKER = ModuleTracker()
"""Never entered: only asked whether this thread runs a backward pass, which torch tells under no other public name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """How an expert computes."""

    activation: Activation = "swiglu"
    products: Products = "grouped"
    """`loop` is the reference: one product per slot, any dtype."""
    first: Literal["joined", "apart"] = "joined"
    """How gate and up are computed: by one product, or `apart` by two, whose input gradients are rounded before they
    are added, as where a framework keeps their weights in two tensors. Only for `swiglu`."""

    def __post_init__(self) -> None:
        if self.first == "apart" and self.activation != "swiglu":
            raise TopologyError(
                f"first='apart' halves gate_up, which activation={self.activation!r} interleaves; use first='joined'"
            )


def expert_block(
    rows_ND: Tensor,
    home: ExpertWeights,
    *,
    groups: Groups,
    transfers: LayerTransfers,
    visit: Visit,
    options: BlockOptions,
    gates_N: Tensor | None = None,
) -> Tensor:
    """Apply each slot's expert to the slot's rows.

    Args:
        rows_ND: [N, D] rows slot by slot, home slots first, as `groups` says
        home: this rank's home weights, as they entered the layer
        transfers: provides the replica weights and takes their gradients
        visit: of the forward
        gates_N: [N] that multiply the activation of each row; None: none do

    Returns: [N, D]
    """
    return _ExpertBlock.apply(rows_ND, gates_N, groups, transfers, visit, options, home, *home.flat())


def visit_now(visit: Visit) -> Visit:
    """Return the visit that a forward belongs to: one inside a backward is activation recomputation, a part of that."""
    return visit._replace(phase="backward") if _TRACKER.is_bw else visit


class _ExpertBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: Tensor,
        gates_N: Tensor | None,
        groups: Groups,
        transfers: LayerTransfers,
        visit: Visit,
        options: BlockOptions,
        form: ExpertWeights,
        *tensors: Tensor,
    ) -> Tensor:
        now = visit_now(visit)
        home = form.filled(tensors)
        transfers.wait_for(now)
        joined = transfers.joined(now)
        ctx.groups, ctx.transfers, ctx.visit, ctx.options, ctx.form = groups, transfers, visit, options, form
        if joined is not None:
            out_ND, pre_NF = apply_experts(rows_ND, joined, joined_ends(groups, joined), options, gates_N)
            # As many tensors as where they are apart, for the reason above.
            ctx.save_for_backward(rows_ND, gates_N, pre_NF, pre_NF[:0], *tensors)
            return out_ND
        sizes = [groups.num_home_rows, groups.num_replica_rows]
        home_ND, replica_ND = rows_ND.split(sizes)
        gates_home_N, gates_replica_N = (None, None) if gates_N is None else gates_N.split(sizes)
        out_home_ND, pre_home_NF = apply_experts(home_ND, home, groups.home_end_S, options, gates_home_N)
        # Asked for only now: the home part gives a late pull more time.
        replica = transfers.weights(now)
        # Rows past the last group's end would be left uninitialised by grouped_mm.
        assert replica.num_slots >= groups.num_replicas, "rows for replicas that were not pulled"
        held_S = groups.replica_end_S[: replica.num_slots]
        out_replica_ND, pre_replica_NF = apply_experts(replica_ND, replica, held_S, options, gates_replica_N)
        ctx.save_for_backward(rows_ND, gates_N, pre_home_NF, pre_replica_NF, *tensors)
        return torch.cat([out_home_ND, out_replica_ND]) if groups.num_replica_rows else out_home_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        rows_ND, gates_N, pre_home_NF, pre_replica_NF, *tensors = ctx.saved_tensors
        groups, visit, grad_ND = ctx.groups, ctx.visit._replace(phase="backward"), grad_ND.contiguous()
        has_training = any(ctx.needs_input_grad[7:])
        ctx.transfers.wait_for(visit)
        joined = ctx.transfers.joined(visit)
        if joined is not None:
            part = SlotRows(rows_ND, gates_N, pre_home_NF, joined, joined_ends(groups, joined))
            grad_rows_ND, grad_gates_N, own = _backward_joined(ctx, grad_ND, part, has_training=has_training)
            own_flat = [None] * len(tensors) if own is None else own.flat(ctx.form)
            return grad_rows_ND, grad_gates_N, *(None,) * 5, *own_flat
        replica = ctx.transfers.weights(visit)
        sizes = [groups.num_home_rows, groups.num_replica_rows]
        home_ND, replica_ND = rows_ND.split(sizes)
        grad_home_ND, grad_replica_ND = grad_ND.split(sizes)
        gates_home_N, gates_replica_N = (None, None) if gates_N is None else gates_N.split(sizes)
        home_part = SlotRows(home_ND, gates_home_N, pre_home_NF, ctx.form.filled(tensors), groups.home_end_S)
        assert replica.num_slots >= groups.num_replicas, "rows for replicas that were not pulled"
        held_S = groups.replica_end_S[: replica.num_slots]
        replica_part = SlotRows(replica_ND, gates_replica_N, pre_replica_NF, replica, held_S)
        # Replicas first: their gradients travel while the home part computes.
        of_replicas, returned = _apply_backward(grad_replica_ND, replica_part, ctx.options, has_training)
        if returned is not None:
            ctx.transfers.hand_in(visit.micro_step, visit.layer, returned)
        of_homes, own = _apply_backward(grad_home_ND, home_part, ctx.options, has_training)
        pairs = zip(of_homes, of_replicas, strict=True)
        grads = tuple(None if h is None else torch.cat([h, r]) if groups.num_replica_rows else h for h, r in pairs)
        return *grads, *(None,) * 5, *([None] * len(tensors) if own is None else own.flat(ctx.form))


class SlotRows(NamedTuple):
    """Some slots of a block and their rows, as backward needs them."""

    rows_ND: Tensor
    gates_N: Tensor | None
    pre_NF: Tensor
    """[N, 2F] the activation's input."""
    weights: ExpertWeights
    end_S: Tensor
    """[s] int32, where each slot's rows end."""


class Sums(NamedTuple):
    """What weight gradients are summed from, row by row."""

    grad_ND: Tensor
    grad_pre_NF: Tensor
    act_NF: Tensor
    rows_ND: Tensor


def joined_ends(groups: Groups, joined: ExpertWeights) -> Tensor:
    """Group ends of home slots and of the replica slots in use."""
    held = joined.num_slots - groups.home_end_S.numel()
    assert held >= groups.num_replicas, "rows for replicas that were not pulled"
    return torch.cat([groups.home_end_S, groups.replica_end_S[:held] + groups.num_home_rows])


def apply_experts(
    rows_ND: Tensor, weights: ExpertWeights, end_S: Tensor, options: BlockOptions, gates_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply each slot's expert to its rows, outside autograd.

    Args:
        end_S: [s] int32, where each slot's rows end
        gates_N: [N] that multiply the activation; None: none do

    Returns: the output [N, D], and the activation's input [N, 2F], which backward needs
    """
    pre_NF = _first_product(rows_ND, weights.gate_up_SFD, end_S, options)
    if weights.gate_up_bias_SF is not None:
        pre_NF = _add_bias(pre_NF, weights.gate_up_bias_SF, end_S)
    act_NF = activate(pre_NF, options.activation)
    if gates_N is not None:
        act_NF = (act_NF * gates_N[:, None]).to(act_NF.dtype)
    out_ND = _product(act_NF, weights.down_SDF.transpose(1, 2), end_S, options)
    if weights.down_bias_SD is not None:
        out_ND = _add_bias(out_ND, weights.down_bias_SD, end_S)
    return out_ND, pre_NF


def _apply_backward(
    grad_ND: Tensor, part: SlotRows, options: BlockOptions, has_training: bool
) -> tuple[tuple[Tensor, Tensor | None], ExpertWeights | None]:
    """Return the gradients of rows and gates and, where experts train, of weights."""
    # What is alive meanwhile, the activation's gradient too, is counted in `loads.memory`.
    grad_act_NF = _product(grad_ND, part.weights.down_SDF, part.end_S, options)
    grad_pre_NF, act_NF, grad_gates_N = gated_backward(grad_act_NF, part.pre_NF, part.gates_N, options.activation)
    grads = _first_backward(grad_pre_NF, part.weights.gate_up_SFD, part.end_S, options), grad_gates_N
    if not has_training:
        return grads, None
    return grads, weight_gradients(Sums(grad_ND, grad_pre_NF, act_NF, part.rows_ND), part, options)


def row_gradients(grad_ND: Tensor, part: SlotRows, options: BlockOptions) -> tuple[Tensor, Tensor | None, Sums]:
    """Return the gradients of rows and gates, and what gradients of weights are to be summed from."""
    grad_act_NF = _product(grad_ND, part.weights.down_SDF, part.end_S, options)
    grad_pre_NF, act_NF, grad_gates_N = gated_backward(grad_act_NF, part.pre_NF, part.gates_N, options.activation)
    grad_rows_ND = _first_backward(grad_pre_NF, part.weights.gate_up_SFD, part.end_S, options)
    return grad_rows_ND, grad_gates_N, Sums(grad_ND, grad_pre_NF, act_NF, part.rows_ND)


def _backward_joined(
    ctx: Any, grad_ND: Tensor, part: SlotRows, *, has_training: bool
) -> tuple[Tensor, Tensor | None, ExpertWeights | None]:
    """The same over home and replica slots in one, handing in the replicas' gradients as soon as they are computed."""
    groups, options, own = ctx.groups, ctx.options, None
    grad_act_NF = _product(grad_ND, part.weights.down_SDF, part.end_S, options)
    grad_pre_NF, act_NF, grad_gates_N = gated_backward(grad_act_NF, part.pre_NF, part.gates_N, options.activation)
    if has_training:
        sums = Sums(grad_ND, grad_pre_NF, act_NF, part.rows_ND)
        home_slots = groups.home_end_S.numel()
        cut, ends = groups.num_home_rows, groups.replica_end_S[: part.weights.num_slots - home_slots]
        # Apart, because a gradient of all slots in one would keep the replicas' memory with the parameters' gradient.
        returned = weight_gradients(Sums(*(t[cut:] for t in sums)), part._replace(end_S=ends), options)
        ctx.transfers.hand_in(ctx.visit.micro_step, ctx.visit.layer, returned)
        own = weight_gradients(Sums(*(t[:cut] for t in sums)), part._replace(end_S=groups.home_end_S), options)
    return _first_backward(grad_pre_NF, part.weights.gate_up_SFD, part.end_S, options), grad_gates_N, own


def weight_gradients(sums: Sums, part: SlotRows, options: BlockOptions) -> ExpertWeights:
    """Return the gradients of some slots' weights; of `part` only the ends count, and which weights there are."""
    weights, end_S = part.weights, part.end_S
    return ExpertWeights(
        _sum_products(sums.grad_pre_NF, sums.rows_ND, end_S, options),
        _sum_products(sums.grad_ND, sums.act_NF, end_S, options),
        None if weights.gate_up_bias_SF is None else _sum_groups(sums.grad_pre_NF, end_S, options),
        None if weights.down_bias_SD is None else _sum_groups(sums.grad_ND, end_S, options),
    )


def _first_product(rows_ND: Tensor, gate_up_SFD: Tensor, end_S: Tensor, options: BlockOptions) -> Tensor:
    """[N, 2F] what the activation gets."""
    parts = (gate_up_SFD,) if options.first == "joined" else gate_up_SFD.chunk(2, dim=1)
    products = [_product(rows_ND, part_SFD.transpose(1, 2), end_S, options) for part_SFD in parts]
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def _first_backward(grad_pre_NF: Tensor, gate_up_SFD: Tensor, end_S: Tensor, options: BlockOptions) -> Tensor:
    """[N, D] the gradient of its rows."""
    if options.first == "joined":
        return _product(grad_pre_NF, gate_up_SFD, end_S, options)
    halves = zip(grad_pre_NF.chunk(2, dim=1), gate_up_SFD.chunk(2, dim=1), strict=True)
    gate_ND, up_ND = (_product(grad_NF.contiguous(), part_SFD, end_S, options) for grad_NF, part_SFD in halves)
    return gate_ND + up_ND


def _product(rows_NX: Tensor, weights_SXY: Tensor, end_S: Tensor, options: BlockOptions) -> Tensor:
    """[N, Y] each group's rows times its slot's matrix."""
    if not rows_NX.shape[0]:
        return rows_NX.new_empty((0, weights_SXY.shape[2]))
    if options.products == "grouped":
        return torch.nn.functional.grouped_mm(rows_NX, weights_SXY, offs=end_S)
    cuts = _cuts(end_S)
    # Written where they belong, without a copy; rows behind the last group have none.
    found_NY = rows_NX.new_empty((cuts[-1].stop if cuts else 0, weights_SXY.shape[2]))
    for slot, cut in enumerate(cuts):
        torch.mm(rows_NX[cut], weights_SXY[slot], out=found_NY[cut])
    return found_NY


def _sum_products(left_NX: Tensor, right_NY: Tensor, end_S: Tensor, options: BlockOptions) -> Tensor:
    """[s, X, Y] sum over each group's rows of their outer products: a weight gradient per slot."""
    if not left_NX.shape[0] or not end_S.numel():
        return left_NX.new_zeros((end_S.numel(), left_NX.shape[1], right_NY.shape[1]))
    if options.products == "grouped":
        return torch.nn.functional.grouped_mm(left_NX.t(), right_NY, offs=end_S)
    found_SXY = left_NX.new_empty((end_S.numel(), left_NX.shape[1], right_NY.shape[1]))
    for slot, cut in enumerate(_cuts(end_S)):
        torch.mm(left_NX[cut].T, right_NY[cut], out=found_SXY[slot])
    return found_SXY


def _sum_groups(rows_NX: Tensor, end_S: Tensor, options: BlockOptions) -> Tensor:
    """[s, X] sum of each group's rows: the weight gradient of an input that is one, on the same kernel."""
    # Eight columns make a stride of 16 bytes in bf16; one would do.
    ones_NX = rows_NX.new_ones((rows_NX.shape[0], 8))
    return _sum_products(ones_NX, rows_NX, end_S, options)[:, 0].contiguous()


def _add_bias(rows_NX: Tensor, bias_SX: Tensor, end_S: Tensor) -> Tensor:
    if not rows_NX.shape[0]:
        return rows_NX
    length_S = end_S.diff(prepend=end_S.new_zeros(1))
    return rows_NX + torch.repeat_interleave(bias_SX, length_S, dim=0, output_size=rows_NX.shape[0])


def _cuts(end_S: Tensor) -> list[slice]:
    ends = end_S.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
