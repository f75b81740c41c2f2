"""One rank of the node benchmark: decoder layers with attention, and windows of every policy in turn.

A window is timed by the clock of the slowest rank, from a barrier in front of it to the moment when every rank's device
is done. Plans and dispatches of a window are made before it begins, as they are during a rollout; only `reactive` plans
inside it. The first window of a policy is not timed: it warms up, and its outputs and gradients are compared.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.node_cases import NodeWork
from benchmarks.node_parts import PartClock, parts_of
from equipoise.balancer import Balancer
from equipoise.calibrate.bench import AttentionShape, Bench
from equipoise.calibrate.measures import Attention, EmptyBank, groups_of
from equipoise.core import Cluster, Plan
from equipoise.core.options import BalancerOptions, PlanOptions
from equipoise.core.plan import Visit
from equipoise.layer.expert_block import BlockOptions, expert_block
from equipoise.layer.experts import BalancedExperts, LayerOptions
from equipoise.planner.assemble import WindowTask
from equipoise.planner.layer import layer_problem, plan_layer
from equipoise.planner.replicas import LayerPlan
from equipoise.transfer.node import ExpertWeights

SEQUENCE = 1024
HEADS = {"deepseek-v2-lite": (16, 16, 128), "qwen3-30b-a3b": (32, 4, 128), "gpt-oss-20b": (64, 8, 64)}
"""Query heads, key-value heads, head width."""
SETTLE_S = 300.0


class FixedPlan:
    """Stands in for a planning process, and returns a plan that was made before."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def lend(self, planner: object) -> None:
        """Every balancer may use it."""

    def take_back(self, planner: object) -> None:
        """Nothing to release."""

    def call(self, method: str, *args: Any) -> Any:
        """Answer as a `PlanServer` would."""
        return self._plan if method == "whole" else None

    def close(self) -> None:
        """Nothing to end."""


class LivePlanner:
    """Plans one micro-step of one layer between router and dispatch, from what all ranks' routers chose."""

    def __init__(self, plan: Plan, *, group: Any) -> None:
        """Take the prices of the window's plan.

        Args:
            group: exchanges tensors of the device
        """
        self._plan, self._group = plan, group
        given = {"cluster": plan.cluster, "model": plan.model, "slots": 1, "objective": plan.objective}
        task = WindowTask(loads=plan.loads, options=PlanOptions(sends="rows"), policy="reactive", **given)
        problem = layer_problem(task, budget=0)
        self._problem = problem._replace(domain_DR=problem.domain_DR[:1], trades_across=0, gated=0)
        self._tables = task.cost.tables(plan.home_slots + task.slots)
        self._owner_E = np.arange(plan.model.experts) // plan.home_slots
        self.planning_s = 0.0
        """Of the host, without the exchange of counts."""
        # Compiled here: in a window, other ranks would wait for it.
        self._make(np.array(plan.loads.load_MLRE[:1, 0]))

    def _make(self, load_1RE: np.ndarray) -> LayerPlan:
        none_EE = np.zeros((0, 0), dtype=np.int64)
        return plan_layer(load_1RE, self._owner_E, none_EE, self._problem, self._tables)

    def plan(self, visit: Visit, ids_TK: Tensor) -> None:
        """Exchange counts, wait for them, and plan; raise if that is not the plan which is executed."""
        ranks, experts = self._group.size(), self._plan.model.experts
        count_E = torch.bincount(ids_TK.reshape(-1), minlength=experts)
        count_RE = count_E.new_empty((ranks, experts))
        dist.all_to_all_single(count_RE, count_E.repeat(ranks, 1), group=self._group)
        load_1RE = count_RE.cpu().numpy()[None]
        begin = time.monotonic()
        made = self._make(load_1RE)
        self.planning_s += time.monotonic() - begin
        table, at = self._plan.replica_table, visit.micro_step * self._plan.model.layers + visit.layer
        rows = table.rows_P[table.start_ML[at] : table.start_ML[at + 1]]
        if len(rows) and sorted(rows) != sorted(made.rep_rows_MRS[made.rep_rows_MRS > 0]):
            raise RuntimeError(f"micro-step {visit.micro_step}, layer {visit.layer}: planned otherwise than executed")


class Decoder(nn.Module):
    """Layers of attention and routed experts, whose routes and gates are given."""

    def __init__(self, case: Any, *, bench: Bench, rank: int, group: Any) -> None:
        super().__init__()
        model = case.model
        name = next((name for name in HEADS if name == model.name), "qwen3-30b-a3b")
        heads, kv_heads, width = HEADS[name] if bench.is_gpu else (4, 2, 8)
        shape = AttentionShape(hidden=model.hidden, heads=heads, kv_heads=kv_heads, width=width)
        homes, made = model.experts // case.ranks, []
        # A CUDA device's own seed is another one in every process, and gradients of several launches are compared.
        torch.manual_seed(rank)
        self.attention = [Attention.random(shape, bench) for _ in range(model.layers)]
        for layer in range(model.layers):
            torch.manual_seed(1000 * rank + layer)
            gate_up = bench.random(homes, 2 * model.expert_width, model.hidden, scale=model.hidden**-0.5)
            down = bench.random(homes, model.hidden, model.expert_width, scale=model.expert_width**-0.5)
            made.append(BalancedExperts(ExpertWeights(gate_up, down), layer=layer, group=group, options=LayerOptions()))
        self.experts = nn.ModuleList(made)
        self.has_attention = self.has_experts = True
        self.live: LivePlanner | None = None
        """Plans in front of every dispatch, for `reactive`."""

    def layer(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, visit: Visit) -> Tensor:
        """One decoder layer."""
        experts: Any = self.experts[visit.layer]
        home = experts.enter(visit) if self.has_experts else None
        if not self.has_attention:
            self._react(visit, ids_TK)
            alone_TD: Tensor = experts(x_TD, ids_TK, gates_TK, visit, home=home)
            return alone_TD
        sequence = min(SEQUENCE, len(x_TD))
        x_TD = x_TD + self.attention[visit.layer].forward(F.rms_norm(x_TD, x_TD.shape[1:]), sequence=sequence)
        if not self.has_experts:
            return x_TD + F.rms_norm(x_TD, x_TD.shape[1:])
        self._react(visit, ids_TK)
        mixed_TD: Tensor = x_TD + experts(F.rms_norm(x_TD, x_TD.shape[1:]), ids_TK, gates_TK, visit, home=home)
        return mixed_TD

    def _react(self, visit: Visit, ids_TK: Tensor) -> None:
        # Not again where a checkpointed layer is repeated: its routes are known then.
        if self.live is not None and torch._C._current_graph_task_id() < 0:
            self.live.plan(visit, ids_TK)

    def forward(
        self, hidden_TD: Tensor, ids: list[Tensor], gates: list[Tensor], micro_step: int, again: bool
    ) -> Tensor:
        """All layers; with `again` activations are computed once more in backward."""
        x_TD = hidden_TD
        for number, (ids_TK, gates_TK) in enumerate(zip(ids, gates, strict=True)):
            visit = Visit(micro_step, "forward", number)
            if again:
                x_TD = checkpoint(self.layer, x_TD, ids_TK, gates_TK, visit, use_reentrant=False)
            else:
                x_TD = self.layer(x_TD, ids_TK, gates_TK, visit)
        return x_TD


def neighbours(group: Any, *, seconds: float = 2.0) -> dict[str, float]:
    """Milliseconds of the same product: of rank 0 alone, and of every rank beside all the others."""
    bench = Bench.on("cuda", runs=1)
    rows_ND, weights = bench.random(8192, 2048), bench.random(8, 2048, 2816)
    end_S = torch.arange(1024, 8193, 1024, device="cuda", dtype=torch.int32)

    def run() -> float:
        for _ in range(5):
            F.grouped_mm(rows_ND, weights, offs=end_S)
        torch.cuda.synchronize()
        begin, count = time.monotonic(), 0
        while time.monotonic() - begin < seconds:
            for _ in range(20):
                F.grouped_mm(rows_ND, weights, offs=end_S)
            torch.cuda.synchronize()
            count += 20
        return (time.monotonic() - begin) / count * 1e3

    dist.barrier(group)
    alone = run() if group.rank() == 0 else 0.0
    dist.barrier(group)
    beside = [0.0] * group.size()
    dist.all_gather_object(beside, run(), group=group)
    known = [alone]
    dist.broadcast_object_list(known, src=0, group=group)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "alone_ms": known[0],
        "beside_ms": max(beside),
        "spread": max(beside) / min(beside) - 1,
        "processors": processors,
    }


def run_case(
    group: Any, work: NodeWork, *, rounds: int, device: str, tell: Callable[..., None]
) -> dict[str, list[dict[str, Any]]]:
    """Run the windows of all policies in turn, `rounds` times; every rank must call this.

    `tell` gets a line, and everything found so far.
    """
    case, policies = work.case, work.policies
    bench, rank, nodes = Bench.on(device, runs=1), group.rank(), work.cluster.num_ep_nodes
    rows_group: Any = group
    if device == "cuda" and nodes == 1:
        from benchmarks.node_group import MappedGroup

        _, _, _, tokens, top_k = case.routes_MLRTK.shape
        rows_group = MappedGroup(group, most_bytes=4 * tokens * top_k * case.model.hidden * bench.dtype.itemsize)
    net = Decoder(case, bench=bench, rank=rank, group=rows_group)
    net.has_attention = not work.is_bare
    found: dict[str, list[dict[str, Any]]] = {}
    if work.is_bare:
        found["products alone"] = time_products(group, case, net, bench)
    elif nodes == 1:
        net.has_experts = False
        still = replace(policies[0], plan=None, is_live=False)
        found["attention alone"] = run_policy(group, case, still, work.cluster, net=net, bench=bench)
        net.has_experts = True
    for number in range(rounds):
        for policy in policies:
            given = {"net": net, "bench": bench, "has_parts": number == 0}
            runs = run_policy(group, case, policy, work.cluster, **given)
            found.setdefault(policy.name, []).extend(runs)
            tell(f"{work.name}, round {number + 1}: {policy.name} {runs[-1]['window_s']:.3f} s", found)
    if rows_group is not group:
        rows_group.close()
    return found


def time_products(group: Any, case: Any, net: Decoder, bench: Bench) -> list[dict[str, float]]:
    """The grouped products and activations of a level window, on rows that are in place."""
    micro_steps, _, ranks, tokens, top_k = case.routes_MLRTK.shape
    homes, rows = case.model.experts // ranks, tokens * top_k
    end_S = torch.arange(1, homes + 1, device=bench.device, dtype=torch.int32) * (rows // homes)
    rows_ND, grad_ND = bench.random(rows, case.model.hidden), bench.random(rows, case.model.hidden)
    times = []
    for _ in range(3):
        synchronize(bench)
        dist.barrier(group)
        begin = time.monotonic()
        for _ in range(micro_steps):
            for experts in net.experts:
                weights: Any = experts.home
                x_ND = rows_ND.detach().requires_grad_(case.stage == "update")
                out_ND = expert_block(
                    x_ND,
                    weights,
                    groups=groups_of(end_S, rows),
                    transfers=EmptyBank(weights),
                    visit=Visit(0, "forward", 0),
                    options=BlockOptions(),
                )
                if case.stage == "update":
                    torch.autograd.grad(out_ND, (x_ND, *weights.tensors()), grad_ND)
        synchronize(bench)
        own_s = time.monotonic() - begin
        all_s = [0.0] * group.size()
        dist.all_gather_object(all_s, own_s, group=group)
        times.append({"window_s": max(all_s), "exposed_s": 0.0, "mean_rank_s": float(np.mean(all_s))})
    return times[1:]


def run_policy(
    group: Any, case: Any, policy: Any, cluster: Cluster, *, net: Decoder, bench: Bench, has_parts: bool = False
) -> list[dict[str, Any]]:
    """One window that warms up and two timed ones, of which the second is watched by part where asked for."""
    rank, model = group.rank(), case.model
    routes = [[ids_RTK[rank] for ids_RTK in by_layer] for by_layer in policy.routes_MLRTK]
    ids = [[torch.from_numpy(a).to(bench.device, torch.int64) for a in by_layer] for by_layer in routes]
    torch.manual_seed(rank)
    hidden = [bench.random(len(by_layer[0]), model.hidden) for by_layer in ids]
    gates = [[torch.rand(a.shape, device=bench.device).requires_grad_() for a in by_layer] for by_layer in ids]
    slots = 0 if policy.plan is None else policy.plan.slots
    options = BalancerOptions(slots=slots, timeout_s=60.0, rows=policy.rows, is_prepared=not policy.is_live)
    layers = {f"experts.{i}": experts for i, experts in enumerate(net.experts)}
    given: dict[str, Any] = {"cluster": cluster, "model": model, "group": group, "options": options}
    worker: Any = FixedPlan(policy.plan)
    rows_group: Any = next(iter(layers.values())).group
    net.live = LivePlanner(policy.plan, group=rows_group) if policy.is_live else None
    runs = []
    with Balancer(layers, enabled=policy.plan is not None, worker=worker, **given) as balancer:
        for number in range(3):
            balancer.submit(routes, stage=case.stage)
            wait_until_prepared(balancer, len(routes) - 1, model.layers - 1)
            clock, is_watched = PartClock(is_gpu=bench.is_gpu), has_parts and number == 2
            with clock.watching() if is_watched else nullcontext():
                run = run_window(group, case, balancer, net, hidden, ids, gates, bench)
            if number == 0:
                sums = check_sums(group, case, net, gates)
            else:
                runs.append({**run, **sums})
            if is_watched:
                every: list[Any] = [None] * group.size()
                dist.all_gather_object(every, clock.seconds(), group=group)
                runs[-1]["parts"] = parts_of(run["mean_rank_s"], every)
            for parameter in (*net.parameters(), *(one for by_layer in gates for one in by_layer)):
                parameter.grad = None
    net.live = None
    return runs


def check_sums(group: Any, case: Any, net: Decoder, gates: Any) -> dict[str, float]:
    """Sums of squares over all ranks: of gradients of experts, and of gates, which depend on every output.

    The same for all policies of the same routes, up to rounding.
    """
    if case.stage != "update":
        return {}
    ends = {
        "expert_gradients": [one.grad for one in net.parameters() if one.grad is not None],
        "gate_gradients": [one.grad for by_layer in gates for one in by_layer if one.grad is not None],
    }
    own = torch.tensor(
        [sum(float(one.double().square().sum()) for one in found) for found in ends.values()], dtype=torch.float64
    )
    dist.all_reduce(own, group=group)
    return dict(zip(ends, own.sqrt().tolist(), strict=True))


def wait_until_prepared(balancer: Balancer, micro_step: int, layer: int) -> None:
    """Wait until the last dispatch of the window to come is made, or until it is known that none will be."""
    planner = balancer._planner
    if planner is None:
        return
    planned, dispatches, _ = planner._windows[-1]
    end = time.monotonic() + SETTLE_S
    while planned.result(SETTLE_S).dispatches is not None and time.monotonic() < end:
        if dispatches.is_made(micro_step, layer):
            return
        time.sleep(0.01)


def run_window(
    group: Any, case: Any, balancer: Balancer, net: Decoder, hidden: Any, ids: Any, gates: Any, bench: Bench
) -> dict[str, float]:
    """Time one window."""
    grad_TD = torch.ones_like(hidden[0])
    planned_s = net.live.planning_s if net.live is not None else 0.0
    synchronize(bench)
    dist.barrier(group)
    begin = time.monotonic()
    balancer.begin()
    for micro_step, hidden_TD in enumerate(hidden):
        if case.stage == "recompute":
            with torch.no_grad():
                net(hidden_TD, ids[micro_step], gates[micro_step], micro_step, False)
            continue
        x_TD = hidden_TD.detach().requires_grad_()
        net(x_TD, ids[micro_step], gates[micro_step], micro_step, case.is_checkpointed).backward(grad_TD)
    report = balancer.end()
    synchronize(bench)
    own_s = time.monotonic() - begin
    all_s = [0.0] * group.size()
    dist.all_gather_object(all_s, own_s, group=group)
    exposed = [0.0] * group.size()
    dist.all_gather_object(exposed, float(sum(report.exposed_s.values())) if report else 0.0, group=group)
    found = {"window_s": max(all_s), "exposed_s": max(exposed), "mean_rank_s": float(np.mean(all_s))}
    if net.live is not None:
        found["planning_s"] = net.live.planning_s - planned_s
    return found


def synchronize(bench: Bench) -> None:
    """Wait for the device."""
    if bench.is_gpu:
        torch.cuda.synchronize()
