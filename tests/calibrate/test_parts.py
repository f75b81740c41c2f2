"""The measured parts on a CPU: the block is checked first, rates are bytes over time, peers are capped."""

import pytest
import torch

from equipoise.calibrate import measures
from equipoise.calibrate.bench import AttentionShape, Bench, Grid, Steps, Timing
from equipoise.calibrate.measures import Attention, measure_moves, time_attention, time_received, time_sent

BENCH, GRID = Bench.on("cpu", runs=1), Grid.smoke()


def test_the_block_that_is_timed_is_right():
    measures.check_block(measures.random_experts(3, (32, 16), BENCH), BENCH)


def test_a_block_that_computes_something_else_is_refused_before_it_is_timed(monkeypatch):
    right = measures.expert_block

    def wrong(rows_ND, *arguments, **named):
        out_ND = right(rows_ND, *arguments, **named)
        return out_ND * 1.1 if rows_ND.dtype == torch.float32 else out_ND

    monkeypatch.setattr(measures, "expert_block", wrong)
    monkeypatch.setattr(measures, "measure", lambda *_, **__: pytest.fail("timed a wrong block"))
    with pytest.raises(RuntimeError, match="relative errors"):
        measures.measure_table((32, 16), GRID, bench=BENCH, steps=Steps(9))


def test_a_table_has_a_cell_for_every_slot_and_row():
    steps = Steps(GRID.cells)
    table = measures.measure_table((32, 16), GRID, bench=BENCH, steps=steps)
    assert steps.done == GRID.cells
    for key in ("forward_ns", "update_ns", "even_forward_ns", "even_update_ns"):
        assert [len(line) for line in table[key]] == [len(GRID.rows)] * len(GRID.slots)
        assert all(ns > 0 for line in table[key] for ns in line)
    assert "Zipf" in table["source"]


def fake_times(monkeypatch, by_bytes):
    """Copies take what `by_bytes` says of their size; nothing is measured."""
    monkeypatch.setattr(measures, "_time_copies", lambda source, target, size, bench: by_bytes(size))


def test_a_rate_is_bytes_over_the_time_beyond_the_fixed_part(monkeypatch):
    fake_times(monkeypatch, lambda size: 500.0 if size <= measures.SMALL_COPY_BYTES else 500.0 + size / 2)
    fixed, rate = measures.copy_figures(torch.empty(0), torch.empty(0), 10**6, BENCH)
    assert fixed == 500.0
    assert rate == pytest.approx(2e9)


def test_a_peers_rate_is_never_above_the_published_links(monkeypatch):
    fake_times(monkeypatch, lambda size: float(size))
    pull = measures.measure_pull(GRID, 7 * 10**8, bench=BENCH, steps=Steps(2))
    # The expert of 6,144 bytes takes 3,072 ns more than one of half its size: 2 GB/s, above the link's 0.7.
    assert pull["peer_bytes_per_s"] == 7 * 10**8
    assert pull["host_bytes_per_s"] == pytest.approx(2e9)
    assert "capped by the published link rate" in pull["source"]


def test_a_slowdown_is_the_median_of_pairs_and_never_a_gain():
    assert measures.slowdown_permille([(1000.0, 1250.0), (2000.0, 2000.0), (500.0, 1000.0)]) == 250
    assert measures.slowdown_permille([(1000.0, 990.0)]) == 0


def test_compute_is_slowed_by_the_bytes_that_the_path_brings_meanwhile(monkeypatch):
    """An expert has 6,144 bytes. The host's copy takes 1,000 ns, as the block does; the link brings 3 in that time."""
    asked = []
    monkeypatch.setattr(measures, "measure", lambda work, bench: Timing(1000.0, 0.0))
    monkeypatch.setattr(
        measures, "_time_beside", lambda work, copy, count, bench: asked.append(count) or [(10.0, 11.0)]
    )
    beside = measures.measure_beside(GRID, 3 * 6_144 * 10**6, bench=BENCH, steps=Steps(2))
    assert asked == [3, 3], "from start to end and beyond; and 3 experts a microsecond"
    assert measures.measure_beside(GRID, 1, bench=BENCH, steps=Steps(2)) and asked[-1] == 1
    assert beside["host_slowdown_permille"] == beside["peer_slowdown_permille"] == 100


def test_adds_count_two_reads_and_a_write_and_edges_count_an_expert_once(monkeypatch):
    monkeypatch.setattr(measures, "measure", lambda work, bench: Timing(1e9, 0.0))
    numel = 3 * 32 * 16
    assert measures.measure_add(GRID, bench=BENCH, steps=Steps(1))["bytes_per_s"] == 3 * 4 * 8 * numel
    exchange = measures.measure_exchange(GRID, bench=BENCH, steps=Steps(2))
    assert exchange["weight_bytes_per_s"] == exchange["gradient_bytes_per_s"] == 4 * numel


def test_an_edge_swaps_an_expert_through_staging(monkeypatch):
    works = []
    monkeypatch.setattr(measures, "measure", lambda work, bench: works.append(work) or Timing(1.0, 0.0))
    measures.measure_exchange(GRID, bench=BENCH, steps=Steps(2))
    slot, staging, incoming = works[0].__defaults__
    before, arriving = slot.clone(), incoming.clone()
    works[0]()
    assert torch.equal(staging, before) and torch.equal(slot, arriving)


def test_moves_count_a_rows_bytes_once(monkeypatch):
    from equipoise.calibrate import measures

    monkeypatch.setattr(measures, "time_received", lambda rows, hidden, bench: (1e9, 2e9))
    monkeypatch.setattr(measures, "time_sent", lambda tokens, hidden, top_k, bench: (4e9, 8e9))
    made = measure_moves(GRID, bench=BENCH, steps=Steps(1))
    num_bytes = 16 * 32 * 4
    rates = [
        made[f"{key}_bytes_per_s"] for key in ("received_forward", "received_update", "sent_forward", "sent_update")
    ]
    assert rates == [num_bytes, num_bytes // 2, num_bytes // 4, num_bytes // 8]


def test_moves_and_attention_run_on_a_cpu():
    assert min(time_received(12, 8, BENCH)) > 0
    assert min(time_sent(6, 8, 2, BENCH)) > 0
    attention = Attention.random(AttentionShape(hidden=16, heads=2, kv_heads=1, width=8), BENCH)
    assert min(time_attention(attention, 8, BENCH)) > 0
    # 4 heads' widths of 8 into hidden 16 and back, two operations each; 8 x 9 / 2 pairs of 2 heads, twice.
    assert attention.flops(8, sequence=8) == 2 * 8 * (32 * 16 + 16 * 16) + 4 * 36 * 16


def test_attention_stays_inside_its_sequences():
    attention = Attention.random(AttentionShape(hidden=16, heads=2, kv_heads=1, width=8), BENCH)
    x_TD = BENCH.random(8, 16)
    with torch.no_grad():
        whole = attention.forward(x_TD, sequence=4)
        second = attention.forward(x_TD[4:], sequence=4)
    torch.testing.assert_close(whole[4:], second)
