"""`Tokenizer`: text to token ids and back; one id per printable character, or a checkpoint's own tokenizer.

Knows text. Does not know tasks or models.

Invariants (asserted by the tests):
1. `decode(encode(text)) == text`; a character without an id is refused by name.
2. The end token is one id; decoding stops at it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from equipoise.core.errors import TrainingError

_FIRST, _LAST = 32, 126
"""Printable ASCII."""
_SPECIAL = 2


class Tokenizer(Protocol):
    """What training needs of a tokenizer."""

    end: int
    """The token that ends a response."""
    words: str
    """What it is, for messages."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the end token."""
        ...

    def save(self, folder: Path) -> None:
        """Put it beside a model that is saved, so that the model is read with it again."""
        ...


class CharTokenizer:
    """One id per printable ASCII character; 0 pads, 1 ends."""

    pad, end = 0, 1
    size = _LAST - _FIRST + 1 + _SPECIAL
    words = "the embedded one, an id per printable character, because none lies beside the model"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        for character in text:
            if not _FIRST <= ord(character) <= _LAST:
                raise TrainingError(
                    f"{character!r} in {text[:40]!r} has no token: the embedded tokenizer knows printable ASCII; "
                    "use a model with a tokenizer of its own"
                )
        return [ord(character) - _FIRST + _SPECIAL for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the end token; ids without a character are shown as '?'."""
        kept = list(ids)[: list(ids).index(self.end)] if self.end in ids else list(ids)
        return "".join(chr(i - _SPECIAL + _FIRST) if _SPECIAL <= i < self.size else "?" for i in kept)

    def save(self, folder: Path) -> None:
        """Write nothing: a model without a tokenizer beside it is read with this one."""


class CheckpointTokenizer:
    """The tokenizer that lies beside a HF checkpoint."""

    def __init__(self, path: str) -> None:
        """Load it from the checkpoint's folder; nothing is fetched from anywhere."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise TrainingError(f"no tokenizer can be loaded from {path}: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise TrainingError(f"the tokenizer of {path} has no end token (eos_token); set one")
        self.end, self.words = int(self._tokenizer.eos_token_id), f"the one of {path}"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the end token."""
        kept = list(ids)[: list(ids).index(self.end)] if self.end in ids else list(ids)
        return str(self._tokenizer.decode(kept))

    def save(self, folder: Path) -> None:
        """Put it beside a model that is saved."""
        self._tokenizer.save_pretrained(folder)
