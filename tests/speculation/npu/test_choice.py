"""Which attention a model gets on an Ascend device, and that the reason for another one is told."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from eagle_pangu.speculation.attention.eager import eager_attention
from eagle_pangu.speculation.devices.base import Attention, AttentionError, HeadShape
from eagle_pangu.speculation.devices.comparison import compare_with_eager
from eagle_pangu.speculation.devices.npu.choice import NAMES, choose_attention
from eagle_pangu.speculation.plan import ForwardPlan
from tests.simulated_npu import operators
from tests.speculation.engines import prompt
from tests.speculation.npu.operator_device import operator_engine

CPU = torch.device("cpu")
V2, V1, FUSION = "npu_fused_infer_attention_score_v2", "npu_fused_infer_attention_score", "npu_fusion_attention"
HEADS = HeadShape(heads=8, kv_heads=2, head_dim=32, dtype=torch.bfloat16)


def choose(name: str, heads: HeadShape = HEADS, torch_npu: Any = operators) -> Attention:
    return choose_attention(name, heads, torch_npu, CPU)


def only(*names: str) -> Any:
    """A torch_npu with these operators and no other."""
    return SimpleNamespace(__version__="9.9.9", **{name: getattr(operators, name) for name in names})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])
def test_what_is_asked_for_by_name_is_had_or_refused(name: str, dtype: torch.dtype) -> None:
    attention = choose(name, HEADS._replace(dtype=dtype))
    assert (attention.name, attention.fallback_reason) == (name, "")


def test_auto_is_the_newer_operator_of_inference_that_is_there() -> None:
    assert choose("auto")[:2] == (V2, "")
    assert choose("auto", torch_npu=only(V1, FUSION))[:2] == (V1, "")


def test_auto_falls_back_to_eager_attention_and_says_why() -> None:
    attention = choose("auto", torch_npu=only(FUSION))
    assert attention.name == "eager"
    assert attention.masked is eager_attention
    assert attention.fallback_reason == f"torch_npu 9.9.9 has none of {V2}, {V1}"
    with pytest.raises(AttentionError, match=f"{V2} is not in torch_npu 9.9.9"):
        choose(V2, torch_npu=only(V1))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttentionError, match="attention flash is not one of device npu; expected auto, npu_fused"):
        choose("flash")


@pytest.mark.parametrize(
    ("heads", "limit"),
    [
        (HEADS._replace(dtype=torch.float32), "expected dtype float16 or bfloat16, got float32"),
        (HEADS._replace(head_dim=24), "expected head_dim of at most 512, a multiple of 16, got 24"),
        (HEADS._replace(head_dim=528), "expected head_dim of at most 512, a multiple of 16, got 528"),
        (HEADS._replace(heads=257, kv_heads=257), "expected at most 256 query heads, got 257"),
        (HEADS._replace(heads=130, kv_heads=2), "query heads a KV head, at most 64, got 130 over 2"),
        (
            HEADS._replace(slot_columns=262145),
            "expected slots of at most 262144 columns, spare ones included, got 262145",
        ),
        (HEADS._replace(heads=9), "a whole number of query heads a KV head, at most 64, got 9 over 2"),
    ],
)
@pytest.mark.parametrize("name", [V2, V1])
def test_heads_past_a_limit_are_refused_with_limit_and_value(name: str, heads: HeadShape, limit: str) -> None:
    with pytest.raises(AttentionError, match=f"{name}: .*{limit}"):
        choose(name, heads)
    if heads.heads % heads.kv_heads == 0:
        attention = choose("auto", heads)
        assert attention.name == "eager"
        assert limit in attention.fallback_reason


def test_slots_of_the_longest_that_an_operator_serves_are_served() -> None:
    assert choose("auto", HEADS._replace(slot_columns=262144)).name == V2
    assert choose(FUSION, HEADS._replace(slot_columns=2**20)).name == FUSION


def test_a_slot_too_long_for_the_operator_is_refused_or_told_of_at_load(tmp_path: Path) -> None:
    """Of 262144 tokens as asked for; the spare columns are what is too many."""
    options = {"slot_capacity": 262144, "chunk": 2, "max_rows": 1}
    numerics = operator_engine(tmp_path / "model", **options).numerics
    assert numerics.attention == "eager"
    assert "at most 262144 columns, spare ones included, got 262208" in numerics.attention_fallback_reason
    with pytest.raises(AttentionError, match="got 262208"):
        operator_engine(tmp_path / "model", attention=V2, **options)
    fits = operator_engine(tmp_path / "model", **{**options, "slot_capacity": 262144 - 64})
    assert fits.numerics.attention == V2
    fits.prefill(fits.open_slot(), prompt(1), want_logits=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "auto"])
def test_only_the_operators_of_inference_read_slots_whole(name: str) -> None:
    assert choose(name).whole_slots == (name in (V2, V1))


def test_the_operator_of_training_has_limits_of_its_own() -> None:
    assert choose(FUSION, HEADS._replace(dtype=torch.float32)).name == FUSION
    with pytest.raises(AttentionError, match="head_dim of at most 768, got 800"):
        choose(FUSION, HEADS._replace(head_dim=800))


@pytest.mark.parametrize("heads", [(8, 8), (64, 1), (12, 6), (1, 1)])
def test_any_ratio_of_heads_within_the_limits_is_served(heads: tuple[int, int]) -> None:
    assert choose("auto", HeadShape(*heads, 16, torch.float16)).name == V2


def test_an_operator_that_fails_on_this_chip_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("161002: not supported on Ascend310P\n[ERROR] a report of many lines")

    monkeypatch.setattr(operators, V2, fails)
    assert choose("auto").fallback_reason == f"{V2} fails on one row: 161002: not supported on Ascend310P"
    with pytest.raises(AttentionError, match="not supported on Ascend310P"):
        choose(V2)


def test_an_operator_that_knows_other_arguments_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(query: Any, key: Any, value: Any, *, scale_value: float = 1.0) -> Any:
        raise AssertionError("never called")

    monkeypatch.setattr(operators, V2, older)
    assert "unexpected keyword" in choose("auto").fallback_reason


def test_an_operator_that_lets_leftover_memory_through_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighted by zero, a column past the actual length does no harm until it holds NaN, and memory may."""
    real = operators.npu_fused_infer_attention_score_v2

    def leaky(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        return real(query, key, value, **options)[0] + 0 * value.sum(), None

    monkeypatch.setattr(operators, V2, leaky)
    assert (
        choose("auto").fallback_reason
        == f"{V2} differs from eager attention on one row: by nan, expected at most 0.031"
    )


def test_the_comparison_meets_every_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = set()
    real = operators.npu_fused_infer_attention_score_v2

    def seen(query: torch.Tensor, *args: Any, **options: Any) -> Any:
        mask = options.get("atten_mask")
        kinds.add((query.shape[0] > 1, query.shape[2] > 1, mask is not None, options.get("sparse_mode")))
        return real(query, *args, **options)

    monkeypatch.setattr(operators, V2, seen)
    choose(V2, HEADS._replace(heads=2))
    over_slot = {(False, False, False, None), (False, True, True, 3), (False, True, True, 0), (False, False, True, 0)}
    masked = {(True, True, True, 0), (True, False, True, 0)}
    assert kinds == over_slot | masked


def test_the_comparison_is_not_satisfied_by_nothing_at_all() -> None:
    def zeros(query: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    for attention in (
        choose("eager")._replace(over_slot=zeros),
        choose("eager")._replace(masked=zeros),
    ):
        with pytest.raises(AttentionError, match="differs from eager attention on one row"):
            compare_with_eager(attention, HEADS, CPU)


def test_the_comparison_notices_a_chain_whose_end_alone_is_wrong() -> None:
    honest = choose("eager")

    def wrong(query: torch.Tensor, key: Any, value: Any, plan: ForwardPlan, scale: float) -> torch.Tensor:
        attended = honest.over_slot(query, key, value, plan, scale)
        return attended + 1 if plan.is_chain and plan.first_row else attended

    with pytest.raises(AttentionError, match="differs from eager attention on the end of a chain"):
        compare_with_eager(honest._replace(over_slot=wrong), HEADS, CPU)


@pytest.mark.parametrize("head", [0, 1])
def test_the_comparison_notices_that_all_heads_get_the_mask_of_one(head: int) -> None:
    def wrong(query: torch.Tensor, key: Any, value: Any, keep: torch.Tensor, scale: float) -> torch.Tensor:
        return eager_attention(query, key, value, keep[0, head] if keep.dim() == 4 else keep, scale)

    with pytest.raises(AttentionError, match="under a mask of each head"):
        compare_with_eager(choose("eager")._replace(masked=wrong), HEADS, CPU)


def test_only_the_choice_decides_and_it_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator does later is not looked at: an error goes up, it does not change the attention."""
    attention = choose("auto")
    monkeypatch.delattr(operators, V2)
    compare_with_eager(attention, HEADS, CPU)


def test_the_stand_in_is_no_part_of_this_process() -> None:
    assert isinstance(operators, ModuleType)
    assert not hasattr(torch, "npu")
