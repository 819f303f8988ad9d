"""Whatever arrives, the service answers with a documented status or rejection, and goes on."""

import asyncio

import grpc
import grpc.aio
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.v1 import teacher_pb2, tree_pb2
from tests.teacher_service.fakes import VOCAB_SIZE, FakeEngine, answer, half_right, next_token
from tests.teacher_service.peer import Served, serving

PROMPT = [11, 5, 80]
FIRST = next_token(PROMPT)
DOCUMENTED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
EXAMPLES = settings(max_examples=40, deadline=None)

uint32 = st.one_of(st.integers(0, 12), st.sampled_from([VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1, 2**31, 2**32 - 1]))
token = st.one_of(st.just(FIRST), uint32)
wild_trees = st.builds(
    tree_pb2.TokenTree,
    token_ids=st.lists(token, max_size=12),
    parents=st.lists(uint32, max_size=12),
    scores=st.lists(st.floats(width=32), max_size=12),
)


@st.composite
def nearly_sound_trees(draw: st.DrawFn) -> tree_pb2.TokenTree:
    """The right root and ordered parents, and at most one row broken."""
    right = [FIRST, *answer([*PROMPT, FIRST], 6)]
    rows = draw(st.integers(1, 7))
    parents = [0] + [draw(st.integers(max(0, row - 2), row - 1)) for row in range(1, rows)]
    tokens = [FIRST] + [draw(st.sampled_from([right[row], row])) for row in range(1, rows)]
    if draw(st.booleans()):
        broken = draw(st.sampled_from([tokens, parents]))
        broken[draw(st.integers(0, rows - 1))] = draw(uint32)
    return tree_pb2.TokenTree(token_ids=tokens, parents=parents)


trees = wild_trees | nearly_sound_trees()
rounds = st.builds(
    teacher_pb2.VerifyTree,
    round=st.sampled_from([1, 1, 1, 2]) | uint32,
    committed_length=st.sampled_from([3, 3, 3, 4]) | uint32,
    commit=st.sampled_from([0, 0, 0, 1]) | uint32,
    tree=trees,
)
verifications = st.builds(teacher_pb2.VerifyRequest, epoch=st.sampled_from([1, 1, 1, 0, 2**64 - 1]), verify=rounds)
openings = st.builds(
    teacher_pb2.OpenTeacherSession,
    request_id=st.text(max_size=4),
    prompt_token_ids=st.lists(uint32, max_size=6),
    max_new_tokens=uint32,
    max_budget=st.builds(tree_pb2.TreeBudget, rows=uint32, depth=uint32),
    want_features=st.booleans(),
    logprobs=st.none() | uint32,
    prompt_logprobs=st.none() | uint32,
    priority=st.integers(-101, 101) | st.sampled_from([-(2**31), 2**31 - 1]),
)
requests = st.one_of(
    verifications,
    st.builds(teacher_pb2.VerifyRequest, epoch=st.integers(0, 3)),
    st.builds(teacher_pb2.VerifyRequest, epoch=st.integers(0, 3), open=openings),
)


def opening_of(served: Served) -> teacher_pb2.VerifyRequest:
    """A sound opening."""
    opening = teacher_pb2.OpenTeacherSession(
        request_id="fuzz",
        fingerprint=served.fingerprint,
        prompt_token_ids=PROMPT,
        max_new_tokens=40,
        max_budget=tree_pb2.TreeBudget(rows=8, depth=4),
    )
    return teacher_pb2.VerifyRequest(epoch=1, open=opening)


async def still_serves(served: Served) -> None:
    session = served.session()
    assert await session.decode(PROMPT, 12, half_right) == answer(PROMPT, 12)
    await session.close()
    await served.service.slots.idle()


async def exchange(call: grpc.aio.StreamStreamCall, messages: list) -> grpc.StatusCode:
    """Send each message and read what answers it, until the stream ends; the status it ended with.

    One at a time: a grpc.aio client that writes to a stream the server has just ended reports its own INTERNAL.
    """
    for message in messages:
        await call.write(message)
        if await ended(call):
            break
    else:
        await call.done_writing()
    return await call.code()


async def ended(call: grpc.aio.StreamStreamCall) -> bool:
    """Read the answer to one message; True when it was the end of the stream."""
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.WhichOneof("message") not in ("opened", "features", "prompt_logprobs"):
                return False
    except grpc.aio.AioRpcError:
        pass
    return True


@EXAMPLES
@given(messages=st.lists(st.binary(max_size=40), min_size=1, max_size=5), in_session=st.booleans())
def test_random_bytes_never_harm_the_service(messages, in_session):
    async def story() -> None:
        async with serving(FakeEngine()) as served:
            for message in messages:
                # A channel that sends bytes as they are.
                raw = served.connection.stream_stream(
                    "/eagle_pangu.v1.TeacherService/Verify",
                    response_deserializer=teacher_pb2.VerifyResponse.FromString,
                )()
                before = [opening_of(served).SerializeToString()] if in_session else []
                assert await exchange(raw, [*before, message]) in DOCUMENTED
            await still_serves(served)

    asyncio.run(story())


@EXAMPLES
@given(streams=st.lists(st.lists(requests, min_size=1, max_size=4), min_size=1, max_size=4))
def test_random_messages_never_harm_the_service(streams):
    async def story() -> None:
        async with serving(FakeEngine()) as served:
            for messages in streams:
                for message in messages:
                    if message.HasField("open"):
                        message.open.fingerprint.CopyFrom(served.fingerprint)
                assert await exchange(served.stub.Verify(), messages) in DOCUMENTED
            await still_serves(served)

    asyncio.run(story())


@EXAMPLES
@given(messages=st.lists(verifications, min_size=1, max_size=6))
def test_random_rounds_in_an_open_session_are_answered_one_by_one_and_never_change_the_answer(messages):
    async def story() -> None:
        async with serving(FakeEngine()) as served:
            session = served.session()
            await session.open(PROMPT)
            committed, commit, history, last = len(PROMPT), 0, [*PROMPT, FIRST], 0
            for message in messages:
                await session.call.write(message)
                response = await session.read()
                assert response.WhichOneof("message") in ("verdict", "rejection")
                if response.HasField("verdict") and response.verdict.round > last:
                    # By luck a sound round: follow it.
                    last = response.verdict.round
                    rows = response.verdict.accepted_rows
                    path = [message.verify.tree.token_ids[row] for row in rows]
                    committed, commit = message.verify.committed_length, len(rows)
                    history = [*history, *path, response.verdict.next_token_id]
                    assert history == [*PROMPT, *answer(PROMPT, len(history) - len(PROMPT))]
            tree = half_right(history)
            after = committed + commit + 1 if last else committed
            verdict = await session.verdict(last + 1, after, commit, tree)
            assert verdict.next_token_id == answer(history, len(verdict.accepted_rows) + 1)[-1]

    asyncio.run(story())
