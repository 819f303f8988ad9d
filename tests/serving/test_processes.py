"""A trio of child processes, with small programs in place of the services."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import grpc.aio
import pytest

from eagle_pangu.serving import processes
from eagle_pangu.serving.configuration import SettingsError
from eagle_pangu.serving.health import wait_until_serving
from eagle_pangu.serving.processes import ProcessDiedError
from eagle_pangu.serving.settings import OrchestratorSettings, SectionName, ServerSettings, Settings, TeacherSettings
from eagle_pangu.serving.trio import State, running_trio

SETTINGS = Settings(orchestrator=OrchestratorSettings(port=0))


@pytest.fixture(autouse=True)
def _echo_for_every_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processes.ENTRY_POINTS:
        monkeypatch.setitem(processes.ENTRY_POINTS, name, "tests.serving.echo_service")


async def test_a_trio_serves_each_on_its_own_port_and_leaves_nothing_behind(tmp_path: Path) -> None:
    seen: list[tuple[SectionName, State]] = []
    async with running_trio(SETTINGS, log_directory=tmp_path, on_state=lambda *state: seen.append(state)) as trio:
        children = (trio.teacher, trio.draft, trio.orchestrator)
        assert len({child.target for child in children}) == 3
        for child in children:
            await wait_until_serving(child.target, timeout_seconds=1)
        assert trio.target == trio.orchestrator.target
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
    assert [name for name, state in seen if state == "stopped"] == ["orchestrator", "draft", "teacher"]
    assert seen.index(("teacher", "serving")) < seen.index(("orchestrator", "stopped"))
    assert f'teacher = "{trio.teacher.target}"' in (tmp_path / "orchestrator.toml").read_text()


async def test_a_child_that_cannot_start_is_reported_with_the_reason() -> None:
    settings = SETTINGS.model_copy(update={"teacher": TeacherSettings(model="refuse")})
    with pytest.raises(ProcessDiedError, match=r"the \w+ process ended with status 1") as raised:
        async with running_trio(settings):
            pass
    assert "teacher.model: refused by the test" in str(raised.value)


@pytest.mark.parametrize("name", ["teacher", "draft", "orchestrator"])
async def test_a_port_in_use_is_named_before_anything_is_launched(name: SectionName) -> None:
    seen: list[tuple[SectionName, State]] = []
    other = grpc.aio.server()  # with gRPC's own default: ready to share its port
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    own: ServerSettings = getattr(SETTINGS, name)
    settings = SETTINGS.model_copy(update={name: own.model_copy(update={"port": port})})
    try:
        with pytest.raises(SettingsError, match=rf"^{name}\.port: the address 127\.0\.0\.1:{port} is in use"):
            async with running_trio(settings, on_state=lambda *state: seen.append(state)):
                pass
    finally:
        await other.stop(None)
    assert seen == []


async def test_two_services_on_one_port_are_refused_before_anything_is_launched(unused_tcp_port: int) -> None:
    settings = Settings(
        teacher=TeacherSettings(port=unused_tcp_port), orchestrator=OrchestratorSettings(port=unused_tcp_port)
    )
    with pytest.raises(SettingsError, match=r"^orchestrator\.port: "):
        async with running_trio(settings):
            pass


async def test_a_port_found_free_is_left_free_for_the_service(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(processes.ENTRY_POINTS, "orchestrator", "tests.cli.fake_orchestrator")
    settings = Settings(orchestrator=OrchestratorSettings(port=unused_tcp_port, host="0.0.0.0"))
    async with running_trio(settings) as trio:
        assert trio.target == f"127.0.0.1:{unused_tcp_port}"


async def test_a_child_that_dies_later_is_reported_and_the_others_are_stopped() -> None:
    async with running_trio(SETTINGS) as trio:
        os.kill(trio.teacher.pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match="the teacher process ended with status -9"):
            await asyncio.wait_for(trio.died(), timeout=20)
    with pytest.raises(ProcessLookupError):
        os.kill(trio.draft.pid, 0)


async def test_work_goes_on_unless_a_process_dies_and_is_cancelled_when_one_does() -> None:
    cancelled = asyncio.Event()

    async def wait_for_nothing() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    async with running_trio(SETTINGS) as trio:
        assert await trio.unless_died(answer()) == 7
        waiting = asyncio.create_task(trio.unless_died(wait_for_nothing()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        os.kill(trio.orchestrator.pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match="the orchestrator process ended with status -9"):
            await asyncio.wait_for(waiting, timeout=20)
        assert cancelled.is_set()


async def test_a_dead_draft_is_reported_and_does_not_end_the_rest() -> None:
    async with running_trio(SETTINGS) as trio:
        os.kill(trio.draft.pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match="the draft process ended with status -9"):
            await trio.draft.died()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(trio.died(), timeout=0.2)


async def test_cancelling_the_parent_drains_the_children(tmp_path: Path) -> None:
    running = asyncio.Event()

    async def hold() -> None:
        async with running_trio(SETTINGS, log_directory=tmp_path):
            running.set()
            await asyncio.Event().wait()

    parent = asyncio.create_task(hold())
    await running.wait()
    parent.cancel()
    with pytest.raises(asyncio.CancelledError):
        await parent
    for name in processes.ENTRY_POINTS:
        last = (tmp_path / f"{name}.log").read_text().splitlines()[-1]
        assert json.loads(last)["event"] == "stopped"
