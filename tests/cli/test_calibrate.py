"""`equipoise calibrate`: a profile in small, the check's verdict and exit code, clear words without GPU or torch."""

import io
import json
import sys
from contextlib import redirect_stdout
from importlib import resources

import pytest
import torch

from equipoise.cli import calibrate as verb
from equipoise.cost import Profile


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A profile that the command wrote on this CPU, and what it printed."""
    from equipoise.cli import main

    path, printed = tmp_path_factory.mktemp("calibrate") / "small.json", io.StringIO()
    with pytest.raises(SystemExit) as stop, redirect_stdout(printed):
        main(["calibrate", "--trial", "--runs", "1", "-o", str(path), "--json", "--commit", "abc"])
    assert stop.value.code == 0
    return path, printed.getvalue()


@pytest.fixture
def small(written):
    return written[0]


def test_the_written_file_is_a_profile(small):
    assert Profile.read(small, allow_trial=True).kind == "trial"


@pytest.mark.parametrize("verb", ["analyze", "simulate"])
def test_nothing_is_priced_with_a_trial(equipoise, small, verb):
    outcome = equipoise(verb, "--demo", "--profile", small, "--cluster", "h200")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"profile {small} is a trial of the measuring itself" in outcome.err
    assert "without --trial, or use one of a100" in outcome.err


def test_a_trial_is_checked_by_a_trial_and_a_profile_by_a_gpu(equipoise, small, tmp_path):
    assert f"{small} is trial; add --trial to check it" in equipoise("calibrate", "--check", small).err
    filed = tmp_path / "filed.json"
    filed.write_text((resources.files("equipoise.cost") / "profiles" / "h200.json").read_text())
    outcome = equipoise("calibrate", "--trial", "--check", filed)
    assert (outcome.code, "is measured; leave --trial out" in outcome.err) == (2, True)


def test_json_is_the_profile_itself(written):
    path, printed = written
    document = json.loads(printed.splitlines()[-1])
    assert document == json.loads(path.read_text())
    assert document["commit"] == "abc"


def faked(monkeypatch, filed, *factors):
    """The check measures what is filed, with the first update cell of the sample times a factor, one after another."""
    left = list(factors)

    def measure(grid, **_):
        fresh = json.loads(json.dumps(filed))
        for table in fresh["compute"]:
            s, x = table["slots"].index(grid.slots[0]), [table["rows"].index(rows) for rows in grid.rows]
            for key in ("forward_ns", "update_ns"):
                table[key] = [[table[key][s][at] for at in x]]
            table["slots"], table["rows"] = list(grid.slots), list(grid.rows)
        fresh["compute"][0]["update_ns"][0][0] *= left.pop(0) if len(left) > 1 else left[0]
        return fresh

    monkeypatch.setattr("equipoise.calibrate.calibrate", measure)


@pytest.mark.parametrize(("factor", "limit", "code"), [(1.05, 10, 0), (1.2, 10, 1), (1.2, 25, 0)])
def test_the_check_is_exit_code_1_beyond_the_limit(equipoise, monkeypatch, small, factor, limit, code):
    faked(monkeypatch, json.loads(small.read_text()), factor)
    outcome = equipoise("calibrate", "--trial", "--check", small, "--limit", limit, "--json")
    assert outcome.code == code, outcome.err
    document = outcome.document
    assert document["is_good"] is (code == 0) and document["limit_pct"] == limit
    off = [one for one in document["figures"] if one["deviation_pct"] != 0]
    assert [one["deviation_pct"] for one in off] == [pytest.approx(100 * (factor - 1), abs=0.1)]


@pytest.mark.parametrize(("factors", "code", "deviation"), [((1.2, 1.02), 0, 2), ((1.2, 0.7), 1, 20)])
def test_a_figure_that_is_off_is_measured_once_more(equipoise, monkeypatch, small, factors, code, deviation):
    faked(monkeypatch, json.loads(small.read_text()), *factors)
    outcome = equipoise("calibrate", "--trial", "--check", small, "--json")
    assert outcome.code == code, outcome.err
    assert max(one["deviation_pct"] for one in outcome.document["figures"]) == pytest.approx(deviation, abs=0.1)


def test_the_check_is_shown_as_a_table(equipoise, monkeypatch, small):
    faked(monkeypatch, json.loads(small.read_text()), 1.5)
    outcome = equipoise("calibrate", "--trial", "--check", small)
    assert outcome.code == 1
    for words in ("FINDING", "+50.0", "pull.host_bytes_per_s", "1 figure off, twice", "limit 10 %"):
        assert words in outcome.out


def test_a_real_check_measures_its_sample(equipoise, small):
    outcome = equipoise("calibrate", "--trial", "--check", small, "--runs", 1, "--limit", 1e9, "--json")
    assert outcome.code == 0, outcome.err
    assert all(one["measured"] > 0 for one in outcome.document["figures"] if one["is_judged"])


def test_without_a_gpu_the_way_out_is_named(equipoise, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = equipoise("calibrate", "-o", tmp_path / "p.json")
    assert outcome.code == 2
    assert "sees no CUDA device" in outcome.err and "h100" in outcome.err
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("arguments", [(), ("-o", "a.json", "--check", "b.json")], ids=["neither", "both"])
def test_one_of_the_two_is_needed(equipoise, arguments):
    outcome = equipoise("calibrate", *arguments)
    assert outcome.code == 2
    assert "either -o FILE" in outcome.err


def test_a_profile_without_a_place_is_refused_before_anything_is_measured(equipoise, tmp_path):
    outcome = equipoise("calibrate", "--trial", "-o", tmp_path / "absent" / "p.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "p.json cannot be written: there is no folder" in outcome.err


def test_what_is_no_profile_is_refused_before_anything_is_measured(equipoise, tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    path.write_text("{}")
    monkeypatch.setattr("equipoise.calibrate.calibrate", lambda *_, **__: pytest.fail("measured"))
    outcome = equipoise("calibrate", "--trial", "--check", path)
    assert outcome.code == 2 and "is not a equipoise-profile-2 file" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "absent.json"], "no hardware profile 'absent.json'"),
        (["--check", "."], "profile . cannot be read: Is a directory"),
        (["-o", "p.json", "--cluster", "abacus"], "no cluster preset 'abacus'"),
    ],
)
def test_a_wrong_name_is_told_before_a_missing_gpu(equipoise, monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    outcome = equipoise("calibrate", *arguments)
    assert (outcome.code, words in outcome.err) == (2, True)


@pytest.mark.parametrize(
    ("device", "given", "rate"), [("NVIDIA H200", None, 450), ("NVIDIA A100-SXM4-80GB", None, 300)]
)
def test_the_links_rate_is_that_of_the_devices_preset(monkeypatch, device, given, rate):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert verb._link_rates(given)[0] == rate * 10**9
    assert verb._link_rates("h100")[0] == 450 * 10**9


def test_a_device_without_a_preset_needs_a_cluster(monkeypatch):
    from equipoise.core import TopologyError

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 9000")
    with pytest.raises(TopologyError, match="no cluster preset is named like 'Card 9000'; give --cluster"):
        verb._link_rates(None)


def test_without_torch_the_extra_is_named(equipoise, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    outcome = equipoise("calibrate", "-o", tmp_path / "p.json")
    assert outcome.code == 2
    assert "pip install 'equipoise[torch]'" in outcome.err


def test_ranks_measure_the_sizes_that_are_chosen(equipoise, quick_ranks, tmp_path):
    path = tmp_path / "ranks.json"
    chosen = ("--shapes", "32x16,16x16", "--rows", "16,4", "--slots", 2, "--tokens", 8)
    outcome = equipoise("calibrate", "--trial", "--runs", 1, "--ranks", 2, *chosen, "-o", path, "--json")
    assert outcome.code == 0, outcome.err
    tables = outcome.document["compute"]
    assert [(table["hidden"], table["expert_width"]) for table in tables] == [(32, 16), (16, 16)]
    assert all((table["rows"], table["slots"]) == ([4, 16], [2]) for table in tables)
    assert "sequences of 8 tokens" in outcome.document["attention"]["source"]
    assert outcome.document["ranks"]["count"] == 2 and outcome.document == json.loads(path.read_text())
    refused = equipoise("calibrate", "--trial", "--check", path)
    assert refused.code == 2 and "was not measured with 1 rank; give --ranks 2 to check it" in refused.err


@pytest.mark.parametrize(
    ("option", "text"), [("--shapes", "2048"), ("--rows", "8,"), ("--slots", "0"), ("--tokens", "many")]
)
def test_sizes_that_are_no_numbers_are_refused(equipoise, tmp_path, option, text):
    outcome = equipoise("calibrate", "--trial", option, text, "-o", tmp_path / "p.json")
    assert outcome.code == 2 and f"{option} is '{text}'; give numbers above 0 with commas" in outcome.err


def test_a_check_chooses_its_sizes_itself(equipoise, small):
    outcome = equipoise("calibrate", "--trial", "--check", small, "--rows", "8")
    assert outcome.code == 2 and "a check measures a sample of the profile; leave --shapes" in outcome.err
    outcome = equipoise("calibrate", "--trial", "--check", small, "--ranks", 2)
    assert outcome.code == 2 and "was not measured with 2 ranks; leave --ranks out to check it" in outcome.err
