"""Runs that are killed anywhere and started again, and runs that must not go on."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft_service.training import answering, features, pipeline
from draft_service.training.settings import TrainingError, TrainingSettings
from tests.draft_service.training.toy import Quiet, toy_settings, toy_teacher, write_prompts

ROOT = Path(__file__).resolve().parents[3]
MADE = ("head/model.safetensors", "head/README.md", "head/config.json", "training/metrics.jsonl")


class KilledError(BaseException):
    """Not an Exception: nothing may handle it."""


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "BATCH", 6)
        patch.setattr(features, "FLUSH_EVERY", 4)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Teacher, prompts, and the output of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("run")
    pipeline.run(toy_settings(folder), Quiet())
    return folder


def again(folder: Path, output: Path, **changes: Any) -> TrainingSettings:
    return toy_settings(folder, output=output, **changes)


def assert_same(folder: Path, output: Path) -> None:
    for name in MADE:
        assert (output / name).read_bytes() == (folder / "output" / name).read_bytes(), name


class Mortal(Quiet):
    """Kills the run when it tells of a piece of work for the n-th time in a stage."""

    def __init__(self, stage: str, nth: int) -> None:
        super().__init__()
        self._stage, self._left = stage, nth

    def progress(self, done: int, total: int, what: str) -> None:
        super().progress(done, total, what)
        if self.stages[-1] == self._stage:
            self._left -= 1
            if self._left == 0:
                raise KilledError


@pytest.mark.parametrize(
    ("stage", "nth"),
    [
        ("answers", 1),
        ("answers", 3),
        ("features", 1),
        ("features", 7),
        ("training", 1),
        ("training", 5),
        ("training", 9),
    ],
)
def test_a_run_killed_in_a_stage_goes_on_to_the_same_head(folder: Path, tmp_path: Path, stage: str, nth: int) -> None:
    settings = again(folder, tmp_path)
    with pytest.raises(KilledError):
        pipeline.run(settings, Mortal(stage, nth))
    screen = Quiet()
    pipeline.run(settings, screen)
    assert_same(folder, tmp_path)
    before = ["answers", "vocabulary", "features", "training"]
    finished = [f"{name}: finished before" for name in before[: before.index(stage)]]
    assert [text.partition(",")[0] for text in screen.said if "finished before" in text] == finished
    if nth > 4:
        first = next(done for name, done, total in screen.told if name == stage)
        assert first > 0  # it did not start over


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_killed_around_every_file_it_replaces_goes_on_to_the_same_head(
    folder: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt gets one replacement further, or two: what is replaced together is made together."""
    replacements, last = 0, 3 if moment == "before" else 2

    def mortal_replace(path: Path, target: Path) -> Path:
        nonlocal replacements
        replacements += "head.partial" not in str(path)  # the export is made whole, or anew
        if replacements == last and moment == "before":
            raise KilledError
        path.rename(target)
        if replacements == last and moment == "after":
            raise KilledError
        return target

    monkeypatch.setattr(Path, "replace", mortal_replace)
    attempts = 0
    while True:
        attempts += 1
        assert attempts < 60
        replacements = 0
        try:
            pipeline.run(again(folder, tmp_path), Quiet())
        except KilledError:
            continue
        break
    assert attempts > 8
    assert_same(folder, tmp_path)


def test_what_a_kill_left_half_written_is_written_again(folder: Path, tmp_path: Path) -> None:
    settings = again(folder, tmp_path)
    with pytest.raises(KilledError):
        pipeline.run(settings, Mortal("training", 5))
    for path in (tmp_path / "training" / "checkpoint.pt.partial", tmp_path / "training" / "metrics.jsonl.partial"):
        path.write_bytes(b"half")
    (tmp_path / "head.partial").mkdir()
    (tmp_path / "head.partial" / "model.safetensors").write_bytes(b"half")
    pipeline.run(settings, Quiet())
    assert_same(folder, tmp_path)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_finished_run_does_nothing_but_export(folder: Path) -> None:
    screen = Quiet()
    pipeline.run(toy_settings(folder), screen)
    assert screen.told == []
    assert len([text for text in screen.said if "finished before" in text]) == 5


def test_sigkill_in_the_middle_of_training(folder: Path, tmp_path: Path) -> None:
    settings = again(folder, tmp_path)
    flags = {
        "teacher": settings.teacher,
        "answers": folder / "output" / "answers" / "answers.jsonl",
        "output": tmp_path / "killed",
        "draft-vocab": settings.draft_vocab,
        "steps-ahead": settings.steps_ahead,
        "epochs": 4,
        "first-step-epochs": 1,
        "batch-tokens": settings.batch_tokens,
        "checkpoint-every": 1,
        "dtype": "float32",
        "threads": 1,
    }
    command = [sys.executable, "-m", "eagle_pangu.cli.main", "train-draft"]
    command += [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "killed" / "training" / "checkpoint.pt").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()  # the trainer itself: the command has become it
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "head").exists()
    given = {"prompts": None, "answers": flags["answers"], "epochs": 4, "first_step_epochs": 1}
    pipeline.run(again(folder, tmp_path / "killed", **given), Quiet())
    pipeline.run(again(folder, tmp_path / "whole", **given), Quiet())
    for name in MADE:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# What is refused.


@pytest.mark.parametrize(
    ("change", "stage", "said"),
    [
        ({"max_new_tokens": 13}, "answers", "--max-new-tokens was 12, now 13"),
        ({"seed": 1}, "answers", "--seed was 0, now 1"),
        ({"dtype": "bfloat16"}, "answers", "--dtype was float32, now bfloat16"),
        ({"draft_vocab": 65}, "vocabulary", "--draft-vocab was 64, now 65"),
        ({"max_tokens": 5000}, "vocabulary", "--max-tokens was 1000000, now 5000"),
        ({"steps_ahead": 2}, "training", "--steps-ahead was 3, now 2"),
        ({"epochs": 3, "lr": 0.5}, "training", "--epochs was 2, now 3; --lr was 0.001, now 0.5"),
        ({"batch_tokens": 64}, "training", "--batch-tokens was 128, now 64"),
        ({"feature_norm": "none"}, "training", "--feature-norm was each, now none"),
        ({"autocast": True}, "training", "--autocast was False, now True"),
    ],
)
def test_a_change_that_matters_is_refused_by_name_before_any_work(
    folder: Path, change: dict[str, Any], stage: str, said: str
) -> None:
    screen = Quiet()
    with pytest.raises(TrainingError, match=rf"output/{stage} was made with other arguments: {said}") as refused:
        pipeline.run(toy_settings(folder, **change), screen)
    assert "delete this folder and those of the stages after it" in str(refused.value)
    assert screen.stages == []


def test_a_change_that_does_not_matter_is_not_refused(folder: Path) -> None:
    pipeline.run(toy_settings(folder, threads=1, checkpoint_every=7), Quiet())


def test_files_are_known_by_their_content(folder: Path, tmp_path: Path) -> None:
    settings = toy_settings(folder)
    copy = tmp_path / "copy.jsonl"
    assert settings.prompts is not None
    copy.write_bytes(settings.prompts.read_bytes())
    pipeline.run(replace(settings, prompts=copy), Quiet())
    write_prompts(copy, 17)
    with pytest.raises(TrainingError, match=r"--prompts was \w{16}, now \w{16}"):
        pipeline.run(replace(settings, prompts=copy), Quiet())
    with pytest.raises(TrainingError, match=r"--teacher was \w{16}, now \w{16}"):
        pipeline.run(replace(settings, teacher=toy_teacher(tmp_path / "other", max_position_embeddings=511)), Quiet())
    answers = folder / "output" / "answers" / "answers.jsonl"
    with pytest.raises(TrainingError, match="--answers was not given, now"):
        pipeline.run(replace(settings, prompts=None, answers=answers), Quiet())


def test_a_later_stage_can_be_made_anew_on_the_work_of_the_earlier_ones(folder: Path, tmp_path: Path) -> None:
    settings = again(folder, tmp_path)
    pipeline.run(settings, Quiet())
    for stage in ("training", "rehearsal"):
        shutil.rmtree(tmp_path / stage)
    screen = Quiet()
    pipeline.run(replace(settings, lr=0.5), screen)
    assert {stage for stage, _, _ in screen.told} - {"rehearsal"} == {"training"}
    assert "learning rate 0.5" in (tmp_path / "head" / "README.md").read_text()


@pytest.mark.parametrize(
    ("lost", "stage", "said"),
    [
        ("features/features.bin", "training", "features.bin: expected a file of"),
        ("features/features.bin", "features", "features.bin: expected a file of"),
        ("answers/answers.jsonl", "training", "answers.jsonl: cannot be read"),
    ],
)
def test_work_that_was_lost_is_named(folder: Path, tmp_path: Path, lost: str, stage: str, said: str) -> None:
    with pytest.raises(KilledError):
        pipeline.run(again(folder, tmp_path), Mortal(stage, 7))
    (tmp_path / lost).unlink()
    with pytest.raises(TrainingError, match=said):
        pipeline.run(again(folder, tmp_path), Quiet())


def test_two_runs_in_one_folder_do_not_mix(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match="--output: another run is working in"):
            pipeline.run(again(folder, tmp_path), Quiet())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answers": Path("a")}, "either --prompts or --answers"),
        ({"prompts": None}, "either --prompts or --answers"),
        ({"epochs": 0}, "--epochs: expected at least 1, got 0"),
        ({"lr": 0.0}, "--lr: expected more than 0, got 0.0"),
        ({"feature_norm": "some"}, "--feature-norm: expected none or each, got some"),
        ({"dtype": "int8"}, "--dtype: expected one of auto, float32"),
        ({"device": "tpu"}, "--device: device: expected one of cpu"),
        ({"draft_vocab": 1000}, "--draft-vocab: expected at most 260"),
        ({"draft_vocab": 1}, "--draft-vocab: expected at least 2"),
        ({"max_tokens": 50}, "--max-tokens: expected room for two conversations"),
        ({"prompts": Path("nowhere")}, "nowhere: cannot be read"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        pipeline.run(toy_settings(tmp_path, **change), Quiet())


def test_the_command_names_what_is_wrong_in_a_line() -> None:
    command = [sys.executable, "-m", "eagle_pangu.cli.main", "train-draft", "--teacher", "nowhere", "--output", "x"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: 'nowhere' is neither a directory")
    assert "Traceback" not in result.stderr
