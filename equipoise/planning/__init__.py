"""Who plans, and when: windows are planned in the background of training, shared out over the ranks.

    options.py     BalancerOptions: slots, what is minimised, bounds
    layers.py      a model's balanced experts, by module path, in the order of plans
    rows.py        the rows one rank will send, counted from the routes it replays; all ranks' rows as one LoadMatrix
    exchange.py    an own gloo group: every rank's object to every rank
    desk.py        the planning itself, a share of the layers first and then the whole; runs in the worker alone
    worker.py      the worker process: persistent, spawned, holds numba so that training processes need not
    background.py  one window after another: exchange rows, plan shares, gather them, assemble, compare digests
    ways.py        the dispatches of a window, made ahead where all ranks know all their routes
    owners.py      no plan at all: every expert at its owner
    parts.py       what a balancer is made of, working or idle
    report.py      what one window was promised and what it moved

Only `desk.py` imports the planner. Knows the planner, the runtime and core; `balancer.py` knows this room.
"""
