"""However a session ends, its slot and its drafter are free again, and the others go on."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from structlog.testing import capture_logs

from eagle_pangu.serving.errors import details_of
from eagle_pangu.serving.settings import DraftSettings
from tests.draft_service.fakes import ScriptedDrafter
from tests.draft_service.peer import ask, failure, open_request, propose_request, serving

IDLE_SECONDS = 1.0  # far above what a busy machine takes between two messages of these stories


async def test_past_its_slots_the_service_refuses_and_a_freed_slot_is_taken_again(scripted: ScriptedDrafter) -> None:
    async with serving(DraftSettings(slots=1)) as stub:
        first = stub.Propose()
        await ask(first, open_request(drafter="scripted"))
        error = await failure(stub.Propose(), open_request())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = details_of(error)
        assert status is not None
        assert status.details[0].type_url.endswith("google.rpc.RetryInfo")
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        assert await asyncio.to_thread(scripted.closed.wait, 30)
        assert (await ask(stub.Propose(), open_request())).HasField("opened")


async def test_a_session_cancelled_in_the_middle_of_its_work_is_closed_after_it(scripted: ScriptedDrafter) -> None:
    async with serving(DraftSettings(slots=2)) as stub:
        stream = stub.Propose()
        await ask(stream, open_request(drafter="scripted"))
        scripted.go_on.clear()
        await stream.write(propose_request())
        assert await asyncio.to_thread(scripted.begun.wait, 30)
        stream.cancel()
        # Another drafter's sessions are not held up meanwhile.
        assert (await ask(stub.Propose(), open_request())).HasField("opened")
        assert not scripted.closed.is_set()
        scripted.go_on.set()
        assert await asyncio.to_thread(scripted.closed.wait, 30)


async def test_a_drafter_that_fails_ends_its_session_and_tells_no_secrets(scripted: ScriptedDrafter) -> None:
    async with serving() as stub:
        scripted.failure = RuntimeError("the secret")
        error = await failure(stub.Propose(), open_request(drafter="scripted"), propose_request())
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(error.details())
        scripted.failure = None
        stream = stub.Propose()
        await ask(stream, open_request(drafter="scripted"))
        assert (await ask(stream, propose_request())).HasField("proposal")


async def test_a_silent_session_is_ended_with_its_reason_and_its_slot_taken_again(scripted: ScriptedDrafter) -> None:
    with capture_logs() as lines:
        async with serving(DraftSettings(slots=1, session_idle_seconds=IDLE_SECONDS)) as stub:
            silent = stub.Propose()
            await ask(silent, open_request(drafter="scripted"))
            assert await silent.code() is grpc.StatusCode.ABORTED
            reason = "message: expected one within 1 s (draft.session_idle_seconds), got nothing"
            assert await silent.details() == reason
            assert await asyncio.to_thread(scripted.closed.wait, 30)
            assert (await ask(stub.Propose(), open_request())).HasField("opened")
    line = next(line for line in lines if line["event"] == "session idle")
    assert (line["log_level"], line["idle_seconds"]) == ("warning", IDLE_SECONDS)


async def test_time_under_the_drafter_is_not_idle(scripted: ScriptedDrafter) -> None:
    async with serving(DraftSettings(session_idle_seconds=IDLE_SECONDS)) as stub:
        scripted.go_on.clear()
        stream = stub.Propose()
        # All that the peer says is said at once, so that only the draft takes its time.
        await stream.write(open_request(drafter="scripted"))
        await stream.write(propose_request())
        await stream.done_writing()
        assert await asyncio.to_thread(scripted.begun.wait, 30)
        await asyncio.sleep(1.2 * IDLE_SECONDS)
        scripted.go_on.set()
        assert (await stream.read()).HasField("opened")
        assert (await stream.read()).HasField("proposal")
        assert await stream.code() is grpc.StatusCode.OK
