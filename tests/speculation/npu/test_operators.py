"""The stand-in for Ascend's operators: it computes what eager attention does, and each documented rule bites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.simulated_npu import operators
from tests.simulated_npu.operator_rules import ContractError

HEADS, KV_HEADS, ROWS, COLUMNS, HEAD_DIM = 4, 2, 3, 16, 32
SCALE = HEAD_DIM**-0.5
CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
Options = dict[str, Any]


def tensors(rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.bfloat16) -> Options:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (HEADS, rows), "key": (KV_HEADS, columns), "value": (KV_HEADS, columns)}
    return {
        name: torch.randn(1, heads, length, HEAD_DIM, generator=generator).to(dtype)
        for name, (heads, length) in shapes.items()
    }


def v2(tables: Options, **options: Any) -> torch.Tensor:
    known = {"num_query_heads": HEADS, "num_key_value_heads": KV_HEADS, "softmax_scale": SCALE, "input_layout": "BNSD"}
    return operators.npu_fused_infer_attention_score_v2(*tables.values(), **{**known, **options})[0]


def v1(tables: Options, **options: Any) -> torch.Tensor:
    known = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": SCALE, "input_layout": "BNSD"}
    return operators.npu_fused_infer_attention_score(*tables.values(), **{**known, **options})[0]


def fusion(tables: Options, head_num: int = HEADS, layout: str = "BNSD", **options: Any) -> torch.Tensor:
    return operators.npu_fusion_attention(*tables.values(), head_num, layout, **{"scale": SCALE, **options})[0]


def reference(tables: Options, hides: torch.Tensor | None = None, columns: int = COLUMNS) -> torch.Tensor:
    """[1, heads, rows, head_dim] by torch's own attention, whose mask means keep."""
    query, key, value = (table.float() for table in tables.values())
    key, value = (table[:, :, :columns].repeat_interleave(HEADS // KV_HEADS, dim=1) for table in (key, value))
    keep = None if hides is None else ~hides[..., :columns]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=keep, scale=SCALE)


def close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(result.float(), expected, atol=0.02)


def window(offset: int) -> torch.Tensor:
    """[rows, columns], True past row + offset."""
    return torch.arange(COLUMNS)[None] > torch.arange(ROWS)[:, None] + offset


def random_mask(rows: int = ROWS) -> torch.Tensor:
    mask = torch.rand(1, 1, rows, COLUMNS, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = False
    return mask


INFER = pytest.mark.parametrize("infer", [v2, v1])


@INFER
def test_a_mask_hides_where_it_is_true(infer: Callable[..., torch.Tensor]) -> None:
    mask = random_mask()
    for given in (mask, mask.to(torch.uint8), mask.to(torch.int8), mask[0], mask[0, 0]):
        assert close(infer(tensors(), atten_mask=given, inner_precise=2), reference(tensors(), mask))
    assert close(fusion(tensors(), atten_mask=mask), reference(tensors(), mask))


@INFER
def test_the_causal_modes_lean_on_one_corner_or_the_other(infer: Callable[..., torch.Tensor]) -> None:
    left = infer(tensors(), atten_mask=CAUSAL, sparse_mode=2)
    right = infer(tensors(), atten_mask=CAUSAL, sparse_mode=3)
    short = infer(tensors(), atten_mask=CAUSAL, sparse_mode=3, **lengths(infer, [10]))
    assert close(left, reference(tensors(), window(0)))
    assert close(right, reference(tensors(), window(COLUMNS - ROWS)))
    assert close(short, reference(tensors(), window(10 - ROWS), 10))


def lengths(infer: Callable[..., torch.Tensor], columns: list[int], rows: list[int] | None = None) -> Options:
    names = ("actual_seq_kvlen", "actual_seq_qlen") if infer is v2 else ("actual_seq_lengths_kv", "actual_seq_lengths")
    return dict(zip(names, (columns, rows), strict=True))


@INFER
def test_what_lies_past_the_actual_lengths_is_neither_read_nor_defined(infer: Callable[..., torch.Tensor]) -> None:
    tables = tensors()
    tables["key"][:, :, 9:] = float("nan")
    result = infer(tables, **lengths(infer, [9], [2]))
    assert close(result[:, :, :2], reference(tensors(), columns=9)[:, :, :2])
    assert result[:, :, 2:].isnan().all()


@INFER
def test_tokens_limit_an_own_mask_from_the_top_left_corner(infer: Callable[..., torch.Tensor]) -> None:
    nothing = torch.zeros(1, 1, ROWS, COLUMNS, dtype=torch.bool)
    assert close(infer(tensors(), atten_mask=nothing, inner_precise=2, next_tokens=1), reference(tensors(), window(1)))


@INFER
def test_other_layouts_give_the_same_in_their_own_order(infer: Callable[..., torch.Tensor]) -> None:
    expected = infer(tensors())
    by_row = {name: table.transpose(1, 2).contiguous() for name, table in tensors().items()}
    flat = {name: table.flatten(2) for name, table in by_row.items()}
    assert torch.equal(infer(by_row, input_layout="BSND").transpose(1, 2), expected)
    assert torch.equal(infer(flat, input_layout="BSH").view(1, ROWS, HEADS, HEAD_DIM).transpose(1, 2), expected)


def test_a_batch_has_its_own_masks_and_lengths() -> None:
    tables = {name: table.repeat(2, 1, 1, 1) for name, table in tensors().items()}
    mask = torch.cat([random_mask(), window(0)[None, None]])
    result = v2(tables, atten_mask=mask, inner_precise=2, actual_seq_kvlen=[9, 12])
    for batch, columns in enumerate((9, 12)):
        assert close(result[batch : batch + 1], reference(tensors(), mask[batch], columns))


def given(**tables: Callable[[torch.Tensor], torch.Tensor]) -> Options:
    return {name: tables.get(name, lambda table: table)(table) for name, table in tensors().items()}


OWN = {"atten_mask": random_mask(), "inner_precise": 2}
HIDDEN_ROW = random_mask()
HIDDEN_ROW[:, :, 1] = True
REFUSED: dict[str, tuple[str, Options, Options]] = {
    # what is wrong: rule, tensors, options of version 2
    "scale left out": ("scale", tensors(), {"softmax_scale": 1.0}),
    "float32": ("dtype", tensors(dtype=torch.float32), {}),
    "two dtypes": ("dtype", given(key=torch.Tensor.half), {}),
    "query not contiguous": ("contiguity", given(query=lambda table: table.mT.contiguous().mT), {}),
    "key cut": ("contiguity", given(key=lambda table: table[:, :, :8], value=lambda table: table[:, :, :8]), {}),
    "mask not contiguous": ("contiguity", tensors(), {**OWN, "atten_mask": random_mask().mT.contiguous().mT}),
    "another device": ("device", given(value=lambda table: table.to("meta")), {}),
    "default layout": ("layout", tensors(), {"input_layout": "BSH"}),
    "heads of another axis": ("heads", tensors(), {"input_layout": "BSND"}),
    "head count": ("heads", tensors(), {"num_query_heads": 2}),
    "KV head count": ("heads", tensors(), {"num_key_value_heads": 0}),
    "key and value of other lengths": ("shape", given(value=lambda table: table[:, :, :8].contiguous()), {}),
    "head_dim not of 16": ("head_dim", {name: table[..., :24].contiguous() for name, table in tensors().items()}, {}),
    "head_dim too large": ("head_dim", {name: table.repeat(1, 1, 1, 17) for name, table in tensors().items()}, {}),
    "unknown mode": ("sparse_mode", tensors(), {"sparse_mode": 5}),
    "tree mode": ("sparse_mode", tensors(), {"sparse_mode": 9}),
    "all masked without a mask": ("sparse_mode", tensors(), {"sparse_mode": 1}),
    "causal without a mask": ("sparse_mode", tensors(), {"sparse_mode": 3}),
    "causal with an own mask": ("causal mask", tensors(), {"atten_mask": random_mask(), "sparse_mode": 3}),
    "causal with its mask turned": ("causal mask", tensors(), {"atten_mask": ~CAUSAL, "sparse_mode": 3}),
    "causal with the diagonal": (
        "causal mask",
        tensors(),
        {"atten_mask": torch.ones_like(CAUSAL).triu(), "sparse_mode": 3},
    ),
    "float mask": ("mask dtype", tensors(), {**OWN, "atten_mask": random_mask().float()}),
    "additive mask": ("mask meaning", tensors(), {**OWN, "atten_mask": random_mask().char() * -100}),
    "mask too narrow": ("mask shape", tensors(), {**OWN, "atten_mask": random_mask()[..., :8].contiguous()}),
    "mask of too many rows": ("mask shape", tensors(), {**OWN, "atten_mask": random_mask(rows=4)}),
    "mask a head": ("mask shape", tensors(), {**OWN, "atten_mask": random_mask().repeat(1, HEADS, 1, 1)}),
    "hidden row": ("hidden row", tensors(), {"atten_mask": CAUSAL, "sparse_mode": 3, "actual_seq_kvlen": [2]}),
    "own mask without correction": ("inner_precise", tensors(), {"atten_mask": random_mask()}),
    "correction of one row": ("inner_precise", tensors(rows=1), {"inner_precise": 2}),
    "unknown precision": ("inner_precise", tensors(), {"inner_precise": 4}),
    "length as a tensor": ("actual lengths", tensors(), {"actual_seq_kvlen": torch.tensor([4])}),
    "length of a float": ("actual lengths", tensors(), {"actual_seq_kvlen": [4.0]}),
    "length past the end": ("actual lengths", tensors(), {"actual_seq_kvlen": [COLUMNS + 1]}),
    "negative length": ("actual lengths", tensors(), {"actual_seq_kvlen": [-1]}),
    "query length past the end": ("query lengths", tensors(), {"actual_seq_qlen": [ROWS + 1]}),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_broken_rule_is_named(wrong: str) -> None:
    rule, tables, options = REFUSED[wrong]
    with pytest.raises(ContractError, match=f"^{rule}: "):
        v2(tables, **options)


def test_the_head_ratio_ends_at_64() -> None:
    tables = tensors()
    tables["query"] = tables["query"][:, :1].repeat(1, 65, 1, 1)
    tables |= {name: tables[name][:, :1].contiguous() for name in ("key", "value")}
    with pytest.raises(ContractError, match=r"^head ratio: "):
        v2(tables, num_query_heads=65, num_key_value_heads=1)


def test_a_row_that_sees_nothing_has_no_defined_result() -> None:
    result = v2(tensors(), atten_mask=HIDDEN_ROW, inner_precise=2)
    assert result[:, :, 1].isnan().all()
    assert not result[:, :, 0].isnan().any()


@pytest.mark.parametrize(
    ("rule", "tables", "options"),
    [
        ("scale", tensors(), {"scale": 1.0}),
        ("heads", tensors(), {"head_num": KV_HEADS}),
        ("dtype", given(key=torch.Tensor.float), {}),
        ("mask dtype", tensors(), {"atten_mask": random_mask().float()}),
        ("mask shape", tensors(), {"atten_mask": random_mask()[..., :8].contiguous()}),
        ("keep_prob", tensors(), {"keep_prob": 0.9}),
    ],
)
def test_a_broken_rule_of_the_operator_of_training_is_named(rule: str, tables: Options, options: Options) -> None:
    with pytest.raises(ContractError, match=f"^{rule}: "):
        fusion(tables, **options)


def test_float32_is_of_the_operator_of_training_alone() -> None:
    tables = tensors(dtype=torch.float32)
    assert torch.allclose(fusion(tables), reference(tables), atol=1e-5)


def test_everything_after_the_three_tensors_goes_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        operators.npu_fused_infer_attention_score_v2(*tensors().values(), None)


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="block_size"):
        v2(tensors(), block_size=128)
    with pytest.raises(NotImplementedError, match="TND"):
        v2(tensors(), input_layout="TND")


def test_calls_that_kept_the_contract_are_counted() -> None:
    before = operators.calls["npu_fused_infer_attention_score_v2"]
    v2(tensors())
    with pytest.raises(ContractError):
        v2(tensors(), sparse_mode=7)
    assert operators.calls["npu_fused_infer_attention_score_v2"] == before + 1
