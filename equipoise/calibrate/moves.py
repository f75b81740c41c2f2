"""Rows on the move inside a device: received rows put slot by slot and back; tokens spread to rows and combined.

Knows the runtime's gathers. Does not know links: what one device sends another is not measured here.

Rates are bytes of rows per second, each row's bytes counted once whatever is done with them, so that the time of N rows
is N x row bytes / rate.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.calibrate.bench import Bench, measure
from equipoise.calibrate.grid import Grid
from equipoise.calibrate.progress import Steps
from equipoise.runtime.combine import combine_rows
from equipoise.runtime.reorder import reorder_rows
from equipoise.runtime.spread import spread_rows


def measure_moves(grid: Grid, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Time both kinds of moves over all sizes; the bytes of all sizes over their time."""
    num_bytes, times = 0, [0.0] * 4
    for hidden in sorted({grid.shapes[0][0], grid.shapes[-1][0]}):
        for rows in grid.moved_rows:
            num_bytes += rows * hidden * bench.dtype.itemsize
            cases = [*time_received(rows, hidden, bench), *time_sent(rows // grid.top_k, hidden, grid.top_k, bench)]
            times = [total + ns for total, ns in zip(times, cases, strict=True)]
            steps.advance()
    keys = ("received_forward", "received_update", "sent_forward", "sent_update")
    return {
        **{f"{key}_bytes_per_s": round(num_bytes / ns * 1e9) for key, ns in zip(keys, times, strict=True)},
        "source": f"measured over {' and '.join(map(str, grid.moved_rows))} rows: received rows gathered slot by slot "
        f"before the products and back after them; tokens spread to rows and rows combined, top-{grid.top_k}; update "
        "counts forward and backward; a row's bytes are counted once",
    }


def time_received(rows: int, hidden: int, bench: Bench) -> tuple[float, float]:
    """Nanoseconds of putting received rows in order and back, forward and update."""
    there_P = torch.randperm(rows, device=bench.device)
    back_N = torch.argsort(there_P)
    rows_ND = bench.random(rows, hidden).requires_grad_()

    def move() -> Tensor:
        placed_ND = reorder_rows(rows_ND, there_P=there_P, back_N=back_N)
        return reorder_rows(placed_ND, there_P=back_N, back_N=there_P)

    return _time(move, (rows_ND,), bench)


def time_sent(tokens: int, hidden: int, top_k: int, bench: Bench) -> tuple[float, float]:
    """Nanoseconds of spreading tokens to rows and combining rows to tokens, forward and update."""
    index_TK = torch.randperm(tokens * top_k, device=bench.device).view(tokens, top_k)
    token_N = torch.argsort(index_TK.reshape(-1)) // top_k
    hidden_TD = bench.random(tokens, hidden).requires_grad_()
    gates_TK = torch.rand((tokens, top_k), device=bench.device).to(bench.dtype).requires_grad_()

    def move() -> Tensor:
        rows_ND = spread_rows(hidden_TD, token_N=token_N, index_TK=index_TK)
        return combine_rows(rows_ND, gates_TK, index_TK=index_TK)

    return _time(move, (hidden_TD, gates_TK), bench)


def _time(move: Callable[[], Tensor], leaves: tuple[Tensor, ...], bench: Bench) -> tuple[float, float]:
    grad = torch.randn_like(move())

    def infer() -> Tensor:
        with torch.no_grad():
            return move()

    def update() -> tuple[Tensor, ...]:
        return torch.autograd.grad(move(), leaves, grad)

    return measure(infer, bench).median_ns, measure(update, bench).median_ns
