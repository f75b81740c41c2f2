"""Waves, one after another: the specification of `cost.waves.Piped`. Whatever runs waits for what it needs.

A network that does one thing at a time, in order of issue; ranks that do one wave after another. No closed form.
"""

from typing import NamedTuple


class WaveTimes(NamedTuple):
    """When one direction of a layer has ended, and what its ranks computed."""

    end: int
    computed_R: list[int]


def run_waves(part: int, wave_R: list[int], rest_R: list[int], waves: int) -> WaveTimes:
    """Run one direction of one layer; arguments as in `Piped.of`, for one (micro-step, layer)."""
    network_free, rank_free_R = 0, [0] * len(wave_R)
    # Step 1: all parts of the first exchange are issued at once.
    arrived = []
    for _ in range(waves):
        network_free += part
        arrived.append(network_free)
    # Step 2: wave by wave, the experts of every rank, then the exchange of what they made, where all ranks meet.
    for wave in range(waves):
        for rank, took in enumerate(wave_R):
            rank_free_R[rank] = max(rank_free_R[rank], arrived[wave]) + took
        network_free = max(network_free, *rank_free_R) + part
    # Step 3: what is computed after the last wave runs beside the exchanges that are left.
    ends_R = [free + rest for free, rest in zip(rank_free_R, rest_R, strict=True)]
    return WaveTimes(
        end=max(network_free, *ends_R),
        computed_R=[waves * wave + rest for wave, rest in zip(wave_R, rest_R, strict=True)],
    )
