"""`in_waves`: what layers take if the experts of one wave compute while the rows of another are exchanged.

`core.plan.wave_cuts` cuts every rank's rows into waves, slot by slot. A layer forward: the parts of the dispatch are
exchanged one after another; the experts of a wave begin when its part has arrived; its outputs are exchanged when all
ranks have computed it and the network is free, after all parts of the dispatch. Backward is the mirror: gradients of
outputs arrive wave by wave, each wave's input gradients are sent when they are computed, and the gradients of all
weights are computed at the end, once for all slots, beside what is left of that exchange.

Priced:
1. A wave has the rows and non-empty slots that the plan's cuts give it on each rank; with none given, waves are level.
2. Its experts cost what the table says of so few rows and slots, and all waves together no less than one call.
3. Every part of an exchange pays its fixed time. A level wave's busiest link is counted as in one wave, of its share of
   the rows: a token that crosses to a node once may cross again in the next wave. An uneven wave's part is between
   those of no rows, of a level wave and of all rows, by its rows on the rank that has most of them.
Assumed:
4. All ranks meet in every part of an exchange: none begins the next part before the slowest has ended this one.
5. Half of a rank's backward pass makes input gradients, the other half weight gradients.
6. An exchange slows the compute beside it by SLOWED_PERMILLE of its time, in the open.
Not modelled: waves of rows that ranks of a node read where they are (`TransferOptions.rows`).

Invariants (asserted by the tests):
1. Same times as the reference that moves one layer's waves one after another (`tests/cost/wave_events.py`).
2. A layer is never faster than its exchanges alone, nor than its experts alone.
3. No layer is faster for a longer wave or a longer part.
"""

from typing import NamedTuple

import numpy as np

from equipoise.cost.model import CostModel
from equipoise.cost.window import VisitNs, visit_ns

SLOWED_PERMILLE = 152
"""What an exchange takes of the compute beside it, assumed and not measured: DeepEP's kernels occupy 20 of 132
multiprocessors of an H100 by default (`Buffer.num_sms`)."""


class WaveRows(NamedTuple):
    """What every rank computes in every wave."""

    rows_MLWR: np.ndarray
    busy_MLWR: np.ndarray
    """[M, L, W, R] slots that have rows."""

    @classmethod
    def level(cls, rows_MLR: np.ndarray, busy_MLR: np.ndarray, waves: int) -> "WaveRows":
        """Give every wave the same share, rounded up."""
        whole = (-(-array[:, :, None] // waves) for array in (rows_MLR, busy_MLR))
        return cls(*(np.repeat(array, waves, axis=2) for array in whole))

    @classmethod
    def of(cls, rows_MLRS: np.ndarray, waves: int) -> "WaveRows":
        """Cut the rows of every rank as `core.plan.wave_cuts` does."""
        micro_steps, layers, ranks, slots = rows_MLRS.shape
        end_XS = np.cumsum(rows_MLRS.reshape(-1, slots), axis=1)
        begin_XS = end_XS - rows_MLRS.reshape(-1, slots)
        begin_XW = np.arange(waves + 1) * end_XS[:, -1:] // waves
        wave_XWS = np.minimum(end_XS[:, None], begin_XW[:, 1:, None]) - np.maximum(
            begin_XS[:, None], begin_XW[:, :-1, None]
        )
        found = (np.diff(begin_XW, axis=1), (wave_XWS > 0).sum(axis=2))
        return cls(*(np.ascontiguousarray(a.reshape(micro_steps, layers, ranks, waves).swapaxes(2, 3)) for a in found))


class LayerNs(NamedTuple):
    """Nanoseconds of every layer, as `work.Work` has them."""

    forward_MLR: np.ndarray
    backward_MLR: np.ndarray
    exchange_ML: np.ndarray
    tail_ML2: np.ndarray
    hidden_ML2: np.ndarray

    @classmethod
    def whole(cls, visits: VisitNs, exchange_ML: np.ndarray) -> "LayerNs":
        """Return those of one wave."""
        tail_ML2 = np.stack([exchange_ML, exchange_ML], axis=2)
        return cls(visits.forward_MLR, visits.backward_MLR, exchange_ML, tail_ML2, np.zeros_like(tail_ML2))


def in_waves(cost: CostModel, whole: VisitNs, whole_ML: np.ndarray, wave_ML: np.ndarray, rows: WaveRows) -> LayerNs:
    """Price a window in waves.

    Args:
        cost: prices of the window's stage
        whole: the same window in one wave
        whole_ML: nanoseconds of all rows on their busiest link
        wave_ML: of those of a level wave
        rows: of every wave
    """
    micro_steps, layers, waves, ranks = rows.rows_MLWR.shape
    rows_XWR, busy_XWR = (array.reshape(micro_steps * layers, waves, ranks) for array in rows)
    one = visit_ns(cost, rows_MLR=rows_XWR, busy_MLR=busy_XWR, sent_MLR=np.zeros_like(rows_XWR))
    forward_XR, backward_XR = (array.reshape(-1, ranks) for array in (whole.forward_MLR, whole.backward_MLR))
    part_XW = cost.tables(1).exchange_fixed_ns + _wire_ns(whole_ML.reshape(-1, 1), wave_ML.reshape(-1, 1), rows_XWR)
    forward = Piped.of(part_XW, _at_least(one.forward_MLR, forward_XR), np.zeros_like(forward_XR))
    inputs_XWR = _at_least(-(-one.backward_MLR // 2), -(-backward_XR // 2))
    backward = Piped.of(part_XW, inputs_XWR, backward_XR // 2)
    shape_ML, is_update = (micro_steps, layers), cost.stage == "update"
    return LayerNs(
        forward_MLR=forward.compute_XR.reshape(*shape_ML, ranks),
        backward_MLR=backward.compute_XR.reshape(*shape_ML, ranks) * is_update,
        exchange_ML=part_XW[:, 0].reshape(shape_ML),
        tail_ML2=np.stack([forward.tail_X, backward.tail_X], axis=1).reshape(*shape_ML, 2),
        hidden_ML2=np.stack([forward.hidden_X, backward.hidden_X], axis=1).reshape(*shape_ML, 2),
    )


def _wire_ns(whole_X1: np.ndarray, wave_X1: np.ndarray, rows_XWR: np.ndarray) -> np.ndarray:
    """[X, W] nanoseconds of every part's rows on the busiest link."""
    waves, most_XW = rows_XWR.shape[1], rows_XWR.max(axis=2)
    all_X1 = np.maximum(1, rows_XWR.sum(axis=1).max(axis=1))[:, None]
    # What a wave has more than its share is on the line from a level wave to all rows.
    over_XW = np.maximum(0, waves * most_XW - all_X1)
    more_XW = np.maximum(0, whole_X1 - wave_X1) * over_XW // ((waves - 1) * all_X1)
    less_XW: np.ndarray = wave_X1 * np.minimum(waves * most_XW, all_X1) // all_X1 + more_XW
    return less_XW


def _at_least(wave_XWR: np.ndarray, call_XR: np.ndarray) -> np.ndarray:
    """The same waves, the last one prolonged where all take less than one call: cutting makes nothing faster."""
    longer_XWR = wave_XWR.copy()
    longer_XWR[:, -1] += np.maximum(0, call_XR - wave_XWR.sum(axis=1))
    return longer_XWR


class Piped(NamedTuple):
    """One direction of every layer; nanoseconds."""

    compute_XR: np.ndarray
    """Experts of each rank, slowed by what is exchanged beside them."""
    tail_X: np.ndarray
    """Exchanges that the slowest rank's experts do not hide, but for the first part of the first one."""
    hidden_X: np.ndarray
    """Exchanges that they hide."""

    @classmethod
    def of(cls, part_XW: np.ndarray, wave_XWR: np.ndarray, rest_XR: np.ndarray) -> "Piped":
        """Run two exchanges, part by part, with a wave of experts between each part of the one and of the other.

        Args:
            part_XW: parts of an exchange
            wave_XWR: experts of every wave, of each rank
            rest_XR: what each rank computes after all waves, while their results are still exchanged
        """
        arrived_XW = np.cumsum(part_XW, axis=1)
        network_X, free_XR = arrived_XW[:, -1], np.zeros_like(rest_XR)
        for wave in range(part_XW.shape[1]):
            free_XR = np.maximum(free_XR, arrived_XW[:, wave, None]) + wave_XWR[:, wave]
            network_X = np.maximum(network_X, free_XR.max(axis=1)) + part_XW[:, wave]
        end_X = np.maximum(network_X, (free_XR + rest_XR).max(axis=1))
        # What runs beside the slowest rank's experts slows them.
        alone_XR = wave_XWR.sum(axis=1) + rest_XR
        exposed_X = end_X - alone_XR.max(axis=1)
        hidden_X = 2 * part_XW.sum(axis=1) - exposed_X
        slowed_X1 = (hidden_X * SLOWED_PERMILLE // 1000)[:, None]
        return cls(alone_XR + slowed_X1, exposed_X - part_XW[:, 0], hidden_X)
