"""Count the files and functions of the package that one window enters on its training ranks.

    python -m benchmarks.window_count

Two gloo ranks train one balanced layer for two windows of two micro-steps, forward and backward, with one replica slot.
The second is counted, from `submit` to `end`. Each rank notes every function of the package that it enters, in all of
its threads, and what any of them enters counts; the planning process is another one and does not. A newcomer who
follows a window has to read these.
Aims: at most 25 files and 200 functions for the window, at most 12 files for one forward pass of the layer.
"""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import Cluster, ModelShape
from equipoise.torch import BalancedExperts, Balancer, BalancerOptions, ExpertWeights, Visit, find_layers, run_ranks

RANKS, EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS, MICRO_STEPS = 2, 8, 2, 32, 16, 64, 2
MOST_FILES, MOST_FUNCTIONS, MOST_FORWARD_FILES = 25, 200, 12
SHAPE = ModelShape.preset("qwen3-30b-a3b", experts=EXPERTS, layers=1, top_k=TOP_K, hidden=HIDDEN, expert_width=WIDTH)


Entered = tuple[str, CodeType]
"""A thread's name and what it entered."""


class Net(nn.Module):
    """A projection in place of attention, and the routed experts that this rank owns."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.attention = nn.Linear(HIDDEN, HIDDEN)
        owned = EXPERTS // RANKS
        weights = ExpertWeights(torch.randn(owned, 2 * WIDTH, HIDDEN) * 0.1, torch.randn(owned, HIDDEN, WIDTH) * 0.1)
        self.experts = BalancedExperts(weights, layer=0, group=group)

    def forward(self, x_TD: Tensor, ids_TK: Tensor, visit: Visit) -> Tensor:
        """Apply both, the home weights first, as an adapter does."""
        home = self.experts.enter(visit)
        x_TD = x_TD + self.attention(x_TD)
        return x_TD + self.experts(x_TD, ids_TK, torch.full((len(ids_TK), TOP_K), 1 / TOP_K), visit, home=home)


@contextmanager
def entered(into: set[Entered]) -> Iterator[None]:
    """Collect the functions of the package that any thread enters meanwhile."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not frame.f_globals.get("__name__", "").startswith("equipoise."):
            return
        # Comprehensions and what dataclasses generate are nothing to read.
        if not code.co_name.startswith("<") and not code.co_filename.startswith("<"):
            into.add((threading.current_thread().name, code))

    threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile_all_threads(None) if sys.version_info >= (3, 12) else threading.setprofile(None)


def train(group: Any) -> dict[str, Any]:
    """Train two windows on one rank and count the second."""
    torch.manual_seed(group.rank())
    net, window = Net(group), set[Entered]()
    options = BalancerOptions(slots=1, objective="skew")
    cluster = Cluster.preset("h200", nodes=1, ranks_per_node=RANKS)
    popular = torch.arange(EXPERTS, dtype=torch.float).exp2()
    routes = [[torch.multinomial(popular.expand(TOKENS, -1), TOP_K)] for _ in range(MICRO_STEPS)]
    # Threads that start before they are watched are not seen on Python 3.11, so watching starts with the balancer and
    # what was entered before the window is forgotten.
    with entered(window):
        balancer = Balancer(find_layers(net), cluster=cluster, model=SHAPE, group=group, options=options)
        for _ in range(2):
            # The first window also maps memory for rows, once; the second is counted.
            forward = set[Entered]()
            window.clear()
            balancer.submit(routes)
            balancer.begin()
            for m, (ids_TK,) in enumerate(routes):
                x_TD = torch.randn(TOKENS, HIDDEN)
                before = set(window)
                window.clear()
                out_TD = net(x_TD, ids_TK, balancer.visit("experts", m))
                forward |= window
                window |= before
                out_TD.square().mean().backward()
            report = balancer.end()
        assert report.replicas and report.displaced, "a window that moves nothing enters fewer functions"
        counted = set(window)
    balancer.close()
    main = threading.main_thread().name
    in_forward = {code.co_filename.rpartition("equipoise/")[2] for thread, code in forward if thread == main}
    entered_in_window = {(code.co_filename.rpartition("equipoise/")[2], code.co_qualname) for _, code in counted}
    return {"window": entered_in_window, "forward": in_forward}


def main() -> None:
    """Print the functions by file, then one JSON document; what any of the ranks enters counts."""
    ranks = run_ranks(train, RANKS)
    window = set[tuple[str, str]]().union(*(rank["window"] for rank in ranks))
    forward = sorted(set[str]().union(*(rank["forward"] for rank in ranks)))
    files = sorted({file for file, _ in window})
    for name in files:
        functions = sorted(function for file, function in window if file == name)
        print(f"{name:<28} {len(functions):>3}  {', '.join(functions)}")
    print(f"window: {len(files)} files (aim {MOST_FILES}), {len(window)} functions ({MOST_FUNCTIONS})")
    print(f"forward of a layer: {len(forward)} files (aim {MOST_FORWARD_FILES}): {forward}")
    print(json.dumps({"files": len(files), "functions": len(window), "forward_files": len(forward)}))


if __name__ == "__main__":
    main()
