"""What torchrun says about this process; the one place where the room reads the environment.

    RANK, WORLD_SIZE                 this rank, and how many there are
    LOCAL_RANK, LOCAL_WORLD_SIZE     the same on this machine
    MASTER_ADDR, MASTER_PORT         where ranks meet; read by torch itself

Knows names of variables. Does not know processes.
"""

import os
from typing import NamedTuple


class Torchrun(NamedTuple):
    """This process's place among those that torchrun started."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def find_torchrun() -> Torchrun | None:
    """Return the place that torchrun gave this process; None where it was not started by torchrun."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_ranks = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", ranks)
    return Torchrun(rank, ranks, int(local_rank), int(local_ranks))
