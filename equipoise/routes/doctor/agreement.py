"""The doctor's comparison of two recordings of the same tokens, such as an engine's and a trainer's.

    pairing      each sample has a partner of the same tokens, layers and top-k, in the same order
    agreement    share of routes with the same set of ids, layer by layer
    token-order  no shift by one row makes the two agree better

What to expect: a replayed recording agrees fully; an engine and a trainer that each route for themselves agree on
about 0.9 of the routes (R3, arXiv 2510.11370: about 10 % of choices differ per router). Misaligned rows agree by
chance only.

1. Put the turns of a sample on one token axis; later turns replace earlier ones.
2. Sort the ids of each route: engines and trainers list the same experts in different orders.
3. Compare routes that both sides have, in layers of the same number; then again with one side moved by one row.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from equipoise.routes.doctor.reading import CheckCounts, Finding, Reading, judge

MIN_AGREEMENT = 0.8
"""A layer below this is a finding: well under the 0.9 that two correct but independent recordings reach."""
_NEEDS = "a second recording"
_SHIFTS = (0, 1, -1)
_SHIFT_GAIN = 0.1
"""How much more of the routes must agree with a shift than without, so that it is not chance."""


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One sample on its token axis."""

    token_T: np.ndarray
    """[T] the tokens that have a row, ascending."""
    ids_TLK: np.ndarray
    """[T, L, K] ids, sorted within each route."""
    known_TL: np.ndarray
    numbers_L: tuple[int, ...]


class Agreement:
    """Compares samples of two dumps, pair by pair. Keeps counts per layer and shift only."""

    def __init__(self, min_agreement: float = MIN_AGREEMENT) -> None:
        self.min_agreement = min_agreement
        self.pairing = CheckCounts()
        self.same: dict[int, Counter[int]] = {shift: Counter() for shift in _SHIFTS}
        self.seen: dict[int, Counter[int]] = {shift: Counter() for shift in _SHIFTS}
        self.places: dict[int, str] = {}

    def compare(self, first: list[Reading], second: list[Reading] | None) -> None:
        """Compare the turns of one sample of the first dump with those of its partner."""
        title = first[0].title
        if second is None:
            self.pairing.add(1, 1, lambda: f"{title} has no partner in the second recording")
            return
        sides, partner = (_assemble(first), _assemble(second)), second[0].title
        wrong = _mismatch(first[-1], second[-1], sides)
        self.pairing.add(int(bool(wrong)), 1, lambda: f"{title} and {partner} {wrong}")
        if not wrong:
            self._count(title, *sides)

    def add_unpaired(self, second: list[Reading]) -> None:
        """Count a sample that only the second dump has."""
        title = second[0].title
        self.pairing.add(1, 1, lambda: f"{title} of the second recording has no partner in the first")

    def _count(self, title: str, first: _Side, second: _Side) -> None:
        common = [n for n in first.numbers_L if n in set(second.numbers_L)]
        a, b = _only(first, common), _only(second, common)
        for shift in _SHIFTS:
            token_T, both_TL, same_TL = _compare(a, b, shift)
            for i, number in enumerate(common):
                self.seen[shift][number] += int(both_TL[:, i].sum())
                self.same[shift][number] += int(same_TL[:, i].sum())
                if shift == 0 and number not in self.places and not same_TL[both_TL[:, i], i].all():
                    token = int(token_T[both_TL[:, i] & ~same_TL[:, i]][0])
                    self.places[number] = f"{title}, token {token}, layer {number}"

    def rate(self, shift: int) -> float:
        """Share of routes that agree when the second recording is moved by `shift` rows."""
        seen = sum(self.seen[shift].values())
        return sum(self.same[shift].values()) / seen if seen else 0.0

    def findings(self) -> tuple[Finding, ...]:
        """Report what was found."""
        advice = "compare recordings of the same samples in the same order; join them by sample id first"
        pairing = judge("pairing", self.pairing, unit="samples", advice=advice, needs=_NEEDS)
        if not sum(self.seen[0].values()):
            names = ("agreement", "token-order")
            return (pairing, *(judge(name, CheckCounts(), unit="routes", advice="", needs=_NEEDS) for name in names))
        return (pairing, self._agreement(), self._token_order())

    def _agreement(self) -> Finding:
        seen, total = self.seen[0], sum(self.seen[0].values())
        rates = {n: self.same[0][n] / seen[n] for n in sorted(seen) if seen[n]}
        low = [n for n, rate in rates.items() if rate < self.min_agreement]
        worst = min(rates, key=lambda n: rates[n])
        advice = (
            f"{len(low)} layers agree on less than {self.min_agreement:g}; about 0.9 is usual between an engine and a "
            "trainer without replay, 1.0 with it: look for shifted rows, a wrong layer map, or other weights"
        )
        return Finding(
            check="agreement",
            verdict="finding" if low else "good",
            count=total - sum(self.same[0].values()),
            total=total,
            first_place=self.places[low[0]] if low else "",
            detail=f"mean {self.rate(0):.3f}, worst layer {worst} {rates[worst]:.3f}",
            advice=advice if low else "",
            rate_L=tuple(rates.values()),
        )

    def _token_order(self) -> Finding:
        shift = max(_SHIFTS, key=self.rate)
        moved = shift != 0 and self.rate(shift) > self.rate(0) + _SHIFT_GAIN
        place = f"the second recording is one row {'later' if shift > 0 else 'earlier'}"
        advice = (
            "one side is off by one row: the first forwarded token is row 0 and the last token has none; "
            "look where a row is dropped or put in front"
        )
        return Finding(
            check="token-order",
            verdict="finding" if moved else "good",
            count=sum(self.same[shift].values()) if moved else 0,
            total=sum(self.seen[shift if moved else 0].values()),
            first_place=place if moved else "",
            detail=f"agreement {self.rate(0):.3f}, moved by one row {self.rate(1):.3f} / {self.rate(-1):.3f}",
            advice=advice if moved else "",
        )


def _mismatch(first: Reading, second: Reading, sides: tuple[_Side, _Side]) -> str:
    """Say why two samples cannot be compared; empty if they can. A shorter sample is cut, not different."""
    columns = [side.ids_TLK.shape[2] for side in sides]
    if columns[0] != columns[1]:
        return f"have {columns[0]} and {columns[1]} ids per route"
    if not set(sides[0].numbers_L) & set(sides[1].numbers_L):
        return "have no layer in common"
    a, b = first.recording.tokens, second.recording.tokens
    if a is None or b is None:
        return ""
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return f"differ at token {int(differ[0])}" if len(differ) else ""


def _assemble(turns: list[Reading]) -> _Side:
    """Put the turns of one sample on its token axis; where they overlap, the later one counts."""
    numbers, columns = turns[0].numbers_L, len(turns[0].ids_KTL)
    fitting = [t for t in reversed(turns) if t.numbers_L == numbers and len(t.ids_KTL) == columns]
    tokens = np.concatenate([t.recording.start + np.arange(t.num_rows) for t in fitting])
    ids_TLK = np.concatenate([t.ids_KTL.transpose(1, 2, 0) for t in fitting])
    known_TL = np.concatenate([t.routed_TL for t in fitting])
    token_T, row_T = np.unique(tokens, return_index=True)
    return _Side(token_T, np.sort(ids_TLK[row_T], axis=2), known_TL[row_T], numbers)


def _only(side: _Side, numbers: list[int]) -> _Side:
    at = [side.numbers_L.index(n) for n in numbers]
    return _Side(side.token_T, side.ids_TLK[:, at], side.known_TL[:, at], tuple(numbers))


def _compare(first: _Side, second: _Side, shift: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare token t of the first side with token t + shift of the second.

    Returns:
        tokens with a row on both sides, whether both have a route there, whether it is the same
    """
    _, a, b = np.intersect1d(first.token_T + shift, second.token_T, assume_unique=True, return_indices=True)
    both_TL = first.known_TL[a] & second.known_TL[b]
    return first.token_T[a], both_TL, both_TL & (first.ids_TLK[a] == second.ids_TLK[b]).all(axis=2)
