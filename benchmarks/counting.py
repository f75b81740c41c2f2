"""Counting routes against one np.bincount call over the same ids, in the same run, on one core.

    python -m benchmarks.counting
    python -m benchmarks.counting --tokens 65536 --repeats 15

What bounds it: one load, one add and one store in the first-level cache per id. The ceiling given is the time to read
the ids from memory once (`ids.max()`), which no counting can beat.

Method:
1. Each token's K ids are distinct, drawn by a power law of exponent 0.7 over the experts, another order per layer.
2. All contenders run one after another in every repeat, on one core; the best time of each counts.
3. Counting is `count_sample`, id range check and histogram per layer included; its sum over layers is compared with
   np.bincount's before any time is taken.

Contenders: "bincount" is one np.bincount call over the flat ids as they are (its cast to int64 included), which
counts all layers into one histogram; "bincount int64" is given ids cast beforehand; "bincount layers" is given int64
ids with layer x E added beforehand, so that it counts layers apart, as we do.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.results import Limit, publish
from equipoise.core import ModelShape, SampleRoutes
from equipoise.core.routes import id_dtype
from equipoise.loads.count import count_sample

HEADLINE = "qwen3-30b-a3b"
MODELS = (HEADLINE, "deepseek-v3", "deepseek-v2-lite", "gpt-oss-120b", "mixtral-8x7b")
LIMIT = 3.0


def main() -> int:
    """Run every model and publish."""
    parser = argparse.ArgumentParser(description="Counting routes against one np.bincount call")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [measure(ModelShape.preset(name), tokens=options.tokens, repeats=options.repeats) for name in MODELS]
    # Ids of two bytes: no preset has as many experts.
    wide = ModelShape.preset(HEADLINE).replace(name="512 experts, top-10", experts=512, top_k=10)
    rows.append(measure(wide, tokens=options.tokens, repeats=options.repeats))
    limits = [Limit(name=f"speed-up over one np.bincount call, {HEADLINE}", value=rows[0]["speed_up"], at_least=LIMIT)]
    return publish("counting", rows, limits=limits, note="times in nanoseconds per id, best of the repeats")


def measure(model: ModelShape, *, tokens: int, repeats: int) -> dict[str, Any]:
    """Time all contenders on one sample of `model`."""
    sample = make_sample(model, tokens=tokens)
    flat = sample.ids_TLK.ravel()
    wide = flat.astype(np.int64)
    layered = (sample.ids_TLK + np.arange(model.layers)[:, None] * model.experts).ravel()
    contenders: dict[str, Callable[[], Any]] = {
        "ours": lambda: count_sample(sample, model.experts).count_LE.sum(axis=0),
        "bincount": lambda: np.bincount(flat, minlength=model.experts),
        "bincount int64": lambda: np.bincount(wide, minlength=model.experts),
        "bincount layers": lambda: np.bincount(layered, minlength=model.layers * model.experts),
        "read once": lambda: flat.max(),
    }
    assert np.array_equal(contenders["ours"](), contenders["bincount"]()), "the two must count the same"
    best = {name: 1e9 * seconds / flat.size for name, seconds in time_all(contenders, repeats=repeats).items()}
    return {
        "model": model.name,
        "ids": flat.size,
        **best,
        "speed_up": best["bincount"] / best["ours"],
        "over int64": best["bincount int64"] / best["ours"],
        "over layers": best["bincount layers"] / best["ours"],
    }


def time_all(contenders: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, float]:
    """Best seconds of each contender."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def make_sample(model: ModelShape, *, tokens: int, exponent: float = 0.7, seed: int = 0) -> SampleRoutes:
    """A sample of distinct ids per route, popularity a power law of `exponent`, hot experts differing by layer."""
    rng = np.random.default_rng(seed)
    popularity_E = -exponent * np.log(np.arange(1, model.experts + 1))
    # Gumbel noise and the k largest draw k experts without replacement; a block of routes is then tiled.
    noise = rng.gumbel(size=(4096, model.experts)) + popularity_E
    block = np.argpartition(noise, -model.top_k, axis=1)[:, -model.top_k :]
    ids = np.empty((tokens, model.layers, model.top_k), dtype=id_dtype(model.experts))
    for layer in range(model.layers):
        order_E = rng.permutation(model.experts)
        ids[:, layer] = order_E[block][rng.integers(0, len(block), size=tokens)]
    return SampleRoutes(name="made", ids_TLK=ids, num_tokens=tokens + 1)


if __name__ == "__main__":
    sys.exit(main())
