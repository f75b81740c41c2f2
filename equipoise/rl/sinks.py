"""Where metrics go: `metrics.jsonl` always, TensorBoard and Weights & Biases where asked for.

`metrics.jsonl`: one JSON object per step, `step` first. A resumed run drops the lines after its checkpoint, so that the
file of an interrupted and resumed run is that of an uninterrupted one, but for times.

Knows files and trackers. Does not know what a figure means.

Invariants (asserted by the tests):
1. A sink that fails to start is an error; one that fails later never stops training.
2. Killed at any point, lines before the newest checkpoint stay; a line that was cut short is as if not written.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from equipoise.core.errors import TrainingError
from equipoise.core.whole_file import whole_file
from equipoise.rl.config import TrackConfig

_LOG = logging.getLogger(__name__)


class Sink(Protocol):
    """A place for metrics."""

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Take one step's figures."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class JsonLines:
    """`metrics.jsonl`."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Open the file; lines of steps from `first_step` on are dropped, because they are trained anew."""
        kept = [line for line in read_lines(path) if line["step"] < first_step]
        with whole_file(path, error=TrainingError) as draft:
            draft.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """A folder of event files."""

    def __init__(self, folder: Path) -> None:
        """Open it, or raise with the words to install it."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrainingError(
                "setting track.tensorboard is true, but tensorboard is not installed; "
                "run: pip install 'equipoise[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Add every number as a scalar."""
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, int(metrics["step"]))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases."""

    def __init__(self, project: str, *, config: Mapping[str, Any]) -> None:
        """Start the run, or raise with the words to install it."""
        try:
            import wandb
        except ImportError as error:
            raise TrainingError(
                f"setting track.wandb_project is {project!r}, but wandb is not installed; "
                "run: pip install 'equipoise[wandb]'"
            ) from error
        self._run: Any = wandb.init(project=project, config=dict(config))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Log every number."""
        self._run.log(numbers(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Sinks:
    """All places that a run writes its metrics to; only the first rank has one."""

    def __init__(self, folder: Path, config: TrackConfig, *, first_step: int, settings: Mapping[str, Any]) -> None:
        """Open them all; one that cannot start is an error here, and never one later."""
        self._sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", first_step=first_step)]
        if config.tensorboard:
            self._sinks.append(TensorBoard(folder / "tensorboard"))
        if config.wandb_project:
            self._sinks.append(WeightsAndBiases(config.wandb_project, config=settings))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write one step everywhere."""
        for sink in list(self._sinks):
            try:
                sink.write(metrics)
            except Exception:  # noqa: BLE001  # reporting must not stop training
                _LOG.exception("metrics are no longer written to %s", type(sink).__name__)
                self._sinks.remove(sink)

    def close(self) -> None:
        """Close them all."""
        for sink in self._sinks:
            sink.close()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as flat numbers: `bytes` becomes one per path, `stage_s` one per stage; what is None is left out."""
    flat = {name: value for name, value in metrics.items() if isinstance(value, int | float) and name != "step"}
    tables = {name: value for name, value in metrics.items() if isinstance(value, Mapping)}
    return flat | {f"{name}.{key}": number for name, table in tables.items() for key, number in table.items()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The steps that `metrics.jsonl` holds; none where it is not there."""
    if not path.exists():
        return []
    *whole, cut = path.read_text(encoding="utf-8").split("\n")
    if cut:
        _LOG.warning("%s: the last line was cut short and is left out", path)
    return [json.loads(line) for line in whole]
