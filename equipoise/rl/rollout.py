"""Rollouts: samples with the routes of their tokens, from our own sampling, a folder of recordings, or an HTTP engine.

`Sampler` is a whole copy of the model. One rollout of it:
1. Prompts, each `samples` times, padded on the left, are forwarded once into a KV cache.
2. Token by token, every sample draws from its own softmax until it ends or is long enough.
3. A sample is returned as soon as it ends, with the routes of all tokens that were forwarded: all but its last.

Folder: one file per step, `step-000003.*` for step 3 where files are named so, else the files in order of their names.
    A file holds the samples of all ranks: question after question, `rollout.samples` of each. Token ids must be in it;
    each sample must begin with its question's tokens.
Engine, `rollout.engine`: vllm or sglang, asked by `equipoise.engines`, whose `dialects.py` names every field. It must
    be started with --enable-return-routed-experts (vLLM 0.32: and --enable-scale-out). Every step gives it the current
    weights first (`learner.push_weights`); a sample that it made with others is refused.

A sample whose routes are broken is refused; or, with `rollout.allow_missing_routes`, trained without foresight: its
rows are -1, the model routes them, and coverage counts them as unknown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.adapters.transformers import wrap_routers
from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment
from equipoise.core.errors import TrainingError
from equipoise.engines.client import EngineClient
from equipoise.engines.connection import Patience
from equipoise.engines.dialects import Sampling
from equipoise.engines.weights import WeightOptions, WeightSender
from equipoise.rl.config import RolloutConfig
from equipoise.rl.task import Question, Tokenizer
from equipoise.routes import read_routes
from equipoise.routes.source import SUFFIXES, Source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A prompt and one response to it, with routes. The last token was sampled and never forwarded: it has none."""

    name: str
    """Step, question and number within its group; unique in a run."""
    tokens_T: np.ndarray
    """[T] token ids, prompt and response."""
    num_prompt: int
    ids_TLK: np.ndarray
    """[T - 1, L, K] expert ids, -1 in rows whose route is unknown."""
    experts: int
    """Routed experts of the model."""
    log_probs_T: np.ndarray | None = None
    """[response] log-prob of each response token where the engine returned them."""
    weight_version: str = ""
    count_LE: np.ndarray = field(init=False)
    """[L, E] known rows by expert; the counts of a window are the sum over its samples."""

    def __post_init__(self) -> None:
        if len(self.ids_TLK) != len(self.tokens_T) - 1:
            raise RoutesError(
                f"sample {self.name!r}: {len(self.ids_TLK)} rows for {len(self.tokens_T)} tokens; "
                "there must be one fewer, since the last token is never forwarded"
            )
        if not 0 < self.num_prompt < len(self.tokens_T):
            raise RoutesError(
                f"sample {self.name!r}: {self.num_prompt} of {len(self.tokens_T)} tokens are the prompt's; "
                "a sample needs a prompt and a response"
            )
        object.__setattr__(self, "count_LE", count_ids(self.ids_TLK, self.experts))

    @property
    def response_T(self) -> np.ndarray:
        """Token ids of the response."""
        return self.tokens_T[self.num_prompt :]

    @property
    def known_rows(self) -> int:
        """(token, layer) entries whose route is known."""
        return int((self.ids_TLK >= 0).all(axis=2).sum())


def count_ids(ids_TLK: np.ndarray, experts: int) -> np.ndarray:
    """[L, E] rows by expert, of the tokens whose ids are known."""
    layers = ids_TLK.shape[1]
    known_TL = np.all(ids_TLK >= 0, axis=2)
    place_TLK = ids_TLK + experts * np.arange(layers)[None, :, None]
    return np.bincount(place_TLK[known_TL].reshape(-1), minlength=layers * experts).reshape(layers, experts)


def to_routes(samples: Sequence[Sample], model: ModelShape) -> Routes:
    """Return the samples as `Routes`, the form in which engines record them."""
    found = []
    for sample in samples:
        known_TL: np.ndarray = np.all(sample.ids_TLK >= 0, axis=2)
        segment = Segment(start=0, stop=len(sample.ids_TLK), weight_version=sample.weight_version)
        found.append(
            SampleRoutes(
                name=sample.name,
                ids_TLK=np.where(known_TL[:, :, None], sample.ids_TLK, 0),
                known_TL=None if known_TL.all() else known_TL,
                num_tokens=len(sample.tokens_T),
                tokens_T=sample.tokens_T,
                segments=(segment,) if sample.weight_version else (),
            )
        )
    return Routes.of(found, model=model)


def from_routes(routes: SampleRoutes, model: ModelShape, *, num_prompt: int) -> Sample:
    """Return a sample from a recording with token ids; rows that are missing or unknown become -1."""
    if routes.tokens_T is None:
        raise RoutesError(f"sample {routes.name!r} has no token ids; record them, training needs them")
    # A sample keeps one version; one of several turns or spans has none here, the recording has them all.
    versions = {segment.weight_version for segment in routes.segments}
    return Sample(
        name=routes.name,
        tokens_T=np.asarray(routes.tokens_T),
        num_prompt=num_prompt,
        ids_TLK=routes.token_ids(0, routes.num_tokens - 1),
        experts=model.experts,
        weight_version=versions.pop() if len(versions) == 1 else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The questions that one rank gives to an engine in one step."""

    step: int
    first: int
    """Number of the first question among all ranks' questions."""
    questions: Sequence[Question]
    seed: int
    weight_version: str = ""

    def name(self, question: int, sample: int) -> str:
        """Return the name of a sample, the same in every run."""
        return f"step {self.step} question {self.first + question} sample {sample}"


class Sampler:
    """Our own engine."""

    def __init__(self, model: nn.Module, *, config: RolloutConfig, tokenizer: Tokenizer) -> None:
        """Take a whole model that nobody else uses, see `model.copy_model`."""
        self.model, self._config, self._tokenizer = model, config, tokenizer
        self._routers = wrap_routers(model)

    @torch.no_grad()
    def generate(self, request: Request) -> Iterator[tuple[int, Sample]]:
        """Yield (index of the sample, sample) as samples end; the samples of a question have adjacent indices."""
        prompts = [self._tokenizer.encode(q.prompt) for q in request.questions for _ in range(self._config.samples)]
        device = next(self.model.parameters()).device
        draw = torch.Generator(device=device).manual_seed(request.seed)
        batch = _Batch(prompts, device=device)
        with self._routers.record() as recorded:
            for count in range(1, self._config.max_new_tokens + 1):
                # Step 1: forward the prompts, or each sample's last token, and draw the next one.
                output = self.model(
                    input_ids=batch.input_BT,
                    attention_mask=batch.mask_BT,
                    position_ids=batch.position_BT,
                    past_key_values=batch.cache,
                    use_cache=True,
                )
                batch.cache = output.past_key_values
                log_prob_BV = torch.log_softmax(output.logits[:, -1].float() / self._config.temperature, dim=-1)
                token_B1 = torch.multinomial(log_prob_BV.exp(), 1, generator=draw)
                batch.extend(token_B1[:, 0], log_prob_BV.gather(1, token_B1)[:, 0])
                # Step 2: return the samples that end with it.
                is_last = count == self._config.max_new_tokens
                if ended := batch.end(self._tokenizer.end, is_last=is_last):
                    ids_BTLK = recorded.by_sample(len(prompts))[ended].cpu().numpy()
                    for index, ids_TLK in zip(ended, ids_BTLK, strict=True):
                        yield index, self._sample(batch, index, ids_TLK, request)
                if not batch.is_open:
                    return

    def _sample(self, batch: "_Batch", index: int, ids_TLK: np.ndarray, request: Request) -> Sample:
        tokens = batch.prompts[index] + batch.tokens[index]
        begin = batch.width - len(batch.prompts[index])
        return Sample(
            name=request.name(*divmod(index, self._config.samples)),
            tokens_T=np.array(tokens),
            num_prompt=len(batch.prompts[index]),
            # Rows of left padding are first; the last token was drawn and not forwarded.
            ids_TLK=ids_TLK[begin : begin + len(tokens) - 1].astype(np.int64),
            experts=self._routers.found.shape.experts,
            log_probs_T=np.array(batch.log_probs[index]),
            weight_version=request.weight_version,
        )


class _Batch:
    """Samples that are extended together, token by token."""

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

    def extend(self, token_B: Tensor, log_prob_B: Tensor) -> None:
        """Append one token to every open sample; ended ones are still forwarded, and ignored."""
        tokens, log_probs = token_B.tolist(), log_prob_B.tolist()
        for index in self._open:
            self.tokens[index].append(tokens[index])
            self.log_probs[index].append(log_probs[index])
        self.input_BT = token_B[:, None]
        self.mask_BT = torch.cat([self.mask_BT, torch.ones_like(self.mask_BT[:, :1])], dim=1)
        self.position_BT = self.position_BT[:, -1:] + 1

    def end(self, token: int, *, is_last: bool) -> list[int]:
        """Close the samples that ended with `token`, or all if this was the last one; return their indices."""
        ended = sorted(index for index in self._open if is_last or self.tokens[index][-1] == token)
        self._open.difference_update(ended)
        return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a folder of recordings and an engine share: how records are read and matched to questions."""

    config: RolloutConfig
    model: ModelShape
    tokenizer: Tokenizer

    def read(self, records: Sequence[tuple[str, Any]], *, form: str | None = None) -> list[SampleRoutes]:
        """Read the samples of (place for messages, record or turns of one sample) pairs."""
        found: list[SampleRoutes] = []
        for place, record in records:
            try:
                turns = record if isinstance(record, list) else [record]
                found += read_routes(turns, model=self.model, format=form).samples
            except RoutesError as error:
                if not self.config.allow_missing_routes:
                    raise RoutesError(
                        f"{place}: {error} (or train without foresight: --allow-missing-routes)"
                    ) from error
                # The last turn has the tokens of all turns.
                tokens_only = _without_routes(turns[-1], self.model)
                if not tokens_only:
                    raise RoutesError(
                        f"{place}: {error}; its token ids cannot be read either, so it cannot be used"
                    ) from error
                found += tokens_only
        return found

    def match(self, samples: Sequence[SampleRoutes], request: Request, *, where: str) -> Iterator[tuple[int, Sample]]:
        """Check that samples answer the request's questions, in order, and yield them with their indices.

        Messages say `where` the samples were read.
        """
        wanted = len(request.questions) * self.config.samples
        if len(samples) != wanted:
            raise RoutesError(
                f"{where}: {len(samples)} samples for {len(request.questions)} questions of {self.config.samples} "
                f"samples each; {wanted} are needed"
            )
        for index, routes in enumerate(samples):
            question, number = divmod(index, self.config.samples)
            prompt = self.tokenizer.encode(request.questions[question].prompt)
            tokens = [] if routes.tokens_T is None else routes.tokens_T[: len(prompt)].tolist()
            # Otherwise rewards would judge the answer to another question.
            if tokens != prompt:
                raise RoutesError(
                    f"{where}: sample {routes.name!r} does not begin with question "
                    f"{request.questions[question].prompt!r}; record rollouts of this task, seed and order"
                )
            sample = from_routes(routes, self.model, num_prompt=len(prompt))
            yield index, replace(sample, name=request.name(question, number))


def _without_routes(record: Any, model: ModelShape) -> list[SampleRoutes]:
    """Return the tokens of a record whose routes are broken; nothing where they cannot be read."""
    if not isinstance(record, dict):
        return []
    name = str(record.get("request_id") or record.get("id") or "sample")
    asked = record.get("request", {})
    prompt = (
        record.get("prompt_token_ids") or record.get("input_ids") or asked.get("token_ids") or asked.get("input_ids")
    )
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


def find_rollouts(folder: str, *, steps: int) -> list[Path]:
    """Return the files of a folder of rollouts; raise if there are fewer than `steps`."""
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
        """List the files; each is read in its step."""
        self._folder, self._outside = Path(folder), outside
        self._files = find_rollouts(folder, steps=1)

    def generate(self, request: Request) -> Iterator[tuple[int, Sample]]:
        """Yield (index, sample) of this rank's questions."""
        named = [path for path in self._files if path.name.startswith(f"step-{request.step:06d}")]
        if not named and request.step >= len(self._files):
            raise TrainingError(
                f"{self._folder} holds rollouts of {len(self._files)} steps; step {request.step} has none"
            )
        path = named[0] if named else self._files[request.step]
        records = [(f"{path} {place}".strip(), record) for place, record in Source.of(path).opened().records()]
        samples = self._outside.read(records)
        first, count = request.first, self._outside.config.samples
        share = samples[first * count : (first + len(request.questions)) * count]
        matched = self._outside.match(share, request, where=str(path))
        # Short ones first, the order in which an engine that samples them together would end them.
        yield from sorted(matched, key=lambda found: (len(found[1].response_T), found[0]))


class Engine:
    """An engine that answers over HTTP."""

    def __init__(self, url: str, outside: Outside, *, patience: Patience | None = None) -> None:
        """Use the engine at `url`; nothing is sent yet."""
        self._url, self._outside = url.rstrip("/"), outside
        config = outside.config
        self._client = EngineClient(url, config.engine, patience=patience)
        options = WeightOptions(
            folder=Path(config.weights) if config.weights else None, bucket_bytes=config.bucket_mib * 2**20
        )
        self.weights = WeightSender(url, config.engine, options=options, patience=patience)

    def generate(self, request: Request) -> Iterator[tuple[int, Sample]]:
        """Yield (index, sample) of this rank's questions."""
        config = self._outside.config
        prompts = [self._outside.tokenizer.encode(question.prompt) for question in request.questions]
        sampling = Sampling(
            samples=config.samples,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=request.seed,
        )
        found = self._client.generate(prompts, sampling, require_routes=not config.allow_missing_routes)
        # Question after question, so that a first window can be planned while the last ones are answered.
        for number, turns in enumerate(found):
            where = f"{self._url}, question {request.first + number}"
            samples = self._outside.read([(where, records) for records in turns], form=self._client.form)
            _check_versions(samples, request.weight_version, where=where)
            asked = replace(request, first=request.first + number, questions=request.questions[number : number + 1])
            for index, sample in self._outside.match(samples, asked, where=where):
                yield number * config.samples + index, sample


def _check_versions(samples: Sequence[SampleRoutes], version: str, *, where: str) -> None:
    """Raise if a sample was made with other weights than those the engine was given; old engines do not say."""
    for sample in samples:
        found = sorted({segment.weight_version for segment in sample.segments} - {"", version})
        if version and found:
            raise RoutesError(
                f"{where}: sample {sample.name!r} was made with weights {', '.join(found)}, the engine was given "
                f"{version}; give the address of one engine that nobody else updates, not of a gateway before several"
            )
