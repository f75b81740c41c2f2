"""What an installed Megatron model costs where the plan moves nothing: the unmodified model beside it, in one run.

    python -m benchmarks.megatron_layer

Four gloo ranks on CPUs, the real GPTModel of tests/megatron with one thread per rank and experts wide enough that their
products take most of the time; experts compute in place, without a working copy. Both models run forward and backward
of the same micro-batches on the same replayed routes, in turn. Routes are submitted and planned before the clock
starts, as a trainer does during a rollout. The plan displaces no expert and makes no replica, which is checked.

A figure is the median of rounds: wall seconds of the slowest rank, processor seconds of all ranks, and those of their
training threads alone. Ratios are taken round by round, of neighbours in time; the median is given with its quartiles.
Wall seconds need a core per rank and no other work on the machine; processor seconds of the training thread, which the
limit holds, need neither, but what others do to caches and clocks is in them. One more round counts the operators of
torch and their own time, and one the calls of Python functions, which no other work changes.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.results import Limit, publish
from tests.megatron.layouts import Layout
from tests.megatron.pool import MegatronPool

LIMIT_PCT = 1.0
CLOCKS = {"wall": "wall s", "processor": "processor s", "thread": "training thread s"}
"""What `time_closed_gate` measures, in its order."""
COUNTS: Mapping[str, Callable[[Any], float]] = {
    "operators of torch": lambda found: sum(count for count, _ in found["operators"].values()),
    "their own s": lambda found: sum(own_us for _, own_us in found["operators"].values()) / 1e6,
    "calls of Python": lambda found: found["python_calls"],
}
NAMED = 16
"""Operators in the note."""


def main() -> int:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description="An installed Megatron model whose plan moves nothing.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample; two samples per micro-step")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=768, help="of an expert")
    given = parser.parse_args()
    pool = MegatronPool()
    try:
        layout = Layout(hidden=given.hidden, width=given.width)
        ranks = pool.call("time_closed_gate", layout, given.length, given.rounds)
    finally:
        pool.close()
    rows = [compare_seconds(ranks, clock) for clock in CLOCKS] + [compare_counts(ranks, what) for what in COUNTS]
    limit = Limit(name="training thread over plain in %", value=rows[-len(COUNTS) - 1]["over_pct"], at_most=LIMIT_PCT)
    note = "\n".join(("operators that differ most, calls on rank 0 and own ms:", *differing_operators(ranks[0])))
    return publish("Megatron, closed gate", rows, limits=[limit], note=note, packages=("torch", "megatron-core"))


def compare_seconds(ranks: Sequence[Any], clock: str) -> dict[str, Any]:
    """Return medians of both models, and the quartiles of their ratio in a round."""
    # Ranks wait for each other, so a round is over with its slowest rank.
    at, join = list(CLOCKS).index(clock), max if clock == "wall" else sum
    plain, closed = (
        [join(seconds[at] for seconds in one) for one in zip(*(rank[name]["s"] for rank in ranks), strict=True)]
        for name in ("plain", "closed")
    )
    over = [100 * (ours / theirs - 1) for ours, theirs in zip(closed, plain, strict=True)]
    low, middle, high = statistics.quantiles(over, n=4, method="inclusive")
    medians = {"plain": statistics.median(plain), "closed": statistics.median(closed)}
    return {"what": CLOCKS[clock], **medians, "over_pct": middle, "from_pct": low, "to_pct": high}


def compare_counts(ranks: Sequence[Any], what: str) -> dict[str, Any]:
    """Return the sums over ranks of what both models call."""
    plain, closed = (sum(COUNTS[what](rank[name]) for rank in ranks) for name in ("plain", "closed"))
    # One round has no spread; a table has the same columns in every row.
    over = dict.fromkeys(("over_pct", "from_pct", "to_pct"), 100 * (closed / plain - 1))
    return {"what": what, "plain": plain, "closed": closed, **over}


def differing_operators(rank: Any) -> list[str]:
    """Name the operators whose own time differs most between both models."""
    plain, closed = (rank[name]["operators"] for name in ("plain", "closed"))
    names = sorted({*plain, *closed}, key=lambda n: -abs(closed.get(n, (0, 0))[1] - plain.get(n, (0, 0))[1]))

    def said(found: Mapping[str, Any], name: str) -> str:
        count, own_us = found.get(name, (0, 0.0))
        return f"{count} in {own_us / 1e3:.1f}"

    return [f"  {name}: plain {said(plain, name)}, closed {said(closed, name)}" for name in names[:NAMED]]


if __name__ == "__main__":
    sys.exit(main())
