"""From routes to loads: who forwards which tokens when, how many rows each expert then gets, and how uneven that is.

    packing.py        schedules as trainers pack them: fixed samples, token budget, CP and SP slices, order; their file
    packer.py         schedules that keep rows in their node, within the limits of a given one
    count.py          routes to histograms, and their file; count_kernels.py, its compiled loops
    matrix.py         a schedule's loads: `load_MLRE`
    filling.py        experts for rows that have no route: last tokens, padding
    skew.py           the one definition of imbalance
    memory.py         the memory of every visit, by part
    forecast.py       the memory of a step at its owners, whether it fits, and what to do if not
    generator.py      workloads with measured properties

To add a packing, write a function in `packing.py` that returns a `Schedule`. Importing this room imports neither numba
nor torch.
"""

from equipoise.loads.count import RangeCount, count_range, count_routes, load_counts, save_counts
from equipoise.loads.forecast import MemoryForecast, forecast_memory
from equipoise.loads.generator import Workload, generate_counts, generate_routes, generate_samples
from equipoise.loads.matrix import count_loads, count_step
from equipoise.loads.memory import WindowMemory, WindowRows, plan_memory, window_memory
from equipoise.loads.packer import (
    MemoryLimit,
    Packing,
    PackingLimits,
    SampleSketch,
    pack_step,
    pack_window,
    sketch_counts,
)
from equipoise.loads.packing import (
    TokenPolicy,
    longest_first,
    read_schedules,
    schedule_samples,
    schedule_tokens,
    slice_context,
    slice_sequence,
    step_schedules,
    write_schedules,
)
from equipoise.loads.skew import SkewSummary, rank_loads, skew, skew_ML

__all__ = [
    "schedule_samples",
    "schedule_tokens",
    "step_schedules",
    "slice_context",
    "slice_sequence",
    "longest_first",
    "TokenPolicy",
    "read_schedules",
    "write_schedules",
    "pack_window",
    "pack_step",
    "sketch_counts",
    "Packing",
    "PackingLimits",
    "MemoryLimit",
    "SampleSketch",
    "count_routes",
    "count_range",
    "RangeCount",
    "load_counts",
    "save_counts",
    "count_loads",
    "count_step",
    "skew",
    "skew_ML",
    "rank_loads",
    "SkewSummary",
    "MemoryForecast",
    "WindowMemory",
    "WindowRows",
    "plan_memory",
    "window_memory",
    "forecast_memory",
    "Workload",
    "generate_counts",
    "generate_routes",
    "generate_samples",
]
