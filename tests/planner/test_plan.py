"""`eq.plan`: every promise of the public face, on every entry of small windows and on awkward ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import equipoise as eq
from benchmarks.planner_rows import generated_loads, mean_skew
from equipoise.core.options import replica_bytes
from equipoise.cost import CostModel
from equipoise.cost.kernels import price
from equipoise.planner import replicas
from equipoise.planner.assemble import home_links
from equipoise.planner.homes import level
from equipoise.planner.layer import crossings
from equipoise.planner.replicas import fill, node_bound
from tests.planner import problems

few = settings(max_examples=60, deadline=None)
ROOT = Path(__file__).parents[2]


def window(seed=0, *, micro_steps=3, layers=2, ranks=8, experts=32, stage="update", rows=200):
    """A skewed window whose heat moves a little from micro-step to micro-step."""
    rng = np.random.default_rng(seed)
    heat = rng.lognormal(0, 1, size=(layers, 1, experts)) * rng.lognormal(
        0, 0.3, size=(micro_steps, layers, 1, experts)
    )
    return eq.LoadMatrix(
        (rng.poisson(rows, size=(micro_steps, layers, ranks, experts)) * heat).astype(np.int64), stage=stage
    )


def model_for(loads):
    """A model shape that fits the loads, top-2."""
    experts, layers = loads.num_experts, loads.num_layers
    return eq.ModelShape.preset("qwen3-30b-a3b", experts=experts, layers=layers, top_k=min(2, experts))


def planned(loads, *, node_R=(0, 0, 0, 0, 1, 1, 1, 1), **arguments):
    """Plan on an H200 cluster of this layout."""
    return eq.plan(loads, cluster=eq.Cluster.preset("h200", node_R=node_R), model=model_for(loads), **arguments)


def check_promises(plan):
    """Quotas and splits sum, slots and nodes hold, homes keep their numbers: on every (micro-step, layer)."""
    node_R, home_slots = plan.cluster.node_array_R, plan.home_slots
    for layer in range(plan.loads.num_layers):
        home_E = plan.home_LE[layer]
        assert np.bincount(home_E, minlength=len(node_R)).tolist() == [home_slots] * len(node_R)
        assert len(set(zip(home_E.tolist(), plan.home_slot_LE[layer].tolist(), strict=True))) == len(home_E)
        for m in range(plan.loads.num_micro_steps):
            load_RE, quota, split = plan.loads.load_MLRE[m, layer], plan.quota_ER(m, layer), plan.split_RER(m, layer)
            assert quota.dtype == split.dtype == np.int64
            assert quota.min() >= 0 and split.min() >= 0
            assert np.array_equal(quota.sum(axis=1), load_RE.sum(axis=0))
            assert np.array_equal(split.sum(axis=2), load_RE)
            assert np.array_equal(split.sum(axis=0), quota)
            assert np.array_equal(quota.sum(axis=0), plan.rank_load_MLR[m, layer])
            check_replicas(plan, m, layer, quota)


def check_replicas(plan, micro_step, layer, quota):
    replicas, home_E = plan.replicas(micro_step, layer), plan.home_LE[layer]
    node_R = plan.cluster.node_array_R
    assert len(set(replicas)) == len(replicas)
    assert max(np.bincount([r.rank for r in replicas], minlength=1)) <= plan.slots
    for expert, rank in replicas:
        assert rank != home_E[expert]
        assert quota[expert, rank] > 0
        assert plan.cross_node or node_R[rank] == node_R[home_E[expert]]
    held = {(e, int(home_E[e])) for e in range(len(home_E))} | set(replicas)
    assert {(int(e), int(r)) for e, r in np.argwhere(quota > 0)} <= held


@st.composite
def small_windows(draw):
    """(loads, arguments of `planned`): any layout, load, stage, objective and option."""
    node_R = problems.LAYOUTS[draw(st.sampled_from(sorted(problems.LAYOUTS)))]
    experts = len(node_R) * draw(st.integers(1, 3))
    micro_steps = draw(st.sampled_from([1, 2, 5]))
    layers = [draw(problems.loads(micro_steps, len(node_R), experts)) for _ in range(draw(st.integers(1, 2)))]
    options = eq.PlanOptions(
        max_displaced=draw(st.sampled_from([None, None, 0, 1, 2])),
        cross_node=draw(st.booleans()),
        gate=draw(st.sampled_from([True, True, False])),
        sends=draw(st.sampled_from(["rows", "tokens"])),
    )
    loads = eq.LoadMatrix(np.stack(layers, axis=1), stage=draw(st.sampled_from(["recompute", "update"])))
    objective = draw(st.sampled_from(["seconds", "skew"]))
    slots = draw(st.sampled_from([0, 1, 2, experts + 1]))
    return loads, {"node_R": node_R, "objective": objective, "slots": slots, "options": options}


@given(small_windows())
@few
def test_every_promise_holds_on_every_entry(case):
    loads, arguments = case
    plan = planned(loads, **arguments)
    check_promises(plan)
    limit = arguments["options"].max_displaced
    assert limit is None or (plan.displaced_LE.sum(axis=1) <= limit).all()
    assert not plan.cross_node or arguments["options"].cross_node


@given(small_windows())
@few
def test_never_slower_than_static(case):
    loads, arguments = case
    arguments = {**arguments, "objective": "seconds", "options": eq.PlanOptions(sends=arguments["options"].sends)}
    plan = planned(loads, **arguments)
    static = planned(loads, **{**arguments, "policy": "static"})
    assert plan.seconds.total <= plan.static_seconds == static.seconds.total
    assert plan.saved_seconds >= 0
    assert (plan.ns_ML <= plan.closed_ns_ML).all()


@given(small_windows())
@few
def test_skew_is_never_worse_than_at_the_owners(case):
    loads, arguments = case
    plan = planned(loads, **{**arguments, "objective": "skew"})
    static = planned(loads, **{**arguments, "policy": "static"})
    weight_ML = 2**40 // np.maximum(1, loads.load_MLRE.sum(axis=(2, 3)) // loads.num_ranks)
    value_L, static_L = ((p.rank_load_MLR.max(axis=2) * weight_ML).sum(axis=0) for p in (plan, static))
    assert (value_L <= static_L).all()


AWKWARD = {
    "zero loads": np.zeros((2, 1, 8, 16), dtype=np.int64),
    "one expert takes everything": np.eye(1, 16, 3, dtype=np.int64)[None, None].repeat(8, axis=2).repeat(2, axis=0)
    * 999,
    "an empty rank": window(1, layers=1, experts=16).load_MLRE * (np.arange(8) != 2)[:, None],
    "one micro-step": window(2, micro_steps=1, experts=16).load_MLRE,
    "one micro-step is empty": window(3, experts=16).load_MLRE * (np.arange(3) != 1)[:, None, None, None],
    "a single row": np.eye(1, 128, 77, dtype=np.int64).reshape(1, 1, 8, 16),
    "loads near 2^31": np.random.default_rng(4).integers(2**31 - 1000, 2**31, size=(2, 1, 8, 16)),
    "loads near 2^31 beside none": np.random.default_rng(5).integers(0, 2, size=(2, 1, 8, 16)) * (2**31 - 1),
    "M=1000": window(6, micro_steps=1000, layers=1, experts=16, rows=20).load_MLRE,
    "small dtype": window(7, experts=16, rows=5).load_MLRE.astype(np.uint8),
}


@pytest.mark.parametrize("objective", ["seconds", "skew"])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_loads_give_plans_that_keep_their_promises(name, objective):
    loads = eq.LoadMatrix(AWKWARD[name])
    for slots in (0, 1, 20):
        plan = planned(loads, objective=objective, slots=slots)
        check_promises(plan if name != "M=1000" else planned(loads.micro_steps(0, 7), objective=objective, slots=slots))
        assert np.array_equal(plan.rank_load_MLR.sum(axis=2), loads.load_MLRE.sum(axis=(2, 3)))
        assert plan.saved_seconds >= 0 or objective == "skew"


@pytest.mark.parametrize("layout", sorted(problems.LAYOUTS))
def test_layouts_with_level_loads_are_left_alone(layout):
    node_R = problems.LAYOUTS[layout]
    plan = planned(eq.LoadMatrix(np.full((2, 1, len(node_R), 2 * len(node_R)), 50)), node_R=node_R)
    assert not plan.displaced_LE.any()
    assert len(plan.replica_table) == 0
    assert plan.saved_seconds == 0


@pytest.mark.parametrize(
    "node_R", [(0, 0, 0, 0, 0, 1, 1, 1), (0, 1, 1, 1, 1, 1, 1, 1), (0, 1, 0, 1, 0, 1, 0, 0)], ids=str
)
def test_uneven_and_strided_nodes_are_levelled_by_rows_per_rank(node_R):
    plan = planned(window(8), node_R=node_R, objective="skew", slots=2)
    check_promises(plan)
    rows_MLR = plan.rank_load_MLR
    assert (rows_MLR.max(axis=2) / rows_MLR.mean(axis=2)).mean() < 1.02


def test_homes_at_their_owners():
    plan = planned(window(9), options=eq.PlanOptions(max_displaced=0))
    assert not plan.displaced_LE.any()
    assert plan.seconds.publish == plan.seconds.collect == plan.bytes.edge_inside == plan.bytes.edge_across == 0
    assert len(plan.replica_table) > 0


def test_no_replicas_without_slots():
    plan = planned(window(10), slots=0)
    assert len(plan.replica_table) == 0
    assert np.array_equal(plan.ns_ML, plan.closed_ns_ML)
    assert plan.displaced_LE.any()
    assert plan.saved_seconds > 0


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_displacement_budget_is_kept_warm_or_cold(limit):
    loads = window(11)
    free = planned(loads, objective="skew")
    assert (free.displaced_LE.sum(axis=1) > limit).all()
    options = eq.PlanOptions(max_displaced=limit)
    for warm in (None, free):
        plan = planned(loads, objective="skew", options=options, warm=warm)
        assert (plan.displaced_LE.sum(axis=1) <= limit).all()


def test_a_byte_budget_is_as_many_slots_as_fit_in_all_buffers():
    loads = window(12)
    size = replica_bytes(model_for(loads), loads.stage)
    for budget, slots in ((4 * size, 2), (4 * size - 1, 1), (size, 0)):
        plan = planned(loads, options=eq.PlanOptions(memory_bytes=budget))
        assert plan.slots == slots
        assert plan == planned(loads, slots=slots)


def test_cross_node_replicas_lift_the_node_bound_in_both_stages():
    load = window(13, stage="recompute").load_MLRE.copy()
    load[..., :16] *= 3
    owners = {"objective": "skew", "slots": 2}
    stay, cross = (eq.PlanOptions(max_displaced=0, cross_node=cross, sends="rows") for cross in (False, True))
    for stage in ("recompute", "update"):
        loads = eq.LoadMatrix(load, stage=stage)
        inside, across = planned(loads, options=stay, **owners), planned(loads, options=cross, **owners)
        check_promises(across)
        assert across.cross_node and not inside.cross_node
        busiest = [p.rank_load_MLR.max(axis=2).sum() for p in (inside, across)]
        assert busiest[1] < 0.8 * busiest[0]
    far = planned(eq.LoadMatrix(load, stage="recompute"), options=cross, **owners)
    homes, node_R = far.home_LE, far.cluster.node_array_R
    entry_P, table = far.replica_table.entry_P, far.replica_table
    crosses_P = node_R[table.rank_P] != node_R[homes[entry_P % 2, table.expert_P]]
    assert crosses_P.any()
    # Only the host store holds experts of another node.
    assert (table.path_P2[crosses_P, 0] == 1).all()


def hot_window(rows=20_000):
    """One expert of 32 takes about half of all rows: no node of two ranks can compute that in its share of the time."""
    load = np.random.default_rng(3).integers(0, rows // 16, size=(4, 2, 8, 32))
    load[..., 5] = rows
    return eq.LoadMatrix(load, stage="recompute")


def test_crossing_is_charged_for_what_it_brings_and_beats_copies_that_stay():
    loads, nodes = hot_window(), {"node_R": (0, 0, 1, 1, 2, 2, 3, 3)}
    options = (eq.PlanOptions(cross_node=cross, sends="rows") for cross in (False, True))
    inside, across = (planned(loads, options=one, **nodes) for one in options)
    check_promises(across)
    assert across.cross_node and not inside.cross_node
    assert across.seconds.total < 0.7 * inside.seconds.total
    assert across.seconds.total < planned(loads, policy="eplb-oracle", **nodes).seconds.total
    cost = CostModel.of(across.cluster, across.model, stage="recompute")
    links, moved = home_links(across.home_LE, across.cluster), 0
    for layer, home_E in enumerate(across.home_LE):
        rep_expert_MRS = np.full((4, 8, 1), -1)
        for m in range(4):
            for expert, rank in across.replicas(m, layer):
                rep_expert_MRS[m, rank, 0] = expert
        crossing_2R = crossings(rep_expert_MRS, home_E, across.cluster.node_array_R)
        moved += int(crossing_2R[0].sum())
        displaced = {"inside_experts": int(links.inside_L[layer]), "across_experts": int(links.across_L[layer])}
        displaced_ns = [cost.edge_ns(edge=edge, **displaced) for edge in ("publish", "collect")]
        crossing_ns = cost.edge_ns(inside_experts=0, across_experts=int(crossing_2R.max()), edge="publish")
        assert crossing_ns > 0
        assert across.edge_ns_2L[:, layer].tolist() == [displaced_ns[0] + crossing_ns, displaced_ns[1]]
    assert 0 < across.seconds.publish <= 1.5e-9 * across.edge_ns_2L[0].sum()
    assert across.bytes.edge_across == (2 * links.all_across + moved) * across.model.expert_bytes


def test_a_store_takes_an_expert_once_and_the_ranks_of_its_node_take_turns():
    home_E, node_R = np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1])
    # Expert 0 is needed by both ranks of node 1, in two micro-steps; expert 3 by node 0; expert 1 stays inside.
    rep_expert_MRS = np.array([[[1], [-1], [0], [0]], [[3], [0], [0], [-1]]])
    assert crossings(rep_expert_MRS, home_E, node_R).tolist() == [[1, 0, 0, 1], [1, 0, 1, 0]]
    # Now node 1 needs both experts of node 0, one for each of its ranks to receive.
    rep_expert_MRS[1, 3] = 1
    assert crossings(rep_expert_MRS, home_E, node_R).tolist() == [[1, 1, 0, 1], [1, 0, 1, 1]]


def test_crossing_is_left_where_bringing_experts_costs_more_than_it_saves():
    # Few rows, so that a level layer saves microseconds, and the same hot expert.
    loads, nodes = hot_window(rows=64), {"node_R": (0, 0, 1, 1, 2, 2, 3, 3)}
    options = (eq.PlanOptions(cross_node=cross, sends="rows") for cross in (False, True))
    inside, across = (planned(loads, options=one, **nodes) for one in options)
    assert not across.cross_node
    assert across.seconds == inside.seconds


def test_what_is_displaced_spreads_over_the_owners_where_many_experts_serve_as_well():
    # Node 0 owns all experts that are used; any of node 1's may come in exchange.
    load = np.random.default_rng(5).integers(100, 900, size=(8, 2, 16, 256)) * (np.arange(256) % 9 + 1)
    load[..., 128:] = 0
    plan = planned(eq.LoadMatrix(load), node_R=(0,) * 8 + (1,) * 8)
    node_R, owner_E = plan.cluster.node_array_R, plan.owner_E
    for home_E in plan.home_LE:
        left_E = node_R[home_E] != node_R[owner_E]
        leaving_R = np.bincount(owner_E[left_E], minlength=16)
        assert leaving_R.sum() > 32
        assert leaving_R.max() <= 2 * leaving_R.mean()


def test_partial_coverage_is_accepted_estimated_and_said():
    full = window(14)
    coverage = np.ones((3, 2, 8))
    coverage[0], coverage[1, 0, 2] = 0.5, 0.0
    known = (full.load_MLRE * coverage[..., None]).astype(np.int64)
    plan = planned(eq.LoadMatrix(known, coverage_MLR=coverage))
    check_promises(plan)
    added = plan.loads.load_MLRE.sum() - known.sum()
    assert plan.estimated_share == added / plan.loads.load_MLRE.sum() > 0.1
    assert (plan.loads.load_MLRE >= known).all()
    assert "are estimated" in str(plan.explain(0, 0))
    assert planned(full).estimated_share == 0


def test_pair_counts_lower_the_price_of_crossing_nodes():
    loads = window(15)
    pair_LEE = np.ones((2, 32, 32), dtype=np.int64)
    pair_LEE[:, np.arange(32), np.arange(32)] = 40
    rows = eq.PlanOptions(sends="rows")
    blind, seeing = planned(loads, options=rows), planned(loads, options=rows, pair_LEE=pair_LEE)
    check_promises(seeing)
    assert seeing.static_seconds <= blind.static_seconds
    assert seeing.bytes.all_to_all_across < blind.bytes.all_to_all_across


WINDOW = window(16)
UNEQUAL = np.zeros((2, 32, 32), dtype=np.int64)
UNEQUAL[0, 1, 2] = 1


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"model": eq.ModelShape.preset("qwen3-30b-a3b", experts=64, layers=2)}, eq.LoadsError, "2 of 64"),
        ({"model": eq.ModelShape.preset("qwen3-30b-a3b", experts=32, layers=3)}, eq.LoadsError, "3 of 32"),
        ({"cluster": eq.Cluster.preset("h200", ep=4)}, eq.LoadsError, "8 source ranks, the EP group has 4"),
        ({"cluster": "h200"}, eq.InfeasiblePlanError, "cluster is a str; it must be a Cluster, made by eq.Cluster"),
        ({"model": "olmoe"}, eq.InfeasiblePlanError, "model is a str; it must be a ModelShape"),
        ({"options": {"gate": False}}, eq.InfeasiblePlanError, "options is a dict; it must be a PlanOptions"),
        ({"policy": "juggle"}, eq.InfeasiblePlanError, "no policy 'juggle'; known: equipoise, static"),
        ({"objective": "fame"}, eq.InfeasiblePlanError, "objective is 'fame'; it must be one of seconds, skew"),
        ({"slots": -1}, eq.InfeasiblePlanError, "slots is -1; it must be at least 0"),
        ({"slots": 1.0}, eq.InfeasiblePlanError, "slots must be a whole number"),
        ({"slots": 1, "options": eq.PlanOptions(memory_bytes=9)}, eq.InfeasiblePlanError, "not both"),
        ({"pair_LEE": np.zeros((2, 32, 31), dtype=np.int64)}, eq.LoadsError, r"pair_LEE has shape \(2, 32, 31\)"),
        ({"pair_LEE": np.zeros((2, 32, 32))}, eq.LoadsError, "pair_LEE must hold integers"),
        ({"pair_LEE": UNEQUAL}, eq.LoadsError, "symmetric and not negative"),
        ({"warm": lambda: planned(window(16, ranks=4), node_R=(0, 0, 1, 1))}, eq.InfeasiblePlanError, "on 4 ranks"),
        ({"warm": lambda: planned(window(16, layers=1))}, eq.InfeasiblePlanError, r"homes of shape \(1, 32\)"),
        ({"warm": lambda: planned(WINDOW, policy="eplb-oracle")}, eq.InfeasiblePlanError, "warm persistent plan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_planned_is_refused_in_words(changed, error, words):
    right = {"cluster": eq.Cluster.preset("h200", nodes=2, ranks_per_node=4), "model": model_for(WINDOW)}
    changed = {name: value() if name == "warm" else value for name, value in changed.items()}
    with pytest.raises(error, match=words):
        eq.plan(WINDOW, **{**right, **changed})


def test_loads_that_are_still_an_array_are_refused_in_words():
    right = {"cluster": eq.Cluster.preset("h200", nodes=2, ranks_per_node=4), "model": model_for(WINDOW)}
    with pytest.raises(eq.InfeasiblePlanError, match="loads is a ndarray; it must be a LoadMatrix"):
        eq.plan(WINDOW.load_MLRE, **right)


def test_experts_that_do_not_divide_are_refused_with_a_way_out():
    loads = eq.LoadMatrix(np.ones((1, 1, 8, 30), dtype=np.int64))
    with pytest.raises(
        eq.TopologyError, match=r"30 experts of .* do not divide by 8 ranks; use an EP size that divides"
    ):
        planned(loads)


@pytest.mark.parametrize(("rows", "share"), [(2**33 + 1, 1.0), (2**30, 0.1)], ids=["counted", "estimated"])
def test_more_rows_than_the_search_can_multiply_are_refused_by_their_place(rows, share):
    load = np.ones((2, 1, 8, 16), dtype=np.int64)
    load[1] = rows
    loads = eq.LoadMatrix(load, coverage_MLR=np.full((2, 1, 8), share))
    with pytest.raises(eq.LoadsError, match=r"micro-step 1, layer index 0 has \d+ rows, .* at most 2\^40"):
        planned(loads)


@pytest.mark.parametrize("objective", ["seconds", "skew"])
def test_the_most_rows_that_are_planned_are_levelled_as_a_few_are(objective):
    few = window(21, layers=1, experts=16, rows=1000).load_MLRE
    many = few * (2**40 // int(few.sum(axis=(2, 3)).max()))
    small, large = (planned(eq.LoadMatrix(load), objective=objective, slots=2) for load in (few * 1000, many))
    check_promises(large)
    assert large.saved_seconds > 0
    # Sums or products that overflow level nothing.
    skews = [float((plan.rank_load_MLR.max(axis=2) / plan.rank_load_MLR.mean(axis=2)).max()) for plan in (small, large)]
    assert skews[1] <= skews[0] + 0.005


@pytest.mark.parametrize("rows", [20, 20_000])
def test_an_update_window_crosses_nodes_where_that_pays_and_is_never_slower_for_it(rows):
    loads, nodes = eq.LoadMatrix(hot_window(rows).load_MLRE), {"node_R": (0, 0, 1, 1, 2, 2, 3, 3)}
    options = (eq.PlanOptions(cross_node=cross, sends="rows") for cross in (False, True))
    inside, across = (planned(loads, options=one, **nodes) for one in options)
    check_promises(across)
    assert across.seconds.total <= inside.seconds.total
    assert across.cross_node == (rows == 20_000), "a few rows do not pay for gradients that return across nodes"
    far = across.bytes.edge_across - inside.bytes.edge_across
    assert across.seconds.total <= 0.8 * inside.seconds.total and far > 0 if across.cross_node else far == 0


def hot_top_1_window(ranks, experts, rows, *, hot, seed):
    """Three Switch layers: one to three experts take a tenth to six tenths of all rows, `rows` of each source."""
    rng = np.random.default_rng(seed)
    share_E, taken = rng.lognormal(0, 0.5, size=experts), rng.uniform(0.1, 0.6)
    share_E *= (1 - taken) / share_E.sum()
    share_E[rng.choice(experts, size=hot, replace=False)] += taken / hot
    mean_MLRE = share_E * rows * rng.uniform(0.7, 1.3, size=(2, 3, 1, experts))
    return eq.LoadMatrix(rng.poisson(mean_MLRE, size=(2, 3, ranks, experts)))


@given(
    st.sampled_from([(32, 32), (32, 64), (64, 64)]),
    st.sampled_from([20, 400, 1500, 5000]),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(0, 2**32 - 1),
)
@example((32, 32), 1500, 2, 1, 8)
@settings(max_examples=25, deadline=None)
def test_top_1_layers_with_hot_experts_are_never_slower_for_replicas_that_may_cross_nodes(
    sizes, rows, hot, slots, seed
):
    """In the example price lines say that crossing pays, and the clock does not."""
    loads = hot_top_1_window(*sizes, rows, hot=hot, seed=seed)
    model = eq.ModelShape.preset("qwen3-30b-a3b", experts=sizes[1], layers=3, top_k=1)
    given = {"cluster": eq.Cluster.preset("h200", ranks_per_node=8, ep=sizes[0]), "model": model, "slots": slots}
    inside, across = (eq.plan(loads, **given, options=eq.PlanOptions(cross_node=cross)) for cross in (False, True))
    assert across.seconds.total <= inside.seconds.total <= across.static_seconds


def test_one_and_two_workers_give_the_same_bytes(tmp_path):
    loads = window(17, layers=5)
    for workers in (1, 2):
        planned(loads, options=eq.PlanOptions(workers=workers)).save(tmp_path / f"{workers}.npz")
    first, second = (eq.Plan.load(tmp_path / f"{workers}.npz") for workers in (1, 2))
    assert first == second
    assert (tmp_path / "1.npz").read_bytes() == (tmp_path / "2.npz").read_bytes()


SCRIPT = """
import sys
import equipoise as eq
loads = eq.LoadMatrix.load(sys.argv[1])
model = eq.ModelShape.preset("qwen3-30b-a3b", experts=loads.num_experts, layers=loads.num_layers, top_k=2)
cluster = eq.Cluster.preset("h200", nodes=2, ranks_per_node=4)
eq.plan(loads, cluster=cluster, model=model, slots=1).save(sys.argv[2])
"""


def run_script(script, *arguments, **environment):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=300, cwd="/")


def test_two_processes_give_the_same_bytes_as_this_one(tmp_path):
    loads = window(18)
    loads.save(tmp_path / "loads.npz")
    planned(loads, slots=1).save(tmp_path / "here.npz")
    eq.Plan.load(tmp_path / "here.npz").save(tmp_path / "again.npz")
    for name, seed in (("first", "1"), ("second", "2")):
        done = run_script(SCRIPT, tmp_path / "loads.npz", tmp_path / f"{name}.npz", PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
    wanted = (tmp_path / "here.npz").read_bytes()
    assert all((tmp_path / f"{name}.npz").read_bytes() == wanted for name in ("again", "first", "second"))


KERNELS_SCRIPT = """
import numpy as np
from equipoise.cost import clock, kernels, links, window
from equipoise.planner import homes, layer, replicas
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher
rooms = (clock, kernels, links, window, homes, replicas, layer)
found = {v for room in rooms for v in vars(room).values() if isinstance(v, Dispatcher)}
print(len(found), sum(isinstance(kernel._cache, NullCache) for kernel in found))
print(replicas.homes_by_rank(np.arange(16) // 2, 8).tolist())
print(replicas.node_bound(np.arange(8), np.arange(8) // 4))
"""


def test_kernels_of_a_read_only_install_run_and_leave_no_file(tmp_path):
    """Every kernel is decorated there and two are compiled; all of them take a minute."""
    installed = tmp_path / "site"
    shutil.copytree(ROOT / "equipoise", installed / "equipoise", ignore=shutil.ignore_patterns("__pycache__"))
    # A file where the cache folder would be cannot be made a folder, not even by root; nor is there a home to cache in.
    for room in ("core", "cost", "loads", "planner"):
        (installed / "equipoise" / room / "__pycache__").touch()
    nowhere = {"PYTHONPATH": str(installed), "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/cache"}
    done = run_script(KERNELS_SCRIPT, **nowhere)
    assert done.returncode == 0, done.stderr
    counts, homes, bound = done.stdout.splitlines()
    total, uncached = map(int, counts.split())
    assert total == uncached > 40
    assert homes == str(replicas.homes_by_rank(np.arange(16) // 2, 8).tolist())
    assert int(bound) == node_bound(np.arange(8), np.arange(8) // 4)
    assert not list(installed.rglob("*.nbi"))


PLAIN_SCRIPT = """
import sys
from tests.planner.test_plan import digests_of_small_windows
print(*digests_of_small_windows(), sep="\\n")
"""


def digests_of_small_windows():
    """Digests of plans that call every kernel: crossing, both stages, both objectives, copies that stay, `balanced`."""
    found = []
    for stage, objective in (("recompute", "seconds"), ("update", "seconds"), ("update", "skew")):
        loads = window(5, micro_steps=2, layers=1, ranks=4, experts=8, stage=stage)
        for policy in ("equipoise", "eplb-oracle", "balanced"):
            for sends in ("rows", "tokens"):
                options = eq.PlanOptions(cross_node=True, sends=sends)
                given = {"node_R": (0, 0, 1, 1), "slots": 1, "policy": policy, "objective": objective}
                found.append(planned(loads, options=options, **given).digest())
    return found


def test_kernels_run_without_jit_and_give_the_same_plans():
    done = run_script(PLAIN_SCRIPT, NUMBA_DISABLE_JIT="1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == digests_of_small_windows()


def test_kernels_are_kept_on_disk_and_compiled_alike():
    for kernel in (replicas.evaluate, level, fill, price):
        assert kernel.targetoptions.get("fastmath", False) is False
        assert kernel.targetoptions.get("parallel", False) is False
        assert Path(kernel._cache.cache_path).is_dir()


@pytest.mark.parametrize(
    ("ranks", "experts", "per_node", "slots"), [(72, 288, 72, 1), (256, 256, 8, 2), (256, 256, 8, 1)]
)
def test_wide_groups_are_level(ranks, experts, per_node, slots):
    model = eq.ModelShape.preset("qwen3-30b-a3b", layers=1, experts=experts)
    loads = generated_loads(model, micro_steps=2, ranks=ranks, mean_tokens=256, domains=1, seed=7)
    cluster = eq.Cluster.preset("h200", ranks_per_node=per_node, ep=ranks)
    inside, across = (
        eq.plan(
            loads, cluster=cluster, model=model, slots=slots, objective="skew", options=eq.PlanOptions(cross_node=cross)
        )
        for cross in (False, True)
    )
    assert mean_skew(across) < 1.005
    # One home per rank: the hottest expert has more than a node of 8 ranks can compute in its share of the time.
    assert (mean_skew(inside) > 1.3) == (per_node == 8)
