"""Write samples to a new native store as they come, and say what was written.

Shared by `ingest` and `generate`. A file which is replaced is lost only to a whole one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core import ModelShape, RoutesError, SampleRoutes
from equipoise.core.whole_file import whole_file
from equipoise.routes.store import StoreWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a store holds."""

    path: Path
    model: ModelShape
    samples: int
    tokens: int

    def words(self) -> str:
        """One line for the terminal."""
        size = self.path.stat().st_size / 1e6
        return f"{self.samples:,} samples, {self.tokens:,} tokens of {self.model.name} -> {self.path} ({size:,.1f} MB)"

    def to_dict(self) -> dict[str, Any]:
        """The same, for JSON."""
        return {
            "out": str(self.path),
            "model": self.model.name,
            "samples": self.samples,
            "tokens": self.tokens,
            "bytes": self.path.stat().st_size,
        }


def write_store(
    path: Path,
    samples: Iterable[SampleRoutes],
    *,
    model: ModelShape,
    layer_numbers: Sequence[int],
    show: Callable[[int, int], None],
) -> Written:
    """Write every sample to a new store; `show` is called with (samples done, 0) after each."""
    count = tokens = 0
    with whole_file(path) as draft, StoreWriter(draft, model=model, layer_numbers=layer_numbers) as writer:
        for count, sample in enumerate(samples, start=1):
            writer.append(sample)
            tokens += sample.num_tokens
            show(count, 0)
        if not count:
            raise RoutesError("the dump holds no sample; is it the right file?")
    return Written(path=path, model=model, samples=count, tokens=tokens)
