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
