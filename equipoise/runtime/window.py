"""`Window`: one plan as one rank executes it, entry by entry, keyed by (micro-step, layer).

Knows the plan, the rank and the bank that moves its replicas. Does not know hidden states, and keeps no cursor: a
layer that is recomputed, or comes in pipeline order, finds the same entry again.
"""

from torch import Tensor

from equipoise.core.errors import InfeasiblePlanError
from equipoise.core.plan import Plan
from equipoise.runtime.assign import SourceSplit, slots_per_rank
from equipoise.runtime.bank import ReplicaBank
from equipoise.runtime.dispatch import PreparedDispatch, planned_counts, prepare_dispatch


class Window:
    """What the layers of one rank need of a plan. Shared by all of them."""

    def __init__(self, plan: Plan, *, rank: int, bank: ReplicaBank) -> None:
        """Take a plan into execution.

        Args:
            rank: this process's rank in the EP group
            bank: moves the replicas of this plan
        """
        if plan.persistent:
            raise InfeasiblePlanError(
                f"policy {plan.policy!r} keeps replicas for the whole window; the runtime executes plans whose "
                "replicas live for one micro-step"
            )
        self.plan, self.rank, self.bank = plan, rank, bank
        self.width = slots_per_rank(plan)
        self.arrived: dict[tuple[int, int], int] = {}
        """Rows that reached this rank, by micro-step and layer index; to be compared with the plan's."""
        self._splits: dict[tuple[int, int, str], SourceSplit] = {}

    def split(self, micro_step: int, layer: int, *, device: str) -> SourceSplit:
        """This rank's split at one entry, where the ids are; read from the plan once."""
        key = (micro_step, layer, device)
        if key not in self._splits:
            self._splits[key] = SourceSplit.of(self.plan, micro_step, layer, source=self.rank, device=device)
        return self._splits[key]

    def prepare(self, ids_TK: Tensor, micro_step: int, layer: int, *, pad: int = 1) -> PreparedDispatch:
        """Make the dispatch of one entry ahead, on the ids' device, without communication.

        Needs every route of the entry to be planned. On CPU it can run in the background; upload with `.to(device)`.
        """
        loads = self.plan.loads
        if loads.coverage_MLR is not None and not (loads.coverage_MLR == 1).all():
            raise InfeasiblePlanError(
                f"a dispatch can be prepared only where every route is known; coverage is down to "
                f"{float(loads.coverage_MLR.min()):.3f}: let the layer exchange counts"
            )
        receive_RS = planned_counts(self.plan, micro_step, layer, rank=self.rank)
        split = self.split(micro_step, layer, device=str(ids_TK.device))
        return prepare_dispatch(ids_TK, split, receive_RS, home_slots=self.plan.home_slots, pad=pad)
