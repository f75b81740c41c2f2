"""Ranks of packages that lie beside the installed ones."""

import pytest


@pytest.fixture(scope="module")
def beside(request):
    """Start the ranks of packages that lie beside the installed ones: `beside(TitanPool)`."""
    started = []

    def start(pool):
        if not pool.folder.is_dir():
            needed = f"{pool.folder.name} is not there: make out/{pool.folder.name}"
            pytest.fail(needed) if request.config.getoption("--minimum-tests") else pytest.skip(needed)
        started.append(pool())
        return started[-1]

    yield start
    for workers in started:
        workers.close()
