"""Generate workloads with the measured properties of real routing.

How a workload is generated (every figure is a field of `Workload`):
1. Popularity. In each layer the experts' shares fall as rank ** -exponent, exponents from 0.55 to 0.95, most layers
   near the low end; no expert takes more than about 12 % of the assignments. Which expert is hot follows a random field
   over expert ids that is smooth between neighbours, so that hot experts are adjacent more often than by chance.
2. Domains. Each domain mixes the field that all share with its own, and has its own steepness.
3. Samples. Each sample has a domain, a log-normal length and log-normal factors on its experts' shares. Rollouts of one
   prompt, if there are several, follow each other and share its domain and its own factors.
4. Drift. With the step, every field slowly rotates into another one.
5. Routes. The shares of a sample become inclusion probabilities (they add up to top_k), and each token draws top_k
   distinct experts with exactly those: systematic sampling through a few random orders of the experts.

Measured on real text: exponent 0.55-0.75 and hottest expert 8-12 % in the worst layer (Qwen3-30B-A3B); cosine of counts
0.92 between samples of one domain, 0.59-0.73 between domains (DeepSeek-V2-Lite, ESFT tasks).

The same figures and seed give the same workload, and sample b does not depend on how many samples follow it.
A sample of T tokens has T - 1 rows, as engines record.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import ModelShape, RouteCounts, Routes, RoutesError, SampleRoutes
from equipoise.core.routes import id_dtype
from equipoise.core.value import Value, require_int

ORDERS, LEVELS = 8, 32
"""Random orders of the experts, and draws through each: 256 candidate routes per sample and layer, one byte to pick."""

LIMITS = {
    "samples": (1, 2**24),
    "domains": (1, 4096),
    "mean_tokens": (2, 2**20),
    "rollouts": (1, 2**24),
    "seed": (0, 2**63 - 1),
    "step": (0, 2**31 - 1),
}
"""Range of the integer figures; more would not fit into memory, or into the seeds of the draws."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload(Value):
    """Figures of one RL step's rollouts."""

    model: ModelShape
    samples: int = 64
    domains: int = 4
    mean_tokens: int = 2048
    length_sigma: float = 0.6
    """Standard deviation of the logarithm of the length; 0 makes all samples equally long."""
    seed: int = 0
    step: int = 0
    """RL step; popularity drifts with it."""
    shared: float = 0.75
    """Weight of the popularity field that all domains share, 0 to 1."""
    sample_sigma: float = 0.33
    """Standard deviation of the logarithm of a sample's factors on its experts' shares."""
    rollouts: int = 1
    """Consecutive samples that answer one prompt."""
    prompt_sigma: float = 0.0
    """The same as `sample_sigma` of the factors that all rollouts of a prompt share."""
    drift: float = 0.02
    """Radians per step by which popularity rotates."""

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            require_int(name, getattr(self, name), low=least, high=most, error=RoutesError)
        sigmas = dict.fromkeys(("length_sigma", "sample_sigma", "prompt_sigma"), 3.0)
        for name, high in {**sigmas, "shared": 1.0, "drift": 1.0}.items():
            if not 0 <= getattr(self, name) <= high:
                raise RoutesError(f"{name} is {getattr(self, name)}; it must be from 0 to {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Draw:
    """One sample to generate: its name, its rows and its inclusion probabilities."""

    name: str
    rows: int
    chance_LE: np.ndarray
    rng: np.random.Generator


def generate_samples(model: ModelShape, **figures: Any) -> Iterator[SampleRoutes]:
    """Yield the routes of one sample after another, so that a store can be written meanwhile.

    Args:
        model: whose experts and layers
        figures: fields of `Workload`, such as samples=512, mean_tokens=8192, seed=1
    """
    for draw in _draws(Workload(model=model, **figures)):
        table = _candidates(draw.chance_LE, model.top_k, draw.rng).astype(id_dtype(model.experts))
        pick_TL = draw.rng.integers(0, ORDERS * LEVELS, size=(draw.rows, model.layers))
        ids_TLK = table[pick_TL + np.arange(model.layers) * ORDERS * LEVELS]
        yield SampleRoutes(name=draw.name, ids_TLK=ids_TLK, num_tokens=draw.rows + 1)


def generate_routes(model: ModelShape, **figures: Any) -> Routes:
    """Generate the routes of a whole step in memory; arguments as in `generate_samples`."""
    return Routes.of(list(generate_samples(model, **figures)), model=model)


def generate_counts(model: ModelShape, **figures: Any) -> RouteCounts:
    """Generate histograms alone, some thirty times faster at 8k tokens; arguments as in `generate_samples`."""
    workload = Workload(model=model, **figures)
    count_BLE = np.zeros((workload.samples, model.layers, model.experts), dtype=np.int64)
    rows_B = np.zeros(workload.samples, dtype=np.int64)
    names = []
    for b, draw in enumerate(_draws(workload)):
        count_BLE[b] = _drawn_counts(draw, model.top_k)
        rows_B[b] = draw.rows
        names.append(draw.name)
    return RouteCounts(
        model=model,
        count_BLE=count_BLE,
        unknown_BL=np.ones((workload.samples, model.layers), dtype=np.int64),
        tokens_B=rows_B + 1,
        names=tuple(names),
        layer_numbers=model.layer_numbers,
    )


def popularity_DLE(workload: Workload) -> np.ndarray:
    """Return [domains, L, E], each domain's share of assignments per expert; sums to 1 over experts."""
    model, rng = workload.model, np.random.default_rng([workload.seed, 0])
    shape = (model.layers, model.experts)
    common = _drifting_field(rng, shape, workload.drift * workload.step)
    steep_L = rng.beta(1, 3, size=model.layers)
    shares = []
    for domain in range(workload.domains):
        own_rng = np.random.default_rng([workload.seed, 1, domain])
        own = _drifting_field(own_rng, shape, workload.drift * workload.step)
        field = workload.shared * common + np.sqrt(1 - workload.shared**2) * own
        exponent_L = 0.55 + 0.4 * steep_L ** np.exp(0.7 * own_rng.standard_normal())
        rank_LE = (-field).argsort(axis=1).argsort(axis=1) + 1.0
        shares.append(_chances(rank_LE ** -exponent_L[:, None], model.top_k) / model.top_k)
    return np.stack(shares)


def _draws(workload: Workload) -> Iterator[_Draw]:
    share_DLE = popularity_DLE(workload)
    mean, sigma = workload.mean_tokens, workload.length_sigma
    for b in range(workload.samples):
        rng = np.random.default_rng([workload.seed, 2, workload.step, b])
        drawn = int(rng.integers(workload.domains))
        if b % workload.rollouts == 0:
            prompt_rng = np.random.default_rng([workload.seed, 3, workload.step, b])
            asked_LE = np.exp(workload.prompt_sigma * prompt_rng.standard_normal(share_DLE.shape[1:]))
            domain = drawn
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        length = mean * np.exp(sigma * rng.standard_normal() - sigma**2 / 2)
        factor_LE = np.exp(workload.sample_sigma * rng.standard_normal(share_DLE.shape[1:]))
        yield _Draw(
            name=f"step{workload.step}-sample{b}-domain{domain}",
            rows=max(2, min(round(length), 8 * mean)) - 1,
            chance_LE=_chances(share_DLE[domain] * asked_LE * factor_LE, workload.model.top_k),
            rng=rng,
        )


def _drifting_field(rng: np.random.Generator, shape: tuple[int, int], angle: float) -> np.ndarray:
    """Draw normal noise over expert ids, slightly smooth between neighbours, rotated by `angle` into another field."""
    experts = shape[1]
    distance = np.minimum(np.arange(experts), experts - np.arange(experts))
    # A decay length of 0.35 ids gives the contiguous skew of the real traces.
    kernel = np.exp(-distance / 0.35)
    spectrum = np.fft.fft(kernel / np.linalg.norm(kernel))
    here, there = (np.fft.ifft(np.fft.fft(rng.standard_normal(shape)) * spectrum).real for _ in range(2))
    return np.asarray(np.cos(angle) * here + np.sin(angle) * there)


def _chances(weight_LE: np.ndarray, top_k: int) -> np.ndarray:
    """Return inclusion probabilities in proportion to weights, with sum top_k, none above those of real traces."""
    experts = weight_LE.shape[1]
    # The hottest expert measured takes 12 % of the assignments; with few experts 2.5 times the mean.
    limit = max(top_k / experts, min(0.96, max(0.12 * top_k, 2.5 * top_k / experts)))
    chance = top_k * weight_LE / weight_LE.sum(axis=1, keepdims=True)
    full = chance >= limit
    while True:
        rest = np.where(full, 0.0, chance)
        scale = (top_k - limit * full.sum(axis=1, keepdims=True)) / np.maximum(rest.sum(axis=1, keepdims=True), 1e-300)
        chance = np.where(full, limit, rest * scale)
        more = chance > limit
        if not more.any():
            return np.asarray(chance)
        full |= more


def _candidates(chance_LE: np.ndarray, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """Return [L * ORDERS * LEVELS, K] routes of which a uniform pick has the given inclusion probabilities."""
    layers, experts = chance_LE.shape
    order_XE = rng.random((layers * ORDERS, experts)).argsort(axis=1)
    chance_XE = np.take_along_axis(np.repeat(chance_LE, ORDERS, axis=0), order_XE, axis=1)
    # One search for all orders: order x occupies (x * (top_k + 1), x * (top_k + 1) + top_k].
    base_X = np.arange(layers * ORDERS) * (top_k + 1.0)
    ends_XE = base_X[:, None] + np.cumsum(chance_XE, axis=1)
    start_XQ = (np.arange(LEVELS) + rng.random((layers * ORDERS, 1))) / LEVELS
    point_XQK = base_X[:, None, None] + start_XQ[:, :, None] + np.arange(top_k)
    found = np.searchsorted(ends_XE.ravel(), point_XQK.ravel(), side="right").reshape(layers * ORDERS, LEVELS * top_k)
    place = np.minimum(found - np.arange(layers * ORDERS)[:, None] * experts, experts - 1)
    return np.take_along_axis(order_XE, place, axis=1).reshape(-1, top_k)


def _drawn_counts(draw: _Draw, top_k: int) -> np.ndarray:
    """Draw [L, E] integer rows near rows * chance with binomial spread, each at most `rows`, with sum rows * top_k."""
    chance = draw.chance_LE
    spread = np.sqrt(chance * (1 - chance) / draw.rows) * draw.rng.standard_normal(chance.shape)
    noisy = _chances(np.clip(chance + spread, 1e-9, 1.0), top_k)
    # Rounding the running sum keeps the total; each expert is then off by less than one row.
    ends = np.rint(np.cumsum(noisy, axis=1) * draw.rows).astype(np.int64)
    ends[:, -1] = draw.rows * top_k
    return np.diff(ends, axis=1, prepend=0)
