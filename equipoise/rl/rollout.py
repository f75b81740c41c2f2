"""`Sampler`: a whole copy of the model that answers questions, as a rollout engine would, and records its routes.

It runs no collective and knows no experts' places: what it sees of training are canonical weights.

Steps of one rollout:
1. Prompts, each `samples` times, padded on the left, are forwarded once into a KV cache.
2. Token by token, every sample draws from its own softmax until it ends or is long enough.
3. A sample is handed out as soon as it ends, with the routes of all tokens that were forwarded: all but its last.

Invariants (asserted by the tests):
1. The same weights, questions and seed give the same samples and routes.
2. Recorded rows are those of the sample's own tokens: a forward of the sample alone chooses the same experts.
3. Samples end with the end token, or have `max_new_tokens`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.adapters.transformers import wrap_routers
from equipoise.rl.config import RolloutConfig
from equipoise.rl.sample import Sample
from equipoise.rl.task import Question
from equipoise.rl.tokens import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one rank asks of an engine in one step."""

    step: int
    first: int
    """Number of the first question among all ranks' questions."""
    questions: Sequence[Question]
    seed: int
    weight_version: str = ""

    def name(self, question: int, sample: int) -> str:
        """What a sample is called, the same in every run."""
        return f"step {self.step} question {self.first + question} sample {sample}"


class Sampler:
    """Our own engine."""

    def __init__(self, model: nn.Module, *, config: RolloutConfig, tokenizer: Tokenizer) -> None:
        """Take a whole model of its own, see `model.copy_model`."""
        self.model, self._config, self._tokenizer = model, config, tokenizer
        self._routers = wrap_routers(model)

    @torch.no_grad()
    def generate(self, request: Request) -> Iterator[tuple[int, Sample]]:
        """Yield (place in the list of samples, sample) as samples end; a question's samples stand side by side."""
        prompts = [self._tokenizer.encode(q.prompt) for q in request.questions for _ in range(self._config.samples)]
        device = next(self.model.parameters()).device
        draw = torch.Generator(device=device).manual_seed(request.seed)
        batch = _Batch(prompts, device=device)
        with self._routers.record() as recorded:
            for count in range(1, self._config.max_new_tokens + 1):
                batch.extend(self._draw(batch, draw))
                is_last = count == self._config.max_new_tokens
                if ended := batch.end(self._tokenizer.end, is_last=is_last):
                    ids_BTLK = recorded.by_sample(len(prompts))[ended].cpu().numpy()
                    for place, ids_TLK in zip(ended, ids_BTLK, strict=True):
                        yield place, self._sample(batch, place, ids_TLK, request)
                if not batch.is_open:
                    return

    def _draw(self, batch: "_Batch", draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """[B] the next token of every sample, and its log-probability."""
        output = self.model(
            input_ids=batch.input_BT,
            attention_mask=batch.mask_BT,
            position_ids=batch.position_BT,
            past_key_values=batch.cache,
            use_cache=True,
        )
        batch.cache = output.past_key_values
        log_prob_BV = torch.log_softmax(output.logits[:, -1].float() / self._config.temperature, dim=-1)
        token_B = torch.multinomial(log_prob_BV.exp(), 1, generator=draw)
        return token_B[:, 0], log_prob_BV.gather(1, token_B)[:, 0]

    def _sample(self, batch: "_Batch", place: int, ids_TLK: np.ndarray, request: Request) -> Sample:
        tokens = batch.prompts[place] + batch.tokens[place]
        question, sample = divmod(place, self._config.samples)
        begin = batch.width - len(batch.prompts[place])
        return Sample(
            name=request.name(question, sample),
            tokens_T=np.array(tokens),
            num_prompt=len(batch.prompts[place]),
            # Rows of left padding come first; the last token was drawn and not forwarded.
            ids_TLK=ids_TLK[begin : begin + len(tokens) - 1].astype(np.int64),
            experts=self._routers.found.experts,
            log_probs_T=np.array(batch.log_probs[place]),
            weight_version=request.weight_version,
        )


class _Batch:
    """Samples that grow side by side."""

    def __init__(self, prompts: list[list[int]], *, device: torch.device) -> None:
        self.prompts, self.width = prompts, max(map(len, prompts))
        padding = [self.width - len(prompt) for prompt in prompts]
        rows = [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        self.input_BT = torch.tensor(rows, device=device)
        self.mask_BT = (torch.arange(self.width) >= torch.tensor(padding)[:, None]).long().to(device)
        self.position_BT = (self.mask_BT.cumsum(1) - 1).clamp(min=0)
        self.cache = None
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.log_probs: list[list[float]] = [[] for _ in prompts]
        self._open = set(range(len(prompts)))

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def extend(self, drawn: tuple[Tensor, Tensor]) -> None:
        """Append one token to every open sample; ended ones are forwarded along and ignored."""
        tokens, log_probs = (tensor_B.tolist() for tensor_B in drawn)
        for place in self._open:
            self.tokens[place].append(tokens[place])
            self.log_probs[place].append(log_probs[place])
        self.input_BT = drawn[0][:, None]
        self.mask_BT = torch.cat([self.mask_BT, torch.ones_like(self.mask_BT[:, :1])], dim=1)
        self.position_BT = self.position_BT[:, -1:] + 1

    def end(self, token: int, *, is_last: bool) -> list[int]:
        """Close the samples that ended with `token`, or all where this was the last one; return their places."""
        ended = sorted(place for place in self._open if is_last or self.tokens[place][-1] == token)
        self._open.difference_update(ended)
        return ended
