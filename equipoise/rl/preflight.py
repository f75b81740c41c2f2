"""What can be wrong with a run, found before anything is made: before a rank is started or an old result replaced.

    settings    the reward, the questions, the model's shape and tokenizer, the source of rollouts, extras, devices
    places      folders to write to, the run to go on with, and what it keeps

Each check opens the very thing that training will open, so that both say the same. Knows the order of checks. Does not
start anything, and changes no file.

Invariants (asserted by the tests):
1. A setting that names what is not there is refused by its name, its value and what to do, with nothing written.
2. What passes here opens in a run.
"""

import os
import socket
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from equipoise.core.errors import TrainingError
from equipoise.rl.checkpoint import newest_checkpoint, trained_steps
from equipoise.rl.config import TrainConfig, setting_of
from equipoise.rl.config_file import read_config
from equipoise.rl.forecast import shape_of
from equipoise.rl.layout import build_cluster
from equipoise.rl.model import Limits, check_checkpoint, check_weights, limits_of, open_tokenizer
from equipoise.rl.outside import Outside, RecordedRollouts, find_rollouts
from equipoise.rl.rollout import Request
from equipoise.rl.task import Question, find_reward, open_task

_ANSWER_S = 5.0
"""How long an engine may take to accept a connection."""
_ASKED = 64
"""Questions that are tried with the tokenizer."""


def check_settings(config: TrainConfig) -> None:
    """Raise if something that the settings name is not there, or does not fit the rest."""
    reward = find_reward(config.task.reward)
    if config.model.path:
        check_checkpoint(config.model.path)
    build_cluster(config, shape_of(config))
    limits = limits_of(config.model)
    if config.model.path:
        check_weights(config.model.path)
    asked = open_task(config.task).questions(_ASKED, seed=config.seed, step=0)
    # Tried once: a reward that always fails is told now, not after the warm-up and a rollout.
    reward(asked[0].prompt, asked[0].answer, asked[0].answer)
    _check_tokens(config, asked, limits)
    _check_source(config)
    _check_extras(config)
    _check_devices(config)


def check_places(*, out: Path, record: Path | None = None, is_resumed: bool = False) -> None:
    """Raise if results or recorded routes have no place, or if there is no run to go on with."""
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


def find_run(folder: Path) -> Path:
    """Return the settings of the run to go on with, or say what the folder is instead."""
    settings = folder / "config.toml"
    if settings.is_file():
        return settings
    if not folder.exists():
        raise TrainingError(f"--resume {folder}: there is no such folder; {_GIVE}")
    inside = next((parent for parent in folder.resolve().parents if (parent / "config.toml").is_file()), None)
    if inside is not None:
        raise TrainingError(f"--resume {folder} lies inside a run; give the run: --resume {inside}")
    raise TrainingError(f"--resume {folder} is no run, it holds no config.toml; {_GIVE}")


_GIVE = "give the folder that the run wrote to, its --out (out/train if none was given)"


def check_resumed(config: TrainConfig, folder: Path) -> None:
    """Raise if the settings are not those that the newest checkpoint of a run was made with, where that matters."""
    newest = newest_checkpoint(folder / "checkpoints")
    if newest is None:
        # Nothing was trained that could not fit: training begins anew.
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


_MODEL = ("path", "family", "layers", "hidden", "heads", "experts", "top_k", "expert_width", "vocabulary", "dtype")
_KEPT = ("seed", "ranks", "ep", "balance.mode", *(f"model.{name}" for name in _MODEL))
"""Settings that weights, optimizer and random state of a checkpoint depend on."""


def _check_folder(flag: str, folder: Path) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise TrainingError(f"{flag} {folder}: {there} is a file; give a folder")
    if not os.access(there, os.W_OK):
        raise TrainingError(f"{flag} {folder}: no right to write to {there}; give another folder")


def _check_tokens(config: TrainConfig, asked: list[Question], limits: Limits) -> None:
    """Prompts and answers have tokens that the model knows, and a sample fits the model's positions."""
    tokenizer = open_tokenizer(config.model)
    prompts = [tokenizer.encode(question.prompt) for question in asked]
    answers = [tokenizer.encode(question.answer) for question in asked if config.warmup.steps]
    for question, prompt in zip(asked, prompts, strict=True):
        if not prompt:
            raise TrainingError(f"prompt {question.prompt!r} has no token; every question needs one")
    highest = max(tokenizer.end, *(token for tokens in (*prompts, *answers) for token in tokens))
    if highest >= limits.vocabulary:
        raise TrainingError(
            f"the model {config.model.path or config.model.family} has {limits.vocabulary} token ids, its tokenizer "
            f"({tokenizer.words}) gives {highest}; put the model's own tokenizer into its folder"
        )
    longest = max(map(len, prompts))
    if longest + config.rollout.max_new_tokens > limits.positions:
        raise TrainingError(
            f"setting rollout.max_new_tokens is {config.rollout.max_new_tokens}; with prompts of {longest} tokens a "
            f"sample would be longer than the model's {limits.positions} positions; use at most "
            f"{limits.positions - longest}"
        )


def _check_source(config: TrainConfig) -> None:
    source = config.rollout.source
    if not source:
        return
    if not source.startswith("http"):
        find_rollouts(source, steps=config.steps)
        _check_rollouts(config)
        return
    try:
        address = urlsplit(source)
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=_ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"setting rollout.source is {source}, where nothing answers ({error}); start the engine first"
        ) from error


def _check_rollouts(config: TrainConfig) -> None:
    """The first step's recorded rollouts fit the model and answer the questions; later ones are read when due."""
    outside = Outside(config=config.rollout, model=shape_of(config), tokenizer=open_tokenizer(config.model))
    questions = open_task(config.task).questions(config.rollout.prompts, seed=config.seed, step=0)
    asked = Request(step=0, first=0, questions=questions, seed=config.seed)
    for _ in RecordedRollouts(config.rollout.source, outside).generate(asked):
        pass


def _check_extras(config: TrainConfig) -> None:
    wanted = {"track.tensorboard": config.track.tensorboard, "track.wandb_project": config.track.wandb_project}
    for name, package in (("track.tensorboard", "tensorboard"), ("track.wandb_project", "wandb")):
        if wanted[name] and find_spec(package) is None:
            raise TrainingError(
                f"setting {name} is {wanted[name]}, but {package} is not installed; "
                f"run: pip install 'equipoise[{package}]', or leave it out"
            )


def _check_devices(config: TrainConfig) -> None:
    import torch

    if config.model.device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("setting model.device is cuda, but torch finds no GPU here; use --set model.device=cpu")
