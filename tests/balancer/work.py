"""What ranks do in the balancer's tests. Imports no planner: training processes must not."""

import dataclasses
import functools
import os
import pickle
import signal
import sys
import threading
import time

import torch

from equipoise.balancer import Balancer, BalancerOptions, find_layers
from equipoise.core.errors import EquipoiseError
from equipoise.layer.experts import Window
from equipoise.planning.background import owners_plan
from equipoise.planning.report import WindowMeter
from equipoise.planning.worker import PlanWorker
from tests.parity import run
from tests.parity.run import recompute_window, routes_of, run_window, train
from tests.parity.stack import SmallStack, window_inputs
from tests.pool import kept_worker
from tests.transfer.test_memory import held, is_back
from tests.transfer.windows import no_transfers


def balancer_of(net, case, group, *, worker=None, enabled=True, given=(), **figures):
    # Planning begins with imports, on a busy machine those of eight ranks at once.
    bounds = {"timeout_s": figures.pop("timeout_s", 60.0), "planning_timeout_s": 180.0}
    options = BalancerOptions(slots=case.slots, objective="skew", **bounds, **figures)
    given = {"cluster": case.cluster, "model": case.model, "group": group, "options": options, **dict(given)}
    return Balancer(find_layers(net), worker=worker or kept_worker(), enabled=enabled, **given)


def train_twice(group, case):
    """Static and balanced training, and whether this process has numba."""
    both = train(group, case, enabled=False), train(group, case, worker=kept_worker())
    return *both, "numba" in sys.modules


def train_with_costs(group, case, costs):
    """Static training, and balanced training whose windows seem to take `costs[way]` times what `static_s` predicts."""
    measure, options = WindowMeter.report, run.BalancerOptions

    def pretend(meter):
        report = measure(meter)
        # Ranks measure different times, and must decide alike.
        return dataclasses.replace(report, realised_s=report.static_s * costs[report.way] * (1 - 0.01 * group.rank()))

    static = train(group, case, enabled=False)
    WindowMeter.report, run.BalancerOptions = pretend, functools.partial(options, adapts=True)
    try:
        return static, train(group, case, worker=kept_worker())
    finally:
        WindowMeter.report, run.BalancerOptions = measure, options


def state_bytes(net):
    return {name: tensor.numpy().tobytes() for name, tensor in net.state_dict().items()}


def disabled_and_never_seen(group, case):
    """The same step on two equal stacks: one under a disabled balancer, one that never saw a balancer."""
    found = []
    window = window_inputs(case, 0, group.rank())
    for is_seen in (True, False):
        net = SmallStack(case, group)
        objects, threads = [(id(p), p.data_ptr()) for p in net.parameters()], set(threading.enumerate())
        before = state_bytes(net)
        if is_seen:
            balancer = balancer_of(net, case, group, enabled=False)
            balancer.submit(routes_of(window))
            with balancer.canonical():
                _, outputs = run_window(net, balancer, window)
            balancer.close()
        else:
            outputs = plain_window(net, case, group, window)
        after = state_bytes(net)
        assert [(id(p), p.data_ptr()) for p in net.parameters()] == objects
        assert set(threading.enumerate()) <= threads, "a thread was started"
        found.append(
            pickle.dumps((before, after, [x.numpy() for x in outputs], [p.grad.numpy() for p in net.parameters()]))
        )
    return found


def without_recordings(group, case):
    """Log-prob passes of which nothing is recorded, and updates with the routes that the pass before them used (R2).

    Returns: by window, its report, displaced experts, replicas, and whether outputs are those of training at owners
    """
    window, found = window_inputs(case, 0, group.rank()), []
    wanted = plain_window(SmallStack(case, group), case, group, window)
    net = SmallStack(case, group)
    with balancer_of(net, case, group) as balancer:
        for turn in range(6):
            if turn % 2 == 0:
                balancer.submit(micro_steps=case.micro_steps, stage="recompute")
                _, outputs = recompute_window(net, balancer, window)
            else:
                balancer.submit(routes_of(window))
                _, outputs = run_window(net, balancer, window)
            plan = net.blocks[0].experts.window.plan
            is_same = all(map(torch.equal, outputs, wanted))
            found.append((balancer.report, int(plan.displaced_LE.sum()), len(plan.replica_table), is_same))
        try:
            balancer.submit(routes_of(window), micro_steps=2)
        except EquipoiseError as error:
            found.append(str(error))
    return found


def plain_window(net, case, group, window):
    plan = owners_plan(case.micro_steps, cluster=case.cluster, model=case.model)
    outputs = []
    for experts in find_layers(net).values():
        experts.begin(Window(plan, rank=group.rank(), transfers=no_transfers(plan, experts.home)))
    for micro_step, inputs in enumerate(window):
        out_TD = net(inputs, micro_step)
        ((out_TD - inputs.target_TD).square().sum() / out_TD.shape[1]).backward()
        outputs.append(out_TD.detach())
    for block in net.blocks:
        torch.distributed.all_reduce(block.attention.grad, group=group)
    return outputs


def weights_in_a_window(group, case):
    """Owned weights before, inside, inside `canonical` and after a window; parameters stay the same objects."""
    net = SmallStack(case, group)
    parameters = [p for experts in find_layers(net).values() for p in experts.parameters()]

    def copies():
        return [p.detach().clone() for p in parameters]

    with balancer_of(net, case, group) as balancer:
        window = window_inputs(case, 0, group.rank())
        before = copies()
        balancer.submit(routes_of(window))
        balancer.begin()
        all_at_home(balancer)
        inside = copies()
        with balancer.canonical():
            canonical = copies()
        _, report = run_micro_steps(net, window), balancer.end()
        after = copies()
    assert all(
        a is b for a, b in zip(parameters, (p for x in find_layers(net).values() for p in x.parameters()), strict=True)
    )
    return {"before": before, "inside": inside, "canonical": canonical, "after": after}, report


def all_at_home(balancer):
    """Wait until every layer is published, which goes on beside the layers."""
    balancer._engine._jobs.drain()


def run_micro_steps(net, window):
    for micro_step, inputs in enumerate(window):
        net(inputs, micro_step).sum().backward()


class Lendable:
    """A worker that stands before the kept one, which the balancer has meanwhile."""

    def lend(self, planner):
        kept_worker().lend(planner)

    def take_back(self, planner):
        kept_worker().take_back(planner)


class Crooked(Lendable):
    """A worker whose plan differs on one rank: two experts of layer 0 change places."""

    def __init__(self, rank):
        self.rank = rank

    def call(self, method, *args):
        made = kept_worker().call(method, *args)
        if method != "whole" or self.rank != 1:
            return made
        order = [made.cluster.ep * made.home_slots - 1, *range(made.cluster.ep * made.home_slots - 1)]
        changed = {name: getattr(made, name).copy() for name in ("home_LE", "home_slot_LE")}
        for array in changed.values():
            array[0] = array[0][order]
        table = type(made.replica_table).empty(made.ns_ML.size)
        return dataclasses.replace(made, replica_table=table, itinerary=None, **changed)


class Slow(Lendable):
    """A worker that plans when it is let go."""

    def __init__(self):
        self.may_go = threading.Event()

    def call(self, method, *args):
        assert self.may_go.wait(60.0), "submit did not return before the plan was made"
        return kept_worker().call(method, *args)


def words_of(work):
    """The error that `work` raises, as (class, text); None where it raises none."""
    try:
        work()
    except EquipoiseError as error:
        return type(error).__name__, str(error)
    return None


def window_errors(group, case, trouble):
    """What a rank says when planning goes wrong on rank 1, and whether the next window is planned all the same."""
    net, worker = SmallStack(case, group), kept_worker()
    routes = routes_of(window_inputs(case, 0, group.rank()))
    if trouble == "another plan":
        worker = Crooked(group.rank())
    elif trouble == "a killed worker":
        worker = PlanWorker()
        if group.rank() == 1:
            os.kill(worker.pid, signal.SIGKILL)
    with balancer_of(net, case, group, worker=worker) as balancer:
        is_odd = trouble == "another window" and group.rank() == 1
        balancer.submit(routes[:1] if is_odd else routes)
        said = words_of(balancer.begin)
        if trouble == "another window":
            balancer.submit(routes)
            with balancer.window():
                run_micro_steps(net, window_inputs(case, 0, group.rank()))
    if trouble == "a killed worker":
        worker.close()
    return said


def plan_later(group, case):
    """Submit two windows to a worker that waits, then take both; what was waited, and the digests."""
    net, worker, reports = SmallStack(case, group), Slow(), []
    windows = [window_inputs(case, number, group.rank()) for number in (0, 1)]
    with balancer_of(net, case, group, worker=worker) as balancer:
        for window in windows:
            balancer.submit(routes_of(window))
        worker.may_go.set()
        for window in windows:
            with balancer.window():
                run_micro_steps(net, window)
            reports.append(balancer.report)
    return reports


def close_alone(group, case):
    """Submit a window that rank 1 never announces, and close; seconds that took."""
    balancer = balancer_of(SmallStack(case, group), case, group)
    if group.rank() == 0:
        balancer.submit(routes_of(window_inputs(case, 0, 0)))
        time.sleep(0.2)
    begin = time.monotonic()
    balancer.close()
    return time.monotonic() - begin


def mismatch(group, case):
    """End a window in which one row of rank 1 did not follow its prepared dispatch."""
    net = SmallStack(case, group)
    window = window_inputs(case, 0, group.rank())
    with balancer_of(net, case, group) as balancer:
        balancer.submit(routes_of(window))
        balancer.begin()
        run_micro_steps(net, window)
        if group.rank() == 1:
            net.blocks[1].experts.mismatches += 3
        return words_of(balancer.end)


def misuse(group, case):
    """What a rank alone is told when it calls things out of order."""
    net = SmallStack(case, group)
    bare = Balancer(cluster=case.cluster, model=case.model, group=group, enabled=False)
    bare.submit(routes_of(window_inputs(case, 0, 0)))
    balancer = balancer_of(net, case, group, enabled=False)
    said = [words_of(bare.begin), words_of(balancer.begin), words_of(balancer.end)]
    balancer.submit(routes_of(window_inputs(case, 0, 0)))
    balancer.begin()
    return [*said, words_of(balancer.begin)]


def attach_twice(group, case):
    """Words of a second attachment, whether it left threads or descriptors, and whether the first works on."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    with balancer_of(net, case, group) as balancer:
        # Threads and connections that earlier tests left may end meanwhile.
        threads, before = set(threading.enumerate()), held()
        said = words_of(lambda: balancer.attach(find_layers(net)))
        is_clean = set(threading.enumerate()) <= threads and is_back(before)
        with balancer.window(routes_of(window)):
            run_micro_steps(net, window)
        return said, is_clean, balancer.report.is_as_planned


def one_worker_for_two(group, case):
    """Words of a second balancer that plans with the first one's worker; after the first has closed it may."""
    nets = [SmallStack(case, group) for _ in range(2)]
    window = window_inputs(case, 0, group.rank())
    with balancer_of(nets[1], case, group) as second:
        with balancer_of(nets[0], case, group) as first:
            for _ in range(2):
                with first.window(routes_of(window)):
                    run_micro_steps(nets[0], window)
            second.submit(routes_of(window))
            said = words_of(second.begin)
        with second.window(routes_of(window)):
            run_micro_steps(nets[1], window)
        return said, second.report.is_as_planned


def cross_nodes(group, case):
    """A recompute window with replicas of any node, one with those of its own, and static: outputs, and what moved."""
    window, found = window_inputs(case, 0, group.rank()), []
    for figures in ({"cross_node": True}, {}, {"enabled": False}):
        net = SmallStack(case, group)
        with balancer_of(net, case, group, max_displaced=0, **figures) as balancer:
            with balancer.window(routes_of(window), stage="recompute"), torch.no_grad():
                outputs = [net(inputs, micro_step) for micro_step, inputs in enumerate(window)]
            report = balancer.report
            with balancer.window(routes_of(window)):
                run_micro_steps(net, window)
        found.append((outputs, dict(report.bytes), report.arrived_ML))
    return found


def open_and_closed(group, case):
    """Whether a window is open: before it, inside it, and after it."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    with balancer_of(net, case, group, enabled=False) as balancer:
        found = [balancer.is_open]
        with balancer.window(routes_of(window)):
            found.append(balancer.is_open)
            run_micro_steps(net, window)
        return [*found, balancer.is_open]


def store_of_a_window(group, case):
    """The completed host store after a window, the weights it should hold, and what is said where it is refused."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    said = [words_of(balancer_of(net, case, group, enabled=False).complete_store)]
    with balancer_of(net, case, group) as balancer:
        with balancer.window(routes_of(window)):
            run_micro_steps(net, window)
            said.append(words_of(balancer.complete_store))
        with balancer.suspended():
            said.append(words_of(balancer.complete_store))
        store = balancer.complete_store()
        layers = list(find_layers(net).values())
        kept = [store.experts(layer).gate_up_SFD.clone() for layer in range(len(layers))]
        parameter, place = layers[0].gate_up, layers[0].gate_up.data
        parameter.data = place.clone()
        said.append(words_of(balancer.complete_store))
        parameter.data = place
    return kept, [experts.gate_up.detach().clone() for experts in layers], said


def gradients_elsewhere(group, case, is_elsewhere):
    """Gradients of a window, accumulated in `grad` or in float64 beside it; and how many experts were displaced."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    parameters = [p for experts in find_layers(net).values() for p in experts.parameters()]

    def keep(parameter):
        parameter.main_grad += parameter.grad
        parameter.grad = None

    for parameter in parameters if is_elsewhere else ():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float64)
        parameter.register_post_accumulate_grad_hook(keep)
    given = {"gradient_of": lambda parameter: parameter.main_grad} if is_elsewhere else {}
    figures = {"grad_dtype": "float64"} if is_elsewhere else {}
    with balancer_of(net, case, group, given=given, **figures) as balancer:
        with balancer.window(routes_of(window)):
            run_micro_steps(net, window)
        found = [(p.main_grad if is_elsewhere else p.grad).double() for p in parameters]
    return found, balancer.report.displaced


def end_in_vain(group, case):
    """End a window while a parameter is elsewhere, then again: what is said, what is open, and what owners hold."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    layers = list(find_layers(net).values())
    before = [experts.gate_up.detach().clone() for experts in layers]
    with balancer_of(net, case, group) as balancer:
        balancer.submit(routes_of(window))
        balancer.begin()
        run_micro_steps(net, window)
        parameter, place = layers[0].gate_up, layers[0].gate_up.data
        parameter.data = place.clone()
        said, found = words_of(balancer.end), [balancer.is_open]
        parameter.data = place
        balancer.end()
        found.append(balancer.is_open)
        return said[1], found, all(map(torch.equal, before, [experts.gate_up for experts in layers]))


def suspended_in_vain(group, case):
    """A window after a suspension whose block raised: what was said, and the outputs."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    with balancer_of(net, case, group) as balancer:
        try:
            with balancer.suspended():
                raise OSError("the off-load failed")
        except OSError as error:
            said = str(error)
        with balancer.window(routes_of(window)):
            run_micro_steps(net, window)
    return said, balancer.report.is_as_planned


def train_again(group, case):
    """Balanced training twice; the trained weights of each."""
    return [train(group, case, worker=kept_worker()).weights for _ in range(2)]


def train_in_groups(world, case, steps):
    """Two EP groups with different routes, and so different homes, whose owners reduce their gradients.

    Ranks of `world` beyond the two groups only help to make them, as torch wants.
    """
    rank, size = world.rank(), case.ranks
    groups = [torch.distributed.new_group(list(range(first, first + size))) for first in (0, size)]
    pairs = [torch.distributed.new_group([owner, owner + size]) for owner in range(size)]
    if rank >= 2 * size:
        return None
    number, group, pair = rank // size, groups[rank // size], pairs[rank % size]
    found = []
    for enabled in (False, True):
        net, digests = SmallStack(case, group), []
        with balancer_of(net, case, group, enabled=enabled) as balancer:
            for step in range(steps):
                window = window_inputs(case, 2 * step + number, group.rank())
                balancer.submit(routes_of(window))
                run_window(net, balancer, window)
                digests.append(balancer.report.digest)
                for parameter in net.parameters():
                    torch.distributed.all_reduce(parameter.grad, group=pair)
                    parameter.data.add_(parameter.grad, alpha=-1e-3)
                    parameter.grad = None
        found.append(([p.detach().clone() for p in net.parameters()], digests))
    return found


def train_in_stages(world, case, steps):
    """Two pipeline stages of EP2, one forward and one backward in turn; each stage has half of the layers."""
    groups = [torch.distributed.new_group([first, first + 1]) for first in (0, 2)]
    if world.rank() >= 4:
        return None
    stage, half = world.rank() // 2, dataclasses.replace(case, layers=case.layers // 2, seed=world.rank() // 2)
    found = []
    for enabled in (False, True):
        net, on_demand = SmallStack(half, groups[stage]), 0
        order = {"order": "1f1b", "pipeline_stage": stage, "pipeline_stages": 2}
        with balancer_of(net, half, groups[stage], enabled=enabled, **order) as balancer:
            for step in range(steps):
                window = [of_stage(x, stage, half.layers) for x in window_inputs(case, step, groups[stage].rank())]
                with balancer.window(routes_of(window)):
                    (first_stage if stage == 0 else last_stage)(net, window, (world.rank() + 2) % 4)
                on_demand += balancer.report.counts.get("on_demand", 0)
                for parameter in net.parameters():
                    parameter.data.add_(parameter.grad, alpha=-1e-3)
                    parameter.grad = None
        found.append(([p.detach().clone() for p in net.parameters()], balancer.report, on_demand))
    return found


def offload_between_stages(group, case, is_offloaded):
    """A recompute and an update window; between them, and inside the second, parameters may leave and come back."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    parameters = [p for experts in find_layers(net).values() for p in experts.parameters()]

    def offload():
        kept = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data = torch.empty(0)
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.data = values

    with balancer_of(net, case, group) as balancer:
        with balancer.window(routes_of(window), stage="recompute"), torch.no_grad():
            outputs = [net(inputs, micro_step) for micro_step, inputs in enumerate(window)]
        if is_offloaded:
            with balancer.suspended():
                offload()
        with balancer.window(routes_of(window)):
            for micro_step, inputs in enumerate(window):
                out_TD = net(inputs, micro_step)
                outputs.append(out_TD.detach())
                out_TD.sum().backward()
                if is_offloaded and micro_step == 0:
                    with balancer.suspended():
                        offload()
        reports = balancer.report
    return outputs, [p.grad.clone() for p in net.parameters()], reports.counts["pulls"]


def of_stage(inputs, stage, layers):
    cut = slice(stage * layers, (stage + 1) * layers)
    return inputs._replace(gates=inputs.gates[cut], ids=inputs.ids[cut])


def first_stage(net, window, peer):
    """Forward one micro-step ahead of backward."""
    outputs, sent = [], []
    for micro_step, inputs in enumerate(window):
        outputs.append(net(inputs, micro_step))
        sent.append(torch.distributed.isend(outputs[-1].detach(), peer))
        if micro_step:
            backward_from(outputs[micro_step - 1], peer)
    backward_from(outputs[-1], peer)
    for work in sent:
        work.wait()


def backward_from(out_TD, peer):
    grad_TD = torch.empty_like(out_TD)
    torch.distributed.recv(grad_TD, peer)
    out_TD.backward(grad_TD)


def last_stage(net, window, peer):
    for micro_step, inputs in enumerate(window):
        x_TD = torch.empty_like(inputs.hidden_TD)
        torch.distributed.recv(x_TD, peer)
        x_TD.requires_grad_()
        (net(inputs._replace(hidden_TD=x_TD), micro_step) - inputs.target_TD).square().mean().backward()
        torch.distributed.send(x_TD.grad, peer)


def touch_gradients(group, case, how):
    """What each rank says where gradients are changed inside a window, or the graph is run twice."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    layer = net.blocks[1].experts  # the one whose experts the plan displaces

    def touch():
        if how == "zeroed":
            net.zero_grad(set_to_none=True)
        elif how == "clipped" and group.rank() == 1:
            layer.down.grad.mul_(0.5)

    def run():
        balancer.begin()
        for micro_step, inputs in enumerate(window):
            loss = net(inputs, micro_step).sum()
            if how == "assigned":
                parameters = list(net.parameters())
                gradients = torch.autograd.grad(loss, parameters)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                continue
            if how == "visited twice":
                loss = loss + net(inputs, micro_step).sum()
            loss.backward(retain_graph=how.startswith("retained"))
            if how == "retained and run twice":
                loss.backward()
            if micro_step == 0:
                touch()
        balancer.end()

    with balancer_of(net, case, group) as balancer:
        balancer.submit(routes_of(window))
        said = words_of(run)
        displaced = balancer.report.displaced if balancer.report is not None else 0
    return said, [p.grad for p in net.parameters()], displaced
