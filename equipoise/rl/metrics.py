"""What a run reports: `RunEvent`s while it runs, one line of metrics per step, and the sinks that the lines go to.

`events.jsonl` holds one JSON object per event of the first rank, but for metrics; a resumed run appends to it.

Every metric is defined in `docs/metrics.md`, in the same order; ranks' figures are put together as said there.
`metrics.jsonl` holds one JSON object per step, `step` first. A resumed run drops the lines after its checkpoint, so
that the file of an interrupted and resumed run is that of an uninterrupted one, but for times.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from equipoise.core import Stage
from equipoise.core.errors import TrainingError
from equipoise.core.files import whole_file
from equipoise.cost import CostModel
from equipoise.loads import skew_ML
from equipoise.rl.config import TrackConfig
from equipoise.rl.stages import StepTally

_LOG = logging.getLogger(__name__)


class RunEvent(NamedTuple):
    """Something that happened in a run, shown by a terminal, a test or another process.

    start      facts of the run: model, ranks, mode, folder of results
    progress   message, done, total: something that takes a while
    stage      step, name of the stage that begins, rank; sent by every rank
    memory     forecast of the planned window that begins: step, stage, peak_bytes and its rank, micro_step and layer
               (received rows), slot_bytes (replica slots and rows read in place), limit_bytes; sent by the first rank
    metrics    one step's metrics
    note       message
    end        summary
    """

    kind: Literal["start", "progress", "stage", "memory", "metrics", "note", "end"]
    values: Mapping[str, Any]


Show = Callable[[RunEvent], None]


def ignore(event: RunEvent) -> None:
    """Show nothing."""


def also_written(show: Show, path: Path) -> Show:
    """Return a `Show` that also appends every event but metrics to a file, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file: IO[str] | None = path.open("a", encoding="utf-8")

    def show_and_write(event: RunEvent) -> None:
        nonlocal file
        show(event)
        if file is None or event.kind == "metrics":
            return
        try:
            file.write(json.dumps({"kind": event.kind, **event.values}) + "\n")
            file.flush()
        except OSError:
            # Reporting must not stop training.
            _LOG.exception("events are no longer written to %s", path)
            file = None

    return show_and_write


class Sink(NamedTuple):
    """A destination of metrics."""

    name: str
    write: Callable[[Mapping[str, Any]], None]
    """Called with one step's metrics."""
    close: Callable[[], None]


def open_lines(path: Path, *, first_step: int) -> Sink:
    """Open `metrics.jsonl`; lines of steps from `first_step` on are dropped, because they are trained again."""
    kept = [line for line in read_lines(path) if line["step"] < first_step]
    with whole_file(path, error=TrainingError) as draft:
        draft.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
    file = path.open("a", encoding="utf-8")

    def write(metrics: Mapping[str, Any]) -> None:
        file.write(json.dumps(metrics) + "\n")
        file.flush()

    return Sink(path.name, write, file.close)


def _open_tensorboard(folder: Path) -> Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise not_installed("track.tensorboard", True, package="tensorboard") from error
    writer: Any = SummaryWriter(str(folder))

    def write(metrics: Mapping[str, Any]) -> None:
        for name, value in numbers(metrics).items():
            writer.add_scalar(name, value, int(metrics["step"]))

    return Sink("TensorBoard", write, writer.close)


def _open_wandb(project: str, *, settings: Mapping[str, Any]) -> Sink:
    try:
        import wandb
    except ImportError as error:
        raise not_installed("track.wandb_project", project, package="wandb") from error
    run: Any = wandb.init(project=project, config=dict(settings))

    def write(metrics: Mapping[str, Any]) -> None:
        run.log(numbers(metrics), step=int(metrics["step"]))

    return Sink("Weights & Biases", write, run.finish)


def not_installed(setting: str, value: object, *, package: str) -> TrainingError:
    """Return the error of a setting whose package is missing."""
    return TrainingError(
        f"setting {setting} is {value}, but {package} is not installed; run: pip install 'equipoise[{package}]', or "
        "leave it out"
    )


class Sinks:
    """All destinations of a run's metrics; only the first rank has them."""

    def __init__(self, folder: Path, config: TrackConfig, *, first_step: int, settings: Mapping[str, Any]) -> None:
        """Open all sinks; one that cannot start is an error here, and never one later."""
        self._sinks = [open_lines(folder / "metrics.jsonl", first_step=first_step)]
        if config.tensorboard:
            self._sinks.append(_open_tensorboard(folder / "tensorboard"))
        if config.wandb_project:
            self._sinks.append(_open_wandb(config.wandb_project, settings=settings))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write one step to all sinks."""
        for sink in list(self._sinks):
            try:
                sink.write(metrics)
            except Exception:  # noqa: BLE001  # reporting must not stop training
                _LOG.exception("metrics are no longer written to %s", sink.name)
                self._sinks.remove(sink)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self._sinks:
            sink.close()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as flat numbers: one of `bytes` per path, of `stage_s` per stage; None is left out."""
    flat = {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "step"}
    tables = {name: value for name, value in metrics.items() if isinstance(value, Mapping)}
    return flat | {f"{name}.{key}": number for name, table in tables.items() for key, number in table.items()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the steps that `metrics.jsonl` holds; none where the file does not exist."""
    if not path.exists():
        return []
    *whole, cut = path.read_text(encoding="utf-8").split("\n")
    if cut:
        _LOG.warning("%s: the last line was cut short and is left out", path)
    return [json.loads(line) for line in whole]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank's figures of one step, small enough to be gathered."""

    tally: StepTally
    rewards: Sequence[float]
    num_right: int
    known_rows: int
    rows: int
    tokens: int
    rollout_kl: float
    stage_s: Mapping[str, float]
    """By stage, in order."""


def step_metrics(
    step: int, figures_R: Sequence[RankFigures], *, ep: int, costs: Mapping[Stage, CostModel]
) -> dict[str, Any]:
    """Put the ranks' figures of one step together, in rank order; costs are of each stage, on the described cluster."""
    tallies = [figures.tally for figures in figures_R]
    rewards = np.concatenate([np.asarray(figures.rewards) for figures in figures_R])
    first, seconds = tallies[0], max(sum(figures.stage_s.values()) for figures in figures_R)
    stage_s = {name: max(f.stage_s[name] for f in figures_R) for name in figures_R[0].stage_s}
    known, rows = (sum(getattr(f, name) for f in figures_R) for name in ("known_rows", "rows"))
    given = sum(t.given_rows for t in tallies)
    bytes_by_path: dict[str, int] = {}
    for report in (r for t in tallies for r in t.reports):
        for path, count in report.bytes.items():
            bytes_by_path[path] = bytes_by_path.get(path, 0) + count
    # Planning is reported by the rank that waited longest for it.
    planned = max((t.reports for t in tallies), key=lambda reports: sum(r.waited_s for r in reports))

    def per_trained(name: str) -> float:
        return sum(t.sums.get(name, 0.0) for t in tallies) / max(first.sums["trained"], 1.0)

    return {
        "step": step,
        "reward": float(rewards.mean()),
        "right_share": sum(f.num_right for f in figures_R) / len(rewards),
        "loss": float(np.mean(first.losses)),
        "loss_size": float(np.mean(first.sizes)),
        "ratio": per_trained("ratio"),
        "clipped_share": per_trained("clipped"),
        "kl": per_trained("kl_old"),
        "kl_reference": per_trained("kl_reference"),
        "kl_rollout": sum(f.rollout_kl for f in figures_R) / len(figures_R),
        "grad_norm": float(np.mean(first.norms)),
        "skew_before": skew_before(tallies, ep=ep),
        "skew_after": skew_after(tallies, ep=ep),
        "coverage": known / max(rows, 1),
        "replayed_rows": sum(t.replayed_rows for t in tallies),
        "differing_share": sum(t.differing_rows for t in tallies) / max(given, 1),
        "checked_windows": sum(t.checked_windows for t in tallies),
        "lost_s": sum(lost_seconds(tallies[:ep], stage, cost) for stage, cost in costs.items()),
        "static_s": sum(r.static_s for r in first.reports),
        "saved_s": sum(r.static_s - r.predicted_s for r in first.reports),
        "displaced": sum(r.displaced for r in first.reports),
        "replicas": sum(r.replicas for r in first.reports),
        "bytes": bytes_by_path,
        "planning_s": sum(r.planning_s for r in planned),
        "hidden_s": sum(max(0.0, r.planning_s - r.waited_s) for r in planned),
        "waited_s": sum(r.waited_s for r in planned),
        "exposed_s": max(sum(sum(r.exposed_s.values()) for r in t.reports) for t in tallies),
        "rollout_s": stage_s.get("rollout", 0.0),
        "stage_s": stage_s,
        "seconds": seconds,
        "tokens_per_s": sum(figures.tokens for figures in figures_R) / max(seconds, 1e-9),
    }


def lost_seconds(group: Sequence[StepTally], stage: Stage, cost: CostModel) -> float:
    """Return an EP group's predicted compute seconds, busiest rank less mean rank, every expert at its owner."""
    ep, lost_ns = len(group), 0
    for load_RMLE in zip(*(t.rows[stage] for t in group), strict=True):
        rows_MLR = _at_owners(load_RMLE, ep)
        slots = load_RMLE[0].shape[2] // ep
        for rows_R in rows_MLR.reshape(-1, ep):
            lost_ns += cost.compute_ns(int(rows_R.max()), slots) - cost.compute_ns(-(-int(rows_R.sum()) // ep), slots)
    return lost_ns * 1e-9


def skew_before(tallies: Sequence[StepTally], *, ep: int) -> float:
    """Return the mean skew of the update's micro-steps and layers with every expert at its owner."""
    return _mean_skew([t.rows["update"] for t in tallies], ep, lambda load_RMLE: _at_owners(load_RMLE, ep))


def skew_after(tallies: Sequence[StepTally], *, ep: int) -> float | None:
    """Return the mean skew of the rows that arrived in the update; None where every rank has all experts."""
    if not tallies[0].arrived["update"]:
        return None
    return _mean_skew([t.arrived["update"] for t in tallies], ep, lambda rows_RML: np.stack(rows_RML, axis=2))


def _mean_skew(windows_R: Sequence[Sequence[Any]], ep: int, join: Callable[[Sequence[Any]], np.ndarray]) -> float:
    """Return the mean over EP groups and windows; `join` makes [M, L, R] rows of what a group's ranks have of one."""
    groups = (windows_R[at : at + ep] for at in range(0, len(windows_R), ep))
    ratios = [skew_ML(join(found)).reshape(-1) for group in groups for found in zip(*group, strict=True)]
    return float(np.concatenate(ratios).mean())


def _at_owners(load_RMLE: Sequence[np.ndarray], ep: int) -> np.ndarray:
    """[M, L, R] rows that each owner would receive, from what every rank sends."""
    total_MLE = np.sum(load_RMLE, axis=0)
    return np.asarray(total_MLE.reshape(*total_MLE.shape[:2], ep, -1).sum(axis=3))
