"""Modules that verl imports and its Megatron engine does not use: tests import their names alone.

`ray`, `datasets` and the rest would bring half a gigabyte; nothing of them is called here.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

NAMES = frozenset({"ray", "datasets", "peft", "accelerate", "torchdata", "pandas"})


class NamesOnly(ModuleType):
    """A module that has every name: classes without methods."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds these modules last, so that an installed package comes first."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_known = name.partition(".")[0] in NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_known else None

    def create_module(self, spec: Any) -> ModuleType:
        return NamesOnly(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def names_only() -> Iterator[None]:
    """Import modules that are missing as names, and forget them at the end: others ask whether they are installed."""
    finder = Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, NamesOnly)]:
            del sys.modules[name]
