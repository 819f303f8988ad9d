"""The operators that read an index tensor, on the device against the CPU: an accelerator checks no index."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from eagle_pangu.doctor.results import CheckFailedError
from eagle_pangu.speculation import indexing
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.devices.base import dtype_name

_ROWS, _WIDTH = 67, 24
_PLACES = (0, 66, 3, 3, 41, 0, 65)  # the ends, and repeated ones
_OWN_PLACES = (66, 0, 13, 40)  # of what is written, each once


def _select(table: torch.Tensor) -> torch.Tensor:
    return indexing.select(table, 0, _index(_PLACES, table))


def _select_columns(table: torch.Tensor) -> torch.Tensor:
    return indexing.select(table, 1, _index((23, 0, 7, 7), table, _WIDTH))


def _gather(table: torch.Tensor) -> torch.Tensor:
    return indexing.gather(table, 0, _index(_PLACES, table)[:, None].expand(-1, _WIDTH).contiguous())


def _copy_into(table: torch.Tensor) -> torch.Tensor:
    written = table.clone()
    indexing.copy_into(written, 0, _index(_OWN_PLACES, table), table[1 : 1 + len(_OWN_PLACES)] * 2)
    return written


def _fill(table: torch.Tensor) -> torch.Tensor:
    written = table.clone()
    indexing.fill(written, 0, _index(_OWN_PLACES, table), 7.0)
    return written


def _replaced(table: torch.Tensor) -> torch.Tensor:
    return indexing.replaced(table, 0, _index(_OWN_PLACES, table)[:, None].expand(-1, _WIDTH).contiguous(), -3.0)


def _embedding(table: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = nn.Embedding.from_pretrained(table)(_index(_PLACES, table))  # type: ignore[no-untyped-call]
    return rows


def _index(places: tuple[int, ...], table: torch.Tensor, size: int = _ROWS) -> torch.Tensor:
    return indexing.index_tensor(places, size, table.device)


OPERATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "index_select": _select,
    "index_select by columns": _select_columns,
    "gather": _gather,
    "index_copy_": _copy_into,
    "index_fill_": _fill,
    "scatter": _replaced,
    "embedding": _embedding,
}


def check_indices(device: Device) -> str:
    """Every operator in every dtype that a model may have; they move values, so the bits must be equal.

    Raises:
        CheckFailedError: names those that differ.
    """
    generator = torch.Generator().manual_seed(0)
    wrong = []
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes:
        table = torch.randn(_ROWS, _WIDTH, generator=generator).to(dtype)
        for name, operator in OPERATORS.items():
            if not torch.equal(operator(table.to(device.torch_device)).cpu(), operator(table)):
                wrong.append(f"{name} in {dtype_name(dtype)}")
    if wrong:
        raise CheckFailedError(f"not what the CPU gives: {', '.join(wrong)}; do not serve from this device")
    return f"{', '.join(OPERATORS)} give the CPU's bits in {len(dtypes)} dtypes"
