"""Value types that the whole package uses, their options and errors, and the glossary.

    errors.py    every error users meet
    value.py     what value types share
    files.py     files that are written completely or not at all; `.npz` archives
    compiled.py  how kernels are compiled and cached
    model.py     ModelShape: a Mixture-of-Experts model in figures
    cluster.py   Cluster: nodes, ranks, links
    options.py   PlanOptions, TransferOptions, BalancerOptions
    routes.py    SampleRoutes, Routes: recorded choices; RouteCounts: their histograms
    window.py    Schedule: who forwards which tokens when; LoadMatrix: rows per micro-step, layer, rank and expert
    split.py     which of an expert's rows its home and its replicas take, by source rank
    plan.py      Plan: homes, replicas, prices of one window; Itinerary: its visits; Explanation: what limits it
    plan_file.py plans on disk
    presets/     published figures of models and clusters, one data file each

Glossary:
    expert      a routed expert of one MoE layer, by its id in the model
    route       the ids of the K experts that a token uses in one layer
    row         one token at one of its experts, a row of a grouped product: T tokens make T x K rows
    load        a number of rows
    step        one RL step. Its *stages* are `recompute`, the log-prob pass, and `update`; each stage has windows
    window      what one plan is for: the log-prob pass, or one optimizer step (mini-batch) of the update
    micro-step  one micro-batch on every rank: forward and, in an update, backward
    visit       one layer in one micro-step, forward or backward
    rank, node  a process with one device; the ranks that NVLink connects
    owner       the rank that always keeps an expert's weights and optimizer state
    home        the rank that computes an expert during a window; an expert is *displaced* if its home is not its owner
    slot        room for one expert on a rank: home slots and replica slots
    replica     a copy of an expert in a replica slot, for one micro-step of one layer
    trade       two ranks swap equally many rows, each by a replica of the other's expert
    placement   the homes of all experts
    split       how many rows of an expert its home and each replica take, by source rank
    plan        placement, replicas, split and prices of one window
    publish, collect   send weights from owner to home when a window begins; send gradients and weights back after a
                       layer's last visit
    pull, return       copy weights from home to replica before they are used; send the replica's gradient to the home
    skew        rows of the busiest rank / rows of the mean rank, of one layer in one micro-step

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
