"""An EAGLE-3 head ready to draft: its one layer over slots, rows of several trees at a time.

The draft's counterpart of the teacher's engine: it knows tensors, trees and slots; which rows are worth a pass, and
what their hidden states come from, is the session's. Blocking, one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from draft_service.drafters.children import NO_CHILDREN, Children, top_children
from eagle_pangu.speculation.attention.kernels import over_slot
from eagle_pangu.speculation.buckets import Buckets, SeenShapes
from eagle_pangu.speculation.cache import SPARE_COLUMNS, CacheShape, Slot, SlotLayer
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.devices.base import HeadShape
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from eagle_pangu.speculation.index_guard import IndexGuard
from eagle_pangu.speculation.layouts.ragged import RaggedLayout
from eagle_pangu.speculation.linear import KernelLinear, replace_linears
from eagle_pangu.speculation.norms import fuse_norms
from eagle_pangu.speculation.plan import ForwardPlan, whole_blocks
from eagle_pangu.speculation.projections import share_products
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.tree import TokenTree

MOST_ROWS = 256
"""Of a pass, where rows are rounded up to few sizes: a chunk of a prompt."""


class HeadRequest(NamedTuple):
    """Rows of one session for a pass of the head.

    segment: column and position of a row are one number, rows of one path are one apart; a row's token is the one after
    the token that its hidden state describes. Children are found for the rows that it wants logits of.
    source: of the hidden states: [rows, feature_width] bits of the teacher's features, bfloat16; or what the head gave
    for the parent of each row, [rows, hidden_size].
    """

    segment: Segment
    source: NDArray[np.uint16] | torch.Tensor


class HeadResult(NamedTuple):
    """What a pass gives for a request.

    outputs: [rows, hidden_size], for the requests of their children. children: as ids of the teacher, of the rows that
    they were wanted of, the first of those counted as 0.
    """

    outputs: torch.Tensor
    children: Children


class HeadEngine:
    """A head and the device it computes on.

    Where the device rounds what its linear layers read (8 bits, one scale for all rows of a call), a session's scores,
    and so its tree, depend a little on whose rows share the pass. That costs no token: the teacher decides each.

    Args:
        head: weights are given up to the device's kernels.
        device: where it computes; the head is moved there.
        vocab_size: ids of the teacher; the head proposes none past them.
        slot_capacity: most rows of a slot.
        window: how many rows of its own path a row sees, itself included; 0: all. For the ablation.
        attention: by name; "auto" is the device's best.
        check_indices: run under the index guard.

    Attributes:
        shapes: on a device with static shapes, the distinct ones computed; None elsewhere.

    Raises:
        AttentionError: the attention asked for cannot serve the head, or slots as long as these, here.
    """

    def __init__(
        self,
        head: Eagle3Head,
        device: Device,
        *,
        vocab_size: int,
        slot_capacity: int,
        window: int,
        attention: str = "auto",
        check_indices: bool = False,
    ) -> None:
        self.head = head.to(device.torch_device).eval()
        self.device = device
        self.context_limit = min(head.config.max_positions, slot_capacity)
        """Longest sequence in tokens."""
        self._target_ids = head.target_ids.cpu().numpy()
        # Ascending, so those past the teacher's last id (padding rows of its embedding) are the last ones.
        self._draft_ids = int(np.searchsorted(self._target_ids, vocab_size))
        self._dtype = head.lm_head.weight.dtype
        self._window = window
        self._guarded = check_indices
        self._scale = head.config.head_dim**-0.5
        self._group = head.config.attention_heads // head.config.key_value_heads
        most = min(MOST_ROWS, self.context_limit)  # more than one slot holds could not be run at start
        self._buckets = Buckets.up_to(most, self.context_limit) if device.static_shapes else None
        self.shapes = SeenShapes() if device.static_shapes else None
        columns = whole_blocks(self.context_limit) + (SPARE_COLUMNS if self._buckets else 0)
        heads = HeadShape(
            head.config.attention_heads, head.config.key_value_heads, head.config.head_dim, self._dtype, columns
        )
        chosen = device.attention(attention, heads)
        self._kernel = over_slot(chosen.masked, self._keep) if window else chosen.over_slot
        self._whole_slots = chosen.whole_slots and not window
        self._cache_layers = [SlotLayer()]
        # The device's kernels in the place of linear layers and norms; a draft's rounding costs speed at most.
        fuse_norms(self.head)
        share_products(self.head)
        replace_linears(
            self.head,
            lambda layer: KernelLinear(
                device.linear_kernel(layer), layer.in_features, layer.out_features, layer.weight.dtype
            ),
        )

    @property
    def feature_width(self) -> int:
        """Values of one token's features."""
        return self.head.config.feature_width

    def open_slot(self) -> Slot:
        """A fresh slot of one layer, for a sequence of `context_limit` tokens."""
        config = self.head.config
        shape = CacheShape(1, config.key_value_heads, config.head_dim, self._dtype, self.device.torch_device)
        return Slot(shape, self.context_limit, static_shapes=self._buckets is not None)

    def together(self, requests: Sequence[HeadRequest]) -> int:
        """How many of the first of these share a pass, >= 1: with static shapes, no more than were run at start."""
        if self._buckets is None:
            return len(requests)
        return self._buckets.together([request.segment.rows for request in requests])

    @torch.inference_mode()
    def run(self, requests: Sequence[HeadRequest], width: int) -> list[HeadResult]:
        """One pass over the rows of several sessions; what is `final` is committed.

        Args:
            requests: >= 1, each of another slot.
            width: most children of a row.

        Returns:
            Of each request, in order.
        """
        segments = [request.segment for request in requests]
        plans = [segment.plan(self._group, self._buckets) for segment in segments]
        for segment, plan in zip(segments, plans, strict=True):
            segment.slot.begin(segment.first_row, segment.tree.rows, plan.padding)
        with IndexGuard() if self._guarded else nullcontext():
            outputs, children = self._compute(requests, plans, width)
        for segment in segments:
            if segment.final:
                segment.slot.commit_all()
        return list(map(HeadResult, outputs, children))

    def _compute(
        self, requests: Sequence[HeadRequest], plans: Sequence[ForwardPlan], width: int
    ) -> tuple[list[torch.Tensor], list[Children]]:
        """Outputs, and children of the rows that they are wanted of, of each request."""
        segments = [request.segment for request in requests]
        slots = [segment.slot for segment in segments]
        layout = RaggedLayout(self._cache_layers, slots, plans, self._kernel, self._buckets)

        if self.shapes:
            self.shapes.note("rows", *layout.input_ids.shape)
            for plan in plans:
                columns = 0 if self._whole_slots else plan.columns  # all slots are of one length
                self.shapes.note("attention", "chain" if plan.is_chain else "tree", plan.rows, columns)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            key, value = layout.cache.update(key, value, 0)
            return layout.attend(0, query, key, value, self._scale).transpose(1, 2)

        hidden = layout.filled_up(self._hidden(requests))
        joint = self.head.step(layout.input_ids, hidden[None], layout.position_ids, attend)[0]
        outputs = [
            joint[first : first + segment.rows] for first, segment in zip(layout.first_rows, segments, strict=True)
        ]
        return outputs, self._children_of_each(outputs, segments, width)

    def children(self, output: torch.Tensor, width: int) -> Children:
        """The best next tokens, as ids of the teacher, of rows [rows, hidden_size] as the head gave them."""
        logits = self._rounded_up(self.head.logits, output)
        children = top_children(logits[:, : self._draft_ids], width)
        return children._replace(token_ids=self._target_ids[children.token_ids])

    def warm_up(self, width: int) -> None:
        """Run the shapes that drafting runs, so that no request pays for first-use work.

        Args:
            width: most children of a row, as in `run`.
        """
        slot = self.open_slot()
        buckets = zip(self._buckets.rows, self._buckets.fewest, strict=True) if self._buckets else ((4, 4),)
        for rows, fewest in buckets:
            if fewest > slot.capacity:
                break
            outputs = self._run_chain(slot, min(rows, slot.capacity), width)
            if fewest + 2 <= slot.capacity:
                self._run_star(slot, fewest, width)
            else:  # only several sessions have so many rows that are no chain
                self._rounded_up(self.head.recycled, outputs[:1].expand(fewest, -1))
        if self.shapes:
            self.shapes.end_warm_up()

    def _run_chain(self, slot: Slot, rows: int, width: int) -> torch.Tensor:
        slot.truncate(0)
        chain = known_tokens(slot, np.zeros(rows, dtype=np.int64), want_logits=True, every_row=True)
        return self.run([HeadRequest(chain, np.zeros((rows, self.feature_width), dtype=np.uint16))], width)[0].outputs

    def _run_star(self, slot: Slot, rows: int, width: int) -> None:
        """A pass over rows that are all under one root that is there already: so even one or two are no chain."""
        slot.truncate(0)
        star = TokenTree(np.zeros(rows + 2, dtype=np.int64), np.zeros(rows + 2, dtype=np.int64))
        stem = TokenTree(star.token_ids[:2], star.parents[:2])
        first = self.run([HeadRequest(Segment(slot, stem), np.zeros((2, self.feature_width), dtype=np.uint16))], width)
        self.run([HeadRequest(Segment(slot, star, first_row=2), first[0].outputs[:1].expand(rows, -1))], width)

    def _hidden(self, requests: Sequence[HeadRequest]) -> list[torch.Tensor]:
        """Hidden states, [rows, hidden_size] each: one product for all features, one norm for all outputs."""
        sources = [request.source for request in requests]
        features = [source for source in sources if isinstance(source, np.ndarray)]
        outputs = [source for source in sources if isinstance(source, torch.Tensor)]
        fused = iter(_split(self._fuse(np.concatenate(features)), features) if features else ())
        recycled = iter(_split(self._rounded_up(self.head.recycled, torch.cat(outputs)), outputs) if outputs else ())
        return [next(fused if isinstance(source, np.ndarray) else recycled) for source in sources]

    def _fuse(self, features: NDArray[np.uint16]) -> torch.Tensor:
        values = torch.from_numpy(features.view(np.int16)).view(torch.bfloat16)
        return self._rounded_up(self.head.fuse, values.to(self.device.torch_device, self._dtype))

    def _rounded_up(self, compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Of [rows, width]; with rows of zeros up to a bucket, where there are any."""
        if self._buckets is None:
            return compute(rows)
        missing = self._buckets.rows_for(len(rows)) - len(rows)
        if self.shapes:
            self.shapes.note(compute.__name__, len(rows) + missing)
        return compute(F.pad(rows, (0, 0, 0, missing)))[: len(rows)]

    def _children_of_each(
        self, outputs: Sequence[torch.Tensor], segments: Sequence[Segment], width: int
    ) -> list[Children]:
        """One product with the output layer, the largest of the head, for the rows of all sessions."""
        wanted = [
            rows[:0] if segment.logits_from is None else rows[segment.logits_from - segment.first_row :]
            for rows, segment in zip(outputs, segments, strict=True)
        ]
        counts = list(map(len, wanted))
        if not any(counts):
            return [NO_CHILDREN] * len(wanted)
        return self.children(torch.cat(wanted), width).split(counts)

    def _keep(self, plan: ForwardPlan) -> torch.Tensor:
        """[rows * group, columns] bool: the plan's mask, within the window."""
        if not self._window:
            return plan.keep
        tree, device = plan.tree, self.device.torch_device
        positions = np.concatenate([np.arange(plan.committed), plan.committed + tree.depth])
        own = plan.positions.repeat(self._group)
        return plan.keep & torch.from_numpy(own[:, None] - positions < self._window).to(device)


def _split(rows: torch.Tensor, like: Sequence[NDArray[np.uint16]] | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """[rows, width] in parts of as many rows as each of those that they were made of."""
    return torch.split(rows, list(map(len, like)))
