"""New weights for an engine: the same bits in a real model behind it, in its own protocol; and updates that fail."""

import pytest
import torch
from safetensors.torch import load_file

from equipoise.adapters.transformers_model import checkpoint_tensors
from equipoise.core.errors import TrainingError
from equipoise.engines.connection import Patience
from equipoise.engines.weights import WeightOptions, WeightSender, fill_buckets
from equipoise.rl.config import ModelConfig
from equipoise.rl.model import build_model
from tests.engines.answers import served
from tests.engines.live import LiveEngine

FAMILIES = ("qwen3-moe", "olmoe", "mixtral", "deepseek-v3", "gpt-oss")
FAST = Patience(attempts=2, wait_s=0.01, timeout_s=30)
LIMIT = 7000
WAYS = [("vllm 0.22", True), ("vllm 0.32", True), ("sglang 0.5.23", True), ("sglang 0.5.23", False)]


def tiny(seed, family="qwen3-moe"):
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "experts": 4, "top_k": 2, "expert_width": 8}
    return build_model(ModelConfig(family=family, **sizes), seed=seed)


def sender_of(url, version, folder=None):
    options = WeightOptions(folder=folder, bucket_bytes=LIMIT)
    return WeightSender(url, version.split()[0], options=options, patience=FAST)


def send(sender, model, version):
    return list(sender.send(checkpoint_tensors(model, model.state_dict()), version))


def same(held, model):
    state = model.state_dict()
    return held.keys() == state.keys() and all(torch.equal(held[name], state[name]) for name in state)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_bits_are_those_of_the_familys_saved_checkpoint(tmp_path, family):
    model = tiny(0, family).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    found = dict(checkpoint_tensors(model, model.state_dict()))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_buckets_keep_the_order_and_the_limit_and_a_larger_tensor_is_alone():
    sizes = [3, 3, 4, 11, 1, 10, 2]
    tensors = [(str(at), torch.zeros(size, dtype=torch.uint8)) for at, size in enumerate(sizes)]
    found = [[name for name, _ in bucket] for bucket in fill_buckets(tensors, 10)]
    assert found == [["0", "1", "2"], ["3"], ["4"], ["5"], ["6"]]
    assert list(fill_buckets([], 10)) == []


@pytest.mark.parametrize(("version", "by_folder"), WAYS)
def test_the_engine_has_the_same_bits_after_each_update_and_answers_with_the_version(tmp_path, version, by_folder):
    engine, models = LiveEngine(tiny(9), version, tp_size=2), [tiny(1), tiny(2)]
    with served(engine.reply) as url:
        sender = sender_of(url, version, tmp_path if by_folder else None)
        for number, model in enumerate(models):
            sizes = send(sender, model, f"w{number}")
            assert len(sizes) > 5 and max(sizes) <= LIMIT and sum(sizes) == sum(t.nbytes for t in model.parameters())
            assert same(engine.held[number], model) and not engine.is_paused and not engine.has_session
            assert engine.version == ("default" if version == "vllm 0.22" else f"w{number}")
    # Files of weights that are no longer used are gone.
    assert [path.name for path in tmp_path.iterdir()] == (["w1"] if by_folder else [])


@pytest.mark.parametrize(
    ("way", "path"),
    [
        (WAYS[1], "/collective_rpc"),
        (WAYS[2], "/update_weights_from_disk"),
        (WAYS[3], "/update_weights_from_tensor"),
        (WAYS[3], "/end_weight_update"),
    ],
)
def test_an_engine_that_dies_in_an_update_is_named_and_not_resumed(tmp_path, way, path):
    version, by_folder = way
    engine = LiveEngine(tiny(9), version)

    def reply(asked, body):
        # Dead from the second such request on, or the only one: the first bucket is loaded.
        if engine.calls.count(path) == (path == "/update_weights_from_tensor") and asked == path:
            raise ConnectionResetError("the test kills the engine here")
        return engine.reply(asked, body)

    with served(reply) as url:
        with pytest.raises(TrainingError, match="gave no usable answer") as error:
            send(sender_of(url, version, tmp_path if by_folder else None), tiny(1), "w1")
        assert f"weights 'w1' were not loaded by the engine at {url}" in str(error.value)
        assert "restart it, then resume from the last checkpoint" in str(error.value) and "asked" not in str(
            error.value
        )
    assert engine.is_paused and not engine.held


@pytest.mark.parametrize(("version", "by_folder"), WAYS[1:])
def test_a_version_that_does_not_change_ends_the_update(tmp_path, version, by_folder):
    engine = LiveEngine(tiny(9), version)
    engine.keeps_version = True
    with served(engine.reply) as url, pytest.raises(TrainingError, match="it says that its weights are 'default'"):
        send(sender_of(url, version, tmp_path if by_folder else None), tiny(1), "w1")
    assert engine.is_paused


@pytest.mark.parametrize(("version", "by_folder"), WAYS[2:])
def test_a_tensor_that_is_refused_is_told_with_what_the_engine_says(tmp_path, version, by_folder):
    engine, model = LiveEngine(tiny(9), version), tiny(1)
    with served(engine.reply) as url:
        sender = sender_of(url, version, tmp_path if by_folder else None)
        with pytest.raises(TrainingError, match=r"Error 400: .*KeyError: 'model.layers.\d.mlp.experts.\w+_proj'"):
            # Names of transformers, not of a checkpoint.
            list(sender.send(model.state_dict().items(), "w1"))
        assert engine.is_paused and not engine.held
        # The next update closes the session that this one left open.
        send(sender, model, "w2")
    assert same(engine.held[-1], model) and engine.version == "w2" and not engine.is_paused


def test_an_engine_that_cannot_be_given_weights_is_refused_before_anything_changes(tmp_path):
    cases = [
        (LiveEngine(tiny(9), "vllm 0.32"), "vllm 0.32", None, "vLLM takes no tensors over HTTP; give a folder"),
        (LiveEngine(tiny(9), "sglang 0.5.23"), "vllm 0.32", tmp_path, "start vLLM with VLLM_SERVER_DEV_MODE=1"),
        (LiveEngine(tiny(9), "sglang 0.5.23", dp_size=2), "sglang 0.5.23", None, "its dp_size is 2"),
        (LiveEngine(tiny(9), "vllm 0.32"), "sglang 0.5.23", None, "does not say its dp_size"),
    ]
    for engine, version, folder, words in cases:
        with served(engine.reply) as url, pytest.raises(TrainingError, match=words):
            send(sender_of(url, version, folder), tiny(1), "w1")
        assert not engine.is_paused and not list(tmp_path.iterdir())
    blocked = tmp_path / "file"
    blocked.write_text("")
    engine = LiveEngine(tiny(9), "vllm 0.32")
    with served(engine.reply) as url, pytest.raises(TrainingError, match=r"weights cannot be written to .*file"):
        send(sender_of(url, "vllm 0.32", blocked), tiny(1), "w1")
    assert not engine.is_paused
