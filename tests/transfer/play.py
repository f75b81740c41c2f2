"""One rank of a window played without a model: it asks for weights, returns gradients, and knows every number."""

import torch

from equipoise.core.options import TransferOptions
from equipoise.transfer.engine import TransferEngine
from equipoise.transfer.node import ExpertWeights
from equipoise.transfer.pulls import needs_of
from tests.transfer.windows import all_experts, assert_same_bits, experts_at, owned_parameters, take


class Rank:
    """One rank with its engine, and every number that any rank should see."""

    def __init__(self, group, plan, *, seed=0, timeout_s=60.0, kind=None, transfer=None, has_bias=False, **engine):
        """
        Args:
            kind: what to convert experts to: device and dtype
            transfer: more fields of TransferOptions
        """
        self.group, self.rank, self.seed, self.kind = group, group.rank(), seed, kind or {}
        self.layers, experts = plan.home_LE.shape
        self.everything = [
            ExpertWeights(*(None if t is None else t.to(**self.kind) for t in w))
            for w in all_experts(experts, self.layers, seed, has_bias=has_bias)
        ]
        self.homes = owned_parameters(self.everything, self.rank, plan.home_slots)
        options = TransferOptions(slots=plan.slots, depth=plan.itinerary.depth, timeout_s=timeout_s, **(transfer or {}))
        self.engine = TransferEngine(self.homes, group=group, node_R=plan.cluster.node_R, options=options, **engine)
        self.totals = None

    def check_weights(self, plan, visit):
        """Ask for replicas and compare them with what all experts are now."""
        needs = needs_of(plan, visit._replace(phase="forward"), rank=self.rank)
        self.engine.wait_for(visit)
        got = self.engine.weights(visit)
        wanted = take(self.everything[visit.layer], [need.expert for need in needs])
        assert_same_bits(got, wanted, f"rank {self.rank}, {visit}")
        self.check_joined(plan, visit, needs)
        return needs, got

    def check_joined(self, plan, visit, needs):
        """Where home and replica weights are one tensor, compare that too."""
        joined = self.engine.joined(visit)
        if joined is not None:
            experts = experts_at(plan, visit.layer, self.rank) + [need.expert for need in needs]
            assert_same_bits(joined, take(self.everything[visit.layer], experts), f"rank {self.rank}, {visit}, joined")

    def return_gradients(self, plan, visit):
        """Hand in what the replicas computed, collect what they computed for us, compare with a plain sum."""
        micro_step, _, layer = visit
        needs = needs_of(plan, visit, rank=self.rank)
        mine = [self.gradient(micro_step, layer, need.expert, self.rank) for need in needs]
        self.engine.hand_in(micro_step, layer, stack(mine, like=self.everything[layer]))
        experts = experts_at(plan, layer, self.rank)
        own = stack([self.gradient(micro_step, layer, e, self.rank) for e in experts], like=self.everything[layer])
        self.engine.collect_returns(micro_step, layer, own)
        wanted = [self.complete_gradient(plan, micro_step, layer, expert) for expert in experts]
        assert_same_bits(own, stack(wanted, like=own), f"rank {self.rank}, gradients of {visit}")
        for parameter, new in zip(self.homes[layer].tensors(), own.tensors(), strict=True):
            parameter.grad = new.clone() if parameter.grad is None else parameter.grad.add_(new)

    def gradient(self, micro_step, layer, expert, rank):
        """What a rank's rows add to an expert's gradient: random, known to all."""
        seed = hash((self.seed, micro_step, layer, expert, rank)) % 2**31
        generator = torch.Generator().manual_seed(seed)
        shapes = [t.shape[1:] for t in self.everything[layer].tensors()]
        return [torch.randn(*shape, generator=generator).to(**self.kind) for shape in shapes]

    def complete_gradient(self, plan, micro_step, layer, expert):
        """The home's own part, then the replicas' in ascending rank order."""
        total = self.gradient(micro_step, layer, expert, int(plan.home_LE[layer, expert]))
        for rank in sorted(r.rank for r in plan.replicas(micro_step, layer) if r.expert == expert):
            parts = self.gradient(micro_step, layer, expert, rank)
            total = [a + b for a, b in zip(total, parts, strict=True)]
        return total

    def check_owned_gradients(self, plan):
        """After collect: the sum over micro-steps, in the order in which they ran backward."""
        order = [v.micro_step for v in plan.itinerary.visits() if v.phase == "backward"]
        owned = range(self.rank * plan.home_slots, (self.rank + 1) * plan.home_slots)
        for layer in range(self.layers):
            for slot, expert in enumerate(owned):
                total = None
                for micro_step in dict.fromkeys(order):
                    new = self.complete_gradient(plan, micro_step, layer, expert)
                    total = new if total is None else [a + b for a, b in zip(total, new, strict=True)]
                for parameter, wanted in zip(self.homes[layer].tensors(), total, strict=True):
                    assert torch.equal(parameter.grad[slot], wanted), f"gradient of expert {expert}, layer {layer}"

    def update(self):
        """An optimizer step: every owner changes what it owns, and forgets its gradients."""
        for parameter in (p for homes in self.homes for p in homes.tensors()):
            parameter.data.mul_(1.5)
            parameter.grad = None
        self.everything = [ExpertWeights(*(None if t is None else 1.5 * t for t in w)) for w in self.everything]


def stack(experts, *, like):
    """[s, ...] tensors out of a list of experts, zero-size ones where there is none."""
    columns = list(zip(*experts, strict=True)) or [[]] * len(list(like.tensors()))
    tensors = iter(
        torch.stack(list(column)) if column else tensor.new_empty(0, *tensor.shape[1:])
        for column, tensor in zip(columns, like.tensors(), strict=True)
    )
    return ExpertWeights(*(None if t is None else next(tensors) for t in like))


def play_windows(group, plans, options, is_patient=False):
    """Whole windows with an optimizer step after each; what was moved, and what is left at the end.

    Args:
        options: of `Rank`
        is_patient: end a window only when all that it refreshes is written, also what nobody pulled after all
    """
    from tests.transfer.test_memory import held, is_back

    if "cuda" in options.get("kind", {}).values():
        # The driver opens files of its own the first time.
        torch.zeros(1, device="cuda")
    before = held()
    rank = Rank(group, plans[0], seed=3, **options)
    with rank.engine:
        for plan in plans:
            rank.engine.open_window(plan)
            run_window(rank, plan, lambda: None)
            if is_patient and rank.engine._refresher is not None:
                rank.engine._refresher.finish()
            rank.engine.close_window()
            if plan.loads.stage == "update":
                rank.check_owned_gradients(plan)
            rank.update()
    counters = rank.engine.counters
    moved = {name: getattr(counters, name) for name in ("pulls", "returns", "refreshes", "on_demand")}
    seconds = dict(counters.exposed_s)
    moved["transport"] = rank.engine.transport
    return {**moved, "bytes": dict(counters.bytes), "exposed_s": seconds, "is_clean": is_back(before)}


def run_window(rank, plan, pause):
    """Every visit of the itinerary in order, as layers would make them."""
    for at in range(len(plan.itinerary)):
        visit = plan.itinerary.visits()[at]
        pause()
        needs, got = rank.check_weights(plan, visit)
        pause()
        assert_same_bits(got, take(rank.everything[visit.layer], [n.expert for n in needs]), "while in use")
        if visit.phase == "backward":
            rank.return_gradients(plan, visit)
