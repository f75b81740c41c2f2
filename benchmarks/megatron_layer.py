"""What an installed Megatron model costs where the plan moves nothing: the unmodified model beside it, in one run.

    python -m benchmarks.megatron_layer

Four gloo ranks on CPUs, the real GPTModel of tests/megatron with one thread per rank and experts wide enough that their
products take most of the time; experts compute in place, without a working copy. Both models run forward and backward
of the same micro-batches on the same replayed routes, in turn. Routes are submitted and planned before the clock
starts, as a trainer does during a rollout. The plan displaces no expert and makes no replica, which is checked.

A figure is the median of rounds: wall seconds of the slowest rank, and processor seconds of all ranks; ratios are those
of medians. The limit holds wall seconds, which need a core per rank and no other work on the machine.
"""

import argparse
import statistics
import sys

from benchmarks.results import Limit, publish
from tests.megatron.layouts import Layout
from tests.megatron.pool import MegatronPool

LIMIT_PCT = 1.0


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
    row: dict[str, float] = {"rounds": given.rounds}
    for name in ("plain", "closed"):
        rounds = list(zip(*(rank[name] for rank in ranks), strict=True))
        # Ranks wait for each other, so a round is over with its slowest rank.
        row[f"{name}_s"] = statistics.median(max(wall for wall, _ in one) for one in rounds)
        row[f"{name}_processor_s"] = statistics.median(sum(used for _, used in one) for one in rounds)
    row["over_plain_pct"] = 100 * (row["closed_s"] / row["plain_s"] - 1)
    row["processor_over_plain_pct"] = 100 * (row["closed_processor_s"] / row["plain_processor_s"] - 1)
    limit = Limit(name="closed gate over plain in %", value=row["over_plain_pct"], at_most=LIMIT_PCT)
    return publish("Megatron, closed gate", [row], limits=[limit], packages=("torch", "megatron-core"))


if __name__ == "__main__":
    sys.exit(main())
