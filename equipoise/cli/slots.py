"""How many replica slots a rank can hold: what `--slots` and `--sweep slots=` are held against before any planning.

Two things bind: a rank has no use for more replicas than the experts that other ranks own, and their buffers must fit
into its device. Knows sizes. Does not know loads or plans.

Invariants (asserted by the tests):
1. The most that is allowed passes, one more is refused, and the message names value, limit, what binds and the fix.
2. Fewer than 0 slots are refused.
"""

from collections.abc import Iterable

from equipoise.core import Cluster, InfeasiblePlanError, ModelShape
from equipoise.cost.model import replica_bytes
from equipoise.planner import PlanOptions

GB = 1e9


def check_slots(slots: int | Iterable[int], *, cluster: Cluster, model: ModelShape) -> None:
    """Raise if one of the numbers of replica slots is more than a rank of the group can hold, or less than none."""
    most, binds = most_slots(cluster, model)
    usual = "One slot is the usual choice" if most else "Give --slots 0, for placement alone"
    for number in (slots,) if isinstance(slots, int) else slots:
        if number < 0:
            raise InfeasiblePlanError(f"--slots is {number}; it must be 0 (placement alone) or more")
        if number > most:
            raise InfeasiblePlanError(f"--slots is {number}; a rank can hold at most {most}: {binds}. {usual}")


def most_slots(cluster: Cluster, model: ModelShape) -> tuple[int, str]:
    """The most replica slots a rank can hold, and in words what binds."""
    owned = cluster.home_slots(model)
    others = model.experts - owned
    each = (PlanOptions().depth + 1) * replica_bytes(model, "update")
    fitting = cluster.memory_bytes // each
    if fitting >= others:
        return others, f"the model has {model.experts} experts, of which it owns {owned} at EP {cluster.ep}"
    return fitting, f"{cluster.name} has {cluster.memory_bytes / GB:.0f} GB, and a slot takes {each / GB:.2f} GB"
