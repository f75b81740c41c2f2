"""Histograms on disk: `RouteCounts` to a small `.npz` file and back, without pickled objects.

File: a compressed `.npz` holding
    format        "equipoise-counts-1"
    head          JSON text: model (every figure of the ModelShape, by field name), layer_numbers, names of the samples
    count_BLE     any unsigned integer dtype, as the two below
    tokens_B
    padding_BLE, unknown_BL, pair_LEE   where the counts have them

Knows the file. Does not know how counts are made (`count.py`).

Invariants (asserted by the tests):
1. `load_counts(save_counts(x)) == x`.
2. A file that is cut, damaged, pickled or of another kind is a RoutesError that names it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RouteCounts, RoutesError, TopologyError
from equipoise.core.loads import narrow, read_npz
from equipoise.core.whole_file import whole_file

FORMAT = "equipoise-counts-1"
_OPTIONAL = ("padding_BLE", "unknown_BL", "pair_LEE")
_ARRAYS = ("count_BLE", "tokens_B", *_OPTIONAL)


def save_counts(counts: RouteCounts, path: str | Path) -> None:
    """Write counts to `path`, whatever its suffix."""
    head = {"model": counts.model.figures(), "layer_numbers": counts.layer_numbers, "names": counts.names}
    arrays = {name: getattr(counts, name) for name in _ARRAYS}
    content: dict[str, Any] = {name: narrow(array) for name, array in arrays.items() if array is not None}
    content.update(format=np.array(FORMAT), head=np.array(json.dumps(head)))
    with whole_file(path, error=RoutesError) as draft, draft.open("wb") as file:
        np.savez_compressed(file, **content)


def load_counts(path: str | Path) -> RouteCounts:
    """Read a file made by `save_counts`."""
    arrays = read_npz(path, wanted=FORMAT, error=RoutesError)
    wrong = set(arrays) ^ {"format", "head", *_ARRAYS}
    if wrong - set(_OPTIONAL):
        raise RoutesError(f"{path}: expected arrays {', '.join(('head', *_ARRAYS))}, found {', '.join(sorted(arrays))}")
    head = _parse_head(str(arrays["head"]), path)
    try:
        for name in _ARRAYS:
            if name in arrays and arrays[name].dtype.kind != "u":
                raise RoutesError(f"{name} has dtype {arrays[name].dtype}; counts are unsigned integers")
        return RouteCounts(
            model=ModelShape.from_figures(head["model"]),
            names=tuple(str(name) for name in head["names"]),
            layer_numbers=tuple(int(n) for n in head["layer_numbers"]),
            **{name: arrays[name] for name in _ARRAYS if name in arrays},
        )
    except (KeyError, TypeError, ValueError, TopologyError) as error:
        raise RoutesError(f"{path} does not make sense: {error}") from error


def _parse_head(text: str, path: str | Path) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RoutesError(f"{path}: its head is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise RoutesError(f"{path}: its head must hold an object, got {type(head).__name__}")
    return head
