"""Vocabulary: ids mean the same on both sides or nothing is served, and no id comes through that nobody can read."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.main import DraftService
from eagle_pangu.client.client import violations_of
from eagle_pangu.serving.bootstrap import running
from eagle_pangu.serving.settings import DraftSettings
from eagle_pangu.speculation.engine import Engine
from protos.v1 import draft_pb2, draft_pb2_grpc, generation_pb2, model_pb2, sampling_pb2, tree_pb2
from tests.conformance.conftest import MODULE_LOOP
from tests.conformance.systems import (
    PROMPT,
    System,
    draft_settings,
    options,
    system,
    teacher_settings,
    tiny_engine,
)
from tests.models import VOCAB_SIZE, tiny_llama
from tests.teacher_service.peer import PeerSession

pytestmark = MODULE_LOOP

LAST, OUTSIDE = VOCAB_SIZE - 1, (VOCAB_SIZE, 2**32 - 1)


def other_tokenizer(directory: Path) -> Path:
    """A model whose tokenizer has two ids exchanged."""
    tiny_llama(directory, num_hidden_layers=1)
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    one, other = list(vocabulary)[:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(document))
    return directory


async def test_a_draft_of_another_tokenizer_is_refused_before_the_first_token(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    settings = draft_settings(other_tokenizer(tmp_path / "other"), drafter="standalone")
    async with system(engine, settings, teacher_settings(model)) as each:
        plain = await each.ask(drafter="none", max_tokens=10)
        answer = await each.ask(max_tokens=10)
        assert answer.token_ids == plain.token_ids
        assert (answer.speculation.drafted, list(answer.speculation.fallback_reasons)) == (0, ["refused"])
        theirs = (await each.model()).fingerprint
    async with running(DraftService(settings)) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Propose()
        opening = draft_pb2.OpenDraftSession(
            request_id="r", teacher=theirs, prompt_token_ids=[1], max_budget=tree_pb2.TreeBudget(rows=4, depth=2)
        )
        await call.write(draft_pb2.ProposeRequest(epoch=1, open=opening))
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = await call.details()
        assert "'other'" in details
        assert f"'{theirs.model}'" in details
        assert "tokenizer_sha256" in details


@pytest.mark.parametrize(
    "change", [{"tokenizer_sha256": "ab" * 32}, {"vocab_size": VOCAB_SIZE + 1}, {"eos_token_ids": [1, 2]}]
)
async def test_a_session_for_another_model_is_refused_by_the_teacher(
    self_draft: System, change: dict[str, Any]
) -> None:
    fingerprint = model_pb2.ModelFingerprint()
    fingerprint.CopyFrom((await self_draft.model()).fingerprint)
    fingerprint.model = "another"
    for name in change:
        fingerprint.ClearField(name)
    fingerprint.MergeFrom(model_pb2.ModelFingerprint(**change))
    session = PeerSession(self_draft.teacher_stub, fingerprint)
    await session.send_open([1, 2, 3])
    code, details = await session.status()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert next(iter(change)) in details
    assert "'another'" in details


def words(token_id: int) -> list[sampling_pb2.TokenSequence]:
    return [sampling_pb2.TokenSequence(token_ids=[1, token_id])]


FIELDS: dict[str, Any] = {
    "stop_token_ids": lambda token_id: {"stop_token_ids": [5, token_id]},
    "allowed_token_ids": lambda token_id: {"allowed_token_ids": [5, token_id]},
    "logit_bias": lambda token_id: {"logit_bias": {token_id: 1.0}},
    "bad_words": lambda token_id: {"bad_words": words(token_id)},
    "prompt_token_ids": lambda token_id: {"prompt": [5, token_id]},
}


@pytest.mark.parametrize("field", FIELDS)
async def test_every_id_of_a_request_is_range_checked(self_draft: System, field: str) -> None:
    await self_draft.ask(max_tokens=2, **FIELDS[field](LAST))
    for token_id in OUTSIDE:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self_draft.ask(max_tokens=2, **FIELDS[field](token_id))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        [violation] = violations_of(caught.value)
        assert violation.field.startswith(f"options.{field}")
        assert str(token_id) in violation.reason


@pytest.mark.parametrize("token_id", OUTSIDE)
async def test_an_id_of_a_draft_that_is_out_of_range_costs_that_round_its_tree(
    scripted_draft: System, token_id: int
) -> None:
    plain = await scripted_draft.ask(drafter="none", max_tokens=8)
    known = scripted_draft.knows(PROMPT, plain.token_ids, 8)
    good = known.chain(8)

    def plan(asked: Any) -> Any:
        tree = good(asked)
        ids = [*tree.token_ids[:-1].tolist(), token_id]
        return tree_pb2.TokenTree(token_ids=ids, parents=tree.parents.tolist()) if asked.number == 0 else tree

    scripted_draft.scripted.plan = plan
    answer = await scripted_draft.ask(max_tokens=8, budget=(4, 4))
    assert answer.token_ids == plain.token_ids
    assert list(answer.speculation.fallback_reasons) == ["invalid_tree"]
    assert answer.speculation.fallback_rounds == 1
    assert answer.speculation.accepted > 0


async def test_the_last_id_of_the_vocabulary_is_a_token_like_any_other(scripted_draft: System) -> None:
    asked: dict[str, Any] = {"logit_bias": {LAST: 100.0}, "max_tokens": 8}
    plain = await scripted_draft.ask([LAST], drafter="none", **asked)
    assert list(plain.token_ids) == [LAST] * 8
    scripted_draft.knows([LAST], plain.token_ids, 8)
    answer = await scripted_draft.ask([LAST], budget=(4, 4), **asked)
    assert answer.token_ids == plain.token_ids
    assert answer.speculation.accepted == 5


@pytest.mark.parametrize("token_id", OUTSIDE)
async def test_the_teacher_itself_checks_every_id(self_draft: System, token_id: int) -> None:
    """It trusts no orchestrator either: in a tree the session lives on, in the prompt it is refused."""
    session = PeerSession(self_draft.teacher_stub, (await self_draft.model()).fingerprint)
    first = (await session.open([1, 2, 3])).next_token_id
    for place, ids in enumerate(([first, token_id], [token_id])):
        tree = tree_pb2.TokenTree(token_ids=ids, parents=[0] * len(ids))
        rejection = (await session.verify(1, 3, 0, tree)).rejection
        assert (rejection.code, rejection.field, rejection.row) == (3, "tree.token_ids", 1 - place)
    good = tree_pb2.TokenTree(token_ids=[first, LAST], parents=[0, 0])
    assert (await session.verify(1, 3, 0, good)).HasField("verdict")
    await session.close()
    refused = PeerSession(self_draft.teacher_stub, (await self_draft.model()).fingerprint)
    await refused.send_open([1, token_id])
    code, details = await refused.status()
    assert (code, "open.prompt_token_ids" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def padded_model(directory: Path) -> Path:
    """60 more rows of embeddings than the tokenizer has ids, which an unguarded teacher would say all the time."""
    tiny_llama(directory, num_hidden_layers=2, vocab_size=VOCAB_SIZE + 60)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[VOCAB_SIZE : VOCAB_SIZE + 30] = 10 * model.lm_head.weight[:30]
        model.lm_head.weight[VOCAB_SIZE + 30 :] = -10 * model.lm_head.weight[:30]
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    assert int(logits.argmax()) >= VOCAB_SIZE
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("sampled", [{}, {"temperature": 2.0, "seed": 3}, {"temperature": 1.0, "top_k": 5, "seed": 4}])
async def test_padded_embedding_rows_are_never_emitted(tmp_path: Path, sampled: dict[str, Any]) -> None:
    model = padded_model(tmp_path / "padded")
    draft: DraftSettings = draft_settings(model, drafter="standalone")
    async with system(tiny_engine(model), draft, teacher_settings(model)) as each:
        info = await each.client.model_info()
        assert info.teacher.vocab_size == VOCAB_SIZE
        asked: generation_pb2.GenerationOptions = options(
            max_tokens=24, ignore_eos=True, logprobs=20, budget=(6, 3), **sampled
        )
        answers = [await each.send(asked, drafter=drafter) for drafter in ("none", "standalone", "ngram")]
        for answer in answers:
            assert answer.token_ids == answers[0].token_ids
            assert answer.speculation.fallback_rounds == 0
            said = [*answer.token_ids, *(each for entry in answer.logprobs for each in entry.top_token_ids)]
            assert max(said) < VOCAB_SIZE
            assert all(sum(map(exp, entry.top_logprobs)) <= 1.001 for entry in answer.logprobs)
        with pytest.raises(grpc.aio.AioRpcError):
            await each.ask([VOCAB_SIZE])
