"""One rank's side of a parity run: the same stack trained twice, at its owners and balanced.

Knows the balancer and an optimizer. Does not judge: see `verdict`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from equipoise.balancer import Balancer, BalancerOptions, find_layers
from equipoise.core import Plan, Stage
from equipoise.core.plan import Objective
from equipoise.layer.checkpoint import gradient_norm
from equipoise.planning.report import WindowReport
from equipoise.planning.worker import PlanWorker
from equipoise.transfer.node import ExpertWeights
from tests.parity.case import VARIETY, ParityCase
from tests.parity.stack import Inputs, SmallStack, loss_of, window_inputs


class Moves(NamedTuple):
    """What one window's plan moves, counted."""

    stage: Stage
    displaced: int
    """Homes that are not at their owner."""
    displaced_far: int
    """Those in another node than the owner."""
    replicas: int
    replicas_far: int
    """Those in another node than the home."""
    trades: int
    """Pairs of ranks that take rows of each other's experts in one micro-step and layer."""

    @classmethod
    def of(cls, plan: Plan) -> "Moves":
        """Count from homes and replicas alone."""
        table, node_R, experts = plan.replica_table, plan.cluster.node_array_R, plan.model.experts
        owner_E = np.arange(experts) // (experts // plan.cluster.ep)
        home_P = plan.home_LE[table.entry_P % plan.model.layers, table.expert_P]
        ways = set(zip(table.entry_P.tolist(), home_P.tolist(), table.rank_P.tolist(), strict=True))
        return cls(
            stage=plan.loads.stage,
            displaced=int(plan.displaced_LE.sum()),
            displaced_far=int((node_R[plan.home_LE] != node_R[owner_E]).sum()),
            replicas=len(table),
            replicas_far=int((node_R[home_P] != node_R[table.rank_P]).sum()),
            trades=sum(home < rank and (entry, rank, home) in ways for entry, home, rank in ways),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What one rank saw of one training."""

    losses: list[float]
    """By step, summed over all ranks."""
    outputs: list[torch.Tensor]
    """Of the first step, by window and micro-step."""
    gradients: list[torch.Tensor]
    """Experts' gradients of the first step at their owner, layer by layer."""
    norm: float
    """Of all experts' gradients in the first step."""
    weights: list[torch.Tensor]
    """The rank's own experts after the last step, layer by layer."""
    reports: list[WindowReport]
    """By window."""
    moves: list[Moves] = field(default_factory=list)
    """By window; the same on all ranks."""


Tell = Callable[[int, int], None]
"""Called with windows done and windows in all."""


def train_both(group: Any, case: ParityCase, *, show: Tell) -> tuple[Training, Training]:
    """Train at the owners and balanced. Every rank of `group` must call this."""
    # Started first, so that it is ready when the static run is over.
    worker = PlanWorker()

    def tell_of(run: int) -> Callable[[int], None]:
        return lambda done: show(run * case.steps + done, 2 * case.steps)

    try:
        static = train(group, case, enabled=False, tell=tell_of(0))
        return static, train(group, case, worker=worker, tell=tell_of(1))
    finally:
        worker.close()


def train(
    group: Any,
    case: ParityCase,
    *,
    enabled: bool = True,
    worker: PlanWorker | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> Training:
    """Train one stack. Every rank of `group` must call this.

    Args:
        tell: called with the number of windows done
    """
    net = SmallStack(case, group)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    objective: Objective = "seconds" if case.profile else "skew"
    options = BalancerOptions(slots=case.slots, objective=objective, cross_node=bool(case.profile))
    given: dict[str, Any] = {"cluster": case.cluster, "model": case.model, "group": group, "options": options}
    windows = [window_inputs(case, window, group.rank()) for window in range(min(VARIETY, case.steps))]
    turns = [(step, stage) for step in range(case.steps) for stage in case.stages]
    losses, outputs, reports, moves, first = [], [], [], [], None
    with Balancer(find_layers(net), enabled=enabled, worker=worker, **given) as balancer:
        for turn, (step, stage) in enumerate(turns):
            # The next window is planned while this one runs.
            for ahead, stage_ahead in turns[turn + (turn > 0) : turn + 2]:
                balancer.submit(routes_of(windows[ahead % len(windows)]), stage=stage_ahead)
            window = [x.to(case.device) for x in windows[step % len(windows)]]
            loss, found = (run_window if stage == "update" else recompute_window)(net, balancer, window)
            outputs += found
            assert balancer.report is not None, "a window that ended has a report"
            reports.append(balancer.report)
            moves.append(Moves.of(net.blocks[0].experts.window.plan))
            if stage == "recompute":
                continue
            first = first or ([*outputs], *_gradients(net, group))
            losses.append(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tell(step + 1)
    assert first is not None, "a case has at least one step"
    return Training(
        losses=losses,
        outputs=first[0],
        gradients=first[1],
        norm=first[2],
        weights=[p.detach().cpu().clone() for experts in find_layers(net).values() for p in experts.parameters()],
        reports=reports,
        moves=moves,
    )


def routes_of(window: Sequence[Inputs]) -> list[list[torch.Tensor]]:
    """[m][l] the ids of a window's tokens, as the balancer takes them."""
    return [inputs.ids for inputs in window]


def run_window(net: SmallStack, balancer: Balancer, window: Sequence[Inputs]) -> tuple[float, list[torch.Tensor]]:
    """Accumulate one window's gradients at their owners; return the loss of all ranks and this rank's outputs."""
    group, loss, outputs = balancer.group, torch.zeros((), dtype=torch.float64), []
    with balancer.window():
        for micro_step, inputs in enumerate(window):
            out_TD = net(inputs, micro_step)
            part = loss_of(out_TD, inputs.target_TD)
            part.backward()
            loss += part.detach().double().cpu()
            outputs.append(out_TD.detach().cpu())
    dist.all_reduce(loss, group=group)
    for block in net.blocks:
        # On the CPU and in fp32, where gloo adds.
        total_DD = block.attention.grad.float().cpu()
        dist.all_reduce(total_DD, group=group)
        block.attention.grad.copy_(total_DD)
    return float(loss), outputs


def recompute_window(net: SmallStack, balancer: Balancer, window: Sequence[Inputs]) -> tuple[float, list[torch.Tensor]]:
    """Forward one window without gradients; there is no loss."""
    with balancer.window(), torch.no_grad():
        outputs = [net(inputs, micro_step).cpu() for micro_step, inputs in enumerate(window)]
    return 0.0, outputs


def _gradients(net: SmallStack, group: Any) -> tuple[list[torch.Tensor], float]:
    """The owned experts' gradients, and the norm of all."""
    layers = [ExpertWeights(*(None if t is None else t.grad for t in x.home)) for x in find_layers(net).values()]
    return [tensor.cpu().clone() for layer in layers for tensor in layer.tensors()], gradient_norm(layers, group=group)
