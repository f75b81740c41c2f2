"""What ranks do in the tests of mapped rows. Imports no planner: training processes must not."""

import os
import signal
import time

import torch
from torch.utils.checkpoint import checkpoint

from equipoise.core.errors import TransferError
from tests.balancer.work import balancer_of, words_of
from tests.parity.run import routes_of
from tests.parity.stack import SmallStack, loss_of, window_inputs


def train_with(group, case, rows, *, is_checkpointed=False, silent=(), is_leaf=True):
    """Two windows, the second with more tokens: outputs, and the gradients of tokens, gates and every parameter."""
    net, found = SmallStack(case, group), []
    with balancer_of(net, case, group, rows=rows) as balancer:
        for number in range(2):
            window = window_inputs(case, number, group.rank())
            if group.rank() in silent:
                window = [_without_tokens(inputs) for inputs in window]
            balancer.submit(routes_of(window))
            window = [_leaves(inputs.to(case.device), is_leaf) for inputs in window]
            with balancer.window():
                for micro_step, inputs in enumerate(window):
                    if is_checkpointed:
                        out_TD = checkpoint(net, inputs, micro_step, use_reentrant=False)
                    else:
                        out_TD = net(inputs, micro_step)
                    loss_of(out_TD, inputs.target_TD).backward()
                    found.append(out_TD.detach().cpu())
            found += [t.grad.cpu() for inputs in window for t in (inputs.hidden_TD, *inputs.gates) if t.requires_grad]
            for parameter in net.parameters():
                found.append(parameter.grad.cpu())
                parameter.grad = None
        mapped = balancer._engine._mapped
        return found, mapped is not None and mapped.num_bytes > 0


def _leaves(inputs, is_leaf):
    hidden_TD = inputs.hidden_TD.detach().requires_grad_(is_leaf)
    gates = [gates_TK.detach().requires_grad_() for gates_TK in inputs.gates]
    return inputs._replace(hidden_TD=hidden_TD, gates=gates)


def _without_tokens(inputs):
    gates, ids = ([tensor[:0] for tensor in tensors] for tensors in (inputs.gates, inputs.ids))
    return inputs._replace(hidden_TD=inputs.hidden_TD[:0], gates=gates, target_TD=inputs.target_TD[:0], ids=ids)


def both_ways(group, case, how):
    return train_with(group, case, "mapped", **how), train_with(group, case, "collective", **how)


def check_bits(pool, case, how):
    """Train with mapped and with exchanged rows on all ranks, and compare outputs and every gradient."""
    for (mapped, is_used), (exchanged, is_used_there) in pool.run(both_ways, case.ranks, case, how):
        assert is_used and not is_used_there
        assert len(mapped) == len(exchanged)
        assert all(map(torch.equal, mapped, exchanged))
        assert any(bool(tensor.any()) for tensor in mapped)


def refused(group, case):
    """What is said where rows cannot be mapped."""
    return words_of(lambda: balancer_of(SmallStack(case, group), case, group, rows="mapped"))[1]


def _begin(group, case, timeout_s, **options):
    """A stack, its balancer with an open window, and what the window's micro-steps forward."""
    net, window = SmallStack(case, group), window_inputs(case, 0, group.rank())
    balancer = balancer_of(net, case, group, timeout_s=timeout_s, **{"rows": "mapped", **options})
    balancer.submit(routes_of(window))
    balancer.begin()
    return net, balancer, [inputs.to(case.device) for inputs in window]


def die_in_a_window(group, case, timeout_s, options=()):
    """Rank 1 is killed between two layers; what the others are told, and whether their device goes on."""
    net, balancer, window = _begin(group, case, timeout_s, **dict(options))
    try:
        for micro_step, inputs in enumerate(window):
            if micro_step == 1 and group.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(net(inputs, micro_step), inputs.target_TD).backward()
        if case.device == "cuda":
            torch.cuda.synchronize()
        balancer.end()
    except TransferError as error:
        if case.device == "cuda":
            torch.cuda.synchronize()
        return str(error)
    return "nothing was said"


def stand_still(group, case, timeout_s):
    """Rank 1 does not run its first layer until rank 0 has given up; what is said, and after how long."""
    net, balancer, window = _begin(group, case, timeout_s)
    begin = time.monotonic()
    if group.rank() == 1:
        time.sleep(4 * timeout_s)
    try:
        for micro_step, inputs in enumerate(window):
            loss_of(net(inputs, micro_step), inputs.target_TD).backward()
            torch.cuda.synchronize()
        balancer.end()
    except TransferError as error:
        torch.cuda.synchronize()
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin
