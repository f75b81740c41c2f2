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
from equipoise.routes.registry import find_format, read_routes
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


def test_nothing_is_said_of_a_folder_without_stray_files(shard, caplog):
    with caplog.at_level(logging.WARNING):
        assert names(shard.parent) == names(shard)
    assert "not read" not in caplog.text


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


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def records_of(shard):
    return [json.loads(line) for line in shard.read_text().splitlines()]


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda made: {"request": {"model": "m"}, "response": made}, id="request and response"),
        pytest.param(lambda made: {"custom_id": "1", "id": "b", "response": {"body": made}}, id="a batch file's body"),
        pytest.param(lambda made: {"response": json.dumps(made)}, id="the response as text"),
        pytest.param(lambda made: {"request": {}, "response": [made]}, id="a list of responses"),
    ],
)
def test_the_record_of_a_log_is_read_as_its_response(tmp_path, shard, wrap):
    path = write_lines(tmp_path / "log.jsonl", map(wrap, records_of(shard)))
    assert names(path) == names(shard)


def test_a_logged_request_says_where_rows_start(tmp_path, shard):
    made = records_of(shard)[0]
    made.pop("routed_experts_prompt_start", None)
    log = [{"request": {"body": {"routed_experts_prompt_start": 2}}, "response": {"choices": made["choices"]}}]
    (sample,) = read_routes(write_lines(tmp_path / "log.jsonl", log), model=model_of(), allow_short=True)
    assert not sample.known_TL[:2].any() and sample.known_TL[2:].any()


@pytest.mark.parametrize(
    "failed",
    [{"error": {"message": "aborted", "code": 499}}, {"request": {"model": "m"}, "response": None}],
    ids=["an error", "no response"],
)
def test_a_request_that_failed_is_left_out_as_an_aborted_one(tmp_path, shard, caplog, failed):
    with caplog.at_level(logging.WARNING):
        path = write_lines(tmp_path / "log.jsonl", [failed, *records_of(shard)])
        assert names(path) == names(shard)
    assert "have no routes and are left out, first line 1" in caplog.text


@pytest.mark.parametrize("form", ["sglang-openai", "prime-rl"])
def test_aborted_requests_of_other_engines_are_left_out(tmp_path, routes, caplog, form):
    path = tmp_path / "a.jsonl"
    write_form(find_format(form), routes, path)
    aborted = {"choices": [{"index": 0, "finish_reason": "abort"}]}
    with caplog.at_level(logging.WARNING):
        found = names(write_lines(tmp_path / "b.jsonl", [aborted, *records_of(path)]))
    assert len(found) == len(routes) and "1 of" in caplog.text


def test_an_aborted_output_of_an_offline_engine_is_left_out(caplog):
    model = model_of()
    rows = np.zeros((3, model.hidden_layers, model.top_k), dtype=np.uint8)
    rows[:, list(model.layer_numbers)] = np.arange(model.top_k)
    made = [
        {"request_id": str(at), "outputs": [{"index": 0, "routed_experts": given}]}
        for at, given in enumerate((None, rows, rows))
    ]
    with caplog.at_level(logging.WARNING):
        assert names(made) == ["1", "2"]
    assert "1 of 3 have no routes" in caplog.text


def own_records(routes):
    """Rows as nested lists beside their tokens, as `.tolist()` and tables give them."""
    model = routes.model
    for sample in routes:
        rows = vllm.engine_rows(sample, routes, form="vllm", dtype=np.dtype(np.int32))
        tokens = list(range(sample.num_tokens))
        given = {"prompt_token_ids": tokens[:2], "token_ids": tokens[2:]}
        assert rows.shape[1] == model.hidden_layers
        yield {"id": sample.name, **given, "routed_experts": rows.tolist()}


def test_rows_may_be_nested_lists_with_their_tokens(tmp_path, routes):
    path = write_lines(tmp_path / "own.jsonl", own_records(routes))
    found = read_routes(path, model=model_of())
    assert [sample.name for sample in found] == [sample.name for sample in routes]
    assert [len(sample.tokens_T) for sample in found] == [sample.num_tokens for sample in routes]
    assert all(np.array_equal(x.ids_TLK, y.ids_TLK) for x, y in zip(found, routes, strict=True))


def test_a_folder_of_folders_is_read_and_equal_file_names_stay_apart(tmp_path, routes):
    rows = [sample.ids_TLK for sample in routes]
    for step in ("step_1", "step_2"):
        (tmp_path / step).mkdir()
        own = [{"routed_experts": record["routed_experts"]} for record in own_records(routes)]
        write_lines(tmp_path / step / "rollouts.jsonl", own)
    (tmp_path / "config.json").write_text("{}")
    for dump in (tmp_path, tmp_path / "step_*" / "rollouts.jsonl"):
        found = read_routes(dump, model=model_of())
        assert len(found) == 2 * len(rows) and next(iter(found)).name == "step_1/rollouts.jsonl line 1"


def test_of_a_folder_the_suffix_with_most_bytes_is_read(shard, caplog):
    for number in range(3):
        shard.with_name(f"meta_{number}.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert len(names(shard.parent)) == len(names(shard))
    assert "3 of 4 entries are not read: meta_0.json" in caplog.text


def test_zstandard_of_several_frames_is_read_and_damage_is_named(shard):
    zstandard = pytest.importorskip("zstandard")
    lines = shard.read_bytes().splitlines(keepends=True)
    packed = shard.with_name("b.jsonl.zst")
    packed.write_bytes(b"".join(map(zstandard.compress, lines)))
    assert names(packed) == names(shard)
    packed.write_bytes(b"not packed")
    with pytest.raises(RoutesError, match=r"b\.jsonl\.zst cannot be unpacked"):
        names(packed)


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow", "a.feather", "saved"])
@pytest.mark.parametrize("is_own", [False, True], ids=["responses", "nested lists"])
def test_tables_are_read_row_by_row(tmp_path, shard, routes, name, is_own):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.feather
    import pyarrow.ipc
    import pyarrow.parquet

    records = list(own_records(routes)) if is_own else records_of(shard)
    table, path = pyarrow.Table.from_pylist(records), tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(table, path)
    elif name == "a.feather":
        pyarrow.feather.write_feather(table, path)
    else:
        # What `datasets` writes with save_to_disk: shards in the stream form, beside two JSON files.
        if name == "saved":
            path.mkdir()
            for companion in ("dataset_info.json", "state.json"):
                (path / companion).write_text("{}")
        target = path / "data-00000-of-00001.arrow" if name == "saved" else path
        new = pyarrow.ipc.new_file if name == "file.arrow" else pyarrow.ipc.new_stream
        with new(target, table.schema) as writer:
            writer.write_table(table)
    assert names(path) == [sample.name for sample in routes]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_a_damaged_table_is_named(tmp_path, name):
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(b"PAR1 or ARROW1, but nothing else")
    with pytest.raises(RoutesError, match=f"{name} cannot be read as"):
        names(tmp_path / name)


def test_an_unknown_file_says_what_its_first_record_is(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "b", "score": 1}])
    with pytest.raises(RoutesError, match=r"first record is an object with the fields prompt, answer, score\. Were r"):
        names(path)
    with pytest.raises(RoutesError, match="holds no record; give a file with one"):
        names(write_lines(tmp_path / "b.jsonl", []))
