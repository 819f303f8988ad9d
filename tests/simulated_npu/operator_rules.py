"""The documented contract of the fused operators (op-plugin's pages of the three, Atlas A2 and A3), rule by rule.

A call that breaks one is refused with a text that begins with the rule's name. Where the documentation merely advises
(correcting rows under a mask of one's own), or the default is a trap (the scale), the stand-in insists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

NO_LIMIT = 2**31 - 1
CAUSAL = 2048
DEFAULT_MASK, ALL_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND, TREE_MASK = 0, 1, 2, 3, 4, 9


class ContractError(RuntimeError):
    """A documented rule is broken; the text begins with its name."""


def require(kept: bool, rule: str, text: str) -> None:
    """Raises ContractError unless the rule is kept."""
    if not kept:
        raise ContractError(f"{rule}: {text}")


def refuse_unknown(given: Mapping[str, Any], names: Iterable[str]) -> None:
    """Arguments that the stand-in does not simulate must be left at what says "none"."""
    for name in sorted(names):
        if given[name] not in (None, 0, False):
            raise NotImplementedError(f"not simulated: {name} = {given[name]!r}")


def in_bnsd(name: str, tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """A tensor of that layout as [batch, heads, rows, head_dim], a view."""
    if layout not in ("BNSD", "BSND", "BSH"):
        raise NotImplementedError(f"not simulated: layout {layout}")
    axes = len(layout)
    require(tensor.dim() == axes, "layout", f"{layout} has {axes} dimensions, {name} is {tuple(tensor.shape)}")
    if layout == "BNSD":
        return tensor
    if layout == "BSH":
        require(tensor.shape[2] % heads == 0, "heads", f"{name} is {tensor.shape[2]} wide, for {heads} heads")
        tensor = tensor.view(*tensor.shape[:2], heads, tensor.shape[2] // heads)
    require(
        tensor.shape[2] * tensor.shape[3] < 65535, "layout", "heads * head_dim must be less than 65535 in BSH, BSND"
    )
    return tensor.transpose(1, 2)


@dataclass(frozen=True)
class Call:
    """One call of any of the operators, its tensors as [batch, heads, rows or columns, head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    heads: int
    kv_heads: int
    scale: float
    sparse_mode: int
    inner_precise: int
    pre_tokens: int
    next_tokens: int
    query_lengths: Sequence[int] | None
    key_lengths: Sequence[int] | None

    def rows(self, batch: int) -> int:
        """Query rows that count; with a single one the operator does not read the argument."""
        return _of_batch(self.query_lengths, batch, self.query.shape[2]) if self.query.shape[2] > 1 else 1

    def columns(self, batch: int) -> int:
        """Columns of K and V that count."""
        return _of_batch(self.key_lengths, batch, self.key.shape[2])

    def hides(self) -> torch.Tensor | None:
        """[batch, rows, columns] bool on the host, True where a score does not count; None: all count."""
        if self.mask is None:
            return None
        batches, rows, columns = self.query.shape[0], self.query.shape[2], self.key.shape[2]
        if self.sparse_mode in (DEFAULT_MASK, ALL_MASK) or rows == 1:
            mask = self.mask.cpu().bool()
            mask = mask[:, None] if mask.dim() == 2 and rows == 1 else mask.reshape(-1, *mask.shape[-2:])
            hides = mask[:, :rows, :columns].expand(batches, -1, -1)
            if self.sparse_mode == DEFAULT_MASK and rows > 1:
                hides = hides | self._outside(0, self.pre_tokens, self.next_tokens)
            return hides
        own = [self.columns(batch) - self.rows(batch) for batch in range(batches)]
        if self.sparse_mode == LEFT_UP_CAUSAL:
            return torch.stack([self._outside(0, NO_LIMIT, 0)] * batches)
        if self.sparse_mode == RIGHT_DOWN_CAUSAL:
            return torch.stack([self._outside(shift, NO_LIMIT, 0) for shift in own])
        return torch.stack([self._outside(shift, self.pre_tokens, self.next_tokens) for shift in own])

    def _outside(self, shift: int, before: int, after: int) -> torch.Tensor:
        """[rows, columns] True where a column is further away than that from its row's, which is row + shift."""
        rows, columns = self.query.shape[2], self.key.shape[2]
        distance = torch.arange(columns)[None] - torch.arange(rows)[:, None] - shift
        return (distance > after) | (distance < -before)


def check_fused_infer(call: Call) -> None:
    """Both versions of the operator of inference."""
    _check_tensors(call, (torch.float16, torch.bfloat16))
    _check_heads(call)
    require(call.heads // call.kv_heads <= 64, "head ratio", f"at most 64, got {call.heads} over {call.kv_heads}")
    head_dim, rows, columns = call.query.shape[3], call.query.shape[2], call.key.shape[2]
    require(head_dim <= 512, "head_dim", f"at most 512, got {head_dim}")
    require(head_dim % 16 == 0, "head_dim", f"a multiple of 16, got {head_dim}")
    require(call.query.shape[0] <= 65536, "batch", f"at most 65536, got {call.query.shape[0]}")
    require(rows > 1 or columns <= 262144, "columns", f"at most 262144 for one row, got {columns}")
    _check_lengths("query lengths", call.query_lengths, call.query.shape[0], rows)
    _check_lengths("actual lengths", call.key_lengths, call.query.shape[0], columns)
    require(call.sparse_mode in (0, 1, 2, 3, 4, 9), "sparse_mode", f"unknown: {call.sparse_mode}")
    require(call.sparse_mode != TREE_MASK, "sparse_mode", "9 is for latent attention, with query_rope and key_rope")
    require(call.inner_precise in (0, 1, 2, 3), "inner_precise", f"one of 0 to 3, got {call.inner_precise}")
    require(rows > 1 or call.inner_precise < 2, "inner_precise", f"0 or 1 for one row, got {call.inner_precise}")
    _check_mask(call, (torch.bool, torch.int8, torch.uint8))
    own_mask = call.mask is not None and call.sparse_mode in (DEFAULT_MASK, ALL_MASK)
    if own_mask and rows > 1:
        require(call.inner_precise >= 2, "inner_precise", "2 or 3 is advised for a mask of one's own")
    if call.inner_precise < 2:
        _check_hidden_rows(call)


def check_fusion(call: Call) -> None:
    """The operator of training."""
    _check_tensors(call, (torch.float16, torch.bfloat16, torch.float32))
    _check_heads(call)
    head_dim = call.query.shape[3]
    require(1 <= head_dim <= 768, "head_dim", f"1 to 768, got {head_dim}")
    require(call.sparse_mode in range(9), "sparse_mode", f"unknown: {call.sparse_mode}")
    if call.sparse_mode > BAND:
        raise NotImplementedError(f"not simulated: sparse_mode = {call.sparse_mode}")
    require(call.inner_precise == 0, "inner_precise", f"not simulated but 0, got {call.inner_precise}")
    _check_mask(call, (torch.bool, torch.uint8))


def _check_tensors(call: Call, dtypes: tuple[torch.dtype, ...]) -> None:
    require(call.scale != 1, "scale", "left out, or 1: the default scales nothing")
    tables = {"query": call.query, "key": call.key, "value": call.value}
    for name, tensor in tables.items():
        require(tensor.dtype in dtypes, "dtype", f"{name} is {tensor.dtype}")
        require(tensor.dtype == call.query.dtype, "dtype", f"{name} is {tensor.dtype}, the query {call.query.dtype}")
        require(tensor.device == call.query.device, "device", f"{name} is on {tensor.device}, not {call.query.device}")
        require(tensor.numel() > 0, "shape", f"{name} is empty")
    require(call.key.shape == call.value.shape, "shape", f"of key {call.key.shape}, of value {call.value.shape}")
    require(call.key.shape[0] == call.query.shape[0], "shape", "key and query have another batch")
    require(call.key.shape[3] == call.query.shape[3], "shape", "key and query have another head_dim")


def _check_heads(call: Call) -> None:
    own = call.query.shape[1], call.key.shape[1]
    require(own == (call.heads, call.kv_heads), "heads", f"tensors have {own}, arguments {(call.heads, call.kv_heads)}")
    require(call.heads % call.kv_heads == 0, "heads", f"{call.heads} query heads over {call.kv_heads}")
    require(call.heads <= 256, "heads", f"at most 256, got {call.heads}")


def _check_lengths(rule: str, lengths: object, batches: int, longest: int) -> None:
    if lengths is None:
        return
    require(isinstance(lengths, (list, tuple)), rule, f"a list of int, got {type(lengths).__name__}")
    assert isinstance(lengths, (list, tuple))
    require(all(type(length) is int for length in lengths), rule, f"a list of int, got {lengths}")
    require(len(lengths) == 1 or len(lengths) >= batches, rule, f"one, or one a batch, got {len(lengths)}")
    require(all(0 < length <= longest for length in lengths), rule, f"1 to {longest}, got {list(lengths)}")


def _check_mask(call: Call, dtypes: tuple[torch.dtype, ...]) -> None:
    mask, rows, columns = call.mask, call.query.shape[2], call.key.shape[2]
    if mask is None:
        require(call.sparse_mode == DEFAULT_MASK, "sparse_mode", f"{call.sparse_mode} needs a mask")
        return
    require(mask.dtype in dtypes, "mask dtype", f"expected one of {dtypes}, got {mask.dtype}")
    require(mask.device == call.query.device, "device", f"the mask is on {mask.device}, not {call.query.device}")
    require(mask.is_contiguous(), "contiguity", "the mask is not contiguous")
    values = mask.cpu()
    boolean = values.dtype == torch.bool or bool(((values == 0) | (values == 1)).all())
    require(boolean, "mask meaning", "1 hides, 0 shows; there is no other value")
    if call.sparse_mode in (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND):
        square = mask.dim() in (2, 3, 4) and mask.shape[-2:] == (CAUSAL, CAUSAL) and mask.numel() == CAUSAL**2
        require(square, "causal mask", f"mode {call.sparse_mode} takes 2048 x 2048, got {tuple(mask.shape)}")
        above = torch.equal(values.bool().reshape(CAUSAL, CAUSAL), _above_the_diagonal())
        require(above, "causal mask", "True above the diagonal and nowhere else")
        return
    batches = call.query.shape[0]
    flat = (batches, columns) if rows == 1 else (rows, columns)
    whole = {flat, (1, rows, columns), (1, 1, rows, columns), (batches, 1, rows, columns)}
    # Sides may be rounded up to the alignment of the unit; a mask that is merely larger is not documented.
    aligned = {(*shape[:-1], -(-columns // step) * step) for shape in whole for step in (16, 32)}
    require(tuple(mask.shape) in whole | aligned, "mask shape", f"expected one of {whole}, got {tuple(mask.shape)}")


@cache
def _above_the_diagonal() -> torch.Tensor:
    return torch.ones(CAUSAL, CAUSAL, dtype=torch.bool).triu(1)


def _check_hidden_rows(call: Call) -> None:
    hides = call.hides()
    if hides is None:
        return
    for batch in range(call.query.shape[0]):
        sees = ~hides[batch, : call.rows(batch), : call.columns(batch)]
        require(bool(sees.any(dim=-1).all()), "hidden row", "a row that sees nothing needs inner_precise 2 or 3")


def _of_batch(lengths: Sequence[int] | None, batch: int, whole: int) -> int:
    if lengths is None:
        return whole
    return lengths[0] if len(lengths) == 1 else lengths[batch]
