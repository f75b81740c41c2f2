"""What ranks do in the tests of faults: train with a checkpoint after every step, die or survive, and train on."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from equipoise.balancer import find_layers
from equipoise.core.errors import TransferError
from equipoise.layer.checkpoint import expert_state_dict, load_expert_state_dict, load_experts, save_experts
from equipoise.transfer.edges import Relocator
from tests.balancer.work import all_at_home, balancer_of
from tests.parity.run import routes_of, run_window
from tests.parity.stack import SmallStack, window_inputs
from tests.transfer.test_memory import is_back

FATAL = 2
"""The window in which a rank is killed."""


class GivenPlans:
    """A planning process that has planned already."""

    def __init__(self, plans):
        self._plans = iter(plans)

    def lend(self, planner):
        """Every trainer has its own."""

    def take_back(self, planner):
        """Nothing to note."""

    def call(self, method, *args):
        return next(self._plans) if method == "whole" else b""


class Trainer:
    """One rank of a training run that keeps a checkpoint of every step."""

    def __init__(self, group, case, plans, folder, *, start=0):
        self.group, self.case, self.folder, self.step = group, case, Path(folder), start
        self.net = SmallStack(case, group)
        self.layers = find_layers(self.net)
        self.optimizer = torch.optim.AdamW([p for x in self.layers.values() for p in x.parameters()], lr=1e-2)
        if start:
            load_experts(self.layers, self.at(start), group=group, optimizer=self.optimizer)
            for block, saved in zip(self.net.blocks, torch.load(self.at(start) / "attention.pt"), strict=True):
                block.attention.data.copy_(saved)
        self.balancer = balancer_of(self.net, case, group, worker=GivenPlans(plans[start:]))

    def at(self, step):
        return self.folder / str(step)

    def run_to(self, stop, before=lambda step: None):
        """Train window after window, each ended by a step and a checkpoint."""
        with self.balancer:
            while self.step < stop:
                before(self.step)
                window = window_inputs(self.case, self.step, self.group.rank())
                self.balancer.submit(routes_of(window))
                run_window(self.net, self.balancer, window)
                self.optimizer.step()
                for block in self.net.blocks:
                    block.attention.data.add_(block.attention.grad, alpha=-1e-3)
                self.net.zero_grad()
                self.step += 1
                self.save()
        return [p.detach().clone() for p in self.net.parameters()]

    def save(self):
        save_experts(self.layers, self.at(self.step), group=self.group, optimizer=self.optimizer)
        if self.group.rank() == 0:
            torch.save([block.attention.data for block in self.net.blocks], self.at(self.step) / "attention.pt")
        torch.distributed.barrier(group=self.group)


class KillingRelocator(Relocator):
    """Ends its process once the second layer is staged, before anyone has agreed to write it."""

    kind, is_last = "", False

    def relocate(self, kind, layer, moves, tensors):
        self.is_last = kind == self.kind and layer == 1
        super().relocate(kind, layer, moves, tensors)

    def _agree(self, transfer, moves, tensors):
        if self.is_last:
            die()
        super()._agree(transfer, moves, tensors)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(trainer, where):
    """Arrange this rank's end in the middle of a forward, a backward, a publish or a collect."""
    block = trainer.net.blocks[1]
    if where == "forward":
        block.register_forward_pre_hook(die)
    elif where == "backward":
        block.attention.register_hook(die)
    else:
        relocator = trainer.balancer._engine._edges._relocator
        relocator.__class__ = KillingRelocator
        relocator.kind = where


def train_until_killed(group, case, plans, folder, where):
    """Rank 1 dies in window FATAL; the others tell what they saw, when, and what is left of their memory."""
    trainer, began, words = Trainer(group, case, plans, folder), [], ""

    def before(step):
        began.append(time.monotonic())
        if step == FATAL and group.rank() == 1:
            die_in(trainer, where)

    try:
        trainer.run_to(len(plans), before)
    except TransferError as error:
        words = str(error)
    return words, time.monotonic() - began[-1], is_back((0, sys.maxsize))


def train_through(group, case, plans, folder):
    return Trainer(group, case, plans, folder).run_to(len(plans))


def resume(group, case, plans, folder):
    """Train on from the last checkpoint that is whole."""
    last = max(int(path.name) for path in Path(folder).iterdir() if (path / "attention.pt").exists())
    return last, Trainer(group, case, plans, folder, start=last).run_to(len(plans))


def state_inside_a_window(group, case):
    """Save and load inside a window: owned experts before, in `canonical`, at the homes, and after loading others."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    layers = find_layers(net)

    def state():
        return {key: value.clone() for key, value in expert_state_dict(layers).items()}

    with balancer_of(net, case, group) as balancer:
        found = {"before": state()}
        with balancer.window(routes_of(window)):
            all_at_home(balancer)
            found["at the homes"] = state()
            with balancer.canonical():
                found["canonical"] = state()
                load_expert_state_dict(layers, {key: 2 * value for key, value in found["before"].items()})
        found["after"] = state()
    return found
