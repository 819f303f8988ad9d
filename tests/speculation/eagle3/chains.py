"""A short chain of draft steps through `Eagle3Head`, to hold against the reference."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from eagle_pangu.speculation.eagle3.head import Eagle3Head
from tests.speculation.eagle3.checkpoints import VOCAB

KNOWN, ROWS, LAYERS = 6, 9, 9
"""Rows with the teacher's features, rows in all; layers of the imagined teacher."""


def token_ids() -> torch.Tensor:
    """[ROWS]."""
    return torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(11))


def features(width: int, entries: tuple[int, int, int] | None = None) -> torch.Tensor:
    """[KNOWN, 3 * width] of the imagined teacher at the entries of those layers; None: the default."""
    states = torch.randn(LAYERS + 1, KNOWN, width, generator=torch.Generator().manual_seed(5))
    return torch.cat([states[entry] for entry in entries or (2, LAYERS // 2, LAYERS - 3)], dim=-1)


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Every row sees itself and the rows before it."""
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@torch.no_grad()
def chain_logits(head: Eagle3Head, teacher_features: torch.Tensor | None = None) -> torch.Tensor:
    """[ROWS, draft_vocab_size]: rows past the teacher's features read what the row before them recycled."""
    if teacher_features is None:
        teacher_features = features(head.config.target_hidden_size, head.config.feature_layers)
    ids = token_ids()[None]
    hidden = head.fuse(teacher_features)[None]
    while True:
        rows = hidden.shape[1]
        output = head.step(ids[:, :rows], hidden, torch.arange(rows)[None], causal)
        if rows == ROWS:
            return head.logits(output)[0]
        hidden = torch.cat([hidden, head.recycled(output[:, -1:])], dim=1)
