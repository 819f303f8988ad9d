"""Masks as the fused operators of Ascend read them: True hides. The only place where a mask is turned round.

Everywhere else in the project True means keep, as in torch's own attention. Passed on unturned, a mask raises nothing
and gives wrong numbers.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch

from eagle_pangu.speculation.plan import ForwardPlan

CAUSAL_SIZE = 2048
"""Rows and columns of the one mask that the causal modes of the operators take, whatever the lengths are."""


def hidden(keep: torch.Tensor) -> torch.Tensor:
    """A mask of what is kept, turned round: True where a row must not look; contiguous, on the same device."""
    return torch.logical_not(keep).contiguous()


def hidden_of_heads(keep: torch.Tensor) -> torch.Tensor:
    """The same of a dense mask, as the operators take it where heads stand for the batch.

    Args:
        keep: [rows, columns], or one of them for each head, [1, heads, rows, columns].

    Returns:
        [1 or heads, 1, rows, columns].
    """
    return hidden(keep.transpose(0, 1) if keep.dim() == 4 else keep[None, None])


def causal_mask(device: torch.device) -> torch.Tensor:
    """[CAUSAL_SIZE, CAUSAL_SIZE] bool, True above the diagonal."""
    return hidden(torch.ones(CAUSAL_SIZE, CAUSAL_SIZE, dtype=torch.bool).tril()).to(device)


class PlanMasks:
    """The mask of each pass, made once for all its layers, and dropped with the pass."""

    def __init__(self) -> None:
        self._masks: WeakKeyDictionary[ForwardPlan, torch.Tensor] = WeakKeyDictionary()

    def of(self, plan: ForwardPlan, columns: int) -> torch.Tensor:
        """[1, 1, rows, columns] bool, True where a row must not look; what lies past the plan's columns is hidden.

        Args:
            plan: of the pass.
            columns: of the keys that the operator gets, the same in every layer.
        """
        if plan not in self._masks:
            keep = np.zeros((1, 1, plan.rows, columns), dtype=np.bool_)
            keep[..., : plan.columns] = plan.keep_host
            self._masks[plan] = hidden(torch.from_numpy(keep)).to(plan.device)
        return self._masks[plan]
