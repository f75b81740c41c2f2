"""Questions whose answers can be checked, the reward of an answer, and the tokenizers that turn text into ids.

Embedded domains; their questions look different, so that each has hot experts of its own:
    add      12+7=        19
    sub      31-7=        24
    reverse  rev 4172=    2714
    largest  max 417=     7
Or a JSONL file, one {"prompt": text, "answer": text} per line, in any order.

The questions of a step depend on seed and step alone, so that a resumed run asks what an uninterrupted one asks.
"""

import importlib
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.errors import TrainingError
from equipoise.rl.config import TaskConfig

_FIRST, _LAST = 32, 126
"""Printable ASCII."""
_SPECIAL = 2


class CharTokenizer:
    """One id per printable ASCII character; 0 pads, 1 ends."""

    pad, end = 0, 1
    size = _LAST - _FIRST + 1 + _SPECIAL
    description = "the embedded one, an id per printable character, because none lies beside the model"

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, nothing added."""
        for character in text:
            if not _FIRST <= ord(character) <= _LAST:
                raise TrainingError(
                    f"{character!r} in {text[:40]!r} has no token: the embedded tokenizer knows printable ASCII; "
                    "use a model with a tokenizer of its own"
                )
        return [ord(character) - _FIRST + _SPECIAL for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, up to the end token; ids without a character become '?'."""
        kept = list(ids)[: list(ids).index(self.end)] if self.end in ids else list(ids)
        return "".join(chr(i - _SPECIAL + _FIRST) if _SPECIAL <= i < self.size else "?" for i in kept)

    def save(self, folder: Path) -> None:
        """Write nothing: a model without a tokenizer beside it is loaded with this one."""


class CheckpointTokenizer:
    """The tokenizer that lies beside a HF checkpoint."""

    def __init__(self, path: str) -> None:
        """Load the tokenizer from the checkpoint's folder; nothing is downloaded."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise TrainingError(f"no tokenizer can be loaded from {path}: {error}") from error
        if self._tokenizer.eos_token_id is None:
            raise TrainingError(f"the tokenizer of {path} has no end token (eos_token); set one")
        self.end, self.description = int(self._tokenizer.eos_token_id), f"the one of {path}"

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, up to the end token."""
        kept = list(ids)[: list(ids).index(self.end)] if self.end in ids else list(ids)
        return str(self._tokenizer.decode(kept))

    def save(self, folder: Path) -> None:
        """Save the tokenizer beside a saved model, so that the model is loaded with it again."""
        self._tokenizer.save_pretrained(folder)


Tokenizer = CharTokenizer | CheckpointTokenizer


_DOMAINS = ("add", "sub", "reverse", "largest")
Reward = Callable[[str, str, str], float]
"""(prompt, response, answer) to a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and its right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The embedded questions; domains alternate."""

    domains: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.domains or not set(self.domains) <= set(_DOMAINS):
            raise TrainingError(f"setting task.domains is {list(self.domains)}; known: {', '.join(_DOMAINS)}")

    def questions(self, count: int, *, seed: int, step: int) -> list[Question]:
        """Return the questions of one step, domain by domain."""
        rng = np.random.default_rng([seed, step])
        return [_ask(self.domains[i % len(self.domains)], rng) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Questions of a file, shuffled in every pass."""

    listed: tuple[Question, ...]

    @classmethod
    def read(cls, path: str | Path) -> "Dataset":
        """Read a JSONL file of prompts and answers."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise TrainingError(
                f"setting task.data is {str(path)!r}, which cannot be read ({error.strerror}); give a JSONL file of "
                '{"prompt": text, "answer": text}'
            ) from error
        except UnicodeDecodeError as error:
            raise TrainingError(f"setting task.data is {str(path)!r}, which is no text in UTF-8: {error}") from error
        found = tuple(_question(line, f"{path} line {n}") for n, line in enumerate(lines, start=1) if line.strip())
        if not found:
            raise TrainingError(f"setting task.data is {str(path)!r}, which holds no question; every line is one")
        return cls(found)

    def questions(self, count: int, *, seed: int, step: int) -> list[Question]:
        """Return the next `count` questions of endless passes over the file; every pass is shuffled."""
        size = len(self.listed)
        places = range(step * count, (step + 1) * count)
        orders = {n: np.random.default_rng([seed, n]).permutation(size) for n in {p // size for p in places}}
        return [self.listed[int(orders[p // size][p % size])] for p in places]


TaskSource = Arithmetic | Dataset


def open_task(config: TaskConfig) -> TaskSource:
    """Return the questions that the settings name."""
    return Dataset.read(config.data) if config.data else Arithmetic(config.domains)


def find_reward(name: str) -> Reward:
    """Import `module:function`, from the current folder too, or return `exact_reward` for an empty name."""
    if not name:
        return exact_reward
    module, _, function = name.partition(":")
    if not module or not function:
        raise TrainingError(f"reward {name!r} is not of the form module:function, such as judges:exact for judges.py")
    if str(Path.cwd()) not in sys.path:
        # Python searches the folder of the command itself, not the one where it is called.
        sys.path.append(str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the module is the user's: it may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise TrainingError(f"reward {name!r} cannot be imported as module:function ({reason})") from error

    expected = "give a function of (prompt, response, answer)"
    if not callable(found):
        raise TrainingError(f"reward {name!r} is a {type(found).__name__}; {expected}")
    try:
        signature = inspect.signature(found)
    except ValueError:
        # Some functions written in C have no signature that can be read; a wrong one fails when it is called.
        return NamedReward(name, found)
    try:
        signature.bind("prompt", "response", "answer")
    except TypeError as error:
        raise TrainingError(f"reward {name!r} takes {signature} ({error}); {expected}") from error
    return NamedReward(name, found)


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A user's reward; its errors name the function and the sample."""

    name: str
    function: Reward

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """Return the reward of a response, a finite number."""
        where = f"reward {self.name!r} of prompt {prompt[:40]!r}, response {response[:40]!r}"
        try:
            given = self.function(prompt, response, answer)
        except Exception as error:  # the function is the user's: it may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise TrainingError(f"{where} fails with {reason} ({place.filename}:{place.lineno}); fix it") from error
        try:
            worth = float(given)
        except (TypeError, ValueError) as error:
            raise TrainingError(f"{where} is {given!r}, a {type(given).__name__}; give a number") from error
        if not math.isfinite(worth):
            raise TrainingError(f"{where} is {worth}; give a finite number, else nothing can be learnt from its group")
        return worth


def exact_reward(prompt: str, response: str, answer: str) -> float:
    """Return 1 for the answer, 0 for anything else."""
    return float(response == answer)


def _ask(domain: str, rng: np.random.Generator) -> Question:
    """Draw one embedded question."""
    if domain in ("add", "sub"):
        a, b = int(rng.integers(0, 20) if domain == "add" else rng.integers(10, 30)), int(rng.integers(0, 10))
        prompt, answer = (f"{a}+{b}=", str(a + b)) if domain == "add" else (f"{a}-{b}=", str(a - b))
    else:
        digits = "".join(str(d) for d in rng.integers(0, 10, size=rng.integers(2, 5)))
        prompt, answer = (f"rev {digits}=", digits[::-1]) if domain == "reverse" else (f"max {digits}=", max(digits))
    return Question(prompt=prompt, answer=answer)


def _question(line: str, place: str) -> Question:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{place} is not JSON: {error}") from error
    if not isinstance(record, dict) or not all(isinstance(record.get(k), str) for k in ("prompt", "answer")):
        raise TrainingError(f'{place}: expected {{"prompt": text, "answer": text}}, got {line.strip()[:60]}')
    return Question(prompt=record["prompt"], answer=record["answer"])
