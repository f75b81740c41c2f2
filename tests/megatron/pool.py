"""Ranks forked from a process that has imported Megatron-Core: four ranks pay for one import."""

import importlib
import multiprocessing
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from equipoise.launch import end_with_parent
from tests.pool import START_S, Pool, _serve, preloaded_context

RANKS = 4
LOADED = tuple(f"tests.megatron.{name}" for name in ("work", "life", "hooks", "trainer", "examples"))
"""Modules whose functions ranks may run."""


class MegatronPool(Pool):
    """Four ranks whose world is the pool, as Megatron-Core expects."""

    loaded: tuple[str, ...] = LOADED
    folder: Path | None = None
    """Where packages lie that are not installed."""

    def __init__(self) -> None:
        super().__init__(RANKS)

    def call(self, name: str, *args: Any) -> list:
        """Call a function of these modules on every rank by its name: this process imports no Megatron-Core."""
        return self.run(_call, RANKS, self.loaded, name, *args)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-")
        context = preloaded_context()
        pipes = [context.Pipe() for _ in range(RANKS)]
        store = str(Path(self._folder.name) / "store")
        theirs = [pipe for _, pipe in pipes]
        parent = context.Process(target=_fork_ranks, args=(theirs, store, self.loaded, self.folder))
        parent.start()
        for pipe in theirs:
            pipe.close()
        self._workers = [(parent, ours) for ours, _ in pipes]
        self._answers(RANKS, timeout_s=START_S)


def _call(group: Any, loaded: Sequence[str], name: str, *args: Any) -> Any:
    (task,) = {getattr(module, name) for module in map(importlib.import_module, loaded) if hasattr(module, name)}
    return task(group, *args)


def _fork_ranks(pipes: list[Connection], store: str, loaded: Sequence[str], folder: Path | None = None) -> None:
    """Import once, fork the ranks, wait for them. They end with this process, and it ends with the tests."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Apex and Transformer Engine are not here, torch renames collectives, and every rank would say so many times.
    for category in (UserWarning, FutureWarning):
        warnings.simplefilter("ignore", category)
    for module in loaded:
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_serve, args=(pipe, rank, RANKS, store, "gloo")) for rank, pipe in enumerate(pipes)]
    for rank in ranks:
        rank.start()
    # A pipe closes with its last holder, which must be the rank.
    for pipe in pipes:
        pipe.close()
    threading.Thread(target=end_with_parent, daemon=True).start()
    for rank in ranks:
        rank.join()
