"""Engines run under the index watch."""

from tests.index_watch import index_watch

__all__ = ["index_watch"]
