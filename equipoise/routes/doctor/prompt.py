"""The doctor's check for prompt rows that are not the prompt's, as a prefill/decode router leaves them.

Where one server prefills and another decodes, the decoding one never forwards the prompt: what it returns for those
tokens is whatever its buffer held, zeros or other requests' rows. Two signs, each of a whole prompt:
1. Most rows of the prompt are fillers (zeros, -1, k equal ids) while the rows of generated tokens are routes.
2. Two samples that follow each other have the same prompt and weights, but rows that agree in less than
   `MIN_AGREEMENT` of their experts. The route of a token is a function of the tokens up to it; other batches change
   some of it, never most.

The last token of the prompt is not judged: some decoding servers forward it again. Rows of other samples in this dump
are also found by `stale-rows`, without knowing where the prompt ends.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.core import ModelShape
from equipoise.routes.doctor.reading import Check, Reading

MIN_ROWS = 4
"""Shortest prompt that is judged; a few rows may be fillers or differ for other reasons."""
MIN_AGREEMENT = 0.5
"""Share of equal experts; a garbage prompt of top-8 routes of 128 experts reaches 0.06 by chance."""
MOST_FILLERS = 0.5


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of the sample before."""

    tokens: bytes
    version: str
    title: str
    ids_KTL: np.ndarray


class PromptRows(Check):
    """Rows of the prompt are those of its tokens."""

    name = "prompt-rows"
    unit = "rows"
    needs = "the number of prompt tokens, and prompts of at least 5 tokens"
    advice = (
        "the prompt was not forwarded by the server that returned these rows, as behind a prefill/decode router: let "
        "the router put the prefill server's rows in their place, or ask without prompt rows "
        "(routed_experts_prompt_start, routed_experts_start_len) and accept them as uncovered, or record on servers "
        "that do both"
    )

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.before: _Prompt | None = None

    def look(self, reading: Reading) -> None:
        recording = reading.recording
        if recording.num_prompt is None:
            return
        count = min(recording.num_prompt - 1 - recording.start, reading.num_rows)
        if count < MIN_ROWS:
            return
        # Rows without a route in any layer: missing, k equal ids, or zero throughout.
        filler_T = ~reading.routed_TL.any(axis=1) | (reading.ids_KTL == 0).all(axis=(0, 2))
        generated_T = filler_T[count + 1 : reading.num_judged]
        place = f"{reading.title}, tokens {recording.start} to {recording.start + count - 1}"
        is_empty = filler_T[:count].mean() > MOST_FILLERS and len(generated_T) and generated_T.mean() <= MOST_FILLERS
        wrong = "hold no routes, but the generated tokens do" if is_empty else ""
        if not wrong:
            wrong = self._compare(reading, count)
        self.counts.add(count if wrong else 0, count, lambda: f"{place}: {wrong}")

    def _compare(self, reading: Reading, count: int) -> str:
        """Compare with the prompt before, if it is the same; return what is wrong."""
        recording = reading.recording
        if recording.tokens is None or len(recording.tokens) < recording.start + count:
            return ""
        tokens = np.ascontiguousarray(recording.tokens[: recording.start + count], dtype=np.int64).tobytes()
        here = _Prompt(tokens, recording.weight_version, reading.title, reading.ids_KTL[:, :count])
        before, self.before = self.before, here
        if before is None or (before.tokens, before.version) != (here.tokens, here.version):
            return ""
        if before.ids_KTL.shape != here.ids_KTL.shape or not here.ids_KTL.size:
            return ""
        # The share of experts that the other prompt has in the same row and layer.
        share = float(np.mean([(ids_TL == here.ids_KTL).any(axis=0) for ids_TL in before.ids_KTL]))
        if share >= MIN_AGREEMENT:
            return ""
        # The second of two different answers is named; which of them is garbage cannot be told.
        return f"agree with those of {before.title}, which has the same prompt, in {share:.0%} of their experts"
