"""A model that computes token trees over slots: what the teacher and a drafter with a model of its own share.

Blocking, one thread at a time. It knows tensors, trees and slots; no session, no wire, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from eagle_pangu.speculation.attention import AttentionKernel
from eagle_pangu.speculation.attention.kernels import bitwise_kernel
from eagle_pangu.speculation.buckets import Buckets, SeenShapes
from eagle_pangu.speculation.cache import SPARE_COLUMNS, Branch, CacheShape, Slot, SlotLayer
from eagle_pangu.speculation.checkpoints import Checkpoint
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.devices.base import Attention, HeadShape, dtype_name
from eagle_pangu.speculation.features import FeatureTaps
from eagle_pangu.speculation.index_guard import IndexGuard
from eagle_pangu.speculation.indexing import index_tensor
from eagle_pangu.speculation.invariance import (
    NoInvarianceError,
    attention_row_multiple,
    check_softmax,
    install_linears,
    tail_is_shared,
)
from eagle_pangu.speculation.layouts import Layout
from eagle_pangu.speculation.layouts.ragged import RaggedLayout
from eagle_pangu.speculation.norms import fuse_norms
from eagle_pangu.speculation.plan import ForwardPlan, whole_blocks
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.tree import TokenTree

Mode = Literal["reference", "performance"]
NumericsChoice = Literal["auto", "bitwise", "free"]


class Numerics(NamedTuple):
    """How the engine computes, as resolved at its start.

    dtype: "float32", "bfloat16" or "float16"; policy: "bitwise" or "free"; mode: "reference" or "performance";
    degraded_reason: empty, or why the default is not `bitwise` here. attention: "blocked" under `bitwise`, else "sdpa",
    "eager", or the name of the device's operator. attention_fallback_reason: empty, or why the device's own fused
    attention is not used.
    """

    dtype: str
    policy: Literal["bitwise", "free"]
    mode: Mode
    degraded_reason: str
    attention: str
    attention_fallback_reason: str


Arrange = Callable[[Sequence[Segment], Sequence[ForwardPlan]], Layout]
"""Segments, their branches begun, and the plan of each -> how they lie in the pass."""


class ForwardResult(NamedTuple):
    """What one pass gives for a segment.

    rows: computed. logits: [rows, vocab_size] in the model's dtype from the first row that they were wanted of, or None
    when not asked for. features: [rows, 3 * hidden] bfloat16 hidden states at the entries of layers 2, L // 2 and
    L - 3, or None.
    """

    rows: int
    logits: torch.Tensor | None
    features: torch.Tensor | None


class Engine:
    """A checkpoint ready for tree-masked forward passes.

    Args:
        checkpoint: the loaded model; its linear layers are replaced by the device's kernels.
        device: where it computes.
        mode: `reference` (eager or bitwise attention, every check, index guard on) or `performance`.
        numerics: `bitwise`, `free`, or `auto` (bitwise where the probe finds an invariance class).
        slot_capacity: most tokens of a slot.
        max_rows: most drafted rows of a tree.
        chunk: most prompt tokens of one prefill pass.
        step_rows: most rows of a pass over several sessions; where more, shapes are rounded up as far.
        branch: how a slot keeps its branch; `replicate` is the reference.
        degraded_reason: why the caller asks for `free` where its own caller left the choice open; reported.
        attention: under `free` numerics in `performance` mode; "auto" is the device's best.
        check_indices: run under the index guard in any mode.

    Attributes:
        numerics: as resolved.
        attention: of the device; None under `bitwise`, which has its own.
        buckets, shapes: on a device with static shapes, what sizes are rounded up to, and the distinct shapes computed;
            None elsewhere.

    Raises:
        NoInvarianceError: `bitwise` was asked for and this machine cannot keep it.
        AttentionError: the attention asked for cannot serve this model, or slots as long as these, here.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        *,
        mode: Mode = "performance",
        numerics: NumericsChoice = "auto",
        slot_capacity: int = 4096,
        max_rows: int = 64,
        chunk: int = 256,
        step_rows: int = 0,
        branch: Branch = "shared",
        degraded_reason: str = "",
        attention: str = "auto",
        check_indices: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.slot_capacity = slot_capacity
        self.max_rows = max_rows
        self.chunk = chunk
        self._branch = branch
        self._model: Any = checkpoint.model
        config = self._model.config
        self._kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._group = int(config.num_attention_heads) // self._kv_heads
        self._layers = int(config.num_hidden_layers)
        self._numerics_asked = numerics
        self._attention_asked = attention
        self._guarded = check_indices or mode == "reference"
        most_rows = max(chunk, max_rows + 1, step_rows)
        self.buckets = Buckets.up_to(most_rows, slot_capacity) if device.static_shapes else None
        self.shapes = SeenShapes() if device.static_shapes else None
        self._mode = mode
        fuse_norms(self._model)
        rows = {"tree_rows": max_rows + 1, "chunk": chunk}
        if numerics == "free":
            self._adopt("free", degraded_reason)
        else:
            try:
                check_softmax(self._kv_heads * self._group, device)
                multiple = attention_row_multiple(self._kv_heads, self._head_dim, device)
                heads = self._kv_heads, self._group, self._head_dim
                shares_tail = tail_is_shared(*heads, multiple, max_rows + 1, device)
                self._bitwise_kernel = bitwise_kernel(multiple, shares_tail=shares_tail)
                install_linears(self._model, device, bitwise=True, **rows)
                self._adopt("bitwise", "")
            except NoInvarianceError as error:
                self.degrade(error)
        if self.numerics.policy == "free":
            install_linears(self._model, device, bitwise=False, **rows)
        self._cache_layers = [SlotLayer() for _ in range(self._layers)]
        self._taps = FeatureTaps(self._model.base_model.layers)

    def _adopt(self, policy: Literal["bitwise", "free"], degraded_reason: str) -> None:
        """Make a policy the one in force: what is reported, which attention runs, and what KV is kept in."""
        dtype = self._model.dtype
        self._kv_dtype = torch.float32 if policy == "bitwise" else dtype
        self._kernel: AttentionKernel
        self.attention: Attention | None
        if policy == "bitwise":
            self.attention = None
            name, reason, self._kernel = "blocked", "", self._bitwise_kernel
        else:
            columns = self.slot_columns(self.slot_capacity) + self.spare_columns
            heads = HeadShape(self._kv_heads * self._group, self._kv_heads, self._head_dim, dtype, columns)
            asked = "eager" if self._mode == "reference" else self._attention_asked
            self.attention = self.device.attention(asked, heads)
            name, reason, self._kernel = self.attention[:3]
        self.numerics = Numerics(dtype_name(dtype), policy, self._mode, degraded_reason, name, reason)

    def degrade(self, error: NoInvarianceError) -> None:
        """Go on under `free`, for the reason that the error gives; where `bitwise` was asked for, raise it."""
        if self._numerics_asked == "bitwise":
            raise error
        self._adopt("free", f"no bitwise numerics on this machine: {error}")

    @property
    def cache_shape(self) -> CacheShape:
        """What one slot stores."""
        return CacheShape(self._layers, self._kv_heads, self._head_dim, self._kv_dtype, self.device.torch_device)

    def slot_columns(self, capacity: int) -> int:
        """Columns that a slot of `capacity` tokens takes for them, those that round it up included."""
        return self.buckets.length_for(capacity) if self.buckets else whole_blocks(capacity)

    @property
    def spare_columns(self) -> int:
        """Columns that every slot takes besides."""
        return SPARE_COLUMNS if self.buckets else 0

    def open_slot(self, capacity: int | None = None) -> Slot:
        """A fresh slot of `capacity` tokens, at most (and by default) the engine's slot capacity."""
        columns = self.slot_columns(min(capacity or self.slot_capacity, self.slot_capacity))
        return Slot(self.cache_shape, columns, self._branch, static_shapes=self.buckets is not None)

    def run(self, segments: Sequence[Segment], arrange: Arrange | None = None) -> list[ForwardResult]:
        """One pass over the rows of several sessions; what is `final` is committed.

        Args:
            segments: >= 1, each of another slot.
            arrange: how their rows lie in the pass; one after the other when not given.

        Returns:
            Of each segment, in order.
        """
        if self.numerics.mode == "reference":
            for segment in segments:
                tree = segment.tree
                tree.validate(vocab_size=self.checkpoint.vocab_size, max_rows=tree.rows, max_depth=tree.rows)
        results = self._forward(segments, arrange or self._ragged)
        for segment in segments:
            if segment.final:
                segment.slot.commit_all()
        return results

    def prefill(self, slot: Slot, token_ids: NDArray[np.int64], *, want_logits: bool, **wants: bool) -> ForwardResult:
        """Append and commit one chunk of known tokens of one session; see `known_tokens`."""
        return self.run([known_tokens(slot, token_ids, want_logits=want_logits, **wants)])[0]

    def verify(self, slot: Slot, tree: TokenTree, *, want_features: bool = False) -> ForwardResult:
        """A whole tree of one session, at the slot's committed length; replaces any earlier branch."""
        return self.run([Segment(slot, tree, want_features=want_features)])[0]

    def commit(self, slot: Slot, rows: Sequence[int]) -> None:
        """Make the root and the accepted rows (path order, root left out) final."""
        slot.commit(rows)

    def abort(self, slot: Slot) -> None:
        """Drop the branch."""
        slot.abort()

    def _forward(self, segments: Sequence[Segment], arrange: Arrange) -> list[ForwardResult]:
        for segment in segments:
            if segment.first_row == 0:
                segment.slot.abort()
        buckets = self.buckets if arrange == self._ragged else None
        plans = [segment.plan(self._group, buckets) for segment in segments]
        for segment, plan in zip(segments, plans, strict=True):
            segment.slot.begin(segment.first_row, segment.tree.rows, plan.padding)
        want_features = any(segment.want_features for segment in segments)
        checks = IndexGuard() if self._guarded else nullcontext()
        with torch.inference_mode(), checks, self._taps.recording(want_features) as taps:
            if self.numerics.policy == "bitwise":
                for segment, plan in zip(segments, plans, strict=True):
                    segment.slot.clear_values(plan.columns, whole_blocks(plan.columns))
            layout = arrange(segments, plans)
            wanted = map(_logits_rows, layout.first_rows, segments)
            logits = self._logits(layout, list(wanted))
        features = torch.cat(taps, dim=-1) if want_features else None
        results = []
        for segment, first, own_logits in zip(segments, layout.first_rows, logits, strict=True):
            own_features = None
            if segment.want_features and features is not None:
                own_features = features[first : first + segment.rows]
            results.append(ForwardResult(segment.rows, own_logits, own_features))
        if self.shapes:
            self._note_shapes(self.shapes, layout, segments, plans)
        return results

    def _note_shapes(
        self, shapes: SeenShapes, layout: Layout, segments: Sequence[Segment], plans: Sequence[ForwardPlan]
    ) -> None:
        """Of the linear layers, and of the attention of each session; `_logits` notes the output layer's.

        The blocks of the `bitwise` attention follow the text: a shape for each block that it grows by, met as it does.
        An attention that cuts K and V to the columns in use has a shape for each length.
        """
        shapes.note("rows", *layout.input_ids.shape)
        for segment, plan in zip(segments, plans, strict=True):
            if self.attention is None:
                columns = plan.full_columns + plan.tail_columns
            else:
                whole = segment.slot.capacity + self.spare_columns
                columns = whole if self.attention.whole_slots else plan.columns
            shapes.note("attention", "chain" if plan.is_chain else "tree", plan.rows, columns)

    def _logits(self, layout: Layout, wanted: Sequence[range]) -> list[torch.Tensor | None]:
        """Run the model; [rows, vocab_size] for each of the given ranges of the pass's rows, None for an empty one."""
        arguments = {
            "input_ids": layout.input_ids,
            "position_ids": layout.position_ids,
            "cache": layout.cache,
            "use_cache": True,
            "layout": layout,
        }
        rows = [row for each in wanted for row in each]
        if not rows:
            self._model.base_model(**arguments)
            return [None] * len(wanted)
        batch, length = layout.input_ids.shape
        keep: int | torch.Tensor = 0  # all
        filling = 0
        if batch == 1:
            filling = self.buckets.rows_for(len(rows)) - len(rows) if self.buckets else 0
            keep = length - rows[0]
            if self.shapes:
                self.shapes.note("logits", len(rows) + filling)
            if len(rows) != keep or self.buckets:
                keep = index_tensor([*rows, *rows[:1] * filling], length, self.device.torch_device, field="logits rows")
        output = self._model(logits_to_keep=keep, **arguments).logits[..., : self.checkpoint.vocab_size].flatten(0, 1)
        if batch == 1:
            parts = output.split([*(len(each) for each in wanted), filling])[: len(wanted)]
        else:
            parts = tuple(output[each.start : each.stop] for each in wanted)
        return [part if each else None for each, part in zip(wanted, parts, strict=True)]

    def _ragged(self, segments: Sequence[Segment], plans: Sequence[ForwardPlan]) -> Layout:
        slots = [segment.slot for segment in segments]
        return RaggedLayout(self._cache_layers, slots, plans, self._kernel, self.buckets)


def _logits_rows(first: int, segment: Segment) -> range:
    """Of a segment whose rows begin at `first` among those of the pass, the rows whose logits are wanted."""
    end = first + segment.rows
    start = end if segment.logits_from is None else first + max(0, segment.logits_from - segment.first_row)
    return range(start, end)
