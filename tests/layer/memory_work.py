"""What ranks do in the tests of memory: run balanced layers, and ask torch's allocator. Imports no planner."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.memory import JoinedBank, peak_bytes
from equipoise.core.options import RowLimits, TransferOptions
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import WindowDispatches
from equipoise.layer.experts import BalancedExperts, Window
from equipoise.transfer.mapped_rows import MappedRows
from equipoise.transfer.node import ExpertWeights, NodeMemory


def measure(group, plan, ids, ways):
    """Peak bytes of this rank's window, way by way; each is (rows, whether recomputed, micro-steps in flight)."""
    rank, model = group.rank(), plan.model
    layers = [BalancedExperts(_weights(model, plan.home_slots), layer=n, group=group) for n in range(model.layers)]
    for parameter in (p for layer in layers for p in layer.parameters()):
        # As after the first micro-step of a step.
        parameter.grad = torch.zeros_like(parameter)
    bank = JoinedBank(plan, layers[0].home, rank=rank)
    node = NodeMemory(
        [_weights(model, 1)], group=group, node_R=list(plan.cluster.node_R), options=TransferOptions(slots=0)
    )
    mapped, found = MappedRows(node, top_k=model.top_k), []
    mapped.reserve(RowLimits.of(plan))
    mine = [[torch.from_numpy(by_layer[rank]) for by_layer in micro_step] for micro_step in ids]
    inputs = [_inputs(model, micro_step) for micro_step in mine]
    for rows, is_recomputed, in_flight in ways:
        dispatches = WindowDispatches(mine, timeout_s=60.0, is_mapped=rows == "mapped")
        window = Window(plan, rank=rank, transfers=bank, dispatches=dispatches, mapped=mapped)
        for layer in layers:
            layer.begin(window)
        dispatches.make(plan, layers, swap=None)
        run = partial(_run, layers, inputs, mine, is_recomputed=is_recomputed, in_flight=in_flight)
        with torch.set_grad_enabled(plan.loads.stage == "update"):
            found.append(peak_bytes(run, device="cpu"))
    mapped.close()
    node.close()
    return found


def _weights(model, slots):
    shapes = ((2 * model.expert_width, model.hidden), (model.hidden, model.expert_width))
    return ExpertWeights(*(torch.randn(slots, *shape) * 0.1 for shape in shapes))


def _inputs(model, ids):
    """Hidden states, gates by layer, and the output's gradient, of one micro-step."""
    shape = (len(ids[0]), model.hidden)
    gates = [torch.rand(len(one), model.top_k).requires_grad_() for one in ids]
    return torch.randn(shape).requires_grad_(), gates, torch.randn(shape)


def _run(layers, inputs, ids, *, is_recomputed, in_flight):
    """Run every micro-step; as in a pipeline, `in_flight` forwards come before the first backward."""
    outputs = []
    for micro_step, (hidden_TD, gates, grad_TD) in enumerate(inputs):
        # A layer that recomputes keeps its input, also the first.
        x_TD = hidden_TD.clone() if is_recomputed else hidden_TD
        for n, layer in enumerate(layers):
            block = partial(_block, layer, ids[micro_step][n], gates[n], Visit(micro_step, "forward", n))
            x_TD = checkpoint(block, x_TD, use_reentrant=False) if is_recomputed else block(x_TD)
        outputs.append((x_TD, grad_TD))
        del x_TD
        if not torch.is_grad_enabled():
            outputs.clear()
        elif len(outputs) == in_flight:
            torch.autograd.backward(*outputs.pop(0))
    while outputs:
        torch.autograd.backward(*outputs.pop(0))


def _block(experts, ids_TK, gates_TK, visit, x_TD):
    home = experts.enter(visit)
    return x_TD + experts(x_TD, ids_TK, gates_TK, visit, home=home)
