"""Which of our files a path is: what an `.npz` archive says of itself, whatever its name.

Knows the field `format`. Does not know what the files hold: their own modules do.
"""

from pathlib import Path

import numpy as np

from equipoise.core import RoutesError, plan_file
from equipoise.core import loads as loads_file
from equipoise.loads import counts_file

LOADS, COUNTS, PLAN = loads_file.FORMAT, counts_file.FORMAT, plan_file.FORMAT
_TAKERS = {
    COUNTS: ("histograms", "equipoise loads, analyze and simulate take them"),
    LOADS: ("loads", "equipoise plan, analyze and simulate take them"),
    PLAN: ("a plan", "Plan.load reads it"),
}


def npz_kind(path: Path) -> str:
    """What a file of ours says it is; empty for anything else, whose reader then says what is wrong."""
    if not path.is_file():
        return ""
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            return ""
        with file:
            return str(file["format"]) if "format" in file.files else ""
    except (*loads_file.NPZ_ERRORS, OSError, ValueError, EOFError, KeyError, RuntimeError):
        return ""


def refuse_counted(path: Path) -> None:
    """Raise where routes are wanted and the file is one that was made of them."""
    if found := _TAKERS.get(npz_kind(path)):
        what, who = found
        raise RoutesError(f"{path} holds {what}, not routes; {who}")
