"""Expert tables: the runtime's own expert block over rows and slots, forward and forward + backward.

Knows the block, weights and groups. Does not know ranks or plans.

Before a table is measured the block is compared with float64, outputs and every gradient.

Invariant (asserted by the tests): a block that computes something else is refused before it is timed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.calibrate.bench import Bench, Timing, measure
from equipoise.calibrate.grid import ZIPF, Grid, cut_rows
from equipoise.calibrate.progress import Steps
from equipoise.core.itinerary import Visit
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.dispatch import Groups
from equipoise.runtime.expert_block import BlockOptions, Products, expert_block

ERROR_LIMIT = 2e-2
"""bf16 operands land between 1e-3 and 1e-2."""
EVEN_ROWS = 65536
"""At this many rows even groups are measured too."""
VISIT = Visit(0, "forward", 0)
KEYS = ("forward_ns", "update_ns", "even_forward_ns", "even_update_ns")
"""Tables of a shape."""


class EmptyBank:
    """A bank of a rank that holds no replica."""

    def __init__(self, like: ExpertWeights) -> None:
        self._empty = ExpertWeights(*(t.detach()[:0] for t in like.tensors()))

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return zero-size tensors."""
        return self._empty

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Take nothing."""

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Add nothing."""


def random_experts(slots: int, shape: tuple[int, int], bench: Bench) -> ExpertWeights:
    """Draw `slots` experts of (hidden, width) that can have gradients."""
    hidden, width = shape
    gate_up_SFD = bench.random(slots, 2 * width, hidden, scale=hidden**-0.5).requires_grad_()
    return ExpertWeights(gate_up_SFD, bench.random(slots, hidden, width, scale=width**-0.5).requires_grad_())


def groups_of(ends_S: Tensor, rows: int) -> Groups:
    """Groups of a rank without replicas."""
    return Groups(home_end_S=ends_S, replica_end_S=ends_S[:0], num_home_rows=rows, num_replica_rows=0, num_replicas=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell's work: rows in groups, through the experts of their slots."""

    rows_ND: Tensor
    grad_ND: Tensor
    groups: Groups
    experts: ExpertWeights

    @classmethod
    def random(cls, rows: int, experts: ExpertWeights, *, zipf: float, bench: Bench) -> "Cell":
        """Draw the rows of a cell."""
        slots, hidden = experts.num_slots, experts.gate_up_SFD.shape[2]
        ends_S = torch.from_numpy(cut_rows(rows, slots, zipf=zipf)).to(bench.device)
        return cls(
            rows_ND=bench.random(rows, hidden).requires_grad_(),
            grad_ND=bench.random(rows, hidden),
            groups=groups_of(ends_S, rows),
            experts=experts,
        )

    def forward(self, *, products: Products = "grouped") -> Tensor:
        """Run the runtime's block."""
        options, bank = BlockOptions(products=products), EmptyBank(self.experts)
        return expert_block(self.rows_ND, self.experts, groups=self.groups, bank=bank, visit=VISIT, options=options)

    def update(self, *, products: Products = "grouped") -> tuple[Tensor, ...]:
        """Forward and backward; gradients are made, not accumulated."""
        leaves = (self.rows_ND, *self.experts.tensors())
        return torch.autograd.grad(self.forward(products=products), leaves, self.grad_ND)

    def to_float64(self) -> "Cell":
        """The same numbers in float64."""
        exact = ExpertWeights(*(t.detach().double().requires_grad_() for t in self.experts.tensors()))
        rows_ND = self.rows_ND.detach().double().requires_grad_()
        return Cell(rows_ND=rows_ND, grad_ND=self.grad_ND.double(), groups=self.groups, experts=exact)

    def time(self, bench: Bench) -> tuple[Timing, Timing]:
        """Time forward, and forward + backward."""

        def infer() -> Tensor:
            with torch.no_grad():
                return self.forward()

        return measure(infer, bench, warm=2), measure(self.update, bench, warm=2)


def check_block(experts: ExpertWeights, bench: Bench) -> None:
    """Raise unless the timed block computes the right numbers on uneven groups."""
    slots = experts.num_slots
    cell = Cell.random(8 * slots + 3, experts, zipf=ZIPF, bench=bench)
    exact = cell.to_float64()
    with torch.no_grad():
        pairs = [(cell.forward(), exact.forward(products="loop"))]
    pairs += list(zip(cell.update(), exact.update(products="loop"), strict=True))
    errors = [float((got.double() - wanted).norm() / wanted.norm()) for got, wanted in pairs]
    # NaN fails the comparison.
    if not max(errors) < ERROR_LIMIT:
        raise RuntimeError(f"expert block of {slots} slots: relative errors {errors} to float64, limit {ERROR_LIMIT}")


def measure_table(shape: tuple[int, int], grid: Grid, *, bench: Bench, steps: Steps) -> dict[str, Any]:
    """Fill the tables of one expert shape."""
    tables: dict[str, list[list[int | None]]] = {key: [] for key in KEYS}
    spread = 0.0
    for slots in grid.slots:
        experts = random_experts(slots, shape, bench)
        check_block(experts, bench)
        lines: dict[str, list[int | None]] = {key: [] for key in KEYS}
        for rows in grid.rows:
            forward, update = Cell.random(rows, experts, zipf=ZIPF, bench=bench).time(bench)
            even = _time_even(rows, experts, bench)
            for key, ns in zip(KEYS, (forward.median_ns, update.median_ns, *even), strict=True):
                lines[key].append(None if ns is None else round(ns))
            spread = max(spread, forward.spread, update.spread)
            steps.advance()
        for key in KEYS:
            tables[key].append(lines[key])
    return {
        "hidden": shape[0],
        "expert_width": shape[1],
        "slots": list(grid.slots),
        "rows": list(grid.rows),
        **tables,
        "spread": round(spread, 4),
        "source": f"measured, medians of {bench.runs} runs, events, L2 flushed, launches hidden; the runtime's expert "
        f"block, {str(bench.dtype).removeprefix('torch.')}, one grouped call per product; groups uneven by Zipf's law "
        f"with exponent {ZIPF:g}, even ones in the tables named so; update writes weight gradients and does not "
        "accumulate them",
    }


def _time_even(rows: int, experts: ExpertWeights, bench: Bench) -> tuple[float | None, float | None]:
    if bench.is_gpu and (rows != EVEN_ROWS or experts.num_slots == 1):
        return None, None
    forward, update = Cell.random(rows, experts, zipf=0.0, bench=bench).time(bench)
    return forward.median_ns, update.median_ns
