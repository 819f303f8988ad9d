"""The head that comes with the default model: it drafts well, wherever in a text, on whatever slot, in any chunking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from draft_service.drafters.base import Budget, run_alone
from draft_service.drafters.eagle3 import Eagle3Drafter, Eagle3Session
from draft_service.drafters.heads import load_eagle3
from draft_service.pretrained import pretrained_heads
from draft_service.training.answers import Answer
from draft_service.training.rehearsal import Round, rehearse, tokens_per_round
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.checkpoints import load_checkpoint
from eagle_pangu.speculation.devices import get_device
from eagle_pangu.speculation.engine import Engine
from eagle_pangu.speculation.models import RELEASES
from eagle_pangu.speculation.sampling import greedy
from eagle_pangu.speculation.tree import TokenTree
from tests.draft_service.heads import assert_same
from tests.end_to_end.conftest import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BUDGET = Budget(rows=8, depth=6)
TOKENS = 96


class Recorded(NamedTuple):
    """A greedy answer of the teacher, with the features of all its tokens but the last."""

    answer: Answer
    features: NDArray[np.uint16]


@pytest.fixture(scope="module")
def teacher(model_directory: Path) -> Engine:
    device = get_device("cpu")
    return Engine(load_checkpoint(model_directory, torch.float32, device), device, slot_capacity=512, numerics="free")


@pytest.fixture(scope="module")
def drafter() -> Eagle3Drafter:
    return load_eagle3(DraftSettings(drafter="eagle3", dtype="float32", quantize=False))


def bits(features: torch.Tensor | None) -> NDArray[np.uint16]:
    assert features is not None
    return features.view(torch.int16).numpy().view(np.uint16)


@pytest.fixture(scope="module")
def recorded(teacher: Engine, model_directory: Path, prompts: list[str]) -> list[Recorded]:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return [record(teacher, np.array(ids, dtype=np.int64), TOKENS) for ids in encoded["input_ids"]]


def record(teacher: Engine, prompt: NDArray[np.int64], tokens: int) -> Recorded:
    slot = teacher.open_slot()
    result = teacher.prefill(slot, prompt, want_logits=True, want_features=True)
    assert result.logits is not None
    features, answer = [bits(result.features)], greedy(result.logits).token_ids.tolist()
    while len(answer) < tokens:
        result = teacher.verify(slot, TokenTree.root_only(answer[-1]), want_features=True)
        assert result.logits is not None
        teacher.commit(slot, [])
        features.append(bits(result.features))
        answer += greedy(result.logits).token_ids.tolist()
    return Recorded(
        Answer("a", True, prompt.astype(np.int32), np.array(answer, dtype=np.int32)), np.concatenate(features)
    )


@pytest.fixture(scope="module")
def rounds(drafter: Eagle3Drafter, recorded: list[Recorded]) -> list[list[Round]]:
    return [rehearse(drafter, one.answer, one.features, BUDGET) for one in recorded]


def test_a_head_comes_with_every_model_that_can_be_pulled() -> None:
    assert set(pretrained_heads()) == set(RELEASES)
    assert MODEL in RELEASES


def test_it_drafts_well(rounds: list[list[Round]]) -> None:
    assert tokens_per_round([one for each in rounds for one in each]) > 1.5


def test_acceptance_does_not_fall_along_an_answer(rounds: list[list[Round]]) -> None:
    flat = [one for each in rounds for one in each]
    early = tokens_per_round([one for one in flat if one.position < TOKENS // 2])
    late = tokens_per_round([one for one in flat if one.position >= TOKENS // 2])
    assert late > 0.75 * early


def halfway(drafter: Eagle3Drafter, one: Recorded) -> Iterator[tuple[Eagle3Session, int]]:
    """A session after every round of an answer, with the number of tokens it knows."""
    prompt, response = one.answer.prompt_ids.tolist(), one.answer.response_ids.tolist()
    session = drafter.open(prompt, BUDGET)
    described = 0
    for decided in range(1, len(response), 7):
        session.extend(response[max(0, decided - 7) : decided])
        session.read_features(described, one.features[described : len(prompt) + decided - 1])
        described = len(prompt) + decided - 1
        yield session, described + 1


def test_deep_in_an_answer_it_drafts_as_if_it_had_just_read_all_of_it(
    drafter: Eagle3Drafter, recorded: list[Recorded]
) -> None:
    """True features after every round: nothing approximate is left from the rounds before."""
    for one in recorded[:2]:
        tokens = [*one.answer.prompt_ids.tolist(), *one.answer.response_ids.tolist()]
        for session, known in halfway(drafter, one):
            fresh = drafter.open(tokens[:known], BUDGET)
            fresh.read_features(0, one.features[: known - 1])
            deep, anew = (run_alone(drafter, each.propose(BUDGET)) for each in (session, fresh))
            assert_same(deep, anew)


def test_a_slot_used_before_drafts_the_same(drafter: Eagle3Drafter, recorded: list[Recorded]) -> None:
    first = [rehearse(drafter, one.answer, one.features, BUDGET) for one in recorded]
    again = [rehearse(drafter, one.answer, one.features, BUDGET) for one in reversed(recorded)]
    assert again[::-1] == first


@pytest.mark.parametrize("chunk", [16, 64])
def test_a_prompt_read_in_chunks_drafts_the_same(
    teacher: Engine,
    drafter: Eagle3Drafter,
    recorded: list[Recorded],
    rounds: list[list[Round]],
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draft_service.drafters.eagle3.CHUNK", chunk)
    for one, expected in zip(recorded, rounds, strict=True):
        ids, slot = one.answer.prompt_ids.astype(np.int64), teacher.open_slot()
        parts = [
            bits(teacher.prefill(slot, ids[start : start + chunk], want_logits=False, want_features=True).features)
            for start in range(0, len(ids), chunk)
        ]
        features = np.concatenate([*parts, one.features[len(ids) :]])
        found = rehearse(drafter, one.answer, features, BUDGET)
        assert tokens_per_round(found) == pytest.approx(tokens_per_round(expected), rel=0.1)
