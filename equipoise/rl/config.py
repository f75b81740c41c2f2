"""`TrainConfig`: every setting of a training run with its default and its range; read from presets, TOML and `--set`.

A TOML file holds `steps`, `seed`, `ranks`, ... at the top and one table per part (`model`, `task`, `warmup`,
`rollout`, `update`, `balance`, `checkpoint`, `track`). A setting that the file leaves out has its default.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from equipoise.core import Cluster, ModelShape
from equipoise.core.errors import TrainingError

Family = Literal["qwen3-moe", "olmoe", "mixtral", "deepseek-v3", "gpt-oss"]
Mode = Literal["off", "static", "equipoise"]
"""`off`: data parallel, all experts on every rank. `static`: contiguous expert parallelism. `equipoise`: planned."""
Replay = Literal["R3", "R2", "off"]
"""`R3`: both stages replay the rollout's routes. `R2`: recompute records, update replays. `off`: no replay."""

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
# Bounded above as well, so that infinity is refused; NaN fails every comparison.
Positive = Annotated[float, Meta(gt=0, le=1e6)]
PositiveOrZero = Annotated[float, Meta(ge=0, le=1e6)]


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model: a local HF checkpoint, or a random one of these sizes."""

    path: str = ""
    """A folder with a HF checkpoint; empty: a random model of the sizes below."""
    family: Family = "qwen3-moe"
    layers: Count = 2
    hidden: Annotated[int, Meta(ge=8)] = 64
    heads: Count = 4
    experts: Annotated[int, Meta(ge=2)] = 16
    top_k: Count = 2
    expert_width: Annotated[int, Meta(ge=4)] = 64
    vocabulary: Annotated[int, Meta(ge=97)] = 97
    """Token ids of a random model; the embedded tokenizer needs 97."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    ranks_per_device: Count = 1
    """Ranks that share one GPU."""


class TaskConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The questions, and how an answer is judged."""

    data: str = ""
    """A JSONL file of {"prompt": ..., "answer": ...}; empty: the embedded arithmetic."""
    reward: str = ""
    """`module:function` of (prompt, response, answer) -> float; empty: 1 for the exact answer."""
    domains: tuple[str, ...] = ("add", "sub", "reverse", "largest")
    """Kinds of embedded questions; each makes loads of its own."""


class WarmupConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised steps before the first rollout, so that some answers are right."""

    steps: CountOrZero = 0
    batch: Count = 64
    """Questions per step, over all ranks."""
    learning_rate: Positive = 3e-3


class RolloutConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How samples are made."""

    source: str = ""
    """Empty: our own sampling; a folder of recorded rollouts, one file per step; or the URL of an engine."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """The protocol of the URL."""
    weights: str = ""
    """A folder through which the engine is given new weights, with the same path for it; empty: over HTTP (sglang)."""
    bucket_mib: Count = 512
    """Most MiB of weights in one request or file."""
    prompts: Count = 16
    """Questions per step, over all ranks."""
    samples: Annotated[int, Meta(ge=2)] = 8
    """Samples per question: one group of GRPO."""
    max_new_tokens: Count = 12
    temperature: Positive = 1.0
    allow_missing_routes: bool = False
    """Use samples whose routes are broken, without foresight, instead of refusing them."""


class UpdateConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GRPO and its optimizer."""

    replay: Replay = "R3"
    mini_batches: Count = 2
    """Optimizer steps per RL step."""
    micro_batch: Count = 16
    """Samples per rank and micro-step, packed without padding."""
    pack: bool = False
    """Let samples of a mini-batch change micro-step and rank inside their EP group, so that fewer rows cross its nodes,
    within the limits that `micro_batch` sets (`loads.pack_window`). Windows are then planned when all samples ended."""
    learning_rate: Positive = 1e-3
    weight_decay: PositiveOrZero = 0.0
    adam_eps: Positive = 1e-6
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    kl: PositiveOrZero = 0.0
    """Weight of the KL to the weights after warm-up; 0: no reference copy is kept."""
    max_grad_norm: Positive = 1.0
    activation_checkpointing: Literal["none", "reentrant", "non-reentrant"] = "none"


class BalanceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rank computes which expert."""

    mode: Mode = "equipoise"
    slots: CountOrZero = 1
    """Replica slots per rank; 0 for placement alone."""
    objective: Literal["seconds", "skew"] = "seconds"
    """`seconds` charges every cost and may do nothing; `skew` levels rows whatever it costs."""
    cluster: str = "h200"
    """The hardware whose links and kernels are priced."""


class CheckpointConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often the run is saved, to be resumed."""

    every: CountOrZero = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep: Count = 2
    """Newest checkpoints that are kept."""


class TrackConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where metrics go beside `metrics.jsonl`."""

    tensorboard: bool = False
    wandb_project: str = ""


class TrainConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of one run."""

    steps: Count = 4
    """RL steps: rollout, recompute, update."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    ranks: Count = 2
    """Training processes; under torchrun as many as it started."""
    ranks_per_node: CountOrZero = 0
    """Ranks that share a declared node; 0: all of them."""
    ep: CountOrZero = 0
    """Ranks of one EP group; 0: all ranks."""
    fewest_ranks: Count = 1
    """Ranks without which these settings make no sense: the model would not fit."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """What moves CUDA tensors, by NCCL also experts between nodes. CPU tensors go by gloo."""
    timeout_s: Annotated[float, Meta(ge=1, le=1e6)] = 120.0
    """Bound on every wait of a rank for another."""
    compare_free: bool = False
    """In a comparison, let every mode make its own rollouts; there is no verdict then."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    warmup: WarmupConfig = WarmupConfig()
    rollout: RolloutConfig = RolloutConfig()
    update: UpdateConfig = UpdateConfig()
    balance: BalanceConfig = BalanceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()

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
    try:
        if str(source) in preset_names():
            text = (resources.files("equipoise.rl") / "presets" / f"{source}.toml").read_text(encoding="utf-8")
        elif Path(source).is_file():
            text = Path(source).read_text(encoding="utf-8")
        else:
            raise TrainingError(f"no preset and no file {str(source)!r}; presets: {', '.join(preset_names())}")
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"{source} cannot be read as a TOML file: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise TrainingError(f"{source} is not TOML: {error}") from error

    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise TrainingError(f"--set {setting!r} is not of the form a.b=value")
        *tables, key = name.strip().split(".")
        table = content
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise TrainingError(f"--set {setting!r}: {part!r} is a single setting, not a table")
        try:
            table[key] = tomllib.loads(f"value = {value.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            # A bare word, a path or a URL: the shell has removed the quotes.
            table[key] = value.strip()
    return build_config(content)


def build_config(content: Mapping[str, Any]) -> TrainConfig:
    """Build the settings that a parsed TOML file holds, checked one by one and against each other."""
    try:
        config = msgspec.convert(content, TrainConfig)
    except msgspec.ValidationError as error:
        raise TrainingError(_describe(str(error), content)) from error
    _check_model(config.model)
    if config.backend == "nccl" and config.model.device != "cuda":
        raise TrainingError("setting backend is nccl, which moves CUDA tensors alone; use it with model.device=cuda")
    # Samples and ranks must divide evenly: every rank runs the same number of micro-steps.
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
    return config


def change(config: TrainConfig, **parts: Any) -> TrainConfig:
    """Return a copy with some settings changed; a part is given as a mapping of its changed fields."""
    content = msgspec.to_builtins(config)
    for name, value in parts.items():
        content[name] = content[name] | value if isinstance(value, Mapping) else value
    return build_config(content)


def setting_of(config: TrainConfig, name: str) -> Any:
    """Return the value of a setting, by its full name such as `update.kl`."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def write_config(config: TrainConfig) -> str:
    """Return every setting as TOML."""
    content = msgspec.to_builtins(config)
    tables = {name: value for name, value in content.items() if isinstance(value, dict)}
    lines = [f"{name} = {_toml(value)}" for name, value in content.items() if name not in tables]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{name} = {_toml(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def build_cluster(config: TrainConfig, model: ModelShape) -> Cluster:
    """Return the declared cluster of one EP group; raise where the experts do not divide by its ranks."""
    ep, per_node = config.group_ranks, min(config.node_ranks, config.group_ranks)
    cluster = Cluster.preset(config.balance.cluster, nodes=-(-ep // per_node), ranks_per_node=per_node, ep=ep)
    cluster.home_slots(model)
    return cluster


def _describe(error: str, content: Mapping[str, Any]) -> str:
    """Turn an error of msgspec, such as "Expected `int` >= 1 - at `$.update.x`", into a line with path and value."""
    problem, _, place = error.partition(" - at `$.")
    path = place.rstrip("`").partition("[")[0]
    names = [name for name in path.split(".") if name]
    kind: Any = TrainConfig
    value: Any = content
    for name in names:
        kind, value = get_type_hints(kind)[name], value[name]
    if problem.startswith("Object contains unknown field"):
        unknown, known = problem.split("`")[1], list(kind.__struct_fields__)
        near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
        prefix = "".join(f"{name}." for name in names)
        hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"unknown setting {prefix}{unknown}; {hint}"
    if get_origin(kind) is Literal:
        return f"setting {path} is {value!r}; it must be one of {', '.join(get_args(kind))}"
    if problem.startswith("Expected `object`"):
        return f"setting {path} is a table; give its settings as {path}.key, not {value!r}"
    hint = ", in quotes where it looks like something else: '\"2026\"'" if kind is str else ""
    return f"setting {path} is {value!r}; {problem[0].lower()}{problem[1:]}{hint}"


def _check_model(config: ModelConfig) -> None:
    """Raise if the sizes of a random model do not fit together; a checkpoint has its own."""
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
            "rotary embeddings rotate the numbers of a head in pairs"
        )


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # JSON writes strings and booleans as TOML does; floats keep all their digits.
    return json.dumps(value, ensure_ascii=False)
