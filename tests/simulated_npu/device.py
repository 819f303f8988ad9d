"""A device "npu" on a host without one: CPU tensors behind a name, stricter than the card where it may be.

torch lets a Python program claim the backend that torch_npu claims (PrivateUse1), once per process and for good: hence
a pytest process of its own. A tensor on the device is a subclass without storage that holds a CPU tensor; every
operator comes by one place, which checks it, runs it on the CPU and wraps what comes out.

It refuses what the card refuses, and what torch_npu would quietly copy to the host and back: operators over tensors of
two devices, index tensors of the host, kernels that only the host has, NumPy and addresses. Fresh memory holds NaN, or
an index past any table, so that nobody relies on zeros. It knows no model and no attention; the stand-in for the fused
operators lies beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_aten = torch.ops.aten
_HOST = torch.device("cpu")

COPIES = frozenset({_aten.copy_, _aten._to_copy, _aten._copy_from})
"""The operators that take tensors from one device to another."""

INDEXING = frozenset(
    {
        *(_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index, _aten._index_put_impl_, _aten.take),
        *(_aten.index_select, _aten.index_copy, _aten.index_copy_, _aten.index_add, _aten.index_add_, _aten.gather),
        *(_aten.index_fill, _aten.index_fill_, _aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.embedding),
    }
)
"""Where even a zero-dimensional tensor of the host is refused: an index is read by the card."""

HOST_KERNELS = ("mkldnn", "mkldnn_prepacked", "onednn", "quantized", "fbgemm")
"""Namespaces of kernels that only a CPU has."""

FRESH = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided})

operators_run: Counter[str] = Counter()
"""Operator -> calls on the device, since the process began: so that a test knows where something was computed."""


class NpuTensor(torch.Tensor):
    """A tensor on the simulated device; `on_host` holds its values."""

    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, on_host: torch.Tensor) -> NpuTensor:
        tensor: NpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            on_host.size(),
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device=torch.device("npu", 0),
            requires_grad=on_host.requires_grad,
        )
        tensor.on_host = on_host
        return tensor

    # What torch offers of Python functions is all made of operators, which are seen one by one.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def numpy(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("can't convert npu:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def data_ptr(self) -> NoReturn:
        raise RuntimeError("simulated npu: a tensor has no address on the host")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, key: Any) -> torch.Tensor:
        return super().__getitem__(_host_key(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_host_key(key), value)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"npu:0 {self.on_host!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> NpuTensor:
        copy = NpuTensor(self.on_host.clone())
        memo[id(self)] = copy
        return copy


def _host_key(key: Any) -> Any:
    """The key of x[key], which holds no list or array: torch would copy it to the device, unchecked, in every call."""
    for part in key if isinstance(key, tuple) else (key,):
        if not (part is None or part is Ellipsis or isinstance(part, (int, slice, torch.Tensor))):
            kind = type(part).__name__
            raise TypeError(f"simulated npu: expected integers, slices and tensors as an index, got {kind}")
    return key


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operator: taken apart where it is made of others, else checked, run on the host, its results wrapped."""
    if _is_composite(func):
        return func.decompose(*args, **kwargs)
    given: list[torch.Tensor] = []

    def unwrap(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            given.append(value)
        return value.on_host if isinstance(value, NpuTensor) else value

    args = _mapped(unwrap, args)
    kwargs = {name: _mapped(unwrap, value) for name, value in kwargs.items()}
    _check(func, given)
    operators_run[str(func.overloadpacket)] += 1
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type == "cpu"
    if device is not None:
        kwargs["device"] = _HOST
    result = func(*args, **kwargs)
    if to_host:
        return result
    if func.overloadpacket in FRESH:
        _spoil(result)
    return _mapped(_wrapped, result)


def _wrapped(value: Any) -> Any:
    """As a tensor of the device. (Of what an operator does in place torch keeps the tensor that it was given.)"""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_inference() == torch.is_inference_mode_enabled():
        return NpuTensor(value)
    with torch.inference_mode(value.is_inference()):  # a view of a tensor from before the mode is none of the mode
        return NpuTensor(value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """What a value becomes, or all in a list or tuple (of which torch's results of several tensors are a kind)."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, each) for each in value])
    return function(value)


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _check(func: Any, given: list[torch.Tensor]) -> None:
    if func.overloadpacket in COPIES:
        return
    npu = [tensor for tensor in given if isinstance(tensor, NpuTensor)]
    if npu and func.namespace in HOST_KERNELS:
        raise NotImplementedError(f"simulated npu: {func} is a kernel of the host")
    # As everywhere in torch, a number in a zero-dimensional tensor of the host goes with any device.
    least = 0 if func.overloadpacket in INDEXING else 1
    if npu and any(tensor.dim() >= least for tensor in given if not isinstance(tensor, NpuTensor)):
        devices = [str(tensor.device) for tensor in given]
        raise RuntimeError(f"simulated npu: {func}: expected all tensors to be on the same device, got {devices}")


def _spoil(fresh: torch.Tensor) -> None:
    if fresh.is_floating_point():
        fresh.fill_(float("nan"))
    elif fresh.dtype != torch.bool:
        fresh.fill_(torch.iinfo(fresh.dtype).max)


def _npu_module() -> ModuleType:
    """What torch_npu puts at ``torch.npu``, as far as torch, transformers and the project ask for it."""
    module: Any = ModuleType("torch.npu")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: None
    module.get_device_name = lambda device=None: "Ascend910B (simulated)"
    module.mem_get_info = lambda device=None: (48 * 2**30, 64 * 2**30)
    module.is_bf16_supported = lambda: True
    module.manual_seed_all = lambda seed: None
    module._is_in_bad_fork = lambda: False
    module.matmul = SimpleNamespace(allow_hf32=False)
    module.conv = SimpleNamespace(allow_hf32=True)
    module.config = SimpleNamespace(allow_internal_format=True)
    return module


def register() -> None:
    """Make "npu" a device of this process, until its end.

    Raises:
        RuntimeError: it is one already.
    """
    _setup_privateuseone_for_python_backend("npu", backend_module=_npu_module())
    _LIBRARY.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    # torch makes a tensor from a list with the dispatcher off, where a device in Python cannot follow. Of the functions
    # that `torch.device` as a context applies to, torch notes which they are at the first use: let it be the true ones.
    _device_constructors()
    torch.tensor = _by_way_of_the_host(torch.tensor)
    torch.as_tensor = _by_way_of_the_host(torch.as_tensor)


_LIBRARY = torch.library.Library("_", "IMPL")


def _by_way_of_the_host(make: Any) -> Any:
    def made(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if device is None and isinstance(data, NpuTensor):
            device = data.device
        if device is None or torch.device(device).type != "npu":
            return make(data, device=device, **options)
        return make(data.on_host if isinstance(data, NpuTensor) else data, **options).to(device)

    return made
