"""A small stack of layers, attention stand-in and balanced experts, run on a worker or densely in one process.

Imports no planner, so that workers start fast.
"""

from dataclasses import dataclass, field

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from equipoise.core.plan import Visit
from equipoise.layer.experts import BalancedExperts, LayerOptions, Window
from equipoise.transfer.engine import NoTransfers
from equipoise.transfer.node import ExpertWeights
from tests.layer.cases import HIDDEN, WIDTH
from tests.layer.reference import dense_experts
from tests.transfer.collective_bank import CollectiveBank

MODES = ("plain", "reentrant", "early_stop", "no_early_stop")


@dataclass(frozen=True)
class Run:
    """How to run a plan."""

    options: LayerOptions = field(default_factory=LayerOptions)
    mode: str = "plain"
    has_bias: bool = False
    is_prepared: bool = False
    in_flight: int = 1
    """Micro-steps whose forward has run and whose backward has not."""
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    """Of weights and hidden states; the dense reference starts from the same rounded numbers."""
    transfer: dict = field(default_factory=dict, hash=False)
    """More fields of TransferOptions."""

    def cast(self, tensor):
        """A tensor as this run computes with it."""
        return tensor.to(self.dtype).to(self.device)


@dataclass
class Outcome:
    """What one rank saw: lists over micro-steps, gradients of the layers in slot order."""

    outputs: list
    hidden_grads: list
    gate_grads: list
    attention_grads: list
    expert_grads: list
    log: list


def expert_weights(layer, experts, *, run, dtype=None):
    """All experts of a layer, logical order."""
    make = torch.Generator().manual_seed(1000 * run.seed + layer)
    shapes = [(2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)] + ([(2 * WIDTH,), (HIDDEN,)] if run.has_bias else [])
    tensors = [torch.randn((experts, *shape), generator=make) * 0.3 for shape in shapes]
    return ExpertWeights(*(run.cast(tensor).to(dtype or run.dtype) for tensor in tensors))


def attention_weights(layer, *, run):
    make = torch.Generator().manual_seed(7 + run.seed * 100 + layer)
    return run.cast(torch.randn((HIDDEN, HIDDEN), generator=make) * 0.2)


def token_inputs(routing, micro_step, rank, *, run):
    """Hidden states, gates by layer, and the loss's direction, of one rank's tokens."""
    ids = routing.ids[micro_step][0][rank]
    make = torch.Generator().manual_seed(run.seed * 10_000 + micro_step * 100 + rank)
    hidden_TD = torch.randn((len(ids), HIDDEN), generator=make)
    layers = len(routing.ids[micro_step])
    gates = [torch.rand((len(ids), ids.shape[1]), generator=make) for _ in range(layers)]
    direction_TD = torch.randn((len(ids), HIDDEN), generator=make)
    return run.cast(hidden_TD), [run.cast(gate) for gate in gates], run.cast(direction_TD)


def build_layers(group, plan, run):
    """This rank's experts under `plan`, home weights laid out as it says."""
    layers = []
    for layer in range(plan.loads.num_layers):
        place = plan.home_LE[layer] * plan.home_slots + plan.home_slot_LE[layer]
        expert_S = torch.from_numpy(place.argsort())[group.rank() * plan.home_slots :][: plan.home_slots]
        weights = expert_weights(layer, plan.loads.num_experts, run=run)
        home = ExpertWeights(*(None if t is None else t[expert_S].clone() for t in weights))
        layers.append(BalancedExperts(home, layer=layer, group=group, options=run.options))
    return layers


def run_stack(group, plan, routing, run):
    """Forward and backward over all micro-steps on this rank, gradients accumulated."""
    layers = build_layers(group, plan, run)
    bank = CollectiveBank(plan, layers, group) if len(plan.replica_table) else _LoggedNone(plan, layers[0].home)
    window = Window(plan, rank=group.rank(), transfers=bank)
    attention = [attention_weights(layer, run=run).requires_grad_() for layer in range(len(layers))]
    for layer, weight in enumerate(attention):
        weight.register_hook(lambda grad, layer=layer: bank.log.append(("attention", layer)))
    for experts in layers:
        experts.begin(window)
    outcome = Outcome([], [], [], [], [], bank.log)
    run_micro_steps(layers, attention, routing, run, outcome)
    outcome.attention_grads = [weight.grad for weight in attention]
    outcome.expert_grads = [[p.grad for p in experts.home.tensors()] for experts in layers]
    for experts in layers:
        experts.check_matched()
    return outcome


def run_micro_steps(layers, attention, routing, run, outcome):
    """All micro-steps of a window; as in a pipeline, `run.in_flight` forwards come before the first backward."""
    passes = []
    for micro_step in range(len(routing.ids)):
        passes.append(_forward(layers, attention, routing, micro_step, run))
        if len(passes) == run.in_flight:
            _backward(passes.pop(0), outcome)
    for one in passes:
        _backward(one, outcome)


def _forward(layers, attention, routing, micro_step, run):
    """Inputs, gates, output and loss of one micro-step."""
    rank = layers[0].group.rank()
    hidden_TD, gates, direction_TD = token_inputs(routing, micro_step, rank, run=run)
    hidden_TD.requires_grad_()
    gates = [gate.requires_grad_() for gate in gates]
    x_TD = hidden_TD
    for layer, experts in enumerate(layers):
        ids_TK = torch.from_numpy(routing.ids[micro_step][layer][rank]).to(run.device)
        visit = Visit(micro_step, "forward", layer)
        prepared = experts.prepare(ids_TK, micro_step) if run.is_prepared else None

        def block(x_TD, gates_TK, experts=experts, layer=layer, ids_TK=ids_TK, visit=visit, prepared=prepared):
            home = experts.enter(visit)
            x_TD = x_TD + torch.tanh(x_TD @ attention[layer])
            return x_TD + experts(x_TD, ids_TK, gates_TK, visit, home=home, prepared=prepared)

        x_TD = _call(block, x_TD, gates[layer], mode=run.mode)
    return hidden_TD, gates, x_TD, (x_TD * direction_TD).sum()


def _backward(one, outcome):
    hidden_TD, gates, x_TD, loss = one
    loss.backward()
    outcome.outputs.append(x_TD.detach())
    outcome.hidden_grads.append(hidden_TD.grad)
    outcome.gate_grads.append([gate.grad for gate in gates])


def _call(block, *args, mode):
    if mode == "plain":
        return block(*args)
    with set_checkpoint_early_stop(mode != "no_early_stop"):
        return checkpoint(block, *args, use_reentrant=mode == "reentrant")


class _LoggedNone(NoTransfers):
    def __init__(self, plan, like):
        super().__init__([like])
        self.open_window(plan)
        self.log = []

    def collect_returns(self, micro_step, layer, gradients):
        self.log.append(("collect", micro_step, layer))


def run_forward_only(group, plan, routing, run):
    """The recompute stage: outputs without a graph."""
    layers = build_layers(group, plan, run)
    bank = CollectiveBank(plan, layers, group)
    outputs = []
    for experts in layers:
        experts.begin(Window(plan, rank=group.rank(), transfers=bank))
    with torch.no_grad():
        for micro_step in range(len(routing.ids)):
            x_TD, gates, _ = token_inputs(routing, micro_step, group.rank(), run=run)
            for layer, experts in enumerate(layers):
                ids_TK = torch.from_numpy(routing.ids[micro_step][layer][group.rank()])
                x_TD = x_TD + torch.tanh(x_TD @ attention_weights(layer, run=run))
                x_TD = x_TD + experts(x_TD, ids_TK, gates[layer], Visit(micro_step, "forward", layer))
            outputs.append(x_TD)
    return outputs


def run_dense(routing, run):
    """The same stack in one process, in float64, by the dense reference: an outcome per rank."""
    layers = range(len(routing.ids[0]))
    weights = [expert_weights(layer, routing.experts, run=run, dtype=torch.float64) for layer in layers]
    weights = [ExpertWeights(*(None if t is None else t.requires_grad_() for t in w)) for w in weights]
    attention = [attention_weights(layer, run=run).double().requires_grad_() for layer in layers]
    outcomes = [Outcome([], [], [], [], [], []) for _ in routing.ids[0][0]]
    for micro_step, by_layer in enumerate(routing.ids):
        for rank, outcome in enumerate(outcomes):
            hidden_TD, gates, direction_TD = token_inputs(routing, micro_step, rank, run=run)
            hidden_TD, gates = hidden_TD.double().requires_grad_(), [g.double().requires_grad_() for g in gates]
            x_TD = hidden_TD
            for layer in layers:
                x_TD = x_TD + torch.tanh(x_TD @ attention[layer])
                ids_TK = torch.from_numpy(by_layer[layer][rank]).to(run.device)
                x_TD = x_TD + dense_experts(
                    x_TD, ids_TK, gates[layer], weights[layer], activation=run.options.activation
                )
            (x_TD * direction_TD).sum().backward()
            outcome.outputs.append(x_TD.detach())
            outcome.hidden_grads.append(hidden_TD.grad)
            outcome.gate_grads.append([_grad_of(gate) for gate in gates])
    outcomes[0].attention_grads = [_grad_of(weight) for weight in attention]
    outcomes[0].expert_grads = [[_grad_of(t) for t in w.tensors()] for w in weights]
    return outcomes


def _grad_of(tensor):
    """The gradient, zero where no token reached the tensor."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def logical_grads(outcomes, plan):
    """Experts' gradients of all ranks in logical order: a list over layers of lists of [E, ...] tensors."""
    grads = []
    for layer in range(plan.loads.num_layers):
        place_E = torch.from_numpy(plan.home_LE[layer] * plan.home_slots + plan.home_slot_LE[layer])
        by_rank = zip(*(outcome.expert_grads[layer] for outcome in outcomes), strict=True)
        grads.append([torch.cat(parts)[place_E] for parts in by_rank])
    return grads
