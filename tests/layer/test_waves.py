"""Waves: outputs of the same bits as without, gradients as near to float64; tables that send every row once."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.layer.dispatch import SourceSplit, WaveCuts, assign_slots, build_dispatch, sort_rows
from equipoise.layer.experts import LayerOptions
from tests.layer import mapped_work
from tests.layer.cases import random_plan, random_routing, with_gaps
from tests.layer.stack import MODES, Run, logical_grads, run_forward_only, run_stack
from tests.layer.test_experts import (
    EVERYTHING,
    EXACT,
    crossed_case,
    dense_of,
    near,
    near_reference,
    rms_error,
    same_bits,
)
from tests.parity.case import ParityCase
from tests.transfer.own_ranks import KILLED, run_ranks


def in_waves(plan, waves):
    return dataclasses.replace(plan, waves=waves)


def as_whole(pool, plan, routing, run, waves=(2, 3)):
    """Compare with one wave: bit for bit but weights of slots that are cut, whose rows have another order."""
    ranks = plan.cluster.ep
    whole = pool.run(run_stack, ranks, plan, routing, run)
    for number in waves:
        cut = pool.run(run_stack, ranks, in_waves(plan, number), routing, run)
        if run.options.is_deterministic:
            same_bits(cut, whole, names=("outputs", "hidden_grads", "gate_grads", "attention_grads"))
        for got, wanted in zip(cut, whole, strict=True):
            for name in EVERYTHING:
                near(getattr(got, name), getattr(wanted, name))
    return whole


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "options",
    [
        LayerOptions(),
        EXACT,
        LayerOptions(gates="activation", combine_order="expert", products="loop"),
        LayerOptions(products="loop", is_deterministic=True),
    ],
    ids=["plain", "deterministic", "as Megatron", "biases"],
)
@pytest.mark.parametrize("slots", [0, 2])
def test_waves_keep_the_bits_of_outputs_and_the_precision_of_gradients(pool, options, slots):
    routing = random_routing(3, ranks=4, experts=16)
    run = Run(options=options, has_bias=options.products == "loop" and options.is_deterministic)
    plan = random_plan(routing, 5, slots=slots)
    as_whole(pool, plan, routing, run)
    if options.gates == "combine":
        cut, dense = pool.run(run_stack, 4, in_waves(plan, 2), routing, run), dense_of(routing, run)[0].expert_grads
        near_reference(cut, plan, routing, run)
        whole = pool.run(run_stack, 4, plan, routing, run)
        errors = [rms_error(logical_grads(outcomes, plan), dense) for outcomes in (cut, whole)]
        assert errors[0] <= 1.1 * errors[1]


@pytest.mark.dist(4)
@pytest.mark.parametrize("is_prepared", [False, True], ids=["exchanged", "prepared"])
@pytest.mark.parametrize("mode", MODES)
def test_waves_in_every_mode_of_checkpointing_and_with_micro_steps_in_flight(pool, mode, is_prepared):
    routing = random_routing(4, ranks=4, micro_steps=3)
    options = LayerOptions(is_deterministic=True, is_checked=is_prepared)
    run = Run(options=options, mode=mode, is_prepared=is_prepared, in_flight=2)
    as_whole(pool, random_plan(routing, 1, slots=1), routing, run, waves=(3,))


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "name", ["zero tokens at a source", "zero rows received", "zero replicas", "zero tokens anywhere"]
)
def test_awkward_windows_in_more_waves_than_slots(pool, name):
    routing, plan = crossed_case(name)
    as_whole(pool, plan, routing, Run(options=EXACT), waves=(2, 8))


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
    as_whole(pool, random_plan(other, 2, slots=1), routing, Run(options=EXACT))
    gaps = with_gaps(routing, 1)
    run = Run(options=LayerOptions(has_gaps=True, is_deterministic=True))
    as_whole(pool, random_plan(gaps, 2, slots=1), gaps, run)


@pytest.mark.dist(2)
def test_a_forward_without_a_graph(pool):
    routing = random_routing(8, ranks=2)
    plan = random_plan(routing, 3, slots=1)
    whole, run = pool.run(run_forward_only, 2, plan, routing, Run(options=EXACT)), Run(options=EXACT)
    for got, wanted in zip(pool.run(run_forward_only, 2, in_waves(plan, 2), routing, run), whole, strict=True):
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
    seed=st.integers(0, 10**6),
    ranks=st.sampled_from([1, 2, 4]),
    waves=st.integers(2, 8),
    pad=st.sampled_from([1, 4]),
    is_planned=st.booleans(),
)
def test_tables_send_every_row_to_its_slot_and_back(seed, ranks, waves, pad, is_planned):
    """Carry each row, named by source, token and physical slot, through the tables, as the exchanges would."""
    routing = random_routing(seed, ranks=ranks, micro_steps=1, layers=1, silent=(seed % 5,))
    plan = in_waves(random_plan(routing, seed, slots=seed % 3), waves)
    if not is_planned:
        routing = random_routing(seed + 1, ranks=ranks, micro_steps=1, layers=1)
    width, by_rank = plan.home_slots + plan.slots, range(ranks)
    splits = [SourceSplit.of(plan, 0, 0, source=rank) for rank in by_rank]
    slots = [assign_slots(torch.from_numpy(routing.ids[0][0][rank]), splits[rank]) for rank in by_rank]
    cuts = [WaveCuts.of(plan, 0, 0, rank=rank) for rank in by_rank]
    sends = [sort_rows(slots[rank], num_ranks=ranks, width=width, cuts=cuts[rank]) for rank in by_rank]
    count_RRS = torch.stack([send.count_RS for send in sends])
    home = {"home_slots": plan.home_slots, "pad": pad}
    made = [build_dispatch(sends[rank], count_RRS[:, rank], cuts=cuts[rank], **home) for rank in by_rank]
    # Step 1: every source's rows, by wave and target, in sending order.
    sent = [sent_rows(rank, dispatch, slots[rank]) for rank, dispatch in enumerate(made)]
    assert sum(len(rows) for by in sent for wave in by for rows in wave) == sum(s.numel() for s in slots)
    # Step 2: what each rank receives is placed wave by wave, and in each wave slot by slot.
    for rank, dispatch in enumerate(made):
        groups, held = dispatch.groups, []
        for index, (wave, _, place_N, source_P) in enumerate(dispatch.by_wave()):
            received = [row for source in by_rank for row in sent[source][index][rank]]
            assert [len(sent[source][index][rank]) for source in by_rank] == wave.receive_R
            assert sorted(place_N.tolist()) == sorted({*place_N.tolist()}) and wave.rows.start == len(held)
            there = [received[n] if n < len(received) else None for n in source_P.tolist()]
            assert [there[place] for place in place_N.tolist()] == received and there.count(None) == len(there) - len(
                received
            )
            held += there
        ends = [*groups.home_end_S.tolist(), *(groups.replica_end_S + groups.num_home_rows).tolist()]
        assert len(held) == groups.num_rows == ends[-1] and all(end % pad == 0 for end in ends)
        for slot, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            assert {row[2] for row in held[start:end] if row} <= {rank * width + slot}
        # Step 3: with one row of room for each source and cut, waves are level where routes are those of the plan.
        if is_planned:
            sizes = [sum(wave.receive_R) for wave in dispatch.waves]
            assert max(sizes) - min(sizes) <= 2 * ranks + 1


def sent_rows(rank, dispatch, slots_TK):
    """By wave and target, the rows of a source as (source, token, physical slot)."""
    slot_N = torch.empty(len(dispatch.token_N), dtype=torch.int64)
    slot_N[dispatch.index_TK.reshape(-1)] = slots_TK.reshape(-1)
    rows = iter([(rank, int(t), int(s)) for t, s in zip(dispatch.token_N, slot_N, strict=True)])
    return [[[next(rows) for _ in range(count)] for count in wave.send_R] for wave in dispatch.waves]
