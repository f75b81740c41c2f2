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

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.adapters.transformers import wrap_routers
from equipoise.core import ModelShape, RoutesError, SampleRoutes
from equipoise.core.errors import TrainingError
from equipoise.rl.batch import Sample, from_routes
from equipoise.rl.config import RolloutConfig
from equipoise.rl.task import Question, Tokenizer
from equipoise.routes import read_routes
from equipoise.routes.source import SUFFIXES, Source


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


# Rollouts from outside: a folder of recorded ones in any form that `equipoise.routes` reads, or an engine's HTTP face.
#
# Folder: one file per step, `step-000003.*` for step 3 where files are named so, else the files in order of their
# names.
#     A file holds the samples of all ranks: question after question, `rollout.samples` of each. Token ids must be in
# it;
#     each sample must begin with its question's tokens.
# Engine, `rollout.engine`:
#     vllm     POST URL/v1/completions  {prompt: ids, n, max_tokens, temperature, seed, return_token_ids: true}
#              choices[i].token_ids, choices[i].routed_experts (base64 of .npy)
#     sglang   POST URL/generate        {input_ids, sampling_params: {n, max_new_tokens, temperature},
#                                        return_routed_experts: true}
#              per sample: output_ids, meta_info.routed_experts (base64 of int32)
#     The engine must be started with --enable-return-routed-experts. Giving it new weights is left to the caller.
#
# A sample whose routes are broken is refused by name; or, with `rollout.allow_missing_routes`, trained without
# foresight:
# its rows are -1, the model routes them, and coverage says so.
#
# Invariants (asserted by the tests):
# 1. What `--record` wrote trains again to the same losses.
# 2. A broken sample is refused with file and name; allowed, it lowers coverage and nothing else.
# 3. A sample that does not begin with its question is refused: rewards would judge another answer.


_AT_ONCE = 8
"""Requests that one rank has open."""
_TIMEOUT_S = 600.0
_SAID = 300
"""Bytes of an engine's own error that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What both sources share: the model whose routes they record, and how prompts are written."""

    config: RolloutConfig
    model: ModelShape
    tokenizer: Tokenizer

    def read(self, records: Sequence[tuple[str, Any]], *, form: str | None = None) -> list[SampleRoutes]:
        """The samples of some records, each with its place for messages."""
        return [sample for place, record in records for sample in self._read_record(place, record, form)]

    def place(self, samples: Sequence[SampleRoutes], request: Request, *, where: str) -> Iterator[tuple[int, Sample]]:
        """Check that samples answer the request's questions, in order, and hand them out.

        Args:
            where: they come from, for messages
        """
        wanted = len(request.questions) * self.config.samples
        if len(samples) != wanted:
            raise RoutesError(
                f"{where}: {len(samples)} samples for {len(request.questions)} questions of {self.config.samples} "
                f"samples each; {wanted} are needed"
            )
        for place, routes in enumerate(samples):
            question, number = divmod(place, self.config.samples)
            prompt = self.tokenizer.encode(request.questions[question].prompt)
            tokens = [] if routes.tokens_T is None else routes.tokens_T[: len(prompt)].tolist()
            if tokens != prompt:
                raise RoutesError(
                    f"{where}: sample {routes.name!r} does not begin with question "
                    f"{request.questions[question].prompt!r}; record rollouts of this task, seed and order"
                )
            sample = from_routes(routes, self.model, num_prompt=len(prompt))
            yield place, replace(sample, name=request.name(question, number))

    def _read_record(self, place: str, record: Any, form: str | None) -> list[SampleRoutes]:
        try:
            return list(read_routes([record], model=self.model, format=form).samples)
        except RoutesError as error:
            if not self.config.allow_missing_routes:
                raise RoutesError(f"{place}: {error} (or train without foresight: --allow-missing-routes)") from error
            found = _without_routes(record, self.model)
            if not found:
                raise RoutesError(
                    f"{place}: {error}; its token ids cannot be read either, so it cannot be used"
                ) from error
            return found


def find_rollouts(folder: str, *, steps: int) -> list[Path]:
    """The files of a folder of rollouts, which must be enough for so many steps."""
    if not Path(folder).is_dir():
        raise TrainingError(
            f"setting rollout.source is {folder!r}, which is no folder; give a folder of rollouts, or an http URL"
        )
    files = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in SUFFIXES)
    if len(files) < steps:
        raise TrainingError(
            f"setting rollout.source: {folder} holds rollouts of {len(files)} steps (files ending in "
            f"{', '.join(sorted(SUFFIXES))}), {steps} are asked for; record more, or train fewer with --set steps="
        )
    return files


class RecordedRollouts:
    """A folder of recorded rollouts."""

    def __init__(self, folder: str, outside: Outside) -> None:
        """Look what there is; files are read step by step."""
        self._folder, self._outside = Path(folder), outside
        self._files = find_rollouts(folder, steps=1)

    def generate(self, request: Request) -> Iterator[tuple[int, Sample]]:
        """Yield (place, sample) of this rank's questions."""
        path = self._file(request.step)
        records = [(f"{path} {place}".strip(), record) for place, record in Source.of(path).opened().records()]
        samples = self._outside.read(records)
        first, count = request.first, self._outside.config.samples
        share = samples[first * count : (first + len(request.questions)) * count]
        placed = self._outside.place(share, request, where=str(path))
        # Short ones first, as they end in an engine that samples side by side.
        yield from sorted(placed, key=lambda found: (len(found[1].response_T), found[0]))

    def _file(self, step: int) -> Path:
        named = [path for path in self._files if path.name.startswith(f"step-{step:06d}")]
        if named or step < len(self._files):
            return named[0] if named else self._files[step]
        raise TrainingError(f"{self._folder} holds rollouts of {len(self._files)} steps; step {step} has none")


class Engine:
    """An engine that answers over HTTP."""

    def __init__(self, url: str, outside: Outside) -> None:
        """Ask the engine at `url`; nothing is sent yet."""
        self._url, self._outside = url.rstrip("/"), outside

    def generate(self, request: Request) -> Iterator[tuple[int, Sample]]:
        """Yield (place, sample) of this rank's questions."""
        is_vllm = self._outside.config.engine == "vllm"
        ask = self._ask_vllm if is_vllm else self._ask_sglang
        prompts = [self._outside.tokenizer.encode(question.prompt) for question in request.questions]
        seeds = [request.seed + number for number in range(len(prompts))]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            # Question after question, so that a first window can be planned while the last ones are answered.
            for number, answers in enumerate(threads.map(ask, prompts, seeds)):
                where = f"{self._url}, question {request.first + number}"
                samples = self._outside.read(
                    [(where, answer) for answer in answers], form="vllm-http" if is_vllm else "sglang"
                )
                asked = replace(request, first=request.first + number, questions=request.questions[number : number + 1])
                for place, sample in self._outside.place(samples, asked, where=where):
                    yield number * self._outside.config.samples + place, sample

    def _ask_vllm(self, prompt: list[int], seed: int) -> list[Any]:
        config = self._outside.config
        body = {
            "prompt": prompt,
            "n": config.samples,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "seed": seed,
            "return_token_ids": True,
        }
        return [{**one, "request": {"token_ids": prompt}} for one in self._post("/v1/completions", body)]

    def _ask_sglang(self, prompt: list[int], seed: int) -> list[Any]:
        config = self._outside.config
        sampling = {
            "n": config.samples,
            "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "sampling_seed": seed,
        }
        body = {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
        return [{**one, "input_ids": prompt} for one in self._post("/generate", body)]

    def _post(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON object, or the list of them, that the engine answers with."""
        request = urllib.request.Request(
            self._url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                found = json.loads(answer.read())
        except (urllib.error.URLError, ValueError, OSError) as error:
            raise TrainingError(f"the engine at {self._url}{path} gave no usable answer: {_words(error)}") from error
        answers = found if isinstance(found, list) else [found]
        if not all(isinstance(one, dict) for one in answers):
            raise TrainingError(
                f"the engine at {self._url}{path} answered {str(found)[:60]}, which is no JSON object; is it a "
                f"{self._outside.config.engine} server (setting rollout.engine)?"
            )
        return answers


def _words(error: Exception) -> str:
    """What went wrong, with what the engine itself says of it."""
    said = error.read(_SAID).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
    return " ".join(f"{error} {said}".split())


def _without_routes(record: Any, model: ModelShape) -> list[SampleRoutes]:
    """The tokens of a record whose routes are broken; nothing where they cannot be read."""
    if not isinstance(record, dict):
        return []
    name = str(record.get("request_id") or record.get("id") or "sample")
    prompt = record.get("prompt_token_ids") or record.get("input_ids") or record.get("request", {}).get("token_ids")
    choices = record.get("choices") or [record]
    parts = [choice.get("token_ids") or choice.get("output_ids") for choice in choices]
    if prompt is None or not all(isinstance(part, list) and part for part in parts):
        return []
    return [
        SampleRoutes(
            name=name if len(parts) == 1 else f"choice {number} of {name}",
            ids_TLK=np.zeros((0, model.layers, model.top_k), dtype=np.int64),
            num_tokens=len(prompt) + len(part),
            tokens_T=np.array([*prompt, *part]),
        )
        for number, part in enumerate(parts)
    ]
