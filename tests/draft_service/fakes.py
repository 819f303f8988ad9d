"""A drafter that does what the test says."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from draft_service.drafters.base import Budget
from eagle_pangu.speculation.tree import TokenTree


class ScriptedDrafter:
    """Proposes what the test says; waits and fails when told to."""

    name = "scripted"
    needs_features = True
    context_limit = 50
    identity = None
    shapes = None

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.closed = threading.Event()
        self.failure: Exception | None = None
        self.features: list[tuple[int, tuple[int, ...]]] = []
        self.pieces = 0
        self.passes: list[list[str]] = []

    def open(self, prompt: Sequence[int], max_budget: Budget) -> ScriptedDrafter:
        self._root = prompt[-1]
        self.pieces = 3
        return self

    def extend(self, token_ids: Sequence[int]) -> None:
        self._root = token_ids[-1]

    def read_features(self, start: int, features: NDArray[np.uint16]) -> None:
        self.features.append((start, features.shape))

    def advance(self) -> Generator[str, str, None]:
        while self.pieces > 0:
            assert (yield "piece") == "piece done"
            self.pieces -= 1

    def propose(self, budget: Budget) -> Generator[str, str, TokenTree]:
        assert (yield "tree") == "tree done"
        self.begun.set()
        assert self.go_on.wait(30)
        if self.failure is not None:
            raise self.failure
        return TokenTree.build([self._root, 5], [0, 0], [0, -1])

    def together(self, requests: Sequence[str]) -> int:
        return len(requests)

    def compute(self, requests: Sequence[str]) -> list[str]:
        self.passes.append(list(requests))
        return [f"{request} done" for request in requests]

    def close(self) -> None:
        self.closed.set()
