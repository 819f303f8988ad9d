"""Rows of all sessions one after the other, as one sequence: no padding in queries, KV or positions (DESIGN §8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache

from eagle_pangu.speculation.attention import AttentionKernel, grouped_attention
from eagle_pangu.speculation.buckets import Buckets
from eagle_pangu.speculation.cache import Slot, SlotLayer
from eagle_pangu.speculation.plan import ForwardPlan


class SlotBatch(Cache):  # type: ignore[misc]  # transformers is untyped
    """The slots of a pass, as the one cache that a model writes to.

    Args:
        layers: of the model; they hold nothing, so passes share them.
        slots: of the sessions, their branches begun.
        rows: that each slot takes of what the model hands over; a further number is of rows that no slot takes.
    """

    def __init__(self, layers: list[SlotLayer], slots: Sequence[Slot], rows: list[int]) -> None:
        super().__init__(layers=layers)
        self._slots = slots
        self._rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, kv_heads, rows, head_dim] of one layer, each slot's rows at the place that it announced."""
        if len(self._rows) == 1:
            self._slots[0].write(layer_idx, key_states, value_states)
        else:
            keys, values = (torch.split(table, self._rows, dim=2) for table in (key_states, value_states))
            own = len(self._slots)
            for slot, key, value in zip(self._slots, keys[:own], values[:own], strict=True):
                slot.write(layer_idx, key, value)
        return key_states, value_states


class RaggedLayout:
    """See `Layout`: batch is 1.

    Args:
        layers: of the model.
        slots: of the segments, their branches begun.
        plans: of the same segments.
        kernel: of the attention.
        buckets: where given, the pass is filled up to one with rows of token 0 that belong to no session.
    """

    def __init__(
        self,
        layers: list[SlotLayer],
        slots: Sequence[Slot],
        plans: Sequence[ForwardPlan],
        kernel: AttentionKernel,
        buckets: Buckets | None = None,
    ) -> None:
        self._slots = slots
        self._plans = plans
        self._kernel = kernel
        self._rows = [plan.rows for plan in plans]
        rows = sum(self._rows)
        self._filling = buckets.rows_for(rows) - rows if buckets else 0
        if self._filling:
            self._rows.append(self._filling)
        self.cache = SlotBatch(layers, slots, self._rows)
        self.first_rows = [sum(self._rows[:index]) for index in range(len(plans))]
        if len(self._rows) == 1:
            self.input_ids, self.position_ids = plans[0].input_ids, plans[0].position_ids
        else:
            filling = plans[0].input_ids.new_zeros(1, self._filling)
            self.input_ids = torch.cat([*(plan.input_ids for plan in plans), filling], dim=1)
            self.position_ids = torch.cat([*(plan.position_ids for plan in plans), filling], dim=1)

    def filled_up(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What each session's rows have, [own rows, width], as [rows of the pass, width]; zeros fill it up."""
        if not self._filling and not any(plan.padding for plan in self._plans):
            return torch.cat(list(parts))
        padded = [F.pad(part, (0, 0, 0, plan.padding)) for part, plan in zip(parts, self._plans, strict=True)]
        return torch.cat([*padded, parts[0].new_zeros(self._filling, parts[0].shape[1])])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Each session's rows over its own slot, up to its own length."""
        if len(self._rows) == 1:
            return grouped_attention(query, *self._slots[0].columns(layer), self._plans[0], self._kernel, scale)
        parts = torch.split(query, self._rows, dim=2)
        attended = [
            grouped_attention(rows, *slot.columns(layer), plan, self._kernel, scale)
            for rows, slot, plan in zip(parts[: len(self._plans)], self._slots, self._plans, strict=True)
        ]
        if self._filling:
            attended.append(torch.zeros_like(parts[-1].transpose(1, 2)))
        return torch.cat(attended, dim=1)
