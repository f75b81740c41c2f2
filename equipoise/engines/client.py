"""Samples with routes from an engine that answers over HTTP.

1. One request per prompt asks for all its samples; at most `Patience.open_requests` are open or not yet taken.
2. A sample that the engine cut off (an abort, as before a weight update) is continued from its tokens. Routes are asked
   for from the first token that has none yet, so the turns follow each other, each with its own weight versions.
   A turn that was cut off before its routes were returned is dropped: the next one returns those routes too.
3. A sample that ended without routes is refused with the reason, or returned without them.

What is returned can be read by `read_routes` at once, or written to a `.jsonl` file, one record per line.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from equipoise.core.errors import RoutesError, TrainingError
from equipoise.engines.connection import Connection, Patience
from equipoise.engines.dialects import DIALECTS, EngineName, Sampling

Turns = list[dict[str, Any]]
"""Records of one sample, one per request that it took, in order."""


class EngineClient:
    """A vLLM or SGLang server."""

    def __init__(self, url: str, engine: EngineName, *, patience: Patience | None = None) -> None:
        """Use the server at `url`; nothing is sent yet."""
        self._engine, self._dialect = engine, DIALECTS[engine]
        self._connection = Connection(url, patience or Patience())

    @property
    def form(self) -> str:
        """Format of `equipoise.routes` that reads the records."""
        return self._dialect.form

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, *, require_routes: bool = True
    ) -> Iterator[list[Turns]]:
        """Yield the samples of each prompt, prompt after prompt.

        Args:
            prompts: token ids of each
            sampling: how they are drawn; prompt i is drawn with `seed + i`
            require_routes: raise where a sample has none; otherwise its record is returned without
        """
        patience = self._connection.patience
        waiting: deque[Future[list[Turns]]] = deque()
        with ThreadPoolExecutor(patience.open_requests) as threads:
            try:
                for number, prompt in enumerate(prompts):
                    # A caller that takes its time must not make answers pile up here.
                    if len(waiting) == patience.open_requests:
                        yield waiting.popleft().result()
                    one = replace(sampling, seed=sampling.seed + number)
                    waiting.append(threads.submit(self._sample, prompt, one, require_routes))
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()

    def _sample(self, prompt: list[int], sampling: Sampling, require_routes: bool) -> list[Turns]:
        """Return the turns of each sample of one prompt."""
        found = [self._continue(prompt, record, sampling) for record in self._ask(prompt, sampling)]
        for turns in found:
            if require_routes and self._dialect.routes(turns[-1]) is None:
                reason = self._dialect.explain(turns[-1], self._connection.get)
                raise RoutesError(f"{self._connection.url}: {reason}")
        return found

    def _continue(self, prompt: list[int], record: dict[str, Any], sampling: Sampling) -> Turns:
        """Return the turns of a sample; ask for more until it ends."""
        dialect, patience, first = self._dialect, self._connection.patience, record
        turns: Turns = []
        tokens, start, fruitless = list(prompt), sampling.start, 0
        while True:
            new = dialect.tokens(record)
            # A new list: the one before is kept in a record's request.
            tokens = tokens + new
            left = len(prompt) + sampling.max_new_tokens - len(tokens)
            is_last = left <= 0 or not dialect.is_cut(record)
            if is_last or (dialect.routes(record) is not None and new):
                turns.append(dialect.rename(record, first))
                # The last token was sampled and not forwarded: its row comes with the next turn.
                start = len(tokens) - 1
            if is_last:
                return turns
            fruitless = 0 if new else fruitless + 1
            if fruitless == patience.attempts:
                raise TrainingError(
                    f"the engine at {self._connection.url} aborted a request {fruitless} times without a new token; "
                    "is it paused for a weight update that does not end?"
                )
            self._connection.pause(patience.wait(fruitless))
            # Another seed: the same one would draw the tokens of the first turn's positions again.
            seed = sampling.seed + sampling.samples * (len(turns) + fruitless + 1)
            (record,) = self._ask(
                tokens,
                Sampling(samples=1, max_new_tokens=left, temperature=sampling.temperature, seed=seed, start=start),
            )

    def _ask(self, prompt: list[int], sampling: Sampling) -> list[dict[str, Any]]:
        body = self._dialect.ask(prompt, sampling)
        answer = self._connection.post(self._dialect.path, body)
        records = self._dialect.split(answer, body)
        where = f"the engine at {self._connection.url}{self._dialect.path}"
        if records is None:
            raise TrainingError(
                f"{where} answered {str(answer)[:60]}, which holds no samples; is it a {self._engine} server "
                "(setting rollout.engine)?"
            )
        if len(records) != sampling.samples:
            raise TrainingError(f"{where} returned {len(records)} samples, {sampling.samples} were asked for")
        return records
