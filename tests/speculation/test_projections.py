"""Projections of one input computed together: the same outputs, one product, nothing kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle_pangu.speculation.projections import SharedProduct, share_products


class Attention(nn.Module):
    def __init__(self, bias: bool, value_bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 6, bias), nn.Linear(8, 4, bias)
        self.v_proj = nn.Linear(8, 4, value_bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(inputs), self.k_proj(inputs), self.v_proj(inputs)], dim=-1)


@pytest.mark.parametrize("bias", [True, False])
def test_joined_projections_give_what_they_gave_apart_in_one_product(bias: bool) -> None:
    model = Attention(bias, bias)
    inputs = torch.randn(1, 5, 8)
    expected = model(inputs)
    share_products(model)
    product = model.q_proj.product
    calls: list[torch.Tensor] = []
    product.linear.register_forward_hook(lambda module, args, output: calls.append(output))
    torch.testing.assert_close(model(inputs), expected)
    assert len(calls) == 1
    other = torch.randn(1, 5, 8)
    assert not torch.equal(model(other), expected)
    assert product._pending == []


def test_a_projection_called_out_of_turn_computes_its_own_input() -> None:
    model = Attention(True, True)
    first, second = torch.randn(2, 8), torch.randn(2, 8)
    expected = model.k_proj(second)
    share_products(model)
    model.q_proj(first)
    torch.testing.assert_close(model.k_proj(second), expected)


def test_layers_of_different_kinds_are_left_alone() -> None:
    model = Attention(True, False)
    share_products(model)
    assert type(model.q_proj) is nn.Linear
    assert not any(isinstance(module, SharedProduct) for module in model.modules())
