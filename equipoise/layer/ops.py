"""The autograd ops of a balanced layer: enter home weights, spread tokens, exchange, reorder and combine rows.

Each op is a typed function, and a `torch.autograd.Function` with forward beside backward. On a CUDA device with Triton
sums run as fused kernels (`triton_ops`), elsewhere in plain torch.

A token's columns are added one after the other, first to last, so its bits, and those of its gradients, depend neither
on where its rows were computed nor on the order in which they were sent.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core.errors import TransferError
from equipoise.core.plan import Visit
from equipoise.transfer.engine import LayerTransfers
from equipoise.transfer.node import ExpertWeights

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Fused kernels sum in float32, which would be a loss for float64."""


def fused_for(*tensors: Tensor, kernels: str = "triton_ops") -> ModuleType | None:
    """Return this room's module of kernels where it serves all these tensors, else None."""
    if not all(tensor.is_cuda and tensor.dtype in FUSED_DTYPES for tensor in tensors):
        return None
    return _load(kernels)


@cache
def _load(kernels: str) -> ModuleType | None:
    return None if find_spec("triton") is None else import_module(f"equipoise.layer.{kernels}")


CombineOrder = Literal["top_k", "expert"]
"""Order in which a token's contributions are added: as routed, or by ascending expert id (Megatron)."""


def order_columns(ids_TK: Tensor, gates_TK: Tensor, *, order: CombineOrder) -> tuple[Tensor, Tensor]:
    """Put ids and gates into the order in which a token's contributions are to be added.

    Returns: ids_TK, gates_TK with their columns in that order
    """
    if order == "top_k":
        return ids_TK, gates_TK
    column_TK = torch.argsort(ids_TK, dim=1, stable=True)
    return ids_TK.gather(1, column_TK), gates_TK.gather(1, column_TK)


def combine_rows(rows_ND: Tensor, gates_TK: Tensor, *, index_TK: Tensor) -> Tensor:
    """Add each token's rows, weighted by its gates, column by column.

    Sums are kept in the wider of the two dtypes: give float32 gates for float32 sums.

    Args:
        rows_ND: [N, D] experts' outputs, in sending order
        gates_TK: [T, K]
        index_TK: [T, K] place of each row in sending order

    Returns: [T, D] in the dtype of the rows
    """
    return _Combine.apply(rows_ND, gates_TK, index_TK)


def add_columns(rows_ND: Tensor, index_TK: Tensor, gates_TK: Tensor | None = None) -> Tensor:
    """Add `rows_ND[index_TK[:, k]]`, times the gates where given, for k = 0, 1, ... in that order.

    Without gates sums are kept in float32, as kernels and torch's own scatter do, and rounded once. An index one past
    the last row means that the token has no row in this column.
    """
    rows_ND = _with_zeros(rows_ND, index_TK.numel())
    fused = fused_for(rows_ND) if gates_TK is None else fused_for(rows_ND, gates_TK)
    if fused is not None:
        return fused.add_columns(rows_ND, index_TK, gates_TK)
    dtype = torch.promote_types(rows_ND.dtype, torch.float32 if gates_TK is None else gates_TK.dtype)
    total_TD = rows_ND.new_zeros((index_TK.shape[0], rows_ND.shape[1]), dtype=dtype)
    for column in range(index_TK.shape[1]):
        part_TD = rows_ND.index_select(0, index_TK[:, column])
        total_TD += part_TD if gates_TK is None else part_TD * gates_TK[:, column, None]
    return total_TD.to(rows_ND.dtype)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, gates_TK: Tensor, index_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_ND, gates_TK, index_TK)
        return add_columns(rows_ND, index_TK, gates_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_ND, gates_TK, index_TK = ctx.saved_tensors
        num_rows, rows_ND = len(rows_ND), _with_zeros(rows_ND, index_TK.numel())
        fused = fused_for(rows_ND, gates_TK)
        if fused is not None:
            grad_rows_ND, grad_gates_TK = fused.combine_backward(grad_TD, rows_ND, gates_TK, index_TK)
            return grad_rows_ND[:num_rows], grad_gates_TK, None
        grad_rows_ND, grad_gates_TK = torch.empty_like(rows_ND), torch.empty_like(gates_TK)
        for column in range(index_TK.shape[1]):
            place_T = index_TK[:, column]
            # Every row belongs to one token and column: each place is written once, but for that of no row.
            grad_rows_ND[place_T] = (grad_TD * gates_TK[:, column, None]).to(rows_ND.dtype)
            part_TD = rows_ND.index_select(0, place_T)
            grad_gates_TK[:, column] = (part_TD * grad_TD).sum(dim=1, dtype=gates_TK.dtype)
        return grad_rows_ND[:num_rows], grad_gates_TK, None


def sum_rows(rows_ND: Tensor, *, token_N: Tensor, index_TK: Tensor) -> Tensor:
    """Add each token's rows, column by column, where gates have been applied already. The mirror of `spread_rows`.

    Args:
        rows_ND: [N, D] experts' outputs, in sending order
        token_N: [N] token of each row
        index_TK: [T, K] place of each row in sending order

    Returns: [T, D]
    """
    return _Sum.apply(rows_ND, token_N, index_TK)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, token_N: Tensor, index_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_N)
        return add_columns(rows_ND, index_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        (token_N,) = ctx.saved_tensors
        return grad_TD.index_select(0, token_N), None, None


def spread_rows(hidden_TD: Tensor, *, token_N: Tensor, index_TK: Tensor) -> Tensor:
    """Copy each token once for each of its experts, in sending order. The mirror of `combine_rows`.

    Args:
        token_N: [N] token of each row, in sending order
        index_TK: [T, K] place of each row in sending order

    Returns: [N, D]
    """
    return _Spread.apply(hidden_TD, token_N, index_TK)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, token_N: Tensor, index_TK: Tensor) -> Tensor:
        ctx.save_for_backward(index_TK)
        return hidden_TD.index_select(0, token_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (index_TK,) = ctx.saved_tensors
        # Indexing's own backward would add the rows in sending order, and a token's bits would depend on it.
        return add_columns(grad_ND, index_TK), None, None


def exchange_rows(rows_ND: Tensor, *, send_R: list[int], receive_R: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to the ranks of `group` and receive theirs; all ranks must call, also with zero rows.

    Args:
        rows_ND: [sum(send_R), D] rows for rank 0, then rank 1, ...
        send_R: rows for each rank
        receive_R: rows from each rank

    Returns: [sum(receive_R), D] rows from rank 0, then rank 1, ...
    """
    # A group of one has no one to send to, and a copy of all rows is not free.
    if group.size() == 1:
        return rows_ND
    return _Exchange.apply(rows_ND, send_R, receive_R, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, send_R: list[int], receive_R: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = (receive_R, send_R, group)
        return all_to_all(rows_ND, send_R, receive_R, group)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad_ND, *ctx.back), None, None, None


def all_to_all(
    rows_ND: Tensor, send_R: list[int], receive_R: list[int], group: dist.ProcessGroup, out: Tensor | None = None
) -> Tensor:
    """Exchange the rows of a tensor outside autograd, into `out` where given; all ranks of `group` must call."""
    received_ND = rows_ND.new_empty((sum(receive_R), *rows_ND.shape[1:])) if out is None else out
    try:
        dist.all_to_all_single(received_ND, rows_ND.contiguous(), receive_R, send_R, group=group)
    except RuntimeError as error:
        raise _not_exchanged(group, error) from error
    return received_ND


def start_all_to_all(
    rows_ND: Tensor, send_R: list[int], receive_R: list[int], group: dist.ProcessGroup, out: Tensor
) -> "Exchange":
    """Begin to exchange rows, which travel while the caller goes on; all ranks must begin exchanges in one order."""
    sent_ND = rows_ND.contiguous()
    try:
        work = dist.all_to_all_single(out, sent_ND, receive_R, send_R, group=group, async_op=True)
    except RuntimeError as error:
        raise _not_exchanged(group, error) from error
    return Exchange(out, sent_ND, work, group)


class Exchange(NamedTuple):
    """Rows on their way."""

    received_ND: Tensor
    """Not to be read before `wait`."""
    sent_ND: Tensor
    """Kept until then."""
    work: Any
    group: dist.ProcessGroup

    def wait(self) -> Tensor:
        """Return what was received; on a CUDA device the current stream waits, and not the caller."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _not_exchanged(self.group, error) from error
        return self.received_ND


def _not_exchanged(group: dist.ProcessGroup, error: RuntimeError) -> TransferError:
    return TransferError(
        f"rank {group.rank()}: rows could not be exchanged with the other {group.size() - 1} ranks; look for a "
        f"rank that ended or raised before this one: {error}"
    )


def reorder_rows(rows_ND: Tensor, *, there_P: Tensor, back_N: Tensor) -> Tensor:
    """Put rows in another order, with rows of zeros where the order has more places than there are rows.

    Args:
        there_P: [P] the row at each place; N, one past the last, for a row of zeros
        back_N: [N] the place of each row

    Returns: [P, D]
    """
    return _Reorder.apply(rows_ND, there_P, back_N)


def gather_rows(rows_ND: Tensor, index_P: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `rows_ND[index_P]` outside autograd, with zeros where an index is one past the last row."""
    return torch.index_select(_with_zeros(rows_ND, index_P.numel()), 0, index_P, out=out)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, there_P: Tensor, back_N: Tensor) -> Tensor:
        ctx.save_for_backward(back_N)
        return gather_rows(rows_ND, there_P)

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None]:
        (back_N,) = ctx.saved_tensors
        # A gather by the inverse order: indexing's own backward scatters, which costs several times as much on a GPU.
        return gather_rows(grad_PD, back_N), None, None


def _with_zeros(rows_ND: Tensor, places: int) -> Tensor:
    """Append a row of zeros where there are more places than rows: some are padding, or of tokens with fewer rows."""
    if places <= rows_ND.shape[0]:
        return rows_ND
    return torch.cat([rows_ND, rows_ND.new_zeros((1, rows_ND.shape[1]))])


def enter_home(home: ExpertWeights, transfers: LayerTransfers, visit: Visit) -> ExpertWeights:
    """Let the home weights into the graph, unchanged; the gradients of their replicas are added in its backward.

    Call it *before* the layer's attention: autograd runs nodes created later first, so its backward runs after the
    attention's, and the wait for returned gradients hides behind that. Hooks and reducers on the parameters see a
    complete gradient. A hook that keeps the gradient of an entered weight sees returns added to it later.

    Args:
        home: this rank's home weights of the layer
        transfers: returns the gradients of their replicas
        visit: of the layer; its phase does not matter
    """
    return home.filled(_EnterHome.apply(transfers, visit, home, count_alone(), *home.flat()))


class _EnterHome(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transfers: LayerTransfers, visit: Visit, form: ExpertWeights, alone: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transfers, ctx.visit, ctx.form, ctx.alone = transfers, visit, form, alone
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # The experts' own backward made these gradients, so mostly no one else holds them and adding in place is safe.
        # One that is shared, or overlaps itself, is copied.
        own = tuple(
            g.clone(memory_format=torch.contiguous_format) if g._use_count() > ctx.alone or not g.is_contiguous() else g
            for g in gradients
        )
        ctx.transfers.collect_returns(ctx.visit.micro_step, ctx.visit.layer, ctx.form.filled(own))
        return None, None, None, None, *own


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counts: list[int], tensor: Tensor) -> Tensor:
        ctx.counts = counts
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.counts.append(gradient._use_count())
        return None, gradient


@cache
def count_alone() -> int:
    """How often a gradient is held that nobody else holds, which versions of torch count differently.

    Not asked at import: with a GPU, the first backward starts threads, and processes that are forked later could not
    run any. Nothing is saved for this backward, so that it may run inside a checkpointed function.
    """
    counts: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        _Count.apply(counts, torch.zeros((), requires_grad=True)).neg().backward()
    return counts[0]
