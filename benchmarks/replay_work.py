"""What every rank has to do in a replayed step: from real traces over plans to rows per slot, pulls and returns.

Knows traces, plans and the price of an all-to-all. Needs no GPU; `benchmarks/rank_replay.py` runs the work on one.

How a case is made:
1. Micro-steps of 4,096 tokens of a real trace, dealt to the ranks, and loads multiplied (`traces.scaled`) until a rank
   has about 8,500 tokens: the traces' own routing pattern at a size they lack.
2. All of its layers. Where a trace is named "stacked" its layers are composed (`traces.stacked`).
3. One window per policy, planned for the update stage; forward alone is timed under the same plan.
4. Some micro-steps of the window, and some of its layers, evenly spread, are run; what a window's edges cost, as far as
   nothing hides it, is shared out over all of its micro-steps and layers.

Two ceilings: `balanced` is the planner's policy of that name: all rows of a layer, expert by expert, cut into equal
parts, one per rank, so that groups are as uneven as the experts are. `balanced, even` is the run with forced routing
that people make for comparison: every home slot of every rank has the same rows, which no placement of real experts can
give and the kernels like best.

Invariants (asserted by the tests):
1. Under every policy the rows of all ranks and slots are the loads', whatever was moved.
2. Every pull belongs to a slot beyond the homes; every returned gradient is added once.
3. A saved file gives the same work back.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner_rows import ROWS, cluster_of
from benchmarks.traces import Trace, joined, read_traces, scaled, stacked
from equipoise.core import LoadMatrix, ModelShape
from equipoise.core.plan import Plan
from equipoise.cost import CostModel
from equipoise.cost.kernels import COLUMNS, EXCHANGE
from equipoise.cost.window import price_level
from equipoise.cost.work import REACTIVE_PLAN_NS, REACTIVE_PUSH_NS
from equipoise.planner import plan
from tests.cost.reference import exchange

POLICIES = ("static", "eplb-oracle", "reactive", "equipoise", "balanced")
EVEN = "balanced, even"
MICRO_STEP_TOKENS = 4096
SLOTS = 2
WINDOW = 8
"""Micro-steps that are planned."""
RUN = (1, 6)
"""Micro-steps of the window that are run."""
LAYERS = 3
"""Layers of the window that are run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trace on a model's expert shape and an EP group."""

    trace: str
    """ "ESFT" (four text domains, two micro-steps each) or "gpt-oss-20b" """
    stack: int
    """Layers laid side by side; 1 for the trace as it is."""
    model: str
    """Preset whose hidden size, expert width and attention are used."""
    ranks: int
    factor: int
    """Loads are multiplied by this."""

    @property
    def name(self) -> str:
        """One line for tables."""
        layers = self.trace if self.stack == 1 else f"{self.trace} stacked x{self.stack}"
        return f"{layers}, {self.model} shape, EP{self.ranks}"

    @property
    def tokens(self) -> int:
        """Tokens of one rank in one micro-step."""
        return MICRO_STEP_TOKENS * self.factor // self.ranks


CASES = (
    Case(trace="ESFT", stack=1, model="deepseek-v2-lite", ranks=8, factor=17),
    Case(trace="gpt-oss-20b", stack=1, model="gpt-oss-20b", ranks=8, factor=17),
    Case(trace="gpt-oss-20b", stack=2, model="glm-4.5-air", ranks=16, factor=33),
    Case(trace="ESFT", stack=2, model="qwen3-30b-a3b", ranks=16, factor=33),
    Case(trace="ESFT", stack=1, model="olmoe", ranks=8, factor=19),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWork:
    """What every rank does under one policy, for the micro-steps that are run."""

    rows_MLRS: np.ndarray
    """[M, L, R, S] rows of each slot, homes first; slots that a rank does not hold have -1."""
    homes_MLR: np.ndarray
    """[M, L, R] slots whose weights stay for the window; the slots behind them are pulled."""
    host_MLR2: np.ndarray
    """[M, L, R, 2] pulls from host memory, for forward and for backward."""
    peer_MLR2: np.ndarray
    sent_MLR: np.ndarray
    """[M, L, R] replica gradients that the rank returns."""
    added_MLR: np.ndarray
    """[M, L, R] returned gradients that the rank adds to its own."""
    exchange_ns_ML: np.ndarray
    """[M, L] modelled all-to-all of an update; forward alone is half of it."""
    charge_ns: np.ndarray
    """[3] modelled, per (micro-step, layer): exposed share of the window's edges, planning and push in the open."""

    @property
    def row_MLR(self) -> np.ndarray:
        """[M, L, R] rows that each rank computes."""
        return np.maximum(self.rows_MLRS, 0).sum(axis=3)

    @property
    def busy_MLR(self) -> np.ndarray:
        """[M, L, R] slots with rows."""
        return (self.rows_MLRS > 0).sum(axis=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseWork:
    """A case and the work of each policy."""

    case: Case
    tokens: int
    """Tokens of one rank in one micro-step."""
    top_k: int
    policies: dict[str, PolicyWork]


def build_case(case: Case) -> CaseWork:
    """Plan a case under every policy and write down each rank's work."""
    loads, model = loads_of(case)
    cluster = cluster_of(case.ranks)
    cost = CostModel.of(cluster, model)
    plans = {
        name: plan(loads, cluster=cluster, model=model, slots=SLOTS, policy=name, options=ROWS) for name in POLICIES
    }
    policies = {name: policy_work(made, cost) for name, made in plans.items() if name != "balanced"}
    policies["balanced"] = resting_work(plans["balanced"], cost, cut_rows_MLRS(plans["balanced"]))
    policies[EVEN] = resting_work(plans["balanced"], cost, even_rows_MLRS(plans["balanced"]))
    return CaseWork(case=case, tokens=case.tokens, top_k=model.top_k, policies=policies)


def loads_of(case: Case) -> tuple[LoadMatrix, ModelShape]:
    """Count the loads of a case, and name the model they are for."""
    parts = [_traced(trace, case) for trace in read_traces() if trace.name.startswith(case.trace)]
    loads = scaled(joined([part for part, _ in parts]), case.factor)
    window = LoadMatrix(loads.load_MLRE[:WINDOW])
    experts, top_k = parts[0][1].experts, parts[0][1].top_k
    model = ModelShape.preset(case.model, experts=experts, top_k=top_k, layers=window.num_layers)
    return window, model


def _traced(trace: Trace, case: Case) -> tuple[LoadMatrix, ModelShape]:
    used = trace if case.stack == 1 else stacked(trace, case.stack * trace.model.experts)
    return used.loads(case.ranks, tokens=MICRO_STEP_TOKENS, micro_steps=WINDOW), used.model


def run_entries(made: Plan) -> list[tuple[int, int]]:
    """(micro-step, layer) of everything that is run."""
    layers = np.linspace(0, made.loads.num_layers - 1, min(LAYERS, made.loads.num_layers)).astype(int).tolist()
    return [(m, layer) for m in RUN for layer in layers]


def policy_work(made: Plan, cost: CostModel) -> PolicyWork:
    """Read every rank's work off a plan."""
    entries = [entry_work(made, cost, m, layer) for m, layer in run_entries(made)]
    arrays = {key: _by_entry([entry[key] for entry in entries]) for key in entries[0]}
    return PolicyWork(**arrays, charge_ns=charges_of(made))


def entry_work(made: Plan, cost: CostModel, micro_step: int, layer: int) -> dict[str, np.ndarray]:
    """The work of all ranks in one (micro-step, layer)."""
    ranks, width = made.cluster.ep, made.home_slots + made.slots
    quota_ER = made.quota_ER(micro_step, layer)
    rows_RS = np.full((ranks, width), -1, dtype=np.int64)
    homes_R = np.bincount(made.home_LE[layer], minlength=ranks)
    rows_RS[made.home_LE[layer], made.home_slot_LE[layer]] = quota_ER[np.arange(len(quota_ER)), made.home_LE[layer]]
    next_R = np.where(rows_RS >= 0, np.arange(1, width + 1), 0).max(axis=1)
    host_R2, peer_R2 = np.zeros((ranks, 2), dtype=np.int64), np.zeros((ranks, 2), dtype=np.int64)
    sent_R, added_R = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    table, entry = made.replica_table, made._entry(micro_step, layer)
    for at in range(entry.start, entry.stop):
        rank, expert = int(table.rank_P[at]), int(table.expert_P[at])
        rows_RS[rank, next_R[rank]] = table.rows_P[at]
        next_R[rank] += 1
        if made.persistent:
            continue
        host_R2[rank] += table.path_P2[at]
        peer_R2[rank] += 1 - table.path_P2[at]
        sent_R[rank] += 1
        added_R[made.home_LE[layer, expert]] += 1
    line = np.zeros(COLUMNS, dtype=np.int64)
    node_R = made.cluster.node_array_R
    exchange(made.split_RER(micro_step, layer), node_R, np.full(node_R.max() + 1, 1000), cost.tables(width), line)
    return {
        "rows_MLRS": rows_RS,
        "homes_MLR": next_R.copy() if made.persistent else homes_R,
        "host_MLR2": host_R2,
        "peer_MLR2": peer_R2,
        "sent_MLR": sent_R,
        "added_MLR": added_R,
        "exchange_ns_ML": line[EXCHANGE],
    }


def even_rows_MLRS(made: Plan) -> np.ndarray:
    """[M, L, R, S] the mean load of every rank, even over its home slots."""
    slots = made.cluster.ep * made.home_slots
    total_MLE = made.loads.total_MLE()
    total_ML1 = _by_entry([total_MLE[entry].sum(keepdims=True) for entry in run_entries(made)])
    # Whole rows: the first slots of all ranks take what is left over.
    flat = total_ML1 // slots + (np.arange(slots) < total_ML1 % slots)
    return np.ascontiguousarray(flat.reshape(*flat.shape[:2], made.home_slots, made.cluster.ep).swapaxes(2, 3))


def cut_rows_MLRS(made: Plan) -> np.ndarray:
    """[M, L, R, S] the quotas of `balanced`; a rank holds the experts it has rows of, and no others."""
    quota_MLRE = _by_entry([made.quota_ER(*entry).T for entry in run_entries(made)])
    # Descending, so that slots in use come first.
    ordered = -np.sort(-quota_MLRE, axis=3)[..., : int((quota_MLRE > 0).sum(axis=3).max())]
    return np.where(ordered > 0, ordered, -1)


def resting_work(made: Plan, cost: CostModel, rows_MLRS: np.ndarray) -> PolicyWork:
    """The work of a ceiling: these rows, a uniform all-to-all, and no weight ever moves."""
    none_MLR = np.zeros(rows_MLRS.shape[:3], dtype=np.int64)
    # Of the entries that are run: micro-steps have unequal sizes, so the window's mean is another figure.
    line_MLC = price_level(cost, made.loads)
    return PolicyWork(
        rows_MLRS=rows_MLRS,
        homes_MLR=(rows_MLRS >= 0).sum(axis=3),
        host_MLR2=np.stack([none_MLR, none_MLR], axis=-1),
        peer_MLR2=np.stack([none_MLR, none_MLR], axis=-1),
        sent_MLR=none_MLR,
        added_MLR=none_MLR,
        exchange_ns_ML=_by_entry([line_MLC[entry][EXCHANGE] for entry in run_entries(made)]),
        charge_ns=np.zeros(3, dtype=np.int64),
    )


def charges_of(made: Plan) -> np.ndarray:
    """[3] modelled nanoseconds per (micro-step, layer): edges, planning in the open, pushes in the open."""
    entries = made.loads.num_micro_steps * made.loads.num_layers
    edges = round((made.seconds.publish + made.seconds.collect) * 1e9 / entries)
    if made.policy != "reactive":
        return np.array([edges, 0, 0])
    opened = np.diff(made.replica_table.start_ML) > 0
    return np.array([edges, REACTIVE_PLAN_NS, round(REACTIVE_PUSH_NS * float(opened.mean()))])


def _by_entry(values: list[Any]) -> np.ndarray:
    """[M, L, ...] values of the entries that are run."""
    array = np.stack(values)
    return array.reshape(len(RUN), -1, *array.shape[1:])


def save_work(cases: list[CaseWork], path: Path) -> None:
    """Write cases to one file."""
    arrays: dict[str, np.ndarray] = {}
    for number, work in enumerate(cases):
        facts = {**asdict(work.case), "tokens": work.tokens, "top_k": work.top_k, "policies": list(work.policies)}
        arrays[f"{number}/facts"] = np.array(json.dumps(facts))
        for policy, one in work.policies.items():
            arrays |= {f"{number}/{policy}/{key}": value for key, value in asdict(one).items()}
    np.savez_compressed(path, **arrays)


def load_work(path: Path) -> Iterator[CaseWork]:
    """Read the cases of a file, one by one."""
    with np.load(path, allow_pickle=False) as file:
        for number in range(sum(key.endswith("/facts") for key in file)):
            facts = json.loads(str(file[f"{number}/facts"]))
            names, tokens, top_k = (facts.pop(key) for key in ("policies", "tokens", "top_k"))
            policies = {}
            for policy in names:
                start = f"{number}/{policy}/"
                policies[policy] = PolicyWork(**{k.removeprefix(start): file[k] for k in file if k.startswith(start)})
            yield CaseWork(case=Case(**facts), tokens=tokens, top_k=top_k, policies=policies)
