"""The proof that training is unchanged: the same seed trained in several modes, in one set of processes.

    off         plain data parallel, all experts on every rank
    static      contiguous expert parallelism
    equipoise   as planned; and once more with placement alone, where `static` is compared with it

All modes start from the same warmed-up weights. With a verdict they train on the rollouts that the first mode recorded:
one sampled token that differs would fork them, and the comparison would be of two random walks. Without (free), every
mode makes its own rollouts, and what is shown is no proof.

Verdict, per pair of modes:
1. Loss of every step within `LIMITS` of each other, relative to the mean size of its terms: the terms of GRPO cancel,
   so that a loss near 0 says nothing of its own rounding.
2. Final weights within `LIMITS` of their largest value.
3. `static` and `equipoise` without replicas: every loss has the same bits.

Knows trainers and numbers. Does not know how a step is trained.

Invariants (asserted by the tests):
1. A mode that learns something else is found, and named.
2. Modes agree on 4 ranks of 2 nodes after 10 steps.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import Tensor

from equipoise.adapters.transformers import inspect
from equipoise.core.errors import TrainingError
from equipoise.planning.worker import PlanWorker
from equipoise.rl.config import Mode, TrainConfig, change
from equipoise.rl.launch import Event, Show
from equipoise.rl.layout import Layout
from equipoise.rl.learner import start_planner
from equipoise.rl.model import build_model
from equipoise.rl.run import warm_up_told
from equipoise.rl.train import Experience, Trainer

LIMITS = {"float32": 1e-5, "bfloat16": 2.0**-8}
"""How far two modes may be apart, by the weights' dtype; in bf16 by one step of its rounding, since modes that multiply
in another order round otherwise from the first product on."""
PLACED = "equipoise, no replicas"
"""The leg that `static` must equal bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One mode, trained."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two legs side by side."""

    names: tuple[str, str]
    loss_gap_S: tuple[float, ...]
    """Per step, the largest difference of a loss, relative to the size of its terms."""
    norm_gap_S: tuple[float, ...]
    weight_gap_S: tuple[float, ...]
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
        return max(self.loss_gap_S) <= self.limit and self.weight_gap_S[-1] <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All legs, and what is said of them."""

    legs: Sequence[Mapping[str, Any]]
    """Per leg: name, loss, grad_norm per step, displaced, replicas, reward."""
    pairs: Sequence[Pair]
    is_free: bool
    trouble: Sequence[str] = field(default_factory=tuple)

    @property
    def is_good(self) -> bool:
        """Whether every pair agrees and something was moved; a free comparison has no verdict."""
        return self.is_free or (all(pair.is_good for pair in self.pairs) and not self.trouble)

    def lines(self) -> list[str]:
        """The comparison in words."""
        lines = [f"{'':>24}{'step':>6}{'loss':>12}{'grad norm':>12}{'d loss':>10}{'d norm':>10}{'d weight':>10}"]
        for index, leg in enumerate(self.legs):
            pair = None if index == 0 else self.pairs[index - 1]
            for step, (loss, norm) in enumerate(zip(leg["loss"], leg["grad_norm"], strict=True)):
                gaps = () if pair is None else (pair.loss_gap_S[step], pair.norm_gap_S[step], pair.weight_gap_S[step])
                name = leg["name"] if step == 0 else ""
                lines.append(f"{name:>24}{step:>6}{loss:>12.6f}{norm:>12.6f}" + "".join(f"{g:>10.1e}" for g in gaps))
            lines.append(f"{'':>24}displaced {leg['displaced']}, replicas {leg['replicas']}")
        if self.is_free:
            return [*lines, "every mode made its own rollouts: no verdict"]
        for pair in self.pairs:
            lines.append(_words(pair))
        return [*lines, *self.trouble, self.verdict]

    @property
    def verdict(self) -> str:
        """The last word."""
        if not all(pair.is_good for pair in self.pairs):
            return "TRAINING DIFFERS"
        return "NOTHING IS PROVED" if self.trouble else "training is unchanged"

    def to_dict(self) -> dict[str, Any]:
        """As one JSON document."""
        return {
            "is_good": self.is_good,
            "is_free": self.is_free,
            "trouble": list(self.trouble),
            "legs": [dict(leg) for leg in self.legs],
            "pairs": [
                {
                    "names": list(pair.names),
                    "loss_gap": list(pair.loss_gap_S),
                    "norm_gap": list(pair.norm_gap_S),
                    "weight_gap": list(pair.weight_gap_S),
                    "is_bit_equal": pair.is_bit_equal,
                    "limit": pair.limit,
                    "is_good": pair.is_good,
                }
                for pair in self.pairs
            ],
        }


def parse_modes(words: str) -> tuple[Mode, ...]:
    """The modes of `--compare a,b,c`."""
    modes = tuple(word.strip() for word in words.split(","))
    strangers = [mode for mode in modes if mode not in get_args(Mode)]
    if strangers or len(set(modes)) < 2 or len(set(modes)) != len(modes):
        raise TrainingError(f"--compare {words!r}: give two or three different ones of {', '.join(get_args(Mode))}")
    return tuple(mode for mode in get_args(Mode) if mode in modes)


def run_comparison(
    config: TrainConfig, layout: Layout, show: Show, modes: Sequence[Mode], worker: PlanWorker | None = None
) -> Comparison | None:
    """Train every mode and compare. Every rank must call this; the first one returns the comparison."""
    model = build_model(config.model, seed=config.seed)
    mode: Mode = "equipoise" if "equipoise" in modes else "off"
    planner = start_planner(config, inspect(model).shape, mode=mode, worker=worker)
    warm_up_told(model, config, layout, show)
    ready = None if planner is None else planner.ready(show)
    rollouts: list[Experience] = []
    legs = []
    for name, mode, settings in _legs(config, modes):
        show(Event("note", {"words": f"training {name}"}))
        trainer = Trainer(copy.deepcopy(model), settings, layout, mode=mode, show=show, worker=ready)
        given = rollouts if rollouts and not config.compare_free else None
        legs.append(_train_leg(trainer, settings, name=name, given=given, keep=rollouts))
    if planner is not None:
        planner.close()
    if not layout.is_first:
        return None
    return build_comparison(legs, is_free=config.compare_free, limit=LIMITS[config.model.dtype])


def build_comparison(legs: Sequence[Leg], *, is_free: bool, limit: float) -> Comparison:
    """Compare every leg with the first; and placement alone with `static`, which must have the same bits.

    Args:
        limit: how far losses and weights may be apart
    """
    by_name = {leg.name: leg for leg in legs}
    pairs = [pair_of(legs[0], leg, limit=limit) for leg in legs[1:]]
    if PLACED in by_name and "static" in by_name:
        pairs.append(pair_of(by_name["static"], by_name[PLACED], limit=limit, must_be_bit_equal=True))
    moved = [leg for leg in legs if leg.name.startswith("equipoise")]
    trouble = []
    if moved and not any(leg.displaced + leg.replicas for leg in moved):
        trouble.append("nothing was displaced and no replica made, so nothing is shown: use more ranks or steps")
    if not any(size for leg in legs for sizes in leg.sizes for size in sizes):
        trouble.append("no sample earned more than another, so nothing was learnt: warm up longer, or ask more")
    rows = [
        {
            "name": leg.name,
            "loss": [sum(losses) / len(losses) for losses in leg.losses],
            "grad_norm": list(leg.norms),
            "displaced": leg.displaced,
            "replicas": leg.replicas,
            "reward": leg.reward,
        }
        for leg in legs
    ]
    return Comparison(legs=rows, pairs=pairs, is_free=is_free, trouble=tuple(trouble))


def pair_of(first: Leg, second: Leg, *, limit: float, must_be_bit_equal: bool = False) -> Pair:
    """Two legs side by side."""
    gaps = [
        max(abs(a - b) / max(size, 1e-12) for a, b, size in zip(x, y, s, strict=True))
        for x, y, s in zip(first.losses, second.losses, first.sizes, strict=True)
    ]
    norms = [abs(a - b) / max(a, 1e-12) for a, b in zip(first.norms, second.norms, strict=True)]
    weights = [weight_gap(a, b) for a, b in zip(first.weights, second.weights, strict=True)]
    return Pair(
        names=(first.name, second.name),
        loss_gap_S=tuple(gaps),
        norm_gap_S=tuple(norms),
        weight_gap_S=tuple(weights),
        is_bit_equal=first.losses == second.losses,
        limit=limit,
        must_be_bit_equal=must_be_bit_equal,
    )


def weight_gap(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest difference of a weight, relative to the largest weight."""
    largest = max(float(tensor.abs().max()) for tensor in first.values())
    return max(float((first[name] - second[name]).abs().max()) for name in first) / max(largest, 1e-12)


def _legs(config: TrainConfig, modes: Sequence[Mode]) -> list[tuple[str, Mode, TrainConfig]]:
    legs: list[tuple[str, Mode, TrainConfig]] = [(mode, mode, config) for mode in modes]
    if "equipoise" in modes and config.balance.slots:
        legs.append((PLACED, "equipoise", change(config, balance={"slots": 0})))
    elif "equipoise" in modes:
        legs = [(PLACED if mode == "equipoise" else name, mode, settings) for name, mode, settings in legs]
    return legs


def _train_leg(
    trainer: Trainer, config: TrainConfig, *, name: str, given: Sequence[Experience] | None, keep: list[Experience]
) -> Leg:
    """Train one mode; the first one's rollouts are kept for the others. Every rank must call this."""
    losses, sizes, norms, weights, metrics = [], [], [], [], []
    for step in range(config.steps):
        metrics.append(trainer.step(step, given=None if given is None else given[step]))
        tally = trainer.stages.tally
        losses.append(tuple(tally.losses))
        sizes.append(tuple(tally.sizes))
        norms.append(sum(tally.norms) / len(tally.norms))
        weights.append(_floats(trainer.learner.state_dict()))
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
    )


def _floats(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, kept on the CPU: experts of the host store are there, those of other modes may be anywhere."""
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in floats.items()}


def _words(pair: Pair) -> str:
    bits = ", losses have the same bits" if pair.is_bit_equal else ""
    if pair.must_be_bit_equal:
        bits = ", losses have the same bits (they must)" if pair.is_bit_equal else ", losses have OTHER BITS"
    return (
        f"{'good' if pair.is_good else 'BAD':>4}  {pair.names[0]} and {pair.names[1]}: loss within "
        f"{max(pair.loss_gap_S):.1e} (limit {pair.limit:.1g}), final weights within {pair.weight_gap_S[-1]:.1e} "
        f"(limit {pair.limit:.1g}){bits}"
    )
