"""Each Dockerfile builds from files that exist and starts a console script as the user that the pod demands.

No container engine is assumed: the recipes are read, not run.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from eagle_pangu.serving.settings import Settings
from tests.deploy.test_manifests import container, pod

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

each_service = pytest.mark.parametrize("name", ["teacher", "draft", "orchestrator"])


def instructions(name: str) -> list[tuple[str, str]]:
    text = (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return [(instruction, " ".join(rest.split())) for instruction, _, rest in lines]


def final_stage(name: str) -> dict[str, str]:
    every = instructions(name)
    start = max(number for number, (instruction, _) in enumerate(every) if instruction == "FROM")
    return dict(every[start:])


@each_service
def test_what_is_copied_exists(name: str) -> None:
    copied = [rest.split()[:-1] for instruction, rest in instructions(name) if instruction == "COPY"]
    sources = {source for each in copied for source in each if not each[0].startswith("--from")}
    assert {"pyproject.toml", "constraints.txt", "protos", "eagle_pangu"} < sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


@each_service
def test_an_image_holds_its_own_service_only(name: str) -> None:
    copied = {rest for instruction, rest in instructions(name) if instruction == "COPY"}
    packages = {each.split()[0] for each in copied} & {"teacher_service", "draft_service", "orchestrator"}
    assert packages == {name if name == "orchestrator" else f"{name}_service"}


@each_service
def test_the_entry_point_is_a_console_script_on_the_port_of_the_settings(name: str) -> None:
    final = final_stage(name)
    [script] = json.loads(final["ENTRYPOINT"])
    assert script == f"eagle-pangu-{name}"
    assert script in PROJECT["scripts"]
    assert int(final["EXPOSE"]) == getattr(Settings(), name).port


@each_service
def test_the_image_runs_as_the_user_of_the_pod(name: str) -> None:
    user, group = final_stage(name)["USER"].split(":")
    security = pod(name)["securityContext"]
    assert (int(user), int(group)) == (security["runAsUser"], security["runAsGroup"])
    assert int(user) > 0
    assert container(name)["image"].startswith(f"eagle-pangu-{name}:")


@each_service
def test_only_the_services_with_a_model_install_torch(name: str) -> None:
    [install] = [rest for instruction, rest in instructions(name) if instruction == "RUN" and "pip install" in rest]
    assert "--constraint constraints.txt" in install
    assert ("[models]" in install) == (name != "orchestrator")
    assert not any(requirement.startswith("torch") for requirement in PROJECT["dependencies"])


@each_service
def test_build_and_final_stage_share_one_python(name: str) -> None:
    stages = [rest.split()[0] for instruction, rest in instructions(name) if instruction == "FROM"]
    assert stages == ["python:${PYTHON_VERSION}-slim"] * 2
