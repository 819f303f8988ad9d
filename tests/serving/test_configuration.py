"""One configuration from four sources; whatever is wrong names the field and the source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_pangu.serving.configuration import SettingsError, load_settings, to_toml
from eagle_pangu.serving.settings import DraftSettings, OrchestratorSettings, Settings, TeacherSettings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pangu.toml"
    path.write_text('[teacher]\ndtype = "float16"\nslots = 3\n[draft]\nslots = 5\n')
    return path


def test_each_source_wins_over_the_one_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().teacher.dtype == "auto"
    assert load_settings(["--config", str(file)]).teacher.dtype == "float16"
    monkeypatch.setenv("EAGLE_PANGU_TEACHER__DTYPE", "bfloat16")
    assert load_settings(["--config", str(file)]).teacher.dtype == "bfloat16"
    flags = ["--config", str(file), "--teacher.dtype", "float32"]
    settings = load_settings(flags)
    assert settings.teacher.dtype == "float32"
    assert (settings.teacher.slots, settings.draft.slots) == (3, 5)
    assert load_settings(flags, overrides={"teacher": {"dtype": "auto"}}).teacher.dtype == "auto"


def test_the_file_may_be_named_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_PANGU_CONFIG", str(file))
    assert load_settings().teacher.slots == 3


def test_the_flags_of_a_services_own_section_need_no_section_name() -> None:
    settings = load_settings(["--dtype", "float32", "--slot-capacity", "64", "--draft.slots", "2"], section="teacher")
    assert (settings.teacher.dtype, settings.teacher.slot_capacity, settings.draft.slots) == ("float32", 64, 2)


def test_values_are_read_as_the_type_of_their_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_PANGU_ORCHESTRATOR__REFLECTION", "false")
    monkeypatch.setenv("EAGLE_PANGU_ORCHESTRATOR__TRACE", "trace.jsonl")
    settings = load_settings(["--orchestrator.drain_seconds", "0.5"])
    assert settings.orchestrator.reflection is False
    assert settings.orchestrator.trace == Path("trace.jsonl")
    assert settings.orchestrator.drain_seconds == 0.5


def test_a_switch_may_be_named_alone() -> None:
    settings = load_settings(["--check-indices", "--draft.check_indices", "--slots", "2"], section="teacher")
    assert (settings.teacher.check_indices, settings.draft.check_indices, settings.teacher.slots) == (True, True, 2)
    assert load_settings(["--teacher.check-indices", "false"]).teacher.check_indices is False
    with pytest.raises(SettingsError, match=r"teacher\.slots: expected one argument"):
        load_settings(["--teacher.slots"])


@pytest.mark.parametrize(
    ("flags", "environment", "content", "said"),
    [
        (["--teacher.dtype", "int3"], {}, "", r"teacher\.dtype: .*'int3' \(from --teacher\.dtype\)"),
        (["--teacher.dtyp", "x"], {}, "", r"--teacher\.dtyp"),
        ([], {"EAGLE_PANGU_TEACHER__SLOTS": "0"}, "", r"teacher\.slots: .*\(from EAGLE_PANGU_TEACHER__SLOTS\)"),
        ([], {"EAGLE_PANGU_TEACHER__SLOT": "1"}, "", r"teacher\.slot: unknown name \(from EAGLE_PANGU_TEACHER__SLOT\)"),
        ([], {"EAGLE_PANGU_TEACHR__SLOTS": "1"}, "", r"EAGLE_PANGU_TEACHR__SLOTS: unknown environment variable"),
        ([], {}, "[draft]\nslots = 'many'", r"draft\.slots: .*'many' \(from file .*pangu\.toml\)"),
        ([], {}, "[draft]\nslotz = 1", r"draft\.slotz: unknown name \(from file .*pangu\.toml\)"),
        ([], {}, "[drafts]\nslots = 1", r"drafts: unknown name"),
        ([], {}, "draft = 1", r"draft: expected a section"),
        ([], {}, "[draft", r"config: .*pangu\.toml is not TOML"),
        (["--teacher.model", ""], {}, "", r"teacher\.model: expected the name of a pulled model or .*, got ''"),
        ([], {"EAGLE_PANGU_TEACHER__MODEL": ""}, "", r"teacher\.model: .*\(from EAGLE_PANGU_TEACHER__MODEL\)"),
        (["--draft.ngram_min", "5"], {}, "", r"draft\.ngram_min: expected at most ngram_max \(4\), got 5"),
        (
            ["--draft.drafter", "standalone"],
            {},
            "",
            r"draft\.model: .*, which the standalone drafter needs",
        ),
    ],
)
def test_an_unknown_name_or_a_bad_value_is_named(
    flags: list[str],
    environment: dict[str, str],
    content: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if content:
        path = tmp_path / "pangu.toml"
        path.write_text(content)
        flags = [*flags, "--config", str(path)]
    with pytest.raises(SettingsError, match=said):
        load_settings(flags)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SettingsError, match=r"config: no such file: nowhere\.toml"):
        load_settings(["--config", "nowhere.toml"])


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(SettingsError, match=r"teacher\.slots: .*; draft\.slots: ") as raised:
        load_settings(["--teacher.slots", "0", "--draft.slots", "0"])
    assert "\n" not in str(raised.value)


def test_settings_written_as_toml_are_read_back_the_same(tmp_path: Path) -> None:
    settings = Settings(
        teacher=TeacherSettings(model='a "quoted" \\ path/é', keepalive_seconds=0.25),
        draft=DraftSettings(drafter="standalone", model="m", reflection=False),
        orchestrator=OrchestratorSettings(trace=tmp_path / "t.jsonl"),
    )
    path = tmp_path / "written.toml"
    path.write_text(to_toml(settings))
    assert load_settings(["--config", str(path)]) == settings


def test_help_shows_every_field_with_its_meaning() -> None:
    code = "from eagle_pangu.serving.configuration import load_settings; load_settings(['--help'], section='draft')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    for section, fields in _fields().items():
        for field in fields:
            assert f"--{section}.{field}" in shown
    assert "--ngram-max" in shown


def _fields() -> dict[str, Any]:
    return {name: info.annotation.model_fields for name, info in Settings.model_fields.items()}  # type: ignore[union-attr]
