"""Figures as people read them: shares, seconds, bytes, counts. ASCII, one way of writing each, for page and terminal.

Invariants (asserted by the tests):
1. What is not zero is never written as zero, and nothing is written as minus zero.
2. Three digits that matter, never more.
"""

import math

from equipoise.sim.summary import plural as plural  # one way of writing it, for the terminal's summary, too

_COUNT_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def percent(share: float) -> str:
    """0.145 as '14.5 %'."""
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    if abs(share) < 0.0005:
        return "under 0.1 %" if share > 0 else "above -0.1 %"
    return "over 99.9 %" if 0.9995 <= share < 1 else f"{share * 100:.1f} %"


def lost(share: float) -> str:
    """What uneven ranks cost; where `balanced` takes as long as now or longer, that is nothing."""
    if share <= 0:
        return "Balanced ranks would not be faster here"
    return f"{percent(share)} of the time in expert layers is lost to uneven experts"


def gained(saved: float, *, lost: float) -> str:
    """What a plan does about what is lost: gives it back, or more, or saves where nothing is lost to uneven ranks.

    A plan that takes longer than now gives nothing back, and is never said to.
    """
    if saved < 0:
        return f"take {percent(-saved)} more time"
    if lost <= 0:
        return f"save {percent(saved)}"
    is_more = saved > lost and percent(saved) != percent(lost)
    return f"recover {'that and more, ' if is_more else ''}{percent(saved)}"


def beyond_balanced(name: str, *, sends_less: bool, computes_less: bool) -> str:
    """Why what `name` recovers can be more than is lost: by the parts that take it less time than balanced."""
    parts, reasons = [], []
    if sends_less:
        parts.append("its all-to-all takes")
        reasons.append("rows stay on their own rank and node where they can")
    if computes_less:
        parts.append("its experts take")
        reasons.append("fewer slots of a rank have rows, and each of them costs time")
    if not parts:
        return f"{name} takes less time than balanced."
    why, how = " and ".join(parts), "; ".join(reasons)
    return f"{name} takes less time than balanced because {why} less than with an even spread: {how}."


def seconds(value: float) -> str:
    """Seconds in the unit that suits them: '3.64 s', '12.3 ms', '412 us'."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(value) * factor >= 0.9995 or value == 0:
            return f"{digits(value * factor)} {unit}"
    return f"{digits(value * 1e9)} ns"


def num_bytes(value: float) -> str:
    """Bytes in powers of 1024: '18.0 MiB'."""
    for size, unit in _BYTE_UNITS:
        if abs(value) >= size:
            return f"{digits(value / size)} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """A count: '512', '1.63 G'."""
    for size, unit in _COUNT_UNITS:
        # Four digits are read as easily as three and a unit.
        if abs(value) >= max(size, 10_000):
            return f"{digits(value / size)} {unit}"
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    """A ratio near one: '1.44'."""
    return f"{value:.2f}"


def digits(value: float) -> str:
    """Three digits that matter: '0.00123', '1.23', '123', '1,230'."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
