"""`Explanation`: one (micro-step, layer) of a plan, rank by rank, and what keeps it from being more level.

What binds, the first that holds:
    nothing   level to the row: no rank has more than the mean, rounded up
    node      the busiest rank is down at its node's mean: only homes or replicas across nodes could do more
    gate      no replica stands here, though slots are free: replicas would cost more than they save
    slots     above the node's mean, and every rank there that could take more has its slots full
    homes     above the node's mean though slots are free: the busiest rank has no home expert left to share, or none
              with enough rows to be worth a replica

Knows the plan alone. Does not know how it was found, nor prices beyond those the plan holds.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from equipoise.core.value import Value

if TYPE_CHECKING:
    from equipoise.core.plan import Plan

Binds = Literal["nothing", "node", "gate", "slots", "homes"]
Gate = Literal["open", "closed", "not needed", "no slots"]

_BINDS_WORDS: dict[Binds, str] = {
    "nothing": "level to the row",
    "node": "the fullest node's mean; only homes or replicas across nodes could do more",
    "gate": "replicas would cost more than they save",
    "slots": "every rank that could take more rows has its replica slots full",
    "homes": "slots are free, but the busiest rank has no home expert left whose rows are worth a replica",
}


class ReplicaRows(NamedTuple):
    """One replica and what it takes."""

    expert: int
    home: int
    rank: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Explanation(Value):
    """One decision. `str()` gives it as a table."""

    title: str
    static_R: np.ndarray
    """[R] rows of each rank with every expert at its owner."""
    home_R: np.ndarray
    """[R] the same at the plan's homes, without replicas."""
    plan_R: np.ndarray
    """[R] the same as planned."""
    node_R: np.ndarray
    replicas: tuple[ReplicaRows, ...]
    bound: int
    """Rows of the busiest rank that no split inside nodes can beat on these homes."""
    closed_ns: int
    """Predicted nanoseconds without replicas."""
    ns: int
    """Predicted nanoseconds as planned."""
    gate: Gate
    binds: Binds
    estimated_share: float

    def __str__(self) -> str:
        lines = [self.title, "", f"{'':<28}{'busiest':>12}{'mean':>12}{'skew':>9}"]
        lines += [_summary(*line) for line in self._stages()]
        lines += ["", f"Replicas: {len(self.replicas)}; gate {self.gate}. " + self._seconds()]
        lines += [f"What binds: {self.binds} ({_BINDS_WORDS[self.binds]})."]
        if self.estimated_share > 0:
            lines += [f"{self.estimated_share:.1%} of the window's rows are estimated: their routes are unknown."]
        lines += ["", f"{'rank':>5}{'node':>6}{'at owners':>12}{'at homes':>12}{'planned':>12}  replicas"]
        return "\n".join(lines + [self._rank_line(rank) for rank in range(len(self.node_R))])

    def _stages(self) -> list[tuple[str, int, float]]:
        mean = float(self.plan_R.mean())
        named = (("experts at their owners", self.static_R), ("homes, without replicas", self.home_R))
        stages = [(words, int(rows_R.max()), mean) for words, rows_R in named]
        stages.append(("planned", int(self.plan_R.max()), mean))
        return [*stages, ("bound of these homes", self.bound, mean)]

    def _seconds(self) -> str:
        planned, closed, saved = (ns / 1e6 for ns in (self.ns, self.closed_ns, self.closed_ns - self.ns))
        return f"{planned:.3f} ms as planned, {closed:.3f} ms without replicas: {saved:.3f} ms saved."

    def _rank_line(self, rank: int) -> str:
        held = "; ".join(f"expert {r.expert} of rank {r.home}: {r.rows} rows" for r in self.replicas if r.rank == rank)
        figures = f"{self.static_R[rank]:>12}{self.home_R[rank]:>12}{self.plan_R[rank]:>12}"
        return f"{rank:>5}{self.node_R[rank]:>6}{figures}  {held}".rstrip()


def explain(plan: "Plan", micro_step: int, layer: int) -> Explanation:
    """Explain one (micro-step, layer) of a plan; `layer` is its index in the window."""
    replicas = plan.replicas(micro_step, layer)
    load_E = plan.loads.total_MLE()[micro_step, layer]
    ranks, node_R, home_E = plan.cluster.ep, plan.cluster.node_array_R, plan.home_LE[layer]
    quota_ER = plan.quota_ER(micro_step, layer)
    home_R, plan_R = _by_rank(load_E, home_E, ranks), plan.rank_load_MLR[micro_step, layer]
    domain_R = np.zeros_like(node_R) if plan.cross_node else node_R
    bound = max(-(-int(home_R[domain_R == n].sum()) // int((domain_R == n).sum())) for n in set(domain_R.tolist()))
    held_R = np.bincount(np.array([r.rank for r in replicas], dtype=np.int64), minlength=ranks)
    free_R = plan.home_slots + plan.slots - np.bincount(home_E, minlength=ranks) - held_R
    return Explanation(
        title=_title(plan, micro_step, layer),
        static_R=_by_rank(load_E, plan.owner_E, ranks),
        home_R=home_R,
        plan_R=plan_R,
        node_R=node_R,
        replicas=tuple(ReplicaRows(e, int(home_E[e]), r, int(quota_ER[e, r])) for e, r in replicas),
        bound=bound,
        closed_ns=int(plan.closed_ns_ML[micro_step, layer]),
        ns=int(plan.ns_ML[micro_step, layer]),
        gate=_gate(plan, home_R, bound, used=bool(replicas)),
        binds=_binds(plan_R, free_R, domain_R, bound, used=bool(replicas)),
        estimated_share=plan.estimated_share,
    )


def _by_rank(load_E: np.ndarray, rank_E: np.ndarray, ranks: int) -> np.ndarray:
    rows_R = np.zeros(ranks, dtype=np.int64)
    np.add.at(rows_R, rank_E, load_E)
    return rows_R


def _gate(plan: "Plan", home_R: np.ndarray, bound: int, *, used: bool) -> Gate:
    if used:
        return "open"
    if home_R.max() <= bound:
        return "not needed"
    return "closed" if plan.slots else "no slots"


def _binds(plan_R: np.ndarray, free_R: np.ndarray, domain_R: np.ndarray, bound: int, *, used: bool) -> Binds:
    busiest = int(plan_R.argmax())
    if plan_R[busiest] <= -(-int(plan_R.sum()) // len(plan_R)):
        return "nothing"
    if plan_R[busiest] <= bound:
        return "node"
    takers_R = (domain_R == domain_R[busiest]) & (plan_R < bound)
    if not (free_R[takers_R] > 0).any():
        return "slots"
    return "homes" if used else "gate"


def _title(plan: "Plan", micro_step: int, layer: int) -> str:
    numbers = plan.loads.layer_numbers_L
    number = layer if numbers is None else int(numbers[layer])
    return (
        f"Micro-step {micro_step}, layer index {layer} (layer {number}) of {plan.model.name}, {plan.loads.stage}: "
        f"{plan.cluster.ep} ranks on {plan.cluster.num_ep_nodes} nodes, replica slots per rank: {plan.slots}"
    )


def _summary(words: str, busiest: int, mean: float) -> str:
    skew = busiest / mean if mean else 1.0
    return f"{words:<28}{busiest:>12}{mean:>12.1f}{skew:>9.4f}"
