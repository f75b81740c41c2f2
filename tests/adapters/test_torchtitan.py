"""torchtitan's expert parallelism: a model that it has sharded trains balanced as it trains alone."""

import re

import pytest
import torch

from tests.adapters.titan_pool import TitanPool


@pytest.fixture(scope="module")
def titan_pool(beside):
    return beside(TitanPool)


def differing(leg, wanted, kind):
    return [name for name, tensor in wanted[kind].items() if not torch.equal(tensor, leg[kind][name])]


def error(ranks, leg, name):
    """Root mean square over all ranks, against experts that compute in float32."""
    errors = [legs[leg]["grads"][name] - legs["exact"]["grads"][name] for legs in ranks]
    return float(torch.cat(errors).pow(2).mean().sqrt())


def is_close(ranks, leg, name):
    """Whether a gradient differs by the rounding of bf16, of which an expert's two parts have one each, no more."""
    worst = max(float((legs[leg]["grads"][name] - legs["plain"]["grads"][name]).abs().max()) for legs in ranks)
    return worst <= 2**-6 * max(float(legs["plain"]["grads"][name].abs().max()) for legs in ranks)


# Over two owners of an expert FSDP2 sums gradients in every micro-step, a window once: one micro-step is compared.
# Of three experts per token torchtitan rounds the sum of input gradients after each addition, this package once.
@pytest.mark.parametrize(
    ("family", "ep", "micro_steps", "top_k", "checkpoints", "is_same"),
    [
        ("qwen", 4, 2, 2, "FullAC", True),
        ("deepseek", 2, 1, 2, "SelectiveAC", True),
        ("qwen", 4, 1, 3, None, False),
    ],
    ids=["Qwen3 EP4", "DeepSeek-V3 EP2 x FSDP2", "three experts per token"],
)
def test_two_steps_are_those_of_torchtitan_without_a_balancer(
    titan_pool, family, ep, micro_steps, top_k, checkpoints, is_same
):
    ranks = titan_pool.call("parity", family, ep, micro_steps, top_k, checkpoints)
    for name in ranks[0]["plain"]["grads"]:
        for leg in ("placed", "replicated"):
            assert is_close(ranks, leg, name), (leg, name)
            assert error(ranks, leg, name) <= 1.1 * error(ranks, "plain", name), (leg, name)
    for legs in ranks:
        plain, placed, replicated = (legs[name] for name in ("plain", "placed", "replicated"))
        assert placed["moved"][0] > 0 and replicated["moved"][1] > 0, "experts move in these windows"
        if is_same:
            assert placed["losses"] == plain["losses"]
            for kind in ("grads", "weights", "buffers"):
                assert differing(placed, plain, kind) == []
        assert len(set(plain["losses"])) == len(plain["losses"]), "every step trains"
        given, used, other = placed["rows"]
        assert given == used > other > 0, "routes are replayed that the model would not choose"
        assert replicated["rows"][:2] == placed["rows"][:2]


def test_install_and_uninstall_leave_everything_as_it_was(titan_pool):
    for rank in titan_pool.call("life"):
        assert rank["same"] and rank["no gradients"]
        assert len(rank["losses"]) == 5 and len(set(rank["losses"])) == 1, "outside, in and after windows"
        twice, unnamed, left, again, none = rank["refused"]
        assert "has balanced experts already" in twice
        assert "MoE layer index 0 was called outside a micro-step" in unnamed
        assert left == "an error of the loss"
        assert "a window was left with an error; uninstall" in again
        assert "has no balanced experts" in none
        assert rank["extra"]["working copy of the weights"] == (2 + 4) * rank["experts"], "bf16, and float32 gradients"


def test_what_cannot_be_balanced_is_refused_by_name_on_every_rank_and_nothing_changes(titan_pool):
    for words, is_same in titan_pool.call("refused"):
        assert is_same
        for name in ("DeepEP", "HybridEP", "MinimalAsyncEP", "TorchAO", "Local"):
            assert f"token_dispatcher` is a {name}TokenDispatcher" in words[name]
        for name in ("GptOssGroupedExperts", "MXFP8GroupedExperts"):
            assert (
                f"inner_experts` is a {name}, not torchtitan's GroupedExperts: biases, other activations" in words[name]
            )
        for name, said in (
            ("no EP", "`layers.0.moe` is not expert parallel; use expert_parallel_degree above 1"),
            ("round robin", "turn it off"),
            ("compiled", "`layers.1` is compiled; set compile.enable=False"),
            ("version", "torchtitan 0.4.0 is not 0.3; use 0.3.0"),
            ("half frozen", "`layers.0.moe.routed_experts.inner_experts` trains some of its weights alone"),
            ("patched", "rank 1: the forward of `layers.0.moe.routed_experts.inner_experts` is "),
            ("float32", "computes outside bf16; use training.mixed_precision_param='bfloat16'"),
            ("sharded otherwise", "is not sharded over efsdp and ep by FSDP2"),
            ("tensor parallel", "is sharded over ('fsdp', 'tp'), not over fsdp alone"),
            ("divided", "FSDP2 divides gradients by 4; torchtitan's own parallelize functions make that 1"),
            ("cluster", "an EP group of 2 ranks, the model's has 4"),
            ("no experts", "no block of this Linear has experts"),
            ("pipeline", "2 model parts were given; a pipeline is not supported"),
        ):
            assert said in words[name], name


def test_the_example_replays_every_row_and_moves_experts_in_every_step(titan_pool):
    first, *others = titan_pool.call("example")
    assert others == [[], [], []], "the first rank prints"
    form = r"step (\d): (\d+) experts displaced, (\d+) replicas; (\d+) of (\d+) rows replayed"
    found = [re.fullmatch(form, line).groups() for line in first]
    assert [line[0] for line in found] == ["0", "1"] and all(int(line[2]) > 0 for line in found)
    assert all(line[3] == line[4] != "0" for line in found)
