"""What each half of the method is worth: plans with one thing taken away, replayed by the same clock.

base only          homes move, no replica
replicas only      replicas, homes stay at their owners
both               the method
inside nodes       the method, but recompute's replicas stay in their nodes, as the update's do
placement only     its replicas, but every holder of an expert takes an equal share of its rows
split only         replicas at fixed places for the whole window, only their rows are chosen (LPLB, at no charge)
peer path alone, host path alone     inside nodes, and every pull takes the same path
0, 1, 2, 4 slots
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from benchmarks.paper_cases import Case
from equipoise.core import LoadMatrix
from equipoise.core.plan import Plan, Sends
from equipoise.planner import PlanOptions, plan

SLOTS = 2
Change = Callable[[LoadMatrix, Case], Plan]


def options_of(sends: Sends) -> PlanOptions:
    """The method: in recompute, where no gradient returns, replicas may stand in any node where that pays."""
    return PlanOptions(sends=sends, cross_node=True)


def ablations(sends: Sends) -> Iterator[tuple[str, Change]]:
    """(name, how its plan is made) for one way of crossing nodes."""
    usual, inside = options_of(sends), PlanOptions(sends=sends)
    yield "base only", _change(usual, slots=0)
    yield "replicas only", _change(replace(usual, max_displaced=0))
    yield "both", _change(usual)
    yield "inside nodes", _change(inside)
    yield "placement only", lambda loads, case: shared_evenly(_change(usual)(loads, case))
    yield "split only", lambda loads, case: uncharged(_change(usual, policy="lplb")(loads, case))
    yield "peer path alone", lambda loads, case: on_path(_change(inside)(loads, case), 0)
    yield "host path alone", lambda loads, case: on_path(_change(inside)(loads, case), 1)
    for slots in (0, 1, 2, 4):
        yield f"{slots} slots", _change(usual, slots=slots)


def _change(options: PlanOptions, *, slots: int = SLOTS, policy: str = "equipoise") -> Change:
    def made(loads: LoadMatrix, case: Case) -> Plan:
        return plan(loads, cluster=case.cluster, model=case.model, slots=slots, policy=policy, options=options)

    return made


def shared_evenly(made: Plan) -> Plan:
    """The same replicas, each holder of an expert taking an equal share of its rows."""
    table, layers, experts = made.replica_table, made.loads.num_layers, made.loads.num_experts
    key_P = table.entry_P * experts + table.expert_P
    copies = np.bincount(key_P, minlength=made.loads.num_micro_steps * layers * experts)[key_P] + 1
    rows_P = made.loads.total_MLE().reshape(-1)[key_P] // copies
    kept_P = rows_P > 0
    start_ML = np.concatenate([[0], np.cumsum(np.bincount(table.entry_P[kept_P], minlength=len(table.start_ML) - 1))])
    changed = replace(
        table,
        start_ML=start_ML,
        expert_P=table.expert_P[kept_P],
        rank_P=table.rank_P[kept_P],
        rows_P=rows_P[kept_P],
        path_P2=table.path_P2[kept_P],
    )
    return replace(made, replica_table=changed)


def on_path(made: Plan, path: int) -> Plan:
    """The same plan with every pull on one path: 0 peer, 1 host."""
    table = made.replica_table
    return replace(made, replica_table=replace(table, path_P2=np.full_like(table.path_P2, path)))


def uncharged(made: Plan) -> Plan:
    """The same plan without planning on the critical path."""
    return replace(made, seconds=replace(made.seconds, planning=0.0))
