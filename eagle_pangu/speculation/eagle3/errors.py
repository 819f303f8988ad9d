"""What goes wrong with a stored head."""

from __future__ import annotations


class HeadError(Exception):
    """A head that cannot be read or written.

    The text names the directory, the tensor or the configuration field at fault, what was expected and what was found.
    """
