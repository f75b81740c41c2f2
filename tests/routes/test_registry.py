"""The registry: forms are found by content or by name, never by guess, and all of them round-trip."""

import errno
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment, TopologyError
from equipoise.routes import registry
from equipoise.routes.interpret import interpret
from equipoise.routes.registry import (
    FORMATS,
    Format,
    detect,
    find_format,
    format_names,
    read_routes,
    resolve_model,
    stream_recordings,
    stream_routes,
    write_routes,
)
from tests.routes.writers import SUFFIXES, write_dump

MODEL = ModelShape(name="tiny", experts=12, top_k=3, layer_numbers=(1, 2, 3), hidden_layers=4, hidden=8, expert_width=4)
WRITTEN = [pytest.param(name, suffix, id=f"{name}{suffix}") for name in SUFFIXES for suffix in SUFFIXES[name]]
OURS = [pytest.param(form, form.suffixes[0], id=form.name) for form in FORMATS if form.write is not None]


def good_routes(num_samples=3, *, seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for b in range(num_samples):
        num_tokens = 3 + 2 * b
        ids = rng.permuted(np.tile(np.arange(12), (num_tokens - 1, 3, 1)), axis=2)[..., :3]
        tokens = rng.integers(0, 100, num_tokens)
        samples.append(SampleRoutes(name=f"row {b}", ids_TLK=ids, num_tokens=num_tokens, tokens_T=tokens))
    return Routes.of(samples, model=MODEL)


def ids_without_padding(sample):
    return sample.ids_TLK if sample.padding_T is None else sample.ids_TLK[~sample.padding_T]


def test_the_promised_forms_are_all_there():
    families = (
        "equipoise",
        "vllm",
        "sglang",
        "verl",
        "slime",
        "prime-rl",
        "nemo-rl",
        "megatron-trace",
        "megatron-replay",
    )
    assert all(any(name.startswith(family) for name in format_names()) for family in families)
    assert {"vllm-http", "verl-jagged"} <= set(format_names())


def test_names_are_unique_and_every_form_says_what_it_is():
    assert len(set(format_names())) == len(FORMATS)
    assert all(form.summary and form.suffixes for form in FORMATS)
    assert find_format("verl").name == "verl"


@pytest.mark.parametrize(("form", "suffix"), WRITTEN)
def test_each_form_recognises_what_it_wrote_and_gives_it_back(tmp_path, form, suffix):
    routes, path = good_routes(), tmp_path / f"dump{suffix}"
    write_dump(routes, path, format=form)
    assert [f.name for f in FORMATS if f.matches(registry.Source.of(path).opened())] == [form]
    back = read_routes(path, model=MODEL)
    assert len(back) == len(routes)
    for sample, again in zip(routes, back, strict=True):
        assert again.known_TL is None or again.known_TL.all()
        assert np.array_equal(ids_without_padding(again), sample.ids_TLK)


@pytest.mark.parametrize(("form", "suffix"), WRITTEN)
def test_streamed_and_read_are_the_same(tmp_path, form, suffix):
    path = tmp_path / f"dump{suffix}"
    write_dump(good_routes(), path, format=form)
    stream = stream_routes(path, model=MODEL)
    assert stream.layer_numbers == MODEL.layer_numbers
    assert list(stream) == list(read_routes(path, model=MODEL))
    recordings = list(stream_recordings(path, model=MODEL))
    assert sum(len(r.rows) for r in recordings) == sum(s.num_rows for s in read_routes(path, model=MODEL))


@pytest.mark.parametrize("dump", [{"a": 1}, [1, 2], ["text"], 3, None, object(), np.zeros(3), {"routed_experts": 1}])
def test_an_unknown_object_lists_all_forms(dump):
    with pytest.raises(RoutesError, match="has no known format") as caught:
        detect(dump)
    assert all(name in str(caught.value) for name in format_names())


@pytest.mark.parametrize(
    "answer", [{"choices": [{"index": 0}]}, {"meta_info": {"id": "a"}, "output_ids": [1]}], ids=["vllm", "sglang"]
)
def test_responses_without_routes_name_the_switch(answer):
    with pytest.raises(RoutesError, match=r"without routed_experts\. Record again: .* --enable-return-routed-experts"):
        detect([answer, answer])


def test_an_unknown_file_lists_all_forms_and_a_broken_one_says_why(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"something": "else"}))
    with pytest.raises(RoutesError, match=r"a.jsonl has no known format.*\n.*equipoise"):
        read_routes(path, model=MODEL)
    path.write_text("{")
    with pytest.raises(RoutesError, match="line 1 is not JSON"):
        read_routes(path, model=MODEL)


def test_several_candidates_are_listed_and_a_name_decides(monkeypatch):
    twin = Format(
        name="twin",
        summary="looks the same",
        suffixes=(".npz",),
        matches=find_format("verl").matches,
        read=find_format("verl").read,
    )
    monkeypatch.setattr(registry, "FORMATS", (*FORMATS, twin))
    batch = {"routed_experts": np.zeros((1, 1, 4, 3), dtype=np.int16), "attention_mask": np.ones((1, 1), dtype=int)}
    with pytest.raises(RoutesError, match="can have several formats; choose one with --format") as caught:
        read_routes(batch, model=MODEL)
    listed = str(caught.value).splitlines()[1:]
    assert [line.split()[0] for line in listed] == ["verl", "twin"]
    assert "looks the same" in listed[1]
    assert len(read_routes(batch, model=MODEL, format="twin")) == 1


def test_a_named_form_is_not_second_guessed(tmp_path):
    path = tmp_path / "a.npz"
    write_dump(good_routes(), path, format="verl")
    with pytest.raises(RoutesError, match="neither a jagged routed_experts nor values and offsets"):
        read_routes(path, model=MODEL, format="verl-jagged")
    with pytest.raises(RoutesError, match="no format 'verll'; known: equipoise, vllm"):
        read_routes(path, model=MODEL, format="verll")


def test_a_suffix_the_form_does_not_have_is_refused(tmp_path):
    with pytest.raises(RoutesError, match=r"format 'equipoise' is written to .eqr files"):
        write_routes(good_routes(), tmp_path / "a.npz")


def test_a_format_that_is_only_read_is_not_written(tmp_path):
    with pytest.raises(RoutesError, match="format 'slime' is only read; write one of: equipoise, vllm-http"):
        write_routes(good_routes(), tmp_path / "a.pt", format="slime")


def test_the_tests_can_write_every_format():
    assert list(SUFFIXES) == format_names()
    assert all(set(SUFFIXES[form.name]) <= set(form.suffixes) for form in FORMATS)


def test_last_row_and_allow_short_reach_the_interpretation():
    ids = good_routes(1).samples[0].ids_TLK.astype(np.int32)
    sample = {"tokens": [1, 2], "rollout_routed_experts": np.concatenate([np.zeros_like(ids[:, :1]), ids], axis=1)}
    assert read_routes([sample], model=MODEL, last_row="placeholder").samples[0].num_rows == 1
    short = sample | {"tokens": [1, 2, 3, 4, 5]}
    with pytest.raises(RoutesError, match="2 rows for 5 tokens"):
        read_routes([short], model=MODEL)
    assert read_routes([short], model=MODEL, allow_short=True).samples[0].num_tokens == 5
    assert next(stream_routes([short], model=MODEL, allow_short=True)).num_rows == 2


def test_a_store_is_mapped_and_brings_its_model(tmp_path):
    path = tmp_path / "a.eqr"
    write_routes(good_routes(), path, format="equipoise")
    routes = read_routes(path)
    assert routes == good_routes()
    assert not routes.samples[0].ids_TLK.flags.owndata


def test_recordings_of_a_store_mean_what_the_store_holds(tmp_path):
    ids = np.array(good_routes().samples[2].ids_TLK)
    known, padding = np.ones(ids.shape[:2], dtype=bool), np.zeros(len(ids), dtype=bool)
    known[1, 2], padding[3], padding[5] = False, True, True
    ids[1, 2] = 0
    segments = (Segment(start=0, stop=4, weight_version="1"), Segment(start=4, stop=6, weight_version="2"))
    sample = SampleRoutes(
        name="a", ids_TLK=ids, num_tokens=5, known_TL=known, padding_T=padding, segments=segments, tokens_T=np.arange(5)
    )
    path = tmp_path / "a.eqr"
    write_routes(Routes.of([sample], model=MODEL), path, format="equipoise")
    assert list(interpret(stream_recordings(path, model=MODEL), model=MODEL)) == [sample]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (MODEL.replace(experts=64), "not 64 as in 'tiny'"),
        (MODEL.replace(top_k=2), "not 2 as in 'tiny'"),
        (MODEL.replace(layer_numbers=(0, 1, 2)), "not 3 layers from 0 to 2 as in 'tiny'"),
    ],
)
def test_a_store_of_another_model_is_refused(tmp_path, other, words):
    path = tmp_path / "a.eqr"
    write_routes(good_routes(), path, format="equipoise")
    with pytest.raises(RoutesError, match=f"holds routes of 'tiny': .*{words}"):
        read_routes(path, model=other)


def test_a_store_has_no_placeholder_rows(tmp_path):
    path = tmp_path / "a.eqr"
    write_routes(good_routes(), path, format="equipoise")
    with pytest.raises(RoutesError, match="leave last_row out"):
        stream_routes(path, model=MODEL, last_row="placeholder")


def test_a_model_is_a_shape_a_preset_or_a_config(tmp_path):
    preset = ModelShape.preset("olmoe")
    assert resolve_model(MODEL) is MODEL
    assert resolve_model("OLMoE") == preset
    config = {
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path / "config.json")):
        assert resolve_model(path).experts == 64
    with pytest.raises(TopologyError, match="no model preset 'olmo'"):
        resolve_model("olmo")


def test_without_a_model_only_a_store_can_be_read():
    with pytest.raises(RoutesError, match="does not name its model"):
        read_routes([{"tokens": [1], "rollout_routed_experts": None}])


def test_the_room_imports_neither_torch_nor_numba():
    code = "import sys, equipoise.routes; sys.exit(sorted({'torch', 'numba'} & set(sys.modules)) or 0)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def page_rows(part):
    """Rows of the tables in one part of the page of formats, by the first name in each."""
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    (text,) = [text for text in page.split("\n## ") if text.startswith(part)]
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}


def test_the_page_of_formats_names_every_file_of_ours():
    code = "".join(path.read_text() for path in Path(registry.__file__).parents[1].rglob("*.py"))
    assert set(page_rows("Our other files")) == set(re.findall(r'"(equipoise-[a-z-]+-\d+)"', code))


def test_the_page_of_formats_names_every_form_and_every_suffix():
    rows = page_rows("# Formats of recorded routes")
    assert list(rows) == format_names()
    for form in FORMATS:
        assert all(f"`{suffix}`" in rows[form.name] for suffix in form.suffixes)


@pytest.mark.parametrize("dump", [[], ()], ids=["list", "tuple"])
def test_an_empty_object_holds_no_record(dump):
    with pytest.raises(RoutesError, match="holds no record"):
        read_routes(dump, model=MODEL)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.json"])
def test_an_empty_file_holds_no_record(tmp_path, name):
    (tmp_path / name).write_text("[]" if name == "a.json" else "\n")
    with pytest.raises(RoutesError, match=rf"{name} holds no record; give a file with one"):
        read_routes(tmp_path / name, model=MODEL)


@pytest.mark.parametrize(("form", "suffix"), OURS)
def test_a_folder_that_is_not_there_is_our_error(tmp_path, form, suffix):
    with pytest.raises(RoutesError, match=r"dump.*cannot be written: there is no folder .*nowhere"):
        write_routes(good_routes(), tmp_path / "nowhere" / f"dump{suffix}", format=form.name)


@pytest.mark.parametrize(("form", "suffix"), OURS)
def test_a_dump_that_cannot_be_written_whole_leaves_what_was_there_before(tmp_path, monkeypatch, form, suffix):
    path = tmp_path / f"dump{suffix}"
    path.write_text("precious")

    def fill_the_disk(routes: Routes, target: Path) -> None:
        form.write(routes, target)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(registry, "find_format", lambda name: replace(form, write=fill_the_disk))
    with pytest.raises(RoutesError, match=rf"dump{suffix} cannot be written: No space left on device"):
        write_routes(good_routes(), path, format=form.name)
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [(path.name, "precious")]


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(RoutesError, match="preset name or a path, got a dict"):
        read_routes([], model={"num_experts": 8}, format="vllm")


def test_a_batch_without_mask_and_lengths_can_be_two_forms():
    batch = {"routed_experts": np.zeros((1, 4, 4, 3), dtype=np.int16)}
    with pytest.raises(RoutesError, match=r"can have several formats.*\n  verl .*\n  nemo-rl-batch"):
        read_routes(batch, model=MODEL)
    with pytest.raises(RoutesError, match="no 'attention_mask'"):
        read_routes(batch, model=MODEL, format="verl")
    with pytest.raises(RoutesError, match="no input_lengths"):
        read_routes(batch, model=MODEL, format="nemo-rl-batch")


def test_what_is_of_another_kind_is_not_written(tmp_path):
    with pytest.raises(RoutesError, match="routes is a list; it must be a Routes"):
        write_routes([], tmp_path / "x.eqr", format="equipoise")
    with pytest.raises(RoutesError, match="path is a int; it must be a str or a Path"):
        write_routes(good_routes(), 5, format="equipoise")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_30b_a3b"])
def test_a_model_may_be_named_by_its_hub_id(name):
    assert resolve_model(name).name == "qwen3-30b-a3b"


def test_an_unknown_hub_id_is_refused():
    words = r"no model config at Qwen/Qwen9-30B, and no preset of that name; give one of .*qwen3-30b-a3b"
    with pytest.raises(TopologyError, match=words):
        resolve_model("Qwen/Qwen9-30B")
