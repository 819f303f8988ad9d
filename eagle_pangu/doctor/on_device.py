"""The checks that need torch, of one device after the other. Import it only where torch can be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec

import torch

from eagle_pangu.doctor import ascend_host
from eagle_pangu.doctor.indices import check_indices
from eagle_pangu.doctor.model_shape import ModelShape, read_shape
from eagle_pangu.doctor.products import check_products
from eagle_pangu.doctor.results import CheckFailedError, NotCheckedError, Result, run_check
from eagle_pangu.doctor.row_counts import check_row_counts
from eagle_pangu.evaluation.machine import installed
from eagle_pangu.speculation.checkpoints import CheckpointError
from eagle_pangu.speculation.devices import Device, get_device
from eagle_pangu.speculation.devices.base import AttentionError, dtype_name
from eagle_pangu.speculation.devices.comparison import compare_with_eager
from eagle_pangu.speculation.models import ModelError

OF_DEVICE = ("memory", "attention", "indices", "products", "row counts")
"""Checks of a device that is there."""

HINT = (
    "; on device npu an error may belong to an earlier operator: run again with ASCEND_LAUNCH_BLOCKING=1 and "
    "TORCH_NPU_FALLBACK_CPU_DISABLE=1"
)


def check_devices(names: Sequence[str], model: str) -> Iterator[Result]:
    """All checks of all devices.

    Args:
        names: of devices that must be there; none: of those that are, and npu in any case.
        model: whose sizes are used.
    """
    shapes: list[ModelShape] = []
    shape = run_check("model", partial(_read, model, shapes))
    yield shape
    for name in names or present_devices():
        found: list[Device] = []
        yield run_check(f"{name}: device", partial(_find, name, found, demanded=bool(names)))
        if found:
            yield from _check(found[0], shapes)
        else:
            yield from (Result(f"{name}: {check}", "not checked", f"no device {name}") for check in OF_DEVICE)


def present_devices() -> tuple[str, ...]:
    """Those that torch finds, and npu: whoever runs this wants to know of it."""
    return ("cpu", *(("cuda",) if torch.cuda.is_available() else ()), "npu")


def _read(model: str, into: list[ModelShape]) -> str:
    try:
        shape = read_shape(model)
    except (ModelError, CheckpointError) as error:
        raise CheckFailedError(str(error)) from error
    into.append(shape)
    return f"sizes of {shape.name}: {shape.heads} query and {shape.kv_heads} KV heads of {shape.head_dim}"


def _find(name: str, into: list[Device], *, demanded: bool) -> str:
    try:
        device = get_device(name)
    except (ValueError, RuntimeError) as error:
        no_package = installed("torch-npu") is None and find_spec("torch_npu") is None
        if name == "npu" and no_package and not ascend_host.has_device() and not demanded:
            raise NotCheckedError(f"{ascend_host.NO_DEVICE}, and torch_npu is not installed") from error
        raise CheckFailedError(str(error)) from error
    into.append(device)
    dtype = dtype_name(device.default_dtype())
    return f"{device.torch_device}, default dtype {dtype}"


def _check(device: Device, shapes: Sequence[ModelShape]) -> Iterator[Result]:
    def with_sizes(check: Callable[[Device, ModelShape], str]) -> str:
        if not shapes:
            raise NotCheckedError("no model to take sizes from")
        return check(device, shapes[0])

    checks = (
        partial(_memory, device),
        partial(with_sizes, _attention),
        partial(check_indices, device),
        partial(with_sizes, check_products),
        partial(with_sizes, check_row_counts),
    )
    for name, check in zip(OF_DEVICE, checks, strict=True):
        with torch.inference_mode():
            result = run_check(f"{device.name}: {name}", check)
        yield result._replace(text=result.text + HINT) if device.name == "npu" and result.status == "failed" else result


def _memory(device: Device) -> str:
    memory = device.memory()
    return f"{memory.total / 2**30:.1f} GiB in all, {memory.free / 2**30:.1f} GiB free"


def _attention(device: Device, shape: ModelShape) -> str:
    heads = shape.attention_heads(device.default_dtype())
    try:
        attention = device.attention("auto", heads)
        compare_with_eager(attention, heads, device.torch_device)
    except AttentionError as error:
        raise CheckFailedError(str(error)) from error
    if attention.fallback_reason:
        raise CheckFailedError(f"{attention.name} takes the place of fused attention: {attention.fallback_reason}")
    return f"{attention.name} agrees with eager attention on single rows, chains and trees"
