"""Publish and collect: bit-exact round trips for any placement, on declared nodes of every layout."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.core import TransferError
from equipoise.core.options import TransferOptions
from equipoise.transfer.edges import Move, WindowEdges, owner_to_home, plan_rounds
from equipoise.transfer.node import ExpertWeights, NodeMemory
from tests.transfer.windows import (
    LAYOUTS,
    all_experts,
    assert_same_bits,
    experts_at,
    owned_parameters,
    random_plan,
    take,
)

OPTIONS = TransferOptions(slots=0)


@given(
    ranks=st.integers(1, 6),
    slots=st.integers(1, 9),
    boxes=st.integers(1, 4),
    nodes=st.integers(1, 3),
    seed=st.integers(),
)
def test_rounds_move_every_expert_once_through_few_boxes(ranks, slots, boxes, nodes, seed):
    """Play the rounds: what a slot holds is overwritten only once it lies in a box or has moved on."""
    boxes = min(max(boxes, 2), slots)
    count, rng = ranks * slots, random.Random(seed)
    # Some stay where they are, some swap, the rest form cycles of any length.
    targets = list(range(count))
    moving = rng.sample(targets, rng.randint(0, count))
    for at, to in zip(moving, rng.sample(moving, len(moving)), strict=True):
        targets[at] = to
    moves = [Move(e, *divmod(e, slots), *divmod(to, slots)) for e, to in enumerate(targets) if to != e]

    def place_of(move):
        crosses = move.source % nodes != move.target % nodes
        return ("landing", move.target) if crosses else ("outbox", move.source)

    holds = {divmod(e, slots): e for e in range(count)}
    full, rounds = {}, plan_rounds({move: place_of(move) for move in moves}, boxes=boxes)
    for staged, written in rounds:
        for move, box in staged:
            assert 0 <= box < boxes and (place_of(move), box) not in full, "a box is filled twice"
            assert holds.pop(move[1:3]) == move.expert, "a slot is staged once, with its own expert in it"
            full[place_of(move), box] = move.expert
        for move, box in written:
            assert move[3:5] not in holds, "an expert is overwritten"
            holds[move[3:5]] = full.pop((place_of(move), box))
    assert not full and holds == {divmod(to, slots): e for e, to in enumerate(targets)}
    assert all(staged for staged, _ in rounds) and sum(len(staged) for staged, _ in rounds) == len(moves)
    assert boxes < slots or len(rounds) <= 1, "what fits goes in one round"


def publish(edges, plan, *, with_weights=True):
    """Begin a window and bring all of its layers to their homes, one after the other."""
    edges.begin(plan, with_weights=with_weights)
    for layer in range(plan.home_LE.shape[0]):
        edges.publish_layer(layer)


class Case:
    """One rank's parameters in shared memory, and what all experts should be."""

    def __init__(self, group, plan, seed, *, has_bias=False):
        self.rank, self.owned = group.rank(), plan.home_slots
        self.layers = range(plan.home_LE.shape[0])
        self.everything = all_experts(plan.home_LE.shape[1], len(self.layers), seed, has_bias=has_bias)
        self.homes = owned_parameters(self.everything, self.rank, self.owned)
        self.node = NodeMemory(self.homes, group=group, node_R=plan.cluster.node_R, options=OPTIONS)
        self.edges = WindowEdges(self.node)

    @property
    def mine(self):
        return range(self.rank * self.owned, (self.rank + 1) * self.owned)

    def assert_homes_hold(self, plan):
        for layer in self.layers:
            wanted = take(self.everything[layer], experts_at(plan, layer, self.rank))
            assert_same_bits(self.homes[layer], wanted, f"home weights of layer {layer}")

    def assert_owners_hold(self):
        for layer in self.layers:
            assert_same_bits(self.homes[layer], take(self.everything[layer], self.mine), f"layer {layer}")

    def accumulate(self, plan, gradients):
        """Add gradients at the homes, as a backward pass would."""
        for layer in self.layers:
            new = take(gradients[layer], experts_at(plan, layer, self.rank))
            for parameter, gradient in zip(self.homes[layer].tensors(), new.tensors(), strict=True):
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)

    def gradients(self, layer):
        return ExpertWeights(*(None if p is None else p.grad for p in self.homes[layer]))


def round_trips(group, plans, seed):
    """Several windows one after another, gradients kept over all of them."""
    case = Case(group, plans[0], seed, has_bias=bool(seed % 2))
    parameters = [id(p) for homes in case.homes for p in homes.tensors()]
    total, kept = None, None
    for window, plan in enumerate(plans):
        publish(case.edges, plan)
        case.assert_homes_hold(plan)
        new = all_experts(plan.home_LE.shape[1], len(case.layers), 1000 * seed + window, has_bias=bool(seed % 2))
        case.accumulate(plan, new)
        total = new if total is None else [_add(a, b) for a, b in zip(total, new, strict=True)]
        case.edges.end()
        case.assert_owners_hold()
        for layer in case.layers:
            assert_same_bits(case.gradients(layer), take(total[layer], case.mine), f"gradients of layer {layer}")
        now = [p.grad.data_ptr() for homes in case.homes for p in homes.tensors()]
        assert kept in (None, now), "gradients were replaced by new tensors"
        kept = now
    assert parameters == [id(p) for homes in case.homes for p in homes.tensors()], "parameters were replaced"
    counters = case.node.counters
    case.node.close()
    case.assert_owners_hold()
    return dict(counters.bytes), counters.publishes, counters.collects


def _add(a, b):
    return ExpertWeights(*(None if x is None else x + y for x, y in zip(a, b, strict=True)))


@pytest.mark.dist(8)
@pytest.mark.parametrize(("layout", "seed"), [(layout, 1 + place % 2) for place, layout in enumerate(LAYOUTS)])
def test_round_trips_are_bit_exact(pool, layout, seed):
    node_R = LAYOUTS[layout]
    plans = [random_plan(node_R, seed=10 * seed + w, home_slots=1 + seed) for w in range(3)]
    results = pool.run(round_trips, len(node_R), plans, seed)
    displaced = [int(plan.displaced_LE.sum()) for plan in plans]
    assert sum(publishes for _, publishes, _ in results) == sum(displaced)
    assert sum(collects for _, _, collects in results) == sum(displaced)
    paths = {path for counts, _, _ in results for path, count in counts.items() if count}
    assert paths <= {"shm", "p2p"} and ("p2p" in paths) == (len(set(node_R)) > 1)


@pytest.mark.dist(8)
@pytest.mark.parametrize("layout", ["1 rank", "4 as two nodes", "8 as one node", "8 strided"])
def test_round_trips_in_many_rounds_are_bit_exact(pool, layout):
    plans = [random_plan(LAYOUTS[layout], seed=w, home_slots=11, layers=2) for w in range(2)]
    results = pool.run(round_trips, len(LAYOUTS[layout]), plans, 4)
    assert sum(publishes for _, publishes, _ in results) == sum(int(plan.displaced_LE.sum()) for plan in plans)


def bytes_of_publish(group, plan):
    case = Case(group, plan, 5)
    publish(case.edges, plan, with_weights=False)
    counted = dict(case.node.counters.bytes)
    case.edges.end()
    assert dict(case.node.counters.bytes) == counted, "nothing to collect, but something travelled"
    case.assert_homes_hold(plan)
    case.node.close()
    return counted


@pytest.mark.dist(4)
def test_bytes_are_those_of_displaced_experts_by_path(pool):
    node_R = (0, 0, 1, 1)
    plan = random_plan(node_R, seed=3)
    counts = pool.run(bytes_of_publish, 4, plan)
    expert_bytes = plan.model.expert_params * 4
    crosses_LE = plan.cluster.node_array_R[plan.home_LE] != plan.cluster.node_array_R[plan.owner_E][None]
    across, inside = int(crosses_LE.sum()), int((plan.displaced_LE & ~crosses_LE).sum())
    assert across > 0 and inside > 0, "the random plan should use both ways"
    assert sum(c.get("p2p", 0) for c in counts) == across * expert_bytes
    assert sum(c.get("shm", 0) for c in counts) == inside * expert_bytes


def read_and_write_inside(group, plan):
    case = Case(group, plan, 7)
    with case.edges.canonical():
        case.assert_owners_hold()
    publish(case.edges, plan)
    case.accumulate(plan, case.everything)
    with case.edges.canonical():
        case.assert_owners_hold()
        with torch.no_grad():
            for parameter in (p for homes in case.homes for p in homes.tensors()):
                parameter.mul_(2)
    before = case.everything
    case.everything = [ExpertWeights(*(None if t is None else 2 * t for t in layer)) for layer in before]
    case.assert_homes_hold(plan)
    try:
        with case.edges.canonical():
            raise KeyError("the reader fails")
    except KeyError:
        case.assert_homes_hold(plan)
    case.edges.end()
    case.assert_owners_hold()
    for layer in case.layers:
        assert_same_bits(case.gradients(layer), take(before[layer], case.mine), "gradients stay out of it")
    case.node.close()


@pytest.mark.dist(4)
@pytest.mark.parametrize("layout", ["4 as one node", "4 as two nodes", "4 strided"])
def test_canonical_lends_weights_to_their_owners(pool, layout):
    pool.run(read_and_write_inside, 4, random_plan(LAYOUTS[layout], seed=11))


def one_rank_without_gradients(group, plan):
    case = Case(group, plan, 9)
    publish(case.edges, plan)
    if case.rank != 1:
        case.accumulate(plan, case.everything)
    case.edges.end()
    for layer in case.layers:
        at_one = set(experts_at(plan, layer, 1))
        for slot, expert in enumerate(case.mine):
            wanted = case.everything[layer].tensors()
            for gradient, whole in zip(case.gradients(layer).tensors(), wanted, strict=True):
                assert torch.equal(gradient[slot], torch.zeros_like(whole[0]) if expert in at_one else whole[expert])
    case.node.close()


@pytest.mark.dist(2)
@pytest.mark.parametrize("layout", ["2 as one node", "2 as two nodes"])
def test_a_rank_without_gradients_gives_zeros(pool, layout):
    pool.run(one_rank_without_gradients, 2, random_plan(LAYOUTS[layout], seed=4))


def different_plans(group, plans):
    case = Case(group, plans[0], 9)
    try:
        publish(case.edges, plans[group.rank()])
    except TransferError as error:
        case.assert_owners_hold()
        return str(error)
    finally:
        case.node.close()
    return "published"


@pytest.mark.dist(2)
def test_different_plans_are_refused_before_anything_moves(pool):
    words = pool.run(different_plans, 2, [random_plan((0, 0), seed=s) for s in (1, 2)])
    assert all("ranks differ in placement" in text for text in words), words


def different_moves(group, plan):
    """Relocate a layer by other moves on rank 1: what each rank says, and whether its slots are untouched."""
    case = Case(group, plan, 9)
    moves = owner_to_home(plan, 0)
    assert len(moves) > 1
    try:
        case.edges._relocator.relocate("publish", 0, moves[group.rank() :], case.node.home[group.rank()][0])
    except TransferError as error:
        case.assert_owners_hold()
        return str(error)
    finally:
        case.node.close()
    return "relocated"


@pytest.mark.dist(2)
def test_ranks_compare_their_moves_before_any_of_them_writes(pool):
    # One expert changes places with another, in the same rank and in the other one.
    words = pool.run(different_moves, 2, random_plan((0, 0), seed=2, home_slots=3))
    assert all("ranks differ in moves" in text for text in words), words


def misuse(group, plan, other):
    case = Case(group, plan, 9)
    words = []
    for act in (case.edges.end, lambda: publish(case.edges, other), lambda: publish(case.edges, plan)):
        try:
            act()
            publish(case.edges, plan)
        except TransferError as error:
            words.append(str(error))
    case.node.close()
    return words


@pytest.mark.dist(2)
def test_misuse_is_named(pool):
    plan, other = random_plan((0, 0), seed=1), random_plan((0, 0), seed=1, layers=2)
    for words in pool.run(misuse, 2, plan, other):
        assert "no window is published" in words[0]
        assert "layers 2" in words[1] and "opened for 3" in words[1]
        assert "already published" in words[2]


def elsewhere(group, plan):
    """Gradients accumulate in `main_grad`, as Megatron has it; `grad` stays empty."""
    rank, owned = group.rank(), plan.home_slots
    everything = all_experts(plan.home_LE.shape[1], plan.home_LE.shape[0], 3)
    gradients = all_experts(plan.home_LE.shape[1], plan.home_LE.shape[0], 4)
    homes = owned_parameters(everything, rank, owned)
    node = NodeMemory(homes, group=group, node_R=plan.cluster.node_R, options=OPTIONS)
    edges, words = WindowEdges(node, gradient_of=lambda parameter: getattr(parameter, "main_grad", None)), ""
    for parameter in (p for weights in homes for p in weights.tensors()):
        parameter.main_grad = torch.zeros_like(parameter)
    publish(edges, plan)
    for layer, weights in enumerate(homes):
        new = take(gradients[layer], experts_at(plan, layer, rank))
        for parameter, gradient in zip(weights.tensors(), new.tensors(), strict=True):
            parameter.main_grad += gradient
    edges.end()
    mine = range(rank * owned, (rank + 1) * owned)
    for layer, weights in enumerate(homes):
        got = ExpertWeights(*(None if p is None else p.main_grad for p in weights))
        assert_same_bits(got, take(gradients[layer], mine), f"main_grad of layer {layer}")
        assert all(p.grad is None for p in weights.tensors())
    publish(edges, plan)
    if rank == 1:
        del homes[0].gate_up_SFD.main_grad
    try:
        edges.end()
    except TransferError as error:
        words = str(error)
    node.close()
    return words


@pytest.mark.dist(2)
def test_gradients_may_lie_elsewhere_than_in_grad(pool):
    first, second = pool.run(elsewhere, 2, random_plan((0, 0), seed=9))
    assert "layer index 0: gradient_of finds no gradient for a parameter of this rank" in second
    assert "ended because rank 1: layer index 0: gradient_of finds no gradient" in first
