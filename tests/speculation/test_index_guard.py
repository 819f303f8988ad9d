"""The index guard refuses what torch wraps or what an accelerator would follow anywhere, and lets the rest through."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from eagle_pangu.speculation.index_guard import IllegalIndexError, IndexGuard

Call = Callable[[torch.Tensor, torch.Tensor], object]
ROWS = 3  # entries of the dimension that the calls below index

# Each call indexes dimension 0 of a [ROWS, 4] table with a [2] index.
ONE_DIMENSION: dict[str, Call] = {
    "getitem": lambda table, index: table[index],
    "getitem_list": lambda table, index: table[index.tolist()],
    "getitem_after_slice": lambda table, index: table.T[:, index],
    "getitem_after_ellipsis": lambda table, index: table.T[..., index],
    "getitem_after_mask": lambda table, index: table.T[torch.tensor([True, True, False, False]), index],
    "getitem_two_indices": lambda table, index: table[index, torch.zeros_like(index)],
    "getitem_scalar_tensor": lambda table, index: table[index[-1]],
    "setitem": lambda table, index: table.__setitem__(index, 1.0),
    "setitem_scalar_tensor": lambda table, index: table.__setitem__(index[-1], 1.0),
    "index_put": lambda table, index: table.index_put((index,), torch.tensor(1.0)),
    "index_put_": lambda table, index: table.index_put_((index,), torch.tensor(1.0), accumulate=True),
    "index_select": lambda table, index: torch.index_select(table, 0, index),
    "index_select_out": lambda table, index: torch.index_select(table, 0, index, out=torch.empty(2, 4)),
    "index_add": lambda table, index: table.index_add(0, index, table[:2]),
    "index_add_": lambda table, index: table.index_add_(0, index, torch.ones(2, 4)),
    "index_copy": lambda table, index: table.index_copy(0, index, table[:2]),
    "index_copy_": lambda table, index: table.index_copy_(0, index, torch.ones(2, 4)),
    "index_fill": lambda table, index: table.index_fill(0, index, 1.0),
    "index_fill_": lambda table, index: table.index_fill_(0, index, torch.tensor(1.0)),
    "embedding": lambda table, index: functional.embedding(index, table),
    "embedding_bag": lambda table, index: functional.embedding_bag(index[None], table),
    "gather": lambda table, index: torch.gather(table, 0, index[:, None]),
    "gather_by_keyword": lambda table, index: torch.ops.aten.gather(table, dim=0, index=index[:, None]),
    "gather_out": lambda table, index: torch.gather(table, 0, index[:, None], out=torch.empty(2, 1)),
    "gather_negative_dimension": lambda table, index: torch.gather(table, -2, index[:, None]),
    "scatter": lambda table, index: table.scatter(0, index[:, None], 1.0),
    "scatter_": lambda table, index: table.scatter_(0, index[:, None], torch.ones(2, 1)),
    "scatter_add": lambda table, index: table.scatter_add(0, index[:, None], torch.ones(2, 1)),
    "scatter_reduce": lambda table, index: table.scatter_reduce(0, index[:, None], torch.ones(2, 1), "amax"),
    "take": lambda table, index: table[:, 0].take(index),
    "put": lambda table, index: table[:, 0].put(index, torch.ones(2)),
    "put_": lambda table, index: torch.zeros(ROWS).put_(index, torch.ones(2)),
    "take_along_dim": lambda table, index: torch.take_along_dim(table, index[:, None], 0),
    "take_along_dim_method": lambda table, index: table.take_along_dim(index[:, None], dim=0),
    "take_along_dim_flat": lambda table, index: table[:, 0].take_along_dim(index),
}

calls = pytest.mark.parametrize("call", ONE_DIMENSION.values(), ids=ONE_DIMENSION.keys())
inference = pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])


@pytest.fixture(autouse=True)
def index_watch() -> None:
    """Off: what torch does without a guard is told here too."""


@pytest.fixture
def guard() -> IndexGuard:
    return IndexGuard()


def arguments(values: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4.0 * ROWS).reshape(ROWS, 4), torch.tensor(values)


@inference
@calls
def test_a_negative_index_is_refused_whatever_the_operator(guard: IndexGuard, call: Call, inference: bool) -> None:
    with torch.inference_mode(inference), guard:
        table, index = arguments([0, -1])
        with pytest.raises(IllegalIndexError, match=r"aten\.\w+.*expected an index in \[0, \d\), got -1"):
            call(table, index)


@inference
@calls
def test_an_index_past_the_end_is_refused_whatever_the_operator(guard: IndexGuard, call: Call, inference: bool) -> None:
    with torch.inference_mode(inference), guard:
        table, index = arguments([0, ROWS])
        with pytest.raises(IndexError):  # x[zero-dim tensor] past the end is torch's own refusal
            call(table, index)


@inference
@calls
def test_a_legal_index_passes_and_is_counted(guard: IndexGuard, call: Call, inference: bool) -> None:
    with torch.inference_mode(inference):
        table, index = arguments([0, ROWS - 1])
        expected = call(table.clone(), index)
        with guard:
            result = call(table.clone(), index)
    assert guard.checked.total() >= 1
    if isinstance(expected, torch.Tensor):
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result, expected)


def test_the_error_names_operator_value_and_size(guard: IndexGuard) -> None:
    table, index = arguments([0, 7])
    with guard, pytest.raises(IllegalIndexError) as caught:
        torch.gather(table, 0, index[:, None])
    assert (caught.value.operator, caught.value.index, caught.value.size) == ("aten.gather.default", 7, ROWS)


def test_nothing_is_written_before_the_refusal(guard: IndexGuard) -> None:
    table, index = arguments([0, -1])
    before = table.clone()
    with guard, pytest.raises(IllegalIndexError):
        table[index] = 99.0
    assert torch.equal(table, before)


@pytest.mark.parametrize(
    "call",
    [
        lambda table: table[-1],
        lambda table: table[:, -2:],
        lambda table: table[table > 3],
        lambda table: table[torch.tensor([True, False, True])],
        lambda table: table[torch.tensor(True)],
        lambda table: table.masked_fill(table > 3, 0.0),
        lambda table: table.masked_select(table > 3),
        lambda table: table[torch.zeros(0, dtype=torch.int64)],
        lambda table: table.select(0, -1),
        lambda table: functional.cross_entropy(table, torch.tensor([0, -100, 2])),
    ],
    ids=["int", "slice", "mask", "row_mask", "scalar_mask", "fill", "select_mask", "empty", "select", "ignored_label"],
)
def test_host_integers_masks_and_labels_pass(guard: IndexGuard, call: Callable[[torch.Tensor], object]) -> None:
    with guard:
        call(arguments([0])[0])


def test_each_index_is_measured_against_its_own_dimension(guard: IndexGuard) -> None:
    table = torch.zeros(2, 5, 3)
    with guard:
        _ = table[torch.tensor([1, 0]), :, torch.tensor([2, 0])]
        _ = table[torch.ones(2, 5, dtype=torch.bool), torch.tensor([2])]
        with pytest.raises(IllegalIndexError, match=r"\[0, 3\), got 4"):
            _ = table[:, torch.tensor([4]), torch.tensor([4])]


@inference
def test_operators_made_of_indexing_are_seen_through(guard: IndexGuard, inference: bool) -> None:
    with torch.inference_mode(inference), guard:
        torch.repeat_interleave(torch.zeros(3, 2), torch.tensor([1, 0, 2]), dim=0)
    assert guard.checked == {"aten.index_select.default": 1}


def test_tensors_without_values_are_left_alone(guard: IndexGuard) -> None:
    with guard:
        torch.index_select(torch.zeros(3, device="meta"), 0, torch.tensor([1], device="meta"))


def test_outside_of_the_guard_torch_wraps_again(guard: IndexGuard) -> None:
    table, index = arguments([0, -1])
    with guard, pytest.raises(IllegalIndexError):
        _ = table[index]
    assert torch.equal(table[index][1], table[2])
    assert torch.equal(torch.take_along_dim(table, index[:, None], 0)[1], table[2])


def test_a_guard_can_be_entered_again_and_inside_another(guard: IndexGuard) -> None:
    table, index = arguments([0, 1])
    for _ in range(2):
        with guard, IndexGuard() as inner, guard:
            _ = table[index]
        assert inner.checked.total() == 1
    assert guard.checked.total() == 4


@inference
def test_a_whole_model_forward_keeps_its_bits_under_the_guard(guard: IndexGuard, inference: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.tensor([[1, 5, 63]])
    with torch.inference_mode(inference), torch.no_grad():
        expected = model(ids).logits
        with guard:
            assert torch.equal(model(ids).logits, expected)
            with pytest.raises(IllegalIndexError, match=r"aten\.embedding.*\[0, 64\), got 64"):
                model(ids + 1)
    assert guard.checked["aten.embedding.default"] == 2
