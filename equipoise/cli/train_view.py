"""How a training run is shown: a live table in a terminal, plain lines elsewhere, nothing where JSON is asked for.

Knows events and figures. Does not know how they come about.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from equipoise.cli.output import screen

if TYPE_CHECKING:
    from equipoise.rl.compare import Comparison
    from equipoise.rl.events import Event
    from equipoise.rl.forecast import Forecast

ROWS = 12
"""Steps that the live table shows."""
EVERY = 50
"""Warm-up steps between two plain lines."""
COLUMNS = ("step", "reward", "right", "loss", "grad", "kl", "skew", "after", "tok/s", "plan ms", "wait ms")


class View:
    """What the user sees of a run."""

    def __init__(self, console: Console, *, as_json: bool, live: Live | None) -> None:
        self._console, self.as_json, self._live = console, as_json, live
        self._steps: list[Mapping[str, Any]] = []
        self._title = ""
        self._status = ""
        self._shown_header = False

    def show(self, event: "Event") -> None:
        """Show one event."""
        getattr(self, f"_{event.kind}")(event.values)
        if self._live is not None:
            self._live.update(Group(self._table(), Text(self._status, style="dim")))

    def say(self, words: str) -> None:
        """Print one line, under the live table where there is one."""
        self._console.print(words, soft_wrap=True)

    def compared(self, comparison: "Comparison") -> None:
        """Print a comparison: every step of every mode, differences, and the verdict."""
        for line in comparison.lines():
            self.say(line)

    def forecast(self, forecast: "Forecast") -> None:
        """Print what a run would need and what a plan would give."""
        for line in forecast.lines():
            self.say(line)

    def _start(self, values: Mapping[str, Any]) -> None:
        self._title = (
            f"{values['model']}, {values['parameters'] / 1e6:.3g} M parameters, {values['layers']} MoE layers of "
            f"{values['experts']} experts, top-{values['top_k']}; {values['ranks']} ranks on {values['nodes']} "
            f"{'node' if values['nodes'] == 1 else 'nodes'}, experts: {values['mode']}"
        )
        self.say(self._title)

    def _progress(self, values: Mapping[str, Any]) -> None:
        done, total = values["done"], values["total"]
        self._status = f"{values['words']}: {done}" + (f" of {total}" if total else " s")
        loss = f", loss {values['loss']:.3f}" if "loss" in values else ""
        is_due = done % EVERY == 0 or done == total if total else done % 10 == 0
        if self._live is None and is_due:
            self.say(self._status + loss)

    def _stage(self, values: Mapping[str, Any]) -> None:
        self._status = f"step {values['step']}: {values['name']}"

    def _note(self, values: Mapping[str, Any]) -> None:
        self.say(values["words"])

    def _metrics(self, values: Mapping[str, Any]) -> None:
        self._steps.append(values)
        if self._live is None:
            if not self._shown_header:
                self.say("".join(f"{name:>9}" for name in COLUMNS))
                self._shown_header = True
            self.say("".join(f"{cell:>9}" for cell in _cells(values)))

    def _end(self, values: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()
            self._live = None
        for line in summary_lines(values):
            self.say(line)

    def _table(self) -> Table:
        # One space between columns, so that all of them are whole in a terminal of 80 characters.
        table = Table(box=None, padding=(0, 1, 0, 0))
        for column in COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for values in self._steps[-ROWS:]:
            table.add_row(*_cells(values))
        return table


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The last words of a run: what was learnt, what was balanced, what was proved, where it is."""
    after = summary["skew_after"]
    checked = summary["checked_windows"]
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
    if summary["record"]:
        folder = summary["record"]
        lines.append(f"routes: {folder}; check them with: equipoise doctor {folder} --model {folder}/model/config.json")
    return lines


def _cells(values: Mapping[str, Any]) -> list[str]:
    after = values["skew_after"]
    return [
        str(values["step"]),
        f"{values['reward']:.3f}",
        f"{values['right_share']:.1%}",
        f"{values['loss']:.4f}",
        f"{values['grad_norm']:.3f}",
        f"{values['kl']:.4f}",
        f"{values['skew_before']:.3f}",
        "-" if after is None else f"{after:.3f}",
        f"{values['tokens_per_s']:.0f}",
        f"{values['planning_s'] * 1e3:.0f}",
        f"{values['waited_s'] * 1e3:.0f}",
    ]


@contextmanager
def open_view(*, as_json: bool) -> Iterator[View]:
    """Open the view that fits where standard output goes."""
    console = screen(as_json=as_json)
    if as_json or not console.is_terminal:
        yield View(console, as_json=as_json, live=None)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield View(console, as_json=as_json, live=live)
