"""Writers of the formats that engines and trainers hand out, for the tests that read them back.

`write_dump(routes, path, format=)` writes routes in any format; `SUFFIXES` says which files each format is written to.
What a format has no place for (padding, versions, unknown rows of a top-1 model, some of the layers) is refused.
Unknown rows are written as the format's own marker, never as a route; dense layers as zeros.
"""

import base64
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import Routes, RoutesError, SampleRoutes, Segment
from equipoise.core.files import whole_file
from equipoise.routes import nemo_rl
from equipoise.routes.interpret import Format
from equipoise.routes.registry import find_format, write_routes
from equipoise.routes.sglang import WIRE_DTYPE
from equipoise.routes.vllm import TOKENS_SUFFIX, engine_dtype, engine_rows, generate_record


def write_form(form: Format, routes: Routes, path: Path) -> None:
    """Write routes in a format, in place, whatever the suffix of the path."""
    (form.write or WRITERS[form.name])(routes, path)


def write_dump(routes: Routes, path: Path, *, format: str) -> None:
    """Write routes in a format of `SUFFIXES`; those that the package writes itself go through `write_routes`."""
    if find_format(format).write is not None:
        write_routes(routes, path, format=format)
        return
    with whole_file(path, error=RoutesError) as draft:
        WRITERS[format](routes, draft)


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
    refuse_what_has_no_place(sample, routes, target, all_layers=all_layers)
    ids_TLK = sample.ids_TLK.astype(target)
    if sample.known_TL is not None:
        ids_TLK[~sample.known_TL] = -1
    if not all_layers:
        return ids_TLK
    rows = np.zeros((sample.num_rows, routes.model.hidden_layers, routes.model.top_k), dtype=target)
    rows[:, list(routes.layer_numbers)] = ids_TLK
    return rows


def refuse_what_has_no_place(sample: SampleRoutes, routes: Routes, dtype: np.dtype, *, all_layers: bool) -> None:
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


def write_jsonl(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def refuse_versions(sample: SampleRoutes, *, form: str, instead: str, allow_turns: bool = False) -> None:
    """Raise if the sample has a named weight version, or more than one segment unless `allow_turns`."""
    versions = [segment.weight_version for segment in sample.segments]
    if any(versions) or (len(versions) > 1 and not allow_turns):
        raise RoutesError(
            f"sample {sample.name!r} has {len(versions)} segments with weight versions {versions}; "
            f"form {form!r} has no place for them, write {instead}"
        )


def write_npz(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write named arrays as an uncompressed `.npz` without pickled objects."""
    # np.savez takes names as keyword arguments, so a sample named "file" would break it.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def write_torch(content: Any, path: Path) -> None:
    """Write `content`, its numpy arrays turned into tensors, as a file that loads with weights only."""
    import torch

    def with_tensors(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.array(value))
        if isinstance(value, dict):
            return {key: with_tensors(item) for key, item in value.items()}
        return [with_tensors(item) for item in value] if isinstance(value, list) else value

    with path.open("wb") as file:
        torch.save(with_tensors(content), file)


def write_offline(routes: Routes, path: Path) -> None:
    """Write one array per sample into an `.npz`."""
    check_names(routes, form="vllm")
    arrays: dict[str, np.ndarray] = {}
    for sample in routes:
        refuse_versions(sample, form="vllm", instead="vllm-http or the native store")
        if sample.tokens_T is None and sample.num_rows != sample.num_tokens - 1:
            raise RoutesError(
                f"sample {sample.name!r} has {sample.num_rows} rows for {sample.num_tokens} tokens; form 'vllm' means "
                "one token more than rows unless token ids are given: write vllm-http or the native store"
            )
        arrays[sample.name] = engine_rows(sample, routes, form="vllm", dtype=engine_dtype(routes.model.experts))
        if sample.tokens_T is not None:
            arrays[sample.name + TOKENS_SUFFIX] = np.asarray(sample.tokens_T)
    taken = [s.name for s in routes if s.name.removesuffix(TOKENS_SUFFIX) in arrays and s.name.endswith(TOKENS_SUFFIX)]
    if taken:
        raise RoutesError(f"sample {taken[0]!r} is named like the token ids of another sample; rename one")
    write_npz(arrays, path)


def write_sglang(routes: Routes, path: Path) -> None:
    """Write native responses, one line per segment."""
    check_names(routes, form="sglang")
    write_jsonl((_native_record(*part) for part in _segments(routes, form="sglang")), path)


def write_sglang_openai(routes: Routes, path: Path) -> None:
    """Write chat responses with `sglext`, one line per segment."""
    check_names(routes, form="sglang-openai")
    write_jsonl((_openai_record(*part) for part in _segments(routes, form="sglang-openai")), path)


def _segments(routes: Routes, *, form: str) -> Iterator[tuple[SampleRoutes, Segment, str]]:
    """Every segment of every sample with its payload."""
    for sample in routes:
        rows = engine_rows(sample, routes, form=form, dtype=WIRE_DTYPE)
        for segment in segments_of(sample):
            yield sample, segment, encode_base64(rows[segment.start : segment.stop].tobytes())


def _native_record(sample: SampleRoutes, segment: Segment, payload: str) -> dict[str, Any]:
    num_prompt, total = _split_tokens(sample, segment)
    counts = {"prompt_tokens": num_prompt, "completion_tokens": total - num_prompt}
    meta: dict[str, Any] = {"id": sample.name, **counts, "routed_experts": payload}
    if segment.weight_version:
        meta["weight_version"] = segment.weight_version
    record: dict[str, Any] = {"meta_info": meta}
    if sample.tokens_T is not None:
        record["input_ids"] = sample.tokens_T[:num_prompt].tolist()
        record["output_ids"] = sample.tokens_T[num_prompt:total].tolist()
    return {**record, "routed_experts_start_len": segment.start}


def _openai_record(sample: SampleRoutes, segment: Segment, payload: str) -> dict[str, Any]:
    num_prompt, total = _split_tokens(sample, segment)
    counts = {"prompt_tokens": num_prompt, "completion_tokens": total - num_prompt}
    choice: dict[str, Any] = {"index": 0}
    record: dict[str, Any] = {"id": sample.name, "choices": [choice], "usage": counts}
    if segment.weight_version:
        record["metadata"] = {"weight_version": segment.weight_version}
    if sample.tokens_T is not None:
        record["prompt_token_ids"] = sample.tokens_T[:num_prompt].tolist()
        choice["token_ids"] = sample.tokens_T[num_prompt:total].tolist()
    return {**record, "routed_experts_start_len": segment.start, "sglext": {"routed_experts": payload}}


def _split_tokens(sample: SampleRoutes, segment: Segment) -> tuple[int, int]:
    """Prompt tokens and all tokens of the request that made this segment."""
    total = tokens_until(sample, segment.stop)
    return min(segment.start + 1, total), total


def write_verl(routes: Routes, path: Path) -> None:
    width = max((sample.num_tokens for sample in routes), default=0)
    model = routes.model
    ids = np.zeros((len(routes), width, model.hidden_layers, model.top_k), dtype=np.int16)
    mask = np.zeros((len(routes), width), dtype=np.int64)
    for b, sample in enumerate(routes):
        ids[b, : sample.num_tokens] = _verl_rows(sample, routes)
        mask[b, : sample.num_tokens] = 1
    content = {"routed_experts": ids, "attention_mask": mask}
    tokens = _tokens(routes)
    if tokens:
        padded = np.zeros((len(routes), width), dtype=np.int64)
        for b, sample_tokens in enumerate(tokens):
            padded[b, : len(sample_tokens)] = sample_tokens
        content["input_ids"] = padded
    _save(content, path)


def write_verl_jagged(routes: Routes, path: Path) -> None:
    rows = [_verl_rows(sample, routes) for sample in routes]
    tokens = _tokens(routes)
    if path.suffix.lower() == ".pt":
        _save_nested(rows, tokens, path)
        return
    shape = (0, routes.model.hidden_layers, routes.model.top_k)
    content: dict[str, Any] = {
        "values": np.concatenate([np.zeros(shape, dtype=np.int16), *rows]),
        "offsets": np.cumsum([0] + [len(r) for r in rows], dtype=np.int64),
    }
    if tokens:
        content["input_ids"] = np.concatenate(tokens)
    _save(content, path)


def _tokens(routes: Routes) -> list[np.ndarray]:
    """Token ids of all samples, or none where a sample has none."""
    tokens = [sample.tokens_T for sample in routes if sample.tokens_T is not None]
    return tokens if len(tokens) == len(routes) else []


def _verl_rows(sample: SampleRoutes, routes: Routes) -> np.ndarray:
    """One row per token: the recorded rows, -1 where the recording stopped early, zeros for the last token."""
    rows = np.full((sample.num_tokens, routes.model.hidden_layers, routes.model.top_k), -1, dtype=np.int16)
    if sample.num_rows < sample.num_tokens:
        rows[-1] = 0
    rows[: sample.num_rows] = wire_rows(sample, routes, dtype=np.int16)
    return rows


def _save(content: dict[str, Any], path: Path) -> None:
    if path.suffix.lower() == ".pt":
        write_torch(content, path)
    else:
        write_npz(content, path)


def _save_nested(rows: list[np.ndarray], tokens: list[np.ndarray], path: Path) -> None:
    import torch

    def nested(parts: list[np.ndarray]) -> Any:
        return torch.nested.as_nested_tensor([torch.from_numpy(np.array(p)) for p in parts], layout=torch.jagged)

    if not rows:
        raise RoutesError("a jagged tensor needs at least one sample; write .npz")
    write_torch({"routed_experts": nested(rows), **({"input_ids": nested(tokens)} if tokens else {})}, path)


def write_slime(routes: Routes, path: Path) -> None:
    samples = []
    for i, sample in enumerate(routes):
        tokens = np.full(sample.num_tokens, -1, dtype=np.int64) if sample.tokens_T is None else sample.tokens_T
        samples.append(
            {
                "index": i,
                "tokens": tokens.tolist(),
                "rollout_routed_experts": wire_rows(sample, routes, dtype=np.int32),
                "weight_versions": list(dict.fromkeys(s.weight_version for s in sample.segments if s.weight_version)),
                "metadata": {"name": sample.name},
            }
        )
    write_torch({"rollout_id": 0, "samples": samples}, path)


def write_prime_rl(routes: Routes, path: Path) -> None:
    """Write `/generate` responses, one line per segment."""
    check_names(routes, form="prime-rl")
    write_jsonl(_prime_rl_records(routes), path)


def _prime_rl_records(routes: Routes) -> Iterator[dict[str, Any]]:
    dtype = engine_dtype(routes.model.experts)
    for sample in routes:
        refuse_versions(sample, form="prime-rl", instead="vllm-http, sglang or the native store", allow_turns=True)
        rows = engine_rows(sample, routes, form="prime-rl", dtype=dtype)
        for segment in segments_of(sample):
            payload = _wire_object(rows[segment.start : segment.stop], start=segment.start)
            yield generate_record(sample, segment, payload)


def _wire_object(rows: np.ndarray, *, start: int) -> dict[str, Any]:
    name = rows.dtype.name
    data = encode_base64(rows.astype(np.dtype(name).newbyteorder("<")).tobytes())
    return {"data": data, "shape": list(rows.shape), "start": start, "dtype": name}


def write_nemo_rl(routes: Routes, path: Path) -> None:
    """Write one envelope per sample: records in a `.jsonl`, bare lines in a `.txt`."""
    check_names(routes, form="nemo-rl")
    if path.suffix.lower() != ".txt":
        write_jsonl((_text_record(sample, routes) for sample in routes), path)
        return
    with path.open("w", encoding="ascii") as file:
        file.writelines(_envelope(_nemo_rl_rows(sample, routes, form="nemo-rl")) + "\n" for sample in routes)


def write_nemo_rl_batch(routes: Routes, path: Path) -> None:
    """Write all samples as one batch."""
    check_names(routes, form="nemo-rl-batch")
    if not len(routes):
        raise RoutesError("there is no sample to write; form 'nemo-rl-batch' holds at least one")
    names = [sample.name for sample in routes]
    if path.suffix.lower() == ".pt":
        write_torch({**_batch_arrays(routes), "names": names}, path)
    else:
        write_npz({**_batch_arrays(routes), "names": np.array(names)}, path)


def _nemo_rl_rows(sample: SampleRoutes, routes: Routes, *, form: str) -> np.ndarray:
    """[tokens, L, K]: the sample's rows, -1 where none was captured, the filler for the last token."""
    refuse_versions(sample, form=form, instead="vllm-http, sglang or the native store")
    if routes.layer_numbers != routes.model.layer_numbers:
        raise RoutesError(
            f"form {form!r} holds all {routes.model.layers} MoE layers of {routes.model.name!r}; these routes have "
            f"{len(routes.layer_numbers)} of them, write the native store"
        )
    rows = wire_rows(sample, routes, dtype=carry_dtype(routes.model.experts), all_layers=False)
    missing = sample.num_tokens - sample.num_rows
    if missing <= 0:
        return rows
    tail = np.full((missing, *rows.shape[1:]), -1, dtype=rows.dtype)
    tail[-1] = np.arange(rows.shape[2])
    return np.concatenate([rows, tail])


def _envelope(rows: np.ndarray) -> str:
    name = rows.dtype.name
    shape = "x".join(str(n) for n in rows.shape)
    return f"{nemo_rl.MAGIC}{name}:{shape}:{encode_base64(rows.astype(np.dtype(name).newbyteorder('<')).tobytes())}"


def _text_record(sample: SampleRoutes, routes: Routes) -> dict[str, Any]:
    record: dict[str, Any] = {"id": sample.name}
    if sample.tokens_T is not None:
        record["prompt_token_ids"] = sample.tokens_T[:1].tolist()
        record["generation_token_ids"] = sample.tokens_T[1:].tolist()
    return {**record, "routed_experts": _envelope(_nemo_rl_rows(sample, routes, form="nemo-rl"))}


def _batch_rows(sample: SampleRoutes, routes: Routes) -> np.ndarray:
    """[tokens + padding rows, L, K]: padding that stands behind the sample's own rows is written behind its tokens."""
    num_padding = 0 if sample.padding_T is None else int(sample.padding_T.sum())
    own = sample.num_rows - num_padding
    if num_padding == 0 or sample.padding_T is None or not sample.padding_T[own:].all():
        return _nemo_rl_rows(sample, routes, form="nemo-rl-batch")
    refuse_versions(sample, form="nemo-rl-batch", instead="the native store")
    known_TL = None if sample.known_TL is None else sample.known_TL[:own]
    unpadded = replace(sample, ids_TLK=sample.ids_TLK[:own], known_TL=known_TL, padding_T=None, segments=())
    rows = _nemo_rl_rows(unpadded, routes, form="nemo-rl-batch")
    return np.concatenate([rows, sample.ids_TLK[own:].astype(rows.dtype)])


def _batch_arrays(routes: Routes) -> dict[str, np.ndarray]:
    parts = [_batch_rows(sample, routes) for sample in routes]
    longest = max(len(rows) for rows in parts)
    shape = (len(parts), longest, routes.model.layers, routes.model.top_k)
    batch = np.empty(shape, dtype=carry_dtype(routes.model.experts))
    batch[:] = np.arange(routes.model.top_k)
    for b, rows in enumerate(parts):
        batch[b, : len(rows)] = rows
    arrays = {"routed_experts": batch, "input_lengths": np.array([s.num_tokens for s in routes], dtype=np.int64)}
    tokens = [sample.tokens_T for sample in routes]
    if any(t is not None for t in tokens):
        arrays["input_ids"] = _padded_tokens(routes, longest)
    return arrays


def _padded_tokens(routes: Routes, longest: int) -> np.ndarray:
    padded = np.zeros((len(routes), longest), dtype=np.int64)
    for b, sample in enumerate(routes):
        if sample.tokens_T is None:
            raise RoutesError(
                f"sample {sample.name!r} has no token ids, others have; form 'nemo-rl-batch' needs all or none"
            )
        padded[b, : sample.num_tokens] = sample.tokens_T
    return padded


def carry_dtype(experts: int) -> np.dtype:
    """The smallest signed dtype NeMo-RL uses for `experts` experts."""
    return np.dtype(np.int8 if experts <= 2**7 else np.int16 if experts <= 2**15 else np.int32)


def write_trace(routes: Routes, path: Path) -> None:
    _require_rows(routes)
    with path.open("w", encoding="ascii") as file:
        for step, sample in enumerate(routes):
            rows = wire_rows(sample, routes, dtype=np.int32)
            for layer in routes.layer_numbers:
                record = {
                    "step": step,
                    "stage": "pre_dispatch",
                    "block": "decoder",
                    "layer": layer,
                    "rank": 0,
                    "num_tokens": len(rows),
                    "topk": routes.model.top_k,
                    "top_indices": rows[:, layer].tolist(),
                }
                file.write(json.dumps(record) + "\n")


def _require_rows(routes: Routes) -> None:
    if not len(routes):
        raise RoutesError("no sample to write; this form has at least one micro-batch")


def write_replay(routes: Routes, path: Path) -> None:
    _require_rows(routes)
    batches = [wire_rows(sample, routes, dtype=np.int64, all_layers=False) for sample in routes]
    if path.suffix.lower() == ".npz":
        arrays = {
            f"micro_{m}.layer_{number}": rows[:, i]
            for m, rows in enumerate(batches)
            for i, number in enumerate(routes.layer_numbers)
        }
        write_npz(arrays, path)
    elif routes.layer_numbers == routes.model.layer_numbers:
        write_torch([list(rows.transpose(1, 0, 2)) for rows in batches], path)
    else:
        write_torch([dict(zip(routes.layer_numbers, rows.transpose(1, 0, 2), strict=True)) for rows in batches], path)


WRITERS: dict[str, Callable[[Routes, Path], None]] = {
    "vllm": write_offline,
    "sglang": write_sglang,
    "sglang-openai": write_sglang_openai,
    "verl": write_verl,
    "verl-jagged": write_verl_jagged,
    "slime": write_slime,
    "prime-rl": write_prime_rl,
    "nemo-rl": write_nemo_rl,
    "nemo-rl-batch": write_nemo_rl_batch,
    "megatron-trace": write_trace,
    "megatron-replay": write_replay,
}
SUFFIXES = {
    "equipoise": (".eqr",),
    "vllm": (".npz",),
    "vllm-http": (".jsonl",),
    "sglang": (".jsonl",),
    "sglang-openai": (".jsonl",),
    "verl": (".npz", ".pt"),
    "verl-jagged": (".npz", ".pt"),
    "slime": (".pt",),
    "prime-rl": (".jsonl",),
    "nemo-rl": (".jsonl", ".txt"),
    "nemo-rl-batch": (".npz", ".pt"),
    "megatron-trace": (".jsonl",),
    "megatron-replay": (".pt", ".npz"),
}
"""Files that each format is written to, the preferred suffix first."""
