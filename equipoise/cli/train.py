"""RL post-training of an MoE model, balanced by foresight: rollout, recompute, update, with planning at work.

equipoise train
equipoise train --compare off,static,equipoise --set steps=2 --ranks 2

More:
    equipoise train --preset tiny --set update.learning_rate=3e-4 --record routes -o out/mine
    equipoise train --resume out/mine
    torchrun --nproc-per-node 8 --no-python equipoise train --ranks 8 --model PATH --set task.data=questions.jsonl

Starts its ranks itself, unless torchrun did. Settings: a preset or a TOML file, changed by any number of
--set a.b=value; `docs/training.md` explains them, `docs/metrics.md` the figures.
Exit code 0: trained, or all modes agree; 1: modes differ; 2: something is wrong with what was given; 130: interrupted.
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.options import JsonFlag, ReportOption, refuse_unwritable
from equipoise.cli.output import INTERRUPTED, print_json

if TYPE_CHECKING:
    from equipoise.cli.train_view import View
    from equipoise.rl.config import TrainConfig


def train(
    preset: Annotated[str | None, typer.Option(help="A preset, or a TOML file of settings.  [default: tiny]")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Change a setting: a.b=value.")] = None,
    ranks: Annotated[
        str | None, typer.Option(metavar="INTEGER", help="Ranks to start; short for --set ranks=N.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder of a HF checkpoint; short for --set model.path.")] = None,
    reward: Annotated[str | None, typer.Option(help="module:function of (prompt, response, answer).")] = None,
    allow_missing_routes: Annotated[
        bool, typer.Option("--allow-missing-routes", help="Use samples with broken routes, without foresight.")
    ] = False,
    compare: Annotated[str | None, typer.Option(help="Train several modes and compare: off,static,equipoise.")] = None,
    record: Annotated[Path | None, typer.Option(help="Folder to write the routes of every step to.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder for results; a run in it is replaced.  [default: out/train]"),
    ] = None,
    report: ReportOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a model by RL, balanced by foresight.

    \b
    A laptop, a few minutes; then the proof that placement changes nothing:
    equipoise train
    equipoise train --compare off,static,equipoise --set steps=2 --ranks 2

    \b
    Your own model and questions; and a run that was interrupted:
    equipoise train --model PATH --set task.data=questions.jsonl -o out/mine
    equipoise train --resume out/mine

    Settings and presets: docs/training.md. Metrics: docs/metrics.md.
    """
    from equipoise.cli.train_view import open_view
    from equipoise.rl.config_file import read_config

    several = {"--report": report, "--record": record, "--resume": resume, "--out": out}
    _refuse_together("--compare", compare, several, why="is of one run, --compare trains several and keeps none")
    _refuse_together("--resume", resume, {"--out": out, "--preset": preset}, why="is the resumed run's own")
    changes = [*(settings or []), *([] if ranks is None else [f"ranks={ranks}"])]
    texts = {"model.path": model, "task.reward": reward}
    # In quotes: the name of a folder may look like a number or a date.
    changes += [f"{name}={json.dumps(text, ensure_ascii=False)}" for name, text in texts.items() if text is not None]
    changes += ["rollout.allow_missing_routes=true"] if allow_missing_routes else []
    _require_torch()
    config = read_config((preset or "tiny") if resume is None else _find_run(resume), settings=changes)
    folder = resume or out or Path("out/train")
    # The run's own folder is made with the run.
    refuse_unwritable(report if report is None or report.parent != folder or folder.is_dir() else None)
    with open_view(as_json=as_json) as view:
        _refuse_too_few(config, view)
        if compare:
            raise typer.Exit(_compare(config, compare, view))
        places = {"record": record, "report": report}
        raise typer.Exit(_train(config, folder, view, is_resumed=resume is not None, **places))


def _train(
    config: "TrainConfig", out: Path, view: "View", *, record: Path | None, report: Path | None, is_resumed: bool
) -> int:
    from equipoise.rl.environment import find_torchrun
    from equipoise.rl.launch import launch
    from equipoise.rl.lock import hold
    from equipoise.rl.preflight import check_places, check_resumed, check_settings
    from equipoise.rl.run import Places, prepare, run

    check_settings(config)
    if is_resumed:
        check_resumed(config, out)
    is_first = (torchrun := find_torchrun()) is None or torchrun.rank == 0
    if is_first:
        check_places(out=out, record=record, is_resumed=is_resumed)
    places = Places(out=out, record=record, is_resumed=is_resumed)
    with hold(out) if is_first else nullcontext():
        if is_first and not is_resumed:
            prepare(config, out)
        try:
            summary = launch(run, config, places, show=view.show)
        except KeyboardInterrupt:
            view.say(f"interrupted; go on with: equipoise train --resume {out}")
            return INTERRUPTED
    if summary and report is not None:
        from equipoise.report import write_report

        write_report(out, report)
        view.say(f"page: {report}")
    elif summary:
        view.say(f"page: make it with: equipoise report {out} -o {out / 'report.html'}")
    if view.as_json and summary:
        print_json(summary)
    return 0


def _compare(config: "TrainConfig", words: str, view: "View") -> int:
    from equipoise.rl.compare import parse_modes, run_comparison
    from equipoise.rl.launch import launch
    from equipoise.rl.preflight import check_settings

    modes = parse_modes(words)
    check_settings(config)
    comparison = launch(run_comparison, config, modes, show=view.show)
    if comparison is None:
        # Another rank than the first, started by torchrun: the first one tells.
        return 0
    view.compared(comparison)
    if view.as_json:
        print_json(comparison.to_dict())
    return 0 if comparison.is_good else 1


def _refuse_together(flag: str, value: object, others: Mapping[str, object], *, why: str) -> None:
    from equipoise.core import TrainingError

    for name, other in others.items():
        if value is not None and other is not None:
            raise TrainingError(f"{name} {other} {why}; leave out {name} or {flag}")


def _find_run(folder: Path) -> Path:
    from equipoise.rl.preflight import find_run

    return find_run(folder)


def _refuse_too_few(config: "TrainConfig", view: "View") -> None:
    """Print what the settings would need, and refuse, where this machine or torchrun has fewer ranks."""
    from equipoise.rl.forecast import forecast, too_few

    if words := too_few(config):
        from equipoise.core import TopologyError

        view.forecast(forecast(config))
        raise TopologyError(words)


def _require_torch() -> None:
    from equipoise.core import AdapterError

    try:
        import torch  # noqa: F401  # asked for here, so that the words are ours
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise AdapterError(
            f"equipoise train needs {error.name}, which is not installed; run: pip install 'equipoise[train]'"
        ) from error
