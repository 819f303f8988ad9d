"""The comparison at start: the chosen attention against eager attention, on random rows.

An operator that reads a mask the other way round, or a column too many, raises nothing. So before a model serves, each
kind of pass is computed twice, by the operator on the device and written out in float32 on the host. What lies past the
columns that count is NaN, as leftover memory may be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from eagle_pangu.speculation.attention.eager import eager_attention
from eagle_pangu.speculation.attention.kernels import over_slot
from eagle_pangu.speculation.devices.base import Attention, AttentionError, HeadShape
from eagle_pangu.speculation.plan import BLOCK, ForwardPlan
from eagle_pangu.speculation.tree import TokenTree

_TREE = TokenTree.build(range(7), [0, 0, 0, 1, 3, 2, 4])
_CHAIN = TokenTree.build(range(6), [0, 0, 1, 2, 3, 4])
_ROUNDINGS = 4  # of a value of size 1, in units of the dtype's last place
_LEAST_TOLERANCE = 1e-3  # kernels for float32 may round their inputs


class _Case(NamedTuple):
    """A pass over a tree. Prefixes are short, so that no single column counts for little."""

    name: str
    tree: TokenTree
    committed: int = 0
    first_row: int = 0
    padding: int = 0

    def plan(self, group: int, device: torch.device) -> ForwardPlan:
        return ForwardPlan(self.tree, self.committed, self.first_row, group, device, self.padding)


_CASES = (
    _Case("one row", TokenTree.root_only(0), committed=5),
    _Case("a chain", _CHAIN),
    _Case("a chain behind a prefix", _CHAIN, committed=3),
    _Case("the end of a chain", _CHAIN, committed=3, first_row=4),
    _Case("a chain filled up", _CHAIN, committed=3, padding=2),
    _Case("a tree", _TREE, committed=3),
    _Case("a tree without a prefix, filled up", _TREE, padding=1),
    _Case("the last row of a tree", _TREE, committed=3, first_row=6),
)


def compare_with_eager(attention: Attention, heads: HeadShape, device: torch.device) -> None:
    """Compute every kind of pass both ways, over a slot and under dense masks.

    Raises:
        AttentionError: the operator failed, or its answer is another one; names the pass.
    """
    generator = torch.Generator().manual_seed(0)
    for compare in (_compare_over_slot, _compare_masked):
        for case in _CASES:
            plan = case.plan(heads.heads // heads.kv_heads, device)
            rows = _random_rows(heads, plan, generator)
            try:
                compare(attention, rows, plan)
            except (RuntimeError, TypeError) as error:
                first_line = str(error).strip().partition("\n")[0]  # a report of the card's follows
                raise AttentionError(f"{attention.name} fails on {case.name}: {first_line}") from error
            except _DifferenceError as error:
                raise AttentionError(f"{attention.name} differs from eager attention on {case.name}{error}") from error


class _Rows(NamedTuple):
    """Of a pass, on the host: query [kv_heads, rows, group, head_dim], key and value [kv_heads, capacity, head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)


def _compare_over_slot(attention: Attention, rows: _Rows, plan: ForwardPlan) -> None:
    query, key, value = (tensor.float() for tensor in rows)
    reference = over_slot(eager_attention)(query, key, value, replace(plan, device=torch.device("cpu")), rows.scale)
    query, key, value = (tensor.to(plan.device) for tensor in rows)
    _require_close(attention.over_slot(query, key, value, plan, rows.scale), reference, rows.query.dtype, "")


def _compare_masked(attention: Attention, rows: _Rows, plan: ForwardPlan) -> None:
    """One mask for all heads, and one for each, of which the first sees all columns."""
    stacked = rows.query.flatten(1, 2), rows.key[:, : plan.columns], rows.value[:, : plan.columns]
    shared = torch.from_numpy(plan.keep_host.repeat(plan.group, axis=0))
    own = shared.repeat(1, len(rows.key), 1, 1)
    own[:, 0] = True
    for kind, keep in ((", under one mask", shared), (", under a mask of each head", own)):
        query, key, value = (tensor.float() for tensor in stacked)
        reference = eager_attention(query, key, value, keep.reshape(-1, *shared.shape), rows.scale)
        query, key, value = (tensor.to(plan.device) for tensor in stacked)
        attended = attention.masked(query, key, value, keep.to(plan.device), rows.scale)
        _require_close(attended, reference, rows.query.dtype, kind)


def _random_rows(heads: HeadShape, plan: ForwardPlan, generator: torch.Generator) -> _Rows:
    query = torch.randn(heads.kv_heads, plan.rows, plan.group, heads.head_dim, generator=generator)
    tables = torch.randn(2, heads.kv_heads, BLOCK, heads.head_dim, generator=generator)
    tables[:, :, plan.columns :] = float("nan")
    key, value = tables.to(heads.dtype)
    return _Rows(query.to(heads.dtype), key, value)


class _DifferenceError(Exception):
    """Two results are not the same; says under which mask, and by how much."""


def _require_close(attended: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, kind: str) -> None:
    tolerance = max(_ROUNDINGS * torch.finfo(dtype).eps, _LEAST_TOLERANCE)
    error = float((attended.cpu().float() - reference).abs().max())
    if not error <= tolerance:  # NaN is not
        raise _DifferenceError(f"{kind}: by {error:.2g}, expected at most {tolerance:.2g}")
