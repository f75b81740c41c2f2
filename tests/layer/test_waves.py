"""Waves: the same bits as without, whatever the cuts; tables that send every row once."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.plan import wave_cuts
from equipoise.layer.dispatch import SourceSplit, WaveCuts, assign_slots, build_dispatch, sort_rows
from equipoise.layer.experts import LayerOptions
from tests.layer import mapped_work
from tests.layer.cases import random_plan, random_routing, with_gaps
from tests.layer.stack import MODES, Run, run_forward_only, run_stack
from tests.layer.test_experts import EVERYTHING, EXACT, crossed_case, near_reference, same_bits
from tests.parity.case import ParityCase
from tests.transfer.own_ranks import KILLED, run_ranks


def in_waves(plan, waves):
    return dataclasses.replace(plan, waves=waves)


def same_as_whole(pool, plan, routing, run, waves=(2, 3)):
    ranks = plan.cluster.ep
    whole = pool.run(run_stack, ranks, plan, routing, run)
    for number in waves:
        same_bits(pool.run(run_stack, ranks, in_waves(plan, number), routing, run), whole, names=EVERYTHING)
    return whole


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "options",
    [
        LayerOptions(),
        EXACT,
        LayerOptions(gates="activation", combine_order="expert", products="loop"),
        LayerOptions(products="loop"),
    ],
    ids=["plain", "deterministic", "as Megatron", "biases"],
)
@pytest.mark.parametrize("slots", [0, 2])
def test_waves_change_no_bit_of_outputs_or_gradients(pool, options, slots):
    routing = random_routing(3, ranks=4, experts=16)
    run = Run(options=options, has_bias=options == LayerOptions(products="loop"))
    plan = random_plan(routing, 5, slots=slots)
    whole = same_as_whole(pool, plan, routing, run)
    if options.gates == "combine":
        near_reference(whole, plan, routing, run)


@pytest.mark.dist(4)
@pytest.mark.parametrize("is_prepared", [False, True], ids=["exchanged", "prepared"])
@pytest.mark.parametrize("mode", MODES)
def test_waves_in_every_mode_of_checkpointing_and_with_micro_steps_in_flight(pool, mode, is_prepared):
    routing = random_routing(4, ranks=4, micro_steps=3)
    run = Run(options=LayerOptions(is_checked=is_prepared), mode=mode, is_prepared=is_prepared, in_flight=2)
    same_as_whole(pool, random_plan(routing, 1, slots=1), routing, run, waves=(3,))


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "name", ["zero tokens at a source", "zero rows received", "zero replicas", "zero tokens anywhere"]
)
def test_awkward_windows_in_more_waves_than_slots(pool, name):
    routing, plan = crossed_case(name)
    same_as_whole(pool, plan, routing, Run(), waves=(2, 8))


@pytest.mark.dist(2)
def test_gpt_oss_in_waves(pool):
    """torch's sigmoid has other bits at a tensor's end than inside, and waves have ends of their own."""
    routing, run = random_routing(9, ranks=2), Run(options=LayerOptions(activation="gpt_oss"), has_bias=True)
    plan = random_plan(routing, 4, slots=1)
    near_reference(pool.run(run_stack, 2, in_waves(plan, 2), routing, run), plan, routing, run)


@pytest.mark.dist(4)
def test_wrong_plans_and_tokens_with_fewer_experts(pool):
    """Rows that the plan did not know go home, into whatever wave their slot is in."""
    routing = random_routing(6, ranks=4)
    other = random_routing(7, ranks=4)
    same_as_whole(pool, random_plan(other, 2, slots=1), routing, Run())
    gaps = with_gaps(routing, 1)
    run = Run(options=LayerOptions(has_gaps=True))
    same_as_whole(pool, random_plan(gaps, 2, slots=1), gaps, run)


@pytest.mark.dist(2)
def test_a_forward_without_a_graph(pool):
    routing = random_routing(8, ranks=2)
    plan = random_plan(routing, 3, slots=1)
    whole = pool.run(run_forward_only, 2, plan, routing, Run())
    for got, wanted in zip(pool.run(run_forward_only, 2, in_waves(plan, 2), routing, Run()), whole, strict=True):
        assert all(map(torch.equal, got, wanted))


def test_a_rank_that_is_killed_ends_the_others():
    case = ParityCase(ranks=4, nodes=2, slots=1, layers=2, tokens=12)
    options = {"rows": "collective", "waves": 2}
    said = run_ranks(mapped_work.die_in_a_window, 4, case, 60.0, options)
    assert said[1] == KILLED
    for words in (said[0], said[2], said[3]):
        assert "is gone" in words or "rows could not be exchanged with the other 3 ranks" in words


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), ranks=st.sampled_from([1, 2, 4]), waves=st.integers(2, 8), pad=st.sampled_from([1, 4])
)
def test_tables_send_every_row_to_its_slot_and_back(seed, ranks, waves, pad):
    """Carry each row's (source, token, slot) through the tables, as the exchanges would."""
    routing = random_routing(seed, ranks=ranks, micro_steps=1, layers=1, silent=(seed % 5,))
    plan = in_waves(random_plan(routing, seed, slots=seed % 3), waves)
    width = plan.home_slots + plan.slots
    slots = [
        assign_slots(torch.from_numpy(ids_TK), SourceSplit.of(plan, 0, 0, source=rank))
        for rank, ids_TK in enumerate(routing.ids[0][0])
    ]
    cuts = [WaveCuts.of(plan, 0, 0, rank=rank) for rank in range(ranks)]
    sends = [sort_rows(s, num_ranks=ranks, width=width, cuts=cuts[0]) for s in slots]
    count_RRS = torch.stack([send.count_RS for send in sends])
    made = [
        build_dispatch(sends[r], count_RRS[:, r], home_slots=plan.home_slots, pad=pad, cuts=cuts[r])
        for r in range(ranks)
    ]
    assert np.array_equal(cuts[0].begin_RW, wave_cuts(plan, 0, 0))
    sent = []  # by source, wave and target: rows as (source, token, physical slot)
    for source, dispatch in enumerate(made):
        slot_N = torch.empty(len(dispatch.token_N), dtype=torch.int64)
        slot_N[dispatch.index_TK.reshape(-1)] = slots[source].reshape(-1)
        rows = [(source, int(t), int(s)) for t, s in zip(dispatch.token_N, slot_N, strict=True)]
        at = 0
        sent.append([])
        for wave in dispatch.waves:
            sent[-1].append([rows[(at := at + n) - n : at] for n in wave.send_R])
    for rank, dispatch in enumerate(made):
        assert len(dispatch.waves) == waves
        place = 0
        for index, (wave, _, place_N, source_P) in enumerate(dispatch.by_wave()):
            received = [row for source in range(ranks) for row in sent[source][index][rank]]
            assert [len(sent[source][index][rank]) for source in range(ranks)] == wave.receive_R
            assert wave.rows.start == place and source_P.numel() == wave.rows.stop - place
            for row, at in zip(received, place_N.tolist(), strict=True):
                slot = row[2] - rank * width
                ends = torch.cat(
                    [dispatch.groups.home_end_S, dispatch.groups.replica_end_S + dispatch.groups.num_home_rows]
                )
                start = int(ends[slot - 1]) if slot else 0
                assert wave.slots.start <= slot < wave.slots.stop and start <= place + at < int(ends[slot])
                assert received[int(source_P[at])] == row
            padding = set(range(len(source_P))) - set(place_N.tolist())
            assert all(int(source_P[p]) == len(received) for p in padding)
            place = wave.rows.stop
        assert place == dispatch.groups.num_rows
    assert sum(len(rows) for by in sent for wave in by for rows in wave) == sum(s.numel() for s in slots)
