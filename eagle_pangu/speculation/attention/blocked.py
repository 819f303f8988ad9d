"""Attention whose sums have one order whatever stands beside a row: fixed column blocks, path order.

The `bitwise` numerics policy (DESIGN §7). Columns are absolute positions in blocks of `BLOCK`. A tree row's keys are
taken through the ancestor table into path order, so they lie exactly where plain decoding would have them; blocks that
all rows see whole are shared. Every product has a fixed inner length, and partial sums are added in block order. Blocks
and columns that a row does not see add exact zeros.

Row counts of the products are rounded up to `row_multiple`: a matrix library sums in another order for other counts
(one to three rows, say), and the engine's probe measures which counts agree on this machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eagle_pangu.speculation.plan import BLOCK, ForwardPlan


def blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: ForwardPlan,
    scale: float,
    row_multiple: int,
) -> torch.Tensor:
    """Attention of the plan's rows over one slot, in float32 throughout.

    Args:
        query: [kv_heads, rows, group, head_dim] float32; `group` query heads share a KV head.
        key, value: [kv_heads, capacity, head_dim] float32, capacity a multiple of `BLOCK`. V of unused columns of the
            last block in use must be finite when the plan is a chain.
        scale: factor of the scores.
        row_multiple: row counts of matrix products are rounded up to a multiple of this.

    Returns:
        [kv_heads, rows, group, head_dim] float32.
    """
    kv_heads, rows, group, head_dim = query.shape
    stacked = _fill_up(query.reshape(kv_heads, rows * group, head_dim) * scale, row_multiple)
    columns = -(-plan.columns // BLOCK) * BLOCK
    scores = torch.bmm(stacked, key[:, :columns].transpose(1, 2))
    if plan.is_chain:
        return _chain(scores, value, plan, rows, group)
    return _tree(scores, value, plan, rows, group, row_multiple)


def _chain(scores: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, rows: int, group: int) -> torch.Tensor:
    """Cache order is path order: every block is shared, the tail only masked."""
    kv_heads, stacked, _ = scores.shape
    end = plan.full_columns + plan.tail_columns
    scores = scores[:, :, :end]
    scores[:, : rows * group, plan.full_columns :].masked_fill_(plan.tail_hidden, float("-inf"))
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp_()
    total = _in_order(weights.view(kv_heads, stacked, -1, BLOCK).sum(dim=-1), dim=2)
    attended = _in_order(_block_products(weights, value[:, :end]), dim=1)
    return (attended / total[..., None])[:, : rows * group].view(kv_heads, rows, group, -1)


def _tree(
    scores: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, rows: int, group: int, row_multiple: int
) -> torch.Tensor:
    """Full blocks are shared; each row's tail is gathered into path order."""
    kv_heads, stacked, columns = scores.shape
    full, tail = plan.full_columns, plan.tail_columns
    index = plan.tail_index[None, :, None].expand(kv_heads, rows, group, tail)
    tail_scores = scores[:, : rows * group, full:].reshape(kv_heads, rows, group, columns - full).gather(-1, index)
    tail_scores.masked_fill_(plan.tail_hidden.view(rows, group, tail), float("-inf"))
    highest = tail_scores.amax(dim=-1, keepdim=True)
    if full:
        shared = scores[:, :, :full]
        shared_highest = shared.amax(dim=-1, keepdim=True)
        highest = torch.maximum(highest, shared_highest[:, : rows * group].view(kv_heads, rows, group, 1))
        stacked_highest = _fill_up(highest.reshape(kv_heads, rows * group, 1), stacked)
        shared_weights = (shared - stacked_highest).exp_()
    tail_weights = (tail_scores - highest).exp_()

    # [kv_heads, rows, group(+), tail] @ [kv_heads, rows, tail, head_dim], one small product a row and block.
    blocks = tail // BLOCK
    tail_values = value[:, full:columns].index_select(1, plan.tail_index.reshape(-1))
    tail_values = tail_values.view(kv_heads * rows * blocks, BLOCK, -1)
    by_block = tail_weights.view(kv_heads, rows, group, blocks, BLOCK).transpose(2, 3)
    by_block = _fill_up(by_block.reshape(kv_heads * rows * blocks, group, BLOCK), row_multiple)
    products = torch.bmm(by_block, tail_values)[:, :group].view(kv_heads, rows, blocks, group, -1)
    sums = tail_weights.view(kv_heads, rows, group, blocks, BLOCK).sum(dim=-1)

    if full:
        shared_sums = shared_weights.view(kv_heads, stacked, -1, BLOCK).sum(dim=-1)[:, : rows * group]
        total = _in_order(shared_sums, dim=2).view(kv_heads, rows, group)
        attended = _in_order(_block_products(shared_weights, value[:, :full]), dim=1)
        attended = attended[:, : rows * group].view(kv_heads, rows, group, -1)
    else:
        # The first addend: x + 0 is x, so starting at 0 keeps the bits.
        total = sums.new_zeros(kv_heads, rows, group)
        attended = products.new_zeros(kv_heads, rows, group, products.shape[-1])
    for block in range(blocks):
        total = total + sums[..., block]
        attended = attended + products[:, :, block]
    return attended / total[..., None]


def _block_products(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[kv_heads, rows, columns] weights, [kv_heads, columns, head_dim] values -> [kv_heads, blocks, rows, head_dim]."""
    kv_heads, rows, columns = weights.shape
    blocks = columns // BLOCK
    products = weights.new_empty(kv_heads, blocks, rows, value.shape[-1])
    for head in range(kv_heads):
        # Views, not copies: one call over all heads would need the weights in another order.
        by_block = weights[head].view(rows, blocks, BLOCK).transpose(0, 1)
        torch.bmm(by_block, value[head].view(blocks, BLOCK, -1), out=products[head])
    return products


def _in_order(partial: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum along `dim`, one addend after another: `sum` would pair them by their number."""
    first, *rest = partial.unbind(dim)
    total = first.clone()
    for addend in rest:
        total += addend
    return total


def _fill_up(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Rows of zeros at the end of dimension 1 until their number is a multiple."""
    missing = -rows.shape[1] % multiple
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
