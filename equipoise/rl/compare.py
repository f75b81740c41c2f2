"""The proof that training is unchanged: the same seed trained in several modes, in one set of processes.

    off         plain data parallel, all experts on every rank
    static      contiguous expert parallelism
    equipoise   as planned; and once more with placement alone, to be compared with `static`

All modes start from the same warmed-up weights and train on the rollouts that the first mode recorded: one sampled
token that differs would fork the runs. In a free comparison every mode makes its own rollouts, and there is no verdict.

Verdict, per pair of modes:
1. The losses of every step are within `LIMITS`, relative to the mean size of their terms: the terms of GRPO cancel, so
   that a loss near 0 says nothing of its own rounding.
2. Final weights are within `LIMITS` of their largest value.
3. `static` and `equipoise` without replicas: every loss has the same bits.
"""

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from torch import Tensor

from equipoise.adapters.transformers import inspect
from equipoise.core.errors import TrainingError
from equipoise.launch import Ranks
from equipoise.planning.worker import PlanWorker
from equipoise.rl.config import Mode, TrainConfig, change
from equipoise.rl.metrics import RunEvent, Show
from equipoise.rl.model import build_model
from equipoise.rl.train import Experience, Trainer, show_warm_up, start_planner
from equipoise.sim.summary import wrapped

LIMITS = {"float32": 1e-5, "bfloat16": 2.0**-8}
"""Largest difference between two modes, by the weights' dtype; in bf16 one step of its rounding, since modes that
multiply in another order round differently from the first product on."""
TRAINED = ("recompute", "update")
"""Stages whose seconds are compared; all modes but the first train on given rollouts."""
FORMAT = "equipoise-comparison-1"
"""Of the document; `equipoise.report` makes its page."""
PLACED = "equipoise, no replicas"
"""The leg that `static` must equal bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """The training of one mode."""

    name: str
    losses: tuple[tuple[float, ...], ...]
    """Per step, the loss of each optimizer step."""
    sizes: tuple[tuple[float, ...], ...]
    norms: tuple[float, ...]
    weights: tuple[Mapping[str, Tensor], ...]
    """After each step."""
    displaced: int = 0
    replicas: int = 0
    reward: float = 0.0
    seconds: tuple[float, ...] = ()
    """Measured, per step: log-prob pass and update on the slowest rank, without the rollout."""
    tokens: tuple[int, ...] = ()
    """Trained in each step, by all ranks."""
    skew: float | None = None
    """Mean over steps of the rows that arrived; None where every rank has all experts."""

    @property
    def speed(self) -> dict[str, float]:
        """Median seconds of a step, and tokens per second at it, without the first step if there are more: it compiles.

        The median: with few steps, a mean is that of the one step in which another program had the cores.
        """
        from_step = 1 if len(self.seconds) > 1 else 0
        seconds, tokens = self.seconds[from_step:], self.tokens[from_step:]
        step_s = statistics.median(seconds) if seconds else 0.0
        return {"step_s": step_s, "tokens_per_s": sum(tokens) / max(1, len(tokens)) / max(step_s, 1e-9)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two legs compared."""

    names: tuple[str, str]
    loss_gap: tuple[float, ...]
    """Per step, the largest difference of a loss, relative to the size of its terms."""
    norm_gap: tuple[float, ...]
    weight_gap: tuple[float, ...]
    """Per step, the largest difference of a weight, relative to the largest weight."""
    is_bit_equal: bool
    """Whether every loss has the same bits."""
    limit: float
    must_be_bit_equal: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the two learnt the same."""
        if self.must_be_bit_equal and not self.is_bit_equal:
            return False
        return max(self.loss_gap) <= self.limit and self.weight_gap[-1] <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All legs, their differences and the verdict."""

    legs: Sequence[Mapping[str, Any]]
    """Per leg: name, loss, grad_norm, seconds per step, skew, displaced, replicas, reward, step_s, tokens_per_s."""
    pairs: Sequence[Pair]
    is_free: bool
    problems: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was trained, and where: model, parameters, layers, experts, top_k, ranks, device."""

    @property
    def is_good(self) -> bool:
        """Whether every pair agrees and something was moved; a free comparison has no verdict."""
        return self.is_free or (all(pair.is_good for pair in self.pairs) and not self.problems)

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the comparison as text, with tables of at most `width` columns."""
        rows = [["mode, step", "loss", "grad norm", "d loss", "d norm", "d weight"]]
        for index, leg in enumerate(self.legs):
            pair = None if index == 0 else self.pairs[index - 1]
            for step, (loss, norm) in enumerate(zip(leg["loss"], leg["grad_norm"], strict=True)):
                gaps = () if pair is None else (pair.loss_gap[step], pair.norm_gap[step], pair.weight_gap[step])
                shown = [f"{gap:.1e}" for gap in gaps] or [""] * 3
                rows.append([f"{leg['name']}, {step}", f"{loss:.6f}", f"{norm:.6f}", *shown])
        lines = wrapped(rows, width)
        lines += ["", "Measured here, log-prob pass and update of the median step, rollout left out:"]
        rows = [["mode", "s per step", "tokens/s", "displaced", "replicas"]]
        for leg in self.legs:
            moved = (str(leg["displaced"]), str(leg["replicas"]))
            rows.append([leg["name"], f"{leg['step_s']:.3f}", f"{leg['tokens_per_s']:,.0f}", *moved])
        lines += [*wrapped(rows, width), ""]
        if self.is_free:
            return [*lines, "every mode made its own rollouts: no verdict"]
        for pair in self.pairs:
            bits = ", losses have the same bits" if pair.is_bit_equal else ""
            if pair.must_be_bit_equal:
                bits = ", losses have the same bits (they must)" if pair.is_bit_equal else ", losses have OTHER BITS"
            lines.append(
                f"{'good' if pair.is_good else 'BAD':>4}  {pair.names[0]} and {pair.names[1]}: loss within "
                f"{max(pair.loss_gap):.1e} (limit {pair.limit:.1g}), final weights within "
                f"{pair.weight_gap[-1]:.1e} (limit {pair.limit:.1g}){bits}"
            )
        return [*lines, *self.problems, self.verdict]

    @property
    def verdict(self) -> str:
        """The last line of the text."""
        if not all(pair.is_good for pair in self.pairs):
            return "TRAINING DIFFERS"
        return "NOTHING IS PROVED" if self.problems else "training is unchanged"

    def to_dict(self) -> dict[str, Any]:
        """Return one JSON document."""
        return {
            "format": FORMAT,
            "facts": dict(self.facts),
            "is_good": self.is_good,
            "is_free": self.is_free,
            "verdict": self.verdict,
            "trouble": list(self.problems),
            "legs": [dict(leg) for leg in self.legs],
            "pairs": [{**asdict(pair), "is_good": pair.is_good} for pair in self.pairs],
        }


def parse_modes(text: str) -> tuple[Mode, ...]:
    """Parse the modes of `--compare a,b,c`."""
    modes = tuple(name.strip() for name in text.split(","))
    unknown = [mode for mode in modes if mode not in get_args(Mode)]
    if unknown or len(set(modes)) < 2 or len(set(modes)) != len(modes):
        raise TrainingError(f"--compare {text!r}: give two or three different ones of {', '.join(get_args(Mode))}")
    return tuple(mode for mode in get_args(Mode) if mode in modes)


def run_comparison(
    config: TrainConfig, ranks: Ranks, show: Show, modes: Sequence[Mode], worker: PlanWorker | None = None
) -> Comparison | None:
    """Train every mode and compare. Every rank must call this; the first one returns the comparison."""
    model = build_model(config.model, seed=config.seed)
    planner = start_planner(
        config, inspect(model).shape, mode="equipoise" if "equipoise" in modes else "off", worker=worker
    )
    show_warm_up(model, config, ranks, show)
    ready = None if planner is None else planner.ready(show)
    settings: list[tuple[str, Mode, TrainConfig]] = [(mode, mode, config) for mode in modes]
    if "equipoise" in modes and config.balance.slots:
        settings.append((PLACED, "equipoise", change(config, balance={"slots": 0})))
    elif "equipoise" in modes:
        # Without slots the planned mode is placement alone.
        settings = [(PLACED if mode == "equipoise" else name, mode, one) for name, mode, one in settings]

    rollouts: list[Experience] = []
    legs = []
    for name, mode, one in settings:
        show(RunEvent("note", {"message": f"training {name}"}))
        trainer = Trainer(copy.deepcopy(model), one, ranks, mode=mode, show=show, worker=ready)
        given = rollouts if rollouts and not config.compare_free else None
        legs.append(_train_leg(trainer, name=name, given=given, keep=rollouts))
    if planner is not None:
        planner.close()
    if not ranks.is_first:
        return None
    shape = inspect(model).shape
    facts = {
        "model": config.model.path or config.model.family,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{name: getattr(shape, name) for name in ("layers", "experts", "top_k")},
        "ranks": config.ranks,
        "device": config.model.device,
    }
    found = build_comparison(legs, is_free=config.compare_free, limit=LIMITS[config.model.dtype])
    return replace(found, facts=facts)


def build_comparison(legs: Sequence[Leg], *, is_free: bool, limit: float) -> Comparison:
    """Compare every leg with the first; and placement alone with `static`, which must have the same bits.

    `limit` is the largest difference of losses and weights.
    """
    by_name = {leg.name: leg for leg in legs}
    pairs = [pair_of(legs[0], leg, limit=limit) for leg in legs[1:]]
    if PLACED in by_name and "static" in by_name:
        pairs.append(pair_of(by_name["static"], by_name[PLACED], limit=limit, must_be_bit_equal=True))
    moved = [leg for leg in legs if leg.name.startswith("equipoise")]
    problems = []
    if moved and not any(leg.displaced + leg.replicas for leg in moved):
        problems.append("nothing was displaced and no replica made, so nothing is shown: use more ranks or steps")
    if not any(size for leg in legs for sizes in leg.sizes for size in sizes):
        problems.append("no sample earned more than another, so nothing was learnt: warm up longer, or ask more")
    rows = [
        {
            "name": leg.name,
            "loss": [sum(losses) / len(losses) for losses in leg.losses],
            "grad_norm": list(leg.norms),
            "seconds": list(leg.seconds),
            "skew": leg.skew,
            "displaced": leg.displaced,
            "replicas": leg.replicas,
            "reward": leg.reward,
            **leg.speed,
        }
        for leg in legs
    ]
    return Comparison(legs=rows, pairs=pairs, is_free=is_free, problems=tuple(problems))


def pair_of(first: Leg, second: Leg, *, limit: float, must_be_bit_equal: bool = False) -> Pair:
    """Compare two legs, step by step."""

    def weight_gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        largest = max(float(tensor.abs().max()) for tensor in a.values())
        return max(float((a[name] - b[name]).abs().max()) for name in a) / max(largest, 1e-12)

    return Pair(
        names=(first.name, second.name),
        loss_gap=tuple(
            max(abs(a - b) / max(size, 1e-12) for a, b, size in zip(x, y, sizes, strict=True))
            for x, y, sizes in zip(first.losses, second.losses, first.sizes, strict=True)
        ),
        norm_gap=tuple(abs(a - b) / max(a, 1e-12) for a, b in zip(first.norms, second.norms, strict=True)),
        weight_gap=tuple(weight_gap(a, b) for a, b in zip(first.weights, second.weights, strict=True)),
        is_bit_equal=first.losses == second.losses,
        limit=limit,
        must_be_bit_equal=must_be_bit_equal,
    )


def _train_leg(trainer: Trainer, *, name: str, given: Sequence[Experience] | None, keep: list[Experience]) -> Leg:
    """Train one mode; the rollouts of the first one are kept for the others. Every rank must call this."""
    losses, sizes, norms, weights, metrics = [], [], [], [], []
    for step in range(trainer.config.steps):
        metrics.append(trainer.step(step, given=None if given is None else given[step]))
        tally = trainer.stages.tally
        losses.append(tuple(tally.losses))
        sizes.append(tuple(tally.sizes))
        norms.append(sum(tally.norms) / len(tally.norms))
        # Copies on the CPU: some weights are views of the host store, others are on the device.
        state = trainer.learner.state_dict()
        floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        weights.append({name: tensor.detach().to("cpu", copy=True) for name, tensor in floats.items()})
        if given is None and trainer.experience is not None:
            keep.append(trainer.experience)
    trainer.close()
    return Leg(
        name=name,
        losses=tuple(losses),
        sizes=tuple(sizes),
        norms=tuple(norms),
        weights=tuple(weights),
        displaced=sum(m["displaced"] for m in metrics),
        replicas=sum(m["replicas"] for m in metrics),
        reward=metrics[-1]["reward"],
        seconds=tuple(sum(s for stage, s in m["stage_s"].items() if stage in TRAINED) for m in metrics),
        tokens=tuple(round(m["tokens_per_s"] * m["seconds"]) for m in metrics),
        skew=None if metrics[0]["skew_after"] is None else sum(m["skew_after"] for m in metrics) / len(metrics),
    )
