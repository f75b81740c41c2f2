"""transformers' own expert parallelism: a model that is sharded already trains balanced as it trains alone."""

import pytest
import torch

from equipoise.adapters import transformers_sharded
from tests.adapters.sharded_pool import NewerPool
from tests.adapters.test_example import check_lines
from tests.adapters.tiny import build


@pytest.fixture(scope="module")
def newer_pool(beside):
    return beside(NewerPool)


def differing(leg, wanted, kind):
    return [name for name, tensor in wanted[kind].items() if not torch.equal(tensor, leg[kind][name])]


def error(ranks, leg, name):
    """Root mean square over all experts, against float64."""
    errors = [legs[leg]["grads"][name] - legs["exact"]["grads"][name] for legs in ranks]
    return float(torch.cat(errors).pow(2).mean().sqrt())


def is_close(leg, plain):
    """Whether every gradient is that of the unbalanced model but for rounding."""
    largest = max(float(gradient.abs().max()) for gradient in plain["grads"].values())
    worst = max(float((leg["grads"][name] - plain["grads"][name]).abs().max()) for name in plain["grads"])
    return worst <= 5e-6 * largest and leg["losses"] == pytest.approx(plain["losses"], rel=1e-6)


# Over two owners of an expert FSDP2 sums gradients in every micro-step, a window once: one micro-step is compared.
# gpt-oss keeps its matrices transposed, and products of the two layouts round differently.
@pytest.mark.parametrize(
    ("family", "ep", "micro_steps", "is_same"),
    [("qwen3_moe", 4, 2, True), ("qwen3_moe", 2, 1, True), ("gpt_oss", 2, 1, False)],
    ids=["EP4", "EP2 x FSDP2", "gpt-oss"],
)
def test_three_steps_are_those_of_the_sharded_model_without_a_balancer(
    newer_pool, tmp_path, family, ep, micro_steps, is_same
):
    ranks = newer_pool.call("parity", str(tmp_path), family, ep, micro_steps)
    for name in ranks[0]["plain"]["grads"]:
        if ".experts." in name:
            assert error(ranks, "replicated", name) <= 1.1 * error(ranks, "plain", name), name
    for legs in ranks:
        plain, placed, replicated = (legs[name] for name in ("plain", "placed", "replicated"))
        assert placed["moved"][0] > 0 and replicated["moved"][1] > 0, "experts move in these windows"
        if is_same:
            assert placed["losses"] == plain["losses"]
            assert differing(placed, plain, "grads") == differing(placed, plain, "weights") == []
        assert is_close(placed, plain) and is_close(replicated, plain)
        assert len(set(plain["losses"])) == len(plain["losses"]), "every step trains"
        given, used, other = plain["rows"]
        assert given == used > other > 0, "routes are replayed that the model would not choose"
        assert plain["rows"] == placed["rows"] == replicated["rows"]


def test_experts_of_which_one_parameter_is_frozen_train_the_other_as_without_a_balancer(newer_pool, tmp_path):
    for plain, balanced in newer_pool.call("half_frozen", str(tmp_path)):
        assert balanced["moved"][0] > 0, "experts move in these windows"
        assert list(balanced["grads"]) == list(plain["grads"])
        assert sum(name.endswith("experts.down_proj") for name in plain["grads"]) == 2
        assert differing(balanced, plain, "grads") == differing(balanced, plain, "weights") == []
        assert balanced["losses"] == plain["losses"]


def test_install_and_uninstall_leave_everything_as_it_was(newer_pool, tmp_path):
    for rank in newer_pool.call("life", str(tmp_path)):
        assert rank["same"]
        before, outside, after = rank["losses"]
        assert before == outside == after
        twice, alone, lora, left, again, none = rank["refused"]
        assert lora.startswith("`model.layers.0.mlp.experts` has LoRA adapters; merge them")
        assert "has balanced experts already" in twice
        assert alone == "accepted" and left == "an error of the loss"
        assert "a window was left with an error; uninstall" in again
        assert "has no balanced experts" in none
        assert rank["extra"]["working copy of the weights"] == rank["experts"]


def test_what_cannot_be_balanced_is_refused_by_name_on_every_rank_and_nothing_changes(newer_pool, tmp_path):
    for words, is_same in newer_pool.call("refused", str(tmp_path)):
        assert is_same
        for name in ("tp_size", "pp_size", "fsdp_mixed_precision", "fsdp_cpu_offload"):
            assert f"{name}=" in words[name] and "is not supported; use" in words[name]
        assert "the model is not expert parallel" in words["whole"]
        assert "an EP group of 2 ranks, the model's has 4" in words["cluster"]
        assert "rank 0: `model.layers.0.mlp.experts` has LoRA adapters; merge them" in words["lora"]
        assert "rank 1: the forward of `model.layers.0.mlp.experts` is not that of transformers'" in words["patched"]


def test_a_version_that_does_not_send_tokens_is_refused_by_name():
    (reason,) = transformers_sharded.inspect(build("qwen3_moe")).unsupported
    assert "transformers 5.17" in reason and "use 5.20 or newer" in reason


def test_the_example_replays_every_row_and_moves_experts_in_every_window(newer_pool):
    for lines in newer_pool.call("example"):
        check_lines(lines)
