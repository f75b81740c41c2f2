"""`in_waves`: what a window takes if one wave of slots computes while the rows of another are exchanged.

`core.plan.wave_cuts` cuts every rank's slots into waves. A layer forward: the parts of the dispatch are exchanged one
after another; the experts of a wave begin when its part has arrived; its outputs are exchanged when all ranks have
computed it and the network is free, after all parts of the dispatch. Backward is the mirror: output gradients arrive
wave by wave, each wave's input gradients are sent when they are computed, and the gradients of all weights are computed
at the end, once for all slots, beside what is left of that exchange.

Assumed:
1. Waves are level: each has the same share of every rank's rows and non-empty slots, rounded up, and of every link's.
2. Every part of an exchange pays its fixed time; experts of a wave cost what the table says of so few rows and slots,
   and all waves together no less than one call.
3. Half of a rank's backward pass makes input gradients, the other half weight gradients.
4. An exchange slows the compute beside it by SLOWED_PERMILLE of its time, in the open.
Not modelled: waves of rows that ranks of a node read where they are (`TransferOptions.rows`).

Invariants (asserted by the tests):
1. Same times as the reference that moves wave by wave (`tests/cost/wave_events.py`).
2. A layer is never faster than its exchanges alone, nor than its experts alone.
3. Nothing is faster for more rows, busier slots or more bytes.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from equipoise.cost.model import CostModel
from equipoise.cost.window import visit_ns
from equipoise.cost.work import Work

SLOWED_PERMILLE = 152
"""What an exchange takes of the compute beside it, assumed and not measured: DeepEP's kernels occupy 20 of 132
multiprocessors of an H100 by default (`Buffer.num_sms`)."""


def in_waves(cost: CostModel, work: Work, waves: int) -> Work:
    """Return what the ranks do if every layer's slots are cut into waves; with one wave, the work as it is."""
    if waves == 1:
        return work
    fixed = cost.tables(1).exchange_fixed_ns
    part_ML = fixed + -(-(work.exchange_ML - fixed) // waves)
    rows_MLR, busy_MLR = -(-work.rows_MLR // waves), -(-work.busy_MLR // waves)
    one = visit_ns(cost, rows_MLR=rows_MLR, busy_MLR=busy_MLR, sent_MLR=np.zeros_like(rows_MLR))
    # A table may say that smaller calls take less together; cutting a call makes nothing faster.
    wave_MLR = np.maximum(one.forward_MLR, -(-work.forward_MLR // waves))
    inputs_MLR = np.maximum(-(-one.backward_MLR // 2), -(-work.backward_MLR // (2 * waves)))
    forward = Piped.of(part_ML, wave_MLR, np.zeros_like(wave_MLR), waves)
    backward = Piped.of(part_ML, inputs_MLR, work.backward_MLR // 2, waves)
    return replace(
        work,
        forward_MLR=forward.compute_MLR,
        backward_MLR=backward.compute_MLR if work.has_backward else work.backward_MLR,
        exchange_ML=part_ML,
        tail_ML2=np.stack([forward.tail_ML, backward.tail_ML], axis=2),
        hidden_ML2=np.stack([forward.hidden_ML, backward.hidden_ML], axis=2),
    )


class Piped(NamedTuple):
    """One direction of every (micro-step, layer): nanoseconds after the first part of the first exchange."""

    compute_MLR: np.ndarray
    """Experts of each rank, slowed by what is exchanged beside them."""
    tail_ML: np.ndarray
    """Exchanges that the slowest rank's experts do not hide, without the first part."""
    hidden_ML: np.ndarray
    """Exchanges that they hide."""

    @classmethod
    def of(cls, part_ML: np.ndarray, wave_MLR: np.ndarray, rest_MLR: np.ndarray, waves: int) -> "Piped":
        """Run waves of equal length.

        Args:
            part_ML: one part of an exchange
            wave_MLR: experts of one wave, of each rank
            rest_MLR: what each rank computes after all waves, while their results are still exchanged
            waves: how many there are
        """
        # Step 1: the end of the longest chain of parts and waves, each of which waits for the one before it. Chains of
        # a rank are longest if they leave a row of parts for the row of waves at its first or at its last wave.
        alone_MLR, part_ML1 = waves * wave_MLR + rest_MLR, part_ML[..., None]
        chain_MLR = np.maximum.reduce(
            [
                (waves + 1) * part_ML1 + wave_MLR,
                2 * part_ML1 + waves * wave_MLR,
                waves * part_ML1 + wave_MLR + rest_MLR,
                part_ML1 + alone_MLR,
            ]
        )
        network_ML, level_ML = 2 * waves * part_ML, alone_MLR.max(axis=2)
        end_ML = np.maximum(network_ML, chain_MLR.max(axis=2))
        # Step 2: what runs beside the slowest rank's experts, and what it takes of them.
        hidden_ML = network_ML + level_ML - end_ML
        slowed_ML = hidden_ML * SLOWED_PERMILLE // 1000
        return cls(alone_MLR + slowed_ML[..., None], end_ML - level_ML - part_ML, hidden_ML)
