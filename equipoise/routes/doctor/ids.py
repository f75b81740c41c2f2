"""The doctor's checks of the ids themselves.

    distinct-ids    k different experts per route
    id-range        every id is one of the model's experts
    dtype-overflow  no id was wrapped by a dtype too small for the model
    physical-ids    ids are logical experts, not the engine's physical slots (redundant experts included)

An id outside the model's range is blamed on exactly one cause:
1. wrapped: negative, and the model has more than 128 experts, so that an int8 turned 128..255 into -128..-1; or the
   dtype on the wire cannot hold the last expert; or more than 256 experts and, in many ids, not one above 255.
2. physical: from `experts` to twice that, in most layers and not rare, as slots of redundant experts are.
3. out of range: whatever is left.

Knows the model's number of experts. Does not look at missing (-1), equal or dead routes: other checks own those.

Invariants (asserted by the tests):
1. Each stray id is counted by one of the three last checks only.
2. Good ids of any sufficient dtype fire nothing.
"""

from itertools import combinations

import numpy as np

from equipoise.core import ModelShape
from equipoise.routes.doctor.finding import Check, Finding, Tally, judge
from equipoise.routes.doctor.reading import Reading

_INT8_WRAP = 256
_FOLD_IDS_PER_EXPERT = 64
"""So many ids per expert must have been seen before "none above 255" means that ids were folded into a byte."""
_PHYSICAL_MIN = 16
_PHYSICAL_SHARE = 0.005
"""Redundant experts take part in at least this share of the routes; stray garbage rarely does."""


class DistinctIds(Check):
    """A route names k different experts."""

    name = "distinct-ids"
    advice = (
        "duplicates collapse in a multi-hot routing map and break row counts: look for ids that were cast, clipped, "
        "or mapped from physical to logical twice"
    )

    def look(self, reading: Reading) -> None:
        ids_KTL = reading.ids_KTL
        twice_TL = np.zeros(ids_KTL.shape[1:], dtype=bool)
        for a, b in combinations(range(len(ids_KTL)), 2):
            twice_TL |= (ids_KTL[a] == ids_KTL[b]) & (ids_KTL[a] >= 0)
        twice_TL &= reading.routed_TL
        self.tally.add(int(twice_TL.sum()), twice_TL.size, lambda: reading.place(twice_TL))


class IdCauses(Check):
    """Ids outside the model's experts, each blamed on one cause."""

    advice_range = "check --model; look for uninitialised buffers and for routes of another model"
    advice_overflow = "write ids in a dtype that holds every expert (uint8 up to 256, int8 only up to 128, else int16)"
    advice_physical = (
        "the engine's expert balancer renumbered experts: record ids before its logical-to-physical map, "
        "or upgrade (vLLM and SGLang capture logical ids)"
    )

    def __init__(self, model: ModelShape) -> None:
        super().__init__(model)
        self.wrapped = Tally()
        self.above = Tally()
        self.wild = Tally()
        self.num_ids = 0
        self.top_id = -1
        self.layers: set[int] = set()
        self.above_layers: set[int] = set()
        self.first_title = ""

    def look(self, reading: Reading) -> None:
        self._look_at_padding(reading)
        ids_KTL, experts = reading.ids_KTL, self.model.experts
        self.layers.update(reading.numbers_L)
        self.num_ids += ids_KTL.size
        if not ids_KTL.size:
            return
        self.first_title = self.first_title or reading.title
        low, high = int(ids_KTL.min()), int(ids_KTL.max())
        self.top_id = max(self.top_id, high)
        if np.iinfo(ids_KTL.dtype).max < experts - 1:
            words = f"{reading.title}: {ids_KTL.dtype} on the wire for {experts} experts"
            self.wrapped.add(reading.num_routes, reading.num_routes, lambda: words)
        elif low >= 0 and high < experts:
            for tally in (self.wrapped, self.above, self.wild):
                tally.total += reading.num_routes
        else:
            self._blame(reading)

    def _look_at_padding(self, reading: Reading) -> None:
        """Padding rows are dispatched as they stand, so their ids must exist too; -1 leaves them to the router."""
        padding = reading.padding_TLK
        stray_TL = ((padding < -1) | (padding >= self.model.experts)).any(axis=2)
        count = int(stray_TL.sum())
        self.wild.add(count, count, lambda: f"{reading.title}, padding row {int(np.argwhere(stray_TL)[0][0])}")

    def _blame(self, reading: Reading) -> None:
        """Give each route with a stray id to one cause."""
        ids_KTL, experts = reading.ids_KTL.astype(np.int64), self.model.experts
        routed_TL = reading.routed_TL
        wraps_KTL = (ids_KTL < 0) & (ids_KTL + _INT8_WRAP >= 128) & (ids_KTL + _INT8_WRAP < experts)
        above_KTL = (ids_KTL >= experts) & (ids_KTL < 2 * experts)
        wild_KTL = ((ids_KTL < 0) & ~wraps_KTL) | (ids_KTL >= 2 * experts)
        for tally, bad_KTL in ((self.wrapped, wraps_KTL), (self.wild, wild_KTL), (self.above, above_KTL)):
            bad_TL = bad_KTL.any(axis=0) & routed_TL
            self._count(tally, bad_TL, reading)
            # The first cause keeps the route: none is counted twice.
            routed_TL &= ~bad_TL
        hit = np.flatnonzero(bad_TL.any(axis=0)).tolist()
        self.above_layers.update(reading.numbers_L[i] for i in hit)

    def _count(self, tally: Tally, bad_TL: np.ndarray, reading: Reading) -> None:
        tally.add(int(bad_TL.sum()), bad_TL.size, lambda: reading.place(bad_TL))

    @property
    def _is_physical(self) -> bool:
        wide = 2 * len(self.above_layers) > len(self.layers)
        return wide and self.above.count >= max(_PHYSICAL_MIN, _PHYSICAL_SHARE * self.above.total)

    @property
    def _is_folded(self) -> bool:
        many = self.num_ids >= _FOLD_IDS_PER_EXPERT * self.model.experts
        return self.model.experts > _INT8_WRAP and self.top_id < _INT8_WRAP and many

    def findings(self) -> tuple[Finding, ...]:
        experts = self.model.experts
        stray, physical, wrapped = self.wild, Tally(total=self.above.total), self.wrapped
        if self._is_physical:
            physical = self.above
        else:
            place = self.wild.first_place or self.above.first_place
            stray = Tally(self.wild.count + self.above.count, self.wild.total, place)
        if self._is_folded and not wrapped.count:
            words = f"{self.first_title}: no id above {self.top_id} in {self.num_ids} ids of {experts} experts"
            wrapped = Tally(wrapped.total, wrapped.total, words)
        limits = f"ids up to {self.top_id}, experts 0..{experts - 1}"
        redundant = f"ids up to {self.top_id}: {experts} experts and {self.top_id + 1 - experts} more"
        return (
            judge("id-range", stray, unit=self.unit, advice=self.advice_range, detail=limits),
            judge("dtype-overflow", wrapped, unit=self.unit, advice=self.advice_overflow),
            judge(
                "physical-ids",
                physical,
                unit=self.unit,
                advice=self.advice_physical,
                detail=redundant if physical.count else "",
            ),
        )
