"""Fixtures that every room may use."""

from tests.browser import browser
from tests.pool import nccl_pool, pool

__all__ = ["browser", "nccl_pool", "pool"]
