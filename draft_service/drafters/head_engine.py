"""An EAGLE-3 head ready to draft: its one layer over a slot, a tree's rows at a time.

The draft's counterpart of the teacher's engine: it knows tensors, trees and slots; which rows are worth a pass, and
what their hidden states are, is the session's. Blocking, one thread at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.drafters.children import Children, top_children
from eagle_pangu.speculation.attention import grouped_attention
from eagle_pangu.speculation.attention.kernels import masked_kernel
from eagle_pangu.speculation.cache import CacheShape, Slot
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.eagle3.head import Eagle3Head
from eagle_pangu.speculation.linear import KernelLinear, replace_linears
from eagle_pangu.speculation.norms import fuse_norms
from eagle_pangu.speculation.plan import ForwardPlan
from eagle_pangu.speculation.projections import share_products
from eagle_pangu.speculation.tree import TokenTree


class HeadEngine:
    """A head and the device it computes on.

    Args:
        head: weights are given up to the device's kernels.
        device: where it computes; the head is moved there.
        vocab_size: ids of the teacher; the head proposes none past them.
        slot_capacity: most rows of a slot.
        window: how many rows of its own path a row sees, itself included; 0: all. For the ablation.
    """

    def __init__(self, head: Eagle3Head, device: Device, *, vocab_size: int, slot_capacity: int, window: int) -> None:
        self.head = head.to(device.torch_device).eval()
        self.device = device
        self.context_limit = min(head.config.max_positions, slot_capacity)
        """Longest sequence in tokens."""
        self._target_ids = head.target_ids.cpu().numpy()
        # Ascending, so those past the teacher's last id (padding rows of its embedding) are the last ones.
        self._draft_ids = int(np.searchsorted(self._target_ids, vocab_size))
        self._dtype = head.lm_head.weight.dtype
        self._window = window
        self._scale = head.config.head_dim**-0.5
        self._group = head.config.attention_heads // head.config.key_value_heads
        self._kernel = masked_kernel(device.fused_attention, self._keep)
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
        return Slot(shape, self.context_limit)

    @torch.inference_mode()
    def fuse(self, features: NDArray[np.uint16]) -> torch.Tensor:
        """Bits of bfloat16 features [rows, feature_width] -> hidden states [rows, hidden_size]."""
        values = torch.from_numpy(features.view(np.int16)).view(torch.bfloat16)
        return self.head.fuse(values.to(self.device.torch_device, self._dtype))

    @torch.inference_mode()
    def grow(self, slot: Slot, tree: TokenTree, first_row: int, hidden: torch.Tensor) -> torch.Tensor:
        """One pass over rows ``first_row ...`` of a tree whose earlier rows are the slot's branch already.

        Args:
            slot: column and position of a row are one number: rows of one path are one apart.
            tree: a row's token is the one after the token that its hidden state describes.
            hidden: [rows, hidden_size] of the new rows, from `fuse` or `recycled`.

        Returns:
            [rows, hidden_size], for `children` and `recycled`.
        """
        plan = ForwardPlan(tree, slot.committed_length, first_row, self._group, self.device.torch_device)
        slot.begin(first_row, tree.rows)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = slot.update(key, value, 0)
            return grouped_attention(query, keys, values, plan, self._kernel, self._scale).transpose(1, 2)

        return self.head.step(plan.input_ids, hidden[None], plan.position_ids, attend)[0]

    def read(self, slot: Slot, token_ids: NDArray[np.int64], hidden: torch.Tensor) -> None:
        """Append and commit rows that follow each other: token ids [rows] and hidden states [rows, hidden_size]."""
        slot.abort()
        self.grow(slot, TokenTree(token_ids, np.maximum(np.arange(len(token_ids)) - 1, 0)), 0, hidden)
        slot.commit_all()

    @torch.inference_mode()
    def recycled(self, output: torch.Tensor) -> torch.Tensor:
        """What `grow` gave for some rows, as the hidden states of their children."""
        return self.head.recycled(output)

    @torch.inference_mode()
    def children(self, output: torch.Tensor, width: int) -> Children:
        """The best next tokens of rows that `grow` gave, as ids of the teacher."""
        children = top_children(self.head.logits(output)[:, : self._draft_ids], width)
        return children._replace(token_ids=self._target_ids[children.token_ids])

    def warm_up(self) -> None:
        """Run a small tree, so that no request pays for first-use work."""
        tree = TokenTree.build([0, 0, 0, 0], [0, 0, 1, 1])
        hidden = self.fuse(np.zeros((tree.rows, self.feature_width), dtype=np.uint16))
        self.children(self.grow(self.open_slot(), tree, 0, hidden), 1)

    def _keep(self, plan: ForwardPlan) -> torch.Tensor:
        """[rows * group, columns] bool: the plan's mask, within the window."""
        if not self._window:
            return plan.keep
        tree, device = plan.tree, self.device.torch_device
        positions = np.concatenate([np.arange(plan.committed), plan.committed + tree.depth])
        own = plan.committed + tree.depth[plan.first_row :].repeat(self._group)
        return plan.keep & torch.from_numpy(own[:, None] - positions < self._window).to(device)
