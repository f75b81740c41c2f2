"""A whole calibration on a CPU in small, and what is said where there is no GPU."""

import json
import subprocess

import pytest
import torch

from equipoise.calibrate import Grid, calibrate, run
from equipoise.core import TopologyError
from equipoise.cost import Profile
from equipoise.cost.profile import SECTIONS


@pytest.fixture(scope="module")
def measured():
    """A profile of tiny sizes on this CPU, and what its progress told."""
    told = []
    tell = lambda done, total: told.append((done, total))  # noqa: E731
    return calibrate(Grid.smoke(), nvlink_bytes_per_s=10**12, runs=1, device="cpu", commit="c" * 40, tell=tell), told


def test_what_is_measured_is_a_profile_with_a_source_for_every_section(measured):
    content, _ = measured
    profile = Profile.from_json(json.dumps(content), name="small")
    assert profile.kind == "trial", "a CPU in small is nobody's price"
    assert profile.received_update_bytes_per_s > 0
    assert all(len(content[section]["source"]) > 20 for section in SECTIONS)


def test_progress_is_told_once_per_step_and_ends_at_the_total(measured):
    _, told = measured
    total = run.count_steps(Grid.smoke())
    assert told == [(done, total) for done in range(1, total + 1)]


def test_nothing_about_the_makers_stays_unknown(measured):
    content, _ = measured
    assert content["commit"] == "c" * 40
    assert content["torch"] == torch.__version__
    assert all(content[key] for key in ("device", "driver", "date", "made_by"))


def test_the_commit_is_read_from_the_checkout():
    commit = run.read_commit().removesuffix("-dirty")
    assert len(commit) == 40 and int(commit, 16) > 0


@pytest.mark.parametrize(
    "failure", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git")], ids=["no git", "git refuses"]
)
def test_where_git_cannot_tell_the_commit_has_to_be_given(monkeypatch, failure):
    def refuse(*_: str) -> str:
        raise failure

    monkeypatch.setattr(run, "_output", refuse)
    with pytest.raises(TopologyError, match=r"git cannot tell the commit of .*give it with --commit"):
        run.read_commit()


def test_without_a_gpu_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TopologyError, match=r"sees no CUDA device.*use a profile that comes with the package \(a100"):
        calibrate(Grid.smoke(), nvlink_bytes_per_s=1)


def test_a_profile_of_a_gpu_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(run, "_output", lambda *_: "550.1")
    found = run.provenance("cuda", "c" * 40)
    assert (found["kind"], found["device"], found["driver"]) == ("measured", "NVIDIA H200", "550.1")
