"""Hypothesis strategies for problems of one layer: every layout, load and limit that a window can bring, and small."""

import functools

import numpy as np
from hypothesis import strategies as st

from equipoise.core import Cluster, ModelShape
from equipoise.cost import CostModel
from equipoise.planner.replicas import LayerProblem

LAYOUTS = {
    "one rank": (0,),
    "one node": (0, 0, 0, 0),
    "two nodes": (0, 0, 1, 1),
    "strided": (0, 1, 0, 1),
    "uneven": (0, 0, 0, 1),
    "uneven and strided": (0, 1, 0, 1, 0),
    "three nodes of one": (0, 1, 2),
    "three nodes": (0, 0, 1, 1, 2, 2),
}


@functools.cache
def tables_of(ranks, experts, stage="update", top_k=2, sends="rows"):
    """Prices of an H200 cluster for a small model, wide enough for every number of slots used here."""
    model = ModelShape.preset("qwen3-30b-a3b", experts=experts, layers=1, top_k=top_k)
    cluster = Cluster.preset("h200", nodes=ranks, ranks_per_node=1)
    return CostModel.of(cluster, model, stage=stage, sends=sends).tables(2 * experts)


@st.composite
def loads(draw, micro_steps, ranks, experts):
    """[M, R, E] rows: zero, tied, one expert takes all, an empty source, tiny, skewed, near 2^31."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (micro_steps, ranks, experts)
    kind = draw(
        st.sampled_from(["zero", "tied", "one expert", "empty source", "tiny", "skewed", "huge", "one busy step"])
    )
    heat_E = rng.integers(1, 20, size=experts) ** 2
    load = rng.integers(0, 50, size=shape) * heat_E
    if kind in ("zero", "tied"):
        load = np.full(shape, 0 if kind == "zero" else 7)
    elif kind == "one expert":
        load[..., 1:] = 0
    elif kind == "empty source":
        load[:, 0] = 0
    elif kind == "tiny":
        load = rng.integers(0, 2, size=shape)
    elif kind == "huge":
        load = rng.integers(2**31 - 2**20, 2**31, size=shape) >> rng.integers(0, 8, size=experts)
    elif kind == "one busy step":
        load[1:] //= 100
    return np.ascontiguousarray(load, dtype=np.int64)


@st.composite
def homes(draw, experts, ranks):
    """[E] homes that give every rank its number, the owners most often."""
    owner_E = np.arange(experts) // (experts // ranks)
    if draw(st.booleans()):
        return owner_E
    return np.random.default_rng(draw(st.integers(0, 99))).permutation(owner_E)


@st.composite
def pairs(draw, experts):
    """[E, E] co-activation counts, or none."""
    if draw(st.booleans()):
        return np.zeros((0, 0), dtype=np.int64)
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 30, size=(experts, experts))
    both = raw + raw.T
    both[np.arange(experts), np.arange(experts)] = both.sum(axis=1)
    return both


@st.composite
def layers(draw):
    """(load_MRE, warm_home_E, pair_EE, problem, tables) as `plan_layer` takes them."""
    node_R = np.array(LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))])
    ranks = len(node_R)
    experts = ranks * draw(st.integers(1, 4))
    by_skew = draw(st.integers(0, 1))
    crosses = draw(st.booleans())
    problem = LayerProblem(
        node_R=node_R,
        domain_DR=np.stack([node_R, np.zeros_like(node_R)][: 2 if crosses else 1]),
        trades_across=int(crosses and not by_skew and draw(st.booleans())),
        slots=draw(st.sampled_from([0, 1, 2, experts + 1])),
        min_rows=draw(st.sampled_from([1, 1, 30])),
        by_skew=by_skew,
        gated=draw(st.integers(0, 1)),
        is_warm=draw(st.integers(0, 1)),
        budget=draw(st.sampled_from([0, 1, 2, 3, experts])),
        patience=draw(st.sampled_from([0, 5, 40, 160])),
        max_checks=draw(st.sampled_from([0, 7, 400, 6400])),
        near_checks=draw(st.sampled_from([0, 7, 400])),
        near_steps=draw(st.sampled_from([1, 16])),
        row_weight=draw(st.sampled_from([0, 1, 300])),
        link_weight=draw(st.sampled_from([0, 1, 2000])),
        cost_inside=0 if by_skew else draw(st.sampled_from([0, 100, 50_000])),
        cost_across=0 if by_skew else draw(st.sampled_from([0, 1000, 500_000])),
        layers=draw(st.sampled_from([1, 3])),
        edge_ns_22=np.array([[draw(st.sampled_from([0, 1000, 100_000, 1_000_000])) for _ in "ia"] for _ in "pc"]),
        edge_fixed_ns=draw(st.sampled_from([0, 3000])),
        crossing_ns=draw(st.sampled_from([0, 3000, 1_000_000])),
        hides_2=np.array([draw(st.sampled_from([0, 2000, 300_000])) for _ in "pc"]),
        edge_slow_22=np.array([[draw(st.sampled_from([0, 500, 20_000])) for _ in "ia"] for _ in "pc"]),
    )
    load_MRE = draw(loads(draw(st.sampled_from([1, 2, 3, 7])), ranks, experts))
    stage = draw(st.sampled_from(["recompute", "update"]))
    tables = tables_of(ranks, experts, stage, min(2, experts), draw(st.sampled_from(["rows", "tokens"])))
    return load_MRE, draw(homes(experts, ranks)), draw(pairs(experts)), problem, tables
