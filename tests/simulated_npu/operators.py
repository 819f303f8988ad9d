"""A stand-in for the fused operators of torch_npu, which takes the place of that module in tests.

Signatures, names and defaults are the documented ones. Each call is held to the documented contract (`operator_rules`)
and computed in plain torch, in float32; what the documentation leaves undefined holds NaN. Tensors may lie on any
device that is one for all. Of layouts and modes it knows those that a decoder could use; others are refused as not
simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.simulated_npu import operator_rules as rules
from tests.simulated_npu.operator_rules import NO_LIMIT, Call

__version__ = torch.__version__.partition("+")[0]

calls: Counter[str] = Counter()
"""Operator -> calls that kept the contract, since the process began."""


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: Any = None,
    key_rope: Any = None,
    pse_shift: Any = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Any = None,
    dequant_scale_query: Any = None,
    dequant_scale_key: Any = None,
    dequant_offset_key: Any = None,
    dequant_scale_value: Any = None,
    dequant_offset_value: Any = None,
    dequant_scale_key_rope: Any = None,
    quant_scale_out: Any = None,
    quant_offset_out: Any = None,
    quant_scale_p: Any = None,
    learnable_sink: Any = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    query_dtype: Any = None,
    key_dtype: Any = None,
    value_dtype: Any = None,
    query_rope_dtype: Any = None,
    key_rope_dtype: Any = None,
    key_shared_prefix_dtype: Any = None,
    value_shared_prefix_dtype: Any = None,
    dequant_scale_query_dtype: Any = None,
    dequant_scale_key_dtype: Any = None,
    dequant_scale_value_dtype: Any = None,
    dequant_scale_key_rope_dtype: Any = None,
    out_dtype: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Version 2 of the operator of inference."""
    given = dict(locals())
    kv_heads = num_key_value_heads or num_query_heads
    call = Call(
        *_in_bnsd(query, key, value, input_layout, num_query_heads, kv_heads),
        *(atten_mask, num_query_heads, kv_heads, softmax_scale, sparse_mode, inner_precise, pre_tokens, next_tokens),
        *(actual_seq_qlen, actual_seq_kvlen),
    )
    return _fused_infer("npu_fused_infer_attention_score_v2", call, given)


def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: Any = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    dequant_scale1: Any = None,
    quant_scale1: Any = None,
    dequant_scale2: Any = None,
    quant_scale2: Any = None,
    quant_offset2: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    block_table: Any = None,
    query_padding_size: Any = None,
    kv_padding_size: Any = None,
    key_antiquant_scale: Any = None,
    key_antiquant_offset: Any = None,
    value_antiquant_scale: Any = None,
    value_antiquant_offset: Any = None,
    key_shared_prefix: Any = None,
    value_shared_prefix: Any = None,
    actual_shared_prefix_len: Any = None,
    query_rope: Any = None,
    key_rope: Any = None,
    key_rope_antiquant_scale: Any = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Version 1 of the operator of inference."""
    given = dict(locals())
    kv_heads = num_key_value_heads or num_heads
    call = Call(
        *_in_bnsd(query, key, value, input_layout, num_heads, kv_heads),
        *(atten_mask, num_heads, kv_heads, scale, sparse_mode, inner_precise, pre_tokens, next_tokens),
        *(actual_seq_lengths, actual_seq_lengths_kv),
    )
    return _fused_infer("npu_fused_infer_attention_score", call, given)


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """The operator of training."""
    given = dict(locals())
    if input_layout != "BNSD":
        raise NotImplementedError(f"not simulated: layout {input_layout}")
    tables = (rules.in_bnsd(name, given[name], input_layout, 0) for name in ("query", "key", "value"))
    call = Call(
        *(*tables, atten_mask, head_num, key.shape[1], scale, sparse_mode, inner_precise, pre_tockens, next_tockens),
        *(None, None),
    )
    rules.refuse_unknown(given, ("pse", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink"))
    rules.require(keep_prob == 1, "keep_prob", f"an inference drops nothing: expected 1, got {keep_prob}")
    rules.check_fusion(call)
    calls["npu_fusion_attention"] += 1
    statistics = query.new_full((*query.shape[:3], 8), float("nan"), dtype=torch.float32)
    return _attend(call), statistics, statistics, query.new_empty(0), 0, 0, 0


_KNOWN = {"query", "key", "value", "atten_mask", "num_heads", "num_query_heads", "num_key_value_heads", "scale"} | {
    *("softmax_scale", "input_layout", "sparse_mode", "inner_precise", "pre_tokens", "next_tokens", "actual_seq_qlen"),
    *("actual_seq_kvlen", "actual_seq_lengths", "actual_seq_lengths_kv"),
}


def _in_bnsd(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: str, heads: int, kv_heads: int
) -> Iterator[torch.Tensor]:
    """The three tensors as views of that layout; each must be contiguous in the one it came in."""
    for name, tensor, own_heads in (("query", query, heads), ("key", key, kv_heads), ("value", value, kv_heads)):
        rules.require(tensor.is_contiguous(), "contiguity", f"{name} is not contiguous")
        yield rules.in_bnsd(name, tensor, layout, own_heads)


def _fused_infer(name: str, call: Call, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rules.refuse_unknown(given, given.keys() - _KNOWN)
    rules.check_fused_infer(call)
    calls[name] += 1
    attended, layout = _attend(call), given["input_layout"]
    if layout != "BNSD":
        attended = attended.transpose(1, 2).reshape(given["query"].shape)
    return attended, call.query.new_zeros(1, dtype=torch.float32)


def _attend(call: Call) -> torch.Tensor:
    """[batch, heads, rows, head_dim], written out on the host; rows past the actual length of the query hold NaN."""
    query, key, value = (tensor.cpu().float() for tensor in (call.query, call.key, call.value))
    result = torch.full_like(query, float("nan"))
    hides = call.hides()
    for batch in range(query.shape[0]):
        rows, columns = call.rows(batch), call.columns(batch)
        own_key, own_value = (
            table[batch, :, :columns].repeat_interleave(call.heads // call.kv_heads, dim=0) for table in (key, value)
        )
        scores = query[batch, :, :rows] @ own_key.transpose(-1, -2) * call.scale
        if hides is not None:
            scores = scores.masked_fill(hides[batch, :rows, :columns], float("-inf"))
        # A row that sees nothing comes out as NaN: the documentation does not say what it holds.
        result[batch, :, :rows] = scores.softmax(dim=-1) @ own_value
    return result.to(call.query.dtype).to(call.query.device)
