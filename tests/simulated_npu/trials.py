"""Ways to spoil our calls of Ascend's operators, and to find out what notices: the trials of `mutations`.

A trial spoils the project's own code, by wrapping an operator or replacing a function of ours, and lets it work; it
returns what caught the mutation, and fails where nothing did.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch

from eagle_pangu.speculation.devices.base import AttentionError, HeadShape
from eagle_pangu.speculation.devices.npu import masks
from eagle_pangu.speculation.devices.npu.choice import FUSION_OPERATOR, choose_attention
from eagle_pangu.speculation.devices.npu.fused_infer import ARGUMENTS
from eagle_pangu.speculation.plan import ForwardPlan
from eagle_pangu.speculation.tree import TokenTree
from tests.simulated_npu import operators
from tests.simulated_npu.operator_rules import ContractError
from tests.speculation.npu.operator_device import NEAR, furthest_row, operator_engine

HEADS = HeadShape(heads=8, kv_heads=2, head_dim=32, dtype=torch.bfloat16)
CPU = torch.device("cpu")
V2, V1 = ARGUMENTS

Options = dict[str, Any]


class Catcher(Enum):
    """What notices a mutation."""

    CONTRACT = "refused: the operator's documented contract"
    COMPARISON = "comparison with eager attention at start"
    ROWS = "test: tree rows equal one-by-one decoding"
    HOST = "refused: check on the host, before anything is uploaded"


class Caught(NamedTuple):
    """What caught a mutation, and its words."""

    by: Catcher
    text: str


Trial = Callable[[pytest.MonkeyPatch, str], Caught]
"""(monkeypatch, operator) -> what caught the mutation."""


def at_start(monkeypatch: pytest.MonkeyPatch, operator: str) -> Caught:
    """Choose an attention as the code stands: by name it is refused, and "auto" gives eager attention and says why."""
    with pytest.raises(AttentionError) as refusal:
        choose_attention(operator, HEADS, operators, CPU)
    if operator != FUSION_OPERATOR:
        if operator == V1:
            monkeypatch.delattr(operators, V2)
        chosen = choose_attention("auto", HEADS, operators, CPU)
        assert (chosen.name, chosen.fallback_reason) == ("eager", str(refusal.value))
    refused = isinstance(refusal.value.__cause__, ContractError)
    assert refused or "differs from eager" in str(refusal.value)
    return Caught(Catcher.CONTRACT if refused else Catcher.COMPARISON, str(refusal.value))


def call(change: Callable[[Options], None]) -> Trial:
    """Arguments changed on their way to the operator; those whose name differs have one name here."""

    def trial(monkeypatch: pytest.MonkeyPatch, operator: str) -> Caught:
        real = getattr(operators, operator)
        names = ARGUMENTS[operator]._asdict() if operator in ARGUMENTS else {"heads": "head_num"}
        common = {theirs: ours for ours, theirs in names.items()}

        def spoiled(query: Any, key: Any, value: Any, *positional: Any, **options: Any) -> Any:
            options |= dict(zip(("head_num", "input_layout"), positional, strict=False))
            given = {"query": query, "key": key, "value": value}
            given |= {common.get(name, name): option for name, option in options.items()}
            change(given)
            tables = [given.pop(name) for name in ("query", "key", "value")]
            return real(*tables, **{names.get(name, name): option for name, option in given.items()})

        monkeypatch.setattr(operators, operator, spoiled)
        return at_start(monkeypatch, operator)

    return trial


def own_mask(change: Callable[[torch.Tensor], Any]) -> Trial:
    """The mask of a tree changed on its way; other calls as they are."""

    def apply(given: Options) -> None:
        if given.get("atten_mask") is not None and given.get("sparse_mode") == 0:
            given["atten_mask"] = change(given["atten_mask"])

    return call(apply)


def instead(place: Any, name: str, replacement: Any) -> Trial:
    """A function of ours replaced."""

    def trial(monkeypatch: pytest.MonkeyPatch, operator: str) -> Caught:
        monkeypatch.setattr(place, name, replacement)
        return at_start(monkeypatch, operator)

    return trial


def change(**values: Any) -> Trial:
    """Options set in every call, or computed from what they are."""

    def apply(given: Options) -> None:
        for name, value in values.items():
            given[name] = value(given) if callable(value) else value

    return call(apply)


def where(kept: Callable[[Options], bool], **values: Any) -> Trial:
    """Options set in the calls of one kind."""
    return call(lambda given: given.update(values) if kept(given) else None)


def without(name: str) -> Trial:
    """An option left out."""
    return call(lambda given: given.pop(name, None) and None)


def is_tree(given: Options) -> bool:
    return given.get("atten_mask") is not None and given["sparse_mode"] == 0 and given["query"].shape[2] > 1


def is_chain(given: Options) -> bool:
    return given.get("sparse_mode") == 3


def is_one_row(given: Options) -> bool:
    return bool(given["query"].shape[2] == 1)


def repeated(table: torch.Tensor) -> torch.Tensor:
    """Of a slot; heads that take the place of the batch (a dense mask) are left alone."""
    return table.repeat_interleave(HEADS.heads // HEADS.kv_heads if table.shape[1] > 1 else 1, dim=1)


def unturned(keep: torch.Tensor) -> torch.Tensor:
    """A dense mask as the operators take it, but for its meaning."""
    return ~masks.hidden_of_heads(keep)


def masks_by_rows() -> Callable[..., torch.Tensor]:
    kept: dict[int, torch.Tensor] = {}
    real = masks.PlanMasks.of

    def of(self: masks.PlanMasks, plan: ForwardPlan, columns: int) -> torch.Tensor:
        return kept.setdefault(plan.rows, real(self, plan, columns))

    return of


_REAL_MASK = masks.PlanMasks.of


def narrow_mask(self: masks.PlanMasks, plan: ForwardPlan, columns: int) -> torch.Tensor:
    return _REAL_MASK(self, plan, plan.columns)


def descendants_for_ancestors(monkeypatch: pytest.MonkeyPatch, operator: str) -> Caught:
    """The comparison at start reads the same tree as the operator does, so this is for the rows to show."""
    ancestors = TokenTree.mask.func  # type: ignore[attr-defined]  # of the cached property

    def transposed(tree: TokenTree) -> Any:
        chain = tree.parents[-1] == max(0, tree.rows - 2)
        return ancestors(tree) if chain else ancestors(tree).T

    with TemporaryDirectory() as directory:
        engine = operator_engine(Path(directory) / "model", attention=operator)
    monkeypatch.setattr(TokenTree, "mask", property(transposed))
    difference = furthest_row(engine, engine.open_slot())
    assert difference > 2 * NEAR
    return Caught(Catcher.ROWS, f"logits differ by {difference}")


def host(error: type[Exception], act: Callable[[], object]) -> Trial:
    def trial(monkeypatch: pytest.MonkeyPatch, operator: str) -> Caught:
        with pytest.raises(error) as refusal:
            act()
        return Caught(Catcher.HOST, str(refusal.value))

    return trial


def validate(parents: list[int]) -> object:
    tree = TokenTree.build(range(len(parents)), parents)
    return tree.validate(vocab_size=9, max_rows=9, max_depth=9)
