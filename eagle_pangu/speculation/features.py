"""Which hidden states are a token's features, and how they are taken out of an unmodified model (DESIGN §6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def feature_layers(layers: int) -> tuple[int, int, int]:
    """At the entries of which layers, 0 the first, features are taken in a model of so many.

    2, L // 2 and L - 3, as EAGLE-3 heads expect; a model of fewer layers repeats the nearest one.
    """
    low, middle, high = (min(max(index, 0), layers - 1) for index in (2, layers // 2, layers - 3))
    return low, middle, high


class FeatureTaps:
    """Hidden states at the entries of `feature_layers`, recorded only while asked for."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._layers = layers
        self._places = feature_layers(len(layers))

    @contextmanager
    def recording(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        """Yields the list that holds [rows, hidden] of each place once the pass is over; empty unless wanted."""
        features: list[torch.Tensor] = []
        if not wanted:
            yield features
            return
        seen: dict[int, torch.Tensor] = {}
        # Hooked for this pass alone: a model without hooks runs its layers faster.
        hooks = [self._hook(index, seen) for index in set(self._places)]
        try:
            yield features
            features.extend(seen[index] for index in self._places)
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, index: int, seen: dict[int, torch.Tensor]) -> RemovableHandle:
        def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            seen[index] = hidden.flatten(0, 1).to(torch.bfloat16)

        return self._layers[index].register_forward_pre_hook(record, with_kwargs=True)
