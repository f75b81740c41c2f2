"""What the writers of formats share: laying routes out as an engine would, or refusing.

Knows which rows, layers and markers a form has room for. Does not know any engine's field names, nor how to read
(that is `_wire.py`).

Invariants (asserted by the tests):
1. What a form has no place for (padding, versions, unknown rows of a top-1 model, a part of the layers) is refused.
2. Unknown rows are written as the form's own marker, never as a route; dense layers as zeros.
"""

import base64
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import Routes, RoutesError, SampleRoutes, Segment


def wire_rows(sample: SampleRoutes, routes: Routes, *, dtype: np.dtype | type, all_layers: bool = True) -> np.ndarray:
    """Lay out a sample's rows as they stand on a wire: unknown rows -1, dense layers zero.

    Args:
        sample: one of `routes`
        routes: whose layers and model they are
        dtype: a signed dtype where a row is unknown
        all_layers: whether the layer axis has all decoder layers, or just those of `routes`

    Returns:
        [rows, layers on the wire, K]
    """
    target = np.dtype(dtype)
    _refuse_what_has_no_place(sample, routes, target, all_layers=all_layers)
    ids_TLK = sample.ids_TLK.astype(target)
    if sample.known_TL is not None:
        ids_TLK[~sample.known_TL] = -1
    if not all_layers:
        return ids_TLK
    rows = np.zeros((sample.num_rows, routes.model.hidden_layers, routes.model.top_k), dtype=target)
    rows[:, list(routes.layer_numbers)] = ids_TLK
    return rows


def _refuse_what_has_no_place(sample: SampleRoutes, routes: Routes, dtype: np.dtype, *, all_layers: bool) -> None:
    """Raise if ids, layers, padding or unknown rows do not fit the wire."""
    model = routes.model
    if model.experts - 1 > np.iinfo(dtype).max:
        raise RoutesError(f"expert {model.experts - 1} does not fit {dtype}; write the native store instead")
    if all_layers and routes.layer_numbers != model.layer_numbers:
        raise RoutesError(
            f"routes hold {len(routes.layer_numbers)} of {model.layers} MoE layers; this form cannot name them; "
            "write the native store instead"
        )
    if sample.padding_T is not None and sample.padding_T.any():
        raise RoutesError(
            f"sample {sample.name!r}: {int(sample.padding_T.sum())} padding rows, which this form cannot mark; "
            "write the native store instead"
        )
    if sample.known_TL is not None and not sample.known_TL.all() and dtype.kind != "i":
        raise RoutesError(f"sample {sample.name!r}: {dtype} cannot hold -1, which marks unknown rows")


def engine_rows(sample: SampleRoutes, routes: Routes, *, form: str, dtype: np.dtype) -> np.ndarray:
    """Lay out a sample's rows as engines do: all hidden layers, dense ones and unknown rows as zeros.

    Args:
        sample: one of `routes`
        routes: whose layers and model they are
        form: name of the form, for messages
        dtype: an integer dtype that holds every expert id

    Returns:
        [rows, hidden layers, K]
    """
    rows = wire_rows(sample, routes, dtype=np.int32)
    if (rows < 0).any():
        if routes.model.top_k == 1:
            raise RoutesError(
                f"sample {sample.name!r} has unknown rows; form {form!r} marks them by equal ids, which every row of a "
                "top-1 model has: write nemo-rl or the native store"
            )
        rows[rows < 0] = 0
    return rows.astype(dtype)


def engine_dtype(experts: int) -> np.dtype:
    """The dtype vLLM returns since 0.22: uint8 up to 256 experts, then uint16; int32 beyond what that holds."""
    if experts > 2**16:
        return np.dtype(np.int32)
    return np.dtype(np.uint8 if experts <= 2**8 else np.uint16)


def refuse_versions(sample: SampleRoutes, *, form: str, instead: str, allow_turns: bool = False) -> None:
    """Raise if the sample has a named weight version, or more than one segment unless `allow_turns`."""
    versions = [segment.weight_version for segment in sample.segments]
    if any(versions) or (len(versions) > 1 and not allow_turns):
        raise RoutesError(
            f"sample {sample.name!r} has {len(versions)} segments with weight versions {versions}; "
            f"form {form!r} has no place for them, write {instead}"
        )


def segments_of(sample: SampleRoutes) -> tuple[Segment, ...]:
    """The sample's segments, one unnamed segment where it has none."""
    return sample.segments or (Segment(start=0, stop=sample.num_rows),)


def tokens_until(sample: SampleRoutes, stop: int) -> int:
    """Tokens when row `stop - 1` was made: one sampled token more than rows, all of them at the end."""
    return sample.num_tokens if stop == sample.num_rows else min(stop + 1, sample.num_tokens)


def check_names(routes: Routes, *, form: str) -> None:
    """Raise if two samples share a name: read back, they would be turns of one sample."""
    seen: set[str] = set()
    for sample in routes:
        if sample.name in seen:
            raise RoutesError(f"two samples are named {sample.name!r}; form {form!r} knows them by name, rename one")
        seen.add(sample.name)


def encode_base64(raw: bytes) -> str:
    """Standard base64 as text."""
    return base64.b64encode(raw).decode("ascii")


def write_npz(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write named arrays as an uncompressed `.npz` without pickled objects."""
    # np.savez takes names as keyword arguments, so a sample named "file" would break it.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def write_jsonl(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
