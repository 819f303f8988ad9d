"""The simulated device computes what a CPU computes, and each of its refusals bites."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eagle_pangu.speculation.index_guard import IllegalIndexError, IndexGuard
from tests.simulated_npu import device
from tests.simulated_npu.device import NpuTensor, operators_run

Refused = Callable[[torch.Tensor], object]
HOST_INDEX = torch.tensor([0, 1])

inference = pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])


@pytest.fixture
def table() -> torch.Tensor:
    return torch.arange(12.0).view(3, 4).to("npu")


MIXED: dict[str, Refused] = {
    "sum": lambda table: table + torch.ones(3, 4),
    "in_place": lambda table: table.add_(torch.ones(4)),
    "product": lambda table: table @ torch.ones(4, 2),
    "linear": lambda table: F.linear(table, torch.ones(2, 4)),
    "linear_of_host_rows": lambda table: F.linear(torch.ones(1, 4), table),
    "joined": lambda table: torch.cat([table, torch.ones(1, 4)]),
    "where": lambda table: torch.where(torch.ones(4, dtype=torch.bool), table, table),
    "masked_fill": lambda table: table.masked_fill(torch.ones(4, dtype=torch.bool), 0.0),
    "attention_mask": lambda table: F.scaled_dot_product_attention(
        table[None], table[None], table[None], attn_mask=torch.ones(3, 3, dtype=torch.bool)
    ),
    "out": lambda table: torch.mul(table, 2, out=torch.empty(3, 4)),
    "mask": lambda table: table[torch.ones(3, dtype=torch.bool)],
    "index": lambda table: table[HOST_INDEX],
    "index_of_zero_dimensions": lambda table: table.index_select(0, torch.tensor(1)),
    "assignment": lambda table: table.__setitem__(HOST_INDEX, 0.0),
    "index_select": lambda table: table.index_select(0, HOST_INDEX),
    "gather": lambda table: table.gather(0, HOST_INDEX[:, None]),
    "scatter": lambda table: table.scatter(0, HOST_INDEX[:, None], 1.0),
    "index_copy": lambda table: table.index_copy(0, HOST_INDEX, table[:2]),
    "embedding": lambda table: F.embedding(HOST_INDEX, table),
}

HOST_ONLY: dict[str, Refused] = {
    "numpy": lambda table: table.numpy(),
    "asarray": np.asarray,
    "address": lambda table: table.data_ptr(),
    "packed_weight": lambda table: torch.ops.mkldnn._reorder_linear_weight(table, 16),
    "packed_product": lambda table: torch.ops.mkldnn._linear_pointwise(table, table, None, "none", [], ""),
    "index_of_a_list": lambda table: table[[0, 1]],
    "index_of_an_array": lambda table: table[:, np.array([0])],
    "assignment_by_a_list": lambda table: table.__setitem__([0], 0.0),
}


@inference
@pytest.mark.parametrize("call", MIXED.values(), ids=MIXED)
def test_tensors_of_two_devices_do_not_meet(table: torch.Tensor, call: Refused, inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="same device"):
        call(table)


@inference
@pytest.mark.parametrize("call", HOST_ONLY.values(), ids=HOST_ONLY)
def test_what_only_the_host_has_is_refused(table: torch.Tensor, call: Refused, inference: bool) -> None:
    refusals = (TypeError, RuntimeError, NotImplementedError)
    with torch.inference_mode(inference), pytest.raises(refusals, match=r"simulated npu|npu:0"):
        call(table)


@inference
@pytest.mark.parametrize("call", [*MIXED.values(), *HOST_ONLY.values()], ids=[*MIXED, *HOST_ONLY])
def test_on_the_host_each_of_these_is_legal(call: Refused, inference: bool) -> None:
    """Else a refusal would say nothing."""
    with torch.inference_mode(inference):
        call(torch.arange(12.0).view(3, 4))


@inference
def test_numbers_and_copies_pass_between_devices(table: torch.Tensor, inference: bool) -> None:
    with torch.inference_mode(inference):
        assert (table + torch.tensor(1.0)).tolist() == (table + 1).tolist()
        copy = torch.zeros(3, 4).copy_(table)
        assert torch.equal(copy, table.cpu())
        table[1:] = torch.zeros(2, 4)
        assert table.cpu()[1:].abs().sum() == 0
        assert int(table[0, 3]) == 3
        assert table.to("cpu", torch.float64).dtype == torch.float64
        assert torch.ones(2).to(table).device == table.device


@inference
def test_views_share_memory_with_what_they_are_views_of(table: torch.Tensor, inference: bool) -> None:
    with torch.inference_mode(inference):
        column, (first, *_) = table[:, 1], table.unbind()
        column.fill_(7)
        assert first.tolist() == [0, 7, 2, 3]
        assert table.mul_(2) is table
        assert column.tolist() == [14, 14, 14]
        assert not table.T.is_contiguous()
        out = torch.empty(3, 4, device="npu")
        assert torch.mul(table, 2, out=out) is out
        assert out[0, 1] == 28


@inference
@pytest.mark.parametrize(
    "fresh",
    [
        lambda table: torch.empty(2, 3, device="npu"),
        lambda table: torch.empty_like(table, dtype=torch.bfloat16),
        lambda table: table.new_empty(3),
        lambda table: torch.empty_strided((2, 2), (2, 1), device="npu"),
    ],
)
def test_fresh_memory_holds_nothing_of_use(table: torch.Tensor, inference: bool, fresh: Refused) -> None:
    with torch.inference_mode(inference):
        made = fresh(table)
        assert isinstance(made, NpuTensor)
        assert made.isnan().all()


def test_a_fresh_index_is_past_any_table(table: torch.Tensor) -> None:
    index = torch.empty(2, dtype=torch.int64, device="npu")
    with IndexGuard(), pytest.raises(IllegalIndexError):
        table.index_select(0, index)


@inference
def test_the_index_guard_sees_what_the_device_is_asked(table: torch.Tensor, inference: bool) -> None:
    with torch.inference_mode(inference), IndexGuard() as guard:
        index = torch.tensor([[0, -1]]).to("npu")
        for call in (lambda: table[index], lambda: table.gather(0, index), lambda: table.take_along_dim(index, 0)):
            with pytest.raises(IllegalIndexError, match="got -1"):
                call()
        assert table[torch.tensor([2], device="npu")].tolist() == [[8, 9, 10, 11]]
    assert guard.checked.total() == 4


def test_a_module_moves_computes_and_is_counted() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.LayerNorm(8)).eval()
    rows = torch.randn(3, 4)
    with torch.inference_mode():
        expected = module(rows)
        moved = deepcopy(module).to("npu")
        before = operators_run["aten.addmm"]
        assert torch.equal(moved(rows.to("npu")).cpu(), expected)
        assert operators_run["aten.addmm"] == before + 1
        with pytest.raises(RuntimeError, match="same device"):
            moved(rows)


def test_tensors_are_made_on_the_device() -> None:
    for made in (
        torch.tensor([1, 2], device="npu"),
        torch.as_tensor(np.array([1, 2]), device="npu"),
        torch.arange(1, 3, device="npu"),
        torch.full((2,), 1, device=torch.device("npu", 0)).cumsum(0),
    ):
        assert isinstance(made, NpuTensor)
        assert (made.device, made.tolist()) == (torch.device("npu", 0), [1, 2])
    assert not isinstance(torch.tensor([1]), NpuTensor)


def test_a_process_claims_the_device_once() -> None:
    with pytest.raises(RuntimeError, match="already been registered"):
        device.register()
