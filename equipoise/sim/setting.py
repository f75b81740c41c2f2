"""`StepSetting`: what a simulation assumes about the step around the experts.

Knows no loads. Config is never changed after construction; unknown names are errors, because this is a dataclass.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from equipoise.core import InfeasiblePlanError
from equipoise.core.plan import Sends
from equipoise.core.value import require_int
from equipoise.loads.forecast import Activations
from equipoise.sim.result import Shown

Planning = Literal["hidden", "exposed"]
"""`hidden`: a window is planned while what comes before it runs (rollout, or the window before, once that has its own
plan), and only what is left then counts; `exposed`: all of it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """The step around the experts."""

    pipeline_stages: int = 1
    """Pipeline stages (one forward, one backward); each has its own ranks and an equal share of the layers."""
    activations: Activations = "kept"
    """Whether the backward pass repeats the forward pass of a layer (`recomputed`)."""
    rollout_s: float = 0.0
    """Seconds of rollout, as measured or hoped for: handed through, and what planning can hide behind."""
    other_s: float = 0.0
    """Seconds per step of what is not simulated: optimizer, embedding, head, gradient reduction."""
    planning: Planning = "hidden"
    planning_s: float = 0.0
    """Seconds that planning one window takes."""
    sends: Sends = "rows"
    shown: Shown = field(default_factory=Shown)
    """Whose arrays and timeline the result holds."""
    timeline_layers: int = 4
    """Layers of the shown micro-step that the timeline holds; 0: no timeline."""

    def __post_init__(self) -> None:
        for name, low in (("pipeline_stages", 1), ("timeline_layers", 0)):
            require_int(f"StepSetting.{name}", getattr(self, name), low=low, error=InfeasiblePlanError)
        for name in ("rollout_s", "other_s", "planning_s"):
            require_seconds(f"StepSetting.{name}", getattr(self, name))
        for name, allowed in (("activations", Activations), ("planning", Planning), ("sends", Sends)):
            if getattr(self, name) not in get_args(allowed):
                raise InfeasiblePlanError(
                    f"StepSetting.{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(allowed))}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        return {**asdict(self), "shown": self.shown._asdict()}


def require_seconds(name: str, value: float) -> None:
    """Raise, naming `name`, if the value is no number of seconds."""
    if not 0 <= value < float("inf"):
        raise InfeasiblePlanError(f"{name} is {value}; it must be a number of seconds, at least 0")
