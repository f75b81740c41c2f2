"""Fixtures that every room may use."""

from tests.pool import pool

__all__ = ["pool"]
