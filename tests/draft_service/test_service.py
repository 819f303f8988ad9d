"""The draft service over real gRPC: a session's story."""

from __future__ import annotations

import grpc
import grpc.aio
import numpy as np

from eagle_pangu.speculation.tree import TokenTree
from protos.codec import decode_tree, encode_features
from protos.v1 import draft_pb2
from tests.draft_service.fakes import ScriptedDrafter
from tests.draft_service.peer import EPOCH, PROMPT, ask, open_request, propose_request, serving


async def test_a_session_opens_drafts_round_after_round_and_ends() -> None:
    async with serving() as stub:
        stream = stub.Propose()
        opened = await ask(stream, open_request())
        assert opened.epoch == EPOCH
        assert opened.opened == draft_pb2.DraftSessionOpened(drafter="ngram", needs_features=False, context_limit=0)
        first = (await ask(stream, propose_request())).proposal
        assert first.round == 1
        tree = TokenTree(*decode_tree(first.tree))
        tree.validate(vocab_size=100, max_rows=8, max_depth=2)
        assert tree.token_ids.tolist() == [1, 2, 4, 3]
        assert first.total_us >= first.draft_us > 0
        second = (await ask(stream, propose_request(2, len(PROMPT) + 2, [2, 3], rows=1))).proposal
        assert (second.round, list(second.tree.token_ids)) == (2, [3, 9])
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_repeat_is_answered_again() -> None:
    async with serving() as stub:
        stream = stub.Propose()
        await ask(stream, open_request())
        first = await ask(stream, propose_request())
        again = await ask(stream, propose_request())
        assert again.proposal.tree == first.proposal.tree


async def test_the_drafters_on_offer_are_those_that_the_settings_allow() -> None:
    async with serving() as stub:
        answer = await stub.GetDrafters(draft_pb2.GetDraftersRequest())
        assert list(answer.drafters) == ["ngram"]
        assert answer.default_drafter == "ngram"


async def test_a_session_that_names_no_drafter_gets_the_default_one() -> None:
    async with serving() as stub:
        assert (await ask(stub.Propose(), open_request(drafter=""))).opened.drafter == "ngram"


async def test_the_opener_learns_what_its_drafter_needs(scripted: ScriptedDrafter) -> None:
    async with serving() as stub:
        opened = (await ask(stub.Propose(), open_request(drafter="scripted"))).opened
        assert (opened.needs_features, opened.context_limit) == (True, 50)


async def test_features_reach_the_drafter_before_the_round_they_precede(scripted: ScriptedDrafter) -> None:
    async with serving() as stub:
        stream = stub.Propose()
        await ask(stream, open_request(drafter="scripted"))
        for start, count in ((0, 5), (5, 3)):
            features = encode_features(start, np.zeros((count, 4), dtype=np.uint16))
            await stream.write(draft_pb2.ProposeRequest(epoch=EPOCH, features=features))
        assert (await ask(stream, propose_request())).HasField("proposal")
        assert scripted.features == [(0, (5, 4)), (5, (3, 4))]


async def test_features_may_come_with_the_round_they_precede(scripted: ScriptedDrafter) -> None:
    async with serving() as stub:
        stream = stub.Propose()
        await ask(stream, open_request(drafter="scripted"))
        request = propose_request()
        for start, count in ((0, 5), (5, 3)):
            request.propose.features.append(encode_features(start, np.zeros((count, 4), dtype=np.uint16)))
        assert (await ask(stream, request)).HasField("proposal")
        assert scripted.features == [(0, (5, 4)), (5, (3, 4))]


async def test_the_prompt_is_worked_off_without_waiting_for_a_round(scripted: ScriptedDrafter) -> None:
    async with serving() as stub:
        stream = stub.Propose()
        await ask(stream, open_request(drafter="scripted"))
        await ask(stream, propose_request())
        assert scripted.pieces == 0
