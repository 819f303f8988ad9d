"""What a peer gets wrong is told to it by field and row, and the service goes on."""

import grpc
import pytest
from google.rpc import error_details_pb2

from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import model_pb2, teacher_pb2, tree_pb2
from tests.teacher_service.fakes import VOCAB_SIZE, FakeEngine, answer, root_only
from tests.teacher_service.peer import serving

PROMPT = [11, 5, 80, 2, 41, 7]
P = len(PROMPT)
FIRST, SECOND, THIRD = answer(PROMPT, 3)


def message(token_ids: list[int], parents: list[int], scores: list[float] | None = None) -> tree_pb2.TokenTree:
    return tree_pb2.TokenTree(token_ids=token_ids, parents=parents, scores=scores or [])


ROOT = message([SECOND], [0])
INVALID, STALE = grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.FAILED_PRECONDITION.value[0]

# After round 1, whose verdict accepted nothing: (round, committed length, commit, tree), epoch, then the rejection.
REFUSED = {
    "a cycle": ((2, P + 1, 0, message([SECOND, 1, 2], [0, 2, 1])), 1, (INVALID, "tree.parents", 1)),
    "rows out of order": ((2, P + 1, 0, message([SECOND, 1, 2], [0, 2, 0])), 1, (INVALID, "tree.parents", 1)),
    "a parent out of range": ((2, P + 1, 0, message([SECOND, 1], [0, 4294967295])), 1, (INVALID, "tree.parents", 1)),
    "a root with a parent": ((2, P + 1, 0, message([SECOND, 1], [1, 0])), 1, (INVALID, "tree.parents", 0)),
    "equal siblings": ((2, P + 1, 0, message([SECOND, 9, 9], [0, 0, 0])), 1, (INVALID, "tree.token_ids", 2)),
    "too many rows": ((2, P + 1, 0, message([SECOND, *range(9)], [0] * 10)), 1, (INVALID, "tree.token_ids", None)),
    "too deep": ((2, P + 1, 0, message([SECOND] * 6, [0, 0, 1, 2, 3, 4])), 1, (INVALID, "tree.parents", 5)),
    "no root": ((2, P + 1, 0, message([], [])), 1, (INVALID, "tree.token_ids", None)),
    "no tree at all": ((2, P + 1, 0, tree_pb2.TokenTree()), 1, (INVALID, "tree.token_ids", None)),
    "an id past the vocabulary": (
        (2, P + 1, 0, message([SECOND, VOCAB_SIZE], [0, 0])),
        1,
        (INVALID, "tree.token_ids", 1),
    ),
    "too few parents": ((2, P + 1, 0, message([SECOND, 1], [0])), 1, (INVALID, "tree.parents", None)),
    "a score that is not finite": (
        (2, P + 1, 0, message([SECOND, 1], [0, 0], [0.0, float("inf")])),
        1,
        (INVALID, "tree.scores", 1),
    ),
    "another root": ((2, P + 1, 0, message([(SECOND + 1) % VOCAB_SIZE], [0])), 1, (INVALID, "tree.token_ids", 0)),
    "a commit past the accepted rows": ((2, P + 2, 1, ROOT), 1, (INVALID, "commit", None)),
    "a wrong committed length": ((2, P, 0, ROOT), 1, (STALE, "committed_length", None)),
    "a stale epoch": ((2, P + 1, 0, ROOT), 9, (STALE, "epoch", None)),
    "a round ahead": ((3, P + 1, 0, ROOT), 1, (STALE, "round", None)),
    "round zero": ((0, P + 1, 0, ROOT), 1, (INVALID, "round", None)),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_bad_round_is_refused_by_field_and_row_and_the_session_goes_on(name):
    asked, epoch, (code, field, row) = REFUSED[name]
    engine = FakeEngine()
    async with serving(engine) as served:
        session = served.session()
        await session.open(PROMPT)
        await session.verdict(1, P, 0, root_only([*PROMPT, FIRST]))
        calls = list(engine.calls)
        rejection = (await session.verify(*asked, epoch=epoch)).rejection
        assert (rejection.round, rejection.code, rejection.field) == (asked[0], code, field)
        assert (rejection.row if rejection.HasField("row") else None) == row
        assert "expected" in rejection.reason
        assert engine.calls == calls
        assert (await session.verdict(2, P + 1, 0, TokenTree.root_only(SECOND))).next_token_id == THIRD
        assert await session.close() is grpc.StatusCode.OK


async def test_an_older_round_is_refused_as_stale():
    async with serving(FakeEngine()) as served:
        session = served.session()
        await session.open(PROMPT)
        await session.verdict(1, P, 0, TokenTree.root_only(FIRST))
        await session.verdict(2, P + 1, 0, TokenTree.root_only(SECOND))
        rejection = (await session.verify(1, P, 0, TokenTree.root_only(FIRST))).rejection
        assert (rejection.code, rejection.field) == (STALE, "round")


async def test_a_message_that_holds_nothing_is_refused_and_the_session_goes_on():
    async with serving(FakeEngine()) as served:
        session = served.session()
        await session.open(PROMPT)
        await session.send()
        assert (await session.read()).rejection.field == "message"
        await session.verdict(1, P, 0, TokenTree.root_only(FIRST))


BAD_OPENINGS = {
    "no request id": ({"request_id": ""}, "open.request_id"),
    "no prompt": ({"prompt_token_ids": []}, "open.prompt_token_ids"),
    "a prompt id past the vocabulary": ({"prompt_token_ids": [1, 2, VOCAB_SIZE]}, "open.prompt_token_ids[2]"),
    "a prompt past the slot": ({"prompt_token_ids": [1] * 92}, "open.prompt_token_ids"),
    "no answer token": ({"max_new_tokens": 0}, "open.max_new_tokens"),
    "more than a slot holds": ({"max_new_tokens": 100}, "open.max_new_tokens"),
    "no budget": ({"max_budget": None}, "open.max_budget"),
    "too large a tree": ({"max_budget": tree_pb2.TreeBudget(rows=9, depth=1)}, "open.max_budget.rows"),
    "too many log-probabilities of the prompt": ({"prompt_logprobs": 21}, "open.prompt_logprobs"),
    "a priority that is none": ({"priority": -101}, "open.priority"),
    "too deep a tree": ({"max_budget": tree_pb2.TreeBudget(rows=1, depth=5)}, "open.max_budget.depth"),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
async def test_a_bad_opening_ends_its_stream_by_field_and_the_service_goes_on(name):
    changes, field = BAD_OPENINGS[name]
    async with serving(FakeEngine()) as served:
        session = served.session()
        await session.send_open(changes.pop("prompt_token_ids", PROMPT), **changes)
        bad_request = await session.error_detail(error_details_pb2.BadRequest())
        assert [violation.field for violation in bad_request.field_violations] == [field]
        assert await session.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert served.service.slots.in_use == 0
        assert await served.session().decode(PROMPT, 3, root_only) == [FIRST, SECOND, THIRD]


async def test_a_wrong_fingerprint_is_refused_with_a_message_that_names_both_sides():
    async with serving(FakeEngine()) as served:
        session = served.session()
        other = model_pb2.ModelFingerprint()
        other.CopyFrom(served.fingerprint)
        other.model, other.vocab_size, other.tokenizer_sha256 = "other", 98, "cd" * 32
        await session.send_open(PROMPT, fingerprint=other)
        code, text = await session.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        for part in ("'fake'", "'other'", "97 / 98", "ab" * 32, "cd" * 32):
            assert part in text


async def test_the_first_message_must_be_open_and_only_the_first():
    expected = "message: expected `open` as the first one of a session, got "
    async with serving(FakeEngine()) as served:
        early = served.session()
        await early.send(verify=teacher_pb2.VerifyTree(round=1))
        assert await early.status() == (grpc.StatusCode.FAILED_PRECONDITION, f"{expected}`verify`")
        hollow = served.session()
        await hollow.send()
        assert await hollow.status() == (grpc.StatusCode.FAILED_PRECONDITION, f"{expected}nothing")
        empty = served.session()
        await empty.call.done_writing()
        assert await empty.status() == (grpc.StatusCode.FAILED_PRECONDITION, f"{expected}nothing")
        twice = served.session()
        await twice.open(PROMPT)
        await twice.send_open(PROMPT)
        code, text = await twice.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert text.startswith("message: expected `verify`, got a second `open`")
        await served.service.slots.idle()


async def test_bytes_that_are_no_message_end_their_stream_and_the_service_goes_on():
    async with serving(FakeEngine()) as served:
        for data in (b"\xff\xff\xff", b"\x12\x04\x0a\x02\xff\xfe"):
            raw = served.connection.stream_stream("/eagle_pangu.v1.TeacherService/Verify")()
            await raw.write(data)
            assert await raw.code() is grpc.StatusCode.INVALID_ARGUMENT
            session = served.session()
            await session.open(PROMPT)
            session.call.cancel()
        await served.service.slots.idle()


async def test_a_round_past_the_tokens_that_the_session_was_opened_for_names_them():
    async with serving(FakeEngine()) as served:
        peer = served.session()
        prefilled = await peer.open(PROMPT, max_new_tokens=1, max_budget=tree_pb2.TreeBudget())
        verdict = (await peer.verify(1, len(PROMPT), 0, TokenTree.root_only(prefilled.next_token_id))).verdict
        root = TokenTree.root_only(verdict.next_token_id)
        rejection = (await peer.verify(2, len(PROMPT) + 1, 0, root)).rejection
        assert (rejection.field, rejection.row) == ("tree.token_ids", 0)
        assert "1 new ones (open.max_new_tokens)" in rejection.reason
