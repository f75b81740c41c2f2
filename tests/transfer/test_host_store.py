"""The host store: what is refreshed and when, versions, checksums, completion, and both paths forced."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from equipoise.core import TransferError
from equipoise.core.options import TransferOptions
from equipoise.core.plan import PATHS, Visit
from equipoise.transfer import edges
from equipoise.transfer.host_store import first_uses
from equipoise.transfer.pulls import HostPath, needs_of
from tests.transfer.play import Rank, play_windows, run_window
from tests.transfer.windows import LAYOUTS, assert_same_bits, random_plan, take

HOST = PATHS.index("host")


def pulled_by_host(plan):
    """(layer, expert) that some rank pulls by the host path, in either phase."""
    table, layers = plan.replica_table, plan.home_LE.shape[0]
    uses = (table.path_P2 == HOST).any(axis=1)
    return {(int(entry) % layers, int(e)) for entry, e in zip(table.entry_P[uses], table.expert_P[uses], strict=True)}


@pytest.mark.parametrize("stage", ["update", "recompute"])
def test_each_home_refreshes_what_is_pulled_from_it_in_order_of_first_use(stage):
    plan = random_plan((0, 0, 0, 0), seed=11, slots=2, fewest=1, micro_steps=3, stage=stage)
    found = [first_uses(plan, rank=rank, pullers=range(4), paths=["host"]) for rank in range(4)]
    assert {(e.layer, e.expert) for entries in found for e in entries} == pulled_by_host(plan)
    visits = plan.itinerary.visits()
    for rank, entries in enumerate(found):
        assert len(entries) == len({(e.layer, e.expert) for e in entries}), "an expert is written once"
        assert all(plan.home_LE[e.layer, e.expert] == rank for e in entries)
        assert all(plan.home_slot_LE[e.layer, e.expert] == e.slot for e in entries)
        first = [
            min((i for i, v in enumerate(visits) for r in range(4) if uses(plan, v, r, e)), default=len(visits))
            for e in entries
        ]
        assert first == sorted(first)


def uses(plan, visit, rank, entry):
    needs = needs_of(plan, visit, rank=rank)
    return visit.layer == entry.layer and any(n.expert == entry.expert and n.path == "host" for n in needs)


@pytest.mark.dist(4)
@pytest.mark.parametrize("layout", ["4 as one node", "4 as two nodes"])
@pytest.mark.parametrize("path", ["plan", "peer", "host"])
def test_forced_paths_bring_the_same_bits(pool, path, layout):
    plans = [random_plan(LAYOUTS[layout], seed=w, slots=1, fewest=1) for w in range(2)]
    results = pool.run(play_windows, 4, plans, {"transfer": {"path": path, "is_checked": True}}, True)
    replicas = sum(len(plan.replica_table) for plan in plans)
    assert sum(moved["pulls"] for moved in results) >= replicas
    refreshes, paths = sum(moved["refreshes"] for moved in results), {p for moved in results for p in moved["bytes"]}
    assert ("host" in paths) == (path != "peer")
    if path == "peer":
        assert refreshes == 0
    if path == "plan":
        assert refreshes == sum(len(pulled_by_host(plan)) for plan in plans), "more or less than the plan pulls"
    assert all(moved["is_clean"] for moved in results), "mappings or descriptors are left"


def versions_while_written(group, plan):
    """What the store says of experts of the second window while their weights are being written."""
    from equipoise.transfer import host_store

    rank, seen = Rank(group, plan, transfer={"path": "host"}), []

    def watched_copy(target, target_slot, source, source_slot):
        layer = [rows.gate_up_SFD.data_ptr() for rows in rank.engine._store._experts].index(
            target.gate_up_SFD.data_ptr()
        )
        seen.append(rank.engine._store.version(layer, target_slot))
        return edges.copy_expert(target, target_slot, source, source_slot)

    kept, host_store.copy_expert = host_store.copy_expert, watched_copy
    try:
        with rank.engine as engine:
            for _ in range(2):
                engine.open_window(plan)
                run_window(rank, plan, lambda: None)
                engine.close_window()
                rank.update()
    finally:
        host_store.copy_expert = kept
    return seen


@pytest.mark.dist(2)
def test_an_expert_has_no_version_while_it_is_written(pool):
    seen = pool.run(versions_while_written, 2, random_plan((0, 0), seed=4, slots=1, fewest=1, micro_steps=1))
    assert sum(map(len, seen)) >= 4, "two windows write more"
    assert {version for by_rank in seen for version in by_rank} == {0}


def versions_by_window(group, plan):
    """Versions in the store after each of two windows; a stale expert is never pulled."""
    rank = Rank(group, plan, transfer={"path": "host"})
    seen = []
    with rank.engine:
        for _ in range(2):
            rank.engine.open_window(plan)
            run_window(rank, plan, lambda: None)
            rank.engine.close_window()
            rank.update()
            dist.barrier(group)
            store = rank.engine._store
            seen.append(
                [[store.version(layer, e) for e in range(plan.home_LE.shape[1])] for layer in range(rank.layers)]
            )
            dist.barrier(group)
    return seen


@pytest.mark.dist(2)
def test_versions_rise_for_what_is_pulled_and_for_nothing_else(pool):
    plan = random_plan((0, 0), seed=4, slots=1, fewest=1, micro_steps=1)
    pulled = np.zeros(plan.home_LE.shape, dtype=bool)
    pulled[plan.replica_table.entry_P % plan.home_LE.shape[0], plan.replica_table.expert_P] = True
    assert 0 < pulled.sum() < pulled.size
    for first, second in pool.run(versions_by_window, 2, plan):
        assert (np.array(first) == 1 * pulled).all() and (np.array(second) == 2 * pulled).all()


def corrupt(group, plan):
    """In the second window one bit of an expert is turned in the store before rank 1 pulls it; what each rank says."""
    rank = Rank(group, plan, transfer={"path": "host", "is_checked": True})
    need = needs_of(plan, Visit(0, "forward", 0), rank=1)[0]
    try:
        with rank.engine as engine:
            engine.open_window(plan)
            run_window(rank, plan, lambda: None)
            engine.close_window()
            rank.update()
            spoil(engine._store, 0, need.expert)
            engine.open_window(plan)
            run_window(rank, plan, lambda: None)
            engine.close_window()
    except TransferError as error:
        return str(error), need.expert
    return "", need.expert


def spoil(store, layer, expert):
    """From now on, turn a bit of one expert between its checksum and its version."""
    original = store.announce

    def announce(*entry):
        if entry[:2] == (layer, expert):
            original(layer, expert, store.version(layer, expert))
            store.experts(layer).gate_up_SFD[expert].view(-1).view(torch.int32)[5] ^= 1
            store._version_LE[layer, expert] = entry[2]
        else:
            original(*entry)

    store.announce = announce


@pytest.mark.dist(2)
def test_a_corrupted_expert_is_named_on_all_ranks(pool):
    plan = random_plan((0, 0), seed=4, slots=1, fewest=1, micro_steps=1)
    for words, expert in pool.run(corrupt, 2, plan):
        assert f"host store: expert {expert} in layer index 0 has checksum" in words, words


def complete(group, plan, kind=None, transfer=None):
    """Complete the store after a window; what was said inside the window, and what moved experts between nodes."""
    rank = Rank(group, plan, kind=kind, transfer={"is_checked": True, **(transfer or {})})
    with rank.engine as engine:
        engine.open_window(plan)
        run_window(rank, plan, lambda: None)
        words = ""
        try:
            engine.complete_store()
        except TransferError as error:
            words = str(error)
        engine.close_window()
        rank.update()
        store = engine.complete_store()
        for layer in range(rank.layers):
            experts = range(plan.home_LE.shape[1])
            wanted = take(rank.everything[layer], experts).map(torch.Tensor.cpu)
            assert_same_bits(store.experts(layer), wanted, f"layer {layer}")
            for expert in experts:
                store.check(layer, expert)
                assert store.version(layer, expert) == store.version(0, 0)
        dist.barrier(group)
        engine.open_window(plan)
        rank.check_weights(plan, Visit(0, "forward", 0))
        engine.close_window()
    return words, engine.transport


@pytest.mark.dist(4)
@pytest.mark.parametrize("layout", ["4 as one node", "4 as two nodes", "4 strided"])
def test_a_completed_store_holds_every_expert_of_the_model_on_every_node(pool, layout):
    plan = random_plan(LAYOUTS[layout], seed=7, slots=1, fewest=1)
    for words, transport in pool.run(complete, 4, plan):
        assert "close it before the host store is completed" in words and transport == "gloo"


def not_pinned(group):
    """One rank may not pin: what every rank says, as if experts were on a device, and whether pages stay pinned."""
    from dataclasses import replace

    from equipoise.transfer import host_store
    from equipoise.transfer.node import ExpertLayout
    from tests.transfer.test_layout import weights

    pinned = []

    class Pin:
        def __init__(self, bytes_N, *, name, fix):
            if group.rank() == 1:
                raise TransferError("host store: could not be pinned; raise the locked-memory limit")
            pinned.append(self)

        def close(self):
            pinned.remove(self)

    layout = replace(ExpertLayout.of([weights()], TransferOptions(slots=1)), device=torch.device("cuda"))
    original, host_store.Pin = host_store.Pin, Pin
    try:
        host_store.HostStore(layout, experts=4, group=group, node_R=(0, 0), timeout_s=60.0)
    except TransferError as error:
        return str(error), len(pinned)
    finally:
        host_store.Pin = original
    return "", len(pinned)


@pytest.mark.dist(2)
def test_pages_that_one_rank_may_not_pin_are_refused_on_all(pool):
    for words, num_pinned in pool.run(not_pinned, 2):
        assert "rank 1: host store: could not be pinned; raise the locked-memory limit" in words
        assert num_pinned == 0, "pages are unmapped while the driver has them registered"


def slow_store(group, plans, seed):
    """Windows through a store whose writers and readers pause at random points."""
    from equipoise.transfer import engine, host_store

    rng = np.random.default_rng((seed, group.rank()))

    def pause():
        if rng.random() < 0.3:
            time.sleep(float(rng.exponential(0.002)))

    class SlowPath(HostPath):
        def pull(self, needs, buffer):
            pause()
            for tensor in buffer.tensors():
                # A reader that comes too early meets this, not last visit's numbers.
                tensor[list(needs)] = float("nan")
            pause()
            copied = super().pull(needs, buffer)
            pause()
            return copied

    def slow_copy(target, target_slot, source, source_slot):
        for tensor in target.tensors():
            tensor[target_slot].fill_(float("nan"))
        pause()
        return edges.copy_expert(target, target_slot, source, source_slot)

    kept = engine.HostPath, host_store.copy_expert
    engine.HostPath, host_store.copy_expert = SlowPath, slow_copy
    try:
        return play_windows(group, plans, {"transfer": {"path": "host"}})
    finally:
        engine.HostPath, host_store.copy_expert = kept


def leave_early(group, plan):
    """Rank 1 writes slowly and closes the window at once; rank 0 still needs what rank 1 has yet to write."""
    from equipoise.transfer import host_store

    def slow_copy(*given):
        time.sleep(0.05)
        return edges.copy_expert(*given)

    kept = host_store.copy_expert
    host_store.copy_expert = slow_copy if group.rank() == 1 else kept
    rank = Rank(group, plan, transfer={"path": "host"})
    try:
        with rank.engine as engine:
            engine.open_window(plan)
            for at in range(len(plan.itinerary)) if group.rank() == 0 else ():
                rank.check_weights(plan, plan.itinerary.visits()[at])
            engine.close_window()
    finally:
        host_store.copy_expert = kept
    return rank.engine.counters.pulls


@pytest.mark.dist(2)
def test_a_rank_that_is_done_still_writes_what_others_wait_for(pool):
    plan = random_plan((0, 0), seed=4, slots=1, fewest=1, micro_steps=2)
    assert pool.run(leave_early, 2, plan)[0] > 0


@pytest.mark.dist(4)
@pytest.mark.parametrize("layout", ["2 as one node", "4 as two nodes"])
def test_bits_are_right_whatever_the_delays_of_the_store(pool, layout):
    plans = [random_plan(LAYOUTS[layout], seed=w, slots=2, fewest=1, micro_steps=3) for w in range(3)]
    for moved in pool.run(slow_store, len(LAYOUTS[layout]), plans, 5):
        assert moved["pulls"] > 0 and moved["refreshes"] > 0 and moved["exposed_s"]["host"] > 0


@pytest.mark.parametrize("bad", [{"path": "nvlink"}, {"buffers": "one"}], ids=str)
def test_unknown_paths_and_buffers_are_refused(bad):
    with pytest.raises(TransferError, match="it must be one of"):
        TransferOptions(slots=1, **bad)
