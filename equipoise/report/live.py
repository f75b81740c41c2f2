"""A training run while it goes on: what its folder says now, for a terminal and for a page.

1. `Follower` reads the lines that a run has appended since the last look, of `metrics.jsonl` and of `events.jsonl`.
2. `describe` makes a `LiveRun` of them: figures, charts and warnings, as text and numbers. It reads no file and no
   clock, so that every warning can be tested.
3. `LiveRun.to_dict` is what the page draws; `equipoise watch` prints the same.

Seconds saved are predicted on the described cluster, memory is modelled from plans, all else is measured.
"""

import json
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from equipoise.core import EquipoiseError
from equipoise.core.value import STAGE_WORDS
from equipoise.report.page import Figure, num_bytes, percent, ratio, seconds

Document = dict[str, Any]
State = Literal["starting", "running", "ended"]
SHOWN = 500
"""Steps that charts show: the last ones."""
RECENT = 5
"""Steps that a warning looks at: one odd step is none."""
QUIET_S = 60.0
"""The shortest silence that is worth a warning, seconds."""
_STANDSTILL, _SKEW = 0.1, 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveChart:
    """Lines over steps."""

    title: str
    text: str
    """Unit, and whether it is measured or predicted."""
    lines: dict[str, tuple[float | None, ...]]
    """Values by name, one per step of the run."""
    scale: tuple[float, float]
    """Values that the scale reaches in any case, so that small changes look small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """What is known of a run at one moment."""

    name: str
    kind: str
    state: State
    doing: str
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    steps: tuple[int, ...]
    charts: tuple[LiveChart, ...]

    @property
    def is_ended(self) -> bool:
        """Whether no line will follow."""
        return self.state == "ended"

    def to_dict(self) -> Document:
        """Return every figure, for JSON."""
        return {"format": "equipoise-watch-1", **asdict(self)}


class Follower:
    """Reads the lines of a file that grows; starts again where another file has taken its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head, self._offset = b"", 0
        self.lines: list[Document] = []

    def read(self) -> list[Document]:
        """Read what was appended, and return all lines so far; a line without its end is still being written."""
        try:
            with self._path.open("rb") as file:
                # A resumed run writes its file anew, with another beginning or fewer bytes.
                if file.read(len(self._head)) != self._head or file.seek(0, 2) < self._offset:
                    self._head, self._offset, self.lines = b"", 0, []
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return self.lines
        whole = new[: new.rfind(b"\n") + 1]
        for number, text in enumerate(whole.splitlines(), start=len(self.lines) + 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise EquipoiseError(f"{self._path}, line {number}, is not JSON ({error})") from error
            self.lines.append(line)
        self._head = self._head or whole[:200]
        self._offset += len(whole)
        return self.lines


class LiveReader:
    """Looks at a run's folder again and again."""

    def __init__(self, folder: Path) -> None:
        """Open the folder of a run, which may not have trained a step yet."""
        if not (folder / "config.toml").is_file():
            raise EquipoiseError(
                f"{folder} is no training run, it has no config.toml; give the folder that `equipoise train -o FOLDER` "
                "writes"
            )
        self._folder = folder
        self._steps, self._events = Follower(folder / "metrics.jsonl"), Follower(folder / "events.jsonl")

    def read(self) -> LiveRun:
        """Return what the folder says now."""
        try:
            settings = tomllib.loads((self._folder / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EquipoiseError(f"{self._folder / 'config.toml'} cannot be read ({error})") from error
        steps, events = self._steps.read(), self._events.read()
        files = [path for path in self._folder.glob("*.jsonl") if path.is_file()]
        written_s = max((path.stat().st_mtime for path in files), default=time.time())
        try:
            return describe(
                self._folder.resolve().name, settings, steps, events, quiet_s=max(0.0, time.time() - written_s)
            )
        except (KeyError, TypeError) as error:
            raise EquipoiseError(
                f"{self._folder} has a line without what this version shows ({error}); watch it with the version that "
                "writes it"
            ) from error


def describe(
    name: str, settings: Document, steps: Sequence[Document], events: Sequence[Document], *, quiet_s: float
) -> LiveRun:
    """Describe a run from its settings, its lines of metrics and events, and the seconds since the last line."""
    last = {event["kind"]: event for event in events}
    is_ended = bool(events) and events[-1]["kind"] == "end"
    state: State = "ended" if is_ended else "running" if steps or "stage" in last else "starting"
    memory = None if is_ended else last.get("memory")
    total = int(settings.get("steps", 0))
    shown = steps[-SHOWN:]
    model, mode = settings.get("model", {}), settings.get("balance", {}).get("mode", "unknown")
    trained = model.get("path") or model.get("family") or "a model"
    return LiveRun(
        name=name,
        kind=f"{trained}, {settings.get('ranks', '?')} ranks, mode {mode}",
        state=state,
        doing=_doing(events, is_ended=is_ended),
        figures=_figures(steps, memory, total=total),
        warnings=() if is_ended else tuple(find_warnings(settings, steps, memory, quiet_s=quiet_s)),
        notes=tuple(event["message"] for event in events if event["kind"] == "note")[-RECENT:],
        steps=tuple(step["step"] for step in shown),
        charts=_charts(shown),
    )


def _doing(events: Sequence[Document], *, is_ended: bool) -> str:
    if is_ended:
        return "the run has ended"
    for event in reversed(events):
        if event["kind"] == "stage":
            return f"step {event['step']}: {STAGE_WORDS.get(event['name'], event['name'])}"
        if event["kind"] == "progress":
            done = f"{event['done']} of {event['total']}" if event["total"] else f"{event['done']} s"
            return f"{event['message']}: {done}"
    return "starting"


def _figures(steps: Sequence[Document], memory: Document | None, *, total: int) -> tuple[Figure, ...]:
    if not steps:
        return ()
    last = steps[-1]
    spent, static, saved, exposed, waited = (
        sum(step[name] for step in steps) for name in ("seconds", "static_s", "saved_s", "exposed_s", "waited_s")
    )
    after = "" if last["skew_after"] is None else f" to {ratio(last['skew_after'])}"
    each = seconds(spent / len(steps))
    share = f"{percent(saved / static)} of {seconds(static)} of expert layers" if static else "nothing is planned"
    figures = [
        Figure(label="Steps", value=f"{last['step'] + 1} of {total}", text=f"{each} each, measured"),
        Figure(
            label="Skew", value=f"{ratio(last['skew_before'])}{after}", text="busiest / mean rank, last step, measured"
        ),
        Figure(label="Saved", value=seconds(saved), text=f"{share}, predicted"),
        Figure(label="Exposed", value=seconds(exposed), text=f"{percent(exposed / spent)} of all steps, measured"),
        Figure(label="Waited for plans", value=seconds(waited), text=f"{percent(waited / spent)} of steps, measured"),
        Figure(label="Coverage", value=percent(last["coverage"]), text="rows with known routes, last step"),
    ]
    if memory is not None:
        at = f"step {memory['step']}, {STAGE_WORDS[memory['stage']]}"
        peak = f"rank {memory['rank']}, micro-step {memory['micro_step']}, layer {memory['layer']}"
        text = f"{at}: received rows ({peak}) and replica slots, modelled"
        figures.append(Figure(label="Memory of the next window", value=num_bytes(_need(memory)), text=text))
    return tuple(figures)


def _need(memory: Document) -> int:
    return int(memory["peak_bytes"] + memory["slot_bytes"])


def find_warnings(
    settings: Document, steps: Sequence[Document], memory: Document | None, *, quiet_s: float
) -> list[str]:
    """Return what a watcher should look at, worst first; each names the figure and its limit."""
    found = []
    recent = steps[-RECENT:]
    usual_s = median(step["seconds"] for step in recent) if recent else 0.0
    if quiet_s > max(QUIET_S, 5 * usual_s):
        found.append(
            f"nothing was written for {seconds(quiet_s)}, a step takes {seconds(usual_s)}: the run hangs or was stopped"
        )
    if memory is not None and _need(memory) > memory["limit_bytes"]:
        found.append(
            f"the next window needs {num_bytes(_need(memory))} on rank {memory['rank']} for rows and slots alone, a "
            f"device has {num_bytes(memory['limit_bytes'])}: use smaller micro-batches"
        )
    if not recent:
        return found
    last, balance = recent[-1], settings.get("balance", {})
    if last["coverage"] < 1:
        unknown = percent(1 - last["coverage"])
        found.append(f"routes of {unknown} of the rows are unknown in step {last['step']}: plans estimate them")
    if balance.get("mode") == "equipoise":
        skew = median(step["skew_after"] for step in recent)
        if skew > _SKEW:
            found.append(f"skew is {ratio(skew)} as run, in the median of {len(recent)} steps; up to {_SKEW} is usual")
        saved = sum(step["saved_s"] for step in recent)
        if saved < 0 and balance.get("objective") != "skew":
            found.append(f"plans of the last {len(recent)} steps cost {seconds(-saved)} more than none, predicted")
    trained = sum(step["seconds"] - step["rollout_s"] for step in recent)
    stood = sum(step["exposed_s"] + step["waited_s"] for step in recent)
    if stood > _STANDSTILL * trained:
        found.append(
            f"training stood still for {percent(stood / trained)} of the last {len(recent)} steps, for transfers and "
            f"plans; up to {percent(_STANDSTILL)} is usual"
        )
    return found


_CHARTS: tuple[tuple[str, str, dict[str, str], tuple[float, float]], ...] = (
    ("Skew", "busiest rank over mean rank, measured", {"before": "skew_before", "after": "skew_after"}, (1.0, 1.1)),
    ("Saved", "seconds of expert layers, predicted", {"saved": "saved_s"}, (0.0, 0.0)),
    (
        "Exposed",
        "seconds that training stood still, measured",
        {"transfers": "exposed_s", "plans": "waited_s"},
        (0.0, 0.0),
    ),
    ("Coverage", "share of rows with known routes", {"coverage": "coverage"}, (0.0, 1.0)),
)
"""Title, text, metric of each line, and scale."""


def _charts(steps: Sequence[Document]) -> tuple[LiveChart, ...]:
    return tuple(
        LiveChart(
            title=title,
            text=text,
            lines={name: tuple(step[metric] for step in steps) for name, metric in metrics.items()},
            scale=scale,
        )
        for title, text, metrics, scale in _CHARTS
    )
