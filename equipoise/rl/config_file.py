"""Settings on their way from TOML, presets and `--set`, and back to TOML.

A TOML file holds `steps`, `seed`, `ranks`, ... at the top and one table per part (`model`, `task`, `warmup`, `rollout`,
`update`, `balance`, `checkpoint`, `track`). What it leaves out has the default written in `config.py`.

Knows kinds of values. Does not know what a setting means, nor its range.

Invariants (asserted by the tests):
1. An unknown key is refused by its full name, with the nearest known one.
2. What `write_config` writes reads back as the same settings, for every preset too.
3. A value of a wrong kind is refused by name and value.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from equipoise.core.errors import TrainingError
from equipoise.rl.config import TrainConfig


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    folder = resources.files("equipoise.rl") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_config(source: str | Path, *, settings: Iterable[str] = ()) -> TrainConfig:
    """Read a preset by name, or a TOML file, and change what `settings` say.

    Args:
        source: a preset such as "tiny", or the path of a TOML file
        settings: "a.b=value" each; a value is TOML, and a bare word is a string
    """
    content = _parse(_text_of(source), place=str(source))
    for setting in settings:
        _put(content, setting)
    return build_config(content)


def build_config(content: Mapping[str, Any]) -> TrainConfig:
    """Build the settings that a parsed TOML file holds."""
    config = _build(TrainConfig, content, prefix="")
    assert isinstance(config, TrainConfig), "built from its own class"
    return config


def write_config(config: TrainConfig) -> str:
    """The settings as TOML, every one of them."""
    top = [f for f in fields(config) if not is_dataclass(getattr(config, f.name))]
    lines = [f"{f.name} = {_toml(getattr(config, f.name))}" for f in top]
    for part in (f for f in fields(config) if f not in top):
        lines += ["", f"[{part.name}]"]
        value = getattr(config, part.name)
        lines += [f"{f.name} = {_toml(getattr(value, f.name))}" for f in fields(value)]
    return "\n".join(lines) + "\n"


def _text_of(source: str | Path) -> str:
    if str(source) in preset_names():
        return (resources.files("equipoise.rl") / "presets" / f"{source}.toml").read_text(encoding="utf-8")
    path = Path(source)
    if not path.is_file():
        raise TrainingError(f"no preset and no file {str(source)!r}; presets: {', '.join(preset_names())}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} cannot be read as a TOML file: {error}") from error


def _parse(text: str, *, place: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TrainingError(f"{place} is not TOML: {error}") from error


def _put(content: dict[str, Any], setting: str) -> None:
    name, equals, text = setting.partition("=")
    if not equals or not name.strip():
        raise TrainingError(f"--set {setting!r} is not of the form a.b=value")
    *tables, key = name.strip().split(".")
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise TrainingError(f"--set {setting!r}: {table!r} is a single setting, not a table")
    content[key] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # A bare word, a path or a URL: quotes would only be lost to the shell.
        return text


def _build(kind: Any, content: Mapping[str, Any], *, prefix: str) -> Any:
    known, hints = [f.name for f in fields(kind)], get_type_hints(kind)
    for key in content:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"
            raise TrainingError(f"unknown setting {prefix}{key}; {hint}")
    values = {key: _fit(hints[key], value, name=f"{prefix}{key}") for key, value in content.items()}
    return kind(**values)


def _fit(hint: Any, value: Any, *, name: str) -> Any:
    """`value` as the kind of its field, or an error that names both."""
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise TrainingError(f"setting {name} is a table; give its settings as {name}.key, not {value!r}")
        return _build(hint, value, prefix=f"{name}.")
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise TrainingError(f"setting {name} is {value!r}; it must be one of {', '.join(get_args(hint))}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
            raise TrainingError(f"setting {name} is {value!r}; it must be a list of words")
        return tuple(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TrainingError(f"setting {name} is {value!r}; it must be {_WORDS[hint]}")
    return value


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text, in quotes where it looks like something else: '\"2026\"'",
    bool: "true or false",
}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    return repr(value)
