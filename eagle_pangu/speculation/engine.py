"""A model that computes token trees over slots: what the teacher and a drafter with a model of its own share.

Blocking, one thread at a time. It knows tensors, trees and slots; no session, no wire, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from eagle_pangu.speculation.attention import AttentionKernel
from eagle_pangu.speculation.attention.kernels import bitwise_kernel, eager_kernel, fused_kernel
from eagle_pangu.speculation.cache import Branch, CacheShape, Slot, SlotLayer
from eagle_pangu.speculation.checkpoints import Checkpoint
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.index_guard import IndexGuard
from eagle_pangu.speculation.invariance import (
    NoInvarianceError,
    attention_row_multiple,
    check_softmax,
    install_linears,
)
from eagle_pangu.speculation.layouts import Layout
from eagle_pangu.speculation.layouts.ragged import RaggedLayout
from eagle_pangu.speculation.norms import fuse_norms
from eagle_pangu.speculation.plan import BLOCK, ForwardPlan
from eagle_pangu.speculation.segment import Segment, known_tokens
from eagle_pangu.speculation.tree import TokenTree

Mode = Literal["reference", "performance"]
NumericsChoice = Literal["auto", "bitwise", "free"]


class Numerics(NamedTuple):
    """How the engine computes, as resolved at its start.

    dtype: "float32", "bfloat16" or "float16"; policy: "bitwise" or "free"; mode: "reference" or "performance";
    degraded_reason: empty, or why the default is not `bitwise` here.
    """

    dtype: str
    policy: Literal["bitwise", "free"]
    mode: Mode
    degraded_reason: str


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
        branch: how a slot keeps its branch; `replicate` is the reference.

    Raises:
        NoInvarianceError: `bitwise` was asked for and this machine cannot keep it.
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
        branch: Branch = "shared",
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
        fuse_norms(self._model)
        self._adopt("free", mode, "")
        rows = {"tree_rows": max_rows + 1, "chunk": chunk}
        if numerics != "free":
            try:
                check_softmax(self._kv_heads * self._group, device)
                self._row_multiple = attention_row_multiple(self._kv_heads, self._head_dim, device)
                install_linears(self._model, device, bitwise=True, **rows)
                self._adopt("bitwise", mode, "")
            except NoInvarianceError as error:
                self._degrade(error)
        if self.numerics.policy == "free":
            install_linears(self._model, device, bitwise=False, **rows)
        self._cache_layers = [SlotLayer() for _ in range(self._layers)]
        self._taps = _FeatureTaps(self._model.base_model.layers)

    def _adopt(self, policy: Literal["bitwise", "free"], mode: Mode, degraded_reason: str) -> None:
        """Make a policy the one in force: what is reported, which attention runs, and what KV is kept in."""
        dtype = self._model.dtype
        self.numerics = Numerics(str(dtype).removeprefix("torch."), policy, mode, degraded_reason)
        self._kv_dtype = torch.float32 if policy == "bitwise" else dtype
        self._kernel: AttentionKernel
        if policy == "bitwise":
            self._kernel = bitwise_kernel(self._row_multiple)
        else:
            self._kernel = eager_kernel() if mode == "reference" else fused_kernel(self.device)

    def _degrade(self, error: NoInvarianceError) -> None:
        """Go on under `free`, where nobody insisted on `bitwise`."""
        if self._numerics_asked == "bitwise":
            raise error
        self._adopt("free", self.numerics.mode, f"no bitwise numerics on this machine: {error}")

    @property
    def cache_shape(self) -> CacheShape:
        """What one slot stores."""
        return CacheShape(self._layers, self._kv_heads, self._head_dim, self._kv_dtype, self.device.torch_device)

    def open_slot(self, capacity: int | None = None) -> Slot:
        """A fresh slot of `capacity` tokens, at most (and by default) the engine's slot capacity."""
        return Slot(self.cache_shape, min(capacity or self.slot_capacity, self.slot_capacity), self._branch)

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

    def warm_up(self) -> None:
        """Run the shapes that serving runs, so that no request pays for first-use work.

        Under `bitwise` this is also the self-test: one tree, verified beside another session's, is compared, bit by
        bit, with one-by-one decoding. Where it fails the policy becomes `free`, unless `bitwise` was asked for.

        Raises:
            NoInvarianceError: the self-test failed, and `bitwise` was asked for.
        """
        slot, other = self.open_slot(), self.open_slot()
        tree = TokenTree.build([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 3, 2, 4])
        tree = TokenTree(tree.token_ids % self.checkpoint.vocab_size, tree.parents)
        length = min(BLOCK + 3, self.chunk, slot.capacity - tree.rows)
        prompt = np.arange(length, dtype=np.int64) % self.checkpoint.vocab_size
        self.prefill(slot, prompt, want_logits=True, want_features=True)
        self.prefill(other, prompt[:1], want_logits=True)
        self.verify(slot, tree)
        together = self.run([Segment(other, tree), Segment(slot, tree)])[1].logits
        assert together is not None
        if self.numerics.policy != "bitwise":
            return
        for row, depth in enumerate(tree.depth):
            slot.truncate(len(prompt))
            alone = None
            for ancestor in tree.ancestors[row, : depth + 1]:
                alone = self.prefill(slot, tree.token_ids[ancestor : ancestor + 1], want_logits=True).logits
            assert alone is not None
            if not torch.equal(alone[0], together[row]):
                self._degrade(NoInvarianceError(f"self-test: row {row} of a tree differs from one-by-one decoding"))
                return

    def _forward(self, segments: Sequence[Segment], arrange: Arrange) -> list[ForwardResult]:
        for segment in segments:
            if segment.first_row == 0:
                segment.slot.abort()
        plans = [segment.plan(self._group) for segment in segments]
        for segment in segments:
            segment.slot.begin(segment.first_row, segment.tree.rows)
        want_features = any(segment.want_features for segment in segments)
        checks = IndexGuard() if self.numerics.mode == "reference" else nullcontext()
        with torch.inference_mode(), checks, self._taps.recording(want_features) as taps:
            if self.numerics.policy == "bitwise":
                for segment, plan in zip(segments, plans, strict=True):
                    if plan.is_chain:
                        segment.slot.clear_values(plan.columns, plan.full_columns + plan.tail_columns)
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
        return results

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
        if batch == 1:
            keep = length - rows[0]
            if len(rows) != keep:
                keep = torch.tensor(rows, device=self.device.torch_device)
        output = self._model(logits_to_keep=keep, **arguments).logits[..., : self.checkpoint.vocab_size].flatten(0, 1)
        if batch == 1:
            parts = output.split([len(each) for each in wanted])
        else:
            parts = tuple(output[each.start : each.stop] for each in wanted)
        return [part if each else None for each, part in zip(wanted, parts, strict=True)]

    def _ragged(self, segments: Sequence[Segment], plans: Sequence[ForwardPlan]) -> Layout:
        return RaggedLayout(self._cache_layers, [segment.slot for segment in segments], plans, self._kernel)


def feature_layers(layers: int) -> tuple[int, int, int]:
    """At the entries of which layers, 0 the first, features are taken in a model of so many.

    2, L // 2 and L - 3, as EAGLE-3 heads expect; a model of fewer layers repeats the nearest one.
    """
    low, middle, high = (min(max(index, 0), layers - 1) for index in (2, layers // 2, layers - 3))
    return low, middle, high


def _logits_rows(first: int, segment: Segment) -> range:
    """Of a segment whose rows begin at `first` among those of the pass, the rows whose logits are wanted."""
    end = first + segment.rows
    start = end if segment.logits_from is None else first + max(0, segment.logits_from - segment.first_row)
    return range(start, end)


class _FeatureTaps:
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
