"""`ReplicaBank`: the seam between the balanced layer and whatever moves replica weights and their gradients.

The layer asks for weights by visit and gives gradients by (micro-step, layer), never by call order. It does not know
paths, buffers or versions; a bank does not know rows.

What the layer promises every bank, on every rank of the EP group, whatever its rows and replicas:
1. `weights` is called for the forward visit, and for the backward visit before its gradients. Under activation
   recomputation the second forward asks for the backward visit, so one visit may be asked for more than once.
2. What `weights` returned is read until the layer asks for another visit, also after it handed in this one's gradients.
3. Where experts train, `hand_in` is called once per (micro-step, layer) and `collect_returns` once, after it.
4. Slots are in the order of the plan: ascending position in the replica table.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from equipoise.core.errors import InfeasiblePlanError
from equipoise.core.plan import Plan, Visit


class ExpertWeights(NamedTuple):
    """Weights of the experts in some slots, or gradients of the same shapes. `s` counts the slots, 0 is allowed."""

    gate_up_SFD: Tensor
    """[s, 2F, D]"""
    down_SDF: Tensor
    """[s, D, F]"""
    gate_up_bias_SF: Tensor | None = None
    """[s, 2F], for models whose experts have biases"""
    down_bias_SD: Tensor | None = None
    """[s, D]"""

    @property
    def num_slots(self) -> int:
        """Experts held."""
        return int(self.gate_up_SFD.shape[0])

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that exist, in field order."""
        return (tensor for tensor in self if tensor is not None)


class ReplicaBank(Protocol):
    """Brings replica weights to this rank and takes their gradients home."""

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return this rank's replica weights at `visit`; waits until they are there.

        Returns: tensors with as many slots as the plan gives this rank replicas there; zero-size where it has none
        """
        ...

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Take the gradients of this rank's replicas and start them towards their homes.

        Waits for no home of this layer, but for a free mailbox where homes are layers behind.
        """
        ...

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Wait for what replicas of this rank's home experts returned and add it, in place, in ascending rank order.

        Args:
            gradients: [home_slots, ...] gradients that the home itself computed
        """
        ...


@runtime_checkable
class MovingBank(Protocol):
    """A bank that also brings the home weights, which may still be on their way when a layer begins."""

    def await_home(self, visit: Visit) -> None:
        """Wait until the home weights of a visit's layer are there; they stay until another layer's visit."""
        ...


@runtime_checkable
class JoiningBank(Protocol):
    """A bank that can show home and replica weights in one tensor each, so that one product covers both."""

    def joined(self, visit: Visit) -> ExpertWeights | None:
        """Return home slots and then this rank's replicas at `visit`, promised as by `weights`; None where apart."""
        ...


class NoReplicas:
    """The bank of a plan without replicas: nothing to bring, nothing to add."""

    def __init__(self, plan: Plan, like: ExpertWeights) -> None:
        """Refuse a plan that has replicas.

        Args:
            like: tensors whose shapes, dtype and device the empty weights take
        """
        if len(plan.replica_table):
            raise InfeasiblePlanError(
                f"the plan has {len(plan.replica_table)} replicas and no engine moves them; use one, or slots=0"
            )
        self._empty = ExpertWeights(*(None if tensor is None else tensor.detach()[:0] for tensor in like))

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return zero-size tensors."""
        return self._empty

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Check that there is nothing to return."""
        assert gradients.num_slots == 0, "gradients of replicas that the plan does not have"

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Leave the gradients as they are: no replica, no return."""
