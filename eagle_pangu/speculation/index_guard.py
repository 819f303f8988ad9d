"""The index guard: a dispatch mode that refuses a negative or out-of-range index in any indexing operator.

On a CPU `x[tensor]`, `index_put_`, `take` and `take_along_dim` wrap a negative index silently; an accelerator may read
or write foreign memory instead. Under the guard every operator that takes index *values* in a tensor is checked before
it runs, whoever calls it, model code of transformers included. Mode `reference` runs under it, and so do the tests.

What it deliberately does not look at: Python integers (`x[-1]`, slices; they are the host's and resolved there),
boolean masks, class labels of loss functions, tensors without values (`meta`). It knows nothing of trees or caches.

torch keeps modes per thread: enter the guard on the thread that does the model's work. Each check reads the smallest
and the largest index, which makes an accelerator wait; the guard is for debugging and proof, not for serving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class IllegalIndexError(IndexError):
    """An index tensor holds a value outside of [0, size).

    Attributes:
        operator: Name of the operator, such as ``aten.gather.default``.
        index: The first value at fault.
        size: Entries that the operator may address.
    """

    def __init__(self, operator: str, index: int, size: int) -> None:
        self.operator = operator
        self.index = index
        self.size = size
        super().__init__(f"{operator}: expected an index in [0, {size}), got {index}")


class _Use(NamedTuple):
    """One index tensor of a call, and how many entries it may address."""

    values: torch.Tensor
    size: int


def _along_dimension(table: torch.Tensor, dimension: int, index: torch.Tensor, *_: object) -> Iterator[_Use]:
    """gather, scatter, index_select and their kin: (self, dim, index, ...)."""
    yield _Use(index, table.size(dimension) if table.dim() else 1)


def _flat(table: torch.Tensor, index: torch.Tensor, *_: object) -> Iterator[_Use]:
    """take, put: (self, index, ...) over the flattened tensor."""
    yield _Use(index, table.numel())


def _rows(table: torch.Tensor, index: torch.Tensor, *_: object) -> Iterator[_Use]:
    """Embeddings: (weight, indices, ...)."""
    yield _Use(index, table.size(0))


def _advanced(table: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: object) -> Iterator[_Use]:
    """x[...] and its assignment: (self, indices, ...), one entry a dimension, None where the dimension stays whole."""
    dimension = 0
    for index in indices:
        if index is not None and not _is_mask(index):
            yield _Use(index, table.size(dimension))
        dimension += index.dim() if index is not None and _is_mask(index) else 1  # a mask spans all that it has


INDEXING: dict[Any, Callable[..., Iterator[_Use]]] = {
    **dict.fromkeys(
        (
            *(_aten.index_select, _aten.gather, _aten.index_copy, _aten.index_copy_, _aten.index_add, _aten.index_add_),
            *(_aten.index_fill, _aten.index_fill_, _aten.index_reduce, _aten.index_reduce_),
            *(_aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_),
            *(_aten.scatter_reduce, _aten.scatter_reduce_),
        ),
        _along_dimension,
    ),
    **dict.fromkeys((_aten.take, _aten.put, _aten.put_), _flat),
    **dict.fromkeys(
        (_aten.embedding, _aten.embedding_renorm_, _aten._embedding_bag, _aten._embedding_bag_forward_only), _rows
    ),
    **dict.fromkeys(
        (
            *(_aten.index, _aten._unsafe_index, _aten.index_put, _aten.index_put_),
            *(_aten._unsafe_index_put, _aten._index_put_impl_),
        ),
        _advanced,
    ),
}
"""The operators that read index values -> how these are found among the positional arguments."""


class IndexGuard(TorchDispatchMode):
    """Context manager; inside it a bad index raises `IllegalIndexError` before the operator runs.

    Attributes:
        checked: Operator -> checked index tensors, over the guard's life; a test reads it to see that the guard worked.

    Raises:
        IllegalIndexError: names the operator, the first value at fault and the legal size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checked: Counter[str] = Counter()
        self._wraps = _WrapGuard(self)

    def __enter__(self) -> IndexGuard:
        self._wraps.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._wraps.__exit__(*error)

    def check(self, operator: str, index: torch.Tensor, size: int) -> None:
        """Refuse a value of `index` outside of [0, size).

        Raises:
            IllegalIndexError: as above.
        """
        self.checked[operator] += 1
        if index.numel() == 0 or index.is_meta:
            return
        smallest, largest = (int(value) for value in torch.aminmax(index))
        if smallest < 0 or largest >= size:
            raise IllegalIndexError(operator, smallest if smallest < 0 else largest, size)

    def check_call(self, func: Any, args: tuple[Any, ...]) -> None:
        """Check what one of the operators of `INDEXING` is called with.

        Raises:
            IllegalIndexError: as above.
        """
        for use in INDEXING[func.overloadpacket](*args):
            self.check(str(func), use.values, use.size)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check, then run; called by torch for every operator."""
        kwargs = kwargs or {}
        if func.overloadpacket in INDEXING:
            self.check_call(func, args)
        elif _is_composite(func):
            # In inference mode torch hands composite operators over whole (one_hot, repeat_interleave, ...): what they
            # are made of would run below the guard, so take them apart under it. (decompose loses its way when function
            # modes are on.)
            with torch._C.DisableTorchFunction(), self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


class _WrapGuard(TorchFunctionMode):
    """What wraps a negative index above the dispatcher: `take_along_dim` (by remainder) and `x[zero-dim tensor]`."""

    def __init__(self, guard: IndexGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.take_along_dim, torch.Tensor.take_along_dim):  # noqa: TID251 -- named to be watched
            self._check_take_along(*args, **kwargs)
        elif func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            self._check_item(args[0], args[1])
        return func(*args, **kwargs)

    def _check_take_along(
        self,
        input: torch.Tensor,  # noqa: A002 -- torch's own name, callers may use it
        indices: torch.Tensor,
        dim: int | None = None,
        **_: object,
    ) -> None:
        size = input.numel() if dim is None else input.size(dim)
        self._guard.check("aten.take_along_dim.default", indices, size)

    def _check_item(self, table: torch.Tensor, key: object) -> None:
        for index in key if isinstance(key, tuple) else (key,):
            if isinstance(index, torch.Tensor) and index.dim() == 0 and not _is_mask(index):
                # torch reads it as a Python integer, which may not exceed its dimension but may be negative.
                self._guard.check("aten.select.int", index, max(table.shape, default=1))


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)
