"""A generated step to show the simulator with: what `--demo` and `python -m equipoise.sim` replay.

Knows the generator and packing. Does not know terminals.
"""

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.loads import count_step, generate_counts, step_schedules
from equipoise.loads.packing import TokenPolicy
from equipoise.sim.result import Simulation
from equipoise.sim.step import simulate
from equipoise.sim.trial import Progress

POLICIES = ("static", "eplb-history", "eplb-oracle", "lplb", "reactive", "equipoise", "balanced")


def demo_step(*, layers: int = 8, ranks: int = 16) -> tuple[ModelShape, tuple[LoadMatrix, ...]]:
    """The model and the windows of one generated step of Qwen3-30B-A3B shape, with a few of its layers."""
    model = ModelShape.preset("qwen3-30b-a3b", layers=layers)
    counts = generate_counts(model, samples=8 * ranks, mean_tokens=4096)
    schedules = step_schedules(
        counts.tokens_B, ranks=ranks, samples_per_micro_step=1, policy=TokenPolicy(last_token="drop")
    )
    return model, count_step(counts, schedules, ep=ranks)


def simulate_demo(*, progress: Progress | None = None) -> Simulation:
    """Simulate the demo on two H200 nodes under every policy."""
    model, windows = demo_step()
    cluster = Cluster.preset("h200", ep=windows[0].num_ranks)
    return simulate(windows, POLICIES, cluster=cluster, model=model, progress=progress)
