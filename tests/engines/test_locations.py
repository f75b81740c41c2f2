"""Placements go to the files of engines and back; the reference is the plan's own quotas, read slot by slot."""

import json

import numpy as np
import pytest

import equipoise as eq
from equipoise.core import InfeasiblePlanError
from equipoise.engines.locations import Placement, read_placement, write_placement
from equipoise.planner.plan import plan_placement

# One dense layer, so that the layer axis of SGLang differs from ours.
MODEL = eq.ModelShape(
    name="small", experts=12, top_k=2, layer_numbers=(1, 2), hidden_layers=3, hidden=64, expert_width=32
)
CLUSTER = eq.Cluster.preset("h200", nodes=1, ranks_per_node=4)
FORMS = ("sglang", "vllm-ascend", "megatron")


def window(seed=0):
    rng = np.random.default_rng(seed)
    return eq.LoadMatrix(rng.integers(0, 50, size=(3, 2, 4, 12)) * rng.integers(1, 9, size=12) ** 2)


def made(policy="lpt", slots=0, seed=0):
    rows = eq.PlanOptions(sends="rows")
    return eq.plan(window(seed), cluster=CLUSTER, model=MODEL, slots=slots, policy=policy, options=rows)


def holders(plan, layer):
    """Reference: the (expert, rank) pairs with a row in any micro-step, homes included."""
    pairs = {(expert, int(rank)) for expert, rank in enumerate(plan.home_LE[layer])}
    for micro_step in range(plan.loads.num_micro_steps):
        pairs |= {(int(e), int(r)) for e, r in np.argwhere(plan.quota_ER(micro_step, layer))}
    return pairs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("policy", "slots"), [("static", 0), ("lpt", 0), ("eplb-oracle", 0), ("eplb-oracle", 2)])
def test_every_copy_of_the_plan_has_a_slot_on_its_rank(policy, slots, seed):
    plan = made(policy, slots, seed)
    placement = Placement.of(plan)
    assert placement.expert_LP.shape == (2, 4 * (3 + slots))
    for layer in range(2):
        placed = {(int(e), p // (3 + slots)) for p, e in enumerate(placement.expert_LP[layer])}
        wanted = holders(plan, layer)
        assert wanted <= placed
        if not slots:
            assert wanted == placed


@pytest.mark.parametrize("form", FORMS)
def test_a_placement_is_read_back_equal_from_every_form(form, tmp_path):
    placement = Placement.of(made("eplb-oracle", 0 if form == "megatron" else 1))
    path = tmp_path / "experts.json"
    write_placement(placement, path, form=form)
    again = read_placement(path, model=MODEL, ranks=4)
    assert np.array_equal(again.expert_LP, placement.expert_LP) and again.ranks == 4


def test_the_files_are_those_that_the_engines_read(tmp_path):
    placement = Placement(model=MODEL, ranks=4, expert_LP=np.stack([np.arange(12)[::-1], np.roll(np.arange(12), 3)]))
    found = {}
    for form in FORMS:
        write_placement(placement, tmp_path / form, form=form)
        found[form] = json.loads((tmp_path / form).read_text())
    assert found["sglang"] == {
        "physical_to_logical_map": [list(range(12)), list(range(11, -1, -1)), [9, 10, 11, *range(9)]]
    }
    ascend = found["vllm-ascend"]
    assert ascend["moe_layer_count"] == 2
    first = ascend["layer_list"][0]
    assert (first["layer_id"], first["device_count"]) == (0, 4)
    assert first["device_list"][0] == {"device_id": 0, "device_expert": [11, 10, 9]}
    assert found["megatron"]["expert_permutation"][1] == [9, 10, 11, *range(9)]
    assert (found["megatron"]["layer_numbers"], found["megatron"]["ranks"]) == ([1, 2], 4)


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_a_placement_becomes_the_plan_that_it_came_from(slots):
    plan = made("eplb-oracle", slots)
    placement = Placement.of(plan)
    again = plan_placement(plan.loads, placement.held_LER, cluster=CLUSTER, model=MODEL)
    total_MLE = plan.loads.total_MLE()
    for micro_step in range(3):
        for layer in range(2):
            quota_ER = again.quota_ER(micro_step, layer)
            assert np.array_equal(quota_ER.sum(axis=1), total_MLE[micro_step, layer])
            assert not quota_ER[placement.held_LER[layer] == 0].any()
    assert again.slots == slots and again.persistent
    if not slots:
        assert np.array_equal(again.rank_load_MLR, plan.rank_load_MLR)


def test_a_plan_whose_replicas_move_is_refused_and_so_is_a_permutation_with_replicas(tmp_path):
    moving = made("equipoise", 1)
    assert len(moving.replica_table), "the window must need replicas"
    with pytest.raises(InfeasiblePlanError, match=r"replicas that differ between micro-steps.*slots=0"):
        Placement.of(moving)
    with pytest.raises(InfeasiblePlanError, match="16 slots for 12 experts; a permutation has no replicas"):
        write_placement(Placement.of(made("eplb-oracle", 1)), tmp_path / "x.json", form="megatron")
    assert not (tmp_path / "x.json").exists()
    with pytest.raises(InfeasiblePlanError, match="'tensorrt' is unknown; use one of sglang, vllm-ascend, megatron"):
        write_placement(Placement.of(made()), tmp_path / "x.json", form="tensorrt")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "cannot be read as a placement"),
        ("[]", "it has none of physical_to_logical_map"),
        ({"physical_to_logical_map": [[0] * 12] * 2}, "it has 2 layers, the model 3 hidden layers"),
        ({"physical_to_logical_map": [list(range(12))] * 2 + [[0] * 12]}, "layer 2: the placement holds 1 experts"),
        ({"physical_to_logical_map": [[*range(12), 12, 0, 0, 0]] * 3}, "each of 0 to 11 needs a slot"),
        ({"physical_to_logical_map": [[*range(12), 0]] * 3}, "13 slots do not divide by 4 ranks"),
        ({"physical_to_logical_map": [[*range(12)], [0], [1]]}, "holds no placement of 'small'"),
        ({"moe_layer_count": 0, "layer_list": []}, "holds no placement of 'small'"),
        ({"layer_list": [{"device_count": 8, "device_list": []}]}, "holds no placement of 'small'"),
    ],
)
def test_a_file_that_is_no_placement_of_the_model_is_refused_by_name(document, words, tmp_path):
    path = tmp_path / "experts.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(InfeasiblePlanError, match=words) as error:
        read_placement(path, model=MODEL, ranks=4)
    assert str(path) in str(error.value)
