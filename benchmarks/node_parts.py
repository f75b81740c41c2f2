"""Where a window's seconds go on a rank, by part, measured on its device.

    experts    products and activations of the expert block
    exchange   rows to their slots and back, and what each meeting of the ranks takes even the last one to arrive
    waiting    for ranks that arrive later
    exposed    transfers that layers wait for, and opening and closing the window
    rest       attention, norms, and gradients added to those of earlier micro-steps

Functions of the package are wrapped for one window: an event in front, an event behind, which takes the device next to
nothing. An inner function's time is not its caller's. Parts are means over ranks, so they add up to the window.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from equipoise.layer import expert_block, mapped, ops
from equipoise.layer.experts import BalancedExperts
from equipoise.transfer.engine import TransferEngine
from equipoise.transfer.mapped_rows import MappedRows

PARTS = ("experts", "exchange", "waiting", "exposed", "rest")
MEET = "meet"
"""Where ranks wait for each other: its time is divided between `exchange` and `waiting`."""
ROWS = (mapped._Fetch, mapped._CombineMapped, ops._Spread, ops._Reorder, ops._Combine, ops._Exchange)
"""Autograd functions that move rows."""
TRANSFERS = ("open_window", "close_window", "wait_for", "joined", "weights", "hand_in", "collect_returns")
WRAPPED = (
    (BalancedExperts, ("forward",), "exchange"),
    *((function, ("forward", "backward"), "exchange") for function in ROWS),
    (expert_block._ExpertBlock, ("forward", "backward"), "experts"),
    (MappedRows, ("end",), MEET),
    (ops, ("all_to_all",), MEET),
    (TransferEngine, TRANSFERS, "exposed"),
)


class _Region(NamedTuple):
    """One call of a wrapped function."""

    tag: str
    begin: Any
    end: Any
    parent: int
    """Index of the region in which it was called; -1: none."""


class PartClock:
    """Remembers when wrapped functions began and ended, on one rank's device."""

    def __init__(self, *, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._regions: list[_Region | None] = []
        self._open: list[int] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wrap the functions of `WRAPPED` in a `with` block."""
        kept = [(owner, name, vars(owner)[name]) for owner, names, _ in WRAPPED for name in names]
        for owner, names, tag in WRAPPED:
            for name in names:
                setattr(owner, name, self._wrap(vars(owner)[name], tag))
        try:
            yield
        finally:
            for owner, name, before in kept:
                setattr(owner, name, before)

    def seconds(self) -> dict[str, list[float]]:
        """By tag, of every call in order, without what was called in it."""
        regions = [region for region in self._regions if region is not None]
        assert len(regions) == len(self._regions), "seconds of a window that is over"
        took = [self._between(region.begin, region.end) for region in regions]
        own = list(took)
        for at, region in enumerate(regions):
            if region.parent >= 0:
                own[region.parent] -= took[at]
        found: defaultdict[str, list[float]] = defaultdict(list)
        for region, seconds in zip(regions, own, strict=True):
            found[region.tag].append(seconds)
        return dict(found)

    def _wrap(self, function: Any, tag: str) -> Any:
        is_static = isinstance(function, staticmethod)
        inner: Callable[..., Any] = function.__func__ if is_static else function

        def timed(*args: Any, **kwargs: Any) -> Any:
            at, parent, begin = len(self._regions), self._open[-1] if self._open else -1, self._now()
            self._regions.append(None)
            self._open.append(at)
            try:
                return inner(*args, **kwargs)
            finally:
                # A checkpointed layer that is repeated is left by an exception once it has what backward needs.
                self._open.pop()
                self._regions[at] = _Region(tag, begin, self._now(), parent)

        return staticmethod(timed) if is_static else timed

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self._is_gpu else end - begin)


def parts_of(window_s: float, every: list[dict[str, list[float]]]) -> dict[str, float]:
    """Seconds by part, from the calls of all ranks.

    Args:
        window_s: of the slowest rank
        every: what `PartClock.seconds` returned on each rank
    """
    found = {part: float(np.mean([sum(one.get(part, ())) for one in every])) for part in PARTS}
    # The last rank to arrive waits for nobody: what it takes is the meeting itself.
    meet_RX = np.array([one.get(MEET, []) for one in every])
    found["exchange"] += float(meet_RX.min(axis=0).sum())
    found["waiting"] = float((meet_RX.mean(axis=0) - meet_RX.min(axis=0)).sum())
    found["rest"] = window_s - sum(found[part] for part in PARTS if part != "rest")
    return found
