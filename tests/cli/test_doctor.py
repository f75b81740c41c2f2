"""`equipoise doctor`: table, exit codes and JSON."""

import gzip
import io
import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from equipoise.cli import main
from equipoise.cli.doctor import check_slicing, doctor
from equipoise.core import ModelShape, Routes, SampleRoutes
from equipoise.core.model import preset_names
from tests.routes.writers import write_dump

MODEL = ModelShape.preset("olmoe")


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the verb as the command line does, in a terminal wide enough for one line per check."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("equipoise.cli.app.VERBS", (doctor,))

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["doctor", *(str(a) for a in arguments)])
        return Result(int(stop.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def samples():
    rng = np.random.default_rng(3)
    ids = rng.random((3, 40, MODEL.layers, MODEL.experts)).argpartition(8, axis=3)[..., :8]
    return [SampleRoutes(name=f"s{i}", ids_TLK=ids[i], num_tokens=41) for i in range(3)]


def write(samples, path, form):
    write_dump(Routes.of(samples, model=MODEL), path, format=form)
    return path


def test_good_dump_exits_0_and_shows_every_check(run, samples, tmp_path):
    result = run(write(samples, tmp_path / "good.jsonl", "vllm-http"), "--model", "olmoe")
    assert result.exit_code == 0, result.stdout
    assert "3 samples, 120 rows" in result.stdout
    for word in ("rows-tokens", "id-range", "token-order", "what to do"):
        assert word in result.stdout
    # An empty column would take its room from the others.
    assert "first place" not in result.stdout
    assert result.stdout.rstrip().endswith("good")


def test_findings_exit_1_and_name_place_and_remedy(run, samples, tmp_path):
    ids = samples[1].ids_TLK.copy()
    ids[5, 3] = 0
    samples[1] = replace(samples[1], ids_TLK=ids)
    result = run(write(samples, tmp_path / "bad.jsonl", "sglang"), "--model", "olmoe")
    assert result.exit_code == 1
    assert "first place" in result.stdout
    line = next(line for line in result.stdout.splitlines() if "equal-rows" in line)
    assert "finding" in line
    assert "0.1% of routes" in line
    assert "sample 's1', token 5, layer 3" in line
    assert "write -1 for rows that were not recorded" in line
    assert result.stdout.rstrip().endswith("1 finding: equal-rows")


def test_json_is_the_last_line(run, samples, tmp_path):
    first = write(samples, tmp_path / "a.jsonl", "vllm-http")
    shifted = [replace(s, ids_TLK=np.roll(s.ids_TLK, 1, axis=0)) for s in samples]
    second = write(shifted, tmp_path / "b.npz", "verl")
    result = run(first, "--model", "olmoe", "--second", second, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout.splitlines()[-1])
    found = {f["check"]: f for f in document["findings"]}
    assert found["token-order"]["verdict"] == "finding"
    assert len(found["agreement"]["rate_L"]) == MODEL.layers
    assert max(found["agreement"]["rate_L"]) < 0.1
    assert document["num_rows"] == 120
    assert len(result.stdout.splitlines()) == 1
    assert "agreement by layer" in run(first, "--model", "olmoe", "--second", second).stdout


def test_native_store_brings_its_model(run, samples, tmp_path):
    assert run(write(samples, tmp_path / "store.eqr", "equipoise")).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.jsonl", "--model", "olmoe"), "nowhere.jsonl"),
        ((), "no dump named"),
        (("DUMP", "--model", "gpt-9"), "no model preset 'gpt-9'"),
        (("DUMP",), "add --model with a preset, a HF id or a config.json"),
        (("DUMP", "--model", "olmoe", "--format", "vhs"), "no format 'vhs'"),
        (("DUMP", "--model", "olmoe", "--second", "nowhere.npz"), "nowhere.npz"),
    ],
    ids=["no-dump", "nothing", "model", "no-model", "format", "second"],
)
def test_bad_input_exits_2_with_one_message(run, samples, tmp_path, arguments, words):
    dump = write(samples, tmp_path / "good.jsonl", "vllm-http")
    result = run(*(dump if a == "DUMP" else a for a in arguments))
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_damage_within_a_dump_is_a_finding_not_a_crash(run, samples, tmp_path):
    dump = write(samples, tmp_path / "cut.jsonl", "vllm-http")
    dump.write_bytes(dump.read_bytes()[:-200])
    result = run(dump, "--model", "olmoe", "--format", "vllm-http")
    assert result.exit_code == 1
    line = next(line for line in result.stdout.splitlines() if " decode " in line)
    assert "line 3" in line


@pytest.mark.parametrize("preset", preset_names())
def test_self_check_passes_for_every_preset(preset):
    diagnosis = check_slicing(preset)
    assert diagnosis.ok
    assert len(diagnosis.findings) == 13
    assert all(f.total for f in diagnosis.findings)


def test_self_check_from_the_command_line(run):
    result = run("--self-check", "--model", "mixtral-8x7b", "--json")
    assert result.exit_code == 0, result.stdout
    checks = [f["check"] for f in json.loads(result.stdout.splitlines()[-1])["findings"]]
    assert "slicing cp4 sp2 pp3" in checks
    assert "schedule cp3 sp4" in checks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dump.eqr", "--self-check"], "looks at no dump; leave out dump.eqr"),
        (["--self-check", "--second", "other.eqr"], "looks at no dump; leave out other.eqr"),
        (["dump.eqr", "--second-format", "slime"], "--second-format slime says how --second is read"),
    ],
)
def test_what_would_have_no_effect_is_refused(equipoise, arguments, words):
    outcome = equipoise("doctor", *arguments)
    assert (outcome.code, words in outcome.err) == (2, True)


@pytest.mark.parametrize("how", ["lines", "gzip", "one document"])
def test_a_dump_may_come_from_standard_input(run, samples, tmp_path, monkeypatch, how):
    write_dump(Routes.of(samples, model=MODEL), tmp_path / "dump.jsonl", format="vllm-http")
    raw = (tmp_path / "dump.jsonl").read_bytes()
    if how == "one document":
        raw = json.dumps([json.loads(line) for line in raw.splitlines()], indent=1).encode()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(gzip.compress(raw) if how == "gzip" else raw)))
    piped, read = run("--json", "-", "--model", "olmoe"), run("--json", tmp_path / "dump.jsonl", "--model", "olmoe")
    assert piped.exit_code == read.exit_code == 0
    assert piped.stdout == read.stdout
