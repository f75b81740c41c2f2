"""One MoE layer trained on two local ranks, balanced window by window. Runs on a laptop CPU in a few seconds.

    python examples/balanced_layer.py

Plans are made by predicted seconds, at an H200's prices: experts move where that pays, in the last window none do.
Under torchrun, call `train(ep_group)` on every rank instead of `run_ranks`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise import Cluster, ModelShape
from equipoise.torch import BalancedExperts, Balancer, BalancerOptions, ExpertWeights, Visit, find_layers, run_ranks

RANKS, EXPERTS, TOP_K, HIDDEN, WIDTH = 2, 8, 2, 256, 128
MICRO_STEPS, TOKENS, WINDOWS = 2, 2048, 4
SHAPE = ModelShape.preset("qwen3-30b-a3b", experts=EXPERTS, layers=1, top_k=TOP_K, hidden=HIDDEN, expert_width=WIDTH)


class Net(nn.Module):
    """A projection that stands for attention, and the routed experts whose owner this rank is."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        owned = EXPERTS // RANKS
        torch.manual_seed(0)  # every rank has the same attention ...
        self.attention = nn.Linear(HIDDEN, HIDDEN)
        torch.manual_seed(1 + group.rank())  # ... and experts and tokens of its own
        weights = ExpertWeights(torch.randn(owned, 2 * WIDTH, HIDDEN) * 0.1, torch.randn(owned, HIDDEN, WIDTH) * 0.1)
        self.experts = BalancedExperts(weights, layer=0, group=group)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, gates_TK: Tensor, visit: Visit) -> Tensor:
        home = self.experts.enter(visit)  # before attention: returning gradients then hide behind its backward
        x_TD = x_TD + self.attention(x_TD)
        return x_TD + self.experts(x_TD, ids_TK, gates_TK, visit, home=home)


def rollout(window: int) -> list[list[Tensor]]:
    """Stand-in for recorded routes: [micro-step][layer] ids, most tokens choosing the experts of one rank.

    In the last window all experts are chosen alike.
    """
    if window == WINDOWS - 1:
        return [[torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % EXPERTS] for _ in range(MICRO_STEPS)]
    popular = torch.arange(EXPERTS, dtype=torch.float).roll(3 * window).exp2()
    return [[torch.multinomial(popular.expand(TOKENS, -1), TOP_K)] for _ in range(MICRO_STEPS)]


def train(group: Any) -> list[str]:
    """Train on one rank, and say what each window did."""
    net, lines = Net(group), []
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=RANKS)
    options = BalancerOptions(slots=1)
    with Balancer(find_layers(net), cluster=cluster, model=SHAPE, group=group, options=options) as balancer:
        for number in range(WINDOWS):
            routes = rollout(number)
            with balancer.window(routes):
                for micro_step, (ids_TK,) in enumerate(routes):
                    x_TD, gates_TK = torch.randn(TOKENS, HIDDEN), torch.full((TOKENS, TOP_K), 1 / TOP_K)
                    net(x_TD, ids_TK, gates_TK, balancer.visit("experts", micro_step)).square().mean().backward()
            for parameter in net.attention.parameters():
                dist.all_reduce(parameter.grad, group=group)
            optimizer.step()
            optimizer.zero_grad()
            done = balancer.report
            gate = "opened by itself" if done.replicas else "stayed closed"
            lines.append(
                f"window {number}: the gate {gate}: {done.replicas} replicas pulled, {done.displaced} homes displaced; "
                f"predicted {done.predicted_s * 1e6:.0f} us, without them {done.static_s * 1e6:.0f} us"
            )
    return lines


if __name__ == "__main__":
    print(*run_ranks(train, RANKS)[0], sep="\n")
