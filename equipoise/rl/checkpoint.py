"""Checkpoints that are whole or not there, resumed under any number of ranks; and the lock on a run's folder.

A checkpoint is a folder `step-000010`, the state before step 10:
    state/       `torch.distributed.checkpoint`: weights, optimizer state, the KL's reference, ranks' random states
    model/       the whole model as a HF checkpoint with its tokenizer, for other programs and for --model
    meta.json    format, step, ranks, seed, mode, model

One write:
1. All ranks write into `.step-000010.partial`; every file is flushed to disk.
2. All ranks agree that all succeeded; one that failed stops the run on every rank, and the partial folder is removed.
3. The first rank renames the folder, which makes it a checkpoint, and removes the oldest ones.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from equipoise.core.errors import TrainingError
from equipoise.launch import Ranks
from equipoise.transfer.waits import all_or_none

FORMAT = "equipoise-checkpoint-2"
_LOG = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, ranks: Ranks, *, facts: Mapping[str, Any], keep: int) -> None:
        """Keep checkpoints in `folder`.

        Args:
            facts: must be the same in a checkpoint and in the run that continues from it
            keep: number of newest ones that are kept
        """
        self._folder, self._ranks, self._facts, self._keep = folder, ranks, dict(facts), keep

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint."""
        return newest_checkpoint(self._folder)

    def save(self, step: int, tensors: Mapping[str, Tensor], *, save_model: Callable[[Path], None]) -> Path:
        """Write a checkpoint. Every rank must call this.

        Args:
            step: the next step to train
            tensors: this rank's; an entry that several ranks have is written once
            save_model: writes the whole model into a folder; called on the first rank
        """
        target = self._folder / f"step-{step:06d}"
        partial = self._folder / f".{target.name}.partial"

        def prepare() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        def write_model() -> None:
            save_model(partial / "model")
            meta = {"format": FORMAT, "step": step, "ranks": self._ranks.size, **self._facts}
            (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
            for path in (partial / "meta.json", *(partial / "model").iterdir(), partial / "state", partial):
                flush(path)

        def finish() -> None:
            # There is one already where a run resumed from an earlier one trained this step again.
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            flush(self._folder)
            for old in sorted(self._folder.glob("step-*"))[: -self._keep]:
                shutil.rmtree(old)

        try:
            self._on_first_rank(prepare)
            # An error of one rank is raised on all of them.
            dcp.save(
                dict(tensors),
                storage_writer=dcp.FileSystemWriter(partial / "state", sync_files=True),
                process_group=self._ranks.world,
            )
            self._on_first_rank(write_model)
        except (TrainingError, CheckpointException) as error:
            if self._ranks.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            newest = self.newest()
            raise TrainingError(
                f"checkpoint {target} could not be written: {_reason(error)}; "
                + (f"{newest} is still valid, resume from it" if newest else "there is no earlier one")
            ) from error
        try:
            self._on_first_rank(finish)
        except TrainingError as error:
            raise TrainingError(f"checkpoint {target} could not be renamed into place: {error}") from error
        return target

    def load(self, path: Path, *, needs: Callable[[str], bool]) -> tuple[int, dict[str, Tensor]]:
        """Return the next step to train and the tensors that this rank `needs`, whatever number of ranks wrote them.

        Every rank must call this.
        """
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            for name, value in {"format": FORMAT, **self._facts}.items():
                if meta.get(name) != value:
                    raise TrainingError(f"checkpoint {path}: {name} is {meta.get(name)!r}, this run has {value!r}")
            reader = dcp.FileSystemReader(path / "state")
            saved = reader.read_metadata().state_dict_metadata
            # Random states are of ranks, and fit only where their number is the same.
            own = f"random.{self._ranks.rank}" if meta["ranks"] == self._ranks.size else ""
            tensors = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype)
                for name, entry in saved.items()
                if (name == own if name.startswith("random.") else needs(name))
            }
            dcp.load(tensors, storage_reader=reader, process_group=self._ranks.world)
        except (OSError, EOFError, ValueError, KeyError, UnpicklingError, RuntimeError, CheckpointException) as error:
            reason = _reason(error).splitlines()[0].partition(". ")[0]
            raise TrainingError(
                f"checkpoint {path} is damaged ({reason}); remove its folder to resume from the one before"
            ) from error
        return meta["step"], tensors

    def _on_first_rank(self, work: Callable[[], None]) -> None:
        """Do some work on the first rank; raise on all of them where it failed. Every rank must call this."""

        def checked() -> None:
            try:
                if self._ranks.is_first:
                    work()
            except (OSError, SafetensorError) as error:
                raise TrainingError(_reason(error)) from error

        all_or_none(checked, self._ranks.gather)


def _reason(error: BaseException) -> str:
    """Return an error's message; of one that `torch.distributed.checkpoint` collected, the first failing rank's."""
    if isinstance(error, CheckpointException):
        rank = min(error.failures)
        return f"rank {rank}: {_reason(error.failures[rank][0])}"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a run's folder `checkpoints`."""
    found = sorted(folder.glob("step-*/meta.json"))
    return found[-1].parent if found else None


def trained_steps(checkpoint: Path) -> int:
    """Return the number of steps that were trained before a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def flush(path: Path) -> None:
    """Write a file, or a folder's list of files, through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Lock a folder in a `with` block, and create it if needed; raise if another run holds it.

    The lock is the operating system's and on the folder itself: it ends with the process that holds it, and leaves no
    file behind.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be made or opened ({error.strerror}); give another folder") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise TrainingError(
            f"{folder} is in use by a run that has not ended; wait for it, or give another folder"
        ) from None
    except OSError as error:
        # Some network file systems cannot lock folders. The lock only guards against mistakes.
        _LOG.warning("%s cannot be locked (%s): start no second run in it", folder, error.strerror)
    try:
        yield
    finally:
        os.close(handle)
