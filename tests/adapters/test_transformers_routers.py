"""Record and replay on whole models: exact, live gates, KV cache, gradient checkpointing, nothing left behind."""

import pytest
import torch

from equipoise.adapters import transformers as adapter
from equipoise.core import AdapterError, RoutesError
from tests.adapters import work
from tests.adapters.tiny import FAMILIES, TOP_K, build


def outcome(model, turn):
    """Logits and all gradients of one forward."""
    with turn:
        _, logits = work.forward(model, 0, 0)
    work.loss_of(logits).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [logits.detach(), *grads]


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_what_the_model_chooses_itself_changes_no_bit(family):
    model = build(family)
    routers = adapter.wrap_routers(model)
    with torch.no_grad(), routers.record() as recorded:
        work.forward(model, 0, 0)
    routed, replayed = outcome(model, routers.record()), outcome(model, routers.replay(recorded.ids_LTK))
    assert len(routed) == len(replayed)
    assert all(map(torch.equal, routed, replayed))
    assert routers.counters.differing_rows == 0
    assert routers.counters.given_rows == routers.counters.used_rows == recorded.ids_LTK.numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_stay_live_under_foreign_routes(family):
    """The router learns: its gradient is that of the gates of the given experts."""
    model = build(family)
    foreign = work.other_routes(model, 0)[0]
    before = outcome(model, (routers := adapter.wrap_routers(model)).replay(foreign))
    router = model.get_submodule(routers.found.layers[-1].router_path)
    with routers.replay(foreign):
        work.loss_of(work.forward(model, 0, 0)[1]).backward()
    assert router.weight.grad.abs().max() > 0
    with torch.no_grad():
        router.weight += 0.1
        router.weight[0] += 1.0
    after = outcome(model, routers.replay(foreign))
    assert not torch.equal(before[0], after[0])
    assert routers.counters.differing_share > 0.1


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_layer_computed_again_uses_the_routes_of_its_own_turn(use_reentrant):
    model = build("olmoe").train()
    routers, routes = adapter.wrap_routers(model), work.other_routes(model, 0)
    plain = [outcome(model, routers.replay(ids)) for ids in routes]
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    counted = routers.counters.given_rows
    passes = []
    for ids in routes:
        with routers.replay(ids):
            passes.append(work.forward(model, 0, 0)[1])
    for logits, expected in zip(passes, plain, strict=True):
        work.loss_of(logits).backward()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], expected[1:]))
        model.zero_grad()
    assert routers.counters.given_rows == 2 * counted, "what is computed again is not counted again"


def test_generation_with_a_cache_records_one_row_per_forwarded_token():
    model, prompt = build("qwen3_moe").eval(), work.tokens_of(0, 0)
    with torch.no_grad(), adapter.record(model) as recorded:
        tokens = model.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    ids_BTLK = recorded.by_sample(len(prompt))
    assert recorded.num_calls == 5
    assert ids_BTLK.shape == (2, tokens.shape[1] - 1, 2, TOP_K), "the last token is never forwarded"
    with torch.no_grad(), adapter.record(model) as again:
        model(input_ids=tokens[:, :-1], use_cache=False)
    agreeing = (ids_BTLK.sort()[0] == again.by_sample(len(prompt)).sort()[0]).float().mean()
    assert agreeing > 0.98, "with and without cache the model chooses alike, up to rounding"


def test_tokens_without_a_route_are_routed_by_the_model_itself():
    model = build("mixtral")
    own = work.recorded_routes(model, 0)[0]
    partial = (own + 1) % 8
    partial[0, ::2] = -1
    partial[1] = -1
    with torch.no_grad(), adapter.wrap_routers(model).replay(partial, record=True) as recorded:
        work.forward(model, 0, 0)
    assert torch.equal(recorded.ids_LTK[0, 1::2], partial[0, 1::2])
    assert torch.equal(recorded.ids_LTK[0, ::2], own[0, ::2])
    assert (recorded.ids_LTK >= 0).all()


def test_ids_that_do_not_fit_are_refused_by_layer():
    model = build("mixtral")
    routers, ids_LTK = adapter.wrap_routers(model), work.recorded_routes(model, 0)[0]
    for bad, words in (
        (ids_LTK[:1], "ids were given for 1 MoE layers; 'mixtral' has 2"),
        (ids_LTK[:, :, :2], r"layer index 0: ids have shape \[24, 2\]"),
        (ids_LTK + 8, "layer index 0: expert 15 does not exist; ids are 0..7"),
        (ids_LTK.float(), "dtype torch.float32; give integers"),
    ):
        with pytest.raises(RoutesError, match=words), routers.replay(bad):
            pass
    with (
        pytest.raises(RoutesError, match=r"ids were given for \[23, 3\].* saw \[24, 3\]"),
        routers.replay(ids_LTK[:, 1:]),
    ):
        work.forward(model, 0, 0)
    with routers.record(), pytest.raises(AdapterError, match="already"), routers.record():
        pass


def test_nothing_is_left_behind_and_other_models_of_the_configuration_are_untouched():
    model = build("deepseek_v3")
    before = work.footprint(model)
    routers = adapter.wrap_routers(model)
    assert work.footprint(model)[0] != before[0]
    routers.unwrap()
    routers.unwrap()
    with adapter.record(model):
        pass
    assert work.footprint(model) == before


def test_short_replay_is_refused_where_backward_would_need_the_routes_again():
    model = build("mixtral").train()
    routes = work.other_routes(model, 0)[0]
    with torch.no_grad(), adapter.replay(model, routes) as counters:
        work.forward(model, 0, 0)
    assert counters.used_rows == counters.given_rows == routes.numel()
    model.gradient_checkpointing_enable()
    with pytest.raises(AdapterError, match="use wrap_routers"), adapter.replay(model, routes):
        pass
