"""The nouns: frozen, self-checking value types, their errors, and the glossary.

    errors.py    every error users meet
    value.py     what value types share
    whole_file.py  files that are written whole or not at all
    compiled.py  how kernels are compiled and kept
    interrupt.py children that are deaf to Ctrl-C
    model.py     ModelShape: a Mixture-of-Experts model in figures
    cluster.py   Cluster: nodes, ranks, links
    routes.py    SampleRoutes, Routes: recorded choices; RouteCounts: their histograms
    schedule.py  Schedule: who forwards which tokens when
    loads.py     LoadMatrix: rows per micro-step, layer, source rank and expert
    split.py     an expert's rows over its holders, by source
    plan.py      Plan: homes, replicas, prices of one window; itinerary.py, its visits in execution order
    plan_file.py plans on disk
    explain.py   Explanation: one decision of a plan, and what binds
    presets/     published figures of models and clusters, one data file each

Words, one per thing: an *expert* is a logical routed expert of one MoE layer; a *route* the ids one token chose in
one layer; a *row* one token-assignment as a GEMM sees it (T tokens make T x K rows); *load* a number of rows.
A *step* has *stages* (`recompute`, `update`), a stage has *windows* (runs of micro-steps between two weight
versions), a window has *micro-steps*. A *rank* is a process with one device, a *node* a fast-interconnect domain.
The *owner* of an expert keeps it for good; its *home* is where it computes during a window; a *displaced* expert's
home is not its owner. A *slot* holds one expert; a *replica* lives in a replica slot for one micro-step of one layer.
Two ranks *trade* if each takes by a replica as many rows of the other as it gives.
A *placement* says which expert has its home where, a *split* how many rows of an expert each holder takes, a *plan*
both, with replicas and prices, for one window. Weights are *published* from owner to home from a window's start on
and gradients *collected* after a layer's last turn in it; weights are *pulled* from home to replica ahead of use and
gradients *returned*.
*Skew* is busiest rank over mean rank, in rows, of one layer in one micro-step.

Shape letters, one legend for the package: M micro-step, L MoE layer, R rank of the EP group, E expert, N node,
S slot, T token, K top-k, D hidden, F expert width, B sample. An array carries them: `load_MLRE[m, l, r, e]`.

Example: 4 ranks on 2 nodes, 8 experts, so 2 home slots per rank. Expert 5 is owned by rank 2 (5 // 2). If its home in
this window is rank 0, it is displaced across nodes; a replica of it may then stand on rank 1, the other rank of node 0.
"""

from equipoise.core.cluster import Cluster
from equipoise.core.errors import (
    AdapterError,
    EquipoiseError,
    InfeasiblePlanError,
    LoadsError,
    RoutesError,
    ScheduleError,
    TopologyError,
    TrainingError,
    TransferError,
)
from equipoise.core.loads import LoadMatrix, Stage
from equipoise.core.model import ModelShape
from equipoise.core.plan import Plan
from equipoise.core.routes import RouteCounts, Routes, SampleRoutes, Segment
from equipoise.core.schedule import LastTokenPolicy, PaddingPolicy, Piece, Schedule

__all__ = [
    "Cluster",
    "ModelShape",
    "Routes",
    "SampleRoutes",
    "Segment",
    "RouteCounts",
    "Schedule",
    "Piece",
    "PaddingPolicy",
    "LastTokenPolicy",
    "LoadMatrix",
    "Stage",
    "Plan",
    "EquipoiseError",
    "RoutesError",
    "ScheduleError",
    "LoadsError",
    "TopologyError",
    "InfeasiblePlanError",
    "TransferError",
    "AdapterError",
    "TrainingError",
]
