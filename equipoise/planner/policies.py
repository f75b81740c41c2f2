"""Baselines: the balancers a user could pick instead, on the same loads, slots and cost model as the planner.

    static          contiguous expert parallelism: homes at owners, no replica
    eplb-history    EPLB placed by the previous window's loads (`eplb.py`)
    eplb-oracle     EPLB placed by this window's own loads
    lplb            fixed replica edges, a linear programme per micro-step (`lplb.py`)
    reactive        our micro plan on contiguous homes with exact loads, known only after the router. Charged as UltraEP
                    reports: 0.08 ms of planning per (micro-step, layer), 0.255 ms of weight push (the middle of 0.19 to
                    0.32) where replicas are used. Its gate knows these charges.
    reactive-free   the same with both at zero, so that weights travel for nothing: no such system can exist
    balanced        every rank has the mean load, whatever the routes: the ceiling. It takes as many slots as it likes,
                    sends a uniform all-to-all and moves no weight.

Each policy makes a `Draft`; `assemble.build_plan` checks it like any other plan. None of them is executed.

Invariants (asserted by the tests):
1. Every policy's plan is a checked `Plan` of the given loads; no row is lost.
2. `static` costs its own `static_seconds`. `reactive` is never faster than `reactive-free`.
3. No plan has a busiest rank below that of `balanced`.
"""

from collections.abc import Callable

import numpy as np

from equipoise.core import LoadMatrix
from equipoise.core.plan import Seconds
from equipoise.cost.edges import Edges
from equipoise.cost.kernels import ACROSS, COLUMNS, COMPUTE, EXCHANGE, INSIDE, PULL, RETURN
from equipoise.cost.model import interpolate
from equipoise.cost.ranks import level_links, level_slots
from equipoise.planner.assemble import NS, Draft, Task
from equipoise.planner.eplb import draft_eplb
from equipoise.planner.fast import plan_layer
from equipoise.planner.layer import LayerPlan
from equipoise.planner.lplb import draft_lplb
from equipoise.planner.pricing import count_before, fill_slots, owner_homes, price_homes

POLICIES = ("static", "eplb-history", "eplb-oracle", "lplb", "reactive", "reactive-free", "balanced")

REACTIVE_PLAN_NS = 80_000
REACTIVE_PUSH_NS = 255_000


def draft_baseline(task: Task, *, history: LoadMatrix | None) -> Draft:
    """Draft the plan of the task's policy, one of `POLICIES`.

    Args:
        task: the window
        history: the previous window's loads, which "eplb-history" needs
    """
    drafts: dict[str, Callable[[], Draft]] = {
        "static": lambda: draft_static(task),
        "eplb-history": lambda: draft_eplb(task, predictor=history),
        "eplb-oracle": lambda: draft_eplb(task, predictor=task.loads),
        "lplb": lambda: draft_lplb(task),
        "reactive": lambda: draft_reactive(task, plan_ns=REACTIVE_PLAN_NS, push_ns=REACTIVE_PUSH_NS),
        "reactive-free": lambda: draft_reactive(task, plan_ns=0, push_ns=0),
        "balanced": lambda: draft_balanced(task),
    }
    return drafts[task.policy]()


def draft_static(task: Task) -> Draft:
    """Contiguous homes, no replica."""
    home_LE = owner_homes(task)
    line_MLC = price_homes(task, home_LE)
    none_MLRS = np.zeros((*line_MLC.shape[:2], task.cluster.ep, 0), dtype=np.int64)
    return Draft(
        home_LE=home_LE,
        home_slot_LE=count_before(home_LE),
        rep_expert_MLRS=none_MLRS,
        rep_rows_MLRS=none_MLRS,
        line_MLC=line_MLC,
        closed_MLC=line_MLC,
        static_MLC=line_MLC,
        edges=Edges.none(task.model.layers),
        executable=False,
    )


def draft_reactive(task: Task, *, plan_ns: int, push_ns: int) -> Draft:
    """Our own micro plan on contiguous homes; weights are pushed in the open instead of pulled ahead."""
    made = [_react(task, layer, push_ns) for layer in range(task.model.layers)]
    home_LE = owner_homes(task)
    entries = task.loads.num_micro_steps * task.model.layers
    return Draft(
        home_LE=home_LE,
        home_slot_LE=count_before(home_LE),
        rep_expert_MLRS=np.stack([p.rep_expert_MRS for p in made], axis=1),
        rep_rows_MLRS=np.stack([p.rep_rows_MRS for p in made], axis=1),
        line_MLC=np.stack([p.line_MC for p in made], axis=1),
        closed_MLC=np.stack([p.closed_MC for p in made], axis=1),
        static_MLC=np.stack([p.static_MC for p in made], axis=1),
        edges=Edges.none(task.model.layers),
        charges=Seconds(planning=entries * plan_ns * NS),
        executable=False,
    )


def _react(task: Task, layer: int, push_ns: int) -> LayerPlan:
    """Plan one layer with every replica that levels, then keep those that pay for their push."""
    # Here, because the module of `layer_problem` needs this one.
    from equipoise.planner.plan import layer_problem

    problem = layer_problem(task, budget=0)
    # It pushes weights between ranks of one node, whatever host stores hold.
    problem, is_gated = problem._replace(domain_DR=problem.domain_DR[:1], trades_across=0, gated=0), bool(problem.gated)
    load_MRE = np.array(task.loads.load_MLRE[:, layer], order="C")
    tables = task.cost.tables(task.cluster.home_slots(task.model) + task.slots)
    none_EE = np.zeros((0, 0), dtype=np.int64)
    made = plan_layer(load_MRE, owner_homes(task)[layer], none_EE, problem, tables)
    line_MC, has_replicas_M = made.line_MC.copy(), (made.rep_rows_MRS > 0).any(axis=(1, 2))
    line_MC[:, PULL] = has_replicas_M * push_ns
    if not is_gated:
        return made._replace(line_MC=line_MC)
    opened_M, closed_M = (line[:, : RETURN + 1].sum(axis=1) for line in (line_MC, made.closed_MC))
    pays_M = has_replicas_M & (opened_M < closed_M)
    return made._replace(
        rep_expert_MRS=np.where(pays_M[:, None, None], made.rep_expert_MRS, -1),
        rep_rows_MRS=np.where(pays_M[:, None, None], made.rep_rows_MRS, 0),
        line_MC=np.where(pays_M[:, None], line_MC, made.closed_MC),
    )


def draft_balanced(task: Task) -> Draft:
    """Lay all rows of an entry end to end by expert and cut them into one equal part per rank."""
    home_LE = owner_homes(task)
    total_MLE = task.loads.total_MLE()
    quotas = [cut_evenly(total_MLE[:, layer], task.cluster.ep) for layer in range(task.model.layers)]
    expert_MLRS, rows_MLRS = fill_slots(home_LE, quotas)
    static_MLC = price_homes(task, home_LE)
    return Draft(
        home_LE=home_LE,
        home_slot_LE=count_before(home_LE),
        rep_expert_MLRS=expert_MLRS,
        rep_rows_MLRS=rows_MLRS,
        line_MLC=_price_uniform(task),
        closed_MLC=static_MLC,
        static_MLC=static_MLC,
        edges=Edges.none(task.model.layers),
        slots=task.model.experts,
        persistent=True,
        cross_node=True,
        executable=False,
    )


def cut_evenly(load_ME: np.ndarray, ranks: int) -> np.ndarray:
    """[M, E, R] rows of each expert in each of `ranks` equal parts; parts differ by at most one row."""
    end_ME = np.cumsum(load_ME, axis=1)
    start_ME = end_ME - load_ME
    cut_MR = end_ME[:, -1:] * np.arange(ranks + 1) // ranks
    high = np.minimum(end_ME[:, :, None], cut_MR[:, None, 1:])
    low = np.maximum(start_ME[:, :, None], cut_MR[:, None, :-1])
    return np.maximum(high - low, 0)


def _price_uniform(task: Task) -> np.ndarray:
    """[M, L, COLUMNS] price lines if every rank computed the mean and every source sent everyone the same."""
    cost, ranks = task.cost, task.cluster.ep
    ns_SX = cost.compute_ns_SX(task.cluster.home_slots(task.model))
    slots_ML = level_slots(task.loads.total_MLE(), ranks)
    row_MLR = task.loads.load_MLRE.sum(axis=3)
    flat = row_MLR.reshape(-1, ranks), task.cluster.node_array_R, task.model.top_k, cost.sends == "tokens"
    line_MLC = np.zeros((*row_MLR.shape[:2], COLUMNS), dtype=np.int64)
    for at, links in zip(np.ndindex(*row_MLR.shape[:2]), level_links(*flat), strict=True):
        mean = -(-int(row_MLR[at].sum()) // ranks)
        line_MLC[at][COMPUTE] = interpolate(cost.rows_X, ns_SX[slots_ML[at]], mean)
        line_MLC[at][EXCHANGE] = cost.exchange_ns(links.inside, links.across)
        line_MLC[at][[INSIDE, ACROSS]] = links.all_inside, links.all_across
    return line_MLC
