"""Layers on their way beside compute: ahead of their first turn, behind their last one, and back if asked for."""

import threading

import pytest
import torch

from equipoise.core import TransferError
from equipoise.core.plan import Visit
from equipoise.transfer.edges import Relocator
from tests.transfer.play import Rank, run_window
from tests.transfer.test_faults import wait_for
from tests.transfer.test_training import planned, scattered
from tests.transfer.training import Trainer
from tests.transfer.windows import LAYOUTS, assert_same_bits, experts_at, random_plan, take


class HeldRelocator(Relocator):
    """Does not begin with a layer before it is let go."""

    def relocate(self, kind, layer, moves, tensors):
        if layer in self.held:
            assert self.held[layer].wait(60)
        super().relocate(kind, layer, moves, tensors)


def hold(engine, layers):
    """Hold back the experts of some layers; returns what lets each go."""
    relocator = engine._edges._relocator
    relocator.__class__, relocator.held = HeldRelocator, {layer: threading.Event() for layer in layers}
    return relocator.held


def ahead(group, plan):
    """The last layer is held back: what its ranks can do meanwhile, and that its own turn waits."""
    rank, last = Rank(group, plan), plan.loads.num_layers - 1
    held = hold(rank.engine, [last])
    with rank.engine as engine:
        engine.open_window(plan)
        for layer in range(last):
            rank.check_weights(plan, Visit(0, "forward", layer))
            assert_same_bits(rank.homes[layer], at_homes(rank, plan, layer), f"layer {layer} is at home")
        assert_same_bits(rank.homes[last], owned(rank, plan, last), "the held layer is with its owners")
        assert not engine._published_L[last].done()
        threading.Timer(0.05, held[last].set).start()
        rank.check_weights(plan, Visit(0, "forward", last))
        assert_same_bits(rank.homes[last], at_homes(rank, plan, last), "after its wait")
        engine.close_window()
    return sum(engine.counters.exposed_s.values())


def at_homes(rank, plan, layer):
    return take(rank.everything[layer], experts_at(plan, layer, rank.rank))


def owned(rank, plan, layer):
    return take(rank.everything[layer], range(rank.rank * plan.home_slots, (rank.rank + 1) * plan.home_slots))


@pytest.mark.dist(4)
@pytest.mark.parametrize("layout", ["2 as one node", "4 as two nodes"])
def test_layers_run_while_later_ones_are_published(pool, layout):
    plan = random_plan(LAYOUTS[layout], seed=6, slots=1, layers=4)
    assert all(seconds > 0 for seconds in pool.run(ahead, len(LAYOUTS[layout]), plan)), "the wait was not counted"


def behind(group, plan):
    """Every layer but the last one of the window is with its owners before the window is closed."""
    rank = Rank(group, plan)
    with rank.engine as engine:
        engine.open_window(plan)
        run_window(rank, plan, lambda: None)
        first = plan.itinerary.visits()[-1].layer
        collected = [layer for layer in range(rank.layers) if layer != first]
        engine._jobs.drain()
        for layer in collected:
            assert_same_bits(rank.homes[layer], owned(rank, plan, layer), f"layer {layer} is over")
        assert_same_bits(rank.homes[first], at_homes(rank, plan, first), "the last one is still at home")
        engine.close_window()
        if plan.loads.stage == "update":
            rank.check_owned_gradients(plan)
        for layer in range(rank.layers):
            assert_same_bits(rank.homes[layer], owned(rank, plan, layer), f"layer {layer} at the end")


@pytest.mark.dist(4)
@pytest.mark.parametrize("stage", ["update", "recompute"])
@pytest.mark.parametrize("layout", ["2 as two nodes", "4 as one node", "4 as two nodes"])
def test_a_layer_goes_home_to_its_owners_when_its_last_turn_is_over(pool, layout, stage):
    plan = random_plan(LAYOUTS[layout], seed=6, slots=1, layers=4, stage=stage)
    assert plan.displaced_LE.any(axis=1).all()
    pool.run(behind, len(LAYOUTS[layout]), plan)


def again(group, plan):
    """Layers that are over run once more, backward too: they come back, and gradients add up."""
    rank, is_update = Rank(group, plan), plan.loads.stage == "update"
    with rank.engine as engine:
        engine.open_window(plan)
        run_window(rank, plan, lambda: None)
        with engine.canonical():
            for layer in range(rank.layers):
                assert_same_bits(rank.homes[layer], owned(rank, plan, layer), f"layer {layer} in canonical")
        for layer in (rank.layers - 1, 1):
            rank.check_weights(plan, Visit(0, "forward", layer))
            assert_same_bits(rank.homes[layer], at_homes(rank, plan, layer), f"layer {layer} is back")
        for parameter in rank.homes[1].tensors() if is_update else ():
            # What another backward pass would add, at the homes.
            parameter.grad.mul_(2)
        engine.close_window()
        for parameter in rank.homes[1].tensors() if is_update else ():
            parameter.grad.div_(2)
        if is_update:
            rank.check_owned_gradients(plan)
        for layer in range(rank.layers):
            assert_same_bits(rank.homes[layer], owned(rank, plan, layer), f"layer {layer} at the end")


@pytest.mark.dist(4)
@pytest.mark.parametrize("stage", ["update", "recompute"])
def test_a_visit_after_a_layers_end_brings_it_back(pool, stage):
    plan = random_plan((0, 0, 1, 1), seed=6, slots=1, layers=4, micro_steps=1, stage=stage)
    pool.run(again, 4, plan)


def moved_in_canonical(group, plan):
    """A reader puts parameters elsewhere inside `canonical`: afterwards the homes hold theirs all the same."""
    rank = Rank(group, plan)
    with rank.engine as engine:
        engine.open_window(plan)
        with engine.canonical():
            for parameter in (p for homes in rank.homes for p in homes.tensors()):
                parameter.data = 2 * parameter.data
        rank.everything = [type(w)(*(None if t is None else 2 * t for t in w)) for w in rank.everything]
        for layer in range(rank.layers):
            assert_same_bits(rank.homes[layer], at_homes(rank, plan, layer), f"layer {layer} after canonical")
        run_window(rank, plan, lambda: None)
        engine.close_window()
        for layer in range(rank.layers):
            assert_same_bits(rank.homes[layer], owned(rank, plan, layer), f"layer {layer} at the end")


@pytest.mark.dist(4)
def test_parameters_may_be_put_elsewhere_inside_canonical(pool):
    pool.run(moved_in_canonical, 4, random_plan((0, 0, 1, 1), seed=6, slots=1))


def without_weights(group, plan):
    rank = Rank(group, plan)
    with rank.engine as engine:
        engine.open_window(plan, with_weights=False)
        run_window(rank, plan, lambda: None)
        engine.close_window()
        rank.check_owned_gradients(plan)
        for layer in range(rank.layers):
            assert_same_bits(rank.homes[layer], at_homes(rank, plan, layer), "weights stay where they were")
        # The optimizer's own masters.
        for layer, homes in enumerate(rank.homes):
            for parameter, value in zip(homes.tensors(), owned(rank, plan, layer).tensors(), strict=True):
                parameter.data.copy_(value)
        rank.update()
        engine.open_window(plan)
        run_window(rank, plan, lambda: None)
        engine.close_window()
        rank.check_owned_gradients(plan)


@pytest.mark.dist(2)
def test_weights_need_not_travel_back(pool):
    pool.run(without_weights, 2, random_plan((0, 0), seed=3, slots=1, fewest=1))


def changed_inside(group, plan, how):
    """A gradient of a layer that is over is changed on rank 1 before the window ends: what each rank is told."""
    rank = Rank(group, plan)
    try:
        with rank.engine as engine:
            engine.open_window(plan)
            run_window(rank, plan, lambda: None)
            engine._jobs.drain()
            if rank.rank == 1 and how == "scaled":
                rank.homes[2].down_SDF.grad.mul_(0.5)
            if rank.rank == 1 and how == "dropped":
                rank.homes[2].down_SDF.grad = None
            engine.close_window()
    except TransferError as error:
        return str(error)
    return ""


@pytest.mark.dist(2)
@pytest.mark.parametrize("how", ["scaled", "dropped"])
def test_a_gradient_that_is_changed_on_its_way_is_named_on_all_ranks(pool, how):
    first, second = pool.run(changed_inside, 2, random_plan((0, 0), seed=6), how)
    for words in (first, second):
        assert "rank 1: the gradient of layer index 2 down was changed or replaced inside the window" in words


def early_gradients(group, windows, run, is_elsewhere):
    """Real backward passes: gradients at their owners, and how many layers were collected before the window's end."""
    plan = windows[0][0]
    trainer = Trainer(group, plan, run, has_engine=True)
    if is_elsewhere:
        trainer.engine._edges._gradient_of = lambda parameter: parameter.main_grad
        # All in one buffer, whose parts torch counts together.
        flat = torch.zeros(sum(parameter.numel() for parameter in trainer.parameters))
        parts = flat.split([parameter.numel() for parameter in trainer.parameters])
        pairs = zip(trainer.parameters, parts, strict=True)
        keep = [accumulate_in_main_grad(parameter, part.view_as(parameter)) for parameter, part in pairs]
        assert all(keep)
    collected, kept = [], trainer.engine._edges.collect_layer
    trainer.engine._edges.collect_layer = lambda layer: (collected.append(layer), kept(layer))
    for plan, routing in windows:
        open_window(trainer, plan, routing)
    gradients = [(p.main_grad if is_elsewhere else p.grad).clone() for p in trainer.parameters]
    trainer.close()
    return gradients, collected


def open_window(trainer, plan, routing):
    """One window, its gradients on top of the earlier ones'."""
    from equipoise.layer.experts import Window
    from tests.layer import stack

    trainer.engine.open_window(plan)
    for experts in trainer.layers:
        experts.begin(Window(plan, rank=trainer.group.rank(), transfers=trainer.engine))
    stack.run_micro_steps(
        trainer.layers, trainer.attention, routing, trainer.run, stack.Outcome([], [], [], [], [], [])
    )
    trainer.engine.close_window()


def accumulate_in_main_grad(parameter, main_grad):
    """As Megatron does: the node that accumulates `grad` has a hook that adds it to `main_grad` and drops it."""
    parameter.main_grad = main_grad

    def add(*_):
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(add)
    return node


@pytest.mark.dist(4)
@pytest.mark.parametrize("mode", ["plain", "reentrant", "early_stop"])
def test_gradients_elsewhere_are_complete_before_they_go(pool, mode):
    from tests.transfer.test_training import EXACT, Run

    windows = [planned(21, 4, 2, 2), scattered(22, 4, 2, 2)]
    run = Run(options=EXACT, mode=mode)
    usual, elsewhere = (pool.run(early_gradients, 4, windows, run, is_elsewhere) for is_elsewhere in (False, True))
    layers = range(windows[0][0].loads.num_layers - 1, 0, -1)
    wanted = [layer for plan, _ in windows for layer in layers if plan.displaced_LE[layer].any()]
    for (one, collected), (other, _) in zip(usual, elsewhere, strict=True):
        assert all(map(torch.equal, one, other))
        assert collected == wanted, (
            "each layer behind its last backward, all but the first, which the window's end collects"
        )


def given_up(group, plan):
    """Rank 1 leaves while a layer is on its way; what is left on the others is whole layers."""
    rank, words = Rank(group, plan), ""
    held = hold(rank.engine, [1] if group.rank() == 1 else [])
    try:
        with rank.engine as engine:
            engine.open_window(plan)
            engine.wait_for(Visit(0, "forward", 0))
            if group.rank() == 1:
                threading.Timer(1.5, held[1].set).start()
                raise KeyError("a fault of the trainer")
            engine.wait_for(Visit(0, "forward", 1))
    except KeyError:
        words = "left"
    except TransferError as error:
        words = str(error)
    wait_for(lambda: not any(thread.is_alive() for thread in rank.engine._jobs._executor._threads))
    assert_same_bits(rank.homes[0], at_homes(rank, plan, 0), "the layer that was there")
    for layer in range(1, rank.layers):
        assert_same_bits(rank.homes[layer], owned(rank, plan, layer), f"layer {layer} never moved")
    return words


def test_a_rank_that_leaves_while_a_layer_is_on_its_way_ends_the_others():
    from tests.transfer.own_ranks import run_ranks

    first, second = run_ranks(given_up, 2, random_plan((0, 0), seed=6))
    assert second == "left"
    assert "rank 1: closed while experts were on their way between owners and homes" in first
