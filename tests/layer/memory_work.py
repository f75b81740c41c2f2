"""What ranks do in the tests of memory: run balanced layers, and ask torch's allocator. Imports no planner."""

from functools import partial

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.memory import peak_bytes
from equipoise.balancer import Balancer, BalancerOptions
from equipoise.core.plan import Visit
from equipoise.layer.experts import BalancedExperts
from equipoise.loads.memory import plan_memory
from equipoise.transfer.node import ExpertWeights
from tests.balancer.work import kept_worker


def build_layers(case, group):
    """Layers with gradients, as after a first micro-step."""
    layers = torch.nn.ModuleList()
    for layer in range(case.layers):
        make = torch.Generator().manual_seed(layer)
        shapes = ((2 * case.width, case.hidden), (case.hidden, case.width))
        home = ExpertWeights(*(torch.randn(case.home_slots, *shape, generator=make) * 0.1 for shape in shapes))
        layers.append(BalancedExperts(home, layer=layer, group=group))
    return layers


def run_window(layers, window, *, stage, is_recomputed, in_flight):
    """Run every micro-step of a window; as in a pipeline, `in_flight` forwards come before the first backward."""
    outputs = []
    for micro_step, (hidden_TD, gates, ids, grad_TD) in enumerate(window):
        # The layer that recomputes keeps its input, also the first.
        x_TD = hidden_TD.clone() if is_recomputed else hidden_TD
        for number in range(len(layers)):
            run = partial(run_layer, layers[number], ids[number], gates[number], Visit(micro_step, "forward", number))
            x_TD = checkpoint(run, x_TD, use_reentrant=False) if is_recomputed else run(x_TD)
        outputs.append((x_TD, grad_TD))
        del x_TD
        if stage == "update" and len(outputs) == in_flight:
            torch.autograd.backward(*outputs.pop(0))
    while stage == "update" and outputs:
        torch.autograd.backward(*outputs.pop(0))


def run_layer(experts, ids_TK, gates_TK, visit, x_TD):
    home = experts.enter(visit)
    return x_TD + experts(x_TD, ids_TK, gates_TK, visit, home=home)


def measure(group, case, how):
    return _measure(group, case, **how)


def _measure(group, case, *, rows, stage="update", is_recomputed=False, in_flight=1, objective="skew"):
    """(predicted, measured, rows received at the peak, whether replicas were used) of one rank's window."""
    layers = build_layers(case, group)
    order = {"order": "recompute"} if is_recomputed else {}
    order = {"order": "1f1b", "pipeline_stages": in_flight} if in_flight > 1 else order
    options = BalancerOptions(slots=case.slots, objective=objective, rows=rows, buffers="arena", **order)
    given = {"cluster": case.cluster, "model": case.model.replace(weight_bytes=4), "group": group, "options": options}
    with Balancer({str(n): one for n, one in enumerate(layers)}, **given, worker=kept_worker()) as balancer:
        window = [draw(case, group.rank(), ids) for ids in case.routes(0, group.rank())]
        for layer in layers:
            for parameter in layer.parameters():
                parameter.grad = torch.zeros_like(parameter)
        balancer.submit([[ids_TK.numpy() for ids_TK in ids] for _, _, ids, _ in window], stage=stage)
        way = {"stage": stage, "is_recomputed": is_recomputed, "in_flight": in_flight}
        with balancer.window(), torch.set_grad_enabled(stage == "update"):
            plan = balancer.plan
            # Dispatches are made in the background, and must not be counted among what the layers allocate.
            for micro_step, layer in np.ndindex(len(window), len(layers)):
                layers[0].window.dispatches.take(micro_step, layer)
            measured = peak_bytes(partial(run_window, layers, window, **way), device="cpu")
    memory = plan_memory(plan, activations="recomputed" if is_recomputed else "kept")
    place = memory.place(group.rank())
    # Slots and pages are mapped memory, which torch's allocator does not hold; other tests compare them.
    predicted = int(memory.peak_R[group.rank()]) - memory.slots_bytes - memory.page_bytes
    return predicted, measured, int(plan.rank_load_MLR[place]), len(plan.replica_table)


def draw(case, rank, ids):
    rng = np.random.default_rng(rank)
    shape = (len(ids[0]), case.hidden)
    hidden_TD, grad_TD = (torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for _ in range(2))
    gates = [torch.rand(len(one), case.top_k).requires_grad_() for one in ids]
    return hidden_TD.requires_grad_(), gates, [torch.from_numpy(one.astype(np.int64)) for one in ids], grad_TD
