"""GRPO: advantages normalised within the samples of one question, and the clipped loss with an optional KL.

Knows numbers per token. Does not know models, ranks or how a gradient is reduced.

Invariants (asserted by the tests):
1. Advantages of a group have mean 0; a group of equal rewards has none.
2. Where the policy is the old one the ratio is 1 and the gradient is that of the policy-gradient loss.
3. The terms of all micro-batches and ranks, each divided by the window's trained tokens, add up to the loss of one
   big batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.rl.config import UpdateConfig

_SMALL = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one micro-batch adds to its window; sums over trained tokens."""

    loss: Tensor
    """Differentiable, already divided by the window's trained tokens."""
    size: Tensor
    """Sum of the absolute terms, divided likewise: how large a loss would be whose terms did not cancel."""
    ratio: Tensor
    clipped: Tensor
    kl_old: Tensor
    """KL from the old policy, by Schulman's k3 estimate."""
    kl_reference: Tensor


def group_advantages(rewards_B: Sequence[float], *, samples: int) -> np.ndarray:
    """[B] rewards less the mean of their group, over its standard deviation.

    Args:
        rewards_B: group after group
        samples: samples per group
    """
    reward_GB = np.asarray(rewards_B, dtype=np.float64).reshape(-1, samples)
    centred_GB = reward_GB - reward_GB.mean(axis=1, keepdims=True)
    spread_G1 = reward_GB.std(axis=1, keepdims=True)
    return np.where(spread_G1 > _SMALL, centred_GB / (spread_G1 + _SMALL), 0.0).reshape(-1)


def token_log_probs(logits_TV: Tensor, target_T: Tensor, *, temperature: float) -> Tensor:
    """[T] log-probability of each target, at the temperature that sampled it."""
    return -torch.nn.functional.cross_entropy(logits_TV.float() / temperature, target_T, reduction="none")


def grpo_terms(
    log_prob_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    config: UpdateConfig,
    tokens: int,
    reference_T: Tensor | None = None,
) -> Terms:
    """The terms of one micro-batch.

    Args:
        log_prob_T: [T] of the trained tokens under the weights being trained
        old_T: [T] the same under the weights that made the samples, by recompute
        advantage_T: [T] of each token's sample
        tokens: trained tokens of the whole window, on all ranks
        reference_T: [T] under the reference, where a KL is asked for
    """
    log_ratio_T = log_prob_T - old_T
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    term_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    kl_T = torch.zeros_like(ratio_T) if reference_T is None else _k3(reference_T - log_prob_T)
    loss_T = term_T + config.kl * kl_T
    with torch.no_grad():
        kl_old_T = _k3(-log_ratio_T)
    return Terms(
        loss=loss_T.sum() / tokens,
        size=loss_T.detach().abs().sum() / tokens,
        ratio=ratio_T.detach().sum(),
        clipped=(ratio_T != clipped_T).sum(),
        kl_old=kl_old_T.sum(),
        kl_reference=kl_T.detach().sum(),
    )


def _k3(log_ratio_T: Tensor) -> Tensor:
    """E[exp(x) - 1 - x] with x = log(q / p) on samples of p is KL(p || q), and never negative."""
    return torch.expm1(log_ratio_T) - log_ratio_T
