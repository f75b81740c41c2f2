"""`TrainConfig`: every setting of a training run, with its default and its range.

Knows names and ranges of settings. Does not know files (`config_file` does) nor torch; whether a model fits the ranks
is `model`'s to judge.

Invariants (asserted by the tests):
1. A value out of its range is refused by name, value and limit, before anything is built.
2. Prompts, samples and micro-batches come out even, so that every rank makes the same visits.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from equipoise.core.errors import TrainingError

Family = Literal["qwen3-moe", "olmoe", "mixtral", "deepseek-v3", "gpt-oss"]
Mode = Literal["off", "static", "equipoise"]
"""`off`: data parallel, all experts on every rank. `static`: contiguous expert parallelism. `equipoise`: planned."""
Replay = Literal["R3", "R2", "off"]
"""`R3`: both stages replay the rollout's routes. `R2`: recompute records, update replays. `off`: no replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model: a local HF checkpoint, or a random one of these sizes."""

    path: str = ""
    """A folder with a HF checkpoint; empty: a random model of the sizes below."""
    family: Family = "qwen3-moe"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    experts: int = 16
    top_k: int = 2
    expert_width: int = 64
    vocabulary: int = 97
    """Token ids of a random model; the embedded tokenizer needs 97."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    ranks_per_device: int = 1
    """Ranks that share one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """What is asked, and how an answer is judged."""

    data: str = ""
    """A JSONL file of {"prompt": ..., "answer": ...}; empty: the embedded arithmetic."""
    reward: str = ""
    """`module:function` of (prompt, response, answer) -> float; empty: 1 for the exact answer."""
    domains: tuple[str, ...] = ("add", "sub", "reverse", "largest")
    """Kinds of embedded questions; each makes loads of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """Supervised steps before the first rollout, so that some answers are right."""

    steps: int = 0
    batch: int = 64
    """Questions per step, over all ranks."""
    learning_rate: float = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How samples are made."""

    source: str = ""
    """Empty: our own sampling; a folder of recorded rollouts, one file per step; or the URL of an engine."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """What the URL speaks."""
    prompts: int = 16
    """Questions per step, over all ranks."""
    samples: int = 8
    """Samples per question: one group of GRPO."""
    max_new_tokens: int = 12
    temperature: float = 1.0
    allow_missing_routes: bool = False
    """Use samples whose routes are broken, without foresight, instead of refusing them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """GRPO and its optimizer."""

    replay: Replay = "R3"
    mini_batches: int = 2
    """Optimizer steps per RL step."""
    micro_batch: int = 16
    """Samples per rank and micro-step, packed without padding."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    adam_eps: float = 1e-6
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    """Weight of the KL to the weights after warm-up; 0: no reference copy is kept."""
    max_grad_norm: float = 1.0
    activation_checkpointing: Literal["none", "reentrant", "non-reentrant"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """Who computes which expert."""

    mode: Mode = "equipoise"
    slots: int = 1
    """Replica slots per rank; 0 for placement alone."""
    objective: Literal["seconds", "skew"] = "seconds"
    """`seconds` charges every cost and may do nothing; `skew` levels rows whatever it costs."""
    cluster: str = "h200"
    """Whose links and kernels are priced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What is kept to resume from."""

    every: int = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = 2
    """Newest checkpoints that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackConfig:
    """Where metrics go beside `metrics.jsonl`."""

    tensorboard: bool = False
    wandb_project: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Every setting of one run."""

    steps: int = 4
    """RL steps: rollout, recompute, update."""
    seed: int = 0
    ranks: int = 2
    """Training processes; under torchrun they must be as many as it started."""
    ranks_per_node: int = 0
    """Ranks that share a declared node; 0: all of them."""
    ep: int = 0
    """Ranks of one EP group; 0: all ranks."""
    fewest_ranks: int = 1
    """Ranks without which these settings make no sense: the model would not fit."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """What moves CUDA tensors; gloo also where ranks share a GPU, which NCCL refuses. CPU tensors go by gloo."""
    timeout_s: float = 120.0
    """Bound on every wait of a rank for another."""
    compare_free: bool = False
    """In a comparison, let every mode make its own rollouts; there is no verdict then."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_model(self.model)
        _check_backend(self)
        _check_shares(self)

    @property
    def group_ranks(self) -> int:
        """Ranks of one EP group."""
        return self.ep or self.ranks

    @property
    def node_ranks(self) -> int:
        """Ranks of one declared node."""
        return self.ranks_per_node or self.ranks

    @property
    def rank_samples(self) -> int:
        """Samples of one rank in one step."""
        return self.rollout.prompts // self.ranks * self.rollout.samples


_LOWEST: dict[str, float] = {
    "steps": 1,
    "seed": 0,
    "ranks": 1,
    "ranks_per_node": 0,
    "ep": 0,
    "fewest_ranks": 1,
    "timeout_s": 1,
    "model.layers": 1,
    "model.hidden": 8,
    "model.heads": 1,
    "model.experts": 2,
    "model.top_k": 1,
    "model.expert_width": 4,
    "model.vocabulary": 97,
    "model.ranks_per_device": 1,
    "warmup.steps": 0,
    "warmup.batch": 1,
    "rollout.prompts": 1,
    "rollout.samples": 2,
    "rollout.max_new_tokens": 1,
    "update.mini_batches": 1,
    "update.micro_batch": 1,
    "update.kl": 0,
    "update.weight_decay": 0,
    "balance.slots": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
}
_HIGHEST: dict[str, float] = {"seed": 2**63 - 1, "timeout_s": 1e6}
_POSITIVE = (
    "warmup.learning_rate",
    "rollout.temperature",
    "update.learning_rate",
    "update.adam_eps",
    "update.clip_low",
    "update.clip_high",
    "update.max_grad_norm",
)


def change(config: TrainConfig, **parts: Any) -> TrainConfig:
    """Return a copy with some settings changed; a part is given as a mapping of its changed fields."""
    values = {k: replace(getattr(config, k), **v) if isinstance(v, Mapping) else v for k, v in parts.items()}
    return replace(config, **values)


def setting_of(config: TrainConfig, name: str) -> Any:
    """The value of a setting, by its full name such as `update.kl`."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _check_ranges(config: TrainConfig) -> None:
    for name, low in _LOWEST.items():
        if not low <= (value := setting_of(config, name)) < inf:
            limit = f"at least {low:g}" if value != inf else "finite"
            raise TrainingError(f"setting {name} is {value}; it must be {limit}")
    for name, high in _HIGHEST.items():
        if not setting_of(config, name) <= high:
            raise TrainingError(f"setting {name} is {setting_of(config, name)}; it must be at most {high:g}")
    for name in _POSITIVE:
        if not 0 < setting_of(config, name) < inf:
            raise TrainingError(f"setting {name} is {setting_of(config, name)}; it must be above 0, and a number")


def _check_model(config: ModelConfig) -> None:
    """A random model's sizes fit together; a checkpoint has its own."""
    if config.path:
        return
    most = config.experts // 2 if config.family == "deepseek-v3" else config.experts
    if config.top_k > most:
        raise TrainingError(
            f"setting model.top_k is {config.top_k}; {config.family} of {config.experts} experts can use at most {most}"
        )
    if config.family == "deepseek-v3" and config.experts % 2:
        raise TrainingError(
            f"setting model.experts is {config.experts}; deepseek-v3 has two groups of them: make it even"
        )
    if config.hidden % (2 * config.heads):
        raise TrainingError(
            f"setting model.hidden is {config.hidden}; it must divide by twice model.heads ({config.heads}), because "
            "positions turn the numbers of a head in pairs"
        )


def _check_backend(config: TrainConfig) -> None:
    if config.backend == "nccl" and config.model.device != "cuda":
        raise TrainingError("setting backend is nccl, which moves CUDA tensors alone; use it with model.device=cuda")
    if config.backend == "nccl" and config.model.ranks_per_device > 1:
        raise TrainingError(
            f"setting backend is nccl, which refuses {config.model.ranks_per_device} ranks on one GPU "
            "(model.ranks_per_device); use --set backend=gloo"
        )


def _check_shares(config: TrainConfig) -> None:
    """Whatever is shared out over ranks, windows and micro-steps must come out even: every rank has equal visits."""
    samples, mini = config.rank_samples, config.update.mini_batches
    for what, number, parts, by in (
        ("rollout.prompts", config.rollout.prompts, config.ranks, "ranks"),
        ("ranks", config.ranks, config.group_ranks, "ep"),
        ("ranks", config.ranks, config.node_ranks, "ranks_per_node"),
        ("samples of a rank (prompts / ranks * samples)", samples, mini, "update.mini_batches"),
        ("samples of a mini-batch and rank", samples // mini, config.update.micro_batch, "update.micro_batch"),
        ("warmup.batch", config.warmup.batch, config.ranks, "ranks"),
    ):
        if number % parts or number < parts:
            raise TrainingError(f"{what}: {number} does not divide by {by} {parts}; change one of them")


# Settings on their way from TOML, presets and `--set`, and back to TOML.
#
# A TOML file holds `steps`, `seed`, `ranks`, ... at the top and one table per part (`model`, `task`, `warmup`,
# `rollout`,
# `update`, `balance`, `checkpoint`, `track`). What it leaves out has the default written in `config.py`.
#
# Invariants (asserted by the tests):
# 1. An unknown key is refused by its full name, with the nearest known one.
# 2. What `write_config` writes reads back as the same settings, for every preset too.
# 3. A value of a wrong kind is refused by name and value.


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
