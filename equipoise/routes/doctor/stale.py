"""The doctor's check for rows that belong to another sample, from a stale or reused capture buffer.

Rows are cut into blocks of `BLOCK` tokens at multiples of `BLOCK`; each block leaves one 8-byte digest. A block whose
rows some other sample already had is *shared*. Sharing is legitimate exactly for a common prefix: the route of a token
is a function of the tokens up to it.
- Token ids known in both samples: a shared block is legitimate if all tokens up to its end are the same, or if the two
  blocks differ in fewer than `MIN_BLOCK` tokens: small models give single tokens equal experts by chance; else stale.
- Rows that moved to other tokens are found if they moved by a multiple of `BLOCK`.
- Token ids unknown: a run of shared blocks from token 0 on, at the same tokens, may be a common prompt and is accepted;
  a shared block after the first difference is stale, and so is a sample whose every row another sample already had.

Turns of one sample are never compared with each other. Blocks without a route are skipped.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from equipoise.core import ModelShape
from equipoise.routes.doctor.reading import Check, Finding, Reading

BLOCK = 8
"""Tokens per digest: any 15 stale rows at their old tokens hold a whole block, and real traces give no false alarm."""
MIN_BLOCK = 4
"""Tokens that must differ, and shortest remainder that is compared: small models repeat single rows by chance."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a block of rows was first seen."""

    sample: int
    title: str
    start: int
    prefix: bytes | None
    """Digest of all tokens up to the block's end; None where tokens are unknown."""
    tokens: tuple[int, ...] = ()
    """The block's tokens, where they are known."""


@dataclass(slots=True)
class _Run:
    """What is known of the sample being examined."""

    sample: int = -1
    is_prefix: bool = True
    """Whether every block so far may be part of a common prompt."""
    prefix_rows: int = 0
    """Rows accepted as a common prompt."""
    origin: str = ""
    title: str = ""
    whole: Any = field(default_factory=lambda: blake2b(digest_size=8))
    """Running digest of all blocks; typed loosely because hashlib names no public type."""


class StaleRows(Check):
    """Rows identical to another sample's where the tokens are not."""

    name = "stale-rows"
    unit = "rows"
    advice = (
        "rows of one sample appear in another: the engine's capture buffer was not refreshed (prefix cache, slot "
        "reuse); upgrade, or turn prefix caching off while recording. Token ids in the dump tell "
        "equal rollouts of one prompt apart"
    )

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.blocks: dict[bytes, _Origin] = {}
        self.wholes: set[bytes] = set()
        self.run = _Run()

    def look(self, reading: Reading) -> None:
        start = reading.recording.start
        if reading.sample != self.run.sample:
            self._close()
            self.run = _Run(sample=reading.sample, title=reading.title)
        elif start == 0:
            # A later turn that repeats its whole history begins with the common prompt again.
            self.run.is_prefix = True
        stop = start + reading.num_rows
        edges = [start, *range(start - start % BLOCK + BLOCK, stop, BLOCK), stop]
        prefixes = _prefixes(reading.recording.tokens, edges[1:])
        routed_T: np.ndarray = np.any(reading.routed_TL, axis=1)
        for a, b, prefix in zip(edges[:-1], edges[1:], prefixes, strict=True):
            if routed_T[a - start : b - start].any():
                tokens = () if prefix is None else tuple(np.asarray(reading.recording.tokens)[a:b].tolist())
                here = _Origin(reading.sample, reading.title, a, prefix, tokens)
                self._look_at_block(here, reading.ids_KTL[:, a - start : b - start])

    def _look_at_block(self, here: _Origin, ids_KTL: np.ndarray) -> None:
        rows = ids_KTL.shape[1]
        digest = blake2b(ids_KTL.tobytes(), digest_size=8).digest()
        self.run.whole.update(digest)
        self.counts.total += rows
        if rows < MIN_BLOCK:
            return
        there = self.blocks.setdefault(digest, here)
        if there is here:
            self.run.is_prefix = False
        if there.sample == here.sample:
            return
        if here.prefix is not None and there.prefix is not None:
            differing = sum(a != b for a, b in zip(here.tokens, there.tokens, strict=True))
            is_chance = here.start == there.start and differing < MIN_BLOCK
            is_stale = here.prefix != there.prefix and not is_chance
        else:
            is_stale = not self.run.is_prefix or here.start != there.start
            if not is_stale:
                self.run.prefix_rows += rows
                self.run.origin = there.title
        if is_stale:
            place = f"{here.title}, tokens {here.start} to {here.start + rows - 1}: the rows of {there.title}"
            self.counts.add(rows, 0, lambda: place)

    def _close(self) -> None:
        """Report a sample of unknown tokens that was accepted as a prefix of others, if another one ended there too."""
        run, whole = self.run, self.run.whole.digest()
        if run.is_prefix and run.prefix_rows and whole in self.wholes:
            self.counts.add(run.prefix_rows, 0, lambda: f"{run.title}: every row is that of {run.origin}")
        self.wholes.add(whole)

    def findings(self) -> tuple[Finding, ...]:
        self._close()
        self.run = _Run()
        return super().findings()


def _prefixes(tokens: np.ndarray | None, stops: list[int]) -> list[bytes | None]:
    """Digest the tokens up to each stop; None if they are unknown."""
    if tokens is None:
        return [None] * len(stops)
    digests: list[bytes | None] = []
    running, done = blake2b(digest_size=8), 0
    for stop in stops:
        running.update(np.ascontiguousarray(tokens[done:stop], dtype=np.int64).tobytes())
        done = stop
        digests.append(running.digest() if stop <= len(tokens) else None)
    return digests
