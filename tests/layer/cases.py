"""Small windows for the tests of layers and transfers: routes, and plans of every kind for them.

Knows core only, so that worker processes can import it without the planner.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import Bytes, Plan, ReplicaTable, Seconds

HIDDEN, WIDTH, TOP_K = 32, 24, 3


@dataclass(frozen=True, eq=False)
class Routing:
    """Ids of one window: `ids[m][l][r]` is the [T, K] array of a source rank. T may differ by rank and micro-step."""

    ids: list
    experts: int

    @property
    def shape(self):
        return len(self.ids), len(self.ids[0]), len(self.ids[0][0])

    def loads(self):
        count = [
            [[np.bincount(a[a >= 0], minlength=self.experts) for a in layer] for layer in micro_step]
            for micro_step in self.ids
        ]
        return LoadMatrix(np.array(count))


def random_routing(seed, *, ranks, experts=8, micro_steps=2, layers=2, tokens=20, silent=(), avoid=()):
    """Skewed routes with distinct experts per token.

    Args:
        silent: source ranks without a token
        avoid: experts no token chooses
    """
    rng = np.random.default_rng(seed)
    allowed = np.array([e for e in range(experts) if e not in avoid])
    share = rng.dirichlet(np.full(len(allowed), 0.7)) + 1e-3

    def draw(rank):
        count = 0 if rank in silent else int(rng.integers(tokens // 2, tokens + 1))
        rows = [rng.choice(allowed, TOP_K, replace=False, p=share / share.sum()) for _ in range(count)]
        return np.array(rows, dtype=np.int64).reshape(count, TOP_K)

    ids = []
    for _ in range(micro_steps):
        first = [draw(rank) for rank in range(ranks)]
        # A token passes all layers, so each rank keeps its number of tokens; layers are rolled against each other.
        ids.append([[(a + layer) % experts if not avoid else a for a in first] for layer in range(layers)])
    return Routing(ids=ids, experts=experts)


def with_gaps(routing, seed):
    """The same routes with some tokens that have fewer experts, and some that have none."""
    rng = np.random.default_rng(seed)

    def thin(ids_TK):
        is_gap_TK = rng.random(ids_TK.shape) < 0.25
        is_gap_TK[: len(ids_TK) // 8] = True
        return np.where(is_gap_TK, -1, ids_TK)

    return Routing(ids=[[[thin(a) for a in layer] for layer in by] for by in routing.ids], experts=routing.experts)


def cluster_of(ranks, *, nodes=1):
    return Cluster.preset("h200", nodes=nodes, ranks_per_node=-(-ranks // nodes), ep=ranks)


def model_of(routing):
    _, layers, _ = routing.shape
    return ModelShape.preset(
        "qwen3-30b-a3b", experts=routing.experts, layers=layers, top_k=TOP_K, hidden=HIDDEN, expert_width=WIDTH
    )


def static_plan(routing, *, slots=0, nodes=1):
    """Contiguous homes, no replica."""
    _, layers, ranks = routing.shape
    slot_E = np.arange(routing.experts)
    place_LE = np.tile(slot_E, (layers, 1))
    return _plan(routing, place_LE, [], slots=slots, cluster=cluster_of(ranks, nodes=nodes))


def random_plan(routing, seed, *, slots, nodes=1, is_displaced=True):
    """Random homes, and random replicas inside the home's node with random rows."""
    rng = np.random.default_rng(seed)
    micro_steps, layers, ranks = routing.shape
    cluster = cluster_of(ranks, nodes=nodes)
    order = [rng.permutation(routing.experts) if is_displaced else np.arange(routing.experts) for _ in range(layers)]
    place_LE = np.array(order)
    total_MLE, home_LE = routing.loads().total_MLE(), place_LE // (routing.experts // ranks)
    found = []
    for entry in range(micro_steps * layers):
        m, layer = divmod(entry, layers)
        found.append(_random_replicas(rng, total_MLE[m, layer], home_LE[layer], cluster=cluster, slots=slots))
    return _plan(routing, place_LE, found, slots=slots, cluster=cluster)


def _random_replicas(rng, total_E, home_E, *, cluster, slots):
    """(expert, rank, rows) of one entry, in random order."""
    left_E, held, made = total_E.copy(), set(), []
    for rank in np.repeat(rng.permutation(cluster.ep), slots):
        inside = [e for e in range(len(left_E)) if cluster.node_R[home_E[e]] == cluster.node_R[rank]]
        choices = [e for e in inside if home_E[e] != rank and left_E[e] > 0 and (e, rank) not in held]
        if not choices or rng.random() < 0.3:
            continue
        expert = int(rng.choice(choices))
        rows = int(rng.integers(1, left_E[expert] + 1))
        left_E[expert] -= rows
        held.add((expert, rank))
        made.append((expert, int(rank), rows))
    return made


def _plan(routing, place_LE, replicas, *, slots, cluster):
    loads, home_slots = routing.loads(), routing.experts // cluster.ep
    shape_ML = (loads.num_micro_steps, loads.num_layers)
    replicas = replicas or [[] for _ in range(shape_ML[0] * shape_ML[1])]
    flat = np.array([one for entry in replicas for one in entry], dtype=np.int64).reshape(-1, 3)
    table = ReplicaTable(
        start_ML=np.cumsum([0, *map(len, replicas)]),
        expert_P=flat[:, 0],
        rank_P=flat[:, 1],
        rows_P=flat[:, 2],
        path_P2=np.zeros((len(flat), 2), dtype=np.int64),
    )
    return Plan(
        loads=loads,
        cluster=cluster,
        model=model_of(routing),
        policy="equipoise",
        objective="skew",
        slots=slots,
        home_LE=place_LE // home_slots,
        home_slot_LE=place_LE % home_slots,
        replica_table=table,
        ns_ML=np.zeros(shape_ML, dtype=np.int64),
        closed_ns_ML=np.zeros(shape_ML, dtype=np.int64),
        seconds=Seconds(),
        bytes=Bytes(),
        static_seconds=0.0,
    )
