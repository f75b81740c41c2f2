"""The pool of ranks of this room."""

from collections.abc import Iterator

import pytest

from tests.megatron.pool import MegatronPool


@pytest.fixture(scope="session")
def megatron_pool() -> Iterator[MegatronPool]:
    """Four ranks with Megatron-Core loaded, started with the first call."""
    workers = MegatronPool()
    yield workers
    workers.close()
