"""What ranks do in the tests of dispatches made ahead. Imports no planner: training processes must not."""

import dataclasses
from contextlib import ExitStack
from unittest import mock

import numpy as np

from equipoise.balancer import find_layers
from equipoise.core.errors import RoutesError
from equipoise.planning.rows import count_rows
from tests.balancer.work import balancer_of, run_micro_steps, words_of
from tests.parity.run import routes_of, run_window
from tests.parity.stack import SmallStack, window_inputs

IN_THE_LAYER = ("sort_rows", "exchange_counts", "assign_slots", "with_relay")
"""What a layer does only where its dispatch is not made ahead."""


def train_windows(group, case, *, is_prepared, is_checked=False, rows="auto", **options):
    """Two windows and their steps: outputs, trained weights, reports."""
    net, outputs, reports = SmallStack(case, group), [], []
    for experts in find_layers(net).values():
        experts.options = dataclasses.replace(experts.options, is_checked=is_checked)
    with balancer_of(net, case, group, is_prepared=is_prepared, rows=rows, **options) as balancer, ExitStack() as stack:
        if is_prepared and not is_checked:
            for name in IN_THE_LAYER:
                stack.enter_context(mock.patch(f"equipoise.layer.experts.{name}", side_effect=AssertionError(name)))
        for number in range(2):
            window = window_inputs(case, number, group.rank())
            balancer.submit(routes_of(window))
            outputs += run_window(net, balancer, window)[1]
            reports.append(balancer.report)
            for parameter in net.parameters():
                parameter.data.add_(parameter.grad, alpha=-1e-3)
                parameter.grad = None
    return outputs, [p.detach().clone() for p in net.parameters()], reports


def every_way(group, case):
    """The same training by each way of making a dispatch."""
    two_level = dataclasses.replace(case, dispatch="two_level")
    return {
        "exchanged": train_windows(group, case, is_prepared=False),
        "prepared": train_windows(group, case, is_prepared=True),
        "prepared, by collectives": train_windows(group, case, is_prepared=True, rows="collective"),
        "exchanged in waves": train_windows(group, case, is_prepared=False, rows="collective", waves=2),
        "prepared in waves": train_windows(group, case, is_prepared=True, rows="collective", waves=3),
        "prepared in waves, arena": train_windows(
            group, case, is_prepared=True, rows="collective", waves=2, buffers="arena"
        ),
        "checked": train_windows(group, case, is_prepared=True, is_checked=True),
        "exchanged in two levels": train_windows(group, two_level, is_prepared=False),
        "prepared in two levels": train_windows(group, two_level, is_prepared=True),
        "checked in two levels": train_windows(group, two_level, is_prepared=True, is_checked=True),
    }


def decision(group, case, what):
    """How a window's dispatches were made when rank 1 does not know, or cannot keep, everything."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    routes = [[ids.numpy().copy() for ids in by_layer] for by_layer in routes_of(window)]
    if what == "an unknown route" and group.rank() == 1:
        routes[1][0][2] = -1
    if what == "counted rows" and group.rank() == 1:
        routes = count_rows(routes, experts=case.experts)
        routes = dataclasses.replace(routes, has_ids=False)
    figures = {"prepared_bytes": 100} if what == "little memory" else {}
    with balancer_of(net, case, group, **figures) as balancer:
        balancer.submit(routes)
        run_window(net, balancer, window)
        return balancer.report.dispatch, balancer.report.is_as_planned


def waves_of_mapped_rows(group, case):
    """What a balancer that maps rows says to waves, and the waves of its window where it may choose."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    words = words_of(lambda: balancer_of(net, case, group, waves=2))
    with balancer_of(net, case, group, waves="auto") as balancer:
        balancer.submit(routes_of(window))
        run_window(net, balancer, window)
        return words, balancer.report.waves


def another_route(group, case):
    """Rank 1 replays one other id than it submitted; what each rank is told at the window's end."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    routes = [[ids.numpy().copy() for ids in by_layer] for by_layer in routes_of(window)]
    with balancer_of(net, case, group) as balancer:
        balancer.submit(routes)
        balancer.begin()
        if group.rank() == 1:
            ids_TK = window[0].ids[1]
            ids_TK[0, 0] = next(e for e in range(case.experts) if e not in ids_TK[0])
        run_micro_steps(net, window)
        return words_of(balancer.end)


def other_routes_than_counted(group, case):
    """Routes that are overwritten after they were counted cannot be prepared: what the layer is told."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    routes = [[ids.numpy().copy() for ids in by_layer] for by_layer in routes_of(window)]
    with balancer_of(net, case, group) as balancer:
        counted = count_rows(routes, experts=case.experts)
        for by_layer in routes:
            by_layer[0] = np.roll(by_layer[0], 1, axis=0)[:, ::-1] if len(by_layer[0]) > 1 else by_layer[0]
        routes[0][0] = np.full_like(routes[0][0], 0)
        balancer._planner.submit(counted, routes)
        balancer.begin()
        try:
            net(window[0], 0)
        except RoutesError as error:
            return str(error)
    return ""
