"""Linear layers held to an invariance class, over kernels whose bits depend on the row count in a known way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.linear import REFERENCE_ROWS, InvariantLinear, probe_row_counts

WEIGHT = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class CountingKernel:
    """x @ W.T, shifted by one unit in the last place for row counts outside `good`; remembers the counts it saw."""

    def __init__(self, good: set[int]) -> None:
        self.good = good
        self.seen: list[int] = []

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, 8)
        self.seen.append(rows.shape[0])
        exact = torch.stack([(WEIGHT * row).sum(-1) for row in rows])
        if rows.shape[0] not in self.good:
            exact = torch.nextafter(exact, torch.tensor(float("inf")))
        return exact.view(*inputs.shape[:-1], 5)


def test_the_probe_finds_exactly_the_counts_that_agree_with_the_reference() -> None:
    good = {4, 8, 16, 24, 64}
    counts = probe_row_counts(CountingKernel(good), 8, torch.float32, torch.device("cpu"), 256)
    assert counts == tuple(sorted(good))


def test_the_probe_sees_what_rounding_hides() -> None:
    """All counts agree once rounded; of the class are those that agree before, and none that computes otherwise."""

    class Rounding(CountingKernel):
        def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.unrounded(inputs).to(torch.bfloat16)

        def unrounded(self, inputs: torch.Tensor) -> torch.Tensor:
            if inputs.shape[0] == 1:
                return super().__call__(inputs.float()).to(torch.bfloat16)
            return super().__call__(inputs.float())

    kernel = Rounding({1, 4, 16, 24})
    assert probe_row_counts(kernel, 8, torch.bfloat16, torch.device("cpu"), 256) == (4, 16, 24)


def test_the_probe_tries_no_more_rows_than_will_be_run() -> None:
    kernel = CountingKernel(set(range(1, 300)))
    counts = probe_row_counts(kernel, 8, torch.float32, torch.device("cpu"), 17)
    assert max(counts) == 17
    assert max(kernel.seen) == 17


@pytest.mark.parametrize("rows", range(1, 41))
def test_any_number_of_rows_runs_through_counts_of_the_class_only(rows: int) -> None:
    good = {4, 8, REFERENCE_ROWS}
    kernel = CountingKernel(good)
    layer = InvariantLinear(kernel, 8, 5, torch.float32, sorted(good))
    inputs = torch.randn(1, rows, 8)
    outputs = layer(inputs)
    assert outputs.shape == (1, rows, 5)
    assert set(kernel.seen) <= good
    assert torch.equal(outputs[0], torch.stack([(WEIGHT * row).sum(-1) for row in inputs[0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_draft_s_linear_layer_is_the_same_but_for_rounding_to_eight_bits(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 80, bias=bias, dtype=dtype)
    device = get_device("cpu").for_drafting()
    kernel, rows = device.linear_kernel(layer), torch.randn(2, 5, 96).to(dtype)
    with torch.inference_mode():
        expected, computed = layer(rows), kernel(rows)
    assert (computed.shape, computed.dtype) == (expected.shape, dtype)
    assert not torch.equal(computed, expected)
    assert (computed - expected).abs().max() < 0.03 * expected.abs().max()


def test_a_draft_s_weight_of_zeros_stays_zero() -> None:
    layer = nn.Linear(8, 4, bias=False)
    nn.init.zeros_(layer.weight)
    assert torch.equal(get_device("cpu").for_drafting().linear_kernel(layer)(torch.ones(3, 8)), torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_without_instructions_for_a_dtype_the_product_is_rounded_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, rows: int
) -> None:
    monkeypatch.setattr("eagle_pangu.speculation.devices.cpu._has_bfloat16_instructions", lambda: False)
    torch.manual_seed(0)
    layer = nn.Linear(96, 80, bias=bias, dtype=dtype)
    inputs = torch.randn(1, rows, 96).to(dtype)
    with torch.inference_mode():
        wide = layer.double()(inputs.double())
        got = get_device("cpu").linear_kernel(layer.to(dtype))(inputs)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wide, rtol=torch.finfo(dtype).eps, atol=1e-5)
