"""slime or miles with balanced experts, and a line of log after every balanced window. Nothing of theirs is changed.

    PYTHONPATH=examples python train.py ... --use-rollout-routing-replay \
        --custom-megatron-before-train-step-hook-path slime_hooks.before_train_step \
        --custom-megatron-before-log-prob-hook-path slime_hooks.before_log_prob \
        --distributed-backend cpu:gloo,cuda:nccl --custom-config-path balance.yaml

`balance.yaml` may hold `equipoise: {cluster: h200, slots: 1}`. Without a log, name the hooks of
`equipoise.adapters.slime` in the flags instead of this file's. Our tests call these from a stand-in of the trainers'
loop on four CPU ranks with real Megatron-Core.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from equipoise.adapters.slime import before_log_prob as balance_log_prob
from equipoise.adapters.slime import before_train_step as balance_train_step
from equipoise.torch import megatron

log = logging.getLogger("balance")


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Sequence[nn.Module], optimizer: Any, scheduler: Any
) -> None:
    """Log the window before, and begin the one of this optimizer step."""
    log_window(model, f"before step {step_id} of rollout {rollout_id}")
    balance_train_step(args, rollout_id, step_id, model, optimizer, scheduler)


def before_log_prob(args: Any, model: Sequence[nn.Module], store_prefix: str) -> None:
    """Log the window before, and begin those of a log-prob pass that replays routes."""
    log_window(model, "before log-probs")
    balance_log_prob(args, model, store_prefix)


def log_window(model: Sequence[nn.Module], when: str) -> None:
    """Log what the last window did, on the first rank; before the first window there is nothing to say."""
    handle = megatron.installed(model)
    if handle is None or handle.balancer.report is None or dist.get_rank() != 0:
        return
    done = handle.balancer.report
    log.info(
        "%s: the last window displaced %d experts and had %d replicas; MoE part %.4f s predicted, %.4f s without; "
        "planned in %.2f s, waited %.2f s for it",
        when,
        done.displaced,
        done.replicas,
        done.predicted_s,
        done.static_s,
        done.planning_s,
        done.waited_s,
    )
