"""Training loops for workers: the stack of `stack.py` under a transfer engine, or statically, window by window.

Imports no planner: plans come from the test.
"""

import torch
import torch.distributed as dist

from equipoise.core.options import TransferOptions
from equipoise.layer.experts import BalancedExperts, Window
from equipoise.transfer.engine import TransferEngine
from equipoise.transfer.node import ExpertWeights
from tests.layer import stack
from tests.transfer.windows import no_transfers


class Trainer:
    """One rank: its owners' parameters, an optimizer over them, and an engine where plans move experts."""

    def __init__(self, group, plan, run, *, has_engine):
        self.group, self.run = group, run
        self.layers = [self._owned(layer, plan) for layer in range(plan.loads.num_layers)]
        self.attention = [stack.attention_weights(layer, run=run).requires_grad_() for layer in range(len(self.layers))]
        homes = [experts.home for experts in self.layers]
        options = TransferOptions(slots=plan.slots, timeout_s=60.0, **run.transfer)
        self.engine = (
            TransferEngine(homes, group=group, node_R=plan.cluster.node_R, options=options) if has_engine else None
        )
        self.parameters = [p for experts in self.layers for p in experts.parameters()]
        self.optimizer = torch.optim.AdamW([*self.parameters, *self.attention], lr=1e-3)

    def _owned(self, layer, plan):
        cut = slice(self.group.rank() * plan.home_slots, (self.group.rank() + 1) * plan.home_slots)
        weights = stack.expert_weights(layer, plan.loads.num_experts, run=self.run)
        home = ExpertWeights(*(None if t is None else t[cut].clone() for t in weights))
        return BalancedExperts(home, layer=layer, group=self.group, options=self.run.options).to(self.run.device)

    def window(self, plan, routing):
        """Accumulate one window's gradients at their owners; return what the stack saw."""
        if self.engine is not None:
            self.engine.open_window(plan)
        bank = self.engine or no_transfers(plan, self.layers[0].home)
        for experts in self.layers:
            experts.begin(Window(plan, rank=self.group.rank(), transfers=bank))
        outcome = stack.Outcome([], [], [], [], [], [])
        stack.run_micro_steps(self.layers, self.attention, routing, self.run, outcome)
        if self.engine is not None:
            self.engine.close_window()
        for weight in self.attention:
            # On the CPU, where gloo adds every dtype.
            total = weight.grad.float().cpu()
            dist.all_reduce(total, group=self.group)
            weight.grad.copy_(total)
        outcome.expert_grads = [[p.grad.clone() for p in experts.parameters()] for experts in self.layers]
        return outcome

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def close(self):
        if self.engine is not None:
            self.engine.close()


def run_window(group, plan, routing, run):
    """One window under the engine: the outcome, gradients in the owners' canonical order."""
    trainer = Trainer(group, plan, run, has_engine=True)
    try:
        return trainer.window(plan, routing)
    finally:
        trainer.close()


def run_both(group, plan, static, routing, run):
    """One window statically and one under the engine: two outcomes in the owners' order, on the CPU, and the bytes."""
    outcomes, moved = [], {}
    for has_engine, one in ((False, static), (True, plan)):
        trainer = Trainer(group, one, run, has_engine=has_engine)
        try:
            outcomes.append(on_cpu(trainer.window(one, routing)))
            moved = dict(trainer.engine.counters.bytes) if has_engine else {}
        finally:
            trainer.close()
    return *outcomes, moved


def on_cpu(value):
    """The same lists with tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, stack.Outcome):
        return stack.Outcome(**{name: on_cpu(part) for name, part in vars(value).items()})
    return [on_cpu(part) for part in value] if isinstance(value, list) else value


def train(group, windows, run, steps, has_engine):
    """Train `steps` windows, taking (plan, routing) in turn; return this rank's experts and what the engine moved."""
    trainer = Trainer(group, windows[0][0], run, has_engine=has_engine)
    try:
        for step in range(steps):
            trainer.window(*windows[step % len(windows)])
            trainer.step()
        moved = trainer.engine.counters if has_engine else None
        return [p.detach().clone() for p in trainer.parameters], None if moved is None else moved.pulls
    finally:
        trainer.close()
