"""The start-up probe of the `bitwise` policy: what on this machine leaves a row's bits alone.

Measured for the loaded model, at its shapes and thread count: each linear layer's invariance class of row counts, the
row multiple at which the small products of the attention agree, and that hidden columns behind a row move no bit of its
softmax. Where one of them fails, `bitwise` cannot be kept, and the caller is told why. Whether rows of a tree can share
their last products only decides how fast it is.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from eagle_pangu.speculation.attention.blocked import blocked_attention
from eagle_pangu.speculation.devices import Device
from eagle_pangu.speculation.linear import InvariantLinear, KernelLinear, probe_row_counts, replace_linears
from eagle_pangu.speculation.plan import BLOCK, ForwardPlan
from eagle_pangu.speculation.projections import share_products
from eagle_pangu.speculation.tree import TokenTree

ROW_MULTIPLES = (4, 8, 16)
"""Candidates for the attention's products; one to three rows go through a matrix-vector kernel on common libraries."""

_BLOCK_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64)
"""Lengths that the probe of the softmax tries, in blocks: powers of two, where kernels change, and their neighbours."""

_TAIL_LENGTHS = (5, 44, 60, BLOCK + 63, 3 * BLOCK + 1)
"""Committed tokens before the trees of the probe of the shared tail: paths within a block and over a border."""


class NoInvarianceError(Exception):
    """This machine offers no class of row counts for some shape; the text names it."""


def install_linears(model: PreTrainedModel, device: Device, *, bitwise: bool, tree_rows: int, chunk: int) -> None:
    """Join projections of one input, and put the device's linear kernel in the place of every `nn.Linear`.

    Args:
        model: an unmodified transformers model; its linear weights are given up to the kernels.
        device: whose kernels.
        bitwise: probe each layer shape and hold the layer to its class.
        tree_rows: most rows whose logits one pass computes; the probe of the output layer tries no more.
        chunk: most rows of one pass; the probe of the other layers tries no more.

    Raises:
        NoInvarianceError: `bitwise` is asked for and a layer shape has no class of at least `REFERENCE_ROWS` rows.
    """
    classes: dict[tuple[int, int, torch.dtype], tuple[int, ...]] = {}
    head = model.get_output_embeddings()

    def replacement(layer: nn.Linear) -> KernelLinear:
        largest = tree_rows if layer is head else max(tree_rows, chunk)
        return _replacement(layer, device, classes, bitwise=bitwise, largest_rows=largest)

    share_products(model)
    replace_linears(model, replacement)


def _replacement(
    layer: nn.Linear,
    device: Device,
    classes: dict[tuple[int, int, torch.dtype], tuple[int, ...]],
    *,
    bitwise: bool,
    largest_rows: int,
) -> KernelLinear:
    kernel = device.linear_kernel(layer)
    if not bitwise:
        return KernelLinear(kernel, layer.in_features, layer.out_features, layer.weight.dtype)
    key = (layer.in_features, layer.out_features, layer.weight.dtype)
    if key not in classes:
        classes[key] = probe_row_counts(
            kernel, layer.in_features, layer.weight.dtype, device.torch_device, largest_rows
        )
        if len(classes[key]) < 2:
            raise NoInvarianceError(f"linear layer {key[0]} -> {key[1]} in {key[2]}: bits depend on the row count")
    return InvariantLinear(kernel, layer.in_features, layer.out_features, layer.weight.dtype, classes[key])


def attention_row_multiple(kv_heads: int, head_dim: int, device: Device) -> int:
    """The smallest tried multiple at which the attention's products give a row the same bits in any company.

    Tries scores (inner length `head_dim`, several column counts) and weighted sums (inner length `BLOCK`), at batch
    sizes from one KV head up and at every multiple up to 64 rows, against 64 rows.

    Raises:
        NoInvarianceError: no multiple holds.
    """
    generator = torch.Generator().manual_seed(0)
    batches = sorted({1, 2, kv_heads, 4 * kv_heads, 17 * kv_heads})
    rows = torch.randn(batches[-1], 64, max(head_dim, BLOCK), generator=generator).to(device.torch_device)
    keys = torch.randn(batches[-1], 8 * BLOCK, head_dim, generator=generator).to(device.torch_device)

    def scores(batch: int, count: int, columns: int) -> torch.Tensor:
        return torch.bmm(rows[:batch, :count, :head_dim].contiguous(), keys[:batch, :columns].transpose(1, 2))

    def sums(batch: int, count: int) -> torch.Tensor:
        return torch.bmm(rows[:batch, :count, :BLOCK].contiguous(), keys[:batch, :BLOCK])

    reference_scores, reference_sums = scores(batches[-1], 64, 8 * BLOCK), sums(batches[-1], 64)
    for multiple in ROW_MULTIPLES:
        counts = range(multiple, 65, multiple)
        if all(
            torch.equal(sums(batch, count), reference_sums[:batch, :count])
            and all(
                torch.equal(scores(batch, count, columns), reference_scores[:batch, :count, :columns])
                for columns in (BLOCK, 3 * BLOCK, 8 * BLOCK)
            )
            for batch, count in product(batches, counts)
        ):
            return multiple
    raise NoInvarianceError(f"attention products at head_dim {head_dim}: bits depend on the row count")


def check_softmax(rows: int, device: Device) -> None:
    """Measure that softmax gives a row the same bits however many hidden columns follow, and in any company.

    Raises:
        NoInvarianceError: it does not, for some number of columns.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, _BLOCK_COUNTS[-1] * BLOCK, generator=generator).to(device.torch_device)
    for seen, blocks in product(_BLOCK_COUNTS, _BLOCK_COUNTS):
        if blocks < seen:
            continue
        columns = seen * BLOCK - 7
        masked = scores[:, : blocks * BLOCK].clone()
        masked[:, columns:] = float("-inf")
        if not torch.equal(masked.softmax(dim=-1)[0, :columns], masked[0, : seen * BLOCK].softmax(dim=-1)[:columns]):
            raise NoInvarianceError(f"softmax over {columns} columns: bits depend on the {blocks * BLOCK} around them")


def tail_is_shared(kv_heads: int, group: int, head_dim: int, row_multiple: int, most_rows: int, device: Device) -> bool:
    """Whether rows of a tree keep their bits in products over the columns of all of them; see `blocked_attention`.

    Where a library sums a product's columns one after the other, those of no weight move no bit. Tried on random trees
    of 2, 3, 5, 9, ... rows, at most `most_rows`, whose branches interleave.
    """
    random = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    capacity = max(_TAIL_LENGTHS) - max(_TAIL_LENGTHS) % -BLOCK + BLOCK * (most_rows // BLOCK + 1)
    key, value = torch.randn(2, kv_heads, capacity, head_dim, generator=generator).to(device.torch_device)
    sizes = [1 + 2**power for power in range(most_rows.bit_length()) if 1 + 2**power <= most_rows]
    for length, rows in product(_TAIL_LENGTHS, sizes):
        parents = [0, *(int(random.integers(max(0, row - 4), row)) for row in range(1, rows))]
        plan = ForwardPlan(TokenTree(np.arange(rows), np.array(parents)), length, 0, group, device.torch_device)
        query = torch.randn(kv_heads, rows, group, head_dim, generator=generator).to(device.torch_device)
        shared, own = (
            blocked_attention(query, key, value, plan, head_dim**-0.5, row_multiple, shares_tail=shares)
            for shares in (True, False)
        )
        if not torch.equal(shared, own):
            return False
    return True
