"""A whole run on one rank: build or resume, warm up, train step by step, keep checkpoints, metrics and routes.

What a run leaves in its folder:
    config.toml               every setting
    metrics.jsonl             one line per step
    summary.json              what was learnt, what was balanced, and where things are
    checkpoints/step-000010   see `checkpoint`; its `model` is a HF checkpoint

With `record`, the routes of every step go to a folder of their own, as vLLM's HTTP form writes them, with the model's
`config.json` in a folder `model` beside them: `equipoise doctor FOLDER --model FOLDER/model/config.json`.

Knows the order of a run. Does not know how a step is trained (`train`).

Invariants (asserted by the tests):
1. A run that is resumed leaves what an uninterrupted one leaves, but for times; from its first moment on it can be.
2. Recorded routes pass the doctor with no finding.
"""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from equipoise.adapters.transformers import inspect
from equipoise.core.errors import TrainingError
from equipoise.core.files import whole_file
from equipoise.planning.worker import PlanWorker
from equipoise.rl.batch import Sample, to_routes
from equipoise.rl.checkpoint import Checkpoints, State
from equipoise.rl.config import TrainConfig, write_config
from equipoise.rl.launch import Event, Show
from equipoise.rl.layout import Layout
from equipoise.rl.learner import StartedPlanner, start_planner
from equipoise.rl.metrics import Sinks, read_lines
from equipoise.rl.model import build_model, load_model, open_tokenizer
from equipoise.rl.stages import warm_up
from equipoise.rl.task import CharTokenizer, open_task
from equipoise.rl.train import Trainer
from equipoise.routes import write_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a run reads and writes."""

    out: Path
    record: Path | None = None
    is_resumed: bool = False


class _Opened(NamedTuple):
    """A trainer that is ready."""

    trainer: Trainer
    planner: StartedPlanner | None
    first: int
    """The first step to train."""


def prepare(config: TrainConfig, out: Path) -> None:
    """Make `out` the folder of a new run: what an old one left goes, and the settings are written.

    Before any rank starts, so that a run which ends in its first moments can be resumed like any other.
    """
    try:
        for entry in out.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise TrainingError(f"--out {out} cannot be emptied ({error}); give another folder") from error
    _write_settings(config, out)


def _write_settings(config: TrainConfig, out: Path) -> None:
    with whole_file(out / "config.toml", error=TrainingError) as draft:
        draft.write_text(write_config(config), encoding="utf-8")


def run(
    config: TrainConfig, layout: Layout, show: Show, places: Places, worker: PlanWorker | None = None
) -> dict[str, Any]:
    """Train from beginning to end. Every rank must call this; returns the summary.

    Args:
        worker: a planning process to use, instead of an own one
    """
    checkpoints = Checkpoints(places.out / "checkpoints", layout, facts=_facts(config), keep=config.checkpoint.keep)
    newest = checkpoints.newest() if places.is_resumed else None
    opened = _open(config, layout, show, checkpoints=checkpoints, newest=newest, worker=worker)
    trainer, planner, first = opened.trainer, opened.planner, opened.first
    _begin(config, layout, show, places, trainer=trainer, first=first)
    if places.is_resumed:
        show(Event("note", {"words": _words_of_resume(config, newest, first=first)}))
    sinks = _open_sinks(config, layout, places, first=first)
    history: list[dict[str, Any]] = []
    for step in range(first, config.steps):
        metrics = trainer.step(step)
        history.append(metrics)
        if sinks is not None:
            sinks.write(metrics)
        show(Event("metrics", metrics))
        if places.record is not None:
            _record(places.record, trainer, layout, step)
        every = config.checkpoint.every
        if (every and (step + 1) % every == 0) or step + 1 == config.steps:
            show(Event("stage", {"step": step, "name": "checkpoint", "rank": layout.rank}))
            _save(checkpoints, trainer, step + 1)
            if planner is not None:
                planner.forget()
    if sinks is not None:
        sinks.close()
    summary = _summary(places, layout)
    if layout.is_first:
        with whole_file(places.out / "summary.json", error=TrainingError) as draft:
            draft.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    trainer.close()
    if planner is not None:
        planner.close()
    show(Event("end", summary))
    return summary


def _open(
    config: TrainConfig,
    layout: Layout,
    show: Show,
    *,
    checkpoints: Checkpoints,
    newest: Path | None,
    worker: PlanWorker | None,
) -> "_Opened":
    """The trainer, warmed up or as a checkpoint has it. Every rank must call this."""
    if newest is None:
        model = build_model(config.model, seed=config.seed)
    else:
        model = load_model(newest / "model").to(device=config.model.device, dtype=getattr(torch, config.model.dtype))
    planner = start_planner(config, inspect(model).shape, mode=config.balance.mode, worker=worker)
    if newest is None:
        warm_up_told(model, config, layout, show)
    # Every rank's planner is awaited here, so that none waits for another's inside a step.
    ready = None if planner is None else planner.ready(show)
    state = None if newest is None else checkpoints.load(newest)
    trainer = Trainer(model.train(), config, layout, show=show, worker=ready)
    if state is None:
        return _Opened(trainer, planner, 0)
    trainer.restore(state)
    return _Opened(trainer, planner, state.step)


def _words_of_resume(config: TrainConfig, newest: Path | None, *, first: int) -> str:
    if newest is None:
        return "there is no checkpoint yet: training begins anew"
    if first >= config.steps:
        return f"{newest} is the end of the run: all of its {config.steps} steps are trained; more: --set steps=N"
    return f"resumed from {newest}, next is step {first}"


def warm_up_told(model: nn.Module, config: TrainConfig, layout: Layout, show: Show) -> None:
    """Warm up, telling how far it is. Every rank must call this."""

    def tell(done: int, loss: float) -> None:
        show(Event("progress", {"words": "warm-up", "done": done, "total": config.warmup.steps, "loss": loss}))

    task, tokenizer = open_task(config.task), open_tokenizer(config.model)
    warm_up(model, config, layout, task=task, tokenizer=tokenizer, show=tell)


def _begin(config: TrainConfig, layout: Layout, show: Show, places: Places, *, trainer: Trainer, first: int) -> None:
    shape = trainer.learner.shape
    show(
        Event(
            "start",
            {
                "model": config.model.path or config.model.family,
                "parameters": trainer.num_parameters,
                "layers": shape.layers,
                "experts": shape.experts,
                "top_k": shape.top_k,
                "ranks": layout.ranks,
                "nodes": layout.ranks // config.node_ranks,
                "mode": config.balance.mode,
                "first": first,
                "steps": config.steps,
                "out": str(places.out),
            },
        )
    )
    if config.model.path and isinstance(trainer.tokenizer, CharTokenizer):
        show(Event("note", {"words": f"tokenizer: {trainer.tokenizer.words}"}))
    if layout.is_first:
        _write_settings(config, places.out)


def _open_sinks(config: TrainConfig, layout: Layout, places: Places, *, first: int) -> Sinks | None:
    if not layout.is_first:
        return None
    return Sinks(places.out, config.track, first_step=first, settings=asdict(config))


def _facts(config: TrainConfig) -> dict[str, Any]:
    return {
        "seed": config.seed,
        "ranks": config.ranks,
        "ep": config.group_ranks,
        "mode": config.balance.mode,
        "model": config.model.path or config.model.family,
    }


def _save(checkpoints: Checkpoints, trainer: Trainer, step: int) -> None:
    """Write a checkpoint. Every rank must call this."""
    weights = trainer.learner.state_dict()
    state = State(
        step=step,
        optimizer=trainer.learner.optimizer_state(),
        reference=None if trainer.reference is None else trainer.reference.state_dict(),
        random=torch.get_rng_state(),
    )

    def save_model(path: Path) -> None:
        trainer.learner.save_model(path, weights)
        trainer.tokenizer.save(path)

    checkpoints.save(state, save_model=save_model)


def _record(folder: Path, trainer: Trainer, layout: Layout, step: int) -> None:
    """Write one step's routes of all ranks, in vLLM's HTTP form. Every rank must call this."""
    assert trainer.experience is not None, "a step was trained"
    parts: list[list[Sample]] | None = [[] for _ in range(layout.ranks)] if layout.is_first else None
    dist.gather_object(trainer.experience.samples, parts, dst=dist.get_global_rank(layout.world, 0), group=layout.world)
    if parts is None:
        return
    (folder / "model").mkdir(parents=True, exist_ok=True)
    trainer.learner.model.config.save_pretrained(folder / "model")
    # Without the version of the weights: a folder of several steps would otherwise look like a mixture of them.
    samples = [replace(sample, weight_version="") for part in parts for sample in part]
    write_routes(to_routes(samples, trainer.learner.shape), folder / f"step-{step:06d}.jsonl", format="vllm-http")


def _summary(places: Places, layout: Layout) -> dict[str, Any]:
    """What the whole run did, read back from its metrics, so that a resumed run says the same."""
    if not layout.is_first:
        return {}
    steps = read_lines(places.out / "metrics.jsonl")
    quarter = max(1, len(steps) // 4)
    first, last = steps[:quarter], steps[-quarter:]
    return {
        "steps": len(steps),
        "reward_first_quarter": _mean(first, "reward"),
        "reward_last_quarter": _mean(last, "reward"),
        "right_first_quarter": _mean(first, "right_share"),
        "right_last_quarter": _mean(last, "right_share"),
        "skew_before": _mean(steps, "skew_before"),
        "skew_after": None if steps[0]["skew_after"] is None else _mean(steps, "skew_after"),
        "coverage": _mean(steps, "coverage"),
        "replayed_rows": sum(step["replayed_rows"] for step in steps),
        "checked_windows": sum(step["checked_windows"] for step in steps),
        "out": str(places.out),
        "record": None if places.record is None else str(places.record),
    }


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([step[name] for step in steps]))
