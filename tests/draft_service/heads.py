"""Random EAGLE-3 heads, random features, and the same drafting without cache or tree: the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from draft_service.drafters.base import Budget, ModelIdentity
from draft_service.drafters.children import Children
from draft_service.drafters.eagle3 import Eagle3Drafter, Eagle3Session
from draft_service.drafters.head_engine import HeadEngine, HeadRequest, HeadResult
from eagle_pangu.speculation.devices import Device, get_device
from eagle_pangu.speculation.eagle3.head import Eagle3Head, HeadConfig
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.passes import Alone

CONTEXT = 128
VOCAB_SIZE = 200
DRAFT_IDS = 60
IDENTITY = ModelIdentity("head for teacher", "ab" * 32, VOCAB_SIZE, (0,), 72)
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "attention_heads": 4,
    "key_value_heads": 2,
    "head_dim": 8,
    "target_hidden_size": 24,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_IDS,
    "max_positions": CONTEXT,
}


def random_head(seed: int = 0, **changes: Any) -> Eagle3Head:
    """Weights of this scale are sure of themselves, so that trees go deep."""
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3Head(HeadConfig(**{**SHAPE, **changes}))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if parameter.dim() == 1:
                parameter.add_(1)
        head.lm_head.weight.mul_(3)
    ids = torch.randperm(head.config.vocab_size, generator=generator)[: head.config.draft_vocab_size]
    head.target_ids.copy_(ids.sort().values)
    return head.eval()


class RecordingEngine(HeadEngine):
    """Remembers the rows and the sessions of every pass and the logits of every row that was asked for children."""

    def __init__(
        self,
        head: Eagle3Head,
        *,
        device: Device | None = None,
        vocab_size: int = VOCAB_SIZE,
        slot_capacity: int = 512,
        window: int = 0,
    ):
        self.passes: list[int] = []
        self.sessions: list[int] = []
        self.logits: list[torch.Tensor] = []
        self.head_before = head
        device = device or get_device("cpu")
        super().__init__(deepcopy(head), device, vocab_size=vocab_size, slot_capacity=slot_capacity, window=window)

    def run(self, requests: Sequence[HeadRequest], width: int) -> list[HeadResult]:
        self.passes.append(sum(request.segment.rows for request in requests))
        self.sessions.append(len(requests))
        return super().run(requests, width)

    def children(self, output: torch.Tensor, width: int) -> Children:
        self.logits.append(self.head.logits(output))
        return super().children(output, width)


def drafter_of(engine: HeadEngine, width: int = 4) -> Eagle3Drafter:
    return Eagle3Drafter(engine, IDENTITY, width)


def random_features(tokens: int, width: int = 72, seed: int = 0) -> NDArray[np.uint16]:
    """[tokens, width] bits of bfloat16 values."""
    values = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return values.view(torch.int16).numpy().view(np.uint16)


PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40).tolist()
FEATURES = random_features(CONTEXT + 40)
BUDGET = Budget(rows=12, depth=5)
BUDGETS = st.builds(Budget, st.integers(0, 24), st.integers(0, 8))


def open_session(engine: RecordingEngine, tokens: list[int], width: int = 4, *, features: bool = True) -> Alone:
    """A session with NaN in every column that it has not written; features of all tokens but the last."""
    drafter = drafter_of(engine, width)
    session = Alone(drafter, drafter.open(tokens, BUDGET))
    poison(session)
    if features and len(tokens) > 1:
        session.read_features(0, FEATURES[: len(tokens) - 1])
    return session


def next_logits(
    head: Eagle3Head,
    tokens: Sequence[int],
    features: NDArray[np.uint16],
    drafted: Sequence[int] = (),
    window: int = 0,
) -> list[torch.Tensor]:
    """Logits after `tokens`, then after each drafted token: one whole pass over all rows a step, nothing kept.

    Args:
        features: of all tokens but the last, at least.
    """
    known = torch.from_numpy(features[: len(tokens) - 1].view(np.int16)).view(torch.bfloat16).float()
    logits = []
    with torch.no_grad():
        hidden = head.fuse(known)
        for step in range(len(drafted) + 1):
            ids = torch.tensor([[*tokens, *drafted[:step]][1:]])
            output = head.step(ids, hidden[None], torch.arange(ids.shape[1])[None], _causal(window))[0]
            logits.append(head.logits(output[-1]))
            hidden = torch.cat([hidden, head.recycled(output[-1:])])
    return logits


def _causal(window: int):  # type: ignore[no-untyped-def]
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group, rows = query.shape[1] // key.shape[1], query.shape[2]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        for row in range(rows):
            scores[..., row, row + 1 :] = -torch.inf
            if window:
                scores[..., row, : max(0, row + 1 - window)] = -torch.inf
        return scores.softmax(-1) @ value

    return attend


def expected_score(
    head: Eagle3Head, tokens: Sequence[int], features: NDArray[np.uint16], path: Sequence[int], window: int = 0
) -> float:
    """Sum of log-probabilities of a drafted path, by the oracle."""
    ids = head.target_ids.tolist()
    steps = next_logits(head, tokens, features, path[:-1], window)
    return sum(float(step.log_softmax(-1)[ids.index(token)]) for step, token in zip(steps, path, strict=True))


def path(tree: TokenTree, row: int) -> list[int]:
    """Drafted tokens from the root to a row."""
    return tree.token_ids[tree.ancestors[row, 1 : tree.depth[row] + 1]].tolist()


def deepest_path(tree: TokenTree) -> list[int]:
    return path(tree, int(tree.depth.argmax()))


def assert_same(tree: TokenTree, other: TokenTree, tolerance: float = 1e-4) -> None:
    assert tree.token_ids.tolist() == other.token_ids.tolist()
    assert tree.parents.tolist() == other.parents.tolist()
    np.testing.assert_allclose(tree.scores, other.scores, atol=tolerance, rtol=tolerance)


def poison(session: Eagle3Session | Alone) -> None:
    """NaN wherever no row with features stands."""
    slot, branch = session._slot, session._branch
    final = slot.committed_length + (branch.decided if branch else 0)
    for storage in (slot._main.keys, slot._main.values):
        storage[:, :, final:] = float("nan")
