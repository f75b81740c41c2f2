"""`Mover`: what brings experts where a plan says, and `Still`, the one that leaves every expert at its owner.

Knows windows as a balancer opens and closes them. `engine.TransferEngine` is the mover that moves.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from equipoise.core.errors import TransferError
from equipoise.core.itinerary import Visit
from equipoise.core.plan import Plan
from equipoise.runtime.bank import ExpertWeights, NoReplicas, ReplicaBank
from equipoise.runtime.counters import Counters
from equipoise.runtime.host_store import HostStore


class Mover(ReplicaBank, Protocol):
    """Moves experts for one EP group, window by window, and is the bank of its layers."""

    @property
    def counters(self) -> Counters:
        """What this rank's transfers moved so far."""
        ...

    def open_window(self, plan: Plan, *, with_weights: bool = True) -> None:
        """Start experts towards their homes; weights come back when the window ends, unless told otherwise."""
        ...

    def close_window(self) -> None:
        """Bring gradients and weights to their owners."""
        ...

    def canonical(self) -> AbstractContextManager[None]:
        """Hold all weights at their owners for the length of a `with` block."""
        ...

    def complete_store(self) -> HostStore:
        """Bring every expert of the model to this node's host store."""
        ...

    def suspend(self) -> None:
        """Stop all transfers, so that parameters may be moved or freed."""
        ...

    def resume(self) -> None:
        """Take the parameters where they are now, and go on."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@contextmanager
def suspended(mover: Mover) -> Iterator[None]:
    """Suspend and resume around a `with` block, also one that raises: a mover left suspended could not go on."""
    mover.suspend()
    try:
        yield
    finally:
        mover.resume()


class Still:
    """Moves nothing, shares nothing and waits for no one: every expert computes at its owner."""

    def __init__(self, homes: Sequence[ExpertWeights]) -> None:
        self._homes = homes
        self._counters = Counters()
        self._bank: ReplicaBank | None = None

    @property
    def counters(self) -> Counters:
        """Zeros."""
        return self._counters

    def open_window(self, plan: Plan, *, with_weights: bool = True) -> None:
        """Refuse a plan that has replicas."""
        if not self._homes:
            raise TransferError("no layers are attached; attach the balanced layers before a window begins")
        self._bank = NoReplicas(plan, self._homes[0])

    def close_window(self) -> None:
        """Forget the window."""
        self._bank = None

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return zero-size tensors."""
        return self._open().weights(visit)

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Check that there is nothing to return."""
        self._open().hand_in(micro_step, layer, gradients)

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Leave the gradients as they are."""
        self._open().collect_returns(micro_step, layer, gradients)

    @contextmanager
    def canonical(self) -> Iterator[None]:
        """Change nothing: weights are at their owners."""
        yield

    def complete_store(self) -> HostStore:
        """Refuse: there is no store, and every owner holds its experts."""
        raise TransferError("nothing is moved here, so there is no host store; read the experts from their parameters")

    def suspend(self) -> None:
        """Do nothing: nothing runs."""

    def resume(self) -> None:
        """Do nothing: parameters may be anywhere."""

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def _open(self) -> ReplicaBank:
        if self._bank is None:
            raise TransferError("no window is open; begin one before its layers run")
        return self._bank
