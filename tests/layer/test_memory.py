"""The forecast of a plan's memory against torch's allocator, on ranks that run balanced layers forward and backward."""

from dataclasses import replace

import pytest

from equipoise.core import LoadMatrix
from equipoise.core.options import PlanOptions
from equipoise.loads.memory import WindowRows, window_memory
from equipoise.planner.assemble import visits_of
from tests.layer import memory_work
from tests.layer.cases import random_plan, random_routing

# Plain torch on the CPU holds more than a GPU's kernels while it activates and combines. With these widths that is not
# the worst moment.
WIDTHS = {"update": 144, "recompute": 72}
# tests/benchmarks/test_memory.py measures rows by collectives, in a group without transport: gloo's own thread lets go
# of the tensors of a message now or a little later.
UPDATES = [("mapped", False, 1), ("mapped", True, 1), ("mapped", False, 2)]


def forecast(plan, rows, is_recomputed, in_flight):
    """Peak of each rank, without slots and page: memory that torch's allocator does not hold, which others compare."""
    loads, order = plan.loads, PlanOptions(order="1f1b", pipeline_stages=in_flight)
    visits_V3 = visits_of(loads.stage, loads.num_micro_steps, loads.num_layers, order)
    counted = replace(WindowRows.of(plan), is_mapped=rows == "mapped", fixed_bytes=(0, 0))
    way = "recomputed" if is_recomputed else "kept"
    return window_memory(counted, plan.model, activations=way, visits_V3=visits_V3).peak_R.tolist()


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("ranks", "stage", "ways"),
    [(2, "update", UPDATES), (2, "recompute", [("mapped", False, 1)])],
    ids=["update", "log-prob"],
)
def test_the_forecast_is_within_three_percent_of_what_is_allocated(pool, ranks, stage, ways):
    routing = random_routing(ranks, ranks=ranks, layers=3, tokens=256)
    plan = random_plan(routing, 1, slots=1, is_displaced=False)
    model = plan.model.replace(hidden=96, expert_width=WIDTHS[stage], weight_bytes=4)
    plan = replace(plan, model=model, loads=LoadMatrix(plan.loads.load_MLRE, stage=stage))
    load_R = plan.rank_load_MLR.sum(axis=(0, 1))
    assert len(plan.replica_table) and load_R.max() > 1.2 * load_R.min(), "ranks should differ, and hold replicas"
    measured = pool.run(memory_work.measure, ranks, plan, routing.ids, ways)
    for way, by_rank in zip(ways, zip(*measured, strict=True), strict=True):
        for rank, (wanted, found) in enumerate(zip(forecast(plan, *way), by_rank, strict=True)):
            off = wanted / found - 1
            assert abs(off) <= 0.03, f"{way}, rank {rank}: {wanted:,} predicted, {found:,} measured ({off:.2%})"
