"""slime samples: `slime`. Checked with THUDM/slime 624b824a (2026-08-21).

One of three containers:
1. the debug dump of a rollout (`--save-debug-rollout-data`), a `.pt` of `{"rollout_id": 7, "samples": [sample, ...]}`;
2. a list of samples, as dicts or `Sample` objects;
3. the training data, one dict of lists over samples: `{"tokens": [...], "rollout_routed_experts": [...]}`.

A sample has
    tokens                    list or 1-D integer tensor: prompt and response
    rollout_routed_experts    [len(tokens) - 1, decoder layers, K] int32 (any integer dtype, nested lists too); dense
                              layers are zero. None: nothing was captured, every row is unknown
    weight_versions           list of str, one per generation that made the sample; optional
    index                     int: names the sample "sample <index>"; without it its place in the dump does
    metadata["name"]          str: names the sample instead, optional

slime records no boundaries between the versions of a sample: where they differ they are joined by "," into one name.
The trainer adds padding later (distinct ids counting up from 0, modulo the experts); it is not part of this format.
The dumps hold numpy arrays; any other pickled object in them is refused. Token ids that are all -1 are not known.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RoutesError
from equipoise.routes.interpret import Format, Recording
from equipoise.routes.source import Source, integer_array
from equipoise.routes.wire import field

_KEY = "rollout_routed_experts"


def _has(sample: Any, key: str) -> bool:
    return key in sample if isinstance(sample, Mapping) else hasattr(sample, key)


def _matches(source: Source) -> bool:
    record = source.first()
    if isinstance(record, Mapping) and isinstance(record.get("samples"), list) and record["samples"]:
        record = record["samples"][0]
    return _has(record, _KEY) and _has(record, "tokens")


def _read(source: Source, model: ModelShape) -> Iterator[Recording]:
    seen: set[str] = set()
    for place, sample in _samples(source):
        metadata, index = field(sample, "metadata"), field(sample, "index")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if not isinstance(name, str) or not name:
            name = f"sample {index}" if isinstance(index, int) and not isinstance(index, bool) else place
        # Samples split from one rollout can share its index; a name must identify one sample.
        name = f"{name} ({place})" if name in seen else name
        seen.add(name)
        yield _recording(sample, name, title=f"{source.name} {place}", model=model)


def _samples(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield (place, sample) from any of the three containers."""
    for place, record in source.nonempty_records():
        title, held = f"{source.name} {place}", record if isinstance(record, Mapping) else {}
        tokens, routes, versions = (held.get(key) for key in ("tokens", _KEY, "weight_versions"))
        if "samples" in held:
            if not isinstance(held["samples"], list):
                raise RoutesError(f"{title}: samples must be a list, got a {type(held['samples']).__name__}")
            for i, sample in enumerate(held["samples"]):
                yield f"sample {i}" if place == "record 0" else f"{place} sample {i}", sample
        elif isinstance(tokens, list) and tokens and hasattr(tokens[0], "__len__"):
            # The training data: the tokens of each sample are themselves a list or an array.
            if not isinstance(routes, list) or len(routes) != len(tokens):
                count = len(routes) if isinstance(routes, list) else "no list of"
                raise RoutesError(f"{title}: {len(tokens)} samples in tokens, {count} in {_KEY}")
            if not isinstance(versions, list) or len(versions) != len(tokens):
                versions = [None] * len(tokens)
            for i, (own, rows, version) in enumerate(zip(tokens, routes, versions, strict=True)):
                yield f"sample {i}", {"tokens": own, _KEY: rows, "weight_versions": version}
        else:
            yield place, record


def _recording(sample: Any, name: str, *, title: str, model: ModelShape) -> Recording:
    if not _has(sample, "tokens") or not _has(sample, _KEY):
        raise RoutesError(f"{title}: a slime sample has tokens and {_KEY}; got a {type(sample).__name__}")
    tokens = integer_array(f"{title}: tokens", field(sample, "tokens"), ndim=1)
    rows, versions = field(sample, _KEY), field(sample, "weight_versions")
    versions = () if versions is None else versions
    if rows is None:
        rows = np.full((max(len(tokens) - 1, 0), model.hidden_layers, model.top_k), -1, dtype=np.int32)
    else:
        rows = integer_array(f"{title}: {_KEY}", rows, ndim=3)
    if not isinstance(versions, list | tuple) or not all(isinstance(v, str | int) for v in versions):
        raise RoutesError(f"{title}: weight_versions must be a list of names, got a {type(versions).__name__}")
    return Recording(
        name=name,
        rows=rows,
        num_tokens=len(tokens),
        tokens=tokens if not len(tokens) or (tokens != -1).any() else None,
        weight_version=",".join(dict.fromkeys(str(v) for v in versions)),
    )


FORMATS = (
    Format(
        name="slime",
        summary="slime samples: tokens and rollout_routed_experts, as its debug dump or training lists",
        suffixes=(".pt",),
        matches=_matches,
        read=_read,
    ),
)
