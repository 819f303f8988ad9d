"""The teacher as an operator meets it: a process with a port, health, signals and exit codes."""

import asyncio
import signal
import sys
from collections.abc import Sequence

from eagle_pangu.serving.channels import channel
from eagle_pangu.serving.health import is_serving
from eagle_pangu.serving.settings import ServerSettings
from eagle_pangu.speculation.tree import TokenTree
from protos.v1 import teacher_pb2, teacher_pb2_grpc
from tests.models import tiny_llama
from tests.teacher_service.peer import PeerSession

NAME = "eagle_pangu.v1.TeacherService"


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "teacher_service",
        *flags,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def flags(model: str) -> Sequence[str]:
    return ["--model", model, "--port", "0", "--dtype", "float32", "--numerics", "free", "--slot-capacity", "128"]


async def test_it_names_its_port_serves_and_on_sigterm_lets_the_running_session_finish(tmp_path):
    process = await start(*flags(str(tiny_llama(tmp_path))))
    try:
        target = (await process.stdout.readline()).decode().removeprefix("listening ").strip()
        await process_says(process, '"serving"')
        async with channel(target, ServerSettings()) as connection:
            assert await is_serving(connection, NAME)
            stub = teacher_pb2_grpc.TeacherServiceStub(connection)
            fingerprint = (await stub.GetModel(teacher_pb2.GetModelRequest())).fingerprint
            session = PeerSession(stub, fingerprint)
            first = (await session.open([1, 2, 3], max_new_tokens=8)).next_token_id
            process.send_signal(signal.SIGTERM)
            await process_says(process, '"draining"')
            assert not await is_serving(connection, NAME)
            verdict = await session.verdict(1, 3, 0, TokenTree.root_only(first))
            await session.verdict(2, 4, 0, TokenTree.root_only(verdict.next_token_id))
            await session.close()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def process_says(process: asyncio.subprocess.Process, word: str) -> None:
    """Return once a line of its log holds `word`."""
    log = []
    while not log or word not in log[-1]:
        log.append((await process.stderr.readline()).decode())
        assert log[-1], "the process ended; its log was: " + "".join(log)
