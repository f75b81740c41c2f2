"""`Itinerary`: the order in which a window's replicas are needed, and the buffer each visit uses.

A *visit* is one (micro-step, phase, layer) in execution order. Replica weights live in `depth + 1` buffers shared by
all layers, assigned ahead like registers: a visit that needs replicas names its buffer, the earlier visit after which
that buffer is free, and whether the replicas are still there from the same layer's forward visit.

All ranks of the EP group share one itinerary: the pulls of a rank at a visit are the replicas its plan gives it there.
Knows no seconds and no torch.

Invariants (asserted by the tests):
1. Every (micro-step, layer) is visited exactly once per phase, backward never before forward.
2. Between a pull into a buffer and the visit that uses it, no other visit uses that buffer.
3. A pull may start only after the visit that last used its buffer, and at most `depth` visits ahead.
4. A resident visit uses the buffer that its own forward visit filled, untouched in between.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from equipoise.core.errors import InfeasiblePlanError
from equipoise.core.value import Value, frozen_array, int64_array, require_int

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Path = Literal["peer", "host"]
PATHS: tuple[Path, ...] = get_args(Path)


class Visit(NamedTuple):
    """One layer's turn in one micro-step. Under activation recomputation `backward` includes the second forward."""

    micro_step: int
    phase: Phase
    layer: int


class Pull(NamedTuple):
    """One expert brought to a replica slot ahead of a visit."""

    expert: int
    source: int
    """Home rank of the expert."""
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Itinerary(Value):
    """Visits of one window in execution order, with their buffers."""

    depth: int
    """How many visits ahead pulls may start; there are depth + 1 buffers."""
    micro_step_V: np.ndarray
    phase_V: np.ndarray
    """[V] index into PHASES."""
    layer_V: np.ndarray
    pulls_V: np.ndarray
    """[V] bool, whether any rank needs replicas at this visit."""
    buffer_V: np.ndarray
    """[V] buffer of the visit; 0 and without meaning where `pulls_V` is False."""
    ready_from_V: np.ndarray
    """[V] first visit during which the pulls may run: the buffer is free and the visit at most `depth` ahead."""
    resident_V: np.ndarray
    """[V] bool, replicas are still in the buffer from the forward visit: nothing to pull."""

    def __post_init__(self) -> None:
        names = ("micro_step_V", "phase_V", "layer_V", "buffer_V", "ready_from_V")
        for name in names:
            object.__setattr__(self, name, int64_array(name, getattr(self, name), ndim=1, error=InfeasiblePlanError))
        for name in (*names, "pulls_V", "resident_V"):
            if getattr(self, name).shape != self.micro_step_V.shape:
                raise InfeasiblePlanError(f"itinerary: {name} has a different length than micro_step_V")
        depth = require_int("itinerary: depth", self.depth, low=1, error=InfeasiblePlanError)
        object.__setattr__(self, "depth", depth)
        if len(self) and int(self.buffer_V.max()) > self.depth:
            raise InfeasiblePlanError(f"itinerary: buffer {int(self.buffer_V.max())} of {self.depth + 1} buffers")
        for name in ("pulls_V", "resident_V"):
            if getattr(self, name).dtype != np.bool_:
                raise InfeasiblePlanError(f"itinerary: {name} must be bool, got dtype {getattr(self, name).dtype}")
            object.__setattr__(self, name, frozen_array(getattr(self, name)))
        if any(len(self) and int(getattr(self, name).min()) < 0 for name in names):
            raise InfeasiblePlanError("itinerary: micro-steps, phases, layers, buffers and visits count from 0")

    def __len__(self) -> int:
        return len(self.micro_step_V)

    @property
    def num_phases(self) -> int:
        """1 where every visit is a forward one, else 2."""
        return 1 if not self.phase_V.any() else 2

    def visit(self, index: int) -> Visit:
        """The visit at a position of the execution order."""
        phase = PHASES[int(self.phase_V[index])]
        return Visit(int(self.micro_step_V[index]), phase, int(self.layer_V[index]))
