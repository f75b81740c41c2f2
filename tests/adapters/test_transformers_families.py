"""Gates of given ids, family by family, against the routers of transformers themselves."""

import pytest
import torch

from equipoise.adapters.transformers_model import FAMILIES, check_router, family_of, inspect
from equipoise.core import AdapterError
from tests.adapters.tiny import HIDDEN, build


def router_of(family, **figures):
    model = build(family, **figures)
    return model.get_submodule(inspect(model).layers[0].router_path)


@pytest.mark.parametrize(
    ("family", "figures"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("olmoe", {"norm_topk_prob": True}),
        ("olmoe", {"norm_topk_prob": False}),
        ("mixtral", {}),
        ("deepseek_v3", {"norm_topk_prob": True}),
        ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.5}),
        ("gpt_oss", {}),
    ],
    ids=str,
)
def test_gates_of_a_routers_own_ids_have_the_bits_of_its_own_gates_and_so_have_their_gradients(family, figures):
    router = router_of(family, **figures)
    hidden_TD = torch.randn((50, HIDDEN), generator=torch.Generator().manual_seed(1))
    direction_TK = torch.randn((50, 3), generator=torch.Generator().manual_seed(2))
    gradients = []
    for is_ours in (False, True):
        logits_TE, gates_TK, ids_TK = router(hidden_TD)
        own_TK = gates_TK.detach()
        if is_ours:
            gates_TK = FAMILIES[family].gates(router, logits_TE, ids_TK)
        assert gates_TK.dtype == own_TK.dtype
        assert torch.equal(gates_TK, own_TK)
        (gates_TK * direction_TK).sum().backward()
        gradients.append(router.weight.grad)
        router.zero_grad()
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_deepseek_chooses_by_its_bias_and_weighs_without_it():
    router = router_of("deepseek_v3")
    hidden_TD = torch.randn((50, HIDDEN), generator=torch.Generator().manual_seed(1))
    logits_TE, _, ids_TK = router(hidden_TD)
    router.e_score_correction_bias.add_(torch.tensor([5.0, 0, 0, 0, 0, 0, 0, 0]))
    _, gates_TK, biased_TK = router(hidden_TD)
    assert not torch.equal(ids_TK.sort(dim=1)[0], biased_TK.sort(dim=1)[0])
    assert torch.equal(FAMILIES["deepseek_v3"].gates(router, logits_TE, biased_TK), gates_TK)


def test_a_router_that_makes_its_gates_otherwise_is_refused_by_path_and_version():
    router = router_of("mixtral")
    check_router(router, FAMILIES["mixtral"], path="a.gate", version="5.17")
    with pytest.raises(AdapterError, match=r"`a\.gate` of transformers 9\.9 makes its gates otherwise"):
        check_router(router, FAMILIES["gpt_oss"], path="a.gate", version="9.9")


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(AdapterError, match=r"model_type 'llama' is not supported; supported: qwen3_moe, olmoe"):
        family_of("llama")
