"""What ranks do in the tests of filled rows. Imports no planner: training processes must not."""

from dataclasses import replace

import numpy as np
import torch

from equipoise.balancer import find_layers
from tests.balancer.work import balancer_of, words_of
from tests.parity.run import routes_of
from tests.parity.stack import SmallStack, window_inputs


def free_masks(window, share):
    """Which tokens of each micro-step reach no loss: none, the last quarter, or all."""
    return [np.arange(len(x.hidden_TD)) >= round(len(x.hidden_TD) * (1 - share)) for x in window]


def blanked(window, free):
    """The routes of a window without those of free tokens."""
    return [
        [np.where(is_free[:, None], -1, ids.numpy()) for ids in inputs.ids]
        for inputs, is_free in zip(window, free, strict=True)
    ]


def train(net, balancer, window, free):
    """Run the window that was submitted; return counted outputs, gradients of inputs that count, and of weights."""
    outputs, inputs_grad = [], []
    balancer.begin()
    filled, digest = dict(balancer.filled), balancer.plan.digest()
    for m, (inputs, is_free) in enumerate(zip(window, free, strict=True)):
        counts = torch.from_numpy(~is_free)
        hidden = inputs.hidden_TD.clone().requires_grad_()
        out_TD = net(inputs._replace(hidden_TD=hidden), m)
        ((out_TD - inputs.target_TD)[counts].square().sum() / out_TD.shape[1]).backward()
        outputs.append(out_TD.detach()[counts])
        inputs_grad.append(hidden.grad)
    balancer.end()
    weights = [p.grad.clone() for p in net.parameters()]
    return {"outputs": outputs, "inputs": inputs_grad, "weights": weights, "filled": filled, "digest": digest}


def fill(group, case, share, rows="auto"):
    """The same window unfilled, filled, filled once more, and with the same experts given by hand."""
    window = window_inputs(case, 0, group.rank())
    free = free_masks(window, share)
    found, reports = {}, {}

    def run(name, inputs, **given):
        net = SmallStack(case, group)
        for experts in find_layers(net).values():
            experts.options = replace(experts.options, is_checked=True)
        with balancer_of(net, case, group, rows=rows) as balancer:
            balancer.submit(given.pop("routes", blanked(inputs, free)), **given)
            found[name], reports[name] = train(net, balancer, inputs, free), balancer.report
        found[name]["estimated"] = net.blocks[0].experts.window.plan.estimated_share

    run("unfilled", window)
    run("filled", window, free=free)
    run("again", window, free=free)
    by_hand = [
        inputs._replace(
            ids=[
                found["filled"]["filled"][m, layer].put(ids) if (m, layer) in found["filled"]["filled"] else ids
                for layer, ids in enumerate(inputs.ids)
            ]
        )
        for m, inputs in enumerate(window)
    ]
    run("by hand", by_hand, routes=routes_of(by_hand))
    return found, reports


def other_rows(group, case):
    """A layer that gets fewer rows than the window was told of; what the rank is told."""
    window = window_inputs(case, 0, group.rank())
    free, net = free_masks(window, 0.5), SmallStack(case, group)
    with balancer_of(net, case, group) as balancer:
        balancer.submit(blanked(window, free), free=free)
        balancer.begin()
        short = window[0]._replace(
            hidden_TD=window[0].hidden_TD[1:],
            ids=[ids[1:] for ids in window[0].ids],
            gates=[gates[1:] for gates in window[0].gates],
        )
        words = words_of(lambda: net(short, 0))
        balancer.abort("tried")
        return words


def disabled(group, case):
    """A disabled balancer counts free tokens and fills none."""
    window = window_inputs(case, 0, group.rank())
    free, net = free_masks(window, 0.5), SmallStack(case, group)
    with balancer_of(net, case, group, enabled=False) as balancer:
        balancer.submit(blanked(window, free), free=free)
        result = train(net, balancer, window, free)
        return len(result["filled"]), balancer.report.filled_rows
