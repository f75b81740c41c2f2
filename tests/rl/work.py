"""Small runs that tests call on the pool's ranks, and what they have in common."""

import errno
import os
import resource
import threading
from unittest import mock

import torch
from torch.distributed.checkpoint import FileSystemWriter

from equipoise.core import EquipoiseError
from equipoise.rl import learner as learner_module
from equipoise.rl import train
from equipoise.rl.checkpoint import Checkpoints
from equipoise.rl.compare import run_comparison
from equipoise.rl.config import build_config
from equipoise.rl.learner import sync_weights, warm_up
from equipoise.rl.metrics import ignore
from equipoise.rl.model import build_like, build_model
from equipoise.rl.task import CharTokenizer, open_task
from equipoise.rl.train import Places, Trainer, build_ranks, run
from tests.pool import kept_worker

SMALL = {
    "steps": 2,
    "ranks": 2,
    "timeout_s": 180.0,
    "model": {"layers": 2, "hidden": 32, "heads": 2, "experts": 8, "top_k": 2, "expert_width": 16},
    # A random model gives no right answer; it must still learn something.
    "task": {"reward": "tests.rl.work:share_of_digits"},
    "warmup": {"steps": 6, "batch": 16},
    "rollout": {"prompts": 4, "samples": 4, "max_new_tokens": 5},
    "update": {"mini_batches": 2, "micro_batch": 2},
    "balance": {"mode": "equipoise", "slots": 1, "objective": "skew"},
    "checkpoint": {"every": 1},
}


def share_of_digits(prompt, response, answer):
    """A reward that differs between the samples of a random model."""
    return sum(character in "0123456789abcdefghij" for character in response) / 8


def small(**changes):
    """A configuration of a few thousand weights; `changes` replace or, for a table, change entries of it."""
    content = {name: dict(value) if isinstance(value, dict) else value for name, value in SMALL.items()}
    for name, value in changes.items():
        if isinstance(value, dict):
            content.setdefault(name, {}).update(value)
        else:
            content[name] = value
    return build_config(content)


def train_run(group, config, out, *, record=None, is_resumed=False, show=ignore):
    """A whole run on this rank, as `equipoise train` makes it."""
    worker = kept_worker() if config.balance.mode == "equipoise" else None
    places = Places(out=out, record=record, is_resumed=is_resumed)
    return run(config, build_ranks(config, group), show, places, worker)


def resume_run(group, config, out):
    """Go on with a run."""
    return train_run(group, config, out, is_resumed=True)


def save_after(group, config, out, steps):
    """Train some steps, write a checkpoint, and return this rank's weights and optimizer state as they were."""
    trainer = trainer_of(group, config)
    for step in range(steps):
        trainer.step(step)
    train._save(checkpoints_of(config, trainer.ranks, out), trainer, steps)
    state = cloned(trainer.learner.training_state())
    trainer.close()
    return state


def restored_state(group, config, out):
    """This rank's weights and optimizer state after loading the newest checkpoint, and a number drawn then."""
    checkpoints = checkpoints_of(config, build_ranks(config, group), out)
    newest = checkpoints.newest()
    ranks = build_ranks(config, group)
    worker = kept_worker() if config.balance.mode == "equipoise" else None
    trainer = Trainer(build_like(newest / "model", config.model), config, ranks, worker=worker)
    trainer.restore(*checkpoints.load(newest, needs=trainer.needs))
    state, drawn = cloned(trainer.learner.training_state()), float(torch.rand(()))
    trainer.close()
    return state, drawn


def checkpoints_of(config, ranks, out):
    facts = {"seed": config.seed, "mode": config.balance.mode, "model": config.model.path or config.model.family}
    return Checkpoints(out / "checkpoints", ranks, facts=facts, keep=2)


def cloned(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def record_run(group, config, out, record):
    """A run that keeps its routes."""
    return train_run(group, config, out, record=record)


def compare_run(group, config, modes):
    """Compare modes on this rank."""
    worker = kept_worker() if "equipoise" in modes else None
    return run_comparison(config, build_ranks(config, group), ignore, modes, worker)


def trainer_of(group, config, **options):
    """A trainer of a random model, not warmed up."""
    ranks = build_ranks(config, group)
    worker = kept_worker() if config.balance.mode == "equipoise" else None
    return Trainer(build_model(config.model, seed=config.seed), config, ranks, worker=worker, **options)


def metrics_of(group, config, steps):
    """Metrics of some steps, and the whole weights afterwards."""
    trainer = trainer_of(group, config)
    metrics = [trainer.step(step) for step in range(steps)]
    weights = {name: tensor.clone() for name, tensor in trainer.learner.state_dict().items()}
    trainer.close()
    return metrics, weights


def outside_steps(group, config, steps):
    """The whole weights before each step, the versions of its samples, and its metrics; or what an error says."""
    trainer, weights, versions, metrics = trainer_of(group, config), [], [], []
    try:
        for step in range(steps):
            weights.append(gathered(trainer.learner))
            metrics.append(trainer.step(step))
            versions.append({sample.weight_version for sample in trainer.experience.samples})
    except EquipoiseError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.close()
    return (weights if group.rank() == 0 else []), versions, metrics


def planned_in_the_tail(group, config):
    """What happened in a step whose rollout does not end before a plan was made: events in order, and its metrics."""
    trainer, events, is_planned = trainer_of(group, config), [], threading.Event()
    planner, generate = trainer.learner.balancer._planner, trainer.engine.generate
    plan = planner._plan

    def planned(rows, *others):
        made = plan(rows, *others)
        events.append(f"planned {rows.stage}")
        is_planned.set()
        return made

    def waiting(request):
        *first, last = generate(request)
        yield from first
        is_planned.wait(180)
        events.append("the last sample ends")
        yield last

    planner._plan, trainer.engine.generate = planned, waiting
    metrics = trainer.step(0)
    trainer.close()
    return events, metrics


def lose_a_gradient(group, config):
    """What an optimizer step says when an expert of the last rank has a gradient that is no number."""
    trainer = trainer_of(group, config)
    learner, before = trainer.learner, gathered(trainer.learner)
    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if group.rank() == group.size() - 1:
        next(iter(learner.model._equipoise.expert_parameters.values())).grad[0, 0] = torch.nan
    try:
        learner.step()
    except EquipoiseError as error:
        return str(error), same_weights(before, gathered(learner))
    finally:
        trainer.close()
    return "", False


def same_weights(first, second):
    """Whether two state dicts have the same bits."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def resume_error(group, config, out):
    """What resuming says."""
    try:
        resume_run(group, config, out)
    except EquipoiseError as error:
        return type(error).__name__, str(error)
    return None


def disk_full(group, config, out, how):
    """A run whose second rank finds no room for its second checkpoint; what every rank is told."""
    real = FileSystemWriter.write_data

    def write(self, plan, planner):
        if group.rank() != 1 or "step-000002" not in str(self.path):
            return real(self, plan, planner)
        if how == "no space":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            return real(self, plan, planner)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with mock.patch.object(FileSystemWriter, "write_data", write):
        try:
            train_run(group, config, out)
        except EquipoiseError as error:
            return type(error).__name__, str(error)
    return None


def gathered(learner):
    """The whole weights as their owners hold them, whatever weight sync reads."""
    state = learner.model.state_dict() if learner.mode == "off" else learner.model._equipoise.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def synced(group, config):
    """The rollout copy's weights after a step and a sync, the whole weights, and their name."""
    trainer = trainer_of(group, config)
    trainer.step(0)
    version = sync_weights(trainer.learner, trainer.engine.model, trainer.ranks)
    copied = {name: tensor.clone() for name, tensor in trainer.engine.model.state_dict().items()}
    whole = gathered(trainer.learner)
    trainer.close()
    return copied, whole, version


def harmed_sync(group, config, harm):
    """What weight sync says when an expert of the first layer is not its owner's.

    Args:
        harm: `swapped`, `stale` or `damaged` in the store that all ranks read; `copied`: in the last rank's copy alone
    """
    trainer = trainer_of(group, config)
    balancer, is_last = trainer.learner.balancer, group.rank() == group.size() - 1
    kept = balancer.complete_store().experts(0).gate_up_SFD.clone()
    trainer.step(0)
    complete, copy_weights = balancer.complete_store, learner_module.copy_weights

    def completed():
        store = complete()
        rows = store.experts(0).gate_up_SFD
        if group.rank() == 0 and harm == "swapped":
            rows[[1, 6]] = rows[[6, 1]]
        elif group.rank() == 0 and harm == "stale":
            rows[5] = kept[5]
        elif group.rank() == 0 and harm == "damaged":
            rows[2].view(torch.int32)[3, 4] ^= 1
        torch.distributed.barrier(group)
        return store

    def copied(state, target):
        copy_weights(state, target)
        if harm == "copied" and is_last:
            name = next(name for name in target.state_dict() if name.endswith("gate_up_proj"))
            target.state_dict()[name][7].zero_()

    with (
        mock.patch.object(balancer, "complete_store", completed),
        mock.patch.object(learner_module, "copy_weights", copied),
    ):
        try:
            sync_weights(trainer.learner, trainer.engine.model, trainer.ranks)
        except EquipoiseError as error:
            return str(error)
        finally:
            torch.distributed.barrier(group)
            trainer.close()
    return None


def warmed_up(group, config):
    """The weights after warm-up, and its losses."""
    model, losses = build_model(config.model, seed=config.seed), []
    warm_up(
        model,
        config,
        build_ranks(config, group),
        task=open_task(config.task),
        tokenizer=CharTokenizer(),
        show=lambda done, loss: losses.append(loss),
    )
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, losses


def groups_of(group, config):
    """The ranks of this rank's EP group, and those that own the same experts."""
    ranks = build_ranks(config, group)
    return [torch.distributed.get_process_group_ranks(one) for one in (ranks.ep_group, ranks.owner_group)]


def ranks_error(group, config):
    """What a wrong number of ranks says."""
    try:
        build_ranks(config, group)
    except EquipoiseError as error:
        return str(error)
    return None
