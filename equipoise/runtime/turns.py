"""`Turns`: which layers a window is through with, by the visits that have been.

A layer of an update window is over when the gradients of all its micro-steps have come home, one of a recompute window
when all its micro-steps have run forward. It is said when the next visit comes: until then the layer may still read its
weights, and autograd, which accumulates gradients before it goes on to another layer, may not have done so. So the last
layer of a window is never said to be over.

Knows visits. Does not know what is done with a layer that is over.

Invariants (asserted by the tests):
1. Each layer is over at most once in a window, and only after every one of its micro-steps, in whatever order.
2. A visit that is asked for several times in a row does not end itself.
"""

from equipoise.core.itinerary import Visit
from equipoise.core.plan import Plan


class Turns:
    """How far one rank has come in one window."""

    def __init__(self, plan: Plan) -> None:
        self._ends_forward = plan.loads.stage == "recompute"
        self._left = [set(range(plan.loads.num_micro_steps)) for _ in range(plan.loads.num_layers)]
        self._ended: int | None = None
        self._at: Visit | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients of a layer that is over are complete."""
        return not self._ends_forward

    def come_to(self, visit: Visit) -> int | None:
        """Begin a visit; return the layer that is over by that."""
        if visit == self._at:
            return None
        over, self._ended, self._at = self._ended, None, visit
        if self._ends_forward and visit.phase == "forward":
            self._pass(visit.micro_step, visit.layer)
        return over

    def returned(self, micro_step: int, layer: int) -> None:
        """Note that the gradients of a micro-step are with the home, about to be accumulated."""
        self._at = None
        if not self._ends_forward:
            self._pass(micro_step, layer)

    def _pass(self, micro_step: int, layer: int) -> None:
        left = self._left[layer]
        if micro_step in left:
            left.discard(micro_step)
            self._ended = None if left else layer
