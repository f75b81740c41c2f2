"""Around windows: offload, checkpoints, uninstall, and an error of one rank."""

from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.megatron.layouts import LAYOUTS, Layout


def test_offloaded_buffers_and_checkpoints_are_those_of_plain_training(megatron_pool):
    for rank in megatron_pool.call("offload_and_save", LAYOUTS["EP2 x DP2"]):
        assert rank["offloaded"] > 0
        assert rank["same losses"]
        assert rank["entries"] > 100
        assert rank["differences"] == []


@pytest.mark.parametrize("weights", ["in place", "copy"])
def test_uninstall_leaves_the_same_objects_and_extra_bytes_measure_as_reported(megatron_pool, weights):
    for rank in megatron_pool.call("come_and_go", LAYOUTS["EP4"], weights):
        assert sum("token_dispatcher" in place for place in rank["changed"]) == 4, "one MoE layer each"
        assert rank["left"] == []
        assert rank["extra"]["working copy of the weights"] == (rank["experts"] if weights == "copy" else 0)
        # Replica buffers, mailboxes and outbox, as they are modelled; then tensors and shared memory as they are.
        assert 0 < rank["extra"]["balancer"] <= 1.2 * rank["limit"]
        copies, rows = rank["extra"]["working copy of the weights"], rank["extra"]["rows in place of all-to-all"]
        assert rank["extra"]["balancer"] <= rank["installed"] - copies <= 1.2 * rank["limit"]
        # A window adds the page of its rows and, in memory of the host, its prepared dispatches.
        assert 0 < rows <= rank["trained"] - rank["installed"] <= rows + 1.1 * rank["tables"]
        assert ("install with weights='copy'" in rank["suspended"]) == (weights == "in place")


def test_an_error_of_one_rank_ends_the_window_on_all_and_training_starts_anew(megatron_pool):
    ranks = megatron_pool.call("fail", LAYOUTS["EP4"])
    assert ranks[2]["error"] == "PlantedError: planted"
    for number in (0, 1, 3):
        assert "rank 2" in ranks[number]["error"]
        assert ranks[number]["seconds"] < 50
    assert [rank["differences"] for rank in ranks] == [[]] * 4


def test_layers_whose_gradients_are_home_are_reduced_before_the_window_ends(megatron_pool):
    for told in megatron_pool.call("release", LAYOUTS["overlap"]):
        assert [layer for layer, _ in told] == [3, 2, 1, 0], "in one order on all ranks, each once"
        assert told[0][1], "the last layer's gradients are home long before the first layer's backward"
        assert not told[-1][1], "the first layer's are home with the window's end"


@pytest.mark.skipif(
    Version(version("megatron-core")) >= Version("0.17"),
    reason="there is nothing to compare with: from 0.17 on the unmodified model's all-to-all fails on such rows",
)
def test_replayed_rows_in_which_experts_repeat_train_with_the_same_bits(megatron_pool):
    for rank in megatron_pool.call("repeat_ids", LAYOUTS["EP4"]):
        assert rank["displaced"] > 0
        assert rank["differences"] == []


def test_a_pipeline_stage_without_experts_takes_part_and_does_nothing(megatron_pool):
    ranks = megatron_pool.call("train_beside_dense_stage", Layout(ep=2, pp=2, num_dense=2))
    assert [rank["layers"] for rank in ranks] == [0, 0, 2, 2]
    assert (
        [rank["extra"] > 0 for rank in ranks] == [rank["displaced"] > 0 for rank in ranks] == [False] * 2 + [True] * 2
    )
    for rank in ranks:
        assert rank["differences"] == []
        assert rank["micro-steps"] == [3], "hooks of trainers count on it"


REFUSED = (
    *("capacity factor", "padding to the capacity", "padding for quantization", "fp8", "fp4"),
    *("expert tensor parallelism", "flex dispatcher (DeepEP, HybridEP)", "combined 1F1B overlap"),
    *("delayed weight gradients", "shared-expert overlap", "CUDA graphs", "paged stash"),
    *("Megatron-FSDP", "LoRA on experts"),
)
"""By name, what no version of the adapter may install on by mistake."""


def test_real_models_are_refused_by_name_on_every_rank_and_stay_as_they_are(megatron_pool):
    ranks = megatron_pool.call("refuse_install", LAYOUTS["EP4"])
    for rank in ranks:
        assert rank["errors"] == ranks[0]["errors"], "the same error on every rank"
        assert rank["changed"] == []
    errors = ranks[0]["errors"]
    assert set(REFUSED) < errors.keys()
    assert errors.pop("capacity factor on one rank").startswith("rank 2: capacity factor is not supported")
    for name, error in errors.items():
        assert f"{name} is not supported" in error
