"""`exposed_edges`: what publish and collect cost beyond what hides them, followed turn by turn without a clock.

One thread carries both, layer by layer, beside the layers' own work:
1. Publish of layers 0, 1, ... from the window's start on. A layer's experts wait for theirs at its first turn.
2. Collect of each layer after its last turn, in the order in which these end. The window ends when all are there.
Both pause during an all-to-all: all times here leave exchanges out. Both slow the compute beside them, which is charged
to a layer's first turn and to its last.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from equipoise.cost.window import Edges


class Turn(NamedTuple):
    """One visit of a layer, in nanoseconds of its busiest ranks."""

    layer: int
    before: int
    """Until its experts may start: attention."""
    after: int
    """From there to its end."""


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
