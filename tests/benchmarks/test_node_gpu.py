"""The node benchmark at tiny sizes on a GPU that two ranks share: its figures mean nothing, but all of it runs."""

import pytest
import torch

from benchmarks import node, node_links, node_report
from equipoise.launch import RankOptions, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_windows_of_rivals_have_the_gradients_of_static_on_a_device():
    asked = ["static", "lplb", "reactive", "equipoise, 1 slot, skew"]
    facts = {"commit": "a" * 40, "machine": "a GPU", "clock": "its own"}
    keeper = node.Keeper(node_report.open_document(None, facts), None)
    keeper.document["neighbours"] = {"2": {"alone_ms": 1.0, "beside_ms": 1.0}}
    node.run_all(
        node.choose(node.smoke_works(), ["exchange", f"lite:{';'.join(asked)}"]), keeper, rounds=1, device="cuda"
    )
    rows, parts, limits = node_report.summarise(keeper.document)
    assert {row["policy"] for row in rows} >= set(asked)
    assert {limit.name: limit.value for limit in limits}["smoke: gradients differ from static's by a share of"] < 0.01
    assert all(row["measured_s"] > 0 for row in parts if row["part"] in ("experts", "exchange"))


def test_an_exchange_beside_pulls_is_timed_in_two_streams():
    exchange, both = run_ranks(node_links.compare_links, 2, "cuda", options=RankOptions(device="cuda"))[0]
    assert exchange["over_rule"] > 0.5 and 0.3 < both["over_rule"] < 1.5
