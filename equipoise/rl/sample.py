"""`Sample`: one response with the routes that made it; and samples as `Routes` of the core, the form engines record.

Knows tokens and ids. Does not know models or files.

Invariants (asserted by the tests):
1. A sample of T tokens has T - 1 rows: the last token was sampled and never forwarded.
2. `to_routes` gives routes that write, read and diagnose as an engine's recording would.
3. A sample's histogram counts every known row once, and histograms add up.
4. `from_routes` marks unknown rows -1 and never gives them an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.core import ModelShape, Routes, RoutesError, SampleRoutes, Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A prompt and one response to it."""

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
    """[response] log-probability of each response token where the engine said so."""
    weight_version: str = ""
    count_LE: np.ndarray = field(init=False)
    """[L, E] known rows by expert, counted when the sample ends; counts of samples add up to those of a window."""

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
    """The samples' routes, as the rest of the package knows them."""
    return Routes.of([_to_core(sample) for sample in samples], model=model)


def from_routes(routes: SampleRoutes, model: ModelShape, *, num_prompt: int) -> Sample:
    """A sample from a recording that has token ids; rows that are missing or unknown become -1."""
    if routes.tokens_T is None:
        raise RoutesError(f"sample {routes.name!r} has no token ids; record them, training needs them")
    ids_TLK = np.full((routes.num_tokens - 1, model.layers, model.top_k), -1, dtype=np.int64)
    rows = min(routes.num_rows, len(ids_TLK))
    ids_TLK[:rows] = routes.ids_TLK[:rows]
    if routes.known_TL is not None:
        ids_TLK[:rows][~routes.known_TL[:rows]] = -1
    return Sample(
        name=routes.name,
        tokens_T=np.asarray(routes.tokens_T),
        num_prompt=num_prompt,
        ids_TLK=ids_TLK,
        experts=model.experts,
    )


def _to_core(sample: Sample) -> SampleRoutes:
    known_TL: np.ndarray = np.all(sample.ids_TLK >= 0, axis=2)
    rows = len(sample.ids_TLK)
    return SampleRoutes(
        name=sample.name,
        ids_TLK=np.where(known_TL[:, :, None], sample.ids_TLK, 0),
        known_TL=None if known_TL.all() else known_TL,
        num_tokens=len(sample.tokens_T),
        tokens_T=sample.tokens_T,
        segments=(Segment(start=0, stop=rows, weight_version=sample.weight_version),) if sample.weight_version else (),
    )
