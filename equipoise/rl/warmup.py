"""Warm-up: supervised steps on right answers, so that the first rollouts earn something.

Runs on the whole model before experts are shared out: plain data parallel, the same weights on every rank afterwards.
Ranks that share a device would only take turns and sum gradients of a whole model through the host: there the first
rank warms up alone, and the others get its weights at the end.

Knows next-token loss. Does not know routes, plans or GRPO.

Invariants (asserted by the tests):
1. Weights are the same bits on all ranks, whatever the number of warm-up steps and whoever took part.
2. No steps change nothing.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.rl.config import TrainConfig
from equipoise.rl.layout import Layout, sum_over
from equipoise.rl.model import packed_inputs
from equipoise.rl.task import Task
from equipoise.rl.tokens import Tokenizer

_FIRST_QUESTION = 1_000_000
"""Steps of RL count from 0; warm-up asks what they never ask."""

Progress = Callable[[int, float], None]
"""Called with (steps done, loss)."""


def warm_up(
    model: nn.Module, config: TrainConfig, layout: Layout, *, task: Task, tokenizer: Tokenizer, show: Progress
) -> None:
    """Train `model` on right answers. Every rank must call this."""
    if not config.warmup.steps:
        return
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warmup.learning_rate, weight_decay=0.0)
    is_alone = config.model.ranks_per_device > 1
    takes_part = layout.is_first or not is_alone
    size = config.warmup.batch // (1 if is_alone else layout.ranks)
    mine = slice(layout.rank * size, (layout.rank + 1) * size)
    for step in range(config.warmup.steps):
        asked = task.questions(config.warmup.batch, seed=config.seed, step=_FIRST_QUESTION + step)[mine]
        rows = [(tokenizer.encode(q.prompt), [*tokenizer.encode(q.answer), tokenizer.end]) for q in asked]
        total = _backward(model, rows) if takes_part else torch.zeros(2, dtype=torch.float64)
        # Also where others only wait: so that none waits longer than for one step.
        sum_over([total], layout.world)
        if takes_part:
            _reduce(model, None if is_alone else layout, tokens=float(total[1]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.update.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        show(step + 1, float(total[0] / total[1]))
    if is_alone:
        _give_out(model, layout)


def _backward(model: nn.Module, rows: list[tuple[list[int], list[int]]]) -> Tensor:
    """Make the gradient, and return the summed loss and the number of trained tokens."""
    loss, count = _loss(model, rows)
    loss.backward()
    return torch.stack([loss.detach().double(), count.double()]).cpu()


def _loss(model: nn.Module, rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Summed loss of the answers' tokens, and how many they are."""
    device = next(model.parameters()).device
    tokens = [np.array(prompt + answer) for prompt, answer in rows]
    places = [np.arange(len(t) - 1) for t in tokens]
    is_answer = [at >= len(prompt) - 1 for at, (prompt, _) in zip(places, rows, strict=True)]
    input_T, position_T, target_T, answer_T = (
        torch.from_numpy(np.concatenate(parts)).to(device)
        for parts in ([t[:-1] for t in tokens], places, [t[1:] for t in tokens], is_answer)
    )
    logits_TV = model(**packed_inputs(model, input_T, position_T)).logits[0]
    loss = torch.nn.functional.cross_entropy(logits_TV[answer_T].float(), target_T[answer_T], reduction="sum")
    return loss, answer_T.sum()


@torch.no_grad()
def _give_out(model: nn.Module, layout: Layout) -> None:
    """Take over the first rank's weights. Every rank must call this."""
    for parameter in model.parameters():
        # As bytes: not every backend sends every dtype.
        dist.broadcast(parameter.view(-1).view(torch.uint8), group=layout.world, group_src=0)


def _reduce(model: nn.Module, layout: Layout | None, *, tokens: float) -> None:
    """Sum gradients over all ranks, if any others take part, and divide them by the trained tokens.

    An expert that no token of this rank chose takes part with zeros.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if layout is not None:
        sum_over(grads, layout.world)
    for grad in grads:
        grad /= tokens
