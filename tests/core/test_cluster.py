"""Clusters: the layout of ranks on nodes, published figures, and errors that list what is known."""

import json
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, ModelShape, TopologyError
from equipoise.core.cluster import preset_names

# Data sheets by hand: device memory, dense bf16 operations, memory, NVLink (one direction) and NIC bytes per second.
PUBLISHED = {
    "a100": (80e9, 312e12, 2.039e12, 300e9, 25e9),
    "b200": (180e9, 2250e12, 8e12, 900e9, 50e9),
    "h100": (80e9, 989.4e12, 3.35e12, 450e9, 50e9),
    "h200": (141e9, 989.4e12, 4.8e12, 450e9, 50e9),
}


def make_cluster(**changes):
    figures = {
        "name": "tiny",
        "nodes": 2,
        "ranks_per_node": 2,
        "ep": 4,
        "node_R": (0, 0, 1, 1),
        "memory_bytes": 10,
        "flops": 10,
        "memory_bytes_per_s": 10,
        "nvlink_bytes_per_s": 10,
        "network_bytes_per_s": 10,
        "host_bytes_per_s": 10,
    }
    return Cluster(**{**figures, **changes})


def test_presets_are_the_promised_ones():
    assert preset_names() == ["a100", "b200", "h100", "h200"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_figures_are_the_published_ones(name):
    cluster = Cluster.preset(name)
    found = (
        cluster.memory_bytes,
        cluster.flops,
        cluster.memory_bytes_per_s,
        cluster.nvlink_bytes_per_s,
        cluster.network_bytes_per_s,
    )
    assert found == PUBLISHED[name]
    # PCIe x16 of the generation bounds the host link: Gen4 32 GB/s, Gen5 64 GB/s each way.
    assert 0.7 < cluster.host_bytes_per_s / (32e9 if name == "a100" else 64e9) < 0.9


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_figure_of_a_preset_names_its_source(name):
    data = json.loads((resources.files("equipoise.core") / "presets" / "clusters" / f"{name}.json").read_text())
    assert data["sources"].keys() == data["figures"].keys()
    assert all(len(source) > 10 for source in data["sources"].values())
    assert dict(Cluster.preset(name).sources) == data["sources"]


@settings(max_examples=80, deadline=None)
@given(nodes=st.integers(1, 9), per_node=st.integers(1, 9), data=st.data())
def test_the_ep_group_fills_nodes_in_order(nodes, per_node, data):
    ep = data.draw(st.none() | st.integers(1, nodes * per_node))
    cluster = Cluster.preset("h200", nodes=nodes, ranks_per_node=per_node, ep=ep)
    assert cluster.ep == (nodes * per_node if ep is None else ep)
    assert cluster.node_R == tuple(rank // per_node for rank in range(cluster.ep))
    assert cluster.ranks_N.sum() == cluster.ep
    assert cluster.ranks_N[:-1].tolist() == [per_node] * (cluster.num_ep_nodes - 1)
    assert cluster.node_array_R.tolist() == list(cluster.node_R)


def test_one_node_of_eight_is_the_default():
    assert Cluster.preset("h100").node_R == (0,) * 8


def test_nodes_follow_from_ep_alone():
    cluster = Cluster.preset("h100", ep=20)
    assert (cluster.nodes, cluster.num_ep_nodes) == (3, 3)
    assert cluster.ranks_N.tolist() == [8, 8, 4]


def test_ranks_may_be_strided_over_nodes():
    cluster = Cluster.preset("h100", node_R=(0, 1, 0, 1))
    assert (cluster.ep, cluster.nodes, cluster.ranks_per_node) == (4, 2, 2)
    assert cluster.ranks_N.tolist() == [2, 2]


def test_uneven_nodes_are_allowed():
    assert Cluster.preset("h100", node_R=(0, 0, 0, 1)).ranks_N.tolist() == [3, 1]


def test_a_figure_can_be_overridden_and_the_rest_stays():
    cluster = Cluster.preset("H200", network_bytes_per_s=25_000_000_000)
    assert cluster.network_bytes_per_s == 25_000_000_000
    assert cluster.flops == Cluster.preset("h200").flops
    assert cluster.name == "h200"


@settings(max_examples=50, deadline=None)
@given(ep=st.integers(1, 300))
def test_with_ep_keeps_the_hardware_and_adds_nodes_as_needed(ep):
    cluster = Cluster.preset("h200", nodes=2).with_ep(ep)
    assert cluster.node_R == tuple(rank // 8 for rank in range(ep))
    assert cluster.nodes == max(2, -(-ep // 8))
    assert cluster.flops == Cluster.preset("h200").flops


def test_equal_arguments_make_equal_clusters():
    assert Cluster.preset("h200", nodes=2) == Cluster.preset("h200", ranks_per_node=8, nodes=2)
    assert Cluster.preset("h200", nodes=2) != Cluster.preset("h200", nodes=2, ep=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"node_R": (0, 0, 1)}, "names 3 ranks, the EP group has 4", id="too-few-ranks"),
        pytest.param({"node_R": (0, 0, 2, 2)}, "without gaps", id="gap"),
        pytest.param({"node_R": (1, 1, 1, 1)}, "without gaps", id="not-from-zero"),
        pytest.param({"node_R": (-1, 0, 0, 1)}, "node_R is -1; it must be at least 0", id="negative-node"),
        pytest.param({"node_R": (0, 0, 1.5, 1)}, "whole number, got 1.5", id="float-node"),
        pytest.param({"nodes": 1}, "names node 1; there are 1 nodes", id="too-many-nodes"),
        pytest.param({"flops": 0}, "flops is 0; it must be at least 1", id="zero-figure"),
        pytest.param({"flops": 1e12}, "flops must be a whole number", id="float-figure"),
        pytest.param({"ep": True}, "ep must be a whole number", id="bool"),
    ],
)
def test_a_cluster_that_makes_no_sense_cannot_be_built(changes, words):
    with pytest.raises(TopologyError, match=words):
        make_cluster(**changes)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        pytest.param("h999", {}, "no cluster preset 'h999'; known: a100, b200, h100, h200", id="unknown-preset"),
        pytest.param("h200", {"speed": 1}, "no figure 'speed'; known: memory_bytes, flops", id="unknown-figure"),
        pytest.param("h200", {"nodes": 0}, "nodes is 0; it must be at least 1", id="no-nodes"),
        pytest.param("h200", {"ranks_per_node": 0}, "ranks_per_node is 0", id="no-ranks"),
        pytest.param(
            "h200",
            {"nodes": 2, "ep": 17},
            "ep is 17, more than the 16 ranks of 2 nodes; give 3 nodes",
            id="ep-too-large",
        ),
        pytest.param("h200", {"ep": -1}, "nodes is 0|ep is -1", id="negative-ep"),
        pytest.param("h200", {"node_R": ()}, "node_R is empty", id="empty-node-map"),
        pytest.param("h200", {"ep": 10**11}, "ep is 100000000000; it must be from 1 to 65536", id="absurd-ep"),
    ],
)
def test_an_unknown_or_impossible_preset_is_an_error_that_says_what_is_known(name, arguments, words):
    with pytest.raises(TopologyError, match=words):
        Cluster.preset(name, **arguments)


def test_home_slots_are_owned_experts_per_rank():
    assert Cluster.preset("h200", nodes=4).home_slots(ModelShape.preset("qwen3-30b-a3b")) == 4


def test_experts_that_do_not_divide_are_refused_with_a_size_that_works():
    model = ModelShape.preset("qwen3-30b-a3b", experts=63)
    with pytest.raises(TopologyError, match=r"63 experts of 'qwen3-30b-a3b' do not divide by 8 ranks; .* example 7"):
        Cluster.preset("h200").home_slots(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"node_R": "ab"}, "an entry of node_R must be a whole number, got 'a'", id="text"),
        pytest.param({"node_R": [0.0, 1.0]}, "an entry of node_R must be a whole number", id="floats"),
        pytest.param({"node_R": [0, 0], "ranks_per_node": 0}, "ranks_per_node is 0", id="no-rank-per-node"),
        pytest.param({"node_R": [0, 0], "nodes": 0}, "nodes is 0", id="no-node"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused_not_replaced(options, words):
    with pytest.raises(TopologyError, match=words):
        Cluster.preset("h200", **options)
