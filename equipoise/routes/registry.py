"""The list of all forms, and the verbs over them: find the form of a dump, read, stream, write.

1. Open the dump, whatever it is: file, folder or object.
2. Find its form by content, or take the one that is named. None and several are both errors; there is no guess.
3. Decode recordings, interpret them, and hand out routes.

Knows which forms exist. Does not know what any of them looks like (its own module does), nor what rows mean
(`interpret.py` does).

Invariants (asserted by the tests):
1. Form names are unique; each form recognises what it wrote, and no other form does.
2. A dump of no known form, or of several, is an error that lists the forms; a named form is never second-guessed.
3. `stream_routes` and `read_routes` give the same samples.
4. A native store is mapped, not read, and refused for another model.
5. A dump that cannot be written whole leaves what was there before.
"""

import os
from collections.abc import Iterator
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
    """Names of all forms, in the order of `docs/formats.md`."""
    return [form.name for form in FORMATS]


def find_format(name: str) -> Format:
    """Return the form called `name`."""
    for form in FORMATS:
        if form.name == name:
            return form
    raise RoutesError(f"no format {name!r}; known: {', '.join(format_names())}")


def detect(dump: Any) -> Format:
    """Return the one form whose content this is.

    Args:
        dump: a path, an object, or a `Source`
    """
    source = Source.of(dump).opened()
    found = [form for form in FORMATS if form.matches(source)]
    if len(found) == 1:
        return found[0]
    if found:
        raise RoutesError(f"{source.name} can be several forms; choose one with --format (format=):\n{_listed(found)}")
    # A broken container says here what is wrong with it; a whole one is empty, or merely of no known form.
    why = "" if source.peek() else ": it holds no record"
    raise RoutesError(
        f"{source.name} is of no known form{why}. If you know better, name it with --format (format=):\n"
        f"{_listed(FORMATS)}"
    )


def read_routes(
    dump: Any,
    *,
    model: ModelShape | str | Path | None = None,
    format: str | None = None,
    last_row: LastRow = "recorded",
    allow_short: bool = False,
) -> Routes:
    """Read all routes of a dump; those of a native store are mapped and read when asked for.

    Args:
        dump: a file, a folder, or an object such as a list of responses or a batch
        model: a shape, a preset name or the path of a HF config.json; a native store brings its own
        format: the name of its form; found by content if not given
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
    """Decode one recording after another, nothing mapped and nothing judged: what the doctor looks at."""
    source, form = _open(dump, format)
    return form.read(source, resolve_model(model))


def write_routes(routes: Routes, path: str | Path, *, format: str) -> None:
    """Write routes in a form, whole or not at all.

    Args:
        routes: what to write
        path: a file whose suffix the form has
        format: the name of the form
    """
    require_kind("routes", routes, Routes, error=RoutesError)
    require_kind("path", path, str, Path, error=RoutesError)
    form, target = find_format(format), Path(path)
    if target.suffix.lower() not in form.suffixes:
        raise RoutesError(f"{target}: form {form.name!r} is written to {' or '.join(form.suffixes)} files; rename it")
    if not target.parent.is_dir():
        raise RoutesError(f"{target} cannot be written: there is no folder {target.parent}")
    with whole_file(target, error=RoutesError) as draft:
        form.write(routes, draft)


def resolve_model(model: ModelShape | str | Path | None) -> ModelShape:
    """Return the shape that a shape, a preset name or the path of a HF config.json stands for."""
    if isinstance(model, ModelShape):
        return model
    if model is None:
        raise RoutesError("this form does not name its model; give a preset name or a HF config.json")
    if not isinstance(model, str | Path):
        raise RoutesError(f"model must be a shape, a preset name or a path, got a {type(model).__name__}")
    is_preset = isinstance(model, str) and model.lower().replace("_", "-") in preset_names()
    is_path = Path(model).exists() or Path(model).suffix == ".json" or os.sep in str(model)
    # What looks like a path is not answered with a list of presets.
    return ModelShape.from_config(Path(model)) if is_path and not is_preset else ModelShape.preset(str(model))


def _open(dump: Any, format: str | None) -> tuple[Source, Format]:
    source = Source.of(dump).opened()
    return source, detect(source) if format is None else find_format(format)


def _open_store(source: Source, model: ModelShape | str | Path | None, last_row: LastRow) -> Routes:
    if source.path is None:
        raise RoutesError(f"{source.name}: a native store is a file; give its path")
    if last_row != "recorded":
        raise RoutesError(f"{source.name}: a native store holds no placeholder rows; leave last_row out")
    routes = store.open_store(source.path)
    wanted = routes.model if model is None else resolve_model(model)
    for figure in ("experts", "top_k", "layer_numbers"):
        have, want = getattr(routes.model, figure), getattr(wanted, figure)
        if have != want:
            raise RoutesError(
                f"{source.name} holds routes of {routes.model.name!r}: {figure} is {_short(have)}, not {_short(want)} "
                f"as in {wanted.name!r}; name the model that made them, or none"
            )
    return routes


def _short(value: int | tuple[int, ...]) -> str:
    """A figure of a model in a few words: layer numbers by their count, first and last."""
    return str(value) if isinstance(value, int) else f"{len(value)} layers from {value[0]} to {value[-1]}"


def _listed(forms: tuple[Format, ...] | list[Format]) -> str:
    return "\n".join(f"  {form.name:<16} {form.summary}" for form in forms)
