"""Advantages and the loss, against their definitions."""

import numpy as np
import pytest
import torch

from equipoise.rl.config import UpdateConfig
from equipoise.rl.stages import group_advantages, grpo_terms, token_log_probs

CONFIG = UpdateConfig(clip_low=0.2, clip_high=0.3, kl=0.1)


def test_advantages_have_mean_zero_and_unit_spread_in_every_group():
    rewards = np.random.default_rng(0).random((5, 8))
    found = group_advantages(rewards.reshape(-1), samples=8).reshape(5, 8)
    np.testing.assert_allclose(found.mean(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(found.std(axis=1), 1, rtol=1e-4)


def test_a_group_of_equal_rewards_has_no_advantage():
    assert not group_advantages([0.3] * 4 + [1.0] * 4, samples=4).any()


def draw(seed, count=200):
    rng = torch.Generator().manual_seed(seed)
    log_prob, old, reference = (-torch.rand(count, generator=rng) * 3 for _ in range(3))
    return log_prob.requires_grad_(), old, torch.randn(count, generator=rng), reference


def test_the_loss_is_the_clipped_ratio_and_the_kl():
    log_prob, old, advantage, reference = draw(1)
    terms = grpo_terms(log_prob, old, advantage, config=CONFIG, tokens=200, reference_T=reference)
    wanted, clipped = 0.0, 0
    for new, before, a, ref in zip(
        log_prob.tolist(), old.tolist(), advantage.tolist(), reference.tolist(), strict=True
    ):
        ratio = np.exp(new - before)
        kept = min(max(ratio, 0.8), 1.3)
        clipped += kept != ratio
        wanted += -min(ratio * a, kept * a) + 0.1 * (np.exp(ref - new) - (ref - new) - 1)
    assert float(terms.loss.detach()) == pytest.approx(wanted / 200, rel=1e-5)
    assert int(terms.clipped) == clipped > 0
    assert float(terms.kl_reference) > 0 and float(terms.kl_old) > 0


def test_at_the_old_policy_the_ratio_is_one_and_the_gradient_is_the_advantage():
    log_prob, _, advantage, _ = draw(2)
    terms = grpo_terms(log_prob, log_prob.detach().clone(), advantage, config=UpdateConfig(), tokens=50)
    terms.loss.backward()
    torch.testing.assert_close(log_prob.grad, -advantage / 50)
    assert float(terms.ratio) == len(advantage) and int(terms.clipped) == 0 and float(terms.kl_old) == 0


def test_the_terms_of_parts_add_up_to_the_whole():
    log_prob, old, advantage, reference = draw(3)
    whole = grpo_terms(log_prob, old, advantage, config=CONFIG, tokens=200, reference_T=reference)
    parts = [
        grpo_terms(log_prob[cut], old[cut], advantage[cut], config=CONFIG, tokens=200, reference_T=reference[cut])
        for cut in (slice(0, 17), slice(17, 17), slice(17, 200))
    ]
    assert float(sum(part.loss.detach() for part in parts)) == pytest.approx(float(whole.loss.detach()), rel=1e-6)


def test_log_probabilities_are_those_of_the_tempered_softmax():
    logits, target = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)), torch.arange(7)
    found = token_log_probs(logits, target, temperature=0.5)
    torch.testing.assert_close(found.exp(), torch.softmax(logits / 0.5, dim=1)[torch.arange(7), target])
