"""Measures of a parity run, their limits, and whether they hold.

Knows two trainings of all ranks. Does not know how they were run, nor how a verdict is shown.

Limits (`LIMITS`), fp32 on CPU:
- outputs and loss of the first window: the same bits, because groups are padded (the deterministic mode);
- gradient norm of the first window: the same bits without replicas; 1e-6 relative with them, because splitting an
  expert's rows splits its weight gradient's sum;
- root-mean-square error of the experts' gradients against float64: at most 1.1 times static training's;
- last loss: 1e-5 relative; weights after the last step: 1e-5 of the largest weight of their tensor;
- windows of a rank in which some layer got other rows than the plan said: none.
In bf16 on a CUDA device, where a replica's part of a gradient is rounded before it is added: outputs and first loss
have the same bits too; gradient norm with replicas and last loss 1e-2 relative; weights, per step, one rounding of the
largest weight of their tensor.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from equipoise.launch import RankOptions, run_ranks
from tests.parity.case import ParityCase
from tests.parity.run import Training, train_both
from tests.parity.stack import dense_gradients

LIMITS = {
    "cpu": {"norm": 1e-6, "loss": 1e-5, "weights": 1e-5},
    "cuda": {"norm": 1e-2, "loss": 1e-2, "weights": 2.0**-8},
}
"""By device; on a CUDA device that of the weights counts per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of both trainings."""

    name: str
    static: float | None
    """None where the measure is a difference alone."""
    balanced: float | None
    difference: float
    limit: float

    @property
    def is_good(self) -> bool:
        """Whether the difference is within the limit; not a number never is."""
        return self.difference <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All measures of a run, and what the balanced training moved."""

    case: ParityCase
    measures: tuple[Measure, ...]
    displaced: int
    """Experts that computed elsewhere than at their owner, summed over windows."""
    replicas: int
    pulls: int
    """Replica weights brought, all ranks and windows."""

    @property
    def has_moved(self) -> bool:
        """Whether the run shows anything: a run in which nothing moves is static training twice.

        One rank has no other to move experts to. With slots, replicas may leave no reason to displace an expert.
        """
        if self.case.ranks == 1:
            return True
        return self.pulls > 0 if self.case.slots else self.displaced > 0

    @property
    def is_good(self) -> bool:
        """Whether every measure holds and something moved."""
        return self.has_moved and all(measure.is_good for measure in self.measures)


def check_parity(case: ParityCase, *, progress: Callable[[int, int], None] = lambda done, total: None) -> Verdict:
    """Start local ranks, train both ways, and judge.

    Args:
        progress: called with windows done and windows in all
    """
    options = RankOptions(backend=case.backend)
    both = run_ranks(train_both, case.ranks, case, options=options, limit_s=300.0, show=progress)
    return judge(case, [static for static, _ in both], [balanced for _, balanced in both])


def judge(case: ParityCase, static: Sequence[Training], balanced: Sequence[Training]) -> Verdict:
    """Compare two trainings, given by rank."""
    a, b = static[0], balanced[0]
    limits = LIMITS[case.device]
    exact_norm = 0.0 if case.slots == 0 else limits["norm"]
    measures = (
        _relative("loss, window 1", a.losses[0], b.losses[0], limit=0.0),
        _largest("output difference, window 1", [x.outputs for x in static], [x.outputs for x in balanced]),
        _relative("gradient norm, window 1", a.norm, b.norm, limit=exact_norm),
        _errors(case, static, balanced),
        _relative(f"loss, window {case.steps}", a.losses[-1], b.losses[-1], limit=limits["loss"]),
        _weights(case, static, balanced),
        _arrivals(balanced),
    )
    return Verdict(
        case=case,
        measures=measures,
        displaced=sum(report.displaced for report in b.reports),
        replicas=sum(report.replicas for report in b.reports),
        pulls=sum(report.counts["pulls"] for training in balanced for report in training.reports),
    )


def _relative(name: str, static: float, balanced: float, *, limit: float) -> Measure:
    difference = abs(static - balanced) / (abs(static) or 1.0)
    return Measure(name=name, static=static, balanced=balanced, difference=difference, limit=limit)


def _largest(name: str, static: Sequence[list[torch.Tensor]], balanced: Sequence[list[torch.Tensor]]) -> Measure:
    pairs = [pair for a, b in zip(static, balanced, strict=True) for pair in zip(a, b, strict=True)]
    difference = max(float((x - y).abs().max()) for x, y in pairs)
    return Measure(name=name, static=None, balanced=None, difference=difference, limit=0.0)


def _weights(case: ParityCase, static: Sequence[Training], balanced: Sequence[Training]) -> Measure:
    difference = 0.0
    for a, b in zip(static, balanced, strict=True):
        for x, y in zip(a.weights, b.weights, strict=True):
            difference = max(difference, float((x.float() - y.float()).abs().max() / x.abs().max()))
    name = f"weight difference, {case.steps} steps"
    limit = LIMITS[case.device]["weights"] * (1 if case.device == "cpu" else case.steps)
    return Measure(name=name, static=None, balanced=None, difference=difference, limit=limit)


def _arrivals(balanced: Sequence[Training]) -> Measure:
    off = sum(not report.is_as_planned for training in balanced for report in training.reports)
    return Measure(name="windows with unplanned rows", static=None, balanced=off, difference=off, limit=0.0)


def _errors(case: ParityCase, static: Sequence[Training], balanced: Sequence[Training]) -> Measure:
    """Root-mean-square errors of the gradients against float64; their ratio is the difference that is judged."""
    exact = dense_gradients(case, 0)
    errors = [_rms_error([training.gradients for training in trainings], exact) for trainings in (static, balanced)]
    ratio = errors[1] / errors[0] if errors[0] else math.inf
    name = "gradient error ratio"
    return Measure(name=name, static=errors[0], balanced=errors[1], difference=ratio, limit=1.1)


def _rms_error(gradients: Sequence[list[torch.Tensor]], exact: Sequence[torch.Tensor]) -> float:
    # Owners are contiguous, so their gradients in rank order are in logical order.
    found = [torch.cat(parts).double() for parts in zip(*gradients, strict=True)]
    squares = sum(float((x - y).square().sum()) for x, y in zip(found, exact, strict=True))
    return math.sqrt(squares / sum(tensor.numel() for tensor in exact))
