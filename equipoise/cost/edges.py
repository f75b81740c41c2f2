"""The edges of a window: what publish and collect cost beyond what hides them.

One thread carries both, layer by layer, beside the layers' own work:
1. Publish of layers 0, 1, ... from the window's start on. A layer's experts wait for theirs at its first turn.
2. Collect of each layer after its last turn, in the order in which these end. The window ends when all are there.
Both use links and so stand still during an all-to-all: all times here leave exchanges out. And both slow the compute
beside them by a measured share of their own time, which is charged to a layer's first turn and to its last.

Knows nanoseconds. Does not know plans, nor where a layer's time comes from.

Invariants (asserted by the tests):
1. Nothing is free: what moves costs at least its slowdown, and no more than its own time and that.
2. Turns between a layer's first and its last do not matter.
3. More to move never costs less; more to hide behind never costs more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """One visit of a layer, in nanoseconds of its busiest ranks."""

    layer: int
    before: int
    """Until its experts may start: attention."""
    after: int
    """From there to its end."""


class Edges(NamedTuple):
    """What the layers of a window have to carry, in nanoseconds."""

    ns_2L: np.ndarray
    """[2, L] publish and collect of each layer."""
    slow_2L: np.ndarray
    """[2, L] how much longer each makes the compute beside it."""

    @classmethod
    def none(cls, layers: int) -> "Edges":
        """Nothing moves."""
        return cls(np.zeros((2, layers), dtype=np.int64), np.zeros((2, layers), dtype=np.int64))


class Exposed(NamedTuple):
    """Nanoseconds by which a window is longer for its edges."""

    publish: int
    collect: int


def exposed_edges(edges: Edges, turns: Sequence[Turn]) -> Exposed:
    """Follow the edges through a window.

    Args:
        edges: of each layer
        turns: in execution order; a window's first and last pass are enough
    """
    if not any(array.any() for array in edges):
        return Exposed(0, 0)
    (publish_L, collect_L), (slow_in_L, slow_out_L) = (array.tolist() for array in edges)
    published_L = np.cumsum(publish_L).tolist()
    first, last = first_turns(turns), last_turns(turns)
    now, waited, carried = 0, 0, sum(publish_L)
    for at, (layer, before, after) in enumerate(turns):
        late = max(0, published_L[layer] - now - before)
        waited += late
        now += before + late + after
        now += slow_in_L[layer] if first[layer] == at else 0
        if last[layer] == at:
            now += slow_out_L[layer]
            carried = max(carried, now) + collect_L[layer]
    return Exposed(waited + sum(slow_in_L), max(0, carried - now) + sum(slow_out_L))


def first_turns(turns: Sequence[Turn]) -> dict[int, int]:
    """The place of each layer's first turn."""
    return {turn.layer: at for at, turn in reversed(list(enumerate(turns)))}


def last_turns(turns: Sequence[Turn]) -> dict[int, int]:
    """The place of each layer's last turn."""
    return {turn.layer: at for at, turn in enumerate(turns)}
