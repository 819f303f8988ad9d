"""Linear layers held to an invariance class, over kernels whose bits depend on the row count in a known way."""

from __future__ import annotations

import pytest
import torch

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
