"""`Uploader`: dispatches made ahead, brought from the host to where layers compute, one entry before it is asked for.

Knows the order in which layers run forward, and streams. Does not know how dispatches are made. On the CPU there is
nothing to bring. On a CUDA device an entry is copied on a stream of its own while the layer before it computes; an
entry that comes out of order, as in recomputation, is copied when it is asked for. The host waits for neither.

Invariants (asserted by the tests):
1. What is brought is what was made, in any order of asking.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from equipoise.core.plan import Plan
from equipoise.runtime.prepared import PackedDispatch, PreparedDispatch

Entry = tuple[int, int]
"""(micro-step, layer)."""


class Ways(Protocol):
    """Dispatches of a window, made in the background."""

    def take(self, micro_step: int, layer: int) -> PackedDispatch:
        """Return one entry's dispatch; waits until it is made."""
        ...

    def is_made(self, micro_step: int, layer: int) -> bool:
        """Whether `take` would return at once."""
        ...


class _Upload(NamedTuple):
    entry: Entry
    prepared: PreparedDispatch
    is_there: torch.cuda.Event


class Uploader:
    """Brings the dispatches of one window to one device."""

    def __init__(self, ways: Ways, plan: Plan) -> None:
        order = list(forward_entries(plan))
        self._ways, self._after = ways, dict(pairwise(order))
        self._stream: torch.cuda.Stream | None = None
        self._ahead: _Upload | None = None

    def bring(self, entry: Entry, *, device: str) -> PreparedDispatch:
        """Return an entry's dispatch on `device`, and start the next one on its way."""
        if not device.startswith("cuda"):
            return self._ways.take(*entry).unpack(device)
        ahead, self._ahead = self._ahead, None
        upload = ahead if ahead is not None and ahead.entry == entry else self._start(entry, device)
        after = self._after.get(entry)
        if after is not None and self._ways.is_made(*after):
            self._ahead = self._start(after, device)
        return self._arrived(upload)

    def _start(self, entry: Entry, device: str) -> _Upload:
        self._stream = self._stream or torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            return _Upload(entry, self._ways.take(*entry).unpack(device), self._stream.record_event())

    def _arrived(self, upload: _Upload) -> PreparedDispatch:
        """Let the layer's stream wait for the copy, and keep the memory until that stream is through with it."""
        dispatch = upload.prepared.dispatch
        current = torch.cuda.current_stream(dispatch.index_TK.device)
        current.wait_event(upload.is_there)
        # All tables but the groups' ends are parts of one array.
        for tensor in (dispatch.index_TK, dispatch.groups.home_end_S, dispatch.groups.replica_end_S):
            tensor.record_stream(current)
        return upload.prepared


def forward_entries(plan: Plan) -> Iterator[Entry]:
    """(micro-step, layer) in the order in which layers run forward."""
    itinerary = plan.itinerary
    if itinerary is None:
        for micro_step in range(plan.loads.num_micro_steps):
            yield from ((micro_step, layer) for layer in range(plan.loads.num_layers))
        return
    for at in range(len(itinerary)):
        visit = itinerary.visit(at)
        if visit.phase == "forward":
            yield visit.micro_step, visit.layer
