"""Post-train an MoE model by RL, balanced by foresight: rollout, recompute, update.

    equipoise train
    equipoise train --compare off,static,equipoise --set steps=2 --ranks 2
    equipoise train --preset tiny --set update.learning_rate=3e-4 --record routes -o out/mine
    equipoise train --resume out/mine

    torchrun --nproc-per-node 8 --no-python equipoise train --ranks 8 --model PATH --set task.data=questions.jsonl

Starts its ranks itself, unless torchrun did. Settings are a preset or a TOML file, changed by any number of
--set a.b=value; `docs/training.md` explains them, `docs/metrics.md` the figures.
Exit code 0: trained, or all modes agree; 1: modes differ; 2: bad input; 130: interrupted.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from equipoise.cli import INTERRUPTED
from equipoise.cli.options import JsonFlag, ReportOption, refuse_unwritable, require_installed
from equipoise.cli.output import build_table, print_json, screen
from equipoise.core import TopologyError, TrainingError
from equipoise.core.value import STAGE_WORDS, plural

if TYPE_CHECKING:
    from equipoise.rl.config import TrainConfig
    from equipoise.rl.metrics import RunEvent

ROWS = 5
"""Steps that the live table shows: the last ones."""
EVERY = 50
"""Warm-up steps between two plain lines."""
LINES = 10
"""Plain lines of a run, at most about; `metrics.jsonl` has every step."""
COLUMNS = {
    "step": ("step", 1, "d"),
    "reward": ("reward", 1, ".3f"),
    "right": ("right_share", 1, ".1%"),
    "loss": ("loss", 1, ".4f"),
    "grad": ("grad_norm", 1, ".3f"),
    "kl": ("kl", 1, ".4f"),
    "skew": ("skew_before", 1, ".3f"),
    "after": ("skew_after", 1, ".3f"),
    "tok/s": ("tokens_per_s", 1, ".0f"),
    "plan ms": ("planning_s", 1e3, ".0f"),
    "wait ms": ("waited_s", 1e3, ".0f"),
}
"""Columns of the table: metric, factor and format of each."""


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
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to continue.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder for results; a run in it is replaced.  [default: out/train]"),
    ] = None,
    report: ReportOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a model by RL, balanced by foresight.

    The first example trains a small model on a laptop for a few minutes, the second shows that placement changes no
    result. Settings and presets: docs/training.md. Metrics: docs/metrics.md.
    """
    # Refuse options that exclude each other.
    several = {"--record": record, "--resume": resume}
    _refuse_together("--compare", compare, several, why="is of one run, --compare trains several and keeps none")
    _refuse_together("--resume", resume, {"--out": out, "--preset": preset}, why="is the resumed run's own")
    require_installed("train", "torch", "transformers", extra="train")
    from equipoise.rl.config import read_config
    from equipoise.rl.preflight import find_run, forecast, too_few

    # Read the settings and what changes them.
    changes = [*(settings or []), *([] if ranks is None else [f"ranks={ranks}"])]
    texts = {"model.path": model, "task.reward": reward}
    # In quotes: the name of a folder may look like a number or a date.
    changes += [f"{name}={json.dumps(text, ensure_ascii=False)}" for name, text in texts.items() if text is not None]
    changes += ["rollout.allow_missing_routes=true"] if allow_missing_routes else []
    config = read_config((preset or "tiny") if resume is None else find_run(resume), settings=changes)
    folder = resume or out or Path("out/train")
    # The run makes its own folder later.
    refuse_unwritable(report if report is None or report.parent != folder or folder.is_dir() else None)

    with open_view(as_json=as_json) as view:
        # If this machine or torchrun has too few ranks, print what the settings need, and stop.
        if message := too_few(config):
            view.print(*forecast(config).lines())
            raise TopologyError(message)
        if compare:
            raise typer.Exit(_compare(config, compare, view, out=out, report=report))
        places = {"record": record, "report": report}
        raise typer.Exit(_train(config, folder, view, is_resumed=resume is not None, **places))


def _refuse_together(flag: str, value: object, others: Mapping[str, object], *, why: str) -> None:
    for name, other in others.items():
        if value is not None and other is not None:
            raise TrainingError(f"{name} {other} {why}; leave out {name} or {flag}")


def _train(
    config: "TrainConfig", out: Path, view: "RunView", *, record: Path | None, report: Path | None, is_resumed: bool
) -> int:
    """Train on every rank, and write the page; returns the exit code."""
    from equipoise.launch import find_torchrun
    from equipoise.rl.checkpoint import hold
    from equipoise.rl.preflight import check_places, check_resumed, check_settings
    from equipoise.rl.train import Places, launch, prepare, run

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
            view.print(f"interrupted; continue with: equipoise train --resume {out}")
            return INTERRUPTED
    if summary and report is not None:
        from equipoise.report import write_report

        write_report(out, report)
        view.print(f"page: {report}")
    elif summary:
        view.print(f"page: make it with: equipoise report {out} -o {out / 'report.html'}")
    if view.as_json and summary:
        print_json(summary)
    return 0


def _compare(
    config: "TrainConfig", modes: str, view: "RunView", *, out: Path | None, report: Path | None = None
) -> int:
    """Train in several modes, print how their steps and seconds differ; returns the exit code."""
    from equipoise.rl.compare import parse_modes, run_comparison
    from equipoise.rl.preflight import check_settings
    from equipoise.rl.train import launch

    parsed = parse_modes(modes)
    check_settings(config)
    comparison = launch(run_comparison, config, parsed, show=view.show)
    if comparison is None:
        # Not the first of the ranks that torchrun started: the first one prints.
        return 0
    view.print(*comparison.lines(width=view.width))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "comparison.json").write_text(json.dumps(comparison.to_dict(), indent=1) + "\n")
        view.print(f"Written: {out / 'comparison.json'}")
    if report is not None:
        from equipoise.report import write_report

        write_report(comparison, report, title="a comparison")
        view.print(f"page: {report}")
    if view.as_json:
        print_json(comparison.to_dict())
    return 0 if comparison.is_good else 1


class RunView:
    """Shows a training run: a live table in a terminal, plain lines elsewhere, nothing if JSON is asked for."""

    def __init__(self, console: Console, *, as_json: bool, live: Live | None) -> None:
        self._console, self.as_json, self._live = console, as_json, live
        self._steps: list[Mapping[str, Any]] = []
        self._status = ""
        self._last = 0

    def show(self, event: "RunEvent") -> None:
        """Show one event; each kind has a method of its own below."""
        getattr(self, f"_{event.kind}")(event.values)
        if self._live is not None:
            self._live.update(Group(self._table(), Text(self._status, style="dim")))

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return self._console.width

    def print(self, *lines: str) -> None:
        """Print lines, above the live table if there is one."""
        for line in lines:
            self._console.print(line, soft_wrap=True)

    def _start(self, values: Mapping[str, Any]) -> None:
        self._last = values["steps"] - 1
        self.print(
            f"{values['model']}, {values['parameters'] / 1e6:.3g} M parameters, {values['layers']} MoE layers of "
            f"{values['experts']} experts, top-{values['top_k']}; {values['ranks']} ranks on "
            f"{plural(values['nodes'], 'node')}, experts: {values['mode']}"
        )

    def _progress(self, values: Mapping[str, Any]) -> None:
        done, total = values["done"], values["total"]
        self._status = f"{values['message']}: {done}" + (f" of {total}" if total else " s")
        loss = f", loss {values['loss']:.3f}" if "loss" in values else ""
        is_due = done % EVERY == 0 or done == total if total else done % 10 == 0
        if self._live is None and is_due:
            self.print(self._status + loss)

    def _stage(self, values: Mapping[str, Any]) -> None:
        self._status = f"step {values['step']}: {STAGE_WORDS.get(values['name'], values['name'])}"

    def _memory(self, values: Mapping[str, Any]) -> None:
        """Leave it to `equipoise watch`, which reads it from the run's folder."""

    def _note(self, values: Mapping[str, Any]) -> None:
        self.print(values["message"])

    def _metrics(self, values: Mapping[str, Any]) -> None:
        self._steps.append(values)
        step, every = values["step"], max(1, (self._last + 1) // LINES)
        if self._live is None and (len(self._steps) == 1 or step % every == 0 or step == self._last):
            rows = [[*COLUMNS], _cells(values)] if len(self._steps) == 1 else [_cells(values)]
            # 78 columns in all.
            sizes = [max(6, len(name)) for name in COLUMNS]
            self.print(*(" ".join(map(str.rjust, row, sizes)) for row in rows))

    def _end(self, values: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()
            self._live = None
        self.print(*summary_lines(values))

    def _table(self) -> Table:
        rows = [_cells(values) for values in self._steps[-ROWS:]]
        if self.width >= 80:
            return build_table(COLUMNS, rows, num_text=0, has_rule=False)
        # In a narrow terminal each metric is a row, and each step a column, as many of the last as fit.
        step, *others = zip(COLUMNS, *rows[-max(1, (self.width - 8) // 8) :], strict=True)
        return build_table(step, others, has_rule=False)


@contextmanager
def open_view(*, as_json: bool) -> Iterator[RunView]:
    """Open the view that suits standard output."""
    console = screen(as_json=as_json)
    is_live = console.is_terminal and not as_json
    with Live(console=console, refresh_per_second=4) if is_live else nullcontext() as live:
        yield RunView(console, as_json=as_json, live=live)


def _cells(values: Mapping[str, Any]) -> list[str]:
    metrics = [(values[name], factor, form) for name, factor, form in COLUMNS.values()]
    # A run without expert parallelism has no skew after planning.
    return ["-" if value is None else format(value * factor, form) for value, factor, form in metrics]


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the last lines of a run: what was learnt, what was balanced, what was proved, where the results are."""
    after, checked, record = summary["skew_after"], summary["checked_windows"], summary["record"]
    balanced = "every rank has all experts" if after is None else f"{after:.4f} after"
    lines = [
        f"reward {summary['reward_first_quarter']:.3f} in the first quarter of steps, "
        f"{summary['reward_last_quarter']:.3f} in the last; right answers {summary['right_first_quarter']:.1%}, "
        f"then {summary['right_last_quarter']:.1%}",
        f"skew {summary['skew_before']:.3f} before, {balanced} (busiest rank over mean rank, mean of all steps)",
        f"replayed {summary['replayed_rows']} rows exactly, coverage {summary['coverage']:.1%}"
        + (f"; rows that arrived were the planned ones in all {checked} windows" if checked else ""),
        f"results: {summary['out']} (metrics.jsonl, config.toml, summary.json, checkpoints)",
    ]
    if record:
        lines.append(f"routes: {record}; check them with: equipoise doctor {record} --model {record}/model/config.json")
    return lines
