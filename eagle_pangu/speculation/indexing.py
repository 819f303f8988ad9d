"""The only place that indexes tensors by computed indices.

An accelerator does not check an index: a negative or out-of-range one reads or writes foreign memory, silently (Ascend:
gather and scatter operators check no bounds). So every index tensor is int64, and is made from host values that were
checked against the table's size or by an operator whose result is a legal index (arg-max); and the operators that read
one are called here and nowhere else (`tests/test_indices.py`). Host arrays are NumPy's to index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def index_tensor(
    values: Sequence[int] | NDArray[np.int64], size: int, device: torch.device, *, field: str = "index"
) -> torch.Tensor:
    """Host values as an index, [n] or as the array is shaped, int64.

    Raises:
        IndexError: a value is outside of [0, size); names the field and the first such value.
    """
    array = np.ascontiguousarray(values, dtype=np.int64)
    wrong = (array < 0) | (array >= size)
    if wrong.any():
        raise IndexError(f"{field}: expected an index in [0, {size}), got {array[wrong].flat[0]}")
    return torch.from_numpy(array).to(device)


def select(table: torch.Tensor, dimension: int, index: torch.Tensor) -> torch.Tensor:
    """Entries of one dimension; `index` [n]."""
    return table.index_select(dimension, index)


def gather(table: torch.Tensor, dimension: int, index: torch.Tensor) -> torch.Tensor:
    """`torch.gather`: one entry of a dimension for each element of `index`."""
    return table.gather(dimension, index)


def copy_into(table: torch.Tensor, dimension: int, index: torch.Tensor, source: torch.Tensor) -> None:
    """Write `source` over entries of one dimension, in place; where `index` [n] repeats a value, any one is kept."""
    table.index_copy_(dimension, index, source)


def fill(table: torch.Tensor, dimension: int, index: torch.Tensor, value: float) -> None:
    """Write one value over entries of one dimension, in place; `index` [n]."""
    table.index_fill_(dimension, index, value)


def replaced(table: torch.Tensor, dimension: int, index: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with one value at the entry of a dimension that each element of `index` names: `torch.scatter`."""
    return table.scatter(dimension, index, value)


def marked(mask: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns, [found] each, where a [rows, columns] mask is true, by row and in a row by column.

    On the host: how many there are is no shape of the device's, and NumPy is several times as fast as torch there.
    """
    rows, columns = np.divmod(np.flatnonzero(mask.cpu().numpy()), mask.shape[1])
    return rows, columns
