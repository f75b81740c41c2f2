"""Fixtures that every room may use."""

from tests.pool import nccl_pool, pool

__all__ = ["nccl_pool", "pool"]
