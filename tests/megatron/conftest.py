"""The pool of ranks of this room."""

from collections.abc import Iterator

import pytest

from tests.megatron.pool import MegatronPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run this room in one process: three pools of ranks with Megatron-Core would take the machine's memory."""
    for item in items:
        if "megatron_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("megatron"))


@pytest.fixture(scope="session")
def megatron_pool() -> Iterator[MegatronPool]:
    """Four ranks with Megatron-Core loaded, started with the first call."""
    workers = MegatronPool()
    yield workers
    workers.close()
