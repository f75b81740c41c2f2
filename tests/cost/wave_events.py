"""Waves, one after another: the specification of `cost.waves.Piped`. Whatever runs waits for what it needs.

A network that does one thing at a time, in order of issue; ranks that do one wave after another.
"""

from typing import NamedTuple


class WaveTimes(NamedTuple):
    """When one direction of a layer has ended, and what its ranks computed."""

    end: int
    computed_R: list[int]


def run_waves(part_W: list[int], wave_WR: list[list[int]], rest_R: list[int]) -> WaveTimes:
    """Run one direction of one layer; arguments as in `Piped.of`, for one (micro-step, layer)."""
    now, pending, ranks = 0, [("dispatch", wave) for wave in range(len(part_W))], range(len(rest_R))
    pending += [("combine", wave) for wave in range(len(part_W))]
    done: dict[tuple[str, int], int] = {}
    for kind, wave in pending:
        if kind == "combine":
            now = max([now, *(finished(rank, wave, wave_WR, done) for rank in ranks)])
        now += part_W[wave]
        done[kind, wave] = now
    last = len(part_W) - 1
    ends = [finished(rank, last, wave_WR, done) + rest_R[rank] for rank in ranks]
    return WaveTimes(
        end=max(now, *ends),
        computed_R=[sum(wave_R[rank] for wave_R in wave_WR) + rest_R[rank] for rank in ranks],
    )


def finished(rank: int, wave: int, wave_WR: list[list[int]], done: dict[tuple[str, int], int]) -> int:
    """When a rank has computed a wave: after the wave's dispatch, and after its own wave before it."""
    before = 0 if wave == 0 else finished(rank, wave - 1, wave_WR, done)
    return max(before, done["dispatch", wave]) + wave_WR[wave][rank]
