"""Tiny models need no threads; on a shared machine they only wait for each other."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """One thread for torch while a test of this room runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
