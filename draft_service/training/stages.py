"""The bookkeeping of a run that may be killed at any moment: what each stage was made with, and whether it is done.

A stage owns a folder of OUTPUT with a `stage.json`. Nothing here knows what the stages do.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from draft_service.training.settings import TrainingError

RECORD = "stage.json"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` as a whole once the block is over.

    A reader, or a run after a kill, finds the old content or the new, nothing between.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_text(path: Path, text: str) -> None:
    """`replacing`, with a text."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Any) -> None:
    """`replacing`, with JSON."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Stage:
    """One stage's folder and record.

    Attributes:
        name: also the folder's.
        directory: OUTPUT / name.
        arguments: everything that its files depend on, the arguments of the stages before it included.
    """

    name: str
    directory: Path
    arguments: Mapping[str, Any]

    @property
    def results(self) -> dict[str, Any] | None:
        """What `finish` was told; None until then."""
        record = self._record()
        return None if record is None else record["results"]

    def begin(self) -> None:
        """Make the folder and note the arguments, unless a run before did."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._record() is None:
            self._write(None)

    def finish(self, results: Mapping[str, Any]) -> None:
        """Note that the stage's files are complete, and its figures."""
        self._write(dict(results))

    def check(self) -> None:
        """Refuse a folder that was made with other arguments.

        Raises:
            TrainingError: names the arguments.
        """
        record = self._record()
        if record is None:
            return
        made = record["arguments"]
        changed = [
            f"{flag} was {made.get(flag, 'not given')}, now {self.arguments.get(flag, 'not given')}"
            for flag in sorted({*made, *self.arguments})
            if made.get(flag) != self.arguments.get(flag)
        ]
        if changed:
            raise TrainingError(
                f"{self.directory} was made with other arguments: {'; '.join(changed)} (files are named by a digest of "
                f"their content). Ask as before, choose another --output, or delete this folder and those of the "
                "stages after it"
            )

    def _write(self, results: dict[str, Any] | None) -> None:
        write_json(self.directory / RECORD, {"arguments": dict(self.arguments), "results": results})

    def _record(self) -> dict[str, Any] | None:
        path = self.directory / RECORD
        if not path.is_file():
            return None
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return record


def open_stages(output: Path, arguments: Mapping[str, Mapping[str, Any]]) -> dict[str, Stage]:
    """The stages of a run in their order, each checked.

    Args:
        output: the run's folder.
        arguments: of each stage, in order, beyond those of the stages before it.

    Raises:
        TrainingError: a stage was made with other arguments.
    """
    stages: dict[str, Stage] = {}
    so_far: dict[str, Any] = {}
    for name, own in arguments.items():
        so_far.update(own)
        stages[name] = Stage(name, output / name, dict(so_far))
    for stage in stages.values():
        stage.check()
    return stages


@contextmanager
def only_run_in(output: Path) -> Iterator[None]:
    """Hold OUTPUT while the block runs.

    Raises:
        TrainingError: another process holds it.
    """
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the file, also by a crash
        except BlockingIOError:
            raise TrainingError(f"--output: another run is working in {output}") from None
        yield
