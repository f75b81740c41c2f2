"""Ranks with torchtitan, which lies beside the installed packages, forked from one import of it."""

import os
from pathlib import Path

from tests.megatron.pool import MegatronPool


class TitanPool(MegatronPool):
    """Four ranks whose world is the pool, as torchtitan's meshes expect."""

    # First what a CPU needs to import torchtitan at all.
    loaded = ("tests.adapters.titan_model", "tests.adapters.titan_work")
    folder = Path(__file__).parents[2] / "out" / f"torchtitan-{os.environ.get('TORCHTITAN', '0.3.0')}"
    """Where `make test` puts it."""
