"""`Window`: one plan as one rank executes it, entry by entry, keyed by (micro-step, layer).

Knows the plan, the rank, the bank that moves its replicas and the dispatches made ahead. Does not know hidden states,
and keeps no cursor: a layer that is recomputed, or comes in pipeline order, finds the same entry again.
"""

from equipoise.core.errors import InfeasiblePlanError
from equipoise.core.plan import Plan
from equipoise.runtime.assign import SourceSplit, slots_per_rank
from equipoise.runtime.bank import ReplicaBank
from equipoise.runtime.prepared import PreparedDispatch
from equipoise.runtime.relay import Nodes
from equipoise.runtime.traffic import Traffic
from equipoise.runtime.upload import Uploader, Ways


class Window:
    """What the layers of one rank need of a plan. Shared by all of them."""

    def __init__(self, plan: Plan, *, rank: int, bank: ReplicaBank, ways: Ways | None = None) -> None:
        """Take a plan into execution.

        Args:
            rank: this process's rank in the EP group
            bank: moves the replicas of this plan
            ways: the dispatches of all entries, on every rank or on none; None: layers make them, exchanging counts
        """
        if plan.persistent:
            raise InfeasiblePlanError(
                f"policy {plan.policy!r} keeps replicas for the whole window; the runtime executes plans whose "
                "replicas live for one micro-step"
            )
        self.plan, self.rank, self.bank = plan, rank, bank
        self.width = slots_per_rank(plan)
        self.nodes = Nodes(tuple(plan.cluster.node_R), rank)
        self.traffic = Traffic((plan.loads.num_micro_steps, plan.loads.num_layers), self.nodes)
        self._uploader = None if ways is None else Uploader(ways, plan)
        self._splits: dict[tuple[int, int, str], SourceSplit] = {}

    def split(self, micro_step: int, layer: int, *, device: str) -> SourceSplit:
        """This rank's split at one entry, where the ids are; read from the plan once."""
        key = (micro_step, layer, device)
        if key not in self._splits:
            self._splits[key] = SourceSplit.of(self.plan, micro_step, layer, source=self.rank, device=device)
        return self._splits[key]

    def prepared(self, micro_step: int, layer: int, *, device: str) -> PreparedDispatch | None:
        """One entry's dispatch where the layer computes, if dispatches are made ahead."""
        return None if self._uploader is None else self._uploader.bring((micro_step, layer), device=device)
