"""All checks in their order. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle_pangu.doctor.ascend_host import check_ascend_host
from eagle_pangu.doctor.results import Result
from eagle_pangu.doctor.torch_import import check_torch_import
from eagle_pangu.doctor.versions import check_versions


def examine(devices: Sequence[str], model: str) -> Iterator[Result]:
    """Results as they come.

    Args:
        devices: that must be there; none: whichever are.
        model: pulled model or transformers directory, whose sizes are used.
    """
    yield from check_versions()
    yield from check_ascend_host()
    imported = check_torch_import()
    yield imported
    if imported.status != "ok":
        yield Result("devices", "not checked", "every check of a device needs torch")
        return
    from eagle_pangu.doctor.on_device import check_devices

    yield from check_devices(devices, model)
