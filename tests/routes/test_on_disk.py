"""Own rollouts as they lie on disk: packed, in folders and patterns, in batches, with aborted requests among them."""

import base64
import gzip
import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.core import RoutesError
from equipoise.routes import vllm
from equipoise.routes.registry import read_routes
from equipoise.routes.source import Source
from tests.routes.wire_cases import model_of, routes_of
from tests.routes.writers import write_form

ROOT = Path(__file__).parents[2]


@pytest.fixture
def routes():
    return routes_of(model_of(), seed=3)


@pytest.fixture
def shard(tmp_path, routes):
    """One `.jsonl` of vLLM responses, in a folder of its own."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    write_form(vllm.FORMATS[1], routes, folder / "a.jsonl")
    return folder / "a.jsonl"


def rename(shard, target, prefix):
    """The same responses under other ids: equal names would be turns of one sample."""
    lines = [json.loads(line) for line in shard.read_text().splitlines()]
    text = "".join(json.dumps({**line, "request_id": prefix + line["request_id"]}) + "\n" for line in lines)
    target.write_text(text)
    return text


def names(dump):
    return [sample.name for sample in read_routes(dump, model=model_of())]


def test_packed_lines_are_read_and_damage_is_named(shard, routes):
    packed = shard.with_name("b.jsonl.gz")
    packed.write_bytes(gzip.compress(shard.read_bytes()))
    assert names(packed) == names(shard)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(RoutesError, match=r"b\.jsonl\.gz cannot be unpacked"):
        names(packed)


@pytest.mark.parametrize(("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_what_needs_a_package_names_it(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(RoutesError, match=f"needs {package} to be read; pip install {package}, or"):
        list(Source.of(tmp_path / name).records())


def test_a_folder_is_read_without_its_stray_files_which_are_named(shard, caplog):
    rename(shard, shard.with_name("b.jsonl"), "second ")
    for stray in ("config.json", "notes.md", ".hidden.jsonl"):
        shard.with_name(stray).write_text("{}")
    with caplog.at_level(logging.WARNING):
        found = names(shard.parent)
    assert len(found) == 2 * len(names(shard))
    assert "3 of 5 entries are not read: .hidden.jsonl, config.json, notes.md" in caplog.text


def test_a_pattern_names_the_files_that_fit_it(shard):
    rename(shard, shard.with_name("b.jsonl"), "second ")
    rename(shard, shard.with_name("other.jsonl"), "third ")
    pattern = shard.parent / "?.jsonl"
    assert len(names(str(pattern))) == 2 * len(names(shard))
    assert names(shard.parents[1] / "**" / "a.jsonl") == names(shard)
    with pytest.raises(RoutesError, match="no dump at"):
        names(shard.parent / "z*.jsonl")


def sglang_record(rows, name):
    payload = None if rows is None else base64.b64encode(rows.astype("<i4").tobytes()).decode()
    return {"meta_info": {"id": name, "routed_experts": payload}}


def test_a_line_may_hold_the_responses_of_a_batch(tmp_path, routes):
    model, path = model_of(), tmp_path / "batches.jsonl"
    rows = np.zeros((3, model.hidden_layers, model.top_k), dtype=np.int32)
    rows[:, list(model.layer_numbers)] = np.arange(model.top_k)
    batches = [[sglang_record(rows, f"{batch} {at}") for at in range(2)] for batch in range(2)]
    path.write_text("".join(json.dumps(batch) + "\n" for batch in batches))
    assert names(path) == ["0 0", "0 1", "1 0", "1 1"]


@pytest.mark.parametrize("place", [0, 1], ids=["first", "later"])
def test_an_aborted_request_is_counted_named_and_left_out(tmp_path, caplog, place, shard):
    lines = shard.read_text().splitlines()
    lines.insert(place, json.dumps({"request_id": "gone", "choices": [{"index": 0, "finish_reason": "abort"}]}))
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(lines))
    with caplog.at_level(logging.WARNING):
        assert names(path) == names(shard)
    assert f"1 of {len(lines)} have no routes and are left out, first line {place + 1}" in caplog.text


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_a_dump_that_mostly_has_no_routes_is_refused(tmp_path, form, shard):
    model = model_of()
    rows = np.zeros((3, model.hidden_layers, model.top_k), dtype=np.int32)
    rows[:, list(model.layer_numbers)] = np.arange(model.top_k)
    good = [json.loads(shard.read_text().splitlines()[0])] if form == "vllm" else [sglang_record(rows, "good")]
    empty = {"choices": [{"index": 0}]} if form == "vllm" else sglang_record(None, "gone")
    path = tmp_path / "most.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (*good, empty, empty)))
    with pytest.raises(RoutesError, match=r"line 2 has no routed_experts, as 2 of 3 records: .*record again"):
        names(path)


def test_a_jagged_batch_is_read_in_a_fresh_process(tmp_path):
    """torch loads its jagged tensors only once it has imported what the test process has imported long ago."""
    values = [torch.arange(24).view(3, 4, 2), torch.arange(16).view(2, 4, 2)]
    torch.save({"routed_experts": torch.nested.nested_tensor(values, layout=torch.jagged)}, tmp_path / "a.pt")
    code = f"from equipoise.routes.source import Source; print(len(Source.of({str(tmp_path / 'a.pt')!r}).first()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("a.jsonl", ".jsonl"), ("step.1.jsonl", ".jsonl"), ("a.JSONL.GZ", ".jsonl"), ("a.gz", ".gz"), ("a", "")],
)
def test_a_suffix_is_that_of_what_a_file_holds(tmp_path, name, suffix):
    (tmp_path / name).write_bytes(b"")
    assert Source.of(tmp_path / name).suffix == suffix


@pytest.mark.parametrize("junk", [None, {}, {"meta_info": {}}, {"choices": [None]}, {"choices": [{}]}], ids=str)
def test_a_record_that_is_no_answer_is_not_taken_for_an_aborted_request(tmp_path, shard, junk):
    lines = [*shard.read_text().splitlines(), json.dumps(junk)]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    with pytest.raises(RoutesError):
        names(tmp_path / "some.jsonl")
