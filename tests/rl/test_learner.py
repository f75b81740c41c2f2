"""The model being trained: warm-up, weight sync and fingerprints, groups of ranks, and a planner that is ready."""

import threading
from math import gcd
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.core import InfeasiblePlanError, LoadMatrix, ModelShape, TopologyError
from equipoise.loads import plan_memory
from equipoise.rl import learner, train
from equipoise.rl.config import build_cluster, change
from equipoise.rl.learner import Learner, Part, find_difference, fingerprints, owned_fingerprints
from equipoise.rl.metrics import ignore
from equipoise.rl.model import build_model
from equipoise.rl.preflight import shape_of
from equipoise.rl.train import StartedPlanner, launch, start_planner
from tests.rl import work
from tests.rl.test_model import FAMILIES


@pytest.mark.dist(2)
def test_warm_up_lowers_the_loss_and_leaves_the_same_weights_on_every_rank(pool):
    config = work.small(warmup={"steps": 12})
    found = {}
    for sharing in (1, 2):
        # Ranks that share a device leave warm-up to the first of them.
        first, second = pool.run(work.warmed_up, 2, change(config, model={"ranks_per_device": sharing}))
        assert work.same_weights(first[0], second[0])
        assert first[1] == second[1], "the loss is that of all ranks"
        assert first[1][-1] < first[1][0]
        found[sharing] = first
    np.testing.assert_allclose(found[1][1], found[2][1], rtol=1e-4)
    for name, tensor in found[1][0].items():
        torch.testing.assert_close(tensor, found[2][0][name], rtol=1e-2, atol=1e-3)


@pytest.mark.dist(2)
def test_no_warm_up_steps_change_nothing(pool):
    config = work.small(warmup={"steps": 0})
    weights, losses = pool.run(work.warmed_up, 2, config)[0]
    assert not losses
    assert work.same_weights(weights, build_model(config.model, seed=config.seed).state_dict())


@pytest.mark.dist(4)
def test_every_rank_is_in_one_ep_group_and_one_group_of_owners(pool):
    found = pool.run(work.groups_of, 4, work.small(ranks=4, ep=2))
    assert [ep for ep, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [owners for _, owners in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.dist(2)
def test_another_number_of_ranks_than_configured_is_refused(pool):
    said = pool.run(work.ranks_error, 2, work.small(ranks=4))
    assert said == ["setting ranks is 4, but 2 ranks were started; make them equal"] * 2


def test_experts_that_do_not_divide_are_refused_before_anything_is_built():
    config = work.small(model={"experts": 9})
    with pytest.raises(TopologyError, match="9 experts"):
        build_cluster(config, shape_of(config))


def name_of_rank(config, ranks, show, words):
    return f"{words} {ranks.rank} of {ranks.size}"


def test_under_torchrun_this_process_is_the_rank(monkeypatch, tmp_path):
    # As torchrun does it: the store is there already, so that nobody can take its port in between.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**places, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert launch(name_of_rank, work.small(ranks=1), "rank") == "rank 0 of 1"


class SlowWorker:
    """A planning process that compiles until it is let go, and may fail then."""

    def __init__(self, *, fails=False):
        self.gate, self.fails, self.calls = threading.Event(), fails, []

    def call(self, method, *args):
        self.gate.wait(30)
        self.calls.append(method)
        if self.fails:
            raise InfeasiblePlanError("the planning process ended")

    def close(self):
        raise AssertionError("a given worker is left running")


def started(worker):
    config = work.small()
    return StartedPlanner(config, shape_of(config), worker=worker)


def test_waiting_for_the_kernels_is_shown_and_forgetting_keeps_the_plan_servers_options(monkeypatch):
    monkeypatch.setattr(train, "_PATIENCE_S", 0.01)
    worker, told = SlowWorker(), []

    def show(event):
        told.append(event.values["message"])
        worker.gate.set()

    planner = started(worker)
    assert planner.ready(show) is worker
    assert told[0] == "compiling planner kernels, once per machine"
    assert worker.calls == ["open", "share", "whole", "whole"]
    planner.forget()
    assert worker.calls[-1] == "forget", "a server opened anew would have the loop's options, not the balancer's"
    planner.close()


def test_a_planner_that_cannot_start_is_an_error_and_not_a_hang():
    worker = SlowWorker(fails=True)
    worker.gate.set()
    with pytest.raises(InfeasiblePlanError, match="the planning process ended"):
        started(worker).ready(ignore)


def test_only_a_mode_that_plans_starts_a_process():
    config = work.small()
    for mode in ("off", "static"):
        assert start_planner(change(config, balance={"mode": mode}), shape_of(config), mode=mode) is None


@pytest.mark.dist(2)
@pytest.mark.parametrize("mode", ["off", "static", "equipoise"])
def test_the_copy_has_the_bits_of_the_learner_in_every_mode(pool, mode):
    for copied, whole, version in pool.run(work.synced, 2, work.small(balance={"mode": mode})):
        assert work.same_weights(copied, whole)
        assert len(version) == 64


@pytest.mark.dist(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_copy_has_the_bits_of_the_learner_in_every_family(pool, family):
    config = work.small(model={"family": family})
    results = pool.run(work.synced, 2, config)
    assert results[0][2] == results[1][2], "all ranks give the weights the same name"
    assert all(work.same_weights(copied, whole) for copied, whole, _ in results)


@pytest.mark.dist(4)
@pytest.mark.parametrize("groups", [{"ranks_per_node": 2}, {"ep": 2}], ids=["two nodes", "two EP groups"])
def test_every_node_and_every_group_has_a_store_of_all_experts(pool, groups):
    results = pool.run(work.synced, 4, work.small(ranks=4, **groups))
    assert len({version for _, _, version in results}) == 1
    for copied, _, _ in results:
        assert work.same_weights(copied, results[0][1])


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("harm", "copy_of", "experts", "owner"),
    [("swapped", 0, [1], 0), ("stale", 0, [5], 1), ("damaged", 0, [2], 0), ("copied", 1, [7], 1)],
)
def test_an_expert_that_is_not_its_owners_stops_every_rank_by_name(pool, harm, copy_of, experts, owner):
    said = pool.run(work.harmed_sync, 2, work.small(), harm)
    assert (
        said[0]
        == said[1]
        == (
            f"rank {copy_of}: weight sync: the rollout copy has experts {experts} of "
            f"`model.layers.0.mlp.experts.gate_up_proj` that are not those rank {owner} owns; stop and resume from "
            "the last checkpoint"
        )
    )


def test_a_part_that_is_not_its_owners_is_named():
    weights = {"experts": torch.arange(12.0).view(4, 3), "gate": torch.ones(2)}
    held = [owned_fingerprints({Part("experts", 2 * rank, 2): weights["experts"][2 * rank :][:2]}) for rank in range(2)]
    held[0] |= owned_fingerprints({Part("gate"): weights["gate"]})
    assert not find_difference(weights, held)
    swapped = {**weights, "experts": weights["experts"][[0, 1, 3, 2]]}
    assert find_difference(swapped, held) == "experts [2, 3] of `experts` that are not those rank 1 owns"
    stale = {**weights, "gate": weights["gate"] + 1}
    assert find_difference(stale, held) == "a `gate` that is not that of rank 0"


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def drawn(dtype, *shape, seed=0):
    width = torch.empty(0, dtype=dtype).element_size()
    content = np.random.default_rng(seed).integers(0, 256, size=(*shape[:-1], shape[-1] * width), dtype=np.uint8)
    return torch.from_numpy(content).view(dtype)


def reference_fingerprint(content):
    """The fingerprint of one entry's bytes, word by word."""
    size, total = gcd(len(content), 8), len(content)
    for place, start in enumerate(range(0, len(content), size), start=1):
        word = int.from_bytes(content[start : start + size], "little", signed=size > 1)
        mixed = (word + place * learner._PLACE) % 2**64
        for shift, factor in learner._ROUNDS:
            mixed = (mixed ^ mixed >> shift) * factor % 2**64
        total += mixed
    total %= 2**64
    return total - 2**64 if total >> 63 else total


def reference(entries):
    return [
        reference_fingerprint(entry.contiguous().flatten().view(torch.uint8).numpy().tobytes()) for entry in entries
    ]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9)),
    seed=st.integers(0, 99),
)
def test_they_are_those_of_the_reference(dtype, shape, seed):
    entries = drawn(dtype, *shape, seed=seed)
    assert fingerprints(entries).tolist() == reference(entries)
    turned = entries.transpose(1, 2)
    assert fingerprints(turned).tolist() == reference(turned)


def test_large_entries_are_mixed_in_parts(monkeypatch):
    entries = drawn(torch.float32, 3, 11, 14)
    whole = fingerprints(entries).tolist()
    monkeypatch.setattr(learner, "_CHUNK", 16)
    assert fingerprints(entries).tolist() == whole == reference(entries)


def test_no_bytes_have_a_fingerprint_too():
    assert fingerprints(torch.zeros(2, 0)).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_zero", [False, True], ids=["random", "zeros"])
def test_every_flipped_bit_is_seen(dtype, is_zero):
    entries = drawn(dtype, 1, 6) * (0 if is_zero else 1)
    seen = {fingerprints(entries).item()}
    content = entries.view(torch.uint8)
    for at in range(content.shape[1]):
        for bit in range(8):
            content[0, at] ^= 1 << bit
            seen.add(fingerprints(entries).item())
            content[0, at] ^= 1 << bit
    assert len(seen) == 1 + 8 * content.shape[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_experts_swapped_rows_and_a_shifted_row_are_seen(dtype):
    experts = drawn(dtype, 4, 6, 8)
    plain = fingerprints(experts).tolist()
    assert len(set(plain)) == 4
    assert fingerprints(experts[[0, 2, 1, 3]]).tolist() == [plain[0], plain[2], plain[1], plain[3]]
    whole = fingerprints(experts[None]).item()
    assert fingerprints(experts[[0, 2, 1, 3]][None]).item() != whole
    rows, shifted = experts.clone(), experts.clone()
    rows[1, [2, 3]] = experts[1, [3, 2]]
    shifted[1, 2] = experts[1, 2].roll(1)
    for changed in (rows, shifted):
        found = fingerprints(changed).tolist()
        assert [i for i in range(4) if found[i] != plain[i]] == [1]


@pytest.mark.parametrize(("checkpointing", "kept"), [("none", True), ("reentrant", False)])
def test_the_memory_of_a_window_is_that_of_its_fullest_rank(checkpointing, kept):
    shape = ModelShape.preset("qwen3-30b-a3b", experts=8, layers=2, top_k=2)
    rng = np.random.default_rng(0)
    loads = LoadMatrix(rng.integers(0, 90, size=(3, 2, 4, 8)), layer_numbers_L=np.array(shape.layer_numbers))
    plan = eq.plan(loads, cluster=eq.Cluster.preset("h200", ep=4), model=shape, slots=1, objective="skew")
    update = SimpleNamespace(activation_checkpointing=checkpointing)
    rank_0 = SimpleNamespace(
        balancer=SimpleNamespace(plan=plan, extra_bytes=5, row_bytes=7),
        shape=shape,
        _config=SimpleNamespace(update=update),
    )
    need = Learner.memory_need(rank_0, "update")
    memory = plan_memory(plan, activations="kept" if kept else "recomputed")
    held = memory.slots_bytes + memory.page_bytes
    place = (need["micro_step"], shape.layer_numbers.index(need["layer"]), need["rank"])
    # What is really allocated for slots and pages is beside it.
    assert need["peak_bytes"] == memory.peak_R.max() - held == memory.total_MLR[place] - held
    assert (need["slot_bytes"], need["limit_bytes"]) == (12, plan.cluster.memory_bytes)
    rank_0.balancer.plan = None
    assert Learner.memory_need(rank_0, "update") is None
