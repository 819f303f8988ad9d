"""Attention whose sums have one order whatever stands beside a row: fixed column blocks, path order.

The `bitwise` numerics policy (DESIGN §7). Columns are absolute positions in blocks of `BLOCK`. A tree row's keys are
taken through the ancestor table into path order, so they lie exactly where plain decoding would have them; blocks that
all rows see whole are shared. Every product has a fixed inner length, and what lies behind a row's own position adds
exact zeros at the end of every sum.

Row counts of the products are rounded up to `row_multiple`: a matrix library sums in another order for other counts
(one to three rows, say). The engine's probe measures which counts agree on this machine, and that hidden columns
at the end of a softmax move no bit. Where it finds besides that columns of no weight *between* others move no bit of a
product, rows need no keys of their own: one product over the columns in cache order serves all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eagle_pangu.speculation.indexing import gather, select
from eagle_pangu.speculation.plan import BLOCK, ForwardPlan, whole_blocks


def blocked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: ForwardPlan,
    scale: float,
    row_multiple: int,
    *,
    shares_tail: bool,
) -> torch.Tensor:
    """Attention of the plan's rows over one slot, in float32 throughout.

    Args:
        query: [kv_heads, rows, group, head_dim] float32; `group` query heads share a KV head.
        key, value: [kv_heads, capacity, head_dim] float32, capacity a multiple of `BLOCK`. V of unused columns of the
            last block in use must be finite.
        scale: factor of the scores.
        row_multiple: row counts of matrix products are rounded up to a multiple of this.
        shares_tail: columns of no weight move no bit of a product here.

    Returns:
        [kv_heads, rows, group, head_dim] float32.
    """
    kv_heads, rows, group, head_dim = query.shape
    stacked = rows * group
    columns = whole_blocks(plan.columns)
    full, tail = plan.full_columns, plan.tail_columns
    queries = query.new_zeros(kv_heads, stacked - stacked % -row_multiple, head_dim)
    torch.mul(query.reshape(kv_heads, stacked, head_dim), scale, out=queries[:, :stacked])
    scores = torch.bmm(queries, key[:, :columns].transpose(1, 2))
    if not plan.is_chain:
        # Path order is never longer than cache order, so it fits in place.
        cache_order = scores[:, :stacked, full:].view(kv_heads, rows, group, columns - full)
        index = plan.tail_index[None, :, None].expand(kv_heads, rows, group, tail)
        scores[:, :stacked, full : full + tail] = gather(cache_order, -1, index).view(kv_heads, stacked, tail)
    scores[:, :stacked, full : full + tail].masked_fill_(plan.tail_hidden, float("-inf"))
    weights = scores[:, :, : full + tail].softmax(dim=-1)
    products = weights.new_empty(kv_heads, (full + tail) // BLOCK, weights.shape[1], head_dim)
    if plan.is_chain:
        _shared_products(weights, value, products)
    else:
        _shared_products(weights[:, :, :full], value, products[:, : full // BLOCK])
        tail_value, tail_products = value[:, full:columns], products[:, full // BLOCK :]
        if shares_tail:
            _shared_tail(weights[:, :, full:], tail_value, plan, tail_products)
        else:
            tail_values = select(tail_value, 1, plan.tail_index.reshape(-1))
            own = weights[:, :stacked, full:].view(kv_heads, rows, group, tail)
            tail_products[:, :, :stacked] = _own_products(own, tail_values, row_multiple)
    return _sum_blocks(products)[:, :stacked].view(kv_heads, rows, group, head_dim)


def _shared_products(weights: torch.Tensor, value: torch.Tensor, products: torch.Tensor) -> None:
    """Blocks that all rows read in cache order.

    Args:
        weights: [kv_heads, rows, columns].
        value: [kv_heads, >= columns, head_dim].
        products: [kv_heads, blocks, rows, head_dim], written.
    """
    kv_heads, rows, columns = weights.shape
    blocks = columns // BLOCK
    by_block = weights.view(kv_heads, rows, blocks, BLOCK).transpose(1, 2)
    by_value = value[:, :columns].view(kv_heads, blocks, BLOCK, value.shape[-1])
    # Views, not copies: one call over all heads would need V in another order.
    for head_weights, head_value, out in zip(by_block.unbind(), by_value.unbind(), products.unbind(), strict=True):
        torch.bmm(head_weights, head_value, out=out)


def _shared_tail(weights: torch.Tensor, value: torch.Tensor, plan: ForwardPlan, products: torch.Tensor) -> None:
    """The blocks after the shared ones, each over all columns in cache order, of which most have no weight.

    A row comes after its ancestors in cache order too, so what has weight is summed in path order.

    Args:
        weights: [kv_heads, rows, tail], in path order.
        value: [kv_heads, cache columns, head_dim].
        products: [kv_heads, blocks, rows, head_dim], written.
    """
    blocks, stacked, columns = plan.tail_foreign.shape
    kv_heads, rows, _ = weights.shape
    by_block = select(weights, 2, plan.tail_places)[:, None].expand(kv_heads, blocks, rows, columns).contiguous()
    by_block[:, :, :stacked].masked_fill_(plan.tail_foreign, 0)
    torch.bmm(by_block.view(kv_heads, blocks * rows, columns), value, out=products.view(kv_heads, blocks * rows, -1))


def _own_products(weights: torch.Tensor, value: torch.Tensor, row_multiple: int) -> torch.Tensor:
    """Blocks that each row reads in the order of its own path: one small product a row and block.

    Args:
        weights: [kv_heads, rows, group, tail].
        value: [kv_heads, rows * tail, head_dim], gathered for each row.

    Returns:
        [kv_heads, blocks, rows * group, head_dim].
    """
    kv_heads, rows, group, tail = weights.shape
    blocks = tail // BLOCK
    by_block = weights.view(kv_heads, rows, group, blocks, BLOCK).transpose(2, 3).reshape(-1, group, BLOCK)
    products = torch.bmm(_fill_up(by_block, row_multiple), value.reshape(by_block.shape[0], BLOCK, -1))
    by_row = products[:, :group].view(kv_heads, rows, blocks, group, -1)
    return by_row.transpose(1, 2).reshape(kv_heads, blocks, rows * group, -1)


def _sum_blocks(products: torch.Tensor) -> torch.Tensor:
    """[kv_heads, blocks, rows, head_dim] -> [kv_heads, rows, head_dim], in place.

    Neighbours are added pair by pair, again and again: an order that follows from the blocks' positions alone, so that
    blocks of zeros at the end change nothing. torch's own `sum` picks its order by the shape.
    """
    while products.shape[1] > 1:
        right = products[:, 1::2]
        products = products[:, 0::2]
        products[:, : right.shape[1]] += right
    return products[:, 0]


def _fill_up(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Rows of zeros at the end of dimension 1 until their number is a multiple."""
    missing = -rows.shape[1] % multiple
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
