"""The nouns: frozen, self-checking value types, their options and errors, and the glossary.

    errors.py    every error users meet
    value.py     what value types share
    files.py     files that are written completely or not at all; `.npz` archives
    compiled.py  how kernels are compiled and cached
    model.py     ModelShape: a Mixture-of-Experts model in figures
    cluster.py   Cluster: nodes, ranks, links
    options.py   PlanOptions, TransferOptions, BalancerOptions
    routes.py    SampleRoutes, Routes: recorded choices; RouteCounts: their histograms
    window.py    Schedule: who forwards which tokens when; LoadMatrix: rows per micro-step, layer, rank and expert
    split.py     an expert's rows over its holders, by source
    plan.py      Plan: homes, replicas, prices of one window; Itinerary: its visits in order; Explanation: what binds
    plan_file.py plans on disk
    presets/     published figures of models and clusters, one data file each

Glossary:
    expert      a logical routed expert of one MoE layer
    route       the expert ids one token chose in one layer; its K assignments are K *rows*
    row         one token-assignment as a GEMM sees it: T tokens make T x K rows
    load        a number of rows
    step        one RL step; it has *stages* (`recompute`, `update`), a stage has windows
    window      a run of micro-steps between two weight versions: the recompute stage, or one mini-batch of the update
    micro-step  one micro-batch of all ranks, forward and, in an update, backward
    rank, node  a process with one device; a fast-interconnect (NVLink) domain of ranks
    owner       the rank that keeps an expert's weights and optimizer state for good
    home        the rank where an expert computes during a window; a *displaced* expert's home is not its owner
    slot        a place on a rank that holds one expert: home slots and replica slots
    replica     a copy of an expert in a replica slot, for one micro-step of one layer
    trade       two ranks each take, by a replica, as many rows of the other as they give
    placement   which expert has its home where
    split       how many rows of an expert each holder takes, per source rank
    plan        placement, replicas, split and prices of one window
    publish, collect   send weights from owner to home from a window's start on; send gradients back after a layer's
                       last visit
    pull, return       copy weights from home to replica ahead of use; send its gradient back
    skew        busiest rank over mean rank, in rows, of one layer in one micro-step

Shape letters, one legend for the package: M micro-step, L MoE layer, R rank of the EP group, E expert, N node,
S slot, T token, K top-k, D hidden, F expert width, B sample. An array carries them: `load_MLRE[m, l, r, e]`.

Example: 4 ranks on 2 nodes, 8 experts, so 2 home slots per rank. Expert 5 is owned by rank 2 (5 // 2). If its home in
this window is rank 0, it is displaced across nodes; a replica of it may then be on rank 1, the other rank of node 0.
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
from equipoise.core.model import ModelShape
from equipoise.core.plan import Plan
from equipoise.core.routes import RouteCounts, Routes, SampleRoutes, Segment
from equipoise.core.window import LastTokenPolicy, LoadMatrix, PaddingPolicy, Piece, Schedule, Stage

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
