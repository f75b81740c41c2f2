"""Calibration on several ranks: a whole one in small, medians over ranks, and rows that really are in peers' pages."""

import json
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.calibrate import Grid, calibrate_ranks
from equipoise.calibrate.bench import Bench
from equipoise.calibrate.between import MappedWork, StillRows, inside_of, open_node, time_empty_step
from equipoise.calibrate.moving import ring_moves
from equipoise.calibrate.run import measure_rank, medians_of, spread_of
from equipoise.core import TopologyError
from equipoise.core.options import RowLimits
from equipoise.cost import Profile
from equipoise.layer.mapped import MappedTables, combine_mapped, fetch_rows


def measure_small(group, nodes):
    told = []
    show = lambda done, total: told.append((done, total))  # noqa: E731
    given = {
        "nvlink_bytes_per_s": 10**12,
        "network_bytes_per_s": 10**12,
        "runs": 1,
        "device": "cpu",
        "commit": "c" * 40,
    }
    return measure_rank(group, grid=Grid.smoke(), nodes=nodes, **given, show=show), told


@pytest.mark.dist(4)
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 2)])
def test_all_ranks_return_the_same_profile_and_tell_every_step_once(pool, ranks, nodes):
    (first, told), *others = pool.run(measure_small, ranks, nodes)
    assert all(other == first for other, _ in others)
    profile = Profile.from_json(json.dumps(first), name="small")
    assert profile.received_update_bytes_per_s > 0 and profile.exchange_fixed_ns > 0
    assert "by mapped memory" in first["rows"]["source"] and "measured" in first["all_to_all"]["source"]
    assert (first["ranks"]["count"], first["ranks"]["nodes"]) == (ranks, nodes)
    assert all(value > 0 for key, value in first["overheads"].items() if key != "source")
    assert "from pages of peers" in first["pull"]["source"] and "agreement" in first["exchange"]["source"]
    assert ("across_bytes_per_s" in first["exchange"]) == (nodes > 1)
    assert nodes == 1 or first["exchange"]["across_source"].endswith("to a rank of another node, by gloo")
    assert ("across: measured" if nodes > 1 else "across: assumed") in first["all_to_all"]["source"]
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)]


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (3, 2), (0, 1)])
def test_ranks_that_cannot_be_measured_together_are_refused(ranks, nodes):
    with pytest.raises(TopologyError, match=f"{ranks} ranks on {nodes} nodes cannot be measured together; give at"):
        calibrate_ranks(Grid.smoke(), ranks=ranks, nodes=nodes, nvlink_bytes_per_s=1, device="cpu")


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9))
def test_figures_are_medians_over_ranks(values):
    contents = [{"a": {"b_ns": [[v, None]], "source": "words"}, "share": v / 7, "kind": "trial"} for v in values]
    found = medians_of(contents)
    assert found["a"]["b_ns"] == [[round(median(values)), None]]
    assert found["share"] == pytest.approx(median(values) / 7, abs=1e-3)
    assert (found["a"]["source"], found["kind"]) == ("words", "trial")


def test_the_spread_is_that_of_the_cell_in_which_ranks_differ_most():
    contents = [{"compute": [{"forward_ns": [[100, 10 * r]], "update_ns": [[100, 100 + r]]}]} for r in (9, 10, 11)]
    found = spread_of(contents, nodes=1)
    assert (found["spread"], found["median_spread"]) == (0.2, pytest.approx((0 + 2 / 110) / 2, abs=1e-4))


@pytest.mark.parametrize(
    ("extra_ns", "share", "words"),
    [(4.0, 0.25, "inside: measured 0.0 us longer"), (1.0, 1.0, "published rate is assumed"), (-5.0, 1.0, "assumed")],
    ids=["slower than the link", "as fast", "faster than own memory"],
)
def test_a_link_is_never_faster_than_published(extra_ns, share, words):
    found = inside_of(1000, extra_ns, 10**12)
    assert found["inside_share"] == share and words in found["source"]


@pytest.mark.parametrize("is_across", [False, True], ids=["inside", "across"])
@pytest.mark.parametrize("node_R", [[0], [0, 0], [0, 0, 0, 1, 1, 1], [0, 1]], ids=str)
def test_relocated_experts_of_a_ring_fill_every_slot_once_and_cross_nodes_only_where_meant(node_R, is_across):
    moves = ring_moves(node_R, 3, is_across=is_across)
    if len(set(node_R)) == 1 if is_across else len(set(node_R)) == len(node_R):
        assert moves == [], "there is nowhere to go"
        return
    slots = {(rank, slot) for rank in range(len(node_R)) for slot in range(3)}
    assert {(move.source, move.source_slot) for move in moves} == slots
    assert {(move.target, move.target_slot) for move in moves} == slots
    assert all((node_R[move.source] != node_R[move.target]) == is_across for move in moves)


def read_marked_pages(group):
    """Every page holds the rank's number plus one: what a rank reads where, and whether steps without rows end."""
    bench = Bench.on("cpu", runs=2)
    node = open_node((16, 16), slots=1, group=group, node_R=[0] * group.size(), bench=bench)
    mapped, rows = StillRows(node, top_k=2), 8 * group.size()
    mapped.reserve(RowLimits(tokens=rows // 2, sent=rows, computed=rows))
    step_ns = time_empty_step(mapped, bench)
    work = MappedWork.random(mapped, rows, 16, bench)
    mapped.own.tokens_TD.fill_(group.rank() + 1)
    mapped.own.rows_PD.fill_(group.rank() + 1)
    torch.distributed.barrier(group)
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    seen = {}
    for name, ranks in (("own", [group.rank()]), ("peers", peers)):
        received, sent = work.tables(ranks)
        placed_PD = fetch_rows(work.hidden_TD[:0], received, mapped, layer=0)
        out_TD = combine_mapped(placed_PD[:0], torch.ones_like(work.gates_TK), _only_read(sent), mapped, layer=0)
        seen[name] = (placed_PD.detach()[:, 0].tolist(), out_TD.sum().item() / out_TD.shape[1])
    torch.distributed.barrier(group)
    mapped.close()
    node.close()
    return seen, step_ns


def _only_read(sent):
    return MappedTables(sent.order_N[:0], sent.sent_P, sent.place_TK, sent.sent_stride, sent.place_stride)


@pytest.mark.dist(4)
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_are_read_from_the_pages_that_are_meant(pool, ranks):
    for rank, (seen, step_ns) in enumerate(pool.run(read_marked_pages, ranks)):
        assert step_ns > 0
        own, rows = rank + 1, 8 * ranks
        assert seen["own"] == ([own] * rows, own * rows)
        others = [other + 1 for other in range(ranks) if other != rank]
        found, total = seen["peers"]
        assert sorted(set(found)) == others and found == sorted(found), "all peers, in ascending order"
        assert max(map(found.count, others)) - min(map(found.count, others)) <= 1
        assert total == sum(found)
