"""Options that verbs share: the machine that prices, and how many replica slots a rank can hold."""

import json
from importlib import resources

import numpy as np
import pytest

from equipoise.cli.options import MachineFlags, check_slots, most_slots
from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, ModelShape, Plan, TopologyError
from equipoise.core.options import replica_bytes

SMALL = ("--model", "qwen3-30b-a3b", "--demo", "--json")


@pytest.fixture
def profile(tmp_path):
    """The H200's profile as a file of the user's own, every kernel twice as slow."""
    content = json.loads((resources.files("equipoise.cost") / "profiles" / "h200.json").read_text())
    for table in content["compute"]:
        for name in ("forward_ns", "update_ns"):
            table[name] = [[None if ns is None else 2 * ns for ns in line] for line in table[name]]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    return path


def test_what_is_given_stands_in_the_cluster_and_the_rest_is_the_presets(profile):
    preset = Cluster.preset("h200", ep=16, ranks_per_node=4)
    found = MachineFlags(profile=profile, ranks_per_node=4, network_gbit=200, nvlink_gbyte=400).build_cluster(ep=16)
    assert (found.name, found.ranks_per_node, found.num_ep_nodes) == ("h200", 4, 4)
    assert (found.network_bytes_per_s, found.nvlink_bytes_per_s) == (25 * 10**9, 400 * 10**9)
    assert (found.memory_bytes, found.host_bytes_per_s) == (preset.memory_bytes, preset.host_bytes_per_s)
    assert (found.profile, preset.profile) == (str(profile), "h200")
    assert MachineFlags().build_cluster(ep=8).name == "h100"


def test_a_profile_prices_what_is_analysed_and_planned(equipoise, profile, tmp_path):
    given = ("analyze", *SMALL, "--no-plan", "--no-recompute")
    filed, own = (equipoise(*given, *more).document for more in (("--cluster", "h200"), ("--profile", profile)))
    assert own["cluster"] == filed["cluster"] == "h200"
    compute, exchange = (
        [found["seconds"]["now"][part] for found in (filed, own)] for part in ("compute", "all_to_all")
    )
    assert 1.5 * compute[0] < compute[1] <= 2 * compute[0]
    assert exchange[0] == exchange[1]
    made = tmp_path / "plan.npz"
    loads = ("convert", tmp_path / "counts.npz", "--to", "loads", "-o", tmp_path / "loads.npz", "--no-recompute")
    assert equipoise("generate", "-o", tmp_path / "routes.eqr", "--model", "olmoe", "--samples", "8").code == 0
    assert equipoise("convert", tmp_path / "routes.eqr", "--to", "counts", "-o", tmp_path / "counts.npz").code == 0
    assert equipoise(*loads).code == 0
    assert equipoise("plan", tmp_path / "loads.npz", "--model", "olmoe", "--profile", profile, "-o", made).code == 0
    assert Plan.load(made).cluster.profile == str(profile)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"network_gbit": 0.0}, "--network-gbit is 0; it must be from"),
        ({"nvlink_gbyte": float("nan")}, "--nvlink-gbyte is nan"),
        ({"cluster": "h300"}, "no cluster preset 'h300'; known"),
        ({"cluster": "a100", "profile": ...}, "is of 'NVIDIA H200', --cluster is 'a100'; give 'h200'"),
    ],
)
def test_mistakes_are_named(profile, options, words):
    options = {name: profile if value is ... else value for name, value in options.items()}
    with pytest.raises(TopologyError, match=words):
        MachineFlags(**options).build_cluster(ep=8)


def test_a_profile_of_an_unknown_device_needs_the_preset_of_its_links(profile):
    profile.write_text(profile.read_text().replace('"NVIDIA H200"', '"Some GPU"', 1))
    with pytest.raises(TopologyError, match="no preset has that name; name the preset"):
        MachineFlags(profile=profile).build_cluster(ep=8)
    assert MachineFlags(profile=profile, cluster="b200").build_cluster(ep=8).name == "b200"


def test_a_file_that_is_no_profile_is_refused_before_anything_is_read(equipoise, tmp_path):
    for content, words in (("{}", "is not a equipoise-profile"), (None, "no hardware profile")):
        path = tmp_path / f"wrong{len(words)}.json"
        if content is not None:
            path.write_text(content)
        outcome = equipoise("analyze", tmp_path / "absent.npz", "--profile", path)
        assert (outcome.code, words in outcome.err) == (2, True), outcome.err


def test_a_profile_and_a_slower_network_price_what_is_simulated(equipoise, profile):
    given = ("simulate", "--demo", "--policies", "static,balanced", "--no-break-even", "--json")
    plain, own, slow = (
        equipoise(*given, *more).document["policies"][0]["seconds"]
        for more in (
            ("--cluster", "h200"),
            ("--profile", profile),
            ("--cluster", "h200", "--network-gbit", "200"),
        )
    )
    assert 1.5 * plain["compute"] < own["compute"] <= 2 * plain["compute"]
    assert slow["all_to_all_across"] == pytest.approx(2 * plain["all_to_all_across"], rel=0.02)


QWEN = ModelShape.preset("qwen3-30b-a3b")
DEEPSEEK = ModelShape.preset("deepseek-v3")
CASES = [(QWEN, "h100", 8, 128 - 16), (QWEN, "h200", 128, 127), (DEEPSEEK, "a100", 16, 227), (QWEN, "h100", 1, 0)]


@pytest.mark.parametrize(("model", "name", "ep", "most"), CASES)
def test_the_most_passes_and_one_more_is_refused_with_what_binds(model, name, ep, most):
    cluster = Cluster.preset(name, ep=ep)
    check_slots([0, most], cluster=cluster, model=model)
    fix = "One slot is the usual choice" if most else "Give --slots 0"
    with pytest.raises(
        InfeasiblePlanError, match=rf"--slots is {most + 1}; a rank can hold at most {most}: .*\. {fix}"
    ):
        check_slots([0, most + 1], cluster=cluster, model=model)


def test_memory_binds_where_buffers_of_replicas_fill_the_device():
    cluster = Cluster.preset("a100", ep=16)
    most, words = most_slots(cluster, DEEPSEEK)
    # Two buffers, so that a pull can run one visit ahead.
    each = 2 * replica_bytes(DEEPSEEK, "update")
    assert most * each <= cluster.memory_bytes < (most + 1) * each
    assert words == "a100 has 80 GB, and a slot takes 0.35 GB"


def test_fewer_than_none_are_refused():
    with pytest.raises(InfeasiblePlanError, match="--slots is -1; it must be 0"):
        check_slots(-1, cluster=Cluster.preset("h100", ep=8), model=QWEN)


@pytest.mark.parametrize("verb", ["plan", "analyze", "simulate"])
def test_every_verb_refuses_what_a_rank_cannot_hold(equipoise, tmp_path, verb):
    model = ModelShape.preset("olmoe")
    LoadMatrix(np.ones((1, model.layers, 8, 64), dtype=np.int64)).save(tmp_path / "loads.npz")
    ep = [] if verb == "plan" else ["--ep", "8"]
    refused = equipoise(verb, tmp_path / "loads.npz", "--model", "olmoe", *ep, "--slots", "500")
    assert (refused.code, refused.out) == (2, "")
    assert (
        "--slots is 500; a rank can hold at most 56: the model has 64 experts, of which it owns 8 at EP 8"
        in refused.err
    )


def test_a_sweep_is_refused_before_anything_is_simulated(equipoise):
    refused = equipoise("simulate", "--demo", "--sweep", "ep=8,128", "slots=1,120")
    assert (refused.code, refused.out) == (2, "")
    assert "--slots is 120; a rank can hold at most 112" in refused.err
