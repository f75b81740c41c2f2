"""Dispatches made ahead by the balancer: the same bits, nothing left to do in the layer, decided alike everywhere."""

from functools import partial

import pytest
import torch

from tests.balancer import ahead
from tests.parity.case import ParityCase

SMALL = ParityCase(ranks=2, layers=2, tokens=12, home_slots=2)
WAVES = {"exchanged in waves": 2, "prepared in waves": 3, "prepared in waves, arena": 2}


@pytest.mark.dist(4)
def test_every_way_of_making_a_dispatch_learns_the_same_bits(pool):
    case = ParityCase(ranks=4, nodes=2, layers=2, tokens=16, top_k=4)
    results = pool.run(ahead.every_way, case.ranks, case)
    for found in results:
        wanted_outputs, wanted_weights, _ = found["exchanged"]
        for name, (outputs, weights, reports) in found.items():
            # In waves, rows of an expert that is cut are added to its gradient in another order.
            same = partial(torch.allclose, rtol=1e-5, atol=1e-6) if name in WAVES else torch.equal
            assert all(map(torch.equal, outputs[:2], wanted_outputs[:2])), "before anything was learnt"
            assert all(map(same, outputs, wanted_outputs)), name
            assert all(map(same, weights, wanted_weights)), name
            is_prepared = not name.startswith("exchanged")
            assert {report.dispatch for report in reports} == {
                "prepared" if is_prepared else "exchanged: not asked for"
            }
            assert all(report.is_as_planned for report in reports), name
            assert {report.waves for report in reports} == {WAVES.get(name, 1)}, name
    reports = [report for found in results for report in found["prepared in two levels"][2]]
    assert any(report.replicas for report in reports), "a case without a replica shows nothing"
    total = {name: sum(report.dispatch_bytes[name] for report in reports) for name in reports[0].dispatch_bytes}
    assert 0 < total["two_level across"] < total["direct across"]
    assert total["two_level inside"] > total["direct inside"] > 0
    direct = [found["prepared"][2][0].dispatch_bytes for found in results]
    assert all(set(sent) == {"direct across", "direct inside"} for sent in direct)


@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("an unknown route", "exchanged: rank 1 knows 9"),
        ("counted rows", "exchanged: rank 1 gave counted rows, not routes"),
        ("little memory", "bytes of tables are over prepared_bytes=100"),
    ],
    ids=["an unknown route", "counted rows", "little memory"],
)
def test_all_ranks_or_none_make_dispatches_ahead_and_say_why(pool, what, words):
    said = pool.run(ahead.decision, 2, SMALL, what)
    assert said[0][0] == said[1][0] and words in said[0][0]
    if what != "an unknown route":
        assert all(is_as_planned for _, is_as_planned in said)


@pytest.mark.dist(2)
def test_waves_where_rows_travel_all_at_once_are_refused_and_auto_plans_none(pool):
    for (kind, words), waves in pool.run(ahead.waves_of_mapped_rows, 2, SMALL):
        assert kind == "TransferError" and waves == 1
        assert words.startswith("waves=2: ranks of a node read each other's rows in place")
        assert words.endswith("use rows='collective', or waves=1")


@pytest.mark.dist(2)
def test_a_route_other_than_submitted_ends_the_window_with_an_error_on_every_rank(pool):
    other, own = pool.run(ahead.another_route, 2, SMALL)
    assert own[0] == other[0] == "RoutesError"
    assert "layer index 1: 1 rows were routed otherwise than prepared" in own[1]
    assert "1 rows of other ranks" in other[1]


@pytest.mark.dist(1)
def test_routes_overwritten_after_counting_are_told_where_the_layer_asks(pool):
    (words,) = pool.run(ahead.other_routes_than_counted, 1, ParityCase(ranks=1, layers=2, tokens=6, home_slots=4))
    assert "rows from these ids, but the plan says" in words
