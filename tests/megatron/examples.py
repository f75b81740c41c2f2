"""The examples of Megatron-Core, slime and verl as a user starts them, on four CPU ranks: every rank runs this."""

import io
import logging
import runpy
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from equipoise.adapters import megatron, slime
from tests.megatron import shims
from tests.megatron.hooks import Trainer, planned_by_kept_worker
from tests.megatron.layouts import LAYOUTS
from tests.megatron.model import build, kept_groups, parallel
from tests.megatron.trainer import EngineRegistry, TriedEngine, cpu_verl, made_by
from tests.megatron.work import prepare
from tests.pool import kept_worker

FOLDER = Path(__file__).parents[2] / "examples"


def megatron_example(group: Any) -> list[str]:
    """Run the whole file as torchrun would; this rank's world is there already. Return what it prints."""
    printed = io.StringIO()
    with (
        shims.cpu_megatron(),
        kept_groups(),
        patch.object(dist, "init_process_group"),
        patch.object(torch.cuda, "set_device"),
        patch.object(megatron, "install", partial(megatron.install, worker=kept_worker())),
        redirect_stdout(printed),
    ):
        runpy.run_path(str(FOLDER / "megatron_loop.py"), run_name="__main__")
    return printed.getvalue().splitlines()


def slime_example(group: Any) -> list[str]:
    """Let the stand-in of slime's loop call the example's hooks; return what they log."""
    hooks, lines = SimpleNamespace(**runpy.run_path(str(FOLDER / "slime_hooks.py"))), list[str]()
    keep = logging.Handler()
    keep.emit = lambda record: lines.append(record.getMessage())
    hooks.log.addHandler(keep)
    hooks.log.setLevel(logging.INFO)
    layout = LAYOUTS["EP4"]
    with shims.cpu_megatron(), parallel(layout), planned_by_kept_worker():
        steps, routes = prepare(layout)
        trainer = Trainer(build(layout), pads_with="-1", has_hooks=True)
        assert trainer.before_train_step is slime.before_train_step
        trainer.before_train_step, trainer.before_log_prob = hooks.before_train_step, hooks.before_log_prob
        trainer.train(steps, routes)
        megatron.uninstall(megatron.installed(trainer.run.chunks))
    hooks.log.removeHandler(keep)
    return lines


def verl_example(group: Any) -> list[str]:
    """Run the whole file; the engine that it asks verl for builds its model here. Return what it prints."""
    layout, made, printed = LAYOUTS["EP4"], list[Any](), io.StringIO()

    def make(*, model_type: str, backend: str, engine_config: Any, **_: Any) -> Any:
        assert issubclass(TriedEngine, EngineRegistry.get_engine_cls(model_type, backend))
        engine = made_by(TriedEngine, engine_config)
        engine.initialize = partial(engine.initialize_here, layout)
        made.append(engine)
        return engine

    with (
        cpu_verl(layout),
        patch.object(EngineRegistry, "new", make),
        patch("verl.workers.config.HFModelConfig"),
        patch.object(dist, "init_process_group"),
        patch.object(torch.cuda, "set_device"),
        patch.object(sys, "argv", ["verl_engine.py", "folder"]),
        redirect_stdout(printed),
    ):
        runpy.run_path(str(FOLDER / "verl_engine.py"), run_name="__main__")
        megatron.uninstall(made[0].handle)
    return printed.getvalue().splitlines()
