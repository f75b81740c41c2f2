"""What is wrong with a run, found before a rank is started or an old result replaced; and what the run would need.

Each check opens the very thing that training will open, so that both give the same errors; nothing is written. The
forecast is modelled, not measured: weights and optimizer by their sizes, activations by received rows, seconds by the
cost model. It needs neither weights nor GPUs, and imports the planner.
"""

import os
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from equipoise.core import ModelShape
from equipoise.core.errors import TrainingError
from equipoise.core.options import Activations
from equipoise.engines.connection import Patience
from equipoise.launch import find_torchrun
from equipoise.rl.checkpoint import newest_checkpoint, trained_steps
from equipoise.rl.config import TrainConfig, build_cluster, read_config, setting_of
from equipoise.rl.metrics import not_installed
from equipoise.rl.model import check_checkpoint, check_weights, family_config, limits_of, open_tokenizer
from equipoise.rl.rollout import Engine, Outside, RecordedRollouts, Request, find_rollouts
from equipoise.rl.task import Question, find_reward, open_task

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2}
_COPIES = 4
"""Weights, gradients and AdamW's two moments, all in the model's dtype."""
_CONNECT_S = 5.0
"""How long an engine may take to accept a connection."""
_TRIED = 64
"""Questions that are tried with the tokenizer."""
_GIVE = "give the folder that the run wrote to, its --out (out/train if none was given)"
_MODEL = ("path", "family", "layers", "hidden", "heads", "experts", "top_k", "expert_width", "vocabulary", "dtype")
_KEPT = ("seed", "balance.mode", *(f"model.{name}" for name in _MODEL))
"""Settings that a checkpoint depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A run, described before it starts."""

    ranks: int
    parameters: int
    trained_gib: float
    """Weights, gradients and optimizer of one rank: its experts and everything that is not an expert."""
    rollout_gib: float
    """The whole copy that makes rollouts, on every rank."""
    replica_gib: float
    """Replica slots, and boxes for experts whose homes change."""
    row_page_gib: float
    """Rows that ranks of one node read where they are."""
    received_gib: float
    """Rows and activations of the busiest rank at its worst visit, as planned."""
    limit_gib: float
    host_gib: float
    """Host memory of one node: the store of all experts, which weight sync and checkpoints read."""
    skew_before: float
    skew_after: float
    static_s: float
    planned_s: float
    tokens: int
    """Generated tokens that were planned for, of one window."""

    @property
    def total_gib(self) -> float:
        """All memory of one rank."""
        return self.trained_gib + self.rollout_gib + self.replica_gib + self.row_page_gib + self.received_gib

    def lines(self) -> list[str]:
        """Return the forecast as text."""
        fit = "fits" if self.total_gib <= self.limit_gib else "DOES NOT FIT"
        return [
            f"forecast for {self.ranks} ranks, {self.parameters / 1e9:.3g} B parameters (modelled, nothing was run)",
            f"  memory per rank  {self.total_gib:.1f} GiB of {self.limit_gib:.0f}, {fit}: weights, gradients and "
            f"optimizer {self.trained_gib:.1f}, rollout copy {self.rollout_gib:.1f}, replica slots "
            f"{self.replica_gib:.2f}, rows read in place {self.row_page_gib:.2f}, rows and activations "
            f"{self.received_gib:.2f}",
            f"  host memory      {self.host_gib:.1f} GiB on each node, for the store of all experts",
            f"  plan             skew {self.skew_before:.2f} before, {self.skew_after:.2f} after; expert layers of one "
            f"update window of {self.tokens} tokens {self.static_s:.3f} s, planned {self.planned_s:.3f} s",
        ]


def forecast(config: TrainConfig) -> Forecast:
    """Describe a run from its settings; plans one generated update window."""
    from equipoise.loads import count_loads, generate_counts, rank_loads, schedule_samples, skew_ML
    from equipoise.loads.memory import plan_memory
    from equipoise.planner import PlanOptions, plan

    shape = shape_of(config)
    cluster = build_cluster(config, shape)
    samples = config.rank_samples // config.update.mini_batches * cluster.ep
    counts = generate_counts(shape, samples=samples, mean_tokens=max(2, config.rollout.max_new_tokens // 2))
    window = schedule_samples(
        counts.tokens_B, ranks=cluster.ep, samples_per_micro_step=config.update.micro_batch, stage="update"
    )
    loads = count_loads(counts, window)
    balance, rows = config.balance, PlanOptions(sends="rows")  # as a balancer plans
    planned = plan(loads, cluster=cluster, model=shape, slots=balance.slots, objective=balance.objective, options=rows)
    kept: Activations = "kept" if config.update.activation_checkpointing == "none" else "recomputed"
    memory = plan_memory(planned, activations=kept)
    width, experts = _BYTES[config.model.dtype], shape.experts * shape.layers * shape.expert_params
    dense = dense_parameters(config, shape)
    return Forecast(
        ranks=config.ranks,
        parameters=experts + dense,
        trained_gib=(experts / cluster.ep + dense) * width * _COPIES / GIB,
        rollout_gib=(experts + dense) * width / GIB,
        replica_gib=memory.slots_bytes / GIB,
        row_page_gib=memory.page_bytes / GIB,
        received_gib=(int(memory.peak_R.max()) - memory.slots_bytes - memory.page_bytes) / GIB,
        limit_gib=cluster.memory_bytes / GIB,
        host_gib=experts * width / GIB if config.balance.mode == "equipoise" else 0.0,
        skew_before=float(skew_ML(rank_loads(loads)).mean()),
        skew_after=float(skew_ML(planned.rank_load_MLR).mean()),
        static_s=planned.static_seconds,
        planned_s=planned.seconds.total,
        tokens=int(window.num_tokens_MR.sum()),
    )


def shape_of(config: TrainConfig) -> ModelShape:
    """Return the shape of the configured model: of its checkpoint if there is one, else of the given sizes."""
    if config.model.path:
        return ModelShape.from_config(config.model.path)
    shape = ModelShape.from_config(family_config(config.model).to_dict(), name=config.model.family)
    return shape.replace(weight_bytes=_BYTES[config.model.dtype])


def dense_parameters(config: TrainConfig, shape: ModelShape) -> int:
    """Return the number of weights that every rank has: attention, routers, shared experts, embeddings and head."""
    per_layer = shape.attention_params + shape.hidden * shape.experts + shape.shared_experts * shape.expert_params
    return shape.hidden_layers * per_layer + 2 * config.model.vocabulary * shape.hidden


def too_few(config: TrainConfig) -> str | None:
    """Return why this machine, or torchrun, has too few ranks or devices for the settings; None where they suffice."""
    torchrun = find_torchrun()
    if config.ranks < config.fewest_ranks:
        return (
            f"setting ranks is {config.ranks}; these settings need at least {config.fewest_ranks} (fewest_ranks): "
            "start them on that many GPUs with torchrun, or use another preset"
        )
    if torchrun is not None and torchrun.ranks != config.ranks:
        there = torchrun.ranks
        return f"setting ranks is {config.ranks}, torchrun started {there}; start as many, or --set ranks={there}"
    if config.model.device != "cuda" or torchrun is not None:
        return None
    import torch

    there = torch.cuda.device_count() * config.model.ranks_per_device
    if there >= config.ranks:
        return None
    return (
        f"{config.ranks} ranks on GPUs were asked for; this machine holds {there} (devices: "
        f"{torch.cuda.device_count()}, ranks on each: {config.model.ranks_per_device}). Start them "
        "with torchrun on more machines, or use --preset tiny"
    )


def check_settings(config: TrainConfig) -> None:
    """Raise if something that the settings name is not there, or does not fit the rest."""
    import torch

    reward = find_reward(config.task.reward)
    if config.model.path:
        check_checkpoint(config.model.path)
    build_cluster(config, shape_of(config))
    limits = limits_of(config.model)
    if config.model.path:
        check_weights(config.model.path)
    asked = open_task(config.task).questions(_TRIED, seed=config.seed, step=0)
    # Tried once: a reward that always fails is found now, not after the warm-up and a rollout.
    reward(asked[0].prompt, asked[0].answer, asked[0].answer)
    _check_tokens(config, asked, *limits)
    if config.rollout.source:
        _check_source(config)
    for name, package in (("track.tensorboard", "tensorboard"), ("track.wandb_project", "wandb")):
        if (wanted := setting_of(config, name)) and find_spec(package) is None:
            raise not_installed(name, wanted, package=package)
    if config.model.device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("setting model.device is cuda, but torch finds no GPU here; use --set model.device=cpu")


def _check_tokens(config: TrainConfig, asked: list[Question], vocabulary: int, positions: int) -> None:
    """Raise if prompts or answers have tokens that the model has not, or a sample does not fit its positions."""
    tokenizer = open_tokenizer(config.model)
    prompts = [tokenizer.encode(question.prompt) for question in asked]
    answers = [tokenizer.encode(question.answer) for question in asked if config.warmup.steps]
    for question, prompt in zip(asked, prompts, strict=True):
        if not prompt:
            raise TrainingError(f"prompt {question.prompt!r} has no token; every question needs one")
    highest = max(tokenizer.end, *(token for tokens in (*prompts, *answers) for token in tokens))
    if highest >= vocabulary:
        raise TrainingError(
            f"the model {config.model.path or config.model.family} has {vocabulary} token ids, its tokenizer "
            f"({tokenizer.description}) gives {highest}; put the model's own tokenizer into its folder"
        )
    longest = max(map(len, prompts))
    if longest + config.rollout.max_new_tokens > positions:
        raise TrainingError(
            f"setting rollout.max_new_tokens is {config.rollout.max_new_tokens}; with prompts of {longest} tokens a "
            f"sample would be longer than the model's {positions} positions; use at most "
            f"{positions - longest}"
        )


def _check_source(config: TrainConfig) -> None:
    """Raise if an engine does not answer, or if the first step's recorded rollouts do not fit model and questions."""
    source = config.rollout.source
    outside = Outside(config=config.rollout, model=shape_of(config), tokenizer=open_tokenizer(config.model))
    if source.startswith("http"):
        try:
            address = urlsplit(source)
            port = address.port or (443 if address.scheme == "https" else 80)
            socket.create_connection((address.hostname or "", port), timeout=_CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise TrainingError(
                f"setting rollout.source is {source}, where nothing answers ({error}); start the engine first"
            ) from error
        Engine(source, outside, patience=Patience(attempts=1, timeout_s=_CONNECT_S)).weights.check()
        if config.rollout.weights:
            _check_folder("setting rollout.weights", Path(config.rollout.weights))
        return
    find_rollouts(source, steps=config.steps)
    questions = open_task(config.task).questions(config.rollout.prompts, seed=config.seed, step=0)
    asked = Request(step=0, first=0, questions=questions, seed=config.seed)
    for _ in RecordedRollouts(source, outside).generate(asked):
        pass


def check_places(*, out: Path, record: Path | None = None, is_resumed: bool = False) -> None:
    """Raise if results or recorded routes cannot be written, or if there is no run to resume."""
    if is_resumed:
        find_run(out)
    elif out.is_dir() and any(out.iterdir()) and not (out / "config.toml").exists():
        raise TrainingError(f"--out {out} holds something that is no training run; give another folder")
    _check_folder("--out", out)
    if record is None:
        return
    _check_folder("--record", record)
    if not is_resumed and record.is_dir() and any(record.iterdir()):
        raise TrainingError(f"--record {record} holds something already; give a new folder, or empty it")


def _check_folder(flag: str, folder: Path) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise TrainingError(f"{flag} {folder}: {there} is a file; give a folder")
    if not os.access(there, os.W_OK):
        raise TrainingError(f"{flag} {folder}: no right to write to {there}; give another folder")


def find_run(folder: Path) -> Path:
    """Return the settings file of the run to resume; raise if the folder holds no run."""
    settings = folder / "config.toml"
    if settings.is_file():
        return settings
    if not folder.exists():
        raise TrainingError(f"--resume {folder}: there is no such folder; {_GIVE}")
    inside = next((parent for parent in folder.resolve().parents if (parent / "config.toml").is_file()), None)
    if inside is not None:
        raise TrainingError(f"--resume {folder} lies inside a run; give the run: --resume {inside}")
    raise TrainingError(f"--resume {folder} is no run, it holds no config.toml; {_GIVE}")


def check_resumed(config: TrainConfig, folder: Path) -> None:
    """Raise if the newest checkpoint of a run depends on a setting that has changed."""
    newest = newest_checkpoint(folder / "checkpoints")
    if newest is None:
        # Nothing was trained yet: training begins from the start, with any settings.
        return
    before = read_config(find_run(folder))
    for name in _KEPT:
        now, then = setting_of(config, name), setting_of(before, name)
        if now != then:
            raise TrainingError(
                f"setting {name} is {now!r}, the run in {folder} has {then!r}; a resumed run keeps it: leave it out, "
                "or begin a new run with -o"
            )
    if config.update.kl and not before.update.kl:
        raise TrainingError(
            f"setting update.kl is {config.update.kl}, the run in {folder} has 0 and kept no weights to measure it "
            "from: leave it out, or begin a new run with -o"
        )
    if config.steps < trained_steps(newest):
        raise TrainingError(
            f"setting steps is {config.steps}, the run in {folder} has trained {trained_steps(newest)} already; give "
            "at least as many, or begin a new run with -o"
        )
