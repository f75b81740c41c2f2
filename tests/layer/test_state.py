"""Experts saved under one number of ranks and loaded under another, with their optimizer state."""

import functools

import pytest
import torch

from equipoise.core.errors import TrainingError
from equipoise.layer.checkpoint import expert_state_dict, load_expert_state_dict, load_experts, save_experts
from equipoise.layer.experts import BalancedExperts
from equipoise.transfer.node import ExpertWeights
from tests.transfer.windows import all_experts, take

EXPERTS, LAYERS = 8, 2
PATHS = [f"blocks.{layer}.experts" for layer in range(LAYERS)]


def build(group, seed):
    """Layers with this rank's share of experts drawn from a seed, and an optimizer over them."""
    slots = EXPERTS // group.size()
    owned = range(group.rank() * slots, (group.rank() + 1) * slots)
    everything = all_experts(EXPERTS, LAYERS, seed, has_bias=True)
    layers = {
        path: BalancedExperts(ExpertWeights(*take(everything[layer], owned)), layer=layer, group=group)
        for layer, path in enumerate(PATHS)
    }
    return layers, torch.optim.AdamW([p for x in layers.values() for p in x.parameters()], lr=1e-2)


def step(layers, optimizer, seed):
    """An AdamW step on gradients that belong to experts, whoever owns them."""
    for layer, (experts, gradients) in enumerate(
        zip(layers.values(), all_experts(EXPERTS, LAYERS, seed, has_bias=True), strict=True)
    ):
        slots = experts.gate_up.shape[0]
        owned = range(experts.group.rank() * slots, (experts.group.rank() + 1) * slots)
        assert experts.layer == layer
        for parameter, grad in zip(experts.home.tensors(), take(gradients, owned).tensors(), strict=True):
            parameter.grad = grad.clone()
    optimizer.step()


def copied(layers, optimizer):
    return {key: value.clone() for key, value in expert_state_dict(layers, optimizer).items()}


def first(group, folder):
    layers, optimizer = build(group, 1)
    step(layers, optimizer, 2)
    step(layers, optimizer, 3)
    save_experts(layers, folder, group=group, optimizer=optimizer)
    return copied(layers, optimizer)


def again(group, source, target, plain):
    """Load into other weights, save, and take one more step: the state as loaded, and after the step."""
    layers, optimizer = build(group, 9)
    objects = [id(p) for x in layers.values() for p in x.parameters()]
    if plain is None:
        load_experts(layers, source, group=group, optimizer=optimizer)
    else:
        load_expert_state_dict(layers, torch.load(plain), optimizer)
    loaded = copied(layers, optimizer)
    if target is not None:
        save_experts(layers, target, group=group, optimizer=optimizer)
    step(layers, optimizer, 4)
    assert objects == [id(p) for x in layers.values() for p in x.parameters()]
    return loaded, copied(layers, optimizer)


def merged(parts):
    """All ranks' entries; each is there once."""
    whole = {key: value for part in parts for key, value in part.items()}
    assert len(whole) == sum(map(len, parts)), "an expert has one owner"
    return whole


def same(got, wanted):
    assert got.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(got[key], wanted[key])] == []


@pytest.mark.dist(4)
def test_a_checkpoint_goes_from_4_ranks_to_2_to_1_to_4_with_the_same_bits(pool, tmp_path):
    folders = [tmp_path / str(number) for number in range(4)]
    wanted = merged(pool.run(first, 4, folders[0]))
    assert len(wanted) == LAYERS * EXPERTS * 4 * 4, "weights, exp_avg, exp_avg_sq and step of four tensors"
    assert wanted["blocks.1.experts.7.gate_up.step"] == 2.0
    after = []
    for ranks, source, target in zip((2, 1, 4), folders, [*folders[1:3], None], strict=False):
        loaded, stepped = map(merged, zip(*pool.run(again, ranks, source, target, None), strict=True))
        same(loaded, wanted)
        after.append(stepped)
    for stepped in after[1:]:
        same(stepped, after[0])
    assert not torch.equal(after[0]["blocks.0.experts.0.down"], wanted["blocks.0.experts.0.down"])


@pytest.mark.dist(4)
def test_a_plain_state_dict_serves_any_number_of_ranks(pool, tmp_path):
    wanted = merged(pool.run(first, 4, tmp_path / "parts"))
    torch.save(wanted, tmp_path / "plain.pt")
    for ranks in (1, 2):
        loaded, _ = map(merged, zip(*pool.run(again, ranks, None, None, tmp_path / "plain.pt"), strict=True))
        same(loaded, wanted)


class Alone:
    """A group of one, for what needs no other rank."""

    rank = staticmethod(lambda: 0)
    size = staticmethod(lambda: 1)


@functools.cache
def saved():
    layers, optimizer = build(Alone, 1)
    step(layers, optimizer, 2)
    return copied(layers, optimizer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("blocks.1.experts.6.down"), "no entry `blocks.1.experts.6.down`"),
        (lambda s: s.pop("blocks.1.experts.6.down.exp_avg"), "no entry `blocks.1.experts.6.down.exp_avg`"),
        (lambda s: s.update({"blocks.1.experts.6.down": torch.zeros(3)}), r"shape \(3,\) in the checkpoint"),
        (lambda s: s.update({"blocks.1.experts.6.down.step": torch.tensor(7.0)}), "different 'step'"),
    ],
    ids=["a missing expert", "missing optimizer state", "another shape", "another step"],
)
def test_what_does_not_fit_is_named_and_nothing_changes(change, words):
    layers, optimizer = build(Alone, 9)
    step(layers, optimizer, 5)
    before, state = copied(layers, optimizer), dict(saved())
    change(state)
    with pytest.raises(TrainingError, match=words):
        load_expert_state_dict(layers, state, optimizer)
    same(copied(layers, optimizer), before)


def test_weights_alone_leave_the_optimizer_as_it_is():
    layers, optimizer = build(Alone, 9)
    step(layers, optimizer, 5)
    kept = {key: value for key, value in copied(layers, optimizer).items() if key.endswith("exp_avg")}
    load_expert_state_dict(layers, saved())
    now = copied(layers, optimizer)
    same({key: now[key] for key in kept}, kept)
    assert torch.equal(now["blocks.0.experts.3.gate_up"], saved()["blocks.0.experts.3.gate_up"])


@pytest.mark.parametrize(("capturable", "place"), [(False, "cpu"), (True, "meta")], ids=["host", "device"])
def test_optimizer_state_comes_to_where_the_parameters_are(capturable, place):
    layers, _ = build(Alone, 9)
    for experts in layers.values():
        experts.to("meta")
    optimizer = torch.optim.AdamW([p for x in layers.values() for p in x.parameters()], capturable=capturable)
    load_expert_state_dict(layers, saved(), optimizer)
    for experts in layers.values():
        kept = optimizer.state[experts.gate_up]
        assert kept["exp_avg"].device.type == kept["exp_avg_sq"].device.type == "meta"
        assert kept["step"].device.type == place


def test_state_before_the_first_step_is_no_state():
    layers, optimizer = build(Alone, 1)
    state = copied(layers, optimizer)
    other, used = build(Alone, 9)
    step(other, used, 5)
    load_expert_state_dict(other, state, used)
    same(copied(other, used), state)


def test_optimizer_state_of_another_shape_is_refused():
    layers, optimizer = build(Alone, 1)
    step(layers, optimizer, 2)
    optimizer.state[layers[PATHS[0]].down]["row_mean"] = torch.zeros(3)
    with pytest.raises(TrainingError, match="keeps 'row_mean', which is neither"):
        expert_state_dict(layers, optimizer)
