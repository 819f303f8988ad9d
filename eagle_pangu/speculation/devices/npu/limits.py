"""What heads and slots the fused operators serve, by their documentation (Atlas A2 and A3); checked at load."""

from __future__ import annotations

from typing import NamedTuple

import torch

from eagle_pangu.speculation.devices.base import HeadShape, dtype_name

MOST_HEADS = 256


class Limits(NamedTuple):
    """Of one operator.

    dtypes: of query, key and value. head_dim: most values of a head, a multiple of `head_dim_step`. group: most query
    heads of a KV head. columns: most of K and V, those of a slot that do not count included; 0: no limit is documented.
    """

    dtypes: tuple[torch.dtype, ...]
    head_dim: int
    head_dim_step: int
    group: int
    columns: int

    def exceeded(self, heads: HeadShape) -> str:
        """The first limit that these heads or their slots do not keep, with their value; empty where they keep all."""
        if heads.dtype not in self.dtypes:
            return f"expected dtype {' or '.join(map(dtype_name, self.dtypes))}, got {dtype_name(heads.dtype)}"
        if heads.head_dim > self.head_dim or heads.head_dim % self.head_dim_step:
            step = f", a multiple of {self.head_dim_step}" if self.head_dim_step > 1 else ""
            return f"expected head_dim of at most {self.head_dim}{step}, got {heads.head_dim}"
        if heads.heads > MOST_HEADS:
            return f"expected at most {MOST_HEADS} query heads, got {heads.heads}"
        if heads.heads % heads.kv_heads or heads.heads // heads.kv_heads > self.group:
            return (
                f"expected a whole number of query heads a KV head, at most {self.group}, "
                f"got {heads.heads} over {heads.kv_heads}"
            )
        if self.columns and heads.slot_columns > self.columns:
            return f"expected slots of at most {self.columns} columns, spare ones included, got {heads.slot_columns}"
        return ""


# Documented as "16-byte aligned" in one place and as a multiple of 16 in others; the stricter one is kept.
# The columns are those of a pass of one row, which every session has.
FUSED_INFER = Limits((torch.float16, torch.bfloat16), head_dim=512, head_dim_step=16, group=64, columns=262144)
FUSION = Limits(
    (torch.float16, torch.bfloat16, torch.float32), head_dim=768, head_dim_step=1, group=MOST_HEADS, columns=0
)
