"""The index guard over every thread of the process, for tests: a fixture that the packages which run models switch on.

`IndexGuard` is a mode of one thread and sees every operator, which takes time. Here only the operators that index are
seen, wherever they are called: each has a kernel before those of the devices that checks its index and goes on. Two
things are watched: that the index is legal, and that the project indexes in `indexing` alone. A refusal raises, and
since a service may live on after one (a draft's failure costs speed only), the test fails for it as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from eagle_pangu.speculation import index_guard, indexing
from eagle_pangu.speculation.index_guard import INDEXING, IndexGuard

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / package}/" for package in ("eagle_pangu", "teacher_service", "draft_service", "orchestrator"))
PASSERS_ON = (__file__, index_guard.__file__, f"{ROOT}/tests/simulated_npu/device.py")
"""What calls operators on behalf of others."""
ELSEWHERE = ("/transformers/", "/torch/nn/modules/", "/torch/autograd/")
"""Where others index for us."""
PLACE = "BackendSelect"
"""The dispatch key just before the devices': behind autograd, and passed by what composite operators are made of."""


class IndexWatch:
    """What the operators that index are called with, while a test runs.

    Attributes:
        guard: its counts tell what has been checked.
        active: whether anything is.
        refused: texts of this test's refusals.
    """

    def __init__(self) -> None:
        self.guard = IndexGuard()
        self.active = False
        self.refused: list[str] = []
        self._library = torch.library.Library("aten", "IMPL")
        key = getattr(torch._C.DispatchKey, PLACE)
        self._after = torch._C._dispatch_keyset_full_after(key)
        for packet in INDEXING:
            for operator in map(packet.__getattr__, packet.overloads()):
                if _takes_a_tensor(operator):
                    self._library.impl(operator, self._kernel(operator), PLACE, with_keyset=True)

    def _kernel(self, operator: Any) -> Any:
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                try:
                    self.guard.check_call(operator, args)
                    _require_place(operator, args)
                except IndexError as error:
                    self.refused.append(str(error))
                    raise
            return operator.redispatch(keys & self._after, *args, **kwargs)

        return run


@pytest.fixture(autouse=True)
def index_watch() -> Iterator[IndexWatch]:
    """Switched on for one test."""
    watch = _watch()
    watch.active = True
    yield watch
    watch.active = False
    refused, watch.refused = watch.refused, []
    assert not refused


@cache
def _watch() -> IndexWatch:
    return IndexWatch()  # once a process: a kernel cannot be registered twice


def _takes_a_tensor(operator: Any) -> bool:
    """Not so the overloads for lists and names, which the dispatcher never sees."""
    schema = operator._schema
    tensor = bool(schema.arguments) and str(schema.arguments[0].type) == "Tensor"
    names = any("Dimname" in str(argument.type) for argument in schema.arguments)
    return tensor and not names and "hacked" not in schema.overload_name


def _require_place(operator: Any, args: tuple[Any, ...]) -> None:
    """Where our own code indexes by numbers, it does so in `indexing`. A model looks its embeddings up anywhere."""
    if not list(INDEXING[operator.overloadpacket](*args)):
        return  # a mask
    caller = _caller()
    if caller is not None and caller.f_code.co_filename != indexing.__file__:
        place = f"{Path(caller.f_code.co_filename).relative_to(ROOT)}:{caller.f_lineno}"
        raise IndexError(f"{operator}: expected to be called in {indexing.__name__}, was in {place}")


def _caller() -> FrameType | None:
    """Who calls the operator, where it is one of us: no test, no embedding or model, not the backward pass."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in PASSERS_ON:
            if file.startswith(OURS):
                return frame
            if file.startswith(f"{ROOT}/tests/") or any(place in file for place in ELSEWHERE):
                return None
        frame = frame.f_back
    return None
