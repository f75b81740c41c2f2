"""All formats, and the verbs over them: find the format of a dump, read, stream, write.

1. Open the dump: a file, a folder or an object.
2. Find its format by content, or take the one that is named. No match and several matches are errors, never a guess.
3. Decode recordings, interpret them, and return routes.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.core import ModelShape, Routes, RoutesError
from equipoise.core.files import whole_file
from equipoise.core.model import preset_names
from equipoise.core.value import require_kind
from equipoise.routes import megatron, nemo_rl, prime_rl, sglang, slime, store, verl, vllm
from equipoise.routes.interpret import Format, LastRow, Recording, SampleStream, interpret
from equipoise.routes.source import Source

FORMATS: tuple[Format, ...] = (
    *store.FORMATS,
    *vllm.FORMATS,
    *sglang.FORMATS,
    *verl.FORMATS,
    *slime.FORMATS,
    *prime_rl.FORMATS,
    *nemo_rl.FORMATS,
    *megatron.FORMATS,
)


def format_names() -> list[str]:
    """Return the names of all formats, in the order of `docs/formats.md`."""
    return [form.name for form in FORMATS]


def find_format(name: str) -> Format:
    """Return the format named `name`."""
    for form in FORMATS:
        if form.name == name:
            return form
    raise RoutesError(f"no format {name!r}; known: {', '.join(format_names())}")


def detect(dump: Any) -> Format:
    """Return the one format that matches the content of a dump: a path, an object, or a `Source`."""
    source = Source.of(dump).opened()
    found = [form for form in FORMATS if form.matches(source)]
    if len(found) == 1:
        return found[0]
    if found:
        raise RoutesError(
            f"{source.name} can have several formats; choose one with --format (format=):\n{_listed(found)}"
        )
    # A broken container raises here and says what is wrong with it.
    looked = next(source.records(), None)
    if looked is None:
        raise RoutesError(
            f"{source.name} holds no record; give a file with one, a folder of such files, or a quoted pattern"
        )
    _, record = looked
    if isinstance(record, Mapping) and {"choices", "meta_info"} & set(record):
        raise RoutesError(
            f"{source.name} holds responses of an engine without routed_experts. Record again: start vLLM or SGLang "
            "with --enable-return-routed-experts, and send SGLang return_routed_experts in each request "
            "(docs/recording.md)"
        )
    raise RoutesError(
        f"{source.name} has no known format: its first record is {_described(record)}. Were routes recorded "
        "(docs/recording.md)? If you know the format, name it with --format (format=):\n"
        f"{_listed(FORMATS)}"
    )


def _described(record: Any) -> str:
    """Say what a record is, in a few words: its fields, or its shape."""
    if isinstance(record, Mapping):
        names = [str(name)[:40] for name in record]
        return f"an object with the fields {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
    if hasattr(record, "shape"):
        return f"an array of {record.dtype} of shape {list(record.shape)}"
    return f"a {type(record).__name__} {str(record)[:40]!r}"


def _listed(forms: Sequence[Format]) -> str:
    return "\n".join(f"  {form.name:<16} {form.summary}" for form in forms)


def read_routes(
    dump: Any,
    *,
    model: ModelShape | str | Path | None = None,
    format: str | None = None,
    last_row: LastRow = "recorded",
    allow_short: bool = False,
) -> Routes:
    """Read all routes of a dump; a native store is mapped, and its samples are read when they are accessed.

    Args:
        dump: a file, a folder, or an object such as a list of responses or a batch
        model: a shape, a preset name or the path of a HF config.json; a native store contains its own
        format: the name of its format; found by content if not given
        last_row: what the row of a sample's last token is, see `interpret.LastRow`
        allow_short: accept samples whose recording stopped early
    """
    source, form = _open(dump, format)
    if form in store.FORMATS:
        return _open_store(source, model, last_row)
    shape = resolve_model(model)
    stream = interpret(form.read(source, shape), model=shape, last_row=last_row, allow_short=allow_short)
    return Routes.of(list(stream), model=shape, layer_numbers=stream.layer_numbers)


def stream_routes(
    dump: Any,
    *,
    model: ModelShape | str | Path | None = None,
    format: str | None = None,
    last_row: LastRow = "recorded",
    allow_short: bool = False,
) -> SampleStream:
    """Read one sample after another, so that routes need not be kept. Arguments as in `read_routes`."""
    source, form = _open(dump, format)
    if form in store.FORMATS:
        routes = _open_store(source, model, last_row)
        return SampleStream(iter(routes), routes.layer_numbers)
    shape = resolve_model(model)
    return interpret(form.read(source, shape), model=shape, last_row=last_row, allow_short=allow_short)


def stream_recordings(dump: Any, *, model: ModelShape | str | Path, format: str | None = None) -> Iterator[Recording]:
    """Decode one recording after another without mapping or checking it: the input of the doctor."""
    source, form = _open(dump, format)
    return form.read(source, resolve_model(model))


def write_routes(routes: Routes, path: str | Path, *, format: str = "equipoise") -> None:
    """Write routes to a file, completely or not at all.

    Args:
        routes: what to write
        path: a file with the format's suffix
        format: `equipoise`, the native store, or `vllm-http`; all other formats are only read
    """
    require_kind("routes", routes, Routes, error=RoutesError)
    require_kind("path", path, str, Path, error=RoutesError)
    form, target = find_format(format), Path(path)
    if form.write is None:
        written = ", ".join(known.name for known in FORMATS if known.write is not None)
        raise RoutesError(f"format {form.name!r} is only read; write one of: {written}")
    if target.suffix.lower() != form.suffixes[0]:
        raise RoutesError(f"{target}: format {form.name!r} is written to {form.suffixes[0]} files; rename it")
    if not target.parent.is_dir():
        raise RoutesError(f"{target} cannot be written: there is no folder {target.parent}")
    with whole_file(target, error=RoutesError) as draft:
        form.write(routes, draft)


def resolve_model(model: ModelShape | str | Path | None) -> ModelShape:
    """Return the shape that is given, or read it from a preset name, a HF id of one, or the path of a config.json."""
    if isinstance(model, ModelShape):
        return model
    if model is None:
        raise RoutesError("this format does not name its model; give a preset name or a HF config.json")
    if not isinstance(model, str | Path):
        raise RoutesError(f"model must be a shape, a preset name or a path, got a {type(model).__name__}")
    name = str(model).lower().replace("_", "-")
    if not Path(model).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        # A HF id: owner, and a name that may say what the weights were tuned for, which changes no figure.
        name = re.sub(r"(-(base|instruct|thinking|chat|hf|bf16|\d{4}))+$", "", name.rpartition("/")[2])
    is_preset = name in preset_names()
    # Something that looks like a path is not answered with a list of presets.
    is_path = Path(model).exists() or Path(model).suffix == ".json" or os.sep in str(model)
    return ModelShape.from_config(Path(model)) if is_path and not is_preset else ModelShape.preset(name)


def _open(dump: Any, format: str | None) -> tuple[Source, Format]:
    source = Source.of(dump).opened()
    return source, detect(source) if format is None else find_format(format)


def _open_store(source: Source, model: ModelShape | str | Path | None, last_row: LastRow) -> Routes:
    """Map a native store, or raise if it holds the routes of another model."""
    if last_row != "recorded":
        raise RoutesError(f"{source.name}: a native store holds no placeholder rows; leave last_row out")
    routes = store.open_store(store.path_of(source))
    wanted = routes.model if model is None else resolve_model(model)
    for figure in ("experts", "top_k", "layer_numbers"):
        have, want = getattr(routes.model, figure), getattr(wanted, figure)
        if have != want:
            # Layer numbers by their count, first and last.
            short = [n if isinstance(n, int) else f"{len(n)} layers from {n[0]} to {n[-1]}" for n in (have, want)]
            raise RoutesError(
                f"{source.name} holds routes of {routes.model.name!r}: {figure} is {short[0]}, not {short[1]} "
                f"as in {wanted.name!r}; name the model that made them, or none"
            )
    return routes
