"""The itinerary of a window: visits in execution order, and buffers assigned ahead like registers.

Steps:
1. `visits_of` lists the (micro-step, phase, layer) visits of the execution order.
2. `assign` walks them once. A visit that needs replicas takes the buffer they are still in (its own forward visit's, if
   nothing overwrote it), else the buffer that has been idle longest, so that its pulls can start earliest.

Knows which visits need replicas. Does not know seconds.
"""

import numpy as np

from equipoise.core.itinerary import Itinerary
from equipoise.core.loads import Stage
from equipoise.planner.options import PlanOptions

FORWARD, BACKWARD = 0, 1


def visits_of(stage: Stage, micro_steps: int, layers: int, options: PlanOptions) -> np.ndarray:
    """[V, 3] visits as (micro-step, phase, layer) in execution order."""
    if stage == "recompute":
        passes = [(m, FORWARD) for m in range(micro_steps)]
    elif options.order == "1f1b":
        passes = _one_forward_one_backward(micro_steps, options.pipeline_stage, options.pipeline_stages)
    else:
        passes = [(m, phase) for m in range(micro_steps) for phase in (FORWARD, BACKWARD)]
    visits: list[tuple[int, int, int]] = []
    for micro_step, phase in passes:
        through = range(layers) if phase == FORWARD else range(layers - 1, -1, -1)
        visits.extend((micro_step, phase, layer) for layer in through)
    return np.array(visits, dtype=np.int64).reshape(-1, 3)


def _one_forward_one_backward(micro_steps: int, stage: int, stages: int) -> list[tuple[int, int]]:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards left."""
    ahead = min(stages - 1 - stage, micro_steps)
    passes = [(m, FORWARD) for m in range(ahead)]
    for m in range(micro_steps - ahead):
        passes += [(m + ahead, FORWARD), (m, BACKWARD)]
    return passes + [(m, BACKWARD) for m in range(micro_steps - ahead, micro_steps)]


def build_itinerary(stage: Stage, needs_ML: np.ndarray, options: PlanOptions) -> Itinerary:
    """Build the itinerary of a window.

    Args:
        stage: recompute or update
        needs_ML: [M, L] bool, whether any rank holds a replica there
        options: execution order and depth
    """
    micro_steps, layers = needs_ML.shape
    visits_V3 = visits_of(stage, micro_steps, layers, options)
    pulls_V = needs_ML[visits_V3[:, 0], visits_V3[:, 2]]
    buffer_V, ready_from_V, resident_V = assign(visits_V3, pulls_V, depth=options.depth)
    return Itinerary(
        depth=options.depth,
        micro_step_V=visits_V3[:, 0],
        phase_V=visits_V3[:, 1],
        layer_V=visits_V3[:, 2],
        pulls_V=pulls_V,
        buffer_V=buffer_V,
        ready_from_V=ready_from_V,
        resident_V=resident_V,
    )


def assign(visits_V3: np.ndarray, pulls_V: np.ndarray, *, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign buffers: (buffer_V, ready_from_V, resident_V)."""
    count = len(visits_V3)
    buffer_V, ready_from_V = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    resident_V = np.zeros(count, dtype=np.bool_)
    holds: list[tuple[int, int] | None] = [None] * (depth + 1)
    last_use = [-1] * (depth + 1)
    for v in np.flatnonzero(pulls_V).tolist():
        key = (int(visits_V3[v, 0]), int(visits_V3[v, 2]))
        if key in holds:
            buffer = holds.index(key)
            resident_V[v] = True
        else:
            # The buffer idle longest can be filled earliest.
            buffer = min(range(depth + 1), key=lambda b: (last_use[b], b))
            holds[buffer] = key
        buffer_V[v] = buffer
        ready_from_V[v] = v if resident_V[v] else max(last_use[buffer] + 1, v - depth, 0)
        last_use[buffer] = v
    return buffer_V, ready_from_V, resident_V
