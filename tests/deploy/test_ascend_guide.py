"""Every command of the guide exists, with the flags that it names; every file too."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from eagle_pangu.cli.main import app
from eagle_pangu.serving.configuration import load_settings
from eagle_pangu.serving.settings import SERVICES
from tests.deploy.test_manifests import FOLDER

GUIDE = (FOLDER / "ascend.md").read_text()
ENTRY_POINTS = {f"eagle-pangu-{name}": name for name in SERVICES}
IMAGE = re.compile(r"eagle-pangu-(teacher|draft|orchestrator)(-ascend)?:\S+")


def commands() -> list[list[str]]:
    """Words of each of our commands in the code blocks, those inside containers included."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and "=" in words[0]:
                words.pop(0)  # environment
            if words[:2] == ["docker", "run"]:
                words = inside_container(words)
            if words and words[0].startswith("eagle-pangu"):
                found.append(words)
    return found


def inside_container(words: list[str]) -> list[str]:
    [place] = [index for index, word in enumerate(words) if IMAGE.fullmatch(word)]
    entry_point = [f"eagle-pangu-{IMAGE.fullmatch(words[place])[1]}"]  # type: ignore[index]
    if "--entrypoint" in words:
        entry_point = [words[words.index("--entrypoint") + 1]]
    return [word for word in [*entry_point, *words[place + 1 :]] if word != "with-cann"]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_guide_exists(words: list[str]) -> None:
    program, *arguments = words
    if program in ENTRY_POINTS:
        load_settings(arguments, section=ENTRY_POINTS[program])
        return
    assert program == "eagle-pangu"
    command = typer.main.get_command(app)
    context = command.make_context("eagle-pangu", arguments)
    name, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
    inner_context = inner.make_context(name, rest, parent=context)
    if inner.ignore_unknown_options:
        load_settings(inner_context.args)
    elif hasattr(inner, "resolve_command"):
        name, inner, rest = inner.resolve_command(inner_context, [*inner_context._protected_args, *inner_context.args])
        inner.make_context(name, rest, parent=inner_context)


def test_commands_of_every_kind_are_found() -> None:
    programs = {words[0] for words in commands()}
    assert programs == {"eagle-pangu", *ENTRY_POINTS}
    assert ["eagle-pangu-draft", "--device", "npu", "--drafter", "hybrid"] in commands()
    assert len(commands()) > 15


def test_files_that_the_guide_names_are_there() -> None:
    named = re.findall(r"\b(?:deploy|tests|protos)/[\w./-]*\w", GUIDE)
    assert named
    assert [name for name in named if not (Path(FOLDER).parent / name).exists()] == []
