"""A profile against the device again: a sample of its figures is measured anew and compared.

Knows profile files' content. Does not know how a figure is measured.

The sample: of every expert table one number of slots and two numbers of rows, forward and update; all rates. Fixed
nanoseconds and slowdowns are small and scatter, so they are shown and not judged. A figure that is off is measured once
more, and the nearer of the two counts: a single cell scatters where clocks change, and what has really changed is off
again.

Invariants (asserted by the tests):
1. A profile compared with itself deviates by nothing; a figure twice as large deviates by +100 %.
2. Only judged figures decide whether a profile holds.
3. Of two comparisons the nearer figure is kept, each for itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from equipoise.calibrate.grid import Grid
from equipoise.core import TopologyError
from equipoise.cost.profile import SECTIONS

JUDGED = ("bytes_per_s", "flops_per_s")
"""Ends of the names of figures that are judged, beside the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One figure, as filed and as measured now."""

    name: str
    filed: float
    measured: float
    is_judged: bool

    @property
    def share(self) -> float:
        """How far the new figure is from the filed one; 0.1 is ten percent more."""
        return self.measured / self.filed - 1 if self.filed else 0.0

    def holds(self, limit: float) -> bool:
        """Whether the figure is within the limit, or is not judged."""
        return not self.is_judged or abs(self.share) <= limit


def sample_of(profile: Mapping[str, Any], grid: Grid) -> Grid:
    """A small grid whose cells are all in the profile's tables."""
    tables = profile["compute"]
    if profile["kind"] == "derived":
        raise TopologyError(
            f"the profile of {profile['device']} is {profile['kind']}; only a measured one can be measured again"
        )
    slots, rows = (_common(tables, key) for key in ("slots", "rows"))
    shapes = tuple((table["hidden"], table["expert_width"]) for table in tables)
    chosen = sorted({rows[len(rows) // 2], rows[-2 if len(rows) > 1 else -1]})
    return replace(grid, shapes=shapes, slots=(slots[len(slots) // 2],), rows=tuple(chosen))


def _common(tables: list[Mapping[str, Any]], key: str) -> list[int]:
    """Entries of an axis that all tables have, ascending."""
    shared = set(tables[0][key]).intersection(*(table[key] for table in tables))
    if not shared:
        raise TopologyError(f"the profile's tables have no common {key}; measure it again with equipoise calibrate")
    return sorted(shared)


def compare(filed: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[Deviation]:
    """Every figure of `fresh` beside the same of `filed`."""
    made = [one for old, new in _same_shapes(filed, fresh) for one in _compare_tables(old, new)]
    for section in SECTIONS:
        for key, value in fresh[section].items():
            # What is assumed is not measured again.
            if key != "source" and section != "all_to_all":
                name, is_judged = f"{section}.{key}", key.endswith(JUDGED)
                made.append(Deviation(name=name, filed=filed[section][key], measured=value, is_judged=is_judged))
    return made


def nearer(first: Sequence[Deviation], second: Sequence[Deviation]) -> list[Deviation]:
    """Of the same figures compared twice, each time the one that is less far off."""
    return [min(pair, key=lambda one: abs(one.share)) for pair in zip(first, second, strict=True)]


def _same_shapes(filed: Mapping[str, Any], fresh: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    by_shape = {(table["hidden"], table["expert_width"]): table for table in filed["compute"]}
    return ((by_shape[table["hidden"], table["expert_width"]], table) for table in fresh["compute"])


def _compare_tables(filed: Mapping[str, Any], fresh: Mapping[str, Any]) -> Iterator[Deviation]:
    for s, slots in enumerate(fresh["slots"]):
        for x, rows in enumerate(fresh["rows"]):
            at = filed["slots"].index(slots), filed["rows"].index(rows)
            for key in ("forward_ns", "update_ns"):
                name = f"{fresh['hidden']} x {fresh['expert_width']}, {slots} slots, {rows} rows, {key}"
                old, new = filed[key][at[0]][at[1]], fresh[key][s][x]
                yield Deviation(name=name, filed=old, measured=new, is_judged=True)
