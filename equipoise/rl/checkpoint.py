"""Checkpoints: whole or not there. Canonical weights, every rank's optimizer and random state, and the next step."""

import fcntl
import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from equipoise.core.errors import TrainingError
from equipoise.rl.layout import Layout, gather_objects

# Checkpoints: whole or not there. Canonical weights, every rank's optimizer and random state, and the next step.
#
# A checkpoint is a folder `step-000010`, the state before step 10:
#     model/            what `save_pretrained` of the whole model writes, in canonical order; also usable with --model
#     reference.pt      weights of the KL's reference, where there is one
#     rank-00000.pt     per rank: optimizer state by parameter name, random state
#     meta.json         format, step, seed, ranks, EP size, mode
#
# Steps of a write:
# 1. All ranks write into `.step-000010.partial`; every file is flushed to disk.
# 2. All ranks agree that all went well; one that failed stops the run on every rank, and the partial folder goes.
# 3. The first rank renames the folder, which is the moment from which on it exists, and drops the oldest ones.
#
# Invariants (asserted by the tests):
# 1. Killed or out of disk at any point of a write, the newest checkpoint before it is still the newest, and whole.
# 2. A run that is resumed has the bits of one that was not interrupted: weights, optimizer, samples, metrics.
# 3. A checkpoint of other ranks, EP size, mode or seed is refused by name, and so is one that is damaged.


FORMAT = "equipoise-checkpoint-1"
_NAME = "step-{:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What training goes on with, beside the weights."""

    step: int
    """The next step to train."""
    optimizer: Mapping[str, Any]
    """State of this rank's parameters, by name."""
    reference: Mapping[str, Tensor] | None
    random: Tensor


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, layout: Layout, *, facts: Mapping[str, Any], keep: int) -> None:
        """Keep checkpoints in `folder`.

        Args:
            facts: what a checkpoint must have in common with the run that goes on from it
            keep: newest ones that stay
        """
        self._folder, self._layout, self._facts, self._keep = folder, layout, dict(facts), keep

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        return newest_checkpoint(self._folder)

    def save(self, state: State, *, save_model: Callable[[Path], None]) -> Path:
        """Write a checkpoint. Every rank must call this.

        Args:
            state: this rank's
            save_model: writes the whole model into a folder; called on the first rank
        """
        target = self._folder / _NAME.format(state.step)
        partial = self._folder / f".{target.name}.partial"
        trouble = self._attempt(lambda: self._prepare(partial))
        trouble = trouble or self._attempt(lambda: self._write(partial, state, save_model))
        if trouble:
            if self._layout.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            newest = self.newest()
            raise TrainingError(
                f"checkpoint {target} could not be written: {trouble}; "
                + (f"{newest} is still valid, resume from it" if newest else "there is no earlier one")
            )
        trouble = self._attempt(lambda: self._finish(partial, target))
        if trouble:
            raise TrainingError(f"checkpoint {target} could not be put in place: {trouble}")
        return target

    def load(self, path: Path) -> State:
        """Read this rank's part of a checkpoint; its weights are in `model/`."""
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            for name, value in {"format": FORMAT, **self._facts}.items():
                if meta.get(name) != value:
                    raise TrainingError(f"checkpoint {path}: {name} is {meta.get(name)!r}, this run has {value!r}")
            own = torch.load(path / self._own_name, weights_only=True)
            reference = path / "reference.pt"
            return State(
                step=meta["step"],
                optimizer=own["optimizer"],
                random=own["random"],
                reference=torch.load(reference, weights_only=True) if reference.exists() else None,
            )
        except (OSError, EOFError, json.JSONDecodeError, UnpicklingError, RuntimeError) as error:
            first = str(error).partition(". ")[0] or "it ends too early"
            raise TrainingError(
                f"checkpoint {path} is damaged ({first}); remove its folder to go on from the one before"
            ) from error

    @property
    def _own_name(self) -> str:
        return f"rank-{self._layout.rank:05d}.pt"

    def _prepare(self, partial: Path) -> None:
        if self._layout.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def _write(self, partial: Path, state: State, save_model: Callable[[Path], None]) -> None:
        write_torch(partial / self._own_name, {"optimizer": dict(state.optimizer), "random": state.random})
        if self._layout.is_first:
            save_model(partial / "model")
            if state.reference is not None:
                write_torch(partial / "reference.pt", dict(state.reference))
            meta = {"format": FORMAT, "step": state.step, **self._facts}
            (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
            for file in (partial / "meta.json", *(partial / "model").iterdir()):
                flush(file)

    def _finish(self, partial: Path, target: Path) -> None:
        if not self._layout.is_first:
            return
        flush(partial)
        if target.exists():
            # Trained anew after a resume from an earlier one: the bits are the same.
            shutil.rmtree(target)
        partial.rename(target)
        flush(self._folder)
        for old in sorted(self._folder.glob("step-*"))[: -self._keep]:
            shutil.rmtree(old)

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """Do something on every rank; return what went wrong on the first one that failed. Every rank must call."""
        trouble = None
        try:
            work()
        except (OSError, SafetensorError) as error:
            trouble = f"rank {self._layout.rank}: {getattr(error, 'strerror', None) or error}"
        return next((words for words in gather_objects(trouble, self._layout) if words), None)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run's folder `checkpoints`."""
    found = sorted(folder.glob("step-*/meta.json"))
    return found[-1].parent if found else None


def trained_steps(checkpoint: Path) -> int:
    """How many steps were trained before a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def write_torch(path: Path, content: Any) -> None:
    """Write tensors and plain values, down to the disk."""
    # In memory first: torch turns a full disk into an error that does not say so.
    stream = io.BytesIO()
    torch.save(content, stream)
    with path.open("wb") as file:
        file.write(stream.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Have the disk hold a file or a folder's list of files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# `hold`: a folder has one run at a time.
#
# The lock is the system's and lies on the folder itself: it ends with the process that holds it, however that ends,
# and
# leaves nothing behind.
#
# Invariants (asserted by the tests):
# 1. A folder that is held is refused by name; one whose holder has ended, or was killed, is not.


_LOG = logging.getLogger(__name__)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a folder in a `with` block, made where it is not there; raise if another run does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be made or opened ({error.strerror}); give another folder") from error
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrainingError(
            f"{folder} is in use by a run that has not ended; wait for it, or give another folder"
        ) from None
    except OSError as error:
        # Some network file systems lock no folders. The lock guards against a slip; a run can do without.
        _LOG.warning("%s cannot be locked (%s): start no second run in it", folder, error.strerror)
