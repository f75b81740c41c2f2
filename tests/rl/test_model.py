"""Models of all families: the same bits from the same seed, and packed samples that do not see each other."""

from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from equipoise.adapters.transformers import inspect
from equipoise.core import TrainingError
from equipoise.rl.config import Family, ModelConfig
from equipoise.rl.model import build_model, copy_model, load_model, open_tokenizer, packed_inputs
from equipoise.rl.task import CharTokenizer

FAMILIES = get_args(Family)


def tiny(family, **sizes):
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "experts": 8, "top_k": 2, "expert_width": 16, **sizes}
    return ModelConfig(family=family, **sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(family):
    first, again, other = (build_model(tiny(family), seed=seed) for seed in (1, 1, 2))
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    assert not inspect(first).unsupported


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_have_the_logits_they_have_alone(family):
    model = build_model(tiny(family), seed=0).eval()
    lengths = (9, 1, 14)
    ids = torch.randint(2, 90, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    position = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        packed = model(**packed_inputs(model, ids, position)).logits[0]
        alone = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(lengths)])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_a_copy_is_whole_and_independent_and_does_not_train():
    model = build_model(tiny("qwen3-moe"), seed=0)
    twin = copy_model(model)
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert not torch.equal(next(model.parameters()), next(twin.parameters()))


def test_a_checkpoint_is_loaded_from_its_folder_alone(tmp_path):
    model = build_model(tiny("mixtral"), seed=0)
    model.save_pretrained(tmp_path / "m")
    again = build_model(ModelConfig(path=str(tmp_path / "m")), seed=9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert isinstance(open_tokenizer(ModelConfig(path=str(tmp_path / "m"))), CharTokenizer)
    with pytest.raises(TrainingError, match=r"no HF checkpoint at .*absent: it has no config.json"):
        load_model(tmp_path / "absent")


@pytest.mark.parametrize("what", ["a weight is lost", "a weight has another shape", "cut off"])
def test_a_checkpoint_that_is_not_whole_is_refused_and_never_filled_up(tmp_path, what):
    build_model(tiny("qwen3-moe"), seed=0).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights, name = load_file(file), "model.layers.0.self_attn.q_proj.weight"
    if what == "a weight is lost":
        save_file({key: tensor for key, tensor in weights.items() if key != name}, file, {"format": "pt"})
    elif what == "a weight has another shape":
        save_file(weights | {name: weights[name][:3].contiguous()}, file, {"format": "pt"})
    else:
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(TrainingError) as error:
        load_model(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    assert (f"lacks 1 weights, the first of them {name!r}" in str(error.value)) == (what == "a weight is lost")


def save_tokenizer(folder):
    """A tokenizer of a few characters, as it lies beside a checkpoint."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = {text: number for number, text in enumerate(["<end>", *"0123456789+="])}
    words = Tokenizer(models.WordLevel(characters, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def test_a_checkpoints_own_tokenizer_is_used(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = open_tokenizer(ModelConfig(path=str(tmp_path)))
    assert tokenizer.end == 0 and tokenizer.encode("12+3=") == [2, 3, 11, 4, 12]
    assert tokenizer.decode([2, 3, 0, 4]) == "12"
    tokenizer.save(tmp_path / "again")
    again = open_tokenizer(ModelConfig(path=str(tmp_path / "again")))
    assert again.encode("12+3=") == tokenizer.encode("12+3=") and again.end == tokenizer.end
