"""Teachers run under the index watch, their worker's thread included."""

from tests.index_watch import index_watch

__all__ = ["index_watch"]
