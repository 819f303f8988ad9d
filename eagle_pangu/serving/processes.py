"""One service as a process of this machine: launched, watched, drained.

A child names its port in a line on stdout; gRPC health says when it is ready; SIGTERM makes it drain, and so does the
end of its stdin, which is how it notices the death of this process. No service is imported here: each is known by the
name of its entry point.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from eagle_pangu.serving.bootstrap import LISTENING, SUPERVISED
from eagle_pangu.serving.configuration import CONFIG_VARIABLE, section_variables, to_toml
from eagle_pangu.serving.health import wait_until_serving
from eagle_pangu.serving.settings import SectionName, ServerSettings, Settings

Result = TypeVar("Result")

ENTRY_POINTS: dict[SectionName, str] = {
    "teacher": "teacher_service",
    "draft": "draft_service.main",
    "orchestrator": "orchestrator.main",
}
START_SECONDS = 300.0
KILL_SECONDS = 10.0  # past the drain time
TAIL_LINES = 20
# OpenMP threads spin this often between two parallel regions, then sleep. A forward pass is many short regions close
# after one another, and a spin of a few milliseconds spares the wake-ups between them: with a tenth of it a pass took
# 15 to 25 % longer on two cores of a virtual machine. A longer one would gain little more, and take the cores from
# whatever else runs on the machine, the other services first.
SPIN_COUNT = "100000"


class ProcessDiedError(Exception):
    """A service ended though nobody told it to; the message carries the end of its log."""


class ServiceProcess:
    """One service in a process of its own."""

    def __init__(self, name: SectionName, settings: ServerSettings, log: Path, process: asyncio.subprocess.Process):
        self.name = name
        self.target = ""
        self._settings = settings
        self._log = log
        self._process = process
        self._stdout: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    @classmethod
    async def launch(cls, name: SectionName, settings: Settings, directory: Path) -> ServiceProcess:
        """Start the process; its configuration and its log lie in `directory`."""
        config, log = directory / f"{name}.toml", directory / f"{name}.log"
        config.write_text(to_toml(settings), encoding="utf-8")
        own: ServerSettings = getattr(settings, name)
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", ENTRY_POINTS[name], "--config", str(config)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=_environment(getattr(own, "threads", 1)),
                start_new_session=True,  # Ctrl-C in the terminal is for us; we drain the children in order
            )
        return cls(name, own, log, process)

    async def listening(self) -> None:
        """Return once the port is bound and `target` is set.

        Raises:
            ProcessDiedError: it ended before.
        """
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            word, _, address = line.decode().strip().partition(" ")
            if word == LISTENING:
                host, _, port = address.rpartition(":")
                self.target = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
                self._stdout = asyncio.create_task(_discard(self._process.stdout))
                return
        await self.died()

    async def serving(self) -> None:
        """Return once gRPC health says so.

        Raises:
            ProcessDiedError: it ended before.
        """
        await self.unless_died(wait_until_serving(self.target, timeout_seconds=START_SECONDS, settings=self._settings))

    async def died(self) -> NoReturn:
        """Wait for the process to end, and raise ProcessDiedError."""
        code = await self._process.wait()
        raise ProcessDiedError(f"the {self.name} process ended with status {code}\n{_tail(self._log)}".rstrip())

    async def unless_died(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` to its end; cancel it and raise ProcessDiedError if the process ends first."""
        task, death = asyncio.ensure_future(work), asyncio.ensure_future(self.died())
        try:
            await asyncio.wait((task, death), return_when=asyncio.FIRST_COMPLETED)
            return await (death if death.done() else task)
        finally:
            for each in (task, death):
                each.cancel()
            await asyncio.gather(task, death, return_exceptions=True)

    async def stop(self) -> None:
        """SIGTERM, wait for the drain, SIGKILL if it takes too long."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._settings.drain_seconds + KILL_SECONDS):
                await self._process.wait()
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            if self._stdout is not None:
                await self._stdout


def _environment(threads: int) -> dict[str, str]:
    """This process's environment without what the configuration file says already."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != CONFIG_VARIABLE and not name.startswith(section_variables())
    }
    environment.update({SUPERVISED: "1", "HF_HUB_OFFLINE": "1"})
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if threads > 0:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


def _tail(log: Path) -> str:
    """The end of a log for a human: JSON lines as text, an exception with its own lines."""
    lines: list[str] = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]:
        try:
            entry = json.loads(line)
            rest = {key: value for key, value in entry.items() if key not in _TAIL_LEAVES_OUT}
            extra = " ".join(f"{key}={value}" for key, value in rest.items())
            lines += [f"{entry['level']}: {entry['event']} {extra}".rstrip(), *entry.get("exception", "").splitlines()]
        except (ValueError, KeyError, AttributeError):
            lines.append(line)
    return "\n".join(lines[-TAIL_LINES:])


_TAIL_LEAVES_OUT = {"event", "level", "exception", "timestamp", "service", "logger"}
