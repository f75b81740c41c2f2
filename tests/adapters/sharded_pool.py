"""Ranks with a newer transformers than the installed one, forked from one import of it."""

import importlib
import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tests.megatron.pool import _fork_ranks
from tests.pool import START_S, Pool

RANKS = 4
NEWER = Path(__file__).parents[2] / "out" / f"transformers-{os.environ.get('TRANSFORMERS', '5.22.2')}"
"""Where `make test` puts the newer version; another one by `make transformers-versions`."""
LOADED = ("tests.adapters.sharded_work",)


class NewerPool(Pool):
    """Four ranks whose world is the pool, as transformers' meshes expect."""

    folder = NEWER

    def __init__(self) -> None:
        super().__init__(RANKS)

    def call(self, name: str, *args: object) -> list:
        """Call a function of `sharded_work` on every rank by its name: this process has another transformers."""
        return self.run(_call, RANKS, name, *args)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="newer-")
        # Not forked from a process that has loaded the installed version.
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(RANKS)]
        store = str(Path(self._folder.name) / "store")
        parent = context.Process(target=_fork_newer, args=([theirs for _, theirs in pipes], store))
        parent.start()
        for _, theirs in pipes:
            theirs.close()
        self._workers = [(parent, ours) for ours, _ in pipes]
        self._answers(RANKS, timeout_s=START_S)


def _call(group: object, name: str, *args: object) -> object:
    return getattr(importlib.import_module(LOADED[0]), name)(group, *args)


def _fork_newer(pipes: list[Connection], store: str) -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    _fork_ranks(pipes, store, LOADED, NEWER)
