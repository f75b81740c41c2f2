"""The transfer engine on real processes: bits under random delays, unexpected visits, off-loading, and every bound."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from equipoise.core import TransferError
from equipoise.core.options import TransferOptions
from equipoise.core.plan import Visit
from equipoise.transfer.edges import Relocator
from equipoise.transfer.engine import TransferEngine
from equipoise.transfer.pulls import MappedPath, needs_of
from tests.transfer.play import Rank, run_window, stack
from tests.transfer.windows import (
    LAYOUTS,
    all_experts,
    assert_same_bits,
    experts_at,
    owned_parameters,
    random_plan,
    take,
)


class SlowPath(MappedPath):
    """Shared memory with pauses before and after each copy."""

    def __init__(self, pause):
        self.pause = pause

    def attach(self, node):
        super().__init__(node)

    def pull(self, needs, buffer):
        self.pause()
        for tensor in buffer.tensors():
            # A reader that comes too early meets this, not last visit's numbers.
            tensor[list(needs)] = float("nan")
        self.pause()
        copied = super().pull(needs, buffer)
        self.pause()
        return copied


def fuzz(group, plans, seed):
    rng = np.random.default_rng((seed, group.rank()))

    def pause():
        if rng.random() < 0.3:
            time.sleep(float(rng.exponential(0.002)))

    path = SlowPath(pause)
    rank = Rank(group, plans[0], seed=seed, paths={"peer": path, "host": path})
    path.attach(rank.engine._node)
    slow_down_marks(rank.engine, pause)
    slow_down_edges(rank.engine, pause)
    with rank.engine:
        for plan in plans:
            rank.engine.open_window(plan)
            run_window(rank, plan, pause)
            pause()
            rank.engine.close_window()
            if plan.loads.stage == "update":
                rank.check_owned_gradients(plan)
            rank.update()
    counters = rank.engine.counters
    return counters.pulls, counters.returns, counters.on_demand, counters.exposed_s["shm"]


def slow_down_marks(engine, pause):
    """Pause between the last byte of a mailbox and its tag, on both sides."""

    write_behind = engine._node.write_behind

    def write_slowly(cells, at, value):
        pause()
        write_behind(cells, at, value)

    engine._node.write_behind = write_slowly


def slow_down_edges(engine, pause):
    """Pause around publish and collect of each layer, in the background's thread."""

    class SlowRelocator(Relocator):
        def relocate(self, kind, layer, moves, tensors):
            pause()
            super().relocate(kind, layer, moves, tensors)
            pause()

    engine._edges._relocator.__class__ = SlowRelocator


CASES = {
    "2 ranks": ("2 as one node", {"slots": 1, "micro_steps": 3}),
    "4 ranks": ("4 as one node", {"slots": 2, "micro_steps": 2}),
    "4 as two nodes": ("4 as two nodes", {"slots": 1, "micro_steps": 2}),
    "4 strided": ("4 strided", {"slots": 2, "fewest": 1}),
    "depth 2": ("2 as one node", {"slots": 2, "depth": 2}),
    "1f1b": ("2 as one node", {"slots": 1, "micro_steps": 3, "order": "1f1b"}),
    "recompute": ("4 as one node", {"slots": 1, "stage": "recompute", "micro_steps": 3}),
    "8 as two nodes": ("8 as two nodes", {"slots": 1, "layers": 2, "micro_steps": 1}),
}


@pytest.mark.dist(8)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_right_whatever_the_delays(pool, case):
    layout, shape = CASES[case]
    plans = [random_plan(LAYOUTS[layout], seed=w, **shape) for w in range(3)]
    results = pool.run(fuzz, len(LAYOUTS[layout]), plans, 17)
    replicas = sum(len(plan.replica_table) for plan in plans)
    visits = [(plan, v, r) for plan in plans for v in range(len(plan.itinerary)) for r in range(len(results))]
    most = sum(len(plan.pulls(visit, rank)) for plan, visit, rank in visits)
    # A rank may find replicas in a buffer that only other ranks needed anew.
    assert 0 < replicas <= sum(pulls for pulls, *_ in results) <= most
    returned = sum(len(plan.replica_table) for plan in plans if plan.loads.stage == "update")
    assert sum(returns for _, returns, *_ in results) == returned
    assert [on_demand for *_, on_demand, _ in results] == [0] * len(results), "visits in order are expected"
    assert sum(exposed for *_, exposed in results) > 0, "delays should have been noticed"


def any_order(group, plan, seed):
    """Visits in any order, the same on all ranks, as layers exchange rows; how long each takes differs."""
    rng, own = np.random.default_rng(seed), np.random.default_rng((seed, group.rank()))
    rank = Rank(group, plan, seed=seed)
    with rank.engine:
        rank.engine.open_window(plan)
        for _ in range(60):
            micro_step, layer = (int(rng.integers(n)) for n in (plan.loads.num_micro_steps, rank.layers))
            visit = Visit(micro_step, "forward" if rng.random() < 0.5 else "backward", layer)
            needs, got = rank.check_weights(plan, visit)
            time.sleep(float(own.exponential(0.001)))
            assert_same_bits(got, take(rank.everything[layer], [n.expert for n in needs]), "while in use")
        rank.engine.close_window()
    return rank.engine.counters.on_demand


@pytest.mark.dist(4)
@pytest.mark.parametrize("stage", ["update", "recompute"])
def test_unexpected_visits_are_served_on_demand_and_counted(pool, stage):
    plan = random_plan((0, 0, 0, 0), seed=5, slots=2, fewest=1, micro_steps=3, stage=stage)
    assert all(count > 0 for count in pool.run(any_order, 4, plan, 3))


def two_layers_per_checkpoint(group, plan):
    """Recomputation runs two layers forward before either runs backward: visits come out of order."""
    rank = Rank(group, plan)
    with rank.engine:
        rank.engine.open_window(plan)
        for layer in (0, 1, 2, 3):
            rank.check_weights(plan, Visit(0, "forward", layer))
        for low in (2, 0):
            for layer in (low, low + 1, low + 1, low):
                rank.check_weights(plan, Visit(0, "backward", layer))
                time.sleep(0.005)
                if layer == low + 1:
                    rank.check_weights(plan, Visit(0, "backward", layer))
            for layer in (low + 1, low):
                rank.return_gradients(plan, Visit(0, "backward", layer))
        rank.engine.close_window()
        rank.check_owned_gradients(plan)


@pytest.mark.dist(2)
def test_recomputation_over_several_layers_is_right(pool):
    pool.run(two_layers_per_checkpoint, 2, random_plan((0, 0), seed=5, slots=2, fewest=1, layers=4, micro_steps=1))


def offload_between_stages(group, plan):
    """Parameters move to new memory between the recompute and the update window, and in the middle of one."""
    rank, words = Rank(group, plan), ""
    parameters = [p for homes in rank.homes for p in homes.tensors()]
    with rank.engine as engine:
        versions = [r.version for r in engine._node.registrations]
        for parameter in parameters:
            parameter.data = parameter.data.clone()
        try:
            engine.open_window(plan)
        except TransferError as error:
            words = str(error)
        engine.suspend()
        engine.resume()
        assert [r.version for r in engine._node.registrations] > versions, "registered anew"
        engine.open_window(plan)
        rank.check_weights(plan, Visit(0, "forward", 0))
        engine.suspend()
        kept = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data = torch.empty(0)
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.data = values
        engine.resume()
        run_window(rank, plan, lambda: None)
        with engine.canonical():
            for layer, homes in enumerate(rank.homes):
                owned = range(rank.rank * plan.home_slots, (rank.rank + 1) * plan.home_slots)
                assert_same_bits(homes, take(rank.everything[layer], owned), "canonical")
            grads = [p.grad for p in parameters]
            rank.update()
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
        # Its replicas were in a buffer already, with the weights of before.
        rank.check_weights(plan, plan.itinerary.visits()[-1])
        rank.check_weights(plan, Visit(0, "forward", 0))
        engine.close_window()
        rank.check_owned_gradients(plan)
    return words


@pytest.mark.dist(4)
def test_offloading_is_noticed_and_survived(pool):
    plan = random_plan((0, 0, 1, 1), seed=8, slots=1, fewest=1)
    for words in pool.run(offload_between_stages, 4, plan):
        assert "layer index 0 gate_up_SFD: registered at" in words and "suspend()" in words


def moved_on_one_rank(group, plan):
    """What each rank is told, and how soon, where parameters of rank 1 alone were moved; then all go on."""
    rank, words = Rank(group, plan), ""
    with rank.engine as engine:
        parameter, place = rank.homes[0].down_SDF, rank.homes[0].down_SDF.data
        parameter.data = place.clone() if rank.rank == 1 else place
        begin = time.monotonic()
        try:
            engine.open_window(plan)
        except TransferError as error:
            words = str(error)
        seconds, parameter.data = time.monotonic() - begin, place
        engine.open_window(plan)
        run_window(rank, plan, lambda: None)
        engine.close_window()
    return words, seconds


@pytest.mark.dist(4)
def test_what_one_rank_refuses_is_told_on_all_nodes_at_once_and_nothing_moves(pool):
    plan = random_plan((0, 0, 1, 1), seed=8, slots=1, fewest=1)
    results = pool.run(moved_on_one_rank, 4, plan)
    assert max(seconds for _, seconds in results) < 30.0, "the bound on waits is 60 s"
    for words, _ in results:
        assert "rank 1: layer index 0 down_SDF: registered at" in words


def refused(group, plan, options):
    homes = owned_parameters(
        all_experts(plan.home_LE.shape[1], plan.home_LE.shape[0], 0), group.rank(), plan.home_slots
    )
    try:
        with TransferEngine(homes, group=group, node_R=(0, 1), options=options) as engine:
            engine.open_window(plan)
    except TransferError as error:
        return str(error)
    return ""


@pytest.mark.dist(2)
def test_more_slots_or_depth_than_buffers_are_refused(pool):
    plan = random_plan((0, 1), seed=1, slots=2, depth=2)
    for words in pool.run(refused, 2, plan, TransferOptions(slots=1, depth=1)):
        assert "2 slots at depth 2; buffers exist for 1 at depth 1" in words


@pytest.mark.dist(2)
def test_the_budget_is_checked_before_allocation(pool):
    plan = random_plan((0, 1), seed=1)
    for words in pool.run(refused, 2, plan, TransferOptions(slots=10**9, budget_bytes=2**20)):
        assert "1000000000 slots at depth 1 need" in words and "budget is 1,048,576" in words


@pytest.mark.dist(2)
def test_memory_that_is_not_there_is_refused_on_all_ranks(pool):
    plan = random_plan((0, 1), seed=1)
    for words in pool.run(refused, 2, plan, TransferOptions(slots=10**9)):
        assert "rank 0: shared memory:" in words and "are available; raise" in words


def misuse(group, plan):
    rank, words = Rank(group, plan), []
    engine = rank.engine
    two = stack([rank.gradient(0, 0, 0, 0)] * 2, like=rank.everything[0])

    def suspended():
        engine.suspend()
        try:
            engine.wait_for(Visit(0, "forward", 0))
        finally:
            engine.resume()

    acts = [lambda: engine.wait_for(Visit(0, "forward", 0)), engine.close_window, lambda: engine.open_window(plan)]
    needs = needs_of(plan, Visit(0, "forward", 0), rank=rank.rank)
    right = stack([rank.gradient(0, 0, need.expert, rank.rank) for need in needs], like=rank.everything[0])
    acts += [suspended] + [lambda: engine.hand_in(0, 0, right)] * 2 + [lambda: engine.hand_in(0, 0, two)]
    for act in acts:
        dist.barrier(group)  # a rank that is ahead would end its peers' earlier acts with its own words
        try:
            act()
        except TransferError as error:
            words.append(str(error))
    engine.close()
    return words


@pytest.mark.dist(2)
def test_misuse_is_named(pool):
    for words in pool.run(misuse, 2, random_plan((0, 0), seed=1, slots=1, fewest=1)):
        assert "no window is open" in words[0] and "no window is open" in words[1]
        assert "suspended" in words[2]
        assert "micro-step 0, layer index 0: gradients handed in twice" in words[3]
        assert "2 gradients handed in for 1 replicas" in words[4]


def wide_returns(group, plan, computed):
    """Gradients of bf16 experts accumulate in fp32 `main_grad`: the largest error against float64, in parts of it."""
    wide = {"gradient_of": lambda parameter: parameter.main_grad, "transfer": {"grad_dtype": "float32"}}
    rank = Rank(group, plan, kind={"dtype": torch.bfloat16}, **wide)
    rank.kind = {"dtype": computed}
    for parameter in (p for homes in rank.homes for p in homes.tensors()):
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    with rank.engine as engine:
        engine.open_window(plan)
        for visit in plan.itinerary.visits():
            micro_step, phase, layer = visit
            engine.wait_for(visit)
            if phase == "forward":
                continue
            handed = [
                rank.gradient(micro_step, layer, n.expert, rank.rank) for n in needs_of(plan, visit, rank=rank.rank)
            ]
            engine.hand_in(micro_step, layer, stack(handed, like=rank.everything[layer]))
            experts = experts_at(plan, layer, rank.rank)
            own = stack([rank.gradient(micro_step, layer, e, rank.rank) for e in experts], like=rank.everything[layer])
            own = own.map(lambda tensor: tensor.bfloat16())
            engine.collect_returns(micro_step, layer, own)
            # What the framework does once autograd has given it the gradient.
            for parameter, new in zip(rank.homes[layer].tensors(), own.tensors(), strict=True):
                parameter.main_grad += new
        engine.close_window()
    return max(error_of(rank, plan, layer) for layer in range(rank.layers))


def error_of(rank, plan, layer):
    """Of this rank's owned gradients of a layer: the largest difference from float64, in parts of the largest one."""
    found, owned = 0.0, range(rank.rank * plan.home_slots, (rank.rank + 1) * plan.home_slots)
    for slot, expert in enumerate(owned):
        home, totals = int(plan.home_LE[layer, expert]), None
        for micro_step in range(plan.loads.num_micro_steps):
            own = [part.bfloat16().double() for part in rank.gradient(micro_step, layer, expert, home)]
            replicas = [r.rank for r in plan.replicas(micro_step, layer) if r.expert == expert]
            parts = [own, *([p.double() for p in rank.gradient(micro_step, layer, expert, r)] for r in replicas)]
            new = [sum(column) for column in zip(*parts, strict=True)]
            totals = new if totals is None else [a + b for a, b in zip(totals, new, strict=True)]
        for parameter, wanted in zip(rank.homes[layer].tensors(), totals, strict=True):
            found = max(found, float((parameter.main_grad[slot] - wanted).abs().max() / wanted.abs().max()))
    return found


@pytest.mark.dist(4)
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float32], ids=str)
def test_returned_gradients_are_added_in_the_dtype_that_accumulates(pool, computed):
    plan = random_plan((0, 0, 0, 0), seed=1, slots=2, fewest=2, micro_steps=3)
    errors = pool.run(wide_returns, 4, plan, computed)
    # One sum rounded to bf16 would be off by up to 4e-3.
    assert max(errors) < 1e-6, errors


def forgotten_return(group, plan):
    """A rank runs backward and hands in, its homes never collect: the window must not end as if nothing were lost."""
    rank = Rank(group, plan)
    try:
        with rank.engine as engine:
            engine.open_window(plan)
            needs = needs_of(plan, Visit(0, "forward", 0), rank=rank.rank)
            engine.hand_in(0, 0, stack([rank.gradient(0, 0, n.expert, 0) for n in needs], like=rank.everything[0]))
            engine.close_window()
    except TransferError as error:
        return str(error)
    return ""


@pytest.mark.dist(2)
def test_a_gradient_that_was_never_collected_fails_the_window(pool):
    for words in pool.run(forgotten_return, 2, random_plan((0, 0), seed=1, slots=1, fewest=1)):
        assert "never collected by its home" in words and "layer index 0, micro-step 0" in words


def fail_inside(group, plan):
    """The body of a `with` block fails in mid-window: what is left of shared memory, and of the parameters."""
    from tests.transfer.test_memory import held, is_back

    before = held()
    rank = Rank(group, plan)
    parameters = [p for homes in rank.homes for p in homes.tensors()]
    places = [p.data_ptr() for p in parameters]
    try:
        with rank.engine as engine:
            engine.open_window(plan)
            for layer in range(rank.layers):
                rank.check_weights(plan, Visit(0, "forward", layer))
            # Two ranks' pieces (two matrices of each layer, and the rest), the control cells and the host store.
            assert held() == (before[0] + 2 * (2 * rank.layers + 1) + 2, before[1] + 2)
            raise KeyError("a fault of the trainer")
    except KeyError:
        is_clean = is_back(before)
    rank.engine.close()
    for layer, homes in enumerate(rank.homes):
        wanted = take(rank.everything[layer], experts_at(plan, layer, rank.rank))
        assert_same_bits(homes, wanted, "moved out as they were")
    assert all(p.data_ptr() != place for p, place in zip(parameters, places, strict=True))
    return is_clean


@pytest.mark.dist(4)
def test_nothing_shared_is_left_after_an_exception(pool):
    assert all(pool.run(fail_inside, 4, random_plan((0, 0, 1, 1), seed=2, slots=1, fewest=1)))


def profiled(group, plan):
    rank = Rank(group, plan)
    # Without kineto, which takes seconds to start; ranges are the same.
    with rank.engine, torch.autograd.profiler.profile(use_kineto=False) as seen:
        rank.engine.open_window(plan)
        run_window(rank, plan, lambda: None)
        rank.engine.close_window()
    return {event.key for event in seen.key_averages() if event.key.startswith("equipoise.")}


@pytest.mark.dist(2)
def test_every_phase_is_a_profiler_range(pool):
    wanted = {"publish", "weights", "hand_in", "collect_returns", "collect"}
    for seen in pool.run(profiled, 2, random_plan((0, 0), seed=2, slots=1, fewest=1)):
        assert {f"equipoise.{name}" for name in wanted} <= seen
